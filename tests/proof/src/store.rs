//! The store: every prompt's state in memory, up to a few; its index goes with every plan.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{
    RequestFacts, SaveFacts, SaveKind, Section, Sequences as _, SequencesObject, Store, StoreOffer,
};
use plugfold_abi::{Addressing, List, OpError, Slice, TextBuf};

use crate::part::{Record, Told};

/// Entries that it holds.
const MOST: usize = 4;

/// A kept state.
struct Entry {
    ticket: u64,
    ids: Vec<u32>,
    tag: u64,
    rows: Vec<(u32, List<u8>)>,
    state: List<u8>,
    parts: List<u8>,
}

#[derive(Default)]
struct Inner {
    entries: Vec<Entry>,
    next: u64,
}

/// The store of one rank.
pub struct Memory {
    told: Arc<Told>,
    /// Planted: its index is another than the other ranks'.
    drifts: bool,
    inner: Mutex<Inner>,
}

impl Memory {
    /// An empty one.
    pub fn new(told: Arc<Told>, drifts: bool) -> Self {
        Self { told, drifts, inner: Mutex::default() }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number over everything that must be equal on all ranks.
    fn index(&self) -> u64 {
        let inner = self.inner();
        let words = inner.entries.iter().flat_map(|e| [e.ticket, Record::of(&e.ids).hash]);
        let index = words.fold(7, |h: u64, w| (h ^ w).wrapping_mul(0x0000_0100_0000_01b3));
        index ^ u64::from(self.drifts && !inner.entries.is_empty())
    }
}

impl Store for Memory {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("proof".into())
    }
    fn offer(&self, request: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        let inner = self.inner();
        let fits = |e: &&Entry| {
            e.tag == request.tag && e.ids.len() < request.ids.len() && request.ids.starts_with(&e.ids)
        };
        let best = inner.entries.iter().filter(fits).max_by_key(|e| e.ids.len());
        let offer = |e: &Entry| StoreOffer {
            store: 0,
            ticket: e.ticket,
            length: e.ids.len() as u32,
            price_ms: 0.0,
            slot: u32::MAX,
        };
        Ok(best.map(offer).into_iter().collect())
    }
    fn decide(&self, save: &SaveFacts<'_>, _: &SequencesObject) -> Result<List<u8>, OpError> {
        let inner = self.inner();
        let known = inner.entries.iter().any(|e| e.tag == save.tag && e.ids == save.ids.get_ref());
        let keeps = save.kind == SaveKind::Prompt && !known;
        Ok(if keeps { (inner.next + 1).to_le_bytes().to_vec().into() } else { List::new() })
    }
    fn save(
        &self,
        save: &SaveFacts<'_>,
        decision: Slice<'_, u8>,
        sequences: &SequencesObject,
    ) -> Result<(), OpError> {
        let ticket = decision.get_ref().try_into().map(u64::from_le_bytes);
        let ticket = ticket.map_err(|_| OpError::new("a decision that cannot be read"))?;
        let mut rows = Vec::new();
        for (i, info) in sequences.families()?.iter().enumerate() {
            if info.family.addressing != Addressing::State {
                let count = save.ids.len() as u32 / info.family.positions_a_row;
                let mut bytes = List::new();
                sequences.gather(save.slot, i as u32, 0, count, &mut bytes)?;
                rows.push((i as u32, bytes));
            }
        }
        let (mut state, mut parts) = (List::new(), List::new());
        sequences.state(save.slot, &mut state)?;
        sequences.parts(save.slot, &mut parts)?;
        let mut inner = self.inner();
        inner.next = ticket;
        if inner.entries.len() == MOST {
            inner.entries.remove(0);
        }
        let (ids, tag) = (save.ids.to_vec(), save.tag);
        inner.entries.push(Entry { ticket, ids, tag, rows, state, parts });
        Ok(())
    }
    fn resume(&self, ticket: u64, slot: u32, sequences: &SequencesObject) -> Result<bool, OpError> {
        let inner = self.inner();
        let Some(entry) = inner.entries.iter().find(|e| e.ticket == ticket) else { return Ok(false) };
        for (family, bytes) in &entry.rows {
            sequences.scatter(slot, *family, 0, Slice::from(&bytes[..]))?;
        }
        let ids = Slice::from(&entry.ids[..]);
        sequences.resume(slot, ids, Slice::from(&entry.state[..]), Slice::from(&entry.parts[..]))?;
        let (got, want) = (self.told.record(slot), Record::of(&entry.ids));
        if got != want {
            return Err(OpError::new(format!("the part has {got:?} where the state is {want:?}")));
        }
        Ok(true)
    }
    fn digest(&self) -> Result<u64, OpError> {
        Ok(0)
    }
}

/// The index, compared with every plan.
pub struct Index(pub Arc<Memory>);

impl Section for Index {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("proof".into())
    }
    fn write(&self, _: u64) -> Result<List<u8>, OpError> {
        Ok(self.0.index().to_le_bytes().to_vec().into())
    }
    fn read(&self, round: u64, bytes: Slice<'_, u8>) -> Result<(), OpError> {
        if bytes.get_ref() == self.0.index().to_le_bytes() {
            return Ok(());
        }
        Err(OpError::new(format!("round {round}: the store's index differs from rank 0's")))
    }
}

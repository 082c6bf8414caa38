//! Stores of a chain, thin: entries in memory with a bound, and beneath them what those push out.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{
    RequestFacts, SaveFacts, SaveKind, Section, Sequences, SequencesObject, Store, StoreOffer,
};
use plugfold_abi::{Addressing, List, OpError, Slice, TextBuf};

/// A kept state.
#[derive(Clone)]
struct Entry {
    id: u64,
    ids: Vec<u32>,
    tag: u64,
    reason: String,
    rows: Vec<(u32, Vec<u8>)>,
    state: Vec<u8>,
    parts: Vec<u8>,
}

/// What a keeper was told to keep, for tests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    /// Length.
    pub length: usize,
    /// Whether a mark asked for it.
    pub marked: bool,
    /// The mark's reason.
    pub reason: String,
}

#[derive(Default)]
struct Inner {
    entries: Vec<Entry>,
    next: u64,
    log: Vec<Kept>,
    resumed: Vec<usize>,
}

/// A store of one rank.
pub struct Keeper {
    name: &'static str,
    /// Most entries; 0 keeps nothing of its own, only what another pushes out.
    most: usize,
    inner: Mutex<Inner>,
    /// Takes what is pushed out.
    beneath: Option<Arc<Keeper>>,
    /// Reads that fail from now on, planted.
    pub fails: AtomicU64,
}

impl Keeper {
    /// A store that holds `most` entries.
    pub fn new(name: &'static str, most: usize, beneath: Option<Arc<Keeper>>) -> Arc<Self> {
        Arc::new(Self { name, most, inner: Mutex::default(), beneath, fails: AtomicU64::default() })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Everything that it was told to keep, in order.
    pub fn log(&self) -> Vec<Kept> {
        self.inner().log.clone()
    }

    /// Lengths of the entries that are there.
    pub fn lengths(&self) -> Vec<usize> {
        self.inner().entries.iter().map(|e| e.ids.len()).collect()
    }

    /// Lengths of what was resumed from it.
    pub fn resumed(&self) -> Vec<usize> {
        self.inner().resumed.clone()
    }

    /// Loses an entry on this rank alone, planted.
    pub fn lose(&self) {
        self.inner().entries.pop();
    }

    fn index(&self) -> u64 {
        let inner = self.inner();
        let words = inner.entries.iter().flat_map(|e| [e.id, e.ids.len() as u64]);
        words.fold(7, |h: u64, w| (h ^ w).wrapping_mul(0x0000_0100_0000_01b3))
    }
}

impl Store for Keeper {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(self.name.into())
    }

    fn offer(&self, request: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        let ids = request.ids.get_ref();
        let inner = self.inner();
        let fits = |e: &&Entry| e.tag == request.tag && e.ids.len() < ids.len() && ids.starts_with(&e.ids);
        let best = inner.entries.iter().filter(fits).max_by_key(|e| e.ids.len());
        let offer = |e: &Entry| StoreOffer {
            store: 0,
            ticket: e.id,
            length: e.ids.len() as u32,
            price_ms: 1.0,
            slot: u32::MAX,
        };
        Ok(best.map(offer).into_iter().collect())
    }

    fn decide(&self, save: &SaveFacts<'_>, _: &SequencesObject) -> Result<List<u8>, OpError> {
        let mut inner = self.inner();
        let known = inner.entries.iter().any(|e| e.tag == save.tag && e.ids == save.ids.get_ref());
        if self.most == 0 || known || save.kind == SaveKind::Reply {
            return Ok(List::new());
        }
        inner.next += 1;
        let id = inner.next;
        // Prefixes that several prompts share go last.
        let full = inner.entries.len() >= self.most;
        let shared = |e: &&Entry| e.reason == "prefix";
        let out = inner.entries.iter().find(|e| !shared(e)).or(inner.entries.first()).filter(|_| full);
        let out = out.map_or(0, |e| e.id);
        Ok([id.to_le_bytes(), out.to_le_bytes()].concat().into())
    }

    fn save(
        &self,
        save: &SaveFacts<'_>,
        decision: Slice<'_, u8>,
        sequences: &SequencesObject,
    ) -> Result<(), OpError> {
        let word = |at: usize| {
            let bytes = decision.get_ref().get(at..at + 8).and_then(|b| b.try_into().ok());
            bytes.map(u64::from_le_bytes).ok_or_else(|| OpError::new("a decision that cannot be read"))
        };
        let (id, out) = (word(0)?, word(8)?);
        let length = save.ids.len() as u32;
        let mut rows = Vec::new();
        for (i, info) in sequences.families()?.iter().enumerate() {
            if info.family.addressing != Addressing::State {
                let mut bytes = List::new();
                sequences.gather(save.slot, i as u32, 0, length / info.family.positions_a_row, &mut bytes)?;
                rows.push((i as u32, bytes.into()));
            }
        }
        let (mut state, mut parts) = (List::new(), List::new());
        sequences.state(save.slot, &mut state)?;
        sequences.parts(save.slot, &mut parts)?;
        let mut inner = self.inner();
        inner.log.push(Kept {
            length: length as usize,
            marked: save.kind == SaveKind::Mark,
            reason: save.reason.get_str().to_owned(),
        });
        if let Some(at) = inner.entries.iter().position(|e| e.id == out) {
            let entry = inner.entries.remove(at);
            if let Some(beneath) = &self.beneath {
                beneath.inner().entries.push(entry);
            }
        }
        inner.next = id;
        inner.entries.push(Entry {
            id,
            ids: save.ids.to_vec(),
            tag: save.tag,
            reason: save.reason.get_str().to_owned(),
            rows,
            state: state.into(),
            parts: parts.into(),
        });
        Ok(())
    }

    fn resume(&self, ticket: u64, slot: u32, sequences: &SequencesObject) -> Result<bool, OpError> {
        if self.fails.load(Ordering::SeqCst) > 0 {
            return Err(OpError::new("a read that fails"));
        }
        let entry = self.inner().entries.iter().find(|e| e.id == ticket).cloned();
        let Some(entry) = entry else { return Ok(false) };
        for (family, bytes) in &entry.rows {
            sequences.scatter(slot, *family, 0, Slice::from(&bytes[..]))?;
        }
        let (ids, state) = (Slice::from(&entry.ids[..]), Slice::from(&entry.state[..]));
        sequences.resume(slot, ids, state, Slice::from(&entry.parts[..]))?;
        self.inner().resumed.push(entry.ids.len());
        Ok(true)
    }

    fn digest(&self) -> Result<u64, OpError> {
        // The index is compared with every plan, by the section.
        Ok(if self.beneath.is_some() { self.index() } else { 0 })
    }
}

/// The index of a store, compared with every plan.
pub struct Index(pub Arc<Keeper>);

impl Section for Index {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("disk".into())
    }
    fn write(&self, _: u64) -> Result<List<u8>, OpError> {
        let empty = self.0.lengths().is_empty();
        Ok(if empty { List::new() } else { List::from(self.0.index().to_le_bytes().to_vec()) })
    }
    fn read(&self, round: u64, bytes: Slice<'_, u8>) -> Result<(), OpError> {
        let mine = self.0.index().to_le_bytes();
        if bytes.get_ref() == mine {
            return Ok(());
        }
        Err(OpError::new(format!("round {round}: the index of {} differs from rank 0's", self.0.name)))
    }
}

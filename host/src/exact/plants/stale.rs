//! A store that keeps the first state it sees and gives it back for everything.

use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{
    RequestFacts, SaveFacts, Sequences, SequencesObject, Store, StoreObject, StoreOffer,
};
use plugfold_abi::{List, OpError, Slice, TextBuf};

#[derive(Default)]
struct Memory {
    first: Option<Vec<u8>>,
    last: Vec<u32>,
    rows: Vec<(u32, Vec<u8>)>,
}

struct Stale(Mutex<Memory>);

pub(super) fn store() -> StoreObject {
    StoreObject::new(Stale(Mutex::default()))
}

impl Stale {
    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for Stale {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("stale".into())
    }
    fn offer(&self, request: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        let memory = self.memory();
        let length = memory.last.len();
        let fits = length > 0 && length < request.ids.len() && request.ids.starts_with(&memory.last);
        let offer = StoreOffer { store: 0, ticket: 1, length: length as u32, price_ms: 0.0, slot: u32::MAX };
        Ok(if fits { List::from(vec![offer]) } else { List::new() })
    }
    fn decide(&self, _: &SaveFacts<'_>, _: &SequencesObject) -> Result<List<u8>, OpError> {
        Ok(List::from(vec![1]))
    }
    fn save(
        &self,
        save: &SaveFacts<'_>,
        _: Slice<'_, u8>,
        sequences: &SequencesObject,
    ) -> Result<(), OpError> {
        let mut state = List::new();
        sequences.state(save.slot, &mut state)?;
        let mut memory = self.memory();
        memory.first.get_or_insert_with(|| state.into());
        // Slot 1 is where gates try what is resumed.
        if save.slot == 0 {
            memory.last = save.ids.to_vec();
            memory.rows.clear();
            for (i, info) in sequences.families()?.iter().enumerate() {
                let rows = (save.ids.len() as u32).checked_div(info.family.positions_a_row);
                if let Some(rows) = rows {
                    let mut bytes = List::new();
                    sequences.gather(save.slot, i as u32, 0, rows, &mut bytes)?;
                    memory.rows.push((i as u32, bytes.into()));
                }
            }
        }
        Ok(())
    }
    fn resume(&self, _: u64, slot: u32, sequences: &SequencesObject) -> Result<bool, OpError> {
        let memory = self.memory();
        for (family, bytes) in &memory.rows {
            sequences.scatter(slot, *family, 0, Slice::from(&bytes[..]))?;
        }
        let state = memory.first.clone().unwrap_or_default();
        sequences.resume(
            slot,
            Slice::from(&memory.last[..]),
            Slice::from(&state[..]),
            Slice::from(&[][..]),
        )?;
        Ok(true)
    }
}

//! Whole committed states, as a store sees them: recurrent state, every cache row, rows of the draft layer.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use plugfold_abi::points::{
    DraftRows, Owner, RequestFacts, SaveFacts, SaveKind, Sequences, SequencesObject, Store, StoreObject,
    StoreOffer,
};
use plugfold_abi::{Addressing, List, OpError, Slice, TextBuf};
use plugfold_engine::hooks::Hooks;

/// The state of a sequence at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Recurrent state and all rows of the model's families.
    pub model: Vec<u8>,
    /// Rows of the draft layer that follow from the ids, and how many.
    pub draft: (u32, Vec<u8>),
}

/// States by the ids that they are of, after prompts (`false`) and replies (`true`).
#[derive(Clone, Debug, Default)]
pub struct States(Arc<Mutex<Noted>>);

type Noted = BTreeMap<(bool, Vec<u32>), State>;

impl States {
    /// Notes the states of an engine with these hooks.
    ///
    /// # Panics
    /// Never: a store is a hook that is known.
    pub fn of(hooks: &mut Hooks) -> Self {
        let states = Self::default();
        hooks.add_object("states", StoreObject::new(Notes(states.clone()))).unwrap_or_else(|e| panic!("{e}"));
        states
    }

    /// Those that were seen, and forgets them.
    pub fn take(&self) -> BTreeMap<(bool, Vec<u32>), State> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A store that keeps nothing and notes everything.
struct Notes(States);

impl Store for Notes {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("states".into())
    }
    fn offer(&self, _: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        Ok(List::new())
    }
    fn decide(&self, save: &SaveFacts<'_>, sequences: &SequencesObject) -> Result<List<u8>, OpError> {
        let (mut model, mut draft) = (List::new(), List::new());
        sequences.state(save.slot, &mut model)?;
        let good = match sequences.draft_rows(save.slot)? {
            DraftRows::Good(rows) => rows,
            DraftRows::Silent | DraftRows::Broken => 0,
        };
        for (i, info) in sequences.families()?.iter().enumerate() {
            let f = &info.family;
            let (positions, out) = match f.owner {
                Owner::Model => (save.ids.len() as u32, &mut model),
                Owner::Mtp => (good, &mut draft),
                Owner::Drafter => continue,
            };
            if f.addressing == Addressing::Linear {
                sequences.gather(save.slot, i as u32, 0, positions / f.positions_a_row, out)?;
            }
        }
        if save.kind != SaveKind::Mark {
            let state = State { model: model.into(), draft: (good, draft.into()) };
            let key = (save.kind == SaveKind::Reply, save.ids.to_vec());
            self.0.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key, state);
        }
        Ok(List::new())
    }
    fn save(&self, _: &SaveFacts<'_>, _: Slice<'_, u8>, _: &SequencesObject) -> Result<(), OpError> {
        Ok(())
    }
    fn resume(&self, _: u64, _: u32, _: &SequencesObject) -> Result<bool, OpError> {
        Ok(false)
    }
}

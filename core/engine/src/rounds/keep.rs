//! Snapshots that outlive their request: in their slot, and in stores.

use plugfold_abi::points::{
    SaveFacts, SaveKind, SequenceEvent, SequencesObject, Store, StoreObject, interest,
};
use plugfold_abi::{Slice, Text};

use super::{RoundError, Rounds};
use crate::core::{Core, SequencesOf};
use crate::ranks::World;
use crate::state::Snapshot;

/// Snapshots that a slot keeps at most: of its last prompt and of its last reply.
const KEPT: usize = 2;

/// A snapshot that a slot keeps.
#[derive(Clone, Debug)]
pub struct Kept {
    /// The snapshot.
    pub snapshot: Snapshot,
}

impl Kept {
    /// How many tokens of a prompt it resumes: it must be a strict prefix.
    pub fn resumes(&self, ids: &[u32]) -> Option<usize> {
        let length = self.snapshot.ids.len();
        (length < ids.len() && ids.starts_with(&self.snapshot.ids)).then_some(length)
    }
}

impl Rounds {
    /// What a slot keeps and its caches still hold.
    pub fn kept<'a>(&'a self, core: &'a Core, slot: usize) -> impl Iterator<Item = &'a Kept> {
        self.kept[slot].iter().filter(move |k| core.slot(slot).holds(&k.snapshot))
    }

    /// Keeps the committed state of a slot, where its arithmetic allows it at this length.
    pub(super) fn keep(
        &mut self,
        core: &mut Core,
        world: &World,
        slot: usize,
        kind: SaveKind,
    ) -> Result<(), RoundError> {
        let Some(running) = &self.running[slot] else { return Ok(()) };
        if !running.resumable() {
            return Ok(());
        }
        let (knobs, draft) = (running.knobs.clone(), running.admission.draft);
        let at = core.slot(slot).len();
        let reason =
            if kind == SaveKind::Mark { running.admission.reason(at).to_owned() } else { String::new() };
        let tag = core.tag(&knobs)?;
        let length = core.slot(slot).len();
        if length == 0
            || !length.is_multiple_of(tag.grid as usize)
            || (kind == SaveKind::Reply && !tag.window)
        {
            return Ok(());
        }
        if kind != SaveKind::Mark {
            // What cannot be kept here cannot be resumed here, and then nowhere: that costs a prefill, nothing now.
            let snapshot = match core.snapshot(slot) {
                Ok(snapshot) => Some(snapshot),
                Err(error) => {
                    tracing::warn!("{error}: a state of slot {slot} is not kept");
                    None
                }
            };
            let held = |k: &Kept| core.slot(slot).holds(&k.snapshot) && k.snapshot.ids.len() != length;
            self.kept[slot].retain(held);
            let extra = (self.kept[slot].len() + 1).saturating_sub(KEPT);
            self.kept[slot].drain(..extra);
            self.kept[slot].extend(snapshot.map(|snapshot| Kept { snapshot }));
        }
        let ids = core.slot(slot).ids.clone();
        let facts = SaveFacts {
            slot: slot as u32,
            ids: Slice::from(&ids[..]),
            tag: tag.id,
            grid: tag.grid,
            kind,
            reason: Text::from(reason.as_str()),
            draft,
        };
        let hooks = self.hooks.clone();
        for h in &hooks.stores {
            let sequences = SequencesOf::new(core);
            let lent = SequencesObject::lend(&sequences);
            let mut decision = Vec::new();
            if world.is_lead() {
                match h.call(|s| s.decide(&facts, &lent)) {
                    Ok(bytes) => decision = bytes.into(),
                    // A store that cannot keep costs a prefill later, nothing now.
                    Err(error) => tracing::warn!("{error}: not kept"),
                }
            }
            if world.ranks() > 1 {
                decision = world.share("save", 0, &decision)?;
            }
            if !decision.is_empty() && world.ranks() > 1 {
                let fits = |s: &StoreObject| s.fits(&facts, Slice::from(&decision[..]), &lent);
                let fits = world.is_lead()
                    || h.call(fits).unwrap_or_else(|error| {
                        tracing::warn!("{error}: not kept");
                        false
                    });
                if !world.agree_all("room for a save", fits)? {
                    h.call(|s| s.refused(&facts))?;
                    decision.clear();
                }
            }
            if !decision.is_empty() {
                h.call(|s| s.save(&facts, Slice::from(&decision[..]), &lent))?;
                let event = SequenceEvent::Saved { length: length as u32 };
                self.observe(interest::SEQUENCE, |o| {
                    plugfold_abi::points::Observer::sequence(o, slot as u32, &event)
                });
            }
        }
        Ok(())
    }
}

//! Failing alike: what a hook failed on one rank, all ranks end with the same message.

use super::{RoundError, Rounds};
use crate::core::Core;
use crate::ranks::World;

impl Rounds {
    /// Whether hooks run on every rank from which sequences could fail: only then the ranks have to agree.
    fn agrees(&self) -> bool {
        let h = &self.hooks;
        !(h.drafters.is_empty() && h.policies.is_empty() && h.cuts.is_empty() && h.spans.is_empty())
            || !(h.parts.is_empty() && h.stores.is_empty())
    }

    /// Ends the sequences whose hooks failed on any rank since the last agreement; gives them with their messages.
    pub(super) fn agree(
        &mut self,
        core: &Core,
        world: &World,
        what: &str,
    ) -> Result<Vec<(usize, String)>, RoundError> {
        if !self.agrees() && self.faults.is_empty() {
            return Ok(Vec::new());
        }
        let mut faults = std::mem::take(&mut self.faults);
        if world.ranks() > 1 && self.agrees() {
            let unwritten =
                |e: postcard::Error| RoundError::Forward(format!("failures that cannot be written: {e}"));
            let mine = postcard::to_stdvec(&faults).map_err(unwritten)?;
            faults.clear();
            for (rank, part) in world.gather_to_all(what, &mine)?.iter().enumerate() {
                let theirs: Vec<(usize, String)> = postcard::from_bytes(part).map_err(unwritten)?;
                faults.extend(theirs.into_iter().map(|(slot, text)| (slot, format!("rank {rank}: {text}"))));
            }
        }
        faults.sort_by_key(|f| f.0);
        faults.dedup_by_key(|f| f.0);
        faults.retain(|(slot, _)| self.running[*slot].is_some());
        for (slot, message) in &faults {
            tracing::warn!(slot, "{message}");
            self.end(core, *slot);
        }
        // What fails while it is ended has nobody left to fail.
        self.faults.clear();
        Ok(faults)
    }
}

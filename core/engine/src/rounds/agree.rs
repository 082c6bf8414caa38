//! Failing alike: what a hook failed on one rank, all ranks end with the same message.

use std::collections::BTreeMap;

use super::steps::{Drawn, Fault, Met, Say};
use super::{RoundError, Rounds};
use crate::core::Core;
use crate::ranks::World;

impl Rounds {
    /// Whether hooks run on every rank from which sequences could fail: only then the ranks have to agree.
    fn agrees(&self) -> bool {
        let h = &self.hooks;
        let drafting = h.drafters.is_empty() && h.policies.is_empty() && h.cuts.is_empty();
        !(drafting && h.spans.is_empty() && h.parts.is_empty() && h.stores.is_empty())
    }

    /// Ends the sequences whose hooks failed on any rank since the last agreement; gives them with their messages.
    pub(super) fn agree(
        &mut self,
        core: &Core,
        world: &World,
        what: &str,
    ) -> Result<Vec<(usize, String)>, RoundError> {
        let failed = self.failures(world, what, &[])?;
        self.fail(core, &failed);
        Ok(failed)
    }

    /// Ends sequences that failed.
    pub(super) fn fail(&mut self, core: &Core, failed: &[(usize, String)]) {
        for (slot, message) in failed {
            tracing::warn!(slot, "{message}");
            self.end(core, *slot);
        }
        // What fails while it is ended has nobody left to fail.
        if !failed.is_empty() {
            self.faults.clear();
        }
    }

    /// The running sequences whose hooks failed on any rank since the last agreement, and those whose windows are not the
    /// same on all ranks; the same on every rank.
    pub(super) fn failures(
        &mut self,
        world: &World,
        what: &str,
        windows: &[Drawn],
    ) -> Result<Vec<(usize, String)>, RoundError> {
        let faults = std::mem::take(&mut self.faults);
        let shared = world.ranks() > 1 && self.agrees();
        if !shared && faults.is_empty() {
            return Ok(Vec::new());
        }
        let mine = Say::Over { what: what.to_owned(), faults, windows: windows.to_vec() };
        let all = if shared {
            let Met::Over(all) = self.steps.meet(world, &mine)? else {
                return Err(RoundError::Forward(format!("the agreement on {what} ended as another step")));
            };
            all
        } else {
            vec![mine]
        };
        self.steps.reset();
        let mut found = merged(&all, shared);
        for (slot, rank, drafter) in differing(&all) {
            found.entry(slot).or_insert_with(|| {
                let h = drafter.and_then(|d| self.hooks.drafters.get(d));
                let owner = h.map_or_else(|| "of the draft policy".to_owned(), |h| h.owner.to_string());
                format!(
                    "plugin {owner}: its drafts differ between rank 0 and rank {rank}: they must follow from what all ranks \
                     know"
                )
            });
        }
        found.retain(|slot, _| self.running[*slot].is_some());
        Ok(found.into_iter().collect())
    }
}

/// The first failure of each slot, in rank order; one with its reason on its own rank before all others.
fn merged(all: &[Say], shared: bool) -> BTreeMap<usize, String> {
    let mut found: BTreeMap<usize, (bool, String)> = BTreeMap::new();
    for (rank, say) in all.iter().enumerate() {
        let Say::Over { faults, .. } = say else { continue };
        for Fault { slot, message, elsewhere } in faults {
            let better = found.get(slot).is_none_or(|(derived, _)| *derived && !elsewhere);
            if better {
                let text = if shared { format!("rank {rank}: {message}") } else { message.clone() };
                found.insert(*slot, (*elsewhere, text));
            }
        }
    }
    found.into_iter().map(|(slot, (_, message))| (slot, message)).collect()
}

/// Slots whose windows differ between ranks: slot, the first rank that differs from rank 0, who drafted.
fn differing(all: &[Say]) -> Vec<(usize, usize, Option<usize>)> {
    let windows = |s: &Say| if let Say::Over { windows, .. } = s { windows.clone() } else { Vec::new() };
    let lead = all.first().map(&windows).unwrap_or_default();
    let mut found = Vec::new();
    for mine in lead {
        let other = |s: &Say| windows(s).iter().find(|w| w.slot == mine.slot).copied();
        let rank = all.iter().position(|s| other(s) != Some(mine));
        if let Some(rank) = rank {
            let theirs = other(&all[rank]).and_then(|w| w.drafter);
            found.push((mine.slot, rank, mine.drafter.or(theirs)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(faults: &[(usize, &str, bool)], windows: &[(usize, u64)]) -> Say {
        let fault = |(slot, text, elsewhere): &(usize, &str, bool)| Fault {
            slot: *slot,
            message: (*text).into(),
            elsewhere: *elsewhere,
        };
        let window = |(slot, tokens): &(usize, u64)| Drawn { slot: *slot, drafter: Some(1), tokens: *tokens };
        Say::Over {
            what: "drafts".into(),
            faults: faults.iter().map(fault).collect(),
            windows: windows.iter().map(window).collect(),
        }
    }

    #[test]
    fn the_rank_with_the_reason_speaks() {
        let all = [
            say(&[(0, "a step", true), (2, "own", false)], &[]),
            say(&[(0, "a panic", false), (2, "later", false)], &[]),
            say(&[(3, "a step", true)], &[]),
        ];
        let found: Vec<(usize, String)> = merged(&all, true).into_iter().collect();
        let want = [(0, "rank 1: a panic"), (2, "rank 0: own"), (3, "rank 2: a step")];
        assert_eq!(found, want.map(|(slot, text)| (slot, text.to_owned())));
        assert_eq!(merged(&all[..1], false)[&2], "own");
    }

    #[test]
    fn windows_that_differ_are_found() {
        let all = [
            say(&[], &[(0, 5), (1, 6), (2, 7)]),
            say(&[], &[(0, 5), (1, 9)]),
            say(&[], &[(0, 5), (1, 6), (2, 7)]),
        ];
        assert_eq!(differing(&all), [(1, 1, Some(1)), (2, 1, Some(1))]);
        assert_eq!(differing(&all[..1]), []);
    }
}

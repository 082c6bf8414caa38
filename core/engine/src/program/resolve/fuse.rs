//! Fusions: providers that run consecutive operations in one go.

use plugfold_abi::{Bits, Claim, Program, Provider};

use super::choose::{above, selected};
use super::{Entry, Fused, HookError, Registry, ResolveError, ResolvedStep};
use crate::state::CacheTable;
use crate::weights::WeightTable;

impl Registry {
    /// Gives runs of steps to fusions, the outermost first: where each step would go to the reference, to the fusion's own
    /// plugin or to one that it is over, never across somebody else's replacement.
    pub(super) fn fuse(
        &self,
        program: &Program,
        steps: &mut [ResolvedStep],
        weights: &WeightTable,
        caches: &CacheTable,
    ) -> Result<(), ResolveError> {
        for entry in self.fusions.iter().rev() {
            let covers = entry.covers.len();
            let mut at = 0;
            while at + covers <= steps.len() {
                if Self::fits(entry, program, &steps[at..at + covers], at)
                    && self.take(entry, program, steps, at, weights, caches)?
                {
                    at += covers;
                } else {
                    at += 1;
                }
            }
        }
        Ok(())
    }

    fn fits(entry: &Entry, program: &Program, steps: &[ResolvedStep], at: usize) -> bool {
        let calls = &program.steps[at..at + steps.len()];
        let same = calls.iter().zip(entry.covers.iter()).all(|(s, op)| s.op.as_str() == op);
        let together = calls.windows(2).all(|p| {
            p[0].stream == p[1].stream
                && p[0].rows == p[1].rows
                && p[0].seqs == p[1].seqs
                && p[1].waits.is_empty()
        });
        let free = steps.iter().all(|s| {
            matches!(s.fused, Fused::Alone)
                && above(entry, &s.decides)
                // Whoever sent calls to a provider of another plugin has replaced the operation, too.
                && s.chain.iter().all(|link| above(entry, &link.owner) && above(entry, &link.claimer))
        });
        same && together && free
    }

    fn take(
        &self,
        entry: &Entry,
        program: &Program,
        steps: &mut [ResolvedStep],
        at: usize,
        weights: &WeightTable,
        caches: &CacheTable,
    ) -> Result<bool, ResolveError> {
        let step = &program.steps[at];
        let parts = Self::parts(program, step, weights, caches)?;
        let query = parts.query(program, step, &self.device);
        if !selected(entry, &query) {
            return Ok(false);
        }
        let answer = entry.provider.claim(&query).map_err(|error| ResolveError::Claim {
            op: step.op.to_string(),
            error: HookError { owner: entry.owner.to_string(), error },
        })?;
        let Claim::Yes(granted) = answer else { return Ok(false) };
        let covered = &mut steps[at..at + entry.covers.len()];
        match &granted.bits {
            // Equal bits are a promise about the arithmetic that it replaces.
            Bits::Of(name) if covered.iter().any(|s| s.bits != name.as_str()) => return Ok(false),
            Bits::Of(_) => {}
            Bits::Own(name) => {
                for s in &mut *covered {
                    (s.bits, s.grid, s.decides) = (name.to_string(), granted.grid, entry.owner.clone());
                }
            }
        }
        for s in &mut *covered {
            s.fused = Fused::Inside;
        }
        let link = entry.link(&entry.owner, granted.plan);
        covered[0].fused = Fused::First(link, entry.covers.len());
        Ok(true)
    }
}

//! Fusions: providers that run consecutive operations in one go.

use plugfold_abi::{Bits, Claim, OpError, Program, Provider, Query, Slice};

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
        let steps_of = &program.steps[at..at + entry.covers.len()];
        let parts = steps_of.iter().map(|step| Self::parts(program, step, weights, caches));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let queries = parts.iter().zip(steps_of).map(|(p, step)| p.query(program, step, &self.device));
        let queries: Vec<Query<'_>> = queries.collect();
        if !selected(entry, &queries[0]) {
            return Ok(false);
        }
        let failed = |error| ResolveError::Claim {
            op: steps_of[0].op.to_string(),
            error: HookError { owner: entry.owner.to_string(), error },
        };
        let answer = entry.provider.claim(&queries[0]).map_err(failed)?;
        let Claim::Yes(granted) = answer else { return Ok(false) };
        if !entry.provider.takes(Slice::from(&queries[..])).map_err(failed)? {
            return Ok(false);
        }
        let covered = &mut steps[at..at + entry.covers.len()];
        match &granted.bits {
            // Equal bits are a promise about the arithmetic that it replaces.
            Bits::Of(names) => {
                let names = promised(names, covered.len()).map_err(failed)?;
                if covered.iter().zip(names).any(|(s, name)| s.bits != name) {
                    return Ok(false);
                }
            }
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

/// The arithmetic that a fusion promises for each operation: one for all, or one each, joined by `+`.
fn promised(names: &str, covered: usize) -> Result<Vec<&str>, OpError> {
    let each: Vec<&str> = names.split('+').collect();
    match each[..] {
        [one] => Ok(vec![one; covered]),
        _ if each.len() == covered => Ok(each),
        _ => Err(OpError::new(format!(
            "a fusion of {covered} operations promises the bits of {} arithmetics ({names}): name one for all, or one for each",
            each.len()
        ))),
    }
}

//! Draft hooks in step. Some drafters run forwards, which all ranks have to run together; a hook that fails on one rank
//! alone must not leave the others waiting in one. So ranks meet on the control plane before every draft forward, and
//! where hooks of a stretch are over: whoever failed a call says so at the next meeting, and nobody runs that call's
//! forwards.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::OpError;
use serde::{Deserialize, Serialize};

use super::RoundError;
use crate::ranks::World;

/// A hook that failed for a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Fault {
    pub slot: usize,
    pub message: String,
    /// It failed because another rank had failed: that rank's message tells more.
    pub elsewhere: bool,
}

/// A window that is about to run: equal on all ranks, or it must not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Drawn {
    pub slot: usize,
    pub drafter: Option<usize>,
    pub tokens: u64,
}

/// What a rank says at a meeting. Calls are numbered alike on all ranks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Say {
    /// It is about to run a forward of this call, with these rows.
    Forward { call: u64, rows: u64 },
    /// This call failed here.
    Failed { call: u64 },
    /// The stretch of hooks is over.
    Over { what: String, faults: Vec<Fault>, windows: Vec<Drawn> },
}

impl Say {
    fn call(&self) -> u64 {
        match self {
            Say::Forward { call, .. } | Say::Failed { call } => *call,
            Say::Over { .. } => u64::MAX,
        }
    }
}

/// What a meeting came to.
pub(super) enum Met {
    /// All ranks run the forward.
    Run,
    /// The call failed on some rank: nobody runs it.
    Broken,
    /// All are over; what each said, in rank order.
    Over(Vec<Say>),
}

#[derive(Default)]
struct State {
    next: u64,
    broken: BTreeSet<u64>,
}

/// The calls of the stretch that runs.
pub(super) struct Steps {
    /// Whether some drafter runs forwards: else nobody can be left waiting.
    shared: bool,
    state: Mutex<State>,
}

impl Steps {
    pub(super) fn new(shared: bool) -> Self {
        Self { shared, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether ranks meet before forwards.
    pub(super) fn meets(&self, world: &World) -> bool {
        self.shared && world.ranks() > 1
    }

    /// Numbers a call. Every rank numbers the same calls, whether or not it makes them.
    pub(super) fn call(&self) -> u64 {
        let mut state = self.state();
        state.next += 1;
        state.next
    }

    /// Whether a call is known to have failed on some rank.
    pub(super) fn is_broken(&self, call: u64) -> bool {
        self.state().broken.contains(&call)
    }

    /// Says something, and hears all ranks. Of unequal sayings the earliest call is the broken one; whoever is past it
    /// says the same again.
    pub(super) fn meet(&self, world: &World, say: &Say) -> Result<Met, RoundError> {
        let unwritten =
            |e: postcard::Error| RoundError::Forward(format!("a step that cannot be written: {e}"));
        let label = match say {
            Say::Over { what, .. } if !self.shared => what.as_str(),
            _ => "draft hooks",
        };
        let mine = postcard::to_stdvec(say).map_err(unwritten)?;
        loop {
            let mut all = Vec::with_capacity(world.ranks());
            for part in world.gather_to_all(label, &mine)? {
                all.push(postcard::from_bytes::<Say>(&part).map_err(unwritten)?);
            }
            let first = all.iter().map(Say::call).min().unwrap_or(u64::MAX);
            if first == u64::MAX {
                return over(all);
            }
            if matches!(say, Say::Forward { .. }) && all.iter().all(|s| s == say) {
                return Ok(Met::Run);
            }
            self.state().broken.insert(first);
            if say.call() == first {
                return Ok(Met::Broken);
            }
        }
    }

    /// The next stretch begins.
    pub(super) fn reset(&self) {
        *self.state() = State::default();
    }
}

fn over(all: Vec<Say>) -> Result<Met, RoundError> {
    let what = |s: &Say| if let Say::Over { what, .. } = s { what.clone() } else { String::new() };
    let (first, other) = (what(&all[0]), all.iter().find(|s| what(s) != what(&all[0])));
    match other {
        None => Ok(Met::Over(all)),
        Some(other) => Err(RoundError::Forward(format!(
            "the ranks are out of step: one agrees on {first}, another on {}",
            what(other)
        ))),
    }
}

/// A hook call's way to the other ranks.
pub(super) struct Pace<'a> {
    pub world: &'a World,
    pub steps: &'a Steps,
    pub call: u64,
    /// Set once the call failed for another rank's sake.
    pub elsewhere: AtomicBool,
}

impl<'a> Pace<'a> {
    pub(super) fn new(world: &'a World, steps: &'a Steps) -> Self {
        Self { world, steps, call: steps.call(), elsewhere: AtomicBool::new(false) }
    }

    /// Meets the other ranks before a forward over rows of this hash.
    pub(super) fn enter(&self, rows: u64) -> Result<(), OpError> {
        if !self.steps.meets(self.world) {
            return Ok(());
        }
        if !self.steps.is_broken(self.call) {
            let say = Say::Forward { call: self.call, rows };
            match self.steps.meet(self.world, &say) {
                Ok(Met::Run) => return Ok(()),
                Ok(_) => {}
                Err(error) => return Err(OpError::fatal(error.to_string())),
            }
        }
        self.failed_elsewhere();
        Err(OpError::new(
            "another rank does not take this draft step: the call failed there, or has other rows",
        ))
    }

    pub(super) fn failed_elsewhere(&self) {
        self.elsewhere.store(true, Ordering::Relaxed);
    }

    /// The call is over here. `Some`: it failed on some rank; whether the reason lies elsewhere.
    pub(super) fn leave(&self, failed: bool) -> Result<Option<bool>, RoundError> {
        let elsewhere = self.elsewhere.load(Ordering::Relaxed);
        let broken = self.steps.is_broken(self.call);
        if failed && !broken && self.steps.meets(self.world) {
            self.steps.meet(self.world, &Say::Failed { call: self.call })?;
        }
        Ok((failed || broken).then_some(elsewhere || !failed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn each<T: Send + 'static>(ranks: usize, run: impl Fn(World) -> T + Clone + Send + 'static) -> Vec<T> {
        let start = |world| {
            let run = run.clone();
            std::thread::spawn(move || run(world))
        };
        let threads: Vec<_> = World::local(ranks).unwrap().into_iter().map(start).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    }

    fn end(steps: &Steps, world: &World) -> usize {
        let over = Say::Over { what: "test".into(), faults: Vec::new(), windows: Vec::new() };
        match steps.meet(world, &over) {
            Ok(Met::Over(all)) => all.len(),
            _ => 0,
        }
    }

    #[test]
    fn a_call_that_fails_on_one_rank_is_run_by_none_and_the_next_by_all() {
        // In each of four calls one rank fails before its first or second forward, or none does.
        let told = each(3, |world| {
            let steps = Steps::new(true);
            let mut told = Vec::new();
            for (culprit, forwards_before) in [(1, 0), (9, 9), (0, 1), (2, 0)] {
                let pace = Pace::new(&world, &steps);
                let mut ran = 0;
                let mut failed = false;
                for _ in 0..2 {
                    if world.rank() == culprit && ran == forwards_before {
                        failed = true;
                        break;
                    }
                    if pace.enter(7).is_err() {
                        failed = true;
                        break;
                    }
                    ran += 1;
                }
                let left = pace.leave(failed).unwrap();
                told.push((ran, left, world.rank() == culprit));
            }
            assert_eq!(end(&steps, &world), 3);
            told
        });
        for rank in &told {
            let ran: Vec<i32> = rank.iter().map(|t| t.0).collect();
            assert_eq!(ran, [0, 2, 1, 0]);
            for (i, (_, left, culprit)) in rank.iter().enumerate() {
                let want = if i == 1 { None } else { Some(!culprit) };
                assert_eq!(*left, want, "call {i}");
            }
        }
    }

    #[test]
    fn ranks_that_make_other_calls_are_told_and_end_together() {
        // Rank 1 makes the second call only, and rank 0 the first only; their rows differ in the third.
        let told = each(2, |world| {
            let steps = Steps::new(true);
            let mut ok = Vec::new();
            for call in 0..3 {
                let pace = Pace::new(&world, &steps);
                if call == 2 || call == world.rank() {
                    let entered = pace.enter(if call == 2 { world.rank() as u64 } else { 7 }).is_ok();
                    ok.push(entered);
                    pace.leave(!entered).unwrap();
                }
            }
            assert_eq!(end(&steps, &world), 2);
            ok
        });
        assert_eq!(told, vec![vec![false, false]; 2]);
    }

    #[test]
    fn one_rank_meets_nobody() {
        let world = World::single();
        let steps = Steps::new(true);
        let pace = Pace::new(&world, &steps);
        assert!(pace.enter(1).is_ok());
        assert_eq!(pace.leave(true).unwrap(), Some(false));
        assert_eq!(pace.leave(false).unwrap(), None);
    }
}

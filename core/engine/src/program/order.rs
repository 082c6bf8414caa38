//! Which steps of a program certainly run before which: stream order, plus waits on events.

use plugfold_abi::{Maybe, Program};

use super::ProgramError;

/// Happens-before of the steps of one program.
pub(crate) struct Order {
    /// Per step, per stream: how many steps of that stream (in list order) are certainly done when it starts.
    done: Vec<Vec<u32>>,
    /// Per step: its stream and its place in it, from 1.
    place: Vec<(usize, u32)>,
}

impl Order {
    /// Computes the order, refusing waits for events that nobody has signalled yet.
    pub(crate) fn of(program: &Program) -> Result<Self, ProgramError> {
        let streams = program.steps.iter().map(|s| s.stream as usize + 1).max().unwrap_or(1);
        let mut signalled: Vec<(u32, Vec<u32>)> = Vec::new();
        let mut last: Vec<Vec<u32>> = vec![vec![0; streams]; streams];
        let mut done = Vec::with_capacity(program.steps.len());
        let mut place = Vec::with_capacity(program.steps.len());
        for (i, step) in program.steps.iter().enumerate() {
            let s = step.stream as usize;
            let mut seen = last[s].clone();
            for wait in &step.waits {
                let Some((_, at)) = signalled.iter().find(|(e, _)| e == wait) else {
                    return Err(ProgramError::Wait { step: i, op: step.op.to_string(), event: *wait });
                };
                for (mine, theirs) in seen.iter_mut().zip(at) {
                    *mine = (*mine).max(*theirs);
                }
            }
            done.push(seen.clone());
            seen[s] += 1;
            place.push((s, seen[s]));
            if let Maybe::RSome(event) = step.signal {
                if signalled.iter().any(|(e, _)| *e == event) {
                    return Err(ProgramError::SignalTwice { step: i, op: step.op.to_string(), event });
                }
                signalled.push((event, seen.clone()));
            }
            last[s] = seen;
        }
        Ok(Self { done, place })
    }

    /// Whether step `a` is certainly done when step `b` starts.
    pub(crate) fn before(&self, a: usize, b: usize) -> bool {
        let (stream, place) = self.place[a];
        self.done[b][stream] >= place
    }

    /// Streams that have steps after which nothing on stream 0 waits.
    pub(crate) fn open_forks(&self) -> Vec<usize> {
        let streams = self.done.first().map_or(1, Vec::len);
        let mut total = vec![0; streams];
        for &(s, p) in &self.place {
            total[s] = total[s].max(p);
        }
        let joined = self.place.iter().rposition(|&(s, _)| s == 0).map(|last| &self.done[last]);
        (1..streams).filter(|&s| total[s] > joined.map_or(0, |d| d[s])).collect()
    }
}

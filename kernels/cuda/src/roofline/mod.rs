//! How near the kernels come to what a GPU can do: `plugfold bench roofline --device cuda`.
//!
//! In one run the machine's limits are measured ([`Limits`]), then every operation of the table at one row and at more. An
//! operation's bound is the largest of three times, each of which no arrangement of its work can pass (of an operation whose one part
//! has to end before the other may begin, the sum of both parts' bounds):
//!
//! - memory: the bytes that it has to move, at the measured bandwidth;
//! - arithmetic: its multiply-adds and the EXL3 weights that it decodes, at the measured rates;
//! - latency: its launches, and the longest chain of steps that wait for each other by the definition of the reference's
//!   order, each step at its measured time.
//!
//! docs/GPU.md derives the chains.

mod limits;
mod operations;
mod place;

use std::sync::Arc;
use std::time::Instant;

use plugfold_abi::{OpError, Provider as _, ProviderObject};

use crate::driver::Gpu;
use crate::error::CudaError;
use crate::machine::Machine;
use crate::ops::providers;
pub use limits::Limits;
pub use operations::Sizes;
use place::{Placed, Task};

/// Measures the time that a machine takes.
pub trait Stopwatch {
    /// Seconds from the start to the end of what `run` asks the machine for.
    ///
    /// # Errors
    /// What `run` or the machine says.
    fn seconds(&self, run: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError>;
}

/// By events on the GPU's stream: work that was asked for before is not counted.
impl Stopwatch for Gpu {
    fn seconds(&self, run: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        let start = self.event()?;
        run()?;
        self.event()?.seconds_since(&start)
    }
}

/// By the host's clock, for machines without events.
pub struct HostClock<'m>(pub &'m dyn Machine);

impl Stopwatch for HostClock<'_> {
    fn seconds(&self, run: &mut dyn FnMut() -> Result<(), CudaError>) -> Result<f64, CudaError> {
        self.0.download(0, &mut [])?;
        let start = Instant::now();
        run()?;
        self.0.download(0, &mut [])?;
        Ok(start.elapsed().as_secs_f64())
    }
}

/// How long measurements take.
#[derive(Clone, Copy, Debug)]
pub struct Effort {
    /// Repetitions of a measurement.
    pub repeats: usize,
    /// Calls of a measurement at most: so many launches fit the driver's queue.
    pub calls: usize,
    /// Times that a recording holds these calls, so that its own start does not count.
    pub rounds: usize,
    /// Seconds of a measurement, where it has more calls than one.
    pub seconds: f64,
    /// Dependent multiply-adds of the launch behind which calls are queued: milliseconds. A multiple of 64.
    pub blocker: u32,
    /// Steps of the measured chains. A multiple of 256.
    pub steps: u32,
    /// Blocks of the measured rates at most.
    pub blocks: u32,
    /// Bytes of the measured stream.
    pub stream: usize,
    /// Bytes of weights and caches that calls go through before they meet the same again: more than any GPU's cache.
    pub rotated: usize,
}

impl Effort {
    /// For a GPU.
    pub const FULL: Self = Self {
        repeats: 5,
        calls: 32,
        rounds: 4,
        seconds: 0.01,
        blocker: 1_048_576,
        steps: 65_536,
        blocks: u32::MAX,
        stream: 2 << 30,
        rotated: 150_000_000,
    };
    /// So little that it ends soon anywhere; the numbers say nothing.
    pub const LEAST: Self = Self {
        repeats: 1,
        calls: 1,
        rounds: 1,
        seconds: 0.0,
        blocker: 64,
        steps: 256,
        blocks: 1,
        stream: 1,
        rotated: 1,
    };
}

/// What an operation has to do, however it is arranged.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// Bytes between memory and the multiprocessors.
    pub bytes: f64,
    /// Multiply-adds, without those of [`Cost::decoded`].
    pub fmas: f64,
    /// Weights of EXL3 that are decoded, each multiplied once.
    pub decoded: f64,
    /// Launches: one more than there are places where everything must be finished before anything may go on.
    pub launches: f64,
    /// Multiply-adds, sums and products that wait for each other.
    pub steps: f64,
    /// Divisions and roots among them.
    pub divisions: f64,
    /// Fetches that wait for each other, of what a cache may have.
    pub fetches: f64,
    /// The same of what comes from memory: weights and caches that calls go through.
    pub far: f64,
}

/// The time that bounds an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Bytes.
    Memory,
    /// Multiply-adds and decoding.
    Arithmetic,
    /// Launches and steps that wait for each other.
    Latency,
}

impl Bound {
    /// Its name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Bound::Memory => "memory",
            Bound::Arithmetic => "arithmetic",
            Bound::Latency => "latency",
        }
    }
}

impl Cost {
    /// Seconds at a machine's limits: memory, arithmetic, and latency of launches of `launch` seconds.
    pub fn seconds(&self, l: &Limits, launch: f64) -> [(Bound, f64); 3] {
        let chain =
            self.steps * l.step + self.divisions * l.division + self.fetches * l.fetch + self.far * l.far;
        [
            (Bound::Memory, self.bytes / l.bandwidth),
            (Bound::Arithmetic, self.fmas / l.rate + self.decoded / l.decoding),
            (Bound::Latency, self.launches * launch + chain),
        ]
    }

    /// The largest of them.
    pub fn bound(&self, l: &Limits, launch: f64) -> (Bound, f64) {
        let all = self.seconds(l, launch);
        all.into_iter().fold(all[0], |most, next| if next.1 > most.1 { next } else { most })
    }

    /// The bound of what has to be finished before anything of the next may begin: the sum of theirs, named by the largest.
    pub fn bound_of(all: &[Cost], l: &Limits, launch: f64) -> (Bound, f64) {
        let bounds = all.iter().map(|cost| cost.bound(l, launch));
        let sum = bounds.clone().map(|b| b.1).sum();
        (bounds.max_by(|a, b| a.1.total_cmp(&b.1)).map_or(Bound::Latency, |b| b.0), sum)
    }
}

/// One measured call.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Operation as in the table of [`plugfold_abi::ops`].
    pub op: &'static str,
    /// Operation, sizes and rows.
    pub name: String,
    /// Rows.
    pub rows: usize,
    /// Median seconds of a call on the GPU, of calls that wait in its queue.
    pub queued: f64,
    /// The same of calls in a recorded graph.
    pub recorded: f64,
    /// Seconds that the host takes to ask for a call.
    pub host: f64,
    /// What it has to do, one after the other.
    pub costs: Vec<Cost>,
    /// What bounds it in a queue, and the seconds of that.
    pub bound: (Bound, f64),
    /// The same in a recorded graph.
    pub recorded_bound: (Bound, f64),
    /// Seconds that memory alone would take.
    pub memory: f64,
}

impl Row {
    /// Part of the bound that was reached, in a queue.
    pub fn fraction(&self) -> f64 {
        self.bound.1 / self.queued
    }
    /// The same in a recorded graph.
    pub fn recorded_fraction(&self) -> f64 {
        self.recorded_bound.1 / self.recorded
    }
    /// Part of the memory's rate that was reached, in a queue.
    pub fn memory_fraction(&self) -> f64 {
        self.memory / self.queued
    }
}

/// What was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Roofline {
    /// The machine.
    pub limits: Limits,
    /// The calls.
    pub rows: Vec<Row>,
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

struct Bench<'m> {
    machine: &'m Arc<dyn Machine>,
    watch: &'m dyn Stopwatch,
    effort: &'m Effort,
    limits: Limits,
    out: u64,
}

impl Bench<'_> {
    fn row(&self, task: &Task) -> Result<Row, OpError> {
        let all = providers(self.machine);
        let found = all.iter().find(|p| p.op().is_ok_and(|o| o == task.op));
        let provider = found.ok_or_else(|| OpError::new(format!("{}: no provider", task.op)))?;
        // Several of the same, so that a call does not find in the cache what the one before it read.
        let bytes: f64 = task.costs.iter().map(|cost| cost.bytes).sum();
        let count = self.effort.rotated.div_ceil((bytes as usize).max(10_000_000));
        let placed = (0..count).map(|_| Placed::new(task, &**self.machine)).collect::<Result<Vec<_>, _>>()?;
        // Tables of segments are read, and scratch memory is made, when they are first wanted.
        placed.iter().try_for_each(|p| p.run(provider))?;
        let (queued, host, recorded) = self.times(&placed, provider)?;
        let l = &self.limits;
        Ok(Row {
            op: task.op,
            name: task.name.clone(),
            rows: task.rows,
            queued,
            recorded,
            host,
            bound: Cost::bound_of(&task.costs, l, l.launch),
            recorded_bound: Cost::bound_of(&task.costs, l, l.recorded_launch),
            costs: task.costs.clone(),
            memory: bytes / l.bandwidth,
        })
    }

    /// Seconds a call: in the queue, of the host, and in a recording.
    fn times(&self, placed: &[Placed<'_>], provider: &ProviderObject) -> Result<(f64, f64, f64), OpError> {
        let failed = std::cell::RefCell::new(None);
        // What a call says is kept beside the times, whose errors are the machine's.
        let run = |i: usize| {
            if let Err(e) = placed[i % placed.len()].run(provider) {
                failed.borrow_mut().get_or_insert(e);
            }
        };
        let once = self.watch.seconds(&mut || {
            run(0);
            Ok(())
        })?;
        let calls = (self.effort.seconds / once.max(1e-6)).clamp(1.0, self.effort.calls as f64) as usize;
        let (mut queued, mut host, mut recorded) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..self.effort.repeats {
            limits::blocker(&**self.machine, self.effort, self.out)?;
            let mut asked = 0.0;
            let took = self.watch.seconds(&mut || {
                let start = Instant::now();
                (0..calls).for_each(run);
                asked = start.elapsed().as_secs_f64();
                Ok(())
            })?;
            queued.push(took / calls as f64);
            host.push(asked / calls as f64);
        }
        let rounds = if calls > 1 { self.effort.rounds } else { 1 };
        self.machine.record()?;
        (0..rounds * calls).for_each(run);
        let graph = self.machine.recorded()?;
        self.machine.replay(graph)?;
        for _ in 0..self.effort.repeats {
            limits::blocker(&**self.machine, self.effort, self.out)?;
            let took = self.watch.seconds(&mut || self.machine.replay(graph))?;
            recorded.push(took / (rounds * calls) as f64);
        }
        self.machine.forget_recording(graph);
        // Operands go when this returns: nothing may be using them.
        self.machine.download(0, &mut [])?;
        let failed = failed.into_inner();
        failed.map_or_else(|| Ok((median(&mut queued), median(&mut host), median(&mut recorded))), Err)
    }
}

/// Measures a machine and every operation on it whose name is `wanted`; `done` is told the limits' and each row as soon as it is there.
///
/// # Errors
/// Memory that is used up, or what the machine says.
pub fn roofline(
    machine: &Arc<dyn Machine>,
    watch: &dyn Stopwatch,
    sizes: &Sizes,
    effort: &Effort,
    wanted: &dyn Fn(&str) -> bool,
    mut done: impl FnMut(&Limits, Option<&Row>),
) -> Result<Roofline, OpError> {
    let out = machine.allocate("what probes write", 4096)?;
    let measured =
        limits::measure(&**machine, watch, effort, out).map_err(OpError::from).and_then(|limits| {
            done(&limits, None);
            let bench = Bench { machine, watch, effort, limits, out };
            let mut rows = Vec::new();
            for task in operations::all(sizes).into_iter().filter(|t| wanted(&t.name)) {
                let row = bench.row(&task)?;
                done(&limits, Some(&row));
                rows.push(row);
            }
            Ok(Roofline { limits, rows })
        });
    machine.release(out);
    measured
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits {
        bandwidth: 4e12,
        rate: 32e12,
        decoding: 4e12,
        launch: 2e-6,
        recorded_launch: 1e-6,
        step: 2e-9,
        division: 20e-9,
        fetch: 500e-9,
        far: 900e-9,
    };

    #[test]
    fn the_largest_of_the_bounds_binds() {
        let chain = Cost { bytes: 4e6, launches: 1.0, steps: 500.0, fetches: 1.0, ..Cost::default() };
        let (bound, seconds) = chain.bound(&LIMITS, LIMITS.launch);
        assert_eq!(bound, Bound::Latency);
        assert!((seconds - 3.5e-6).abs() < 1e-12, "{seconds}");
        // In a recording launches cost less.
        assert!((chain.bound(&LIMITS, LIMITS.recorded_launch).1 - 2.5e-6).abs() < 1e-12);
        let far = Cost { far: 1.0, ..chain };
        assert!((far.bound(&LIMITS, LIMITS.launch).1 - 4.4e-6).abs() < 1e-12);
        // What has to end before the rest begins takes its time too.
        let stream = Cost { bytes: 40e6, ..chain };
        let (bound, seconds) = Cost::bound_of(&[stream, chain], &LIMITS, LIMITS.launch);
        assert_eq!(bound, Bound::Memory);
        assert!((seconds - 13.5e-6).abs() < 1e-12, "{seconds}");
        let large = Cost { bytes: 4e9, ..chain };
        assert_eq!(large.bound(&LIMITS, LIMITS.launch), (Bound::Memory, 1e-3));
        // Decoding and multiply-adds are done by the same lanes, one after the other.
        let coded = Cost { fmas: 32e6, decoded: 16e6, ..chain };
        let (bound, seconds) = coded.bound(&LIMITS, LIMITS.launch);
        assert_eq!(bound, Bound::Arithmetic);
        assert!((seconds - 5e-6).abs() < 1e-12, "{seconds}");
    }
}

//! Runs programs: one call after another, or as the executor in force takes them.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use plugfold_abi::points::{Executor, ExecutorObject, Launch, Mode, Steps, StepsObject};
use plugfold_abi::{
    Base, Below, BelowObject, Call, Comm, CommObject, ErrorKind, KnobValue, MAX_INPUTS, MAX_OUTPUTS,
    MAX_WEIGHTS, NO_LAYER, OpError, Operand, Program, Provider, RoundTable, Slice, Step, Text, View,
};
use plugfold_kernels::device::{Device, DeviceError, Memory};

use super::resolve::{Fused, Link, MAX_COVER, REFERENCE, Read, ResolvedStep};
use super::{Placement, Resolved};
use crate::hooks::{Calls, Exchanging, HookError, Hooked};
use crate::weights::WeightTable;

/// Memory for buffers, grown to the largest program that was prepared and never shrunk.
#[derive(Default)]
pub struct Arena {
    device: Option<Arc<dyn Device>>,
    memory: Memory,
    /// Output buffers of the last run on a device, at the places that they have there.
    mirror: Vec<[u64; 8]>,
    /// How often it has grown, and buffers with it have moved.
    moves: u64,
}

impl Arena {
    /// Memory of a device, or of the host where there is none.
    pub fn new(device: Option<Arc<dyn Device>>) -> Self {
        Self { device, ..Self::default() }
    }

    /// Makes room for a program. Called when a program is prepared, never in a round.
    ///
    /// # Errors
    /// A device's memory that is used up.
    pub fn reserve(&mut self, bytes: usize) -> Result<(), DeviceError> {
        if bytes <= self.memory.len() {
            return Ok(());
        }
        self.moves += 1;
        match &mut self.memory {
            // Outputs of the last run stay readable.
            Memory::Host(units) if self.device.is_none() => units.resize(bytes.div_ceil(64), [0; 8]),
            // Both would not always fit; what was read of the old one is in the mirror.
            memory => {
                *memory = Memory::default();
                *memory = Memory::new(self.device.as_ref(), "buffers of programs", bytes)?;
            }
        }
        Ok(())
    }

    fn base(&mut self) -> *mut u8 {
        self.memory.address()
    }

    /// Copies what a run left in output buffers of a device, where they are `(offset, bytes)`, to the host.
    fn fetch(&mut self, outputs: impl Iterator<Item = (usize, usize)>) -> Result<(), DeviceError> {
        if self.memory.host().is_some() {
            return Ok(());
        }
        for (offset, bytes) in outputs {
            let units = (offset + bytes).div_ceil(64);
            if self.mirror.len() < units {
                self.mirror.resize(units, [0; 8]);
            }
            let mirror: &mut [u8] = bytemuck::cast_slice_mut(&mut self.mirror);
            self.memory.read(offset, &mut mirror[offset..offset + bytes])?;
        }
        Ok(())
    }

    /// Numbers that a run left at a place.
    fn floats(&self, offset: usize, count: usize) -> &[f32] {
        let whole = self.memory.host().unwrap_or_else(|| bytemuck::cast_slice(&self.mirror));
        bytemuck::cast_slice(&whole[offset..offset + count * 4])
    }
}

/// Is told a step that ran, its rows and its seconds.
pub type Timer<'a> = dyn Fn(&Step, u32, f64) + Sync + 'a;
/// What a run calls between two steps.
pub type Between<'a> = dyn Fn() -> Result<(), HookError> + Sync + 'a;
/// Is told the call of a watched step that ran.
pub type Watcher<'a> = dyn Fn(&Call<'_>) + Sync + 'a;

/// What one run needs besides the program.
pub struct RunInputs<'a> {
    /// The round table.
    pub round: &'a RoundTable<'a>,
    /// The weights.
    pub weights: &'a WeightTable,
    /// Collectives; `None` on one rank.
    pub comm: Option<&'a CommObject>,
    /// Whether exchanges may be part of a recording; on one rank there is nobody to wait for.
    pub recorded: bool,
    /// Request knobs, folded over the sequences.
    pub knobs: &'a [KnobValue],
    /// Tells that everything up to the late fields is under way.
    pub launched: &'a (dyn Fn() + Sync),
    /// Fills what may be filled late: called when the head has run. An error fails the forward.
    pub late: &'a Between<'a>,
    /// Told every step that ran, with its rows and seconds; `None`: nothing is timed.
    pub timer: Option<&'a Timer<'a>>,
    /// Told every call of a watched operation.
    pub watcher: &'a Watcher<'a>,
    /// Rows for the program's input buffer `hidden`; empty where it has none.
    pub hidden: &'a [f32],
    /// Who runs the program, and how; `None`: one step after another.
    pub executor: Option<(&'a Hooked<ExecutorObject>, Mode)>,
    /// The device, if it is not the host.
    pub device: Option<&'a dyn Device>,
    /// Set while other ranks may be waited for.
    pub exchanging: &'a Exchanging,
    /// What has failed already: then only exchanges run.
    pub failed: Option<Failure>,
}

/// A step that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Operation.
    pub op: String,
    /// Who brought the provider.
    pub owner: String,
    /// Layer.
    pub layer: u32,
    /// Whether it was an exchange: then the other ranks are out of step and the engine cannot go on.
    pub exchange: bool,
    /// What it said.
    pub error: OpError,
}

impl Failure {
    /// A hook failed that is no step.
    pub(crate) fn of_hook(what: &str, hook: &HookError) -> Self {
        let HookError { owner, error } = hook.clone();
        let exchange = error.kind == ErrorKind::Fatal;
        Self { op: what.into(), owner, layer: NO_LAYER, exchange, error }
    }

    /// Exchanges that were asked for did not go well.
    fn of_comm(error: OpError) -> Self {
        let (op, owner) = ("exchanges".into(), "the transport".into());
        Self { op, owner, layer: NO_LAYER, exchange: true, error }
    }

    /// The device failed outside of a step.
    fn of_device(what: &str, error: DeviceError) -> Self {
        let exchange = error.fatal;
        Self { op: what.into(), owner: REFERENCE.into(), layer: NO_LAYER, exchange, error: error.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { op, owner, error, .. } = self;
        match self.layer {
            NO_LAYER => write!(f, "{op}, run by {owner}: {error}"),
            layer => write!(f, "{op} of layer {layer}, run by {owner}: {error}"),
        }
    }
}
impl std::error::Error for Failure {}

/// The parts of a run's result that outlive it.
pub struct Outcome {
    /// The first failure, if any.
    pub failure: Option<Failure>,
    /// Hash over the exchanges that ran, in order: equal on all ranks or they are out of step.
    pub collectives: u64,
    /// How it ran.
    pub mode: Mode,
}

fn height(program: &Program, base: Base, round: &RoundTable<'_>) -> usize {
    match base {
        Base::Rows => round.rows(),
        Base::OutRows => round.out_rows.len(),
        Base::One => {
            debug_assert!(program.shape.rows > 0, "a program has rows");
            1
        }
    }
}

/// The rows of `operand` that `step` covers, as an address.
fn view(
    program: &Program,
    placement: &Placement,
    base: *mut u8,
    step: &Step,
    operand: Operand,
    whole: bool,
    round: &RoundTable<'_>,
) -> View {
    let buffer = &program.buffers[operand.buffer as usize];
    let rows = height(program, buffer.extent.base, round);
    let span = if buffer.extent.base == Base::Rows && !whole { step.rows.within(rows) } else { 0..rows };
    let times = buffer.extent.times as usize;
    let element = span.start * times * buffer.cols as usize + operand.col as usize;
    // The placement reserved `shape.rows * times * cols` elements here and the table holds at most that many. The address may be
    // a device's.
    let ptr = base.wrapping_add(placement.offsets[operand.buffer as usize] + element * buffer.dtype.size());
    View {
        ptr,
        rows: (span.len() * times) as u32,
        cols: operand.cols,
        stride: buffer.cols,
        dtype: buffer.dtype,
    }
}

/// The rest of a chain, as the provider above it sees it.
struct Rest<'a>(&'a [Link]);

impl Below for Rest<'_> {
    fn run(&self, call: &Call<'_>) -> Result<(), OpError> {
        match self.0 {
            [] => Err(OpError::new("nothing lies beneath the reference")),
            [link, rest @ ..] => {
                let _busy = link.calls.enter();
                link.provider.run(call, &link.plan, &BelowObject::lend(&Rest(rest)))
            }
        }
    }
}

/// What lies beneath a fusion: the chains of the steps that it covers, with their calls.
struct Covered<'a>(&'a [ResolvedStep], &'a [Call<'a>]);

impl Below for Covered<'_> {
    fn run(&self, call: &Call<'_>) -> Result<(), OpError> {
        let same = |c: &Call<'_>| c.op == call.op && (c.layer, c.site) == (call.layer, call.site);
        let weights = |c: &Call<'_>| c.weights.map(|w| w.map(std::ptr::from_ref));
        // One operation may be covered twice, with other weights: each call has a chain of its own.
        let exactly = self.1.iter().position(|c| same(c) && weights(c) == weights(call));
        match exactly.or_else(|| self.1.iter().position(same)) {
            Some(at) => Rest(&self.0[at].chain).run(call),
            None => Err(OpError::new(format!("{} is not among the operations that are covered", call.op))),
        }
    }
}

/// Adds an exchange to the hash of those that ran.
fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3)
}

/// Start of the arena's memory.
#[derive(Clone, Copy)]
struct Start(*mut u8);

// SAFETY: an address; whoever runs a program has the arena alone for that time.
unsafe impl Send for Start {}

/// A program over a round, as far as it has been taken.
struct Progress<'a> {
    resolved: &'a Resolved,
    inputs: &'a RunInputs<'a>,
    base: Start,
    at: usize,
    late: bool,
    /// An exchange failed: nothing more may run.
    ended: bool,
    failure: Option<Failure>,
    collectives: u64,
    clock: Option<Instant>,
}

impl Progress<'_> {
    /// The steps that run together with the next one.
    fn unit(&self) -> Range<usize> {
        let covers = if let Fused::First(_, n) = self.resolved.steps[self.at].fused { n } else { 1 };
        self.at..self.at + covers
    }

    /// Adds the exchanges among steps to the hash; whether there are any.
    fn exchanges(&mut self, steps: Range<usize>) -> bool {
        let mut any = false;
        for found in self.resolved.steps[steps].iter().filter(|s| s.exchange) {
            self.collectives = mix(self.collectives, found.mark);
            any = true;
        }
        any
    }

    /// Refuses a stretch that goes back, beyond the program, or ends inside of a fusion.
    fn check(&self, end: u32) -> Result<usize, OpError> {
        let (end, all) = (end as usize, self.resolved.steps.len());
        let inside = self.resolved.steps.get(end).is_some_and(|s| matches!(s.fused, Fused::Inside));
        if end < self.at || end > all || inside {
            return Err(OpError::new(format!(
                "steps up to {end} of {all}, where {} have been taken: stretches go forward and end between fusions",
                self.at
            )));
        }
        Ok(end)
    }

    /// Runs steps on their providers.
    ///
    /// After a failure only the exchanges still run, so that other ranks do not wait: what one rank failed, all end alike
    /// (the caller agrees on it afterwards).
    fn run(&mut self, end: usize) {
        while self.at < end && !self.ended {
            let unit = self.unit();
            if self.failure.is_none() && !self.late && unit.end > self.resolved.late {
                self.pass_late();
            }
            self.at = unit.end;
            let exchange = self.exchanges(unit.clone());
            if self.failure.is_some() && !exchange {
                continue;
            }
            let waits = exchange.then(|| self.inputs.exchanging.begin());
            let ran = self.step(unit.clone());
            drop(waits);
            // What a provider does wrong must not end the engine, nor the other ranks' wait for this one's exchanges.
            if let Err(error) = ran {
                self.fail(unit.start, error);
            }
        }
        if !self.late && self.at >= self.resolved.late && self.failure.is_none() {
            self.pass_late();
        }
    }

    fn step(&mut self, unit: Range<usize>) -> Result<(), OpError> {
        let (resolved, inputs) = (self.resolved, self.inputs);
        let found = &resolved.steps[unit.start];
        let call = call(resolved, self.base.0, unit.start, inputs);
        let ran = match &found.fused {
            Fused::First(link, _) => {
                let mut calls = [call; MAX_COVER];
                for (slot, i) in calls.iter_mut().zip(unit.clone()) {
                    *slot = self::call(resolved, self.base.0, i, inputs);
                }
                let calls = &calls[..unit.len()];
                let below = Covered(&resolved.steps[unit.clone()], calls);
                let _busy = link.calls.enter();
                link.provider.run_group(calls.into(), &link.plan, &BelowObject::lend(&below))
            }
            Fused::Alone | Fused::Inside => Rest(&found.chain).run(&call),
        };
        if let (Some(timer), Some(since)) = (inputs.timer, &mut self.clock) {
            if let Some(device) = inputs.device {
                // What was asked for has run once an empty copy is there.
                device.download(0, &mut [])?;
            }
            let now = Instant::now();
            let step = &resolved.program.steps[unit.start];
            timer(step, step.rows.within(inputs.round.rows()).len() as u32, (now - *since).as_secs_f64());
            *since = now;
        }
        if ran.is_ok() {
            for i in unit.filter(|i| resolved.steps[*i].watched) {
                (inputs.watcher)(&self::call(resolved, self.base.0, i, inputs));
            }
        }
        ran
    }

    fn fail(&mut self, at: usize, error: OpError) {
        let (step, found) = (&self.resolved.program.steps[at], &self.resolved.steps[at]);
        let owner = match &found.fused {
            Fused::First(link, _) => &link.owner,
            Fused::Alone | Fused::Inside => found.chain.first().map_or(&found.decides, |l| &l.owner),
        };
        let unit = at..at + if let Fused::First(_, n) = found.fused { n } else { 1 };
        let exchange = self.resolved.steps[unit].iter().any(|s| s.exchange);
        let failure = Failure {
            op: step.op.to_string(),
            owner: owner.to_string(),
            layer: step.layer,
            exchange: exchange || error.kind == ErrorKind::Fatal,
            error,
        };
        self.ended |= failure.exchange;
        if failure.exchange || self.failure.is_none() {
            self.failure = Some(failure);
        }
    }

    /// Everything before the late fields is under way.
    fn pass_late(&mut self) {
        self.late = true;
        (self.inputs.launched)();
        if self.resolved.late < self.resolved.steps.len()
            && let Err(e) = (self.inputs.late)()
        {
            let head = self.resolved.late.saturating_sub(1);
            self.fail(head, OpError { kind: e.error.kind, message: e.to_string().into() });
        }
    }

    /// Counts steps as run by other means.
    fn skip(&mut self, end: usize) {
        self.exchanges(self.at..end);
        self.at = end;
        if !self.late && self.at >= self.resolved.late {
            self.pass_late();
        }
    }

    /// Runs what the executor wants to be run.
    fn driven(&mut self, h: &Hooked<ExecutorObject>, mode: Mode, memory: u64) -> Mode {
        let (resolved, round) = (self.resolved, self.inputs.round);
        let launch = Launch {
            number: resolved.number,
            memory,
            program: &resolved.program,
            late: resolved.late as u32,
            round,
            graphs: self.inputs.device.and_then(Device::graphs),
            exchanges: self.inputs.recorded,
            mode,
        };
        let turns = Turns { progress: Mutex::new(self), calls: &h.calls };
        let ran = h.call(|e| e.run(&launch, &StepsObject::lend(&turns)));
        let left = match &ran {
            Ok(_) if self.at == resolved.steps.len() || self.failure.is_some() => None,
            Ok(_) => Some(h.named(&OpError::new(format!(
                "its executor left steps {} to {} untaken",
                self.at,
                resolved.steps.len()
            )))),
            Err(error) => Some(error.clone()),
        };
        if let Some(HookError { owner, error }) = left {
            self.ended |= error.kind == ErrorKind::Fatal;
            self.failure.get_or_insert(Failure::of_hook("executor", &HookError { owner, error }));
        }
        // Exchanges that the executor has left out: other ranks make them.
        self.run(resolved.steps.len());
        ran.unwrap_or_default()
    }
}

/// What an executor takes steps through. One call at a time: steps do not nest.
struct Turns<'p, 'a> {
    progress: Mutex<&'p mut Progress<'a>>,
    /// The executor's: while steps run, it is not the one that hangs.
    calls: &'p Calls,
}

impl<'p, 'a> Turns<'p, 'a> {
    fn progress(&self) -> Result<MutexGuard<'_, &'p mut Progress<'a>>, OpError> {
        self.progress.try_lock().map_err(|_| OpError::new("steps were asked for while steps run"))
    }
}

impl Steps for Turns<'_, '_> {
    fn run(&self, end: u32) -> Result<bool, OpError> {
        let mut progress = self.progress()?;
        let end = progress.check(end)?;
        self.calls.sleep(|| progress.run(end));
        Ok(progress.failure.is_none())
    }

    fn ran(&self, end: u32) -> Result<(), OpError> {
        let mut progress = self.progress()?;
        let end = progress.check(end)?;
        self.calls.sleep(|| progress.skip(end));
        Ok(())
    }

    fn buffer(&self, buffer: plugfold_abi::BufferId) -> Result<View, OpError> {
        let progress = self.progress()?;
        let (program, placement) = (&progress.resolved.program, &progress.resolved.placement);
        let missing =
            || OpError::new(format!("there is no buffer {buffer}: {} there are", program.buffers.len()));
        let b = program.buffers.get(buffer as usize).ok_or_else(missing)?;
        let rows = height(program, b.extent.base, progress.inputs.round) * b.extent.times as usize;
        let ptr = progress.base.0.wrapping_add(placement.offsets[buffer as usize]);
        Ok(View { ptr, rows: rows as u32, cols: b.cols, stride: b.cols, dtype: b.dtype })
    }
}

/// Runs a program.
///
/// # Panics
/// When the round table is larger than the program's shape: that is a fault of the caller, found before memory is.
pub fn run(resolved: &Resolved, arena: &mut Arena, inputs: &RunInputs<'_>) -> Outcome {
    let program = &resolved.program;
    let round = inputs.round;
    assert!(
        round.rows() <= program.shape.rows as usize
            && round.seqs() <= program.shape.seqs as usize
            && round.out_rows.len() <= program.shape.out_rows.max(1) as usize,
        "a round of {} rows, {} sequences and {} wanted rows does not fit the shape {:?}",
        round.rows(),
        round.seqs(),
        round.out_rows.len(),
        program.shape
    );
    let ready = arena.reserve(resolved.placement.total).and_then(|()| fill(resolved, arena, inputs));
    let memory = arena.moves;
    let base = arena.base();
    let mut progress = Progress {
        resolved,
        inputs,
        base: Start(base),
        at: 0,
        late: false,
        ended: false,
        failure: ready
            .err()
            .map(|e| Failure::of_device("filling buffers", e))
            .or_else(|| inputs.failed.clone()),
        collectives: 0xcbf2_9ce4_8422_2325,
        clock: inputs.timer.map(|_| Instant::now()),
    };
    let mode = if let Some((executor, mode)) = inputs.executor {
        progress.driven(executor, mode, memory)
    } else {
        progress.run(resolved.steps.len());
        Mode::Eager
    };
    let Progress { mut failure, collectives, .. } = progress;
    if failure.is_none() {
        // What went wrong on a device shows here at the latest.
        let outputs = (0..program.buffers.len()).filter(|&b| program.buffers[b].output);
        let fetched =
            arena.fetch(outputs.map(|b| (resolved.placement.offsets[b], resolved.bytes_of(b, round))));
        failure = fetched.err().map(|e| Failure::of_device("reading results", e));
    }
    if failure.as_ref().is_none_or(|f| !f.exchange)
        && let Some(comm) = inputs.comm
        && let Err(error) = comm.check()
    {
        // What follows from the exchanges is worth nothing, and the other ranks are elsewhere.
        failure = Some(Failure::of_comm(error));
    }
    Outcome { failure, collectives, mode }
}

/// The call of a step.
fn call<'c>(resolved: &'c Resolved, base: *mut u8, at: usize, inputs: &RunInputs<'c>) -> Call<'c> {
    let (program, round) = (&resolved.program, inputs.round);
    let (step, found) = (&program.steps[at], &resolved.steps[at]);
    let mut call = Call {
        op: Text::from(step.op.as_str()),
        layer: step.layer,
        site: step.site,
        phase: program.shape.phase,
        rows: step.rows,
        seqs: step.seqs,
        inputs: [View::EMPTY; MAX_INPUTS],
        outputs: [View::EMPTY; MAX_OUTPUTS],
        weights: [None; MAX_WEIGHTS],
        caches: found.caches,
        dims: step.dims,
        params: step.params,
        round,
        comm: inputs.comm,
        knobs: Slice::from(inputs.knobs),
    };
    let picks = step.outputs.iter().any(|o| program.buffers[o.buffer as usize].extent.base == Base::OutRows);
    for (slot, operand) in call.inputs.iter_mut().zip(&step.inputs) {
        *slot = view(program, &resolved.placement, base, step, *operand, picks, round);
    }
    for (slot, operand) in call.outputs.iter_mut().zip(&step.outputs) {
        *slot = view(program, &resolved.placement, base, step, *operand, picks, round);
    }
    for (slot, index) in call.weights.iter_mut().zip(&found.weights) {
        *slot = index.map(|i| inputs.weights.get(i));
    }
    call
}

/// Fills the program's input buffer.
fn fill(resolved: &Resolved, arena: &mut Arena, inputs: &RunInputs<'_>) -> Result<(), DeviceError> {
    let Some(at) = resolved.hidden.filter(|_| !inputs.hidden.is_empty()) else { return Ok(()) };
    let bytes = bytemuck::cast_slice(inputs.hidden);
    assert!(
        bytes.len() <= resolved.placement.sizes[at],
        "rows for the program are larger than its input buffer"
    );
    // Input buffers share memory with nothing.
    arena.memory.write(resolved.placement.offsets[at], bytes)
}

impl Resolved {
    /// Reads rows of an output buffer after a run, as f32 row-major (i32 buffers come as their bit patterns).
    ///
    /// Returns `None` when the program has no output of that name.
    pub fn output<'a>(&self, arena: &'a mut Arena, name: &str, round: &RoundTable<'_>) -> Option<&'a [f32]> {
        let at = self.program.buffers.iter().position(|b| b.output && b.name.as_str() == name)?;
        Some(self.output_at(arena, at, round))
    }

    /// As [`Resolved::output`], for one of the outputs that every round reads.
    pub fn read<'a>(&self, arena: &'a mut Arena, what: Read, round: &RoundTable<'_>) -> Option<&'a [f32]> {
        Some(self.output_at(arena, self.reads[what as usize]?, round))
    }

    fn output_at<'a>(&self, arena: &'a mut Arena, at: usize, round: &RoundTable<'_>) -> &'a [f32] {
        // Output buffers share memory with nothing.
        arena.floats(self.placement.offsets[at], self.bytes_of(at, round) / 4)
    }

    /// Bytes of a buffer that a round fills.
    fn bytes_of(&self, at: usize, round: &RoundTable<'_>) -> usize {
        let buffer = &self.program.buffers[at];
        let rows = height(&self.program, buffer.extent.base, round) * buffer.extent.times as usize;
        rows * buffer.cols as usize * buffer.dtype.size()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_run_left_stays_readable_while_larger_programs_are_prepared() {
        let mut arena = Arena::new(None);
        arena.reserve(64).unwrap();
        arena.memory.write(8, bytemuck::cast_slice(&[1.5_f32, -2.0])).unwrap();
        arena.reserve(1 << 20).unwrap();
        assert_eq!(arena.floats(8, 2), [1.5, -2.0]);
        assert_eq!(arena.moves, 2);
    }
}

//! The eager executor: one call after another.

use std::time::Instant;

use plugfold_abi::{
    Base, Below, BelowObject, Call, CommObject, ErrorKind, KnobValue, MAX_INPUTS, MAX_OUTPUTS, MAX_WEIGHTS,
    OpError, Operand, Program, Provider, Reach, RoundTable, Slice, Step, Text, View, ops,
};

use super::resolve::{Fused, Link, MAX_COVER, ResolvedStep};
use super::{Placement, Resolved};
use crate::hooks::HookError;
use crate::weights::WeightTable;

/// Memory for buffers, grown to the largest program that was prepared and never shrunk.
#[derive(Default)]
pub struct Arena {
    /// 64-byte units, so that every buffer is aligned.
    memory: Vec<[u64; 8]>,
}

impl Arena {
    /// Makes room for a program. Called when a program is prepared, never in a round.
    pub fn reserve(&mut self, bytes: usize) {
        let units = bytes.div_ceil(64);
        if units > self.memory.len() {
            self.memory.resize(units, [0; 8]);
        }
    }

    fn base(&mut self) -> *mut u8 {
        self.memory.as_mut_ptr().cast()
    }
}

/// Is told a step that ran, its rows and its seconds.
pub type Timer<'a> = dyn Fn(&Step, u32, f64) + 'a;

/// What one run needs besides the program.
pub struct RunInputs<'a> {
    /// The round table.
    pub round: &'a RoundTable<'a>,
    /// The weights.
    pub weights: &'a WeightTable,
    /// Collectives; `None` on one rank.
    pub comm: Option<&'a CommObject>,
    /// Request knobs, folded over the sequences.
    pub knobs: &'a [KnobValue],
    /// Fills what may be filled late: called when the head has run. An error fails the forward.
    pub late: &'a dyn Fn() -> Result<(), HookError>,
    /// Told every step that ran, with its rows and seconds; `None`: nothing is timed.
    pub timer: Option<&'a Timer<'a>>,
    /// Buffers to fill first, by name, row-major f32.
    pub fill: &'a [(&'a str, &'a [f32])],
}

/// A step that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{op} of layer {layer}, run by {owner}: {error}")]
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

/// The parts of a run's result that outlive it.
pub struct Outcome {
    /// The first failure, if any.
    pub failure: Option<Failure>,
    /// Hash over the exchanges that ran, in order: equal on all ranks or they are out of step.
    pub collectives: u64,
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
    // SAFETY: the placement reserved `shape.rows * times * cols` elements here and the table holds at most that many.
    let ptr = unsafe { base.add(placement.offsets[operand.buffer as usize] + element * buffer.dtype.size()) };
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
            [link, rest @ ..] => link.provider.run(call, &link.plan, &BelowObject::lend(&Rest(rest))),
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

fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3)
}

/// Runs a program in list order.
///
/// After a failure only the exchanges still run, so that other ranks do not wait: what one rank failed, all end alike
/// (the caller agrees on it afterwards).
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
    arena.reserve(resolved.placement.total);
    let base = arena.base();
    fill(resolved, base, inputs);
    let mut failure: Option<Failure> = None;
    let mut collectives = 0xcbf2_9ce4_8422_2325;
    let mut clock = inputs.timer.map(|_| Instant::now());
    let mut at = 0;
    while at < program.steps.len() {
        let (step, found) = (&program.steps[at], &resolved.steps[at]);
        let exchange = step.reach == Reach::Exchange || ops::is_collective(&step.op);
        let covers = if let Fused::First(_, n) = found.fused { n } else { 1 };
        let covered = at..at + covers;
        at += covers;
        if failure.is_some() && !exchange {
            continue;
        }
        if exchange {
            collectives = mix(mix(collectives, u64::from(step.layer)), u64::from(step.site));
            collectives = step.op.bytes().fold(collectives, |h, b| mix(h, u64::from(b)));
        }
        let call = call(resolved, base, covered.start, inputs);
        let (owner, ran) = match &found.fused {
            Fused::First(link, _) => {
                let mut calls = [call; MAX_COVER];
                for (slot, i) in calls.iter_mut().zip(covered.clone()) {
                    *slot = self::call(resolved, base, i, inputs);
                }
                let calls = &calls[..covers];
                let below = Covered(&resolved.steps[covered], calls);
                let ran = link.provider.run_group(calls.into(), &link.plan, &BelowObject::lend(&below));
                (&link.owner, ran)
            }
            Fused::Alone | Fused::Inside => (&found.decides, Rest(&found.chain).run(&call)),
        };
        if let (Some(timer), Some(since)) = (inputs.timer, &mut clock) {
            let now = Instant::now();
            timer(step, step.rows.within(round.rows()).len() as u32, (now - *since).as_secs_f64());
            *since = now;
        }
        let ran = if step.op.as_str() == "head" { ran.and_then(|()| late(inputs)) } else { ran };
        // What a provider does wrong must not end the engine, nor the other ranks' wait for this one's exchanges.
        if let Err(error) = ran {
            let runs = found.chain.first().map_or(owner, |l| &l.owner);
            let first = Failure {
                op: step.op.to_string(),
                owner: if covers > 1 { owner } else { runs }.to_string(),
                layer: step.layer,
                exchange: exchange || error.kind == ErrorKind::Fatal,
                error,
            };
            let ends = first.exchange;
            if ends || failure.is_none() {
                failure = Some(first);
            }
            if ends {
                break;
            }
        }
    }
    Outcome { failure, collectives }
}

fn late(inputs: &RunInputs<'_>) -> Result<(), OpError> {
    (inputs.late)().map_err(|e| OpError { kind: e.error.kind, message: e.to_string().into() })
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

fn fill(resolved: &Resolved, base: *mut u8, inputs: &RunInputs<'_>) {
    for (name, data) in inputs.fill {
        let found = resolved.program.buffers.iter().position(|b| b.input && b.name.as_str() == *name);
        let Some(at) = found else { continue };
        assert!(data.len() * 4 <= resolved.placement.sizes[at], "input {name} is larger than its buffer");
        // SAFETY: the placement reserved `sizes[at]` bytes here; input buffers share memory with nothing.
        unsafe {
            std::ptr::copy_nonoverlapping(
                data.as_ptr().cast::<u8>(),
                base.add(resolved.placement.offsets[at]),
                data.len() * 4,
            );
        }
    }
}

impl Resolved {
    /// Reads rows of an output buffer after a run, as f32 row-major (i32 buffers come as their bit patterns).
    ///
    /// Returns `None` when the program has no output of that name.
    pub fn output<'a>(&self, arena: &'a mut Arena, name: &str, round: &RoundTable<'_>) -> Option<&'a [f32]> {
        let at = self.program.buffers.iter().position(|b| b.output && b.name.as_str() == name)?;
        let buffer = &self.program.buffers[at];
        let rows = height(&self.program, buffer.extent.base, round) * buffer.extent.times as usize;
        // SAFETY: the placement reserved these elements, output buffers share memory with nothing, and the arena is
        // borrowed for as long as the slice lives.
        Some(unsafe {
            let ptr = arena.base().add(self.placement.offsets[at]);
            #[allow(clippy::cast_ptr_alignment)] // placed on multiples of 64 bytes
            std::slice::from_raw_parts(ptr.cast::<f32>(), rows * buffer.cols as usize)
        })
    }
}

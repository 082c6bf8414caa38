//! The eager executor: one call after another.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use plugfold_abi::{
    Base, Below, Call, Comm, MAX_INPUTS, MAX_OUTPUTS, MAX_WEIGHTS, OpError, Operand, Program, Reach,
    RoundTable, Step, View, ops,
};

use super::resolve::Rest;
use super::{Placement, Resolved};
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

/// What one run needs besides the program.
pub struct RunInputs<'a> {
    /// The round table.
    pub round: &'a RoundTable<'a>,
    /// The weights.
    pub weights: &'a WeightTable,
    /// Collectives; `None` on one rank.
    pub comm: Option<&'a dyn Comm>,
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

fn panicked(panic: &(dyn Any + Send)) -> OpError {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    OpError::new(format!("panicked: {}", text.unwrap_or("without a message")))
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
    for (step, found) in program.steps.iter().zip(&resolved.steps) {
        let exchange = step.reach == Reach::Exchange || ops::is_collective(&step.op);
        if failure.is_some() && !exchange {
            continue;
        }
        let mut call = Call {
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
        };
        let picks =
            step.outputs.iter().any(|o| program.buffers[o.buffer as usize].extent.base == Base::OutRows);
        for (slot, operand) in call.inputs.iter_mut().zip(&step.inputs) {
            *slot = view(program, &resolved.placement, base, step, *operand, picks, round);
        }
        for (slot, operand) in call.outputs.iter_mut().zip(&step.outputs) {
            *slot = view(program, &resolved.placement, base, step, *operand, picks, round);
        }
        for (slot, index) in call.weights.iter_mut().zip(&found.weights) {
            *slot = index.map(|i| inputs.weights.get(i));
        }
        if exchange {
            collectives = mix(mix(collectives, u64::from(step.layer)), u64::from(step.site));
            collectives = step.op.bytes().fold(collectives, |h, b| mix(h, u64::from(b)));
        }
        // What a provider does wrong must not end the engine, nor the other ranks' wait for this one's exchanges.
        let ran = catch_unwind(AssertUnwindSafe(|| Rest(&found.chain).run(&call)));
        if let Err(error) = ran.unwrap_or_else(|panic| Err(panicked(panic.as_ref()))) {
            let owner = found.chain.first().map_or_else(String::new, |l| l.0.owner().to_owned());
            let first = Failure { op: step.op.clone(), owner, layer: step.layer, exchange, error };
            if exchange || failure.is_none() {
                failure = Some(first);
            }
            if exchange {
                break;
            }
        }
    }
    Outcome { failure, collectives }
}

fn fill(resolved: &Resolved, base: *mut u8, inputs: &RunInputs<'_>) {
    for (name, data) in inputs.fill {
        let found = resolved.program.buffers.iter().position(|b| b.input && b.name == *name);
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
        let at = self.program.buffers.iter().position(|b| b.output && b.name == name)?;
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

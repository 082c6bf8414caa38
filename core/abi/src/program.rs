//! A forward as data: the calls, the buffers between them, and what they read.

use crate::{DType, KnobValue, List, MAX_DIMS, MAX_PARAMS, Maybe, Span, TextBuf};

/// `layer` of calls outside the layers.
pub const NO_LAYER: u32 = u32::MAX;

/// Why a forward runs.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Decode and verify windows.
    Window = 0,
    /// A drafter's own forward.
    Draft = 1,
    /// Prompt rows.
    Prefill = 2,
}

/// What a program is kept under. Equal shapes run the same program.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Which of the builder's programs ("forward", "mtp", "commit").
    pub kind: TextBuf,
    /// Phase.
    pub phase: Phase,
    /// Most rows.
    pub rows: u32,
    /// Most sequences.
    pub seqs: u32,
    /// Most rows that want logits; 0 leaves the head out.
    pub out_rows: u32,
    /// Whether a row may see more tokens than the indexer keeps, so that selection runs.
    pub select: bool,
    /// Candidates a row that sampling asks for; 0 leaves `sample.candidates` out.
    pub candidates: u32,
    /// Further words that decide a program, of the engine ("taps", "streams") and of plugins, sorted by name.
    pub words: List<Word>,
    /// Folded request knobs that may decide a claim (effect bits or speed), by number.
    pub knobs: List<KnobValue>,
}

/// A word of a shape.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq, Hash)]
pub struct Word {
    /// Name.
    pub name: TextBuf,
    /// Value.
    pub value: u64,
}

/// Index into [`Program::buffers`].
pub type BufferId = u32;

/// What a buffer's height counts.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Base {
    /// Rows of the table.
    Rows = 0,
    /// Rows that want logits.
    OutRows = 1,
    /// Independent of the table.
    One = 2,
}

/// Height of a buffer: `times` a row (pairs of rows and experts have `times` = experts a token), or a fixed number.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// What is counted.
    pub base: Base,
    /// How many buffer rows each.
    pub times: u32,
}

/// A matrix between calls.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// For messages and dumps.
    pub name: TextBuf,
    /// Height.
    pub extent: Extent,
    /// Width in elements.
    pub cols: u32,
    /// Element type.
    pub dtype: DType,
    /// Filled from outside before the program runs (hidden rows of the draft head).
    pub input: bool,
    /// Read from outside after it ran: never shares memory with another buffer.
    pub output: bool,
}

/// Some columns of a buffer.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operand {
    /// Which buffer.
    pub buffer: BufferId,
    /// First column.
    pub col: u32,
    /// Columns.
    pub cols: u32,
}

/// What else of the round a call may touch, beyond its own rows: passes use it to decide what they may move.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reach {
    /// Each row by itself.
    Row = 0,
    /// Rows of one sequence together (recurrence, caches).
    Sequence = 1,
    /// All rows of the call together (grouping by expert).
    All = 2,
    /// All ranks.
    Exchange = 3,
}

/// One call of a program, before its operands have addresses.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq)]
pub struct Step {
    /// Operation name, see [`crate::ops`].
    pub op: TextBuf,
    /// Model layer or [`NO_LAYER`].
    pub layer: u32,
    /// Site in the layer.
    pub site: u32,
    /// Rows it covers.
    pub rows: Span,
    /// Sequences it covers.
    pub seqs: Span,
    /// Inputs, in operand order.
    pub inputs: List<Operand>,
    /// Outputs, in operand order.
    pub outputs: List<Operand>,
    /// Roles of the weights of this layer, in operand order.
    pub weights: List<TextBuf>,
    /// Cache families of this layer, in operand order.
    pub caches: List<TextBuf>,
    /// Sizes.
    pub dims: [u32; MAX_DIMS],
    /// Parameters.
    pub params: [f32; MAX_PARAMS],
    /// Reach.
    pub reach: Reach,
    /// Stream it is queued on; calls of one stream run in order.
    pub stream: u32,
    /// Events to wait for first.
    pub waits: List<u32>,
    /// Event it signals when done.
    pub signal: Maybe<u32>,
}

/// A forward.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq)]
pub struct Program {
    /// What it is kept under.
    pub shape: Shape,
    /// Buffers between the calls.
    pub buffers: List<Buffer>,
    /// Calls, in an order in which they could run one by one.
    pub steps: List<Step>,
}

//! A matrix (or a stack of equal matrices) of the model, prepared for the kernels that read it.

use crate::{Text, View};

/// Names of the weight formats that the reference knows. Other formats are plugins'.
pub mod formats {
    /// Plane 0: one row of f32 (vectors: norms, biases, taps as `[channels, taps]`).
    pub const PLAIN_F32: &str = "plain.f32";
    /// Plane 0: `[n, k]` bf16 rows as in the checkpoint (embedding table).
    pub const ROWS_BF16: &str = "rows.bf16";
    /// Plane 0: `[n, k]` f32 rows.
    pub const ROWS_F32: &str = "rows.f32";
    /// Plane 0: per stacked matrix, panels of 16 outputs `[ceil(n/16)][k][16]` bf16, the last panel padded with zeros.
    pub const PANEL16_BF16: &str = "panel16.bf16";
    /// The same with f32 elements.
    pub const PANEL16_F32: &str = "panel16.f32";
    /// Matrices put together of parts that keep their own storage, EXL3 or panels. Plane 0: `[segments, 16]` u32, each
    /// row a [`Segment`](super::Segment), in order of matrices and then of outputs. Plane 1: `[lines, 16]` u32, the data
    /// that the segments point to.
    pub const EXL3_SEGMENTS: &str = "exl3.segments";
    /// Rows that are looked up, in the row codec of EXL3. Plane 0: `[n, 2 * groups * (1 + 16 * bits)]` bytes, the rings
    /// of each row. Plane 1: `[groups, 256]` f32 signs.
    pub const EXL3_ROWS: &str = "exl3.rows";
}

/// A part of a matrix in the format [`formats::EXL3_SEGMENTS`]: some of its outputs, from some of its inputs.
///
/// Segments of one matrix cover its outputs from the first on. Segments with the same outputs follow each other with
/// rising inputs, and their results are added in that order. A stored block may be larger than what is used of it: its
/// first `lead` inputs and those after `lead + inputs` meet zeros, its first `skip` outputs and those after
/// `skip + outputs` are dropped. That is how a share is cut out of a layer whose transforms act on blocks of 128.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Which matrix of the stack.
    pub matrix: u32,
    /// First output of the matrix.
    pub output: u32,
    /// Outputs.
    pub outputs: u32,
    /// First input of the matrix.
    pub input: u32,
    /// Inputs.
    pub inputs: u32,
    /// Unused inputs before the first.
    pub lead: u32,
    /// Unused outputs before the first.
    pub skip: u32,
    /// [`Segment::EXL3`], [`Segment::BF16`] or [`Segment::F32`].
    pub kind: u32,
    /// Stored inputs.
    pub k: u32,
    /// Stored outputs.
    pub n: u32,
    /// EXL3: twice the bits a weight.
    pub halves: u32,
    /// EXL3: 0 `3inst`, 1 `mcg`, 2 `mul1`.
    pub codebook: u32,
    /// Line of the data: tiles `[k/16][n/16]` of a trellis, or panels of 16 outputs as in
    /// [`formats::PANEL16_BF16`].
    pub data: u32,
    /// Line of the input scales (f16), EXL3 only.
    pub suh: u32,
    /// Line of the output scales (f16), EXL3 only.
    pub svh: u32,
    /// Line of the bias (f32, one for each stored output) or [`Segment::NONE`].
    pub bias: u32,
}

impl Segment {
    /// A trellis.
    pub const EXL3: u32 = 0;
    /// Panels of bf16.
    pub const BF16: u32 = 1;
    /// Panels of f32.
    pub const F32: u32 = 2;
    /// No line.
    pub const NONE: u32 = u32::MAX;
    /// Bytes of a line of plane 1, to which the data of every segment is aligned.
    pub const LINE: usize = 64;
    /// Words of a row of plane 0.
    pub const WORDS: usize = size_of::<Segment>() / 4;
}

/// `count` matrices `[n, k]` (y = W x), in a format that says what the planes hold.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Weight {
    /// What the weight is for, as in [`crate::ops`] ("kda.in", "experts.down", ...).
    pub role: Text<'static>,
    /// One of [`formats`] or a plugin's.
    pub format: Text<'static>,
    /// Outputs of one matrix.
    pub n: u32,
    /// Inputs of one matrix.
    pub k: u32,
    /// Matrices in the stack (experts); 1 for a single one.
    pub count: u32,
    /// The data. A plane that spans the stack holds the matrices one after another.
    pub planes: [View; 4],
}

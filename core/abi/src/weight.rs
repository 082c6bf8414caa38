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

//! Reference operations of glm5_next.

// A kernel is compiled once for every instruction set; a helper that is not inlined into it would be compiled for the
// baseline only.
#![allow(clippy::inline_always)]
// Loops over lanes index several fixed-size arrays at once.
#![allow(clippy::needless_range_loop)]

pub mod cpu;
pub mod device;

/// Digest of this crate's sources: packing of weights is among them.
pub const BUILD: &str = plugfold_abi::build_id!();

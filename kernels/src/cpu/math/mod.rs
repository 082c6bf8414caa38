//! The mathematics of glm5_next over rows of f32, without any notion of calls, caches or slots.
//!
//! Every function is deterministic, and the bits of an output row depend on the operands of that row only: not on the
//! other rows of the call, not on the instruction set, not on the number of threads.

pub mod act;
pub mod dense;
pub mod grouped;
pub mod hc;
pub mod indexer;
pub mod kda;
pub mod latent;
pub mod mla;
pub mod moe;
pub mod norm;
pub mod num;
pub mod sample;
pub mod vision;

#[cfg(test)]
pub(crate) mod testing;

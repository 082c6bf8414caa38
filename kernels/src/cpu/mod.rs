//! CPU kernels: the mathematics, and the reference provider of every operation.

pub mod exl3;
pub mod math;
mod ops;
mod par;
pub mod roofline;
pub mod rows;
mod scratch;
mod simd;

pub use ops::{Lists, VERSION, down_tiled, groups, operands, reference, tower, up_tiled, write_latents};
pub use par::{size_pool, threads, threads_of};

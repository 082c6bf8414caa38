//! CPU kernels: the mathematics, and the reference provider of every operation.

pub mod exl3;
pub mod math;
mod par;
pub mod rows;
mod simd;

/// The reference provider of every operation.
pub fn reference() -> Vec<Box<dyn plugfold_abi::Provider>> {
    Vec::new()
}

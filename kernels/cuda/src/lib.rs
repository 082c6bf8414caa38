//! The CUDA device: the reference operations as kernels, and what runs them.
//!
//! A [`Machine`] launches kernels by name; [`Gpu`] is the one behind the driver's library, which is loaded when it is first
//! asked for, so that the same binary runs where there is no GPU. The kernels are CUDA C++ text in `cu`, one file an
//! operation, compiled for the present GPU by [`compile`] and kept on disk ([`cache`]). [`providers`] gives a provider for
//! every operation of [`plugfold_abi::ops`], with the bits of the CPU's reference: each kernel does the reference's
//! operations in the reference's order.

pub mod cache;
pub mod compile;
mod device;
mod driver;
mod error;
mod graphs;
mod kernel;
mod machine;
mod ops;
mod quantize;
pub mod roofline;
mod segments;
pub mod source;

pub use device::CudaDevice;
pub use driver::{Arena, Event, Gpu, Pinned, class, devices};
pub use error::CudaError;
pub use kernel::{Arg, Kernel, Launch, kernel, kernels};
pub use machine::{Machine, Scratch};
pub use ops::providers;
pub use quantize::TileQuantizer;

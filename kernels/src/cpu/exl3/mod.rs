//! EXL3 weights: the trellis-coded format of ExLlamaV3, read, multiplied and written.

pub mod bench;
mod bits;
mod codebook;
mod embedding;
mod error;
mod experts;
mod format;
mod hadamard;
mod lanes;
mod layer;
mod matmul;
mod products;
pub mod quantize;
mod rate;
mod rotate;
mod tile;

pub use bits::{pack_states, place, states_chain, unpack_states};
pub use codebook::{Codebook, MCG_MULTIPLIER, MUL1_MULTIPLIER};
pub use embedding::{Embedding, is_embedding};
pub use error::Error;
pub use experts::{Routes, experts};
pub use format::{Dtype, Header, RawTensor, Tensors, is_layer, read_header, read_layer, read_slice};
pub use hadamard::{BLOCK, hadamard};
pub use lanes::Path;
pub use layer::{Layer, Planes};
pub use matmul::Options;
pub use rate::{POSITIONS, Rate};
pub use rotate::Activations;

#[cfg(test)]
mod tests;

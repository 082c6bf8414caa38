//! EXL3 weights: the trellis-coded format of ExLlamaV3, read, multiplied and written.

pub mod bench;
mod bits;
mod codebook;
mod embedding;
mod error;
mod format;
mod hadamard;
mod lanes;
mod layer;
mod matmul;
mod products;
pub mod quantize;
mod rate;
mod rotate;
mod segments;
mod stored;
mod tile;
mod view;

pub use bits::{pack_states, place, states_chain, unpack_states};
pub use codebook::{Codebook, MCG_MULTIPLIER, MUL1_MULTIPLIER};
pub use embedding::{Embedding, EmbeddingView, is_embedding};
pub use error::Error;
pub use format::{Dtype, RawTensor, Tensors, is_layer, read_header, read_layer, read_slice};
pub use hadamard::{BLOCK, hadamard};
pub use lanes::Path;
pub use layer::{Layer, Planes};
pub use matmul::Options;
pub use rate::{POSITIONS, Rate};
pub use rotate::Activations;
pub use segments::{Cut, Lines, Plan, SegmentError, Segments, Slots};
pub use stored::{Header, StoredLayer};
pub use view::LayerView;

#[cfg(test)]
mod tests;

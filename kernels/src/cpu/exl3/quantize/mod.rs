//! Writing EXL3: from a matrix to the tensors of a layer.
//!
//! # A checkpoint from layers
//!
//! For every linear layer `P` of the source (its weight is `P.weight`, `(out, in)`) a converter calls
//! [`quantize`] and stores what [`tensors`] returns: `P.suh`, `P.svh`, the codebook's marker, `P.trellis` and
//! `P.bias`, in the model's order. Norms, embeddings, routers and small projections stay as they were. Stacked
//! experts become one layer an expert (`M.experts.{e}.gate_proj`, `.up_proj`, `.down_proj`), fused projections are
//! split first. Layers that read the same activations share [`Settings::input_seed`]; [`seed_of`] makes seeds from
//! the names of modules, so that a run resumed after a kill gives the same bytes.
//!
//! `quantization_config.json` lists each layer under `tensor_storage`, which [`storage`] describes; `config.json`
//! gets the same object without that map: `quant_method` `"exl3"`, `version`, `bits`, `head_bits`, `calibration`,
//! `out_scales`, `codebook`.

mod calibrated;
mod cholesky;
mod hessian;
mod matrix;
mod store;
mod viterbi;

pub use hessian::Hessian;
pub use matrix::{Progress, Quantized, Settings, default_rms, quantize, quantize_by, seed_of};
pub use store::{Storage, StoredTensor, storage, tensors};
pub use viterbi::{TileEncoder, Tiles};

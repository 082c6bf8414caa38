//! What can be wrong with stored tensors.

use thiserror::Error;

/// Why a layer cannot be read, cut or written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Error {
    /// A tensor contradicts itself or the others of its layer.
    #[error("tensor `{tensor}`: {problem}")]
    Tensor {
        /// Full name of the tensor.
        tensor: String,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// A layer lacks a tensor.
    #[error("layer `{layer}` has no tensor `{layer}.{missing}`")]
    Missing {
        /// Name of the layer.
        layer: String,
        /// Suffix of the tensor, alternatives separated by ` or `.
        missing: String,
    },
    /// A rate that the codebook does not have.
    #[error(
        "codebook {codebook} has no rate of {bits} bits: 1 to 8 in whole bits, and 1.5, 2.5, 3.5 with mul1 only"
    )]
    Rate {
        /// The codebook.
        codebook: &'static str,
        /// The rate asked for.
        bits: String,
    },
    /// A device that encodes.
    #[error("the device cannot encode: {0}")]
    Device(String),
    /// A cut that the block transforms do not allow.
    #[error(
        "layer `{layer}`: {side} range {start}..{end} of {channels} channels must be non-empty, inside, and on multiples of 128"
    )]
    Cut {
        /// Name of the layer.
        layer: String,
        /// `k` or `n`.
        side: String,
        /// First channel.
        start: usize,
        /// End of the range.
        end: usize,
        /// Channels of the layer.
        channels: usize,
    },
}

impl Error {
    pub(super) fn tensor(tensor: String, problem: impl Into<String>) -> Self {
        Self::Tensor { tensor, problem: problem.into() }
    }
}

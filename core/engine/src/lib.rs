//! The exact reference engine: from a checkpoint to token ids.

pub mod checkpoint;
pub mod config;
pub mod core;
pub mod engine;
pub mod exchange;
pub mod hooks;
pub mod image;
pub mod knobs;
pub mod logprobs;
mod memory;
pub mod plan;
pub mod program;
pub mod rank;
pub mod ranks;
pub mod rounds;
pub mod sampling;
pub mod service;
pub mod split;
pub mod state;
pub mod transport;
pub mod vision;
pub mod watchdog;
pub mod weights;

/// Digest of this crate's sources: loading, splitting and layout of weights are among them.
pub const BUILD: &str = plugfold_abi::build_id!();

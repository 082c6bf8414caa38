//! The exact reference engine: from a checkpoint to token ids.
pub mod config;
pub mod service;

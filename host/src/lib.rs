//! The plugfold host: text, replies, HTTP, configuration and the command line.
//!
//! It speaks to an engine through [`plugfold_engine::service::Service`] only, so all of it can be tested with a scripted
//! one ([`scripted`]).

pub mod chains;
pub mod config;
pub mod device;
pub mod exact;
pub mod http;
pub mod knobs;
pub mod plugins;
pub mod reply;
pub mod scripted;
pub mod stacks;
pub mod text;
pub mod traces;
pub mod vision;

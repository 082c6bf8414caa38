//! Shared helpers of the whole-system tests.

pub mod agents;
pub mod catalogue;
pub mod drafting;
pub mod drafts;
pub mod faulty;
pub mod goldens;
pub mod guess;
pub mod hooks;
pub mod host;
pub mod http;
pub mod integer;
pub mod isolated;
pub mod keeper;
pub mod model;
pub mod node;
pub mod python;
pub mod spoiler;
pub mod states;

//! The OpenAI-compatible server.
//!
//! A request's way: [`server`] (socket, time limits) → [`routes`] (the table) → [`body`] (size limit) → [`request`]
//! (all checks, on a blocking thread) → the engine → [`pump`] (a thread: decoding and parsing) → [`shape`] (JSON) →
//! [`completions`] (whole or streamed).

pub mod app;
pub mod body;
pub mod completions;
pub mod dialect;
pub mod doc;
pub mod error;
pub mod fields;
pub mod info;
pub mod keys;
pub mod limits;
pub mod loaded;
pub mod messages;
pub mod metrics;
pub mod page;
pub mod policy;
pub mod pump;
pub mod request;
pub mod responses;
pub mod routes;
pub mod server;
pub mod shape;

pub use app::{App, HttpSettings};
pub use limits::Limits;
pub use server::Server;

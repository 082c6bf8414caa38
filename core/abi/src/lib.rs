//! What crosses the plugin boundary of Plugfold: plain `repr(C)` views, the operation table and the traits behind it.
//!
//! Nothing here computes. The engine writes [`Program`]s (a forward is data), resolves every [`Step`] to a
//! [`Provider`] once a shape, and runs them with a [`Call`] each. The operand lists of all operations are in [`ops`].
//!
//! Interfaces are version 0: they may still change.

mod cache;
mod call;
mod comm;
mod error;
pub mod ops;
mod program;
mod provider;
mod round;
mod slice;
mod tensor;
mod weight;

pub use cache::{Addressing, CacheView, SlotState};
pub use call::{Call, MAX_CACHES, MAX_DIMS, MAX_INPUTS, MAX_OUTPUTS, MAX_PARAMS, MAX_WEIGHTS, Span};
pub use comm::Comm;
pub use error::OpError;
pub use program::{
    Base, Buffer, BufferId, Extent, NO_LAYER, Operand, Pass, Phase, Program, Reach, Shape, Step,
};
pub use provider::{Below, Bits, Claim, Granted, Plan, Provider, Query};
pub use round::RoundTable;
pub use slice::{Slice, Text};
pub use tensor::{DType, View};
pub use weight::{Weight, formats};

/// Ids at or above this are virtual: rows of an attachment (an image), not of the embedding table.
pub const FIRST_VIRTUAL_ID: u32 = 1 << 24;

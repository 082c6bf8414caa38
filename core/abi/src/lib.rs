//! What crosses the plugin boundary of Plugfold: plain `repr(C)` views, the operation table and the traits behind it.
//!
//! Nothing here computes. The engine writes [`Program`]s (a forward is data), resolves every [`Step`] to a
//! [`Provider`] once a shape, and runs them with a [`Call`] each. The operand lists of all operations are in [`ops`], the
//! other hook points in [`points`], the life of a plugin in [`life`], how libraries meet in [`boundary`].
//!
//! Interfaces are version 0: they may still change.

pub mod boundary;
mod cache;
mod call;
mod comm;
mod error;
mod knobs;
pub mod life;
pub mod markup;
pub mod ops;
pub mod points;
mod program;
mod provider;
mod round;
mod slice;
mod tensor;
mod weight;

pub use abi_stable::StableAbi;
pub use boundary::{List, Maybe, TextBuf};
pub use cache::{Addressing, CacheView, SlotState};
pub use call::{Call, MAX_CACHES, MAX_DIMS, MAX_INPUTS, MAX_OUTPUTS, MAX_PARAMS, MAX_WEIGHTS, Span};
pub use comm::{Comm, CommObject, CommTable, Exchanges};
pub use error::{ErrorKind, OpError};
pub use knobs::{Knob, KnobId, KnobValue, Knobs, value_of};
pub use plugfold_macros::build_id;
pub use program::{
    Base, Buffer, BufferId, Extent, NO_LAYER, Operand, Phase, Program, Reach, Shape, Step, Word,
};
pub use provider::{
    Below, BelowObject, BelowTable, Bits, CacheKind, Claim, Granted, Member, Pass, PassContext, PassObject,
    PassTable, Plan, Provider, ProviderObject, ProviderTable, Query,
};
pub use round::RoundTable;
pub use slice::{Slice, SliceMut, Text};
pub use tensor::{DType, View};
pub use weight::{Segment, Weight, formats};

// What the derive of `StableAbi` names: see `fixed_layouts!`.
#[doc(hidden)]
pub use abi_stable::{_sabi_type_layouts, make_item_info, pmr, rslice, std_types, tl_genparams, type_layout};

/// For crates with interfaces or types of their own that cross: write it once, at the root of the crate. It lets
/// `#[derive(plugfold_abi::StableAbi)]` and [`interface!`] find what they need in this crate, so that no other dependency is
/// needed. (The derive names its own crate by an absolute path.)
#[macro_export]
macro_rules! fixed_layouts {
    () => {
        #[doc(hidden)]
        #[allow(unused_extern_crates)]
        extern crate plugfold_abi as abi_stable;
    };
}

/// Digest of this crate's sources: of the boundary that whoever links it was built against.
pub const BUILD: &str = build_id!();

/// Ids at or above this are virtual: rows of an attachment (an image), not of the embedding table.
pub const FIRST_VIRTUAL_ID: u32 = 1 << 24;

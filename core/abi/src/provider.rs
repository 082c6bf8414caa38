//! Who runs an operation.

use crate::{Addressing, Call, MAX_DIMS, MAX_WEIGHTS, OpError, Phase, Text};

/// Everything that a claim may depend on: two calls with equal queries get the same provider and plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Operation name.
    pub op: Text<'a>,
    /// Model layer.
    pub layer: u32,
    /// Site in the layer.
    pub site: u32,
    /// Phase.
    pub phase: Phase,
    /// Kind of device ("cpu", or a CUDA architecture).
    pub device_class: Text<'a>,
    /// Most rows of a call.
    pub rows: u32,
    /// Most sequences of a call.
    pub seqs: u32,
    /// Sizes, as in [`crate::ops`].
    pub dims: [u32; MAX_DIMS],
    /// Formats of the weights, in operand order; empty where none.
    pub weight_formats: [Text<'a>; MAX_WEIGHTS],
    /// Row format of the first cache family, empty where none.
    pub cache_format: Text<'a>,
    /// Addressing of the first cache family.
    pub addressing: Addressing,
}

/// A plugin's own 64 bytes (a tile, a grid) that `run` gets back.
pub type Plan = [u8; 64];

/// Whose bits a provider computes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Bits {
    /// An arithmetic of its own; the name holds every setting that decides bits.
    Own(String),
    /// Proven equal to the named arithmetic.
    Of(String),
}

impl Bits {
    /// The arithmetic's name.
    pub fn name(&self) -> &str {
        match self {
            Bits::Own(name) | Bits::Of(name) => name,
        }
    }
}

/// An accepted claim.
#[derive(Clone, Debug)]
pub struct Granted {
    /// Whose bits.
    pub bits: Bits,
    /// For `run`.
    pub plan: Plan,
}

/// A provider's answer to a query.
#[derive(Clone, Debug)]
pub enum Claim {
    /// Not this call.
    No,
    /// It will run such calls.
    Yes(Granted),
}

/// Runs the provider beneath.
pub trait Below {
    /// Passes a call on.
    ///
    /// # Errors
    /// What the provider beneath failed with.
    fn run(&self, call: &Call<'_>) -> Result<(), OpError>;
}

/// One provider of one operation.
pub trait Provider: Send + Sync {
    /// The operation's name.
    fn op(&self) -> &str;
    /// Who brings it ("ref", or a plugin's id).
    fn owner(&self) -> &str;
    /// Asked once a shape; must depend on the query and load-time settings only.
    fn claim(&self, query: &Query<'_>) -> Claim;
    /// Runs a call that it claimed.
    ///
    /// # Errors
    /// A shape, format or value that it cannot run, naming the operation, the operand and both values.
    fn run(&self, call: &Call<'_>, plan: &Plan, below: &dyn Below) -> Result<(), OpError>;
}

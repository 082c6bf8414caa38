//! Who runs an operation, and who rewrites programs.

use crate::{
    Addressing, Call, DType, KnobValue, List, MAX_CACHES, MAX_DIMS, MAX_INPUTS, MAX_OUTPUTS, MAX_WEIGHTS,
    Maybe, OpError, Phase, Program, Slice, Text, TextBuf, Word,
};

/// Format and addressing of a cache family.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheKind<'a> {
    /// Row format; empty where the call has no such family.
    pub format: Text<'a>,
    /// How positions become rows.
    pub addressing: Addressing,
}

impl CacheKind<'_> {
    /// No family.
    pub const NONE: CacheKind<'static> = CacheKind { format: Text::EMPTY, addressing: Addressing::State };
}

/// Everything that a claim may depend on: two calls with equal queries get the same provider and plan.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Query<'a> {
    /// Operation name.
    pub op: Text<'a>,
    /// Kind of the program ("forward", "mtp", "commit").
    pub program: Text<'a>,
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
    /// Roles of the weights, in operand order; empty where none.
    pub weight_roles: [Text<'a>; MAX_WEIGHTS],
    /// Formats of the weights, in operand order; empty where none.
    pub weight_formats: [Text<'a>; MAX_WEIGHTS],
    /// Cache families, in operand order.
    pub caches: [CacheKind<'a>; MAX_CACHES],
    /// Element types of the inputs.
    pub input_types: [DType; MAX_INPUTS],
    /// Element types of the outputs.
    pub output_types: [DType; MAX_OUTPUTS],
    /// Words of the shape.
    pub words: Slice<'a, Word>,
    /// Folded request knobs of the shape, by number; those that may not decide a claim have their load values.
    pub knobs: Slice<'a, KnobValue>,
}

impl<'a> Query<'a> {
    /// A query with nothing but its operation, for tests of plugins.
    pub fn of(op: &'a str, phase: Phase) -> Self {
        Self {
            op: Text::from(op),
            program: Text::EMPTY,
            layer: 0,
            site: 0,
            phase,
            device_class: Text::EMPTY,
            rows: 1,
            seqs: 1,
            dims: [0; MAX_DIMS],
            weight_roles: [Text::EMPTY; MAX_WEIGHTS],
            weight_formats: [Text::EMPTY; MAX_WEIGHTS],
            caches: [CacheKind::NONE; MAX_CACHES],
            input_types: [DType::F32; MAX_INPUTS],
            output_types: [DType::F32; MAX_OUTPUTS],
            words: Slice::default(),
            knobs: Slice::default(),
        }
    }
}

/// A provider's own 64 bytes (a tile, a grid) that `run` gets back.
pub type Plan = [u8; 64];

/// Whose bits a provider computes.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub enum Bits {
    /// An arithmetic of its own; the name holds every setting that decides bits.
    Own(TextBuf),
    /// Proven equal to the named arithmetic; "ref" is the reference's, whatever the device. A fusion of operations that differ
    /// in it names one for each, in order, joined by `+`: `dense-q4+ref`.
    Of(TextBuf),
}

impl Bits {
    /// An arithmetic of its own.
    pub fn own(name: &str) -> Self {
        Bits::Own(name.into())
    }
    /// Equal to another's.
    pub fn of(name: &str) -> Self {
        Bits::Of(name.into())
    }
    /// The arithmetic's name.
    pub fn name(&self) -> &str {
        match self {
            Bits::Own(name) | Bits::Of(name) => name,
        }
    }
}

/// An accepted claim.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug)]
pub struct Granted {
    /// Whose bits.
    pub bits: Bits,
    /// For `run`.
    pub plan: Plan,
    /// Positions at which states of this arithmetic may be kept: multiples of this; 1 for any.
    pub grid: u32,
}

impl Granted {
    /// A claim without a plan, on states that may be kept anywhere.
    pub fn plain(bits: Bits) -> Self {
        Self { bits, plan: [0; 64], grid: 1 }
    }
}

/// A provider's answer to a query.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Debug)]
pub enum Claim {
    /// Not this call.
    No,
    /// It will run such calls.
    Yes(Granted),
    /// The provider of that name (`plugin/name`) will run them, for this one.
    As(TextBuf, Granted),
}

/// The value of a knob that selects a provider among those of its family.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Number of the request knob.
    pub knob: crate::KnobId,
    /// The value for which this provider stands, as text.
    pub value: TextBuf,
}

crate::interface! {
    /// Runs the provider beneath.
    "below", 0: Below, BelowObject, BelowTable {
        /// Passes a call on (of a fusion: one of the calls that it covers).
        fn run(&self, call: &Call<'_>) -> ();
    }
}

crate::interface! {
    /// One provider of one operation.
    "provider", 0: Provider, ProviderObject, ProviderTable {
        /// The operation's name.
        fn op(&self) -> TextBuf;
        /// Its own name, unique in its plugin.
        fn name(&self) -> TextBuf = Ok("main".into());
        /// Consecutive operations that it covers in one go, the first being [`Provider::op`]; empty for a plain provider.
        /// A fusion runs where each of them would go to the reference or to a plugin that it is `over`.
        fn covers(&self) -> List<TextBuf> = Ok(List::new());
        /// The knob value for which it stands, where a knob selects among providers.
        fn family(&self) -> Maybe<Member> = Ok(Maybe::RNone);
        /// Asked once a shape; must depend on the query and load-time settings only. Of a fusion: about the first operation.
        fn claim(&self, query: &Query<'_>) -> Claim;
        /// Of a fusion that has claimed: whether it takes these operations together (two products of equal shapes, say).
        fn takes(&self, queries: Slice<'_, Query<'_>>) -> bool = Ok(true);
        /// Runs a call that it claimed.
        fn run(&self, call: &Call<'_>, plan: &Plan, below: &BelowObject) -> ();
        /// Runs the calls that a fusion covers, in order of [`Provider::covers`].
        fn run_group(&self, calls: Slice<'_, Call<'_>>, plan: &Plan, below: &BelowObject) -> ()
            = Err(OpError::new("this provider covers one operation only"));
        /// Compares itself with the reference before anything is served; a difference is a reason not to use it.
        fn self_check(&self) -> Maybe<TextBuf> = Ok(Maybe::RNone);
    }
}

/// What a pass may look at besides the program.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct PassContext<'a> {
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub ranks: u32,
    /// Kind of device.
    pub device_class: Text<'a>,
}

crate::interface! {
    /// Rewrites programs before they are checked and resolved: what touches many operations at once (sub-blocks, row
    /// splits, pipelines, an operation put in between) is a pass, not a provider of them all.
    "pass", 0: Pass, PassObject, PassTable {
        /// Its name, for messages and listings.
        fn name(&self) -> TextBuf;
        /// Changes a program. Runs once a shape, on every rank alike: it may depend on the program, the context and
        /// settings only. An error fails the calls of that shape.
        fn rewrite(&self, program: &mut Program, context: &PassContext<'_>) -> ();
    }
}

//! One operation on concrete memory.

use crate::{CacheView, CommObject, KnobValue, Phase, RoundTable, Slice, Text, View, Weight};

/// Most inputs of a call.
pub const MAX_INPUTS: usize = 6;
/// Most outputs of a call.
pub const MAX_OUTPUTS: usize = 4;
/// Most weights of a call.
pub const MAX_WEIGHTS: usize = 4;
/// Most cache families of a call.
pub const MAX_CACHES: usize = 4;
/// Integer sizes of a call; their meaning is in [`crate::ops`].
pub const MAX_DIMS: usize = 8;
/// Float parameters of a call.
pub const MAX_PARAMS: usize = 4;

/// A half-open range of rows or sequences.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// First.
    pub start: u32,
    /// One past the last; [`Span::ALL`] means up to the end of the table.
    pub end: u32,
}

impl Span {
    /// Everything, whatever the table holds.
    pub const ALL: Span = Span { start: 0, end: u32::MAX };

    /// The part of the span that exists in a table of `len`.
    pub const fn within(self, len: usize) -> std::ops::Range<usize> {
        let end = if (self.end as usize) < len { self.end as usize } else { len };
        let start = if (self.start as usize) < end { self.start as usize } else { end };
        start..end
    }
}

/// One call. Views of row buffers already start at the call's first row and hold just its rows; the round table is whole.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy)]
pub struct Call<'a> {
    /// Operation name.
    pub op: Text<'a>,
    /// Model layer, [`crate::NO_LAYER`] outside the layers.
    pub layer: u32,
    /// Which of a layer's equal operations this is (0 attention, 1 feed-forward).
    pub site: u32,
    /// Why the forward runs.
    pub phase: Phase,
    /// Rows of the table that this call covers.
    pub rows: Span,
    /// Sequences of the table that this call covers.
    pub seqs: Span,
    /// Input views, as many as the operation has.
    pub inputs: [View; MAX_INPUTS],
    /// Output views.
    pub outputs: [View; MAX_OUTPUTS],
    /// Weights.
    pub weights: [Option<&'a Weight>; MAX_WEIGHTS],
    /// Cache families of this layer.
    pub caches: [CacheView; MAX_CACHES],
    /// Sizes, see [`crate::ops`].
    pub dims: [u32; MAX_DIMS],
    /// Parameters, see [`crate::ops`].
    pub params: [f32; MAX_PARAMS],
    /// The round table.
    pub round: &'a RoundTable<'a>,
    /// Collectives, for `comm.*`; `None` on one rank.
    pub comm: Option<&'a CommObject>,
    /// Request knobs of the call's sequences, folded, by their number (see [`crate::KnobId`]).
    pub knobs: Slice<'a, KnobValue>,
}

impl<'a> Call<'a> {
    /// A call with nothing but its operation, for tests of plugins.
    pub fn of(op: &'a str, phase: Phase, round: &'a RoundTable<'a>) -> Self {
        Self {
            op: Text::from(op),
            layer: 0,
            site: 0,
            phase,
            rows: Span::ALL,
            seqs: Span::ALL,
            inputs: [View::EMPTY; MAX_INPUTS],
            outputs: [View::EMPTY; MAX_OUTPUTS],
            weights: [None; MAX_WEIGHTS],
            caches: [CacheView::EMPTY; MAX_CACHES],
            dims: [0; MAX_DIMS],
            params: [0.0; MAX_PARAMS],
            round,
            comm: None,
            knobs: Slice::default(),
        }
    }
}

//! What is decided before memory is taken: limits, the cache layout, shape words and round-table fields.

use super::Families;
use crate::{DType, KnobValue, Phase, Slice, TextBuf, View};

/// Sizes that decide memory and what a request may ask for. Links raise them, nothing lowers them.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Tokens a sequence may hold.
    pub context: u32,
    /// Sequences at once.
    pub slots: u32,
    /// Rows of the largest verify window.
    pub window_rows: u32,
    /// Rows of a prefill chunk where nobody says otherwise.
    pub prefill_rows: u32,
    /// Rows of the largest prefill chunk.
    pub prefill_rows_max: u32,
    /// Tokens of a prompt piece of one round.
    pub piece: u32,
}

/// What slots would take, once the weights are loaded.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotMemory {
    /// Slots that are asked for.
    pub slots: u32,
    /// Bytes of one.
    pub slot_bytes: u64,
    /// Bytes that could still be taken on this rank.
    pub free_bytes: u64,
}

crate::interface! {
    /// A link of the `limits` chain.
    "limits", 0: LimitsLink, LimitsLinkObject, LimitsLinkTable {
        /// Raises limits.
        fn raise(&self, limits: &mut Limits) -> ();
        /// How many of the slots to make, at least 1. All ranks make the least that any link on any rank says.
        fn fit(&self, memory: &SlotMemory) -> u32 = Ok(memory.slots);
    }
}

crate::interface! {
    /// A link of the `cache.layout` chain.
    "cache-layout", 0: LayoutLink, LayoutLinkObject, LayoutLinkTable {
        /// Changes fields of families, or adds families. Two plugins that set one field of a family refuse to start,
        /// unless one names the other (`extends`, `over`).
        fn edit(&self, families: &mut Families) -> ();
    }
}

/// The rows and sequences of a forward that is about to run. The same on every rank.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct BatchFacts<'a> {
    /// Phase.
    pub phase: Phase,
    /// Token of each row, sequence by sequence; none where a shape is looked up without a forward.
    pub tokens: Slice<'a, u32>,
    /// Rows of each sequence.
    pub rows: Slice<'a, u32>,
    /// Committed length of each sequence.
    pub starts: Slice<'a, u32>,
    /// Slot of each sequence; none where a shape is looked up without a forward.
    pub slots: Slice<'a, u32>,
    /// Request knobs, folded over the sequences.
    pub knobs: Slice<'a, KnobValue>,
}

crate::interface! {
    /// Words of a shape: what makes two forwards run different programs. Replicated, pure.
    "words", 0: Words, WordsObject, WordsTable {
        /// The word's name.
        fn name(&self) -> TextBuf;
        /// Its value for a forward; 0 leaves it out.
        fn value(&self, batch: &BatchFacts<'_>) -> u64;
    }
}

/// Number of a registered field, an index into [`crate::RoundTable::fields`].
pub type FieldId = u32;

/// What a field has one entry for.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldPer {
    /// Row of the table.
    Row = 0,
    /// Sequence of the table.
    Sequence = 1,
    /// The table.
    Once = 2,
}

/// A field of the round table that a plugin brings.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct FieldSpec {
    /// Name, for messages.
    pub name: TextBuf,
    /// Element type.
    pub dtype: DType,
    /// What it has an entry for.
    pub per: FieldPer,
    /// Elements an entry.
    pub width: u32,
    /// Filled after the forward was launched, before the first step that is marked late.
    pub late: bool,
}

crate::interface! {
    /// Fills a field of the round table before each forward. Replicated.
    "field", 0: Fields, FieldsObject, FieldsTable {
        /// The field.
        fn spec(&self) -> FieldSpec;
        /// Told its number before programs are built.
        fn numbered(&self, id: FieldId) -> ();
        /// Fills the entries of a forward; they are zero before.
        fn fill(&self, batch: &BatchFacts<'_>, entries: View) -> ();
    }
}

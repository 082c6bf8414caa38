//! The round table: everything of a forward that may change while its program stays the same.

use crate::Slice;

/// One forward's rows and sequences. In window and draft phase no address, position, slot or parity of a sequence
/// comes from anywhere else, so a captured program can be replayed for other sequences.
///
/// Rows of a sequence are consecutive; sequences follow each other in table order (ragged, no padding between).
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, Default)]
pub struct RoundTable<'a> {
    /// Token id of each row (virtual at or above [`crate::FIRST_VIRTUAL_ID`]). Draft head: the token that follows.
    pub tokens: Slice<'a, u32>,
    /// Absolute position of each row.
    pub positions: Slice<'a, u32>,
    /// Index into the sequence fields below, of each row.
    pub row_seq: Slice<'a, u32>,
    /// First row of each sequence.
    pub seq_first: Slice<'a, u32>,
    /// Rows of each sequence, at least one.
    pub seq_rows: Slice<'a, u32>,
    /// Committed length of each sequence before this forward (the position of its first row).
    pub seq_start: Slice<'a, u32>,
    /// Slot of each sequence.
    pub seq_slot: Slice<'a, u32>,
    /// Which of a slot's two state buffers is committed (0 or 1). A forward reads it and writes the other.
    pub seq_parity: Slice<'a, u32>,
    /// Rows to keep of each sequence; read by commit programs only.
    pub seq_keep: Slice<'a, u32>,
    /// Rows whose logits are wanted, ascending.
    pub out_rows: Slice<'a, u32>,
    /// Per row, the address of `hidden_size` f32 that stand in for the embedding, or null. Empty: none at all.
    pub embeds: Slice<'a, usize>,
    /// Fields that plugins registered, by [`crate::points::FieldId`]; rows follow the field's own count.
    pub fields: Slice<'a, crate::View>,
}

impl RoundTable<'_> {
    /// Rows in the table.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }
    /// Sequences in the table.
    pub fn seqs(&self) -> usize {
        self.seq_first.len()
    }
}

//! Cache families as data, and the host's only way to what they hold.

use super::DraftRows;
use crate::{Addressing, List, Slice, TextBuf};

/// Who reads a family.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// The model's layers.
    Model = 0,
    /// The multi-token-prediction layer.
    Mtp = 1,
    /// A drafter with layers of its own.
    Drafter = 2,
}

/// One cache family: the same kind of record in some layers of every slot.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// Name, as in [`crate::ops`].
    pub id: TextBuf,
    /// Layers that have it.
    pub layers: List<u32>,
    /// Reader.
    pub owner: Owner,
    /// How positions map to rows.
    pub addressing: Addressing,
    /// Row format ("f32" in the reference, "latent.f32", ...).
    pub format: TextBuf,
    /// Bytes a row; a multiple of 4.
    pub row_bytes: u64,
    /// Positions a row covers (1, or the pool size); 0 for records without positions.
    pub positions_a_row: u32,
    /// Rows a slot.
    pub rows: u32,
    /// Buffers a slot: 2 where a forward reads one and writes the other.
    pub buffers: u32,
    /// Whether a snapshot holds a copy (recurrent state) or relies on the slot's rows.
    pub in_snapshot: bool,
}

/// All families of a rank, with what links may need to edit them.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Families {
    /// The families.
    pub all: List<Family>,
    /// Tokens a sequence may hold.
    pub context: u32,
    /// Rows of the largest verify window.
    pub window_rows: u32,
    /// Heads of sparse attention on this rank.
    pub mla_heads: u32,
    /// Key width of a head.
    pub mla_key: u32,
    /// Value width of a head.
    pub mla_value: u32,
    /// Width of the latent row.
    pub mla_latent: u32,
}

impl Families {
    /// Families of a name, of any owner.
    pub fn named<'a>(&'a mut self, id: &'a str) -> impl Iterator<Item = &'a mut Family> {
        self.all.iter_mut().filter(move |f| f.id.as_str() == id)
    }
}

/// A family as stores see it.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct FamilyInfo {
    /// The family.
    pub family: Family,
    /// Bytes of one row over all its layers: what `gather` gives a row.
    pub stacked_row_bytes: u64,
}

/// Rows of a family that a part's record relies on.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct FamilyRows {
    /// Number of the family.
    pub family: u32,
    /// First row, by its place.
    pub first: u32,
    /// How many.
    pub rows: u32,
}

crate::interface! {
    /// Where the rows of a family lie whose positions go through pages ([`Addressing::Paged`]): the host's way to them, beside
    /// the field of the round table by which kernels find them. Rows are counted over all slots: row `r` lies in slot
    /// `r / rows` of the view. Replicated.
    "mapper", 0: Mapper, MapperObject, MapperTable {
        /// The family, of all owners.
        fn family(&self) -> TextBuf;
        /// Rows `first..first + rows` of a slot's sequence, to the end of `out`. With `reserve` those that have no place get
        /// one; an error where there is none.
        fn rows(&self, slot: u32, first: u32, rows: u32, reserve: bool, out: &mut List<u32>) -> ();
    }
}

crate::interface! {
    /// What sequences own, on this rank. Rows are stacked: for each row, all layers of the family, in layer order.
    "sequences", 0: Sequences, SequencesObject, SequencesTable {
        /// The families, in table order.
        fn families(&self) -> List<FamilyInfo>;
        /// Committed length of a slot's sequence.
        fn length(&self, slot: u32) -> u32;
        /// What the rows of the multi-token-prediction layer ([`Owner::Mtp`]) are worth in a slot.
        fn draft_rows(&self, slot: u32) -> DraftRows = Ok(DraftRows::Silent);
        /// Bytes of memory that could still be taken. This rank's own: only for what rank 0 decides.
        fn free_bytes(&self) -> u64 = Ok(u64::MAX);
        /// Rows of drafters' own families that the parts' records of a slot rely on.
        fn part_rows(&self, slot: u32) -> List<FamilyRows> = Ok(List::new());
        /// Copies rows of a family (an index into [`Sequences::families`]) to the end of `out`; rows of a ring by their place.
        fn gather(&self, slot: u32, family: u32, first: u32, rows: u32, out: &mut List<u8>) -> ();
        /// Writes rows of a family.
        fn scatter(&self, slot: u32, family: u32, first: u32, bytes: Slice<'_, u8>) -> ();
        /// The recurrent state of the committed length, to the end of `out`.
        fn state(&self, slot: u32, out: &mut List<u8>) -> ();
        /// The parts' records of the committed length, to the end of `out`: names, versions and bytes.
        fn parts(&self, slot: u32, out: &mut List<u8>) -> ();
        /// Makes a slot's sequence be `ids` with this state and these parts; rows must have been written before. An error
        /// leaves the slot empty: a part that is needed is missing or of another version.
        fn resume(&self, slot: u32, ids: Slice<'_, u32>, state: Slice<'_, u8>, parts: Slice<'_, u8>) -> ();
    }
}

//! Snapshots kept beyond their slot, and state that plugins keep a sequence.

use super::{RequestFacts, SequencesObject};
use crate::{List, Slice, TextBuf};

/// What a store can resume for a request.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq)]
pub struct StoreOffer {
    /// Which store: its index in the chain.
    pub store: u32,
    /// The store's own number for it.
    pub ticket: u64,
    /// Prompt tokens that it resumes; a strict prefix of the prompt.
    pub length: u32,
    /// Milliseconds that it costs to resume.
    pub price_ms: f32,
    /// Slot that already holds it, or `u32::MAX`.
    pub slot: u32,
}

/// Why a snapshot is taken.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub enum SaveKind {
    /// Inside a prompt, where a mark asked for it.
    Mark = 0,
    /// At the end of a prompt.
    Prompt = 1,
    /// At the end of a reply.
    Reply = 2,
}

/// A snapshot that could be kept: the committed state of a slot.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct SaveFacts<'a> {
    /// Slot.
    pub slot: u32,
    /// Its ids, the committed ones.
    pub ids: Slice<'a, u32>,
    /// Tag of the arithmetic that made it.
    pub tag: u64,
    /// Multiples at which states of this tag may be kept.
    pub grid: u32,
    /// Why.
    pub kind: SaveKind,
    /// Of a mark: the reason with which it was asked for ([`super::Mark`]), so that stores can evict by it; else empty.
    pub reason: crate::Text<'a>,
    /// Whether the request that made it uses drafts.
    pub draft: bool,
}

/// What the rows of the multi-token-prediction layer are worth in a slot.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftRows {
    /// Nobody says: only all of them together, with the parts' records, are a drafter's state.
    Silent,
    /// Rows of positions below this follow from the ids alone, so sequences may share them; the rest is in the record.
    Good(u32),
    /// None can be used.
    Broken,
}

crate::interface! {
    /// A link of the `store` chain. Rank 0 decides, all ranks do the same.
    "store", 0: Store, StoreObject, StoreTable {
        /// Its name.
        fn name(&self) -> TextBuf;
        /// All ranks, once the caches exist: what sequences own here. An error refuses the start.
        fn open(&self, sequences: &SequencesObject) -> () = Ok(());
        /// Rank 0: what it could resume for a request; the caller fills in the store's index.
        fn offer(&self, request: &RequestFacts<'_>) -> List<StoreOffer>;
        /// Rank 0: longest common prefix of a prompt with anything kept.
        fn common_prefix(&self, ids: Slice<'_, u32>) -> u32 = Ok(0);
        /// Rank 0: whether and how to keep a snapshot. The bytes go to every rank, empty ones nowhere.
        fn decide(&self, save: &SaveFacts<'_>, sequences: &SequencesObject) -> List<u8>;
        /// All ranks but the one that decided: whether what was decided can be taken here, too. What one rank has no room for,
        /// none keeps.
        fn fits(&self, save: &SaveFacts<'_>, decision: Slice<'_, u8>, sequences: &SequencesObject) -> bool = Ok(true);
        /// All ranks: what was decided is not kept, for another rank has no room.
        fn refused(&self, save: &SaveFacts<'_>) -> () = Ok(());
        /// All ranks: keeps it as decided.
        fn save(&self, save: &SaveFacts<'_>, decision: Slice<'_, u8>, sequences: &SequencesObject) -> ();
        /// All ranks: puts what a ticket names into a slot; `false` where it cannot (all ranks then prefill from 0).
        fn resume(&self, ticket: u64, slot: u32, sequences: &SequencesObject) -> bool;
        /// A number over everything that must be equal on all ranks; compared with every resume.
        fn digest(&self) -> u64 = Ok(0);
        /// All ranks: a slot's rows at and past `length` are about to be overwritten.
        fn overwritten(&self, slot: u32, length: u32) -> () = Ok(());
        /// Figures for `/health`: name, value.
        fn figures(&self) -> List<Figure> = Ok(List::new());
    }
}

/// Rows of a cache family of a drafter's own, by their place.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct PartRows {
    /// The family ([`super::Owner::Drafter`]).
    pub family: TextBuf,
    /// First row.
    pub first: u32,
    /// How many.
    pub rows: u32,
}

/// A named number.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq)]
pub struct Figure {
    /// Name.
    pub name: TextBuf,
    /// Value.
    pub value: f64,
}

crate::interface! {
    /// State that a plugin keeps a sequence and that snapshots carry. Replicated.
    "part", 0: StatePart, StatePartObject, StatePartTable {
        /// Name, unique.
        fn id(&self) -> TextBuf;
        /// Version of the record.
        fn version(&self) -> u32;
        /// Whether a snapshot without it is worthless; a drafter's part may be dropped.
        fn needed(&self) -> bool = Ok(false);
        /// A sequence begins with nothing.
        fn begin(&self, slot: u32) -> () = Ok(());
        /// For the part that keeps rows of the multi-token-prediction layer: what they are worth now.
        fn draft_rows(&self, slot: u32) -> DraftRows = Ok(DraftRows::Silent);
        /// For the part of a drafter with cache families of its own: the rows that the record relies on. Stores copy them
        /// beside it and put them back before the record is loaded.
        fn rows(&self, slot: u32) -> List<PartRows> = Ok(List::new());
        /// The record of a slot's committed state.
        fn save(&self, slot: u32, out: &mut List<u8>) -> ();
        /// Takes a record over.
        fn load(&self, slot: u32, record: Slice<'_, u8>) -> ();
    }
}

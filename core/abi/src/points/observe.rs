//! Observers: told what happened, unable to change it.

use super::{Attachment, Mode};
use crate::{Call, KnobValue, List, Phase, Slice, Text, TextBuf};

/// Bits of what an observer wants to be told; what nobody asks for costs nothing.
pub mod interest {
    /// Phases of the start.
    pub const BOOT: u32 = 1;
    /// Plans (rank 0).
    pub const PLAN: u32 = 2;
    /// Rounds.
    pub const ROUND: u32 = 4;
    /// Sequences.
    pub const SEQUENCE: u32 = 8;
    /// Operations of prefill programs.
    pub const OPERATION: u32 = 16;
    /// Requests (rank 0).
    pub const REQUEST: u32 = 32;
    /// Forwards that are under way, and that are over.
    pub const LAUNCHED: u32 = 64;
    /// Threads.
    pub const THREAD: u32 = 128;
}

/// A phase of the start that is over.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct BootPhase<'a> {
    /// Name.
    pub name: Text<'a>,
    /// Seconds.
    pub seconds: f64,
    /// Bytes that it took.
    pub bytes: u64,
}

/// A round that is over.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct RoundDone {
    /// Number of the round.
    pub round: u64,
    /// Prompt rows.
    pub prefill_rows: u32,
    /// Sequences that decoded.
    pub decoded: u32,
    /// Rows of the window.
    pub window_rows: u32,
    /// Tokens that were kept.
    pub kept: u32,
}

/// What happened to a sequence.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub enum SequenceEvent<'a> {
    /// It has a slot, and so many tokens of its prompt are resumed.
    Begun {
        /// Request.
        request: u64,
        /// Prompt.
        ids: Slice<'a, u32>,
        /// Tokens already in the caches.
        resumed: u32,
        /// Its knobs, by number.
        knobs: Slice<'a, KnobValue>,
        /// What `request.prepare` attached to it.
        attachments: Slice<'a, Attachment>,
    },
    /// Prompt tokens are in.
    Absorbed {
        /// Position of the first.
        start: u32,
        /// How many.
        tokens: u32,
        /// Prompt tokens in all.
        prompt: u32,
    },
    /// Rows of a window were kept.
    Committed {
        /// Position of the first.
        start: u32,
        /// The tokens.
        tokens: Slice<'a, u32>,
    },
    /// Its state was kept by a store.
    Saved {
        /// Length of the state.
        length: u32,
    },
    /// It ended; the slot is free.
    Ended {
        /// Committed length.
        length: u32,
    },
}

/// An operation of a program that ran.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct OpDone<'a> {
    /// Operation.
    pub op: Text<'a>,
    /// Program kind.
    pub program: Text<'a>,
    /// Phase.
    pub phase: Phase,
    /// Layer.
    pub layer: u32,
    /// Site.
    pub site: u32,
    /// Rows.
    pub rows: u32,
    /// Seconds since the operation before it ended.
    pub seconds: f64,
}

/// A forward: what it is, and how it runs.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Launched<'a> {
    /// Program kind.
    pub program: Text<'a>,
    /// Phase.
    pub phase: Phase,
    /// Rows.
    pub rows: u32,
    /// Sequences.
    pub seqs: u32,
    /// How it was decided to run.
    pub mode: Mode,
}

/// A request that is over.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Ended<'a> {
    /// Request.
    pub request: u64,
    /// "stop", "length", "cancelled" or "error".
    pub reason: Text<'a>,
    /// Facts of the host (request id, route, model, flags, ...) and of the engine, a JSON object.
    pub facts: Text<'a>,
    /// Prompt ids.
    pub ids: Slice<'a, u32>,
    /// Generated ids.
    pub reply: Slice<'a, u32>,
}

crate::interface! {
    /// Sees, never changes.
    "observer", 0: Observer, ObserverObject, ObserverTable {
        /// What it wants to be told, bits of [`interest`].
        fn interests(&self) -> u32;
        /// A phase of the start is over.
        fn boot(&self, phase: &BootPhase<'_>) -> () = Ok(());
        /// Rank 0 made a plan: its round, admissions, pieces and decoding slots.
        fn planned(&self, round: u64, admissions: u32, pieces: u32, decoding: u32) -> () = Ok(());
        /// A round is over.
        fn round(&self, done: &RoundDone) -> () = Ok(());
        /// Something happened to the sequence in a slot.
        fn sequence(&self, slot: u32, event: &SequenceEvent<'_>) -> () = Ok(());
        /// Whether the operations of a forward with these folded knobs are to be timed.
        fn times(&self, knobs: Slice<'_, KnobValue>) -> bool = Ok(false);
        /// A timed operation ran.
        fn operation(&self, done: &OpDone<'_>) -> () = Ok(());
        /// Operations whose calls it wants to see, asked once; all others cost nothing.
        fn watches(&self) -> List<TextBuf> = Ok(List::new());
        /// A call of a watched operation ran. Its operands may be read until this returns; on a device, work may be queued
        /// behind it.
        fn ran(&self, call: &Call<'_>) -> () = Ok(());
        /// All steps of a forward before the late fields are under way, and the host has time until they are needed.
        fn launched(&self, forward: &Launched<'_>) -> () = Ok(());
        /// A forward is over, so many seconds after it began.
        fn forward(&self, forward: &Launched<'_>, seconds: f64) -> () = Ok(());
        /// A thread has started, told on the thread itself: "round" (the engine's own), "worker" (kernels), "http" (the
        /// server's; of rank 0).
        fn thread(&self, role: Text<'_>) -> () = Ok(());
        /// Rank 0: a request has arrived and waits.
        fn arrived(&self, request: u64, ids: Slice<'_, u32>) -> () = Ok(());
        /// Rank 0: a request is over. Gives further fields of the reply's statistics as a JSON object, or nothing.
        fn request(&self, ended: &Ended<'_>) -> TextBuf = Ok(TextBuf::new());
    }
}

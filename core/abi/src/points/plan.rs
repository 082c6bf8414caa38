//! Planning: who runs, where, how much. On rank 0, except [`Spans`].

use super::StoreOffer;
use crate::{KnobValue, List, Slice, Span, TextBuf};

/// A request that waits or runs.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct RequestFacts<'a> {
    /// Number of the request, unique while the engine runs.
    pub request: u64,
    /// Prompt ids.
    pub ids: Slice<'a, u32>,
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// Whether it yields to others.
    pub background: bool,
    /// Whether drafts may be used.
    pub draft: bool,
    /// Whether a drafter may serve it that reads rows of the multi-token-prediction layer: it is better off with a state
    /// that has them.
    pub draft_layer: bool,
    /// Seconds since it arrived.
    pub waited_s: f64,
    /// Its knobs, by number.
    pub knobs: Slice<'a, KnobValue>,
    /// Tag of its prefill's arithmetic: states of other tags cannot serve it.
    pub tag: u64,
    /// Multiples at which states of its prefill may be kept.
    pub grid: u32,
}

/// A slot.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct SlotFacts {
    /// Index.
    pub slot: u32,
    /// Number of the request in it; 0 when free.
    pub request: u64,
    /// Prompt tokens.
    pub prompt: u32,
    /// Prompt tokens already in the caches.
    pub absorbed: u32,
    /// Whether it decodes (its prompt is done).
    pub decoding: bool,
    /// Whether it yields to others.
    pub background: bool,
    /// Round in which it was admitted; for a free slot, of its last request.
    pub admitted: u64,
}

/// What planning may look at. Rank 0 only: clocks and memory are this rank's.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct PlanFacts<'a> {
    /// Seconds since the engine started.
    pub now_s: f64,
    /// Number of the round.
    pub round: u64,
    /// Seconds that the last round's prompt pieces took.
    pub last_piece_s: f64,
    /// Seconds that the last round's window took; 0 when nothing decoded.
    pub last_decode_s: f64,
    /// All slots.
    pub slots: Slice<'a, SlotFacts>,
    /// Requests that wait, in the order in which they are considered.
    pub waiting: Slice<'a, RequestFacts<'a>>,
    /// Bytes of memory that could still be taken.
    pub free_bytes: u64,
}

/// What to do with the request at the head of the queue.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Takes this slot.
    Admit(u32),
    /// Waits; the next one is considered.
    Hold,
    /// Waits, and all behind it.
    Block,
    /// Is refused with this message.
    Refuse(TextBuf),
}

/// A position at which a prefill must leave a snapshot, and why (stores evict by reason).
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Position.
    pub at: u32,
    /// Reason ("fork", "periodic", "prompt", ...).
    pub reason: TextBuf,
}

/// Prompt tokens to prefill in a round.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct PieceChoice {
    /// Slot.
    pub slot: u32,
    /// Most tokens.
    pub tokens: u32,
}

crate::interface! {
    /// A link of the planning policies. Rank 0; its decisions travel in the plan. A link without an opinion leaves what it
    /// is given as it is.
    "planner", 0: Planner, PlannerObject, PlannerTable {
        /// `plan.admit`, first half: the order in which waiting requests are considered.
        fn order(&self, facts: &PlanFacts<'_>, queue: &mut List<u64>) -> () = Ok(());
        /// `plan.admit`: slots whose requests step aside; they wait again, and what they have sent is not sent twice.
        fn step_aside(&self, facts: &PlanFacts<'_>, slots: &mut List<u32>) -> () = Ok(());
        /// `plan.place`: the slot for a request, among the free ones. `offers` are what stores can resume.
        fn place(
            &self, facts: &PlanFacts<'_>, request: &RequestFacts<'_>, offers: Slice<'_, StoreOffer>, verdict: &mut Verdict,
        ) -> () = Ok(());
        /// `plan.admit`: whether it may enter now, after placement.
        fn admit(&self, facts: &PlanFacts<'_>, request: &RequestFacts<'_>, verdict: &mut Verdict) -> () = Ok(());
        /// `plan.marks`: where a request's prefill must leave snapshots, past `resumed` tokens. A mark with the reason "prompt",
        /// before the prompt's end, stands for the prompt: slots keep it in the place of the state at the end. At or below
        /// `resumed` it means that what was resumed stands for it.
        fn marks(&self, request: &RequestFacts<'_>, resumed: u32, marks: &mut List<Mark>) -> () = Ok(());
        /// `plan.pieces`: prompt pieces of the round, in order.
        fn pieces(&self, facts: &PlanFacts<'_>, pieces: &mut List<PieceChoice>) -> () = Ok(());
        /// `plan.pieces`: slots that decode in the round, ascending.
        fn decode(&self, facts: &PlanFacts<'_>, slots: &mut List<u32>) -> () = Ok(());
    }
}

/// What cutting a piece into chunks may look at. The same on every rank.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct SpanFacts<'a> {
    /// First position.
    pub begin: u32,
    /// Tokens of the piece.
    pub tokens: u32,
    /// Prompt tokens in all.
    pub prompt: u32,
    /// Positions, ascending, at which a snapshot is wanted: chunks end there.
    pub marks: Slice<'a, u32>,
    /// The request's knobs, by number.
    pub knobs: Slice<'a, KnobValue>,
    /// Rows of the largest chunk.
    pub most: u32,
}

/// A chunk: positions `start..end`.
pub type SpanChoice = Span;

crate::interface! {
    /// A link of `plan.spans`: chunks of a piece. Replicated, pure.
    "spans", 0: Spans, SpansObject, SpansTable {
        /// Changes the chunks; together they must be the piece, in order, none over the largest chunk, one ending at each
        /// mark inside.
        fn spans(&self, facts: &SpanFacts<'_>, chunks: &mut List<SpanChoice>) -> ();
    }
}

//! Drafters propose, policies choose, the model decides. Nothing here can change a reply.

use crate::{KnobValue, List, Maybe, Slice, Text, TextBuf};

/// What a drafter needs of the model's forwards.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wants {
    /// The final hidden rows of absorbed and committed tokens.
    pub hidden: bool,
    /// The checkpoint's multi-token-prediction layer: without one the drafter cannot be used.
    pub mtp_layer: bool,
}

/// Tokens that became part of a sequence: prompt rows, or the kept rows of a window. What follows the last of them is not
/// known yet: a drafter that pairs rows with the next token holds the last row back until it is asked or absorbs more.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Absorbed<'a> {
    /// Slot.
    pub slot: u32,
    /// Position of the first.
    pub start: u32,
    /// The tokens.
    pub tokens: Slice<'a, u32>,
    /// `[tokens, hidden_size]`, where the drafter wants it.
    pub hidden: Slice<'a, f32>,
}

/// When to stop a chain of drafts.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq)]
pub struct Rule {
    /// Stop when the product of the drafts' probabilities falls below this; 0 never stops.
    pub floor: f32,
    /// Shortest match a lookup drafter may propose from; 0 leaves it to the drafter.
    pub min_match: u32,
}

/// How a sequence's tokens are drawn: a drafter that draws in the same way, with the same noise, proposes what the model's
/// draw will most likely be.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// Divides the logits; 0 takes the most likely token.
    pub temperature: f64,
    /// Largest logits kept; 0 keeps all.
    pub top_k: u32,
    /// Probability kept.
    pub top_p: f64,
    /// Least probability kept, relative to the most likely token's.
    pub min_p: f64,
    /// Key of the noise, with the token's position.
    pub seed: u64,
}

impl Draw {
    /// The most likely token.
    pub const BEST: Draw = Draw { temperature: 0.0, top_k: 1, top_p: 1.0, min_p: 0.0, seed: 0 };
}

/// One sequence that wants drafts.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// Slot.
    pub slot: u32,
    /// Committed length.
    pub length: u32,
    /// The token drawn last, at position `length`, not yet run through the model.
    pub pending: u32,
    /// Most drafts.
    pub budget: u32,
    /// When to stop earlier.
    pub rule: Rule,
    /// How its tokens are drawn.
    pub draw: Draw,
    /// Prompt, reply so far and the pending token.
    pub ids: Slice<'a, u32>,
}

/// Drafts for one sequence.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, Default, PartialEq)]
pub struct Proposal {
    /// Tokens that may follow the pending one.
    pub tokens: List<u32>,
    /// The drafter's own probability of each; empty where it has none.
    pub probabilities: List<f32>,
}

/// One sequence's rows for the multi-token-prediction layer.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct HeadRows<'a> {
    /// Slot.
    pub slot: u32,
    /// Place of the first row in the layer's caches.
    pub start: u32,
    /// Position of the token that follows the first row: rows of an image stand in for the tokens at their positions.
    pub position: u32,
    /// The token that follows each row.
    pub next_ids: Slice<'a, u32>,
    /// `[rows, hidden_size]`: the model's final rows, or the layer's own in a chain.
    pub hidden: Slice<'a, f32>,
    /// Whether a token is wanted after the last row.
    pub pick: bool,
    /// How it is drawn.
    pub draw: Draw,
}

/// What the layer gave for one sequence that wanted a pick.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, Default, PartialEq)]
pub struct HeadOut {
    /// The token drawn over all ranks.
    pub token: u32,
    /// Its probability among the candidates that the draw kept: of the 64 best of all ranks where it takes the most likely.
    pub probability: f32,
    /// The layer's last row, for the next step of a chain.
    pub hidden: List<f32>,
}

crate::interface! {
    /// Forwards that a drafter may run. Collective: every rank calls alike.
    "forwards", 0: Forwards, ForwardsObject, ForwardsTable {
        /// Width of a hidden row.
        fn hidden_size(&self) -> u32;
        /// Runs rows of the multi-token-prediction layer; one result a sequence that wants a pick, in order.
        fn head(&self, rows: Slice<'_, HeadRows<'_>>) -> List<HeadOut>;
    }
}

crate::interface! {
    /// A drafter. Replicated: every rank has one and calls it alike.
    "drafter", 0: Drafter, DrafterObject, DrafterTable {
        /// Name by which policies choose it.
        fn name(&self) -> TextBuf;
        /// What it needs.
        fn wants(&self) -> Wants = Ok(Wants::default());
        /// A sequence begins in a slot, with `resumed` tokens of `ids` already in the caches.
        fn begun(&self, slot: u32, ids: Slice<'_, u32>, resumed: u32) -> () = Ok(());
        /// Tokens became part of a sequence.
        fn absorb(&self, absorbed: &Absorbed<'_>, forwards: &ForwardsObject) -> () = Ok(());
        /// Drafts for some sequences, one proposal each, in order.
        fn propose(&self, asks: Slice<'_, Ask<'_>>, forwards: &ForwardsObject) -> List<Proposal>;
        /// The sequence ended; its slot may be used again.
        fn ended(&self, slot: u32) -> () = Ok(());
        /// Estimated milliseconds of proposing `drafts` tokens for one sequence.
        fn price(&self, drafts: u32) -> f32 = Ok(0.0);
    }
}

/// A decoding sequence, as policies see it. The same on every rank.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct SequenceFacts<'a> {
    /// Slot.
    pub slot: u32,
    /// Committed length.
    pub length: u32,
    /// Most drafts that make sense now: window rows, context and budget of tokens considered.
    pub room: u32,
    /// Whether tokens are drawn at a temperature.
    pub sampled: bool,
    /// The policy asked for (`tf_policy`), empty for the server's own.
    pub policy: Text<'a>,
    /// The request's knobs, by number.
    pub knobs: Slice<'a, KnobValue>,
    /// Prompt, reply so far and the pending token.
    pub ids: Slice<'a, u32>,
    /// Sequences that decode in this round.
    pub shared: u32,
    /// Ids that end the reply.
    pub stop_ids: Slice<'a, u32>,
}

/// A choice that names no drafter: a window of one row.
pub const NO_DRAFTER: u32 = u32::MAX;

/// Who drafts how much for a sequence.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Index into the drafters' names, or [`NO_DRAFTER`].
    pub drafter: u32,
    /// Most drafts.
    pub budget: u32,
    /// When to stop earlier.
    pub rule: Rule,
}

/// What became of a round's drafts.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Observed {
    /// Slot.
    pub slot: u32,
    /// Who drafted, or [`NO_DRAFTER`].
    pub drafter: u32,
    /// Drafts in the window.
    pub drafted: u32,
    /// Drafts that were kept.
    pub kept: u32,
    /// Sequences that shared the round.
    pub shared: u32,
}

crate::interface! {
    /// A link of the `draft` policy. Replicated, without a clock.
    "draft-policy", 0: DraftPolicy, DraftPolicyObject, DraftPolicyTable {
        /// Told the drafters' names, in the order of their indices, before the first round.
        fn drafters(&self, names: Slice<'_, TextBuf>) -> () = Ok(());
        /// The forms of the policies that it knows, for messages.
        fn forms(&self) -> List<TextBuf> = Ok(List::new());
        /// The policy in force for what a request asks for (empty: the server's own), where this link knows it; the error
        /// says what is wrong with it.
        fn accepts(&self, policy: Text<'_>) -> Maybe<TextBuf> = Ok(Maybe::RNone);
        /// Changes the choices, one a sequence.
        fn decide(&self, facts: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> ();
        /// What became of a round.
        fn observe(&self, observed: &Observed) -> () = Ok(());
        /// A sequence begins.
        fn begun(&self, slot: u32, knobs: Slice<'_, KnobValue>) -> () = Ok(());
        /// A sequence ended.
        fn ended(&self, slot: u32) -> () = Ok(());
    }
}

crate::interface! {
    /// A link of the `drafts` chain: shortens proposals before they are verified. Replicated.
    "drafts", 0: DraftCut, DraftCutObject, DraftCutTable {
        /// How many of the drafts to keep. They follow the pending token: the one drawn last, not yet run through the model.
        fn cut(&self, slot: u32, pending: u32, drafts: Slice<'_, u32>) -> u32;
    }
}

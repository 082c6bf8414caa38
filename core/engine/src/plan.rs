//! What rank 0 tells the others: plans of rounds, and requests for a trace.

use plugfold_abi::KnobValue;
use plugfold_abi::points::Attachment as Blob;
use plugfold_abi::points::Draw;
use serde::{Deserialize, Serialize};

use crate::service::{Attachment, Sampling, ThinkingBudget};

/// A sequence that takes a slot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Admission {
    /// The slot it gets.
    pub slot: usize,
    /// The prompt.
    pub ids: Vec<u32>,
    /// Divides the logits.
    pub temperature: f64,
    /// Largest logits kept.
    pub top_k: u32,
    /// Probability kept.
    pub top_p: f64,
    /// Least probability kept, relative to the most likely token's.
    pub min_p: f64,
    /// Key of the noise.
    pub seed: u64,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// Ids that end the reply.
    pub stop_ids: Vec<u32>,
    /// Whether drafts may be verified.
    pub draft: bool,
    /// Log probabilities are told, with so many alternatives.
    pub logprobs: Option<u32>,
    /// Where the reasoning ends at the latest.
    pub thinking: Option<ThinkingBudget>,
    /// (first position, rows) of image rows.
    pub attachments: Vec<(usize, Vec<f32>)>,
    /// Number of the request.
    pub request: u64,
    /// Every request knob, by number.
    pub knobs: Vec<KnobValue>,
    /// Draft policy asked for; empty for the server's own.
    pub policy: String,
    /// Bytes of plugins, by name.
    pub blobs: Vec<Blob>,
    /// Where its prefill begins.
    pub resume: Resume,
    /// Positions at which its prefill leaves snapshots, ascending.
    pub marks: Vec<usize>,
    /// Why, mark by mark; none where nobody says.
    pub reasons: Vec<String>,
    /// The state that its prompt leaves behind is one before its end: that of the mark called [`PROMPT`], or the one that it
    /// resumed from.
    pub early: bool,
}

/// The reason of a mark that stands for the end of its prompt.
pub const PROMPT: &str = "prompt";

/// Where a prefill begins.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub enum Resume {
    /// At the first token.
    #[default]
    Fresh,
    /// After a snapshot of so many tokens that the slot keeps.
    Slot(usize),
    /// After what a store holds.
    Store {
        /// Index of the store.
        store: usize,
        /// Its number for it.
        ticket: u64,
        /// Tokens.
        length: usize,
        /// The store's digest on rank 0.
        digest: u64,
    },
}

impl Admission {
    /// How its tokens are drawn.
    pub fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: Some(self.seed),
        }
    }

    /// The same, for drafters.
    pub fn how(&self) -> Draw {
        Draw {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            seed: self.seed,
        }
    }

    /// Why a snapshot is wanted at a position.
    pub fn reason(&self, at: usize) -> &str {
        let place = self.marks.iter().position(|m| *m == at);
        place.and_then(|i| self.reasons.get(i)).map_or("", String::as_str)
    }

    /// Rows of attachments as the plan carries them.
    pub fn pack(attachments: &[Attachment]) -> Vec<(usize, Vec<f32>)> {
        attachments.iter().map(|a| (a.at, a.rows.to_vec())).collect()
    }
}

/// A slice of a prompt to prefill in a round.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Slot.
    pub slot: usize,
    /// Tokens, from where the slot is.
    pub tokens: usize,
}

/// One round.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plan {
    /// Number of the round.
    pub round: u64,
    /// Bytes of plugins: index of the section, bytes.
    pub sections: Vec<(usize, Vec<u8>)>,
    /// Slots whose sequences end now.
    pub cancels: Vec<usize>,
    /// Sequences that begin.
    pub admissions: Vec<Admission>,
    /// Prompt pieces, in order.
    pub pieces: Vec<Piece>,
    /// Slots that decode, in slot order.
    pub decode: Vec<usize>,
}

impl Plan {
    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.cancels.is_empty()
            && self.admissions.is_empty()
            && self.pieces.is_empty()
            && self.decode.is_empty()
            && self.sections.is_empty()
    }
}

/// A control message of rank 0.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Order {
    /// Run a round.
    Round(Plan),
    /// Prefill these ids in chunks and give out logits, and streams if asked.
    Trace {
        /// The prompt.
        ids: Vec<u32>,
        /// Rows a chunk.
        chunk: usize,
        /// Streams after every layer as well.
        streams: bool,
    },
}

//! What a front end sees of an engine: submit token ids, receive token ids.
//!
//! The HTTP server and the command line speak to [`Service`] only, so they can be tested with an engine that is
//! scripted. Text never enters the engine: tokenizing, templates and stop strings are the front end's.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::Receiver;

use plugfold_abi::points::Attachment as Blob;
use serde::{Deserialize, Serialize};

use crate::knobs::Values;
use crate::logprobs::TokenLogprobs;

/// How the next token is drawn at every position (see [`crate::sampling`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; a value at or below zero means greedy.
    pub temperature: f64,
    /// Keep the `top_k` largest logits (ties to the lower id); 0 keeps all up to the engine's candidate limit.
    pub top_k: u32,
    /// Keep the smallest set of most likely candidates whose probabilities sum to at least this.
    pub top_p: f64,
    /// Of those, keep the ones with at least this share of the most likely one's probability; 0 keeps all.
    pub min_p: f64,
    /// Key of the noise. `None`: derived from the prompt's token ids.
    pub seed: Option<u64>,
}

impl Sampling {
    /// The largest logit, ties to the lower id.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: 1, top_p: 1.0, min_p: 0.0, seed: None };
}

/// Rows that replace the embeddings of a run of prompt positions (image rows).
#[derive(Clone, Debug)]
pub struct Attachment {
    /// Position in the prompt of the first replaced token.
    pub at: usize,
    /// `[count, hidden_size]` row-major.
    pub rows: Arc<[f32]>,
}

/// A bound on the reasoning of a reply: when `tokens` were generated and none of them was `close`, the next one is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ThinkingBudget {
    /// Tokens that may come before `close`.
    pub tokens: usize,
    /// The id that ends the reasoning.
    pub close: u32,
}

/// One generation request.
#[derive(Clone, Debug)]
pub struct Request {
    /// Prompt token ids, at least one.
    pub ids: Vec<u32>,
    /// Image rows; empty for text.
    pub attachments: Vec<Attachment>,
    /// How tokens are drawn.
    pub sampling: Sampling,
    /// Most tokens to generate, at least one.
    pub max_tokens: usize,
    /// Generating one of these ends the reply (the token is emitted and counted).
    pub stop_ids: Vec<u32>,
    /// `false`: one token a round, no drafts.
    pub draft: bool,
    /// Tell the log probability of every token and of so many alternatives, at most [`crate::logprobs::MAX_TOP`].
    pub logprobs: Option<u32>,
    /// Ends the reasoning; for prompts that end in an open think block.
    pub thinking: Option<ThinkingBudget>,
    /// Every request knob, by number; `None`: the server's own values.
    pub knobs: Option<Values>,
    /// Draft policy; empty for the server's own.
    pub policy: String,
    /// Yields to other requests.
    pub background: bool,
    /// Bytes of plugins that go to all ranks, by name.
    pub blobs: Vec<Blob>,
    /// Facts of the front end for observers, a JSON object; empty for none.
    pub facts: String,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            ids: Vec::new(),
            attachments: Vec::new(),
            sampling: Sampling::GREEDY,
            max_tokens: 1,
            stop_ids: Vec::new(),
            draft: true,
            logprobs: None,
            thinking: None,
            knobs: None,
            policy: String::new(),
            background: false,
            blobs: Vec::new(),
            facts: String::new(),
        }
    }
}

/// Why a reply ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// One of the stop ids was generated.
    Stop,
    /// `max_tokens` were generated.
    Length,
    /// The receiver was dropped or [`Handle::cancel`] called.
    Cancelled,
}

/// Measured facts of one request.
#[derive(Clone, Debug, Default)]
pub struct RequestStats {
    /// Seconds between submission and the start of prefill.
    pub queued_s: f64,
    /// Seconds of prefill, the first token's sampling included.
    pub prefill_s: f64,
    /// Seconds from the first token to the last.
    pub decode_s: f64,
    /// Prompt tokens that were resumed instead of computed.
    pub cached_tokens: usize,
    /// Decode rounds (the first token comes from prefill, not from a round).
    pub rounds: usize,
    /// Draft tokens sent to verification.
    pub drafted: usize,
    /// Draft tokens that were accepted.
    pub accepted: usize,
    /// Rounds shared with other requests.
    pub batched_rounds: usize,
    /// The slot that held the sequence.
    pub slot: usize,
    /// The seed in force.
    pub seed: u64,
    /// Prompt pieces.
    pub pieces: usize,
    /// Times it stepped aside for another request.
    pub preempted: usize,
    /// Drafts kept in each round, in order (the first 4,096 rounds).
    pub keeps: Vec<u16>,
    /// Who drafted: name of the drafter, rounds.
    pub drafters: Vec<(String, usize)>,
    /// Further fields, of plugins.
    pub fields: serde_json::Map<String, serde_json::Value>,
}

/// What arrives while a request runs, in order: any number of `Prefill`, `Logprobs` and `Tokens`, then `Done` or `Error`.
#[derive(Clone, Debug)]
pub enum Event {
    /// Prompt tokens absorbed so far, of how many.
    Prefill {
        /// Rows already in the caches.
        done: usize,
        /// Prompt length.
        total: usize,
    },
    /// Log probabilities of the ids in the next `Tokens`, for requests that ask for them.
    Logprobs(Vec<TokenLogprobs>),
    /// Newly generated ids of one round.
    Tokens(Vec<u32>),
    /// The reply is complete.
    Done {
        /// Why it ended.
        finish: Finish,
        /// What it took.
        stats: RequestStats,
    },
    /// The request failed; others go on.
    Error(EngineError),
}

/// A failure that belongs to one request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// The request itself is wrong (HTTP 400).
    #[error("{0}")]
    Invalid(String),
    /// The engine failed while running it (HTTP 500).
    #[error("{0}")]
    Failed(String),
    /// The engine does not take requests any more (HTTP 503).
    #[error("{0}")]
    Unavailable(String),
}

/// The receiving end of one request. Dropping it cancels the request and frees its slot.
pub struct Handle {
    /// Events in order.
    pub events: Receiver<Event>,
    /// Tells the engine that nobody listens any more.
    pub cancel: Arc<AtomicBool>,
    /// Says that the front end has all it wants: a request that is cancelled after that counts as one that stopped.
    pub satisfied: Arc<AtomicBool>,
}

impl Handle {
    /// Ends the request at the next round.
    pub fn cancel(&self) {
        self.cancel.store(true, Ordering::Release);
    }

    /// Ends the request at the next round because its reply is complete: what comes would be beyond a stop string.
    pub fn complete(&self) {
        self.satisfied.store(true, Ordering::Release);
        self.cancel();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Facts that do not change while the engine runs.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// `model_type` of the checkpoint.
    pub architecture: String,
    /// Rows of the embedding table; ids must be below it.
    pub vocab_size: usize,
    /// Width of a row.
    pub hidden_size: usize,
    /// Most tokens a sequence may hold, prompt and reply together.
    pub context: usize,
    /// End-of-text ids of the checkpoint.
    pub eos_ids: Vec<u32>,
    /// Sequences that can run at once.
    pub slots: usize,
    /// Ranks the model is split over.
    pub ranks: usize,
    /// Names of the drafters.
    pub drafters: Vec<String>,
}

/// Live totals, for `/health` and metrics.
#[derive(Clone, Debug, Default)]
pub struct EngineStats {
    /// Sequences decoding now.
    pub decoding: usize,
    /// Sequences prefilling now.
    pub prefilling: usize,
    /// Requests waiting for a slot.
    pub waiting: usize,
    /// Requests ended, with or without error.
    pub requests: u64,
    /// Requests ended with an error.
    pub errors: u64,
    /// Prompt tokens of ended requests.
    pub prompt_tokens: u64,
    /// Tokens generated, running requests included.
    pub completion_tokens: u64,
    /// Prompt tokens resumed.
    pub cached_tokens: u64,
    /// Decode rounds.
    pub rounds: u64,
    /// Draft tokens verified.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Seconds of prefill of ended requests.
    pub prefill_s: f64,
    /// Seconds of decode of ended requests.
    pub decode_s: f64,
    /// Requests that stepped aside for others.
    pub preempted: u64,
    /// Figures of stores: store, name, value.
    pub stores: Vec<(String, String, f64)>,
    /// Set when the engine cannot go on (a rank died): the reason.
    pub fatal: Option<String>,
}

/// An engine that takes requests.
pub trait Service: Send + Sync {
    /// Facts of the loaded model.
    fn info(&self) -> &ModelInfo;
    /// Queues a request.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] when it can never run (empty prompt, id outside the vocabulary, prompt and budget
    /// over the context), [`EngineError::Unavailable`] when the engine is stopped or its queue is full.
    fn submit(&self, request: Request) -> Result<Handle, EngineError>;
    /// Live totals.
    fn stats(&self) -> EngineStats;
    /// The draft policy in force for what a request asks for; empty asks for the server's own.
    ///
    /// # Errors
    /// [`EngineError::Invalid`] with what is wrong with it, for the client.
    fn policy(&self, asked: &str) -> Result<String, EngineError> {
        crate::hooks::Hooks::default().policy(asked)
    }
}

//! The JSON of replies, whole and streamed, in each dialect.

pub mod blocks;
pub mod logprobs;
pub mod messages;
pub mod openai;
pub mod responses;

use plugfold_engine::service::Finish;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::error::ApiError;
use super::pump::{Ending, Part};
use super::request::Job;
use crate::reply::tools::ToolCall;

/// One server-sent event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    /// The `event:` line, for dialects that name their events.
    pub name: Option<&'static str>,
    /// The `data:` line.
    pub data: String,
}

impl Event {
    /// An event without a name.
    pub fn plain(data: &Value) -> Self {
        Self { name: None, data: data.to_string() }
    }

    /// An event whose name is also the `type` of its data.
    pub fn named(name: &'static str, data: &Value) -> Self {
        Self { name: Some(name), data: data.to_string() }
    }

    /// Appends the event as it goes over the wire. JSON text never holds a raw newline.
    pub fn write(&self, out: &mut String) {
        if let Some(name) = self.name {
            out.push_str("event: ");
            out.push_str(name);
            out.push('\n');
        }
        out.push_str("data: ");
        out.push_str(&self.data);
        out.push_str("\n\n");
    }
}

/// Puts one reply into words. A stream is `opening`, any number of `part`, then `closing` or `failure`.
pub trait Shape: Send {
    /// What a stream begins with.
    fn opening(&mut self) -> Vec<Event>;
    /// What one or more rounds added.
    fn part(&mut self, part: Part) -> Vec<Event>;
    /// The end of a complete reply.
    fn closing(&mut self, ending: &Ending) -> Vec<Event>;
    /// The end of a reply that failed.
    fn failure(&mut self, error: &ApiError) -> Vec<Event>;
    /// The reply that is not streamed.
    fn whole(&mut self, part: Part, ending: &Ending) -> Value;
    /// Bytes that keep a quiet stream alive and mean nothing.
    fn keep_alive(&self) -> &'static str {
        ": keep-alive\n\n"
    }
}

/// A random identifier: a prefix and 24 hexadecimal digits.
pub fn random_id(prefix: &str) -> String {
    let mut bytes = [0u8; 12];
    // Without randomness of the system, identifiers of one process still differ.
    if getrandom::fill(&mut bytes).is_err() {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        bytes[4..].copy_from_slice(&number.to_be_bytes());
    }
    bytes.iter().fold(prefix.to_owned(), |id, byte| format!("{id}{byte:02x}"))
}

/// What stays the same over a reply in any dialect.
pub struct Facts {
    /// Unix time of the reply.
    pub created: u64,
    /// The served name.
    pub model: String,
    /// Prompt length.
    pub prompt_tokens: usize,
    /// More than one call may be in the reply.
    pub parallel: bool,
    return_ids: bool,
    policy: String,
    knobs: Map<String, Value>,
    vision: Option<(usize, f64)>,
    ignored: Vec<&'static str>,
    /// Calls so far.
    pub calls: usize,
}

impl Facts {
    /// The facts of a job's reply.
    pub fn new(job: &Job, created: u64, model: &str) -> Self {
        Self {
            created,
            model: model.to_owned(),
            prompt_tokens: job.request.ids.len(),
            parallel: job.parallel,
            return_ids: job.return_ids,
            policy: job.policy.spec.clone(),
            knobs: job.knobs.clone(),
            vision: job.vision,
            ignored: job.ignored.clone(),
            calls: 0,
        }
    }

    /// Whether a further call belongs into the reply; then it is counted, and its number given.
    pub fn take_call(&mut self) -> Option<usize> {
        let number = self.calls;
        (self.parallel || number == 0).then(|| {
            self.calls += 1;
            number
        })
    }

    /// Why the reply ended, in `OpenAI`'s words.
    pub fn finish_reason(&self, ending: &Ending) -> &'static str {
        if let Some(reason) = ending.reason {
            return reason;
        }
        match ending.finish {
            _ if self.calls > 0 => "tool_calls",
            _ if ending.stop.is_some() => "stop",
            Finish::Length => "length",
            Finish::Stop | Finish::Cancelled => "stop",
        }
    }

    /// The `tensorfold` block.
    pub fn statistics(&self, ending: &Ending) -> Value {
        let stats = &ending.stats;
        let mut block = Map::new();
        let mut put = |key: &str, value: Value| {
            block.insert(key.into(), value);
        };
        put("prefill_s", json!(stats.prefill_s));
        put("decode_s", json!(stats.decode_s));
        put("queued_s", json!(stats.queued_s));
        put("cached", json!(stats.cached_tokens));
        put("rounds", json!(stats.rounds));
        put("drafted", json!(stats.drafted));
        put("accepted", json!(stats.accepted));
        if stats.rounds > 0 {
            // The first token comes from prefill, not from a round.
            let tokens = ending.ids.len().saturating_sub(1) as f64;
            put("tokens_per_round", json!(tokens / stats.rounds as f64));
        }
        put("batched_rounds", json!(stats.batched_rounds));
        put("slot", json!(stats.slot));
        put("sha256", json!(digest(&ending.ids)));
        put("policy", json!(self.policy));
        put("tf_knobs", json!(self.knobs));
        if let Some((encoded, seconds)) = self.vision {
            put("vision", json!({"encoded": encoded, "vision_s": seconds}));
        }
        if self.return_ids {
            put("token_ids", json!(ending.ids));
        }
        if !self.ignored.is_empty() {
            put("ignored", json!(self.ignored));
        }
        // Plugins add; what the server says stands.
        for (key, value) in stats.fields.iter().chain(&ending.fields) {
            block.entry(key).or_insert_with(|| value.clone());
        }
        Value::Object(block)
    }
}

/// The id of a call: its own, or a new one with this prefix.
fn call_id(call: &ToolCall, prefix: &str) -> String {
    if call.id.is_empty() { random_id(prefix) } else { call.id.clone() }
}

/// The arguments of a call as an object; the parsers give nothing else.
fn arguments(call: &ToolCall) -> Value {
    serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}))
}

/// First 16 hexadecimal digits of the SHA-256 of the JSON list of ids, written as Python's `json.dumps` does.
fn digest(ids: &[u32]) -> String {
    let list: Vec<String> = ids.iter().map(u32::to_string).collect();
    let hash = Sha256::digest(format!("[{}]", list.join(", ")));
    hash[..8].iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers() {
        let id = random_id("call_");
        assert_eq!(id.len(), 29);
        assert!(id[5..].bytes().all(|b| b.is_ascii_hexdigit() && !b.is_ascii_uppercase()));
        assert_ne!(id, random_id("call_"));
    }

    #[test]
    fn the_digest_is_that_of_a_python_list() {
        // hashlib.sha256(b"[1, 2, 3]").hexdigest()[:16]
        assert_eq!(digest(&[1, 2, 3]), "a36b1f2c3f84522d");
    }

    #[test]
    fn events_on_the_wire() {
        let mut out = String::new();
        Event::plain(&json!({"a": "\n"})).write(&mut out);
        Event::named("ping", &json!({})).write(&mut out);
        assert_eq!(out, "data: {\"a\":\"\\n\"}\n\nevent: ping\ndata: {}\n\n");
    }
}

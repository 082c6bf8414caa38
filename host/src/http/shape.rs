//! The JSON of replies, whole and streamed.

use plugfold_engine::service::Finish;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::app::ReasoningFields;
use super::pump::Ending;
use super::request::{Job, Kind};
use crate::reply::Piece;
use crate::reply::tools::ToolCall;

/// What stays the same over all events of a reply, and what was said so far.
pub struct Shape {
    kind: Kind,
    id: String,
    created: u64,
    model: String,
    fields: ReasoningFields,
    prompt_tokens: usize,
    include_usage: bool,
    return_ids: bool,
    parallel: bool,
    policy: String,
    ignored: Vec<&'static str>,
    calls: usize,
}

/// A random identifier of 24 hexadecimal digits.
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

impl Shape {
    /// The shape of a job's reply.
    pub fn new(job: &Job, created: u64, model: &str, fields: ReasoningFields) -> Self {
        Self {
            kind: job.kind,
            id: random_id(if job.kind == Kind::Chat { "chatcmpl-" } else { "cmpl-" }),
            created,
            model: model.to_owned(),
            fields,
            prompt_tokens: job.request.ids.len(),
            include_usage: job.include_usage,
            return_ids: job.return_ids,
            parallel: job.parallel,
            policy: job.policy.spec.clone(),
            ignored: job.ignored.clone(),
            calls: 0,
        }
    }

    /// Whether a further call belongs into the reply.
    fn takes_call(&mut self) -> bool {
        let taken = self.parallel || self.calls == 0;
        self.calls += usize::from(taken);
        taken
    }

    fn head(&self, object: &str, choice: Value) -> Map<String, Value> {
        let mut body = Map::new();
        body.insert("id".into(), json!(self.id));
        body.insert("object".into(), json!(object));
        body.insert("created".into(), json!(self.created));
        body.insert("model".into(), json!(self.model));
        body.insert("choices".into(), Value::Array(vec![choice]));
        body
    }

    fn event(&self, delta: &Value, text: &str, finish: Option<&str>) -> Map<String, Value> {
        match self.kind {
            Kind::Chat => {
                let choice = json!({"index": 0, "delta": delta, "finish_reason": finish});
                self.head("chat.completion.chunk", choice)
            }
            Kind::Text => {
                self.head("text_completion", json!({"index": 0, "text": text, "finish_reason": finish}))
            }
        }
    }

    /// The first event of a stream, for chat.
    pub fn opening(&self) -> Option<Value> {
        (self.kind == Kind::Chat).then(|| Value::Object(self.event(&json!({"role": "assistant"}), "", None)))
    }

    /// The events for what one round added: one for text, one for each call.
    pub fn events(&mut self, pieces: Vec<Piece>) -> Vec<Value> {
        let mut events = Vec::new();
        let (mut reasoning, mut content) = (String::new(), String::new());
        let flush = |shape: &Self, reasoning: &mut String, content: &mut String, events: &mut Vec<Value>| {
            if reasoning.is_empty() && content.is_empty() {
                return;
            }
            let mut delta = Map::new();
            if !reasoning.is_empty() {
                for name in shape.fields.names() {
                    delta.insert((*name).into(), json!(reasoning));
                }
            }
            if !content.is_empty() {
                delta.insert("content".into(), json!(content));
            }
            events.push(Value::Object(shape.event(&Value::Object(delta), content, None)));
            reasoning.clear();
            content.clear();
        };
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => reasoning.push_str(&text),
                Piece::Content(text) => content.push_str(&text),
                Piece::Call(call) => {
                    flush(self, &mut reasoning, &mut content, &mut events);
                    let index = self.calls;
                    if self.takes_call() {
                        let mut entry = call_entry(&call);
                        entry["index"] = json!(index);
                        events.push(Value::Object(self.event(&json!({"tool_calls": [entry]}), "", None)));
                    }
                }
            }
        }
        flush(self, &mut reasoning, &mut content, &mut events);
        events
    }

    /// The last event of a stream.
    pub fn closing(&self, ending: &Ending) -> Value {
        let mut event = self.event(&json!({}), "", Some(self.finish_reason(ending)));
        if self.include_usage {
            event.insert("usage".into(), self.usage(ending));
        }
        event.insert("tensorfold".into(), self.statistics(ending));
        Value::Object(event)
    }

    /// The whole reply.
    pub fn whole(&mut self, pieces: Vec<Piece>, ending: &Ending) -> Value {
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => reasoning.push_str(&text),
                Piece::Content(text) => content.push_str(&text),
                Piece::Call(call) => {
                    if self.takes_call() {
                        calls.push(call_entry(&call));
                    }
                }
            }
        }
        let finish = self.finish_reason(ending);
        let mut body = match self.kind {
            Kind::Text => {
                self.head("text_completion", json!({"index": 0, "text": content, "finish_reason": finish}))
            }
            Kind::Chat => {
                let mut message = Map::new();
                message.insert("role".into(), json!("assistant"));
                message
                    .insert("content".into(), if content.is_empty() { Value::Null } else { json!(content) });
                if !reasoning.is_empty() {
                    for name in self.fields.names() {
                        message.insert((*name).into(), json!(reasoning));
                    }
                }
                if !calls.is_empty() {
                    message.insert("tool_calls".into(), json!(calls));
                }
                self.head("chat.completion", json!({"index": 0, "message": message, "finish_reason": finish}))
            }
        };
        body.insert("usage".into(), self.usage(ending));
        body.insert("tensorfold".into(), self.statistics(ending));
        Value::Object(body)
    }

    fn finish_reason(&self, ending: &Ending) -> &'static str {
        match ending.finish {
            _ if self.calls > 0 => "tool_calls",
            _ if ending.stopped => "stop",
            Finish::Length => "length",
            Finish::Stop | Finish::Cancelled => "stop",
        }
    }

    fn usage(&self, ending: &Ending) -> Value {
        let completion = ending.ids.len();
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": ending.stats.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": ending.reasoning_tokens},
        })
    }

    fn statistics(&self, ending: &Ending) -> Value {
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
        put("tf_knobs", json!({}));
        if self.return_ids {
            put("token_ids", json!(ending.ids));
        }
        if !self.ignored.is_empty() {
            put("ignored", json!(self.ignored));
        }
        Value::Object(block)
    }
}

fn call_entry(call: &ToolCall) -> Value {
    json!({"id": random_id("call_"), "type": "function",
           "function": {"name": call.name, "arguments": call.arguments}})
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
}

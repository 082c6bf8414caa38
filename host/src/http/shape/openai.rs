//! `OpenAI`'s chat completions and completions.

use serde_json::{Map, Value, json};

use super::logprobs::Writer;
use super::{Event, Facts, Shape, call_id, random_id};
use crate::http::app::{App, ReasoningFields};
use crate::http::error::ApiError;
use crate::http::pump::{Ending, Part, Told};
use crate::http::request::{Job, Kind};
use crate::reply::Piece;
use crate::reply::tools::ToolCall;

/// A completion's reply.
pub struct Completion {
    kind: Kind,
    id: String,
    facts: Facts,
    fields: ReasoningFields,
    include_usage: bool,
    logprobs: Option<Writer>,
}

impl Completion {
    /// The shape of a job's reply.
    pub fn new(app: &App, job: &Job, created: u64) -> Self {
        Self {
            kind: job.kind,
            id: random_id(if job.kind == Kind::Chat { "chatcmpl-" } else { "cmpl-" }),
            facts: Facts::new(job, created, &app.settings.served_name),
            fields: app.settings.reasoning_fields,
            include_usage: job.include_usage,
            logprobs: job.request.logprobs.map(|_| Writer::new(app.text.clone())),
        }
    }

    fn head(&self, object: &str, choice: Value) -> Map<String, Value> {
        let mut body = Map::new();
        body.insert("id".into(), json!(self.id));
        body.insert("object".into(), json!(object));
        body.insert("created".into(), json!(self.facts.created));
        body.insert("model".into(), json!(self.facts.model));
        body.insert("choices".into(), Value::Array(vec![choice]));
        body
    }

    /// The block of log probabilities, when they are asked for and there are some.
    fn told(&mut self, told: &[Told]) -> Option<Value> {
        let writer = self.logprobs.as_mut().filter(|_| !told.is_empty())?;
        Some(match self.kind {
            Kind::Chat => writer.chat(told),
            Kind::Text => writer.text(told),
        })
    }

    fn event(
        &self,
        delta: &Value,
        text: &str,
        finish: Option<&str>,
        told: Option<Value>,
    ) -> Map<String, Value> {
        let (object, mut choice) = match self.kind {
            Kind::Chat => {
                ("chat.completion.chunk", json!({"index": 0, "delta": delta, "finish_reason": finish}))
            }
            Kind::Text => ("text_completion", json!({"index": 0, "text": text, "finish_reason": finish})),
        };
        if let Some(told) = told {
            choice["logprobs"] = told;
        }
        self.head(object, choice)
    }

    fn delta(&self, reasoning: &str, content: &str) -> Value {
        let mut delta = Map::new();
        if !reasoning.is_empty() {
            for name in self.fields.names() {
                delta.insert((*name).into(), json!(reasoning));
            }
        }
        if !content.is_empty() {
            delta.insert("content".into(), json!(content));
        }
        Value::Object(delta)
    }

    fn usage(&self, ending: &Ending) -> Value {
        let completion = ending.ids.len();
        json!({
            "prompt_tokens": self.facts.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.facts.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": ending.stats.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": ending.reasoning_tokens},
        })
    }
}

impl Shape for Completion {
    fn opening(&mut self) -> Vec<Event> {
        match self.kind {
            Kind::Chat => {
                let event = self.event(&json!({"role": "assistant"}), "", None, None);
                vec![Event::plain(&Value::Object(event))]
            }
            Kind::Text => Vec::new(),
        }
    }

    /// One event for text, one for each call. Log probabilities go with the first.
    fn part(&mut self, part: Part) -> Vec<Event> {
        let mut told = self.told(&part.told);
        let mut events = Vec::new();
        let (mut reasoning, mut content) = (String::new(), String::new());
        let mut flush =
            |shape: &Self, reasoning: &mut String, content: &mut String, events: &mut Vec<Event>| {
                if reasoning.is_empty() && content.is_empty() && told.is_none() {
                    return;
                }
                let event = shape.event(&shape.delta(reasoning, content), content, None, told.take());
                events.push(Event::plain(&Value::Object(event)));
                reasoning.clear();
                content.clear();
            };
        for piece in part.pieces {
            match piece {
                Piece::Reasoning(text) => reasoning.push_str(&text),
                Piece::Content(text) => content.push_str(&text),
                Piece::Call(call) => {
                    flush(self, &mut reasoning, &mut content, &mut events);
                    if let Some(index) = self.facts.take_call() {
                        let mut entry = call_entry(&call);
                        entry["index"] = json!(index);
                        let event = self.event(&json!({"tool_calls": [entry]}), "", None, None);
                        events.push(Event::plain(&Value::Object(event)));
                    }
                }
            }
        }
        flush(self, &mut reasoning, &mut content, &mut events);
        events
    }

    fn closing(&mut self, ending: &Ending) -> Vec<Event> {
        let mut event = self.event(&json!({}), "", Some(self.facts.finish_reason(ending)), None);
        if self.include_usage {
            event.insert("usage".into(), self.usage(ending));
        }
        event.insert("tensorfold".into(), self.facts.statistics(ending));
        vec![Event::plain(&Value::Object(event)), done()]
    }

    fn failure(&mut self, error: &ApiError) -> Vec<Event> {
        vec![Event::plain(&error.body()), done()]
    }

    fn whole(&mut self, part: Part, ending: &Ending) -> Value {
        let told = self.told(&part.told);
        let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
        for piece in part.pieces {
            match piece {
                Piece::Reasoning(text) => reasoning.push_str(&text),
                Piece::Content(text) => content.push_str(&text),
                Piece::Call(call) => {
                    if self.facts.take_call().is_some() {
                        calls.push(call_entry(&call));
                    }
                }
            }
        }
        let finish = self.facts.finish_reason(ending);
        let (object, mut choice) = match self.kind {
            Kind::Text => ("text_completion", json!({"index": 0, "text": content, "finish_reason": finish})),
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
                ("chat.completion", json!({"index": 0, "message": message, "finish_reason": finish}))
            }
        };
        if let Some(told) = told {
            choice["logprobs"] = told;
        }
        let mut body = self.head(object, choice);
        body.insert("usage".into(), self.usage(ending));
        body.insert("tensorfold".into(), self.facts.statistics(ending));
        Value::Object(body)
    }
}

fn done() -> Event {
    Event { name: None, data: "[DONE]".into() }
}

fn call_entry(call: &ToolCall) -> Value {
    json!({"id": call_id(call, "call_"), "type": "function",
           "function": {"name": call.name, "arguments": call.arguments}})
}

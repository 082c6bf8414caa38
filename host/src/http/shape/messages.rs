//! Anthropic's Messages.

use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

use super::blocks::{Blocks, Step};
use super::{Event, Facts, Shape, arguments, call_id, random_id};
use crate::http::app::App;
use crate::http::error::ApiError;
use crate::http::pump::{Ending, Part};
use crate::http::request::Job;

/// A message.
pub struct Message {
    id: String,
    facts: Facts,
    blocks: Blocks,
    /// Number of the open block, or of the next.
    index: usize,
}

impl Message {
    /// The shape of a job's reply.
    pub fn new(app: &App, job: &Job, created: u64) -> Self {
        Self {
            id: random_id("msg_"),
            facts: Facts::new(job, created, &app.settings.served_name),
            blocks: Blocks::default(),
            index: 0,
        }
    }

    fn body(&self, content: &[Value], reason: Option<&str>, stop: Option<&str>, usage: &Value) -> Value {
        json!({"id": self.id, "type": "message", "role": "assistant", "model": self.facts.model, "content": content,
               "stop_reason": reason, "stop_sequence": stop, "usage": usage})
    }

    fn stop_reason(&self, ending: &Ending) -> &'static str {
        match self.facts.finish_reason(ending) {
            "tool_calls" => "tool_use",
            "length" => "max_tokens",
            _ if ending.stop.is_some() => "stop_sequence",
            _ => "end_turn",
        }
    }

    /// Cached prompt tokens count apart, as Anthropic's do.
    fn usage(&self, cached: usize, output: usize) -> Value {
        json!({"input_tokens": self.facts.prompt_tokens.saturating_sub(cached), "cache_creation_input_tokens": 0,
               "cache_read_input_tokens": cached, "output_tokens": output})
    }

    fn steps(&mut self, part: Part) -> Vec<Step> {
        let mut steps = Vec::new();
        self.blocks.push(part.pieces, || self.facts.take_call().is_some(), &mut steps);
        steps
    }

    fn events(&mut self, steps: Vec<Step>) -> Vec<Event> {
        let mut events = Vec::new();
        for step in steps {
            let index = self.index;
            let start = |block: Value| {
                let data = json!({"type": "content_block_start", "index": index, "content_block": block});
                Event::named("content_block_start", &data)
            };
            let delta = |delta: Value| {
                let data = json!({"type": "content_block_delta", "index": index, "delta": delta});
                Event::named("content_block_delta", &data)
            };
            let stop =
                || Event::named("content_block_stop", &json!({"type": "content_block_stop", "index": index}));
            match step {
                Step::OpenReasoning => {
                    events.push(start(json!({"type": "thinking", "thinking": "", "signature": ""})));
                }
                Step::Reasoning(text) => {
                    events.push(delta(json!({"type": "thinking_delta", "thinking": text})));
                }
                Step::CloseReasoning(text) => {
                    events.push(delta(json!({"type": "signature_delta", "signature": signature(&text)})));
                    events.push(stop());
                    self.index += 1;
                }
                Step::OpenText => events.push(start(json!({"type": "text", "text": ""}))),
                Step::Text(text) => events.push(delta(json!({"type": "text_delta", "text": text}))),
                Step::CloseText(_) => {
                    events.push(stop());
                    self.index += 1;
                }
                Step::Call(call) => {
                    let id = call_id(&call, "toolu_");
                    events.push(start(json!({"type": "tool_use", "id": id, "name": call.name, "input": {}})));
                    events.push(delta(json!({"type": "input_json_delta", "partial_json": call.arguments})));
                    events.push(stop());
                    self.index += 1;
                }
            }
        }
        events
    }
}

/// Clients keep thinking blocks that carry a signature; this server never checks it.
fn signature(text: &str) -> String {
    let hash = Sha256::digest(text);
    hash[..16].iter().fold("plugfold".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

impl Shape for Message {
    fn opening(&mut self) -> Vec<Event> {
        let message = self.body(&[], None, None, &self.usage(0, 0));
        vec![Event::named("message_start", &json!({"type": "message_start", "message": message}))]
    }

    fn part(&mut self, part: Part) -> Vec<Event> {
        let steps = self.steps(part);
        self.events(steps)
    }

    fn closing(&mut self, ending: &Ending) -> Vec<Event> {
        let mut steps = Vec::new();
        self.blocks.close(&mut steps);
        let mut events = self.events(steps);
        let delta = json!({
            "type": "message_delta",
            "delta": {"stop_reason": self.stop_reason(ending), "stop_sequence": ending.stop},
            "usage": self.usage(ending.stats.cached_tokens, ending.ids.len()),
        });
        events.push(Event::named("message_delta", &delta));
        events.push(Event::named("message_stop", &json!({"type": "message_stop"})));
        events
    }

    fn failure(&mut self, error: &ApiError) -> Vec<Event> {
        vec![Event::named("error", &error.anthropic())]
    }

    fn whole(&mut self, part: Part, ending: &Ending) -> Value {
        let mut steps = self.steps(part);
        self.blocks.close(&mut steps);
        let mut content = Vec::new();
        for step in steps {
            match step {
                Step::CloseReasoning(text) => {
                    let signature = signature(&text);
                    content.push(json!({"type": "thinking", "thinking": text, "signature": signature}));
                }
                Step::CloseText(text) => content.push(json!({"type": "text", "text": text})),
                Step::Call(call) => content
                    .push(json!({"type": "tool_use", "id": call_id(&call, "toolu_"), "name": call.name,
                                                        "input": arguments(&call)})),
                Step::OpenReasoning | Step::Reasoning(_) | Step::OpenText | Step::Text(_) => {}
            }
        }
        let usage = self.usage(ending.stats.cached_tokens, ending.ids.len());
        self.body(&content, Some(self.stop_reason(ending)), ending.stop.as_deref(), &usage)
    }

    fn keep_alive(&self) -> &'static str {
        "event: ping\ndata: {\"type\":\"ping\"}\n\n"
    }
}

//! `OpenAI`'s Responses: a reply is a list of items, a stream tells of every step of each.

use serde_json::{Map, Value, json};

use super::blocks::{Blocks, Step};
use super::logprobs::Writer;
use super::{Event, Facts, Shape, call_id, random_id};
use crate::http::app::App;
use crate::http::error::ApiError;
use crate::http::pump::{Ending, Part};
use crate::http::request::Job;
use crate::http::responses::sealed;

/// A response.
pub struct Response {
    id: String,
    facts: Facts,
    /// What the response repeats of its request.
    echo: Map<String, Value>,
    /// The reasoning comes a second time in the form that clients hand back unread.
    seal: bool,
    logprobs: Option<Writer>,
    blocks: Blocks,
    /// Complete items.
    output: Vec<Value>,
    /// Identifier of the open item.
    item: String,
    /// Entries of the open text that were not yet told.
    told: Vec<Value>,
    sequence: u64,
}

impl Response {
    /// The shape of a job's reply.
    pub fn new(app: &App, job: &Job, created: u64, echo: Map<String, Value>, seal: bool) -> Self {
        Self {
            id: random_id("resp_"),
            facts: Facts::new(job, created, &app.settings.served_name),
            echo,
            seal,
            logprobs: job.request.logprobs.map(|_| Writer::new(app.text.clone())),
            blocks: Blocks::default(),
            output: Vec::new(),
            item: String::new(),
            told: Vec::new(),
            sequence: 0,
        }
    }

    fn body(&self, status: &str, more: &[(&str, Value)]) -> Value {
        let mut body = Map::new();
        for (key, value) in [
            ("id", json!(self.id)),
            ("object", json!("response")),
            ("created_at", json!(self.facts.created)),
            ("status", json!(status)),
            ("background", json!(false)),
            ("error", Value::Null),
            ("incomplete_details", Value::Null),
            ("model", json!(self.facts.model)),
            ("output", json!(self.output)),
            ("parallel_tool_calls", json!(self.facts.parallel)),
            ("previous_response_id", Value::Null),
            // Nothing is kept on this side: clients send the whole history.
            ("store", json!(false)),
            ("truncation", json!("disabled")),
            ("usage", Value::Null),
        ] {
            body.insert(key.into(), value);
        }
        body.extend(self.echo.clone());
        body.extend(more.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
        Value::Object(body)
    }

    fn event(&mut self, name: &'static str, fields: Value) -> Event {
        let mut data = Map::new();
        data.insert("type".into(), json!(name));
        data.insert("sequence_number".into(), json!(self.sequence));
        self.sequence += 1;
        if let Value::Object(fields) = fields {
            data.extend(fields);
        }
        Event::named(name, &Value::Object(data))
    }

    fn reasoning_item(&self, text: &str) -> Value {
        let sealed = if self.seal { json!(sealed::close(text)) } else { Value::Null };
        json!({"id": self.item, "type": "reasoning", "status": "completed", "summary": [],
               "content": [{"type": "reasoning_text", "text": text}], "encrypted_content": sealed})
    }

    fn text_part(text: &str, told: &[Value]) -> Value {
        json!({"type": "output_text", "text": text, "annotations": [], "logprobs": told})
    }

    fn message_item(&self, part: Option<Value>) -> Value {
        let status = if part.is_some() { "completed" } else { "in_progress" };
        let content: Vec<Value> = part.into_iter().collect();
        json!({"id": self.item, "type": "message", "status": status, "role": "assistant", "content": content})
    }

    fn call_item(&self, id: &str, name: &str, arguments: &str, status: &str) -> Value {
        json!({"id": self.item, "type": "function_call", "status": status, "call_id": id, "name": name,
               "arguments": arguments})
    }

    fn steps(&mut self, part: Part) -> Vec<Step> {
        if let Some(writer) = &self.logprobs {
            self.told.extend(writer.answer(&part.told));
        }
        let mut steps = Vec::new();
        self.blocks.push(part.pieces, || self.facts.take_call().is_some(), &mut steps);
        steps
    }

    fn events(&mut self, steps: Vec<Step>) -> Vec<Event> {
        let mut events = Vec::new();
        for step in steps {
            let at = self.output.len();
            match step {
                Step::OpenReasoning => {
                    self.item = random_id("rs_");
                    let item = json!({"id": self.item, "type": "reasoning", "status": "in_progress", "summary": [],
                                      "content": []});
                    events.push(
                        self.event("response.output_item.added", json!({"output_index": at, "item": item})),
                    );
                    let part = json!({"type": "reasoning_text", "text": ""});
                    events.push(self.event(
                        "response.content_part.added",
                        json!({"item_id": self.item, "output_index": at, "content_index": 0, "part": part}),
                    ));
                }
                Step::Reasoning(text) => events.push(self.event(
                    "response.reasoning_text.delta",
                    json!({"item_id": self.item, "output_index": at, "content_index": 0, "delta": text}),
                )),
                Step::CloseReasoning(text) => {
                    events.push(self.event(
                        "response.reasoning_text.done",
                        json!({"item_id": self.item, "output_index": at, "content_index": 0, "text": text}),
                    ));
                    let part = json!({"type": "reasoning_text", "text": text});
                    events.push(self.event(
                        "response.content_part.done",
                        json!({"item_id": self.item, "output_index": at, "content_index": 0, "part": part}),
                    ));
                    let item = self.reasoning_item(&text);
                    events.push(self.done(item));
                }
                Step::OpenText => {
                    self.item = random_id("msg_");
                    let item = self.message_item(None);
                    events.push(
                        self.event("response.output_item.added", json!({"output_index": at, "item": item})),
                    );
                    events.push(self.event(
                        "response.content_part.added",
                        json!({"item_id": self.item, "output_index": at, "content_index": 0,
                               "part": Self::text_part("", &[])}),
                    ));
                }
                Step::Text(text) => {
                    let told = std::mem::take(&mut self.told);
                    events.push(self.event(
                        "response.output_text.delta",
                        json!({"item_id": self.item, "output_index": at, "content_index": 0, "delta": text,
                               "logprobs": told}),
                    ));
                }
                Step::CloseText(text) => {
                    events.push(self.event(
                        "response.output_text.done",
                        json!({"item_id": self.item, "output_index": at, "content_index": 0, "text": text,
                               "logprobs": []}),
                    ));
                    let part = Self::text_part(&text, &[]);
                    events.push(self.event(
                        "response.content_part.done",
                        json!({"item_id": self.item, "output_index": at, "content_index": 0, "part": part}),
                    ));
                    let item = self.message_item(Some(part));
                    events.push(self.done(item));
                }
                Step::Call(call) => {
                    self.item = random_id("fc_");
                    let id = call_id(&call, "call_");
                    let item = self.call_item(&id, &call.name, "", "in_progress");
                    events.push(
                        self.event("response.output_item.added", json!({"output_index": at, "item": item})),
                    );
                    events.push(self.event(
                        "response.function_call_arguments.delta",
                        json!({"item_id": self.item, "output_index": at, "delta": call.arguments}),
                    ));
                    events.push(self.event(
                        "response.function_call_arguments.done",
                        json!({"item_id": self.item, "output_index": at, "name": call.name,
                               "arguments": call.arguments}),
                    ));
                    let item = self.call_item(&id, &call.name, &call.arguments, "completed");
                    events.push(self.done(item));
                }
            }
        }
        events
    }

    /// An item is complete.
    fn done(&mut self, item: Value) -> Event {
        let fields = json!({"output_index": self.output.len(), "item": item});
        self.output.push(item);
        self.event("response.output_item.done", fields)
    }

    /// The complete body, and the name of the event that carries it.
    fn end(&self, ending: &Ending) -> (&'static str, Value) {
        let output = ending.ids.len();
        let usage = json!({
            "input_tokens": self.facts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": ending.stats.cached_tokens},
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": ending.reasoning_tokens},
            "total_tokens": self.facts.prompt_tokens + output,
        });
        let cut = self.facts.finish_reason(ending) == "length";
        let statistics = ("tensorfold", self.facts.statistics(ending));
        if cut {
            let details = json!({"reason": "max_output_tokens"});
            let body =
                self.body("incomplete", &[("incomplete_details", details), ("usage", usage), statistics]);
            return ("response.incomplete", body);
        }
        ("response.completed", self.body("completed", &[("usage", usage), statistics]))
    }
}

impl Shape for Response {
    fn opening(&mut self) -> Vec<Event> {
        let body = json!({"response": self.body("in_progress", &[])});
        vec![self.event("response.created", body.clone()), self.event("response.in_progress", body)]
    }

    fn part(&mut self, part: Part) -> Vec<Event> {
        let steps = self.steps(part);
        self.events(steps)
    }

    fn closing(&mut self, ending: &Ending) -> Vec<Event> {
        let mut steps = Vec::new();
        self.blocks.close(&mut steps);
        let mut events = self.events(steps);
        let (name, body) = self.end(ending);
        events.push(self.event(name, json!({"response": body})));
        events
    }

    fn failure(&mut self, error: &ApiError) -> Vec<Event> {
        let code = if error.status.is_server_error() { "server_error" } else { "invalid_prompt" };
        let body = error.body();
        let error = json!({"code": code, "message": body["error"]["message"]});
        let body = self.body("failed", &[("error", error)]);
        vec![self.event("response.failed", json!({"response": body}))]
    }

    fn whole(&mut self, part: Part, ending: &Ending) -> Value {
        let mut steps = self.steps(part);
        self.blocks.close(&mut steps);
        for step in steps {
            let item = match step {
                Step::OpenReasoning | Step::Reasoning(_) | Step::OpenText | Step::Text(_) => continue,
                Step::CloseReasoning(text) => {
                    self.item = random_id("rs_");
                    self.reasoning_item(&text)
                }
                Step::CloseText(text) => {
                    self.item = random_id("msg_");
                    let told = std::mem::take(&mut self.told);
                    self.message_item(Some(Self::text_part(&text, &told)))
                }
                Step::Call(call) => {
                    self.item = random_id("fc_");
                    self.call_item(&call_id(&call, "call_"), &call.name, &call.arguments, "completed")
                }
            };
            self.output.push(item);
        }
        self.end(ending).1
    }
}

//! The items of a request's input as chat messages.

use serde_json::{Map, Value, json};

use super::sealed;
use crate::http::dialect::nested;
use crate::http::error::ApiError;
use crate::http::fields::Fields;

/// The conversation of a request. Items of tools that this server does not have are left out and named.
///
/// # Errors
/// 400 naming the item.
pub fn messages(fields: Fields, skipped: &mut Vec<String>) -> Result<Vec<Value>, ApiError> {
    let mut history = History::default();
    if let Some(text) = fields.string("instructions")? {
        history.system(&json!(text));
    }
    match fields.get("input") {
        None => return Err(ApiError::field("input", "is missing: give a string or a list of items")),
        Some(Value::String(text)) => history.messages.push(json!({"role": "user", "content": text})),
        Some(Value::Array(items)) => {
            for (at, item) in items.iter().enumerate() {
                let bad = |rest: &str| ApiError::invalid(nested("input", at, rest)).with_param("input");
                history.item(item, &bad, skipped)?;
            }
        }
        Some(_) => return Err(ApiError::field("input", "must be a string or a list of items")),
    }
    if history.messages.is_empty() {
        return Err(ApiError::field("input", "must hold at least one item"));
    }
    Ok(history.messages)
}

#[derive(Default)]
struct History {
    messages: Vec<Value>,
}

impl History {
    /// System texts at the head become one message.
    fn system(&mut self, content: &Value) {
        if let [first] = self.messages.as_mut_slice()
            && first["role"] == "system"
            && let (Some(before), Some(more)) = (first["content"].as_str(), content.as_str())
        {
            first["content"] = format!("{before}\n\n{more}").into();
            return;
        }
        self.messages.push(json!({"role": "system", "content": content}));
    }

    /// The assistant message that an item belongs to: the last one, unless it holds that already.
    fn assistant(&mut self, fits: impl Fn(&Map<String, Value>) -> bool) -> Option<&mut Map<String, Value>> {
        let open = self
            .messages
            .last()
            .and_then(Value::as_object)
            .is_some_and(|m| m["role"] == "assistant" && fits(m));
        if !open {
            self.messages.push(json!({"role": "assistant", "content": ""}));
        }
        self.messages.last_mut().and_then(Value::as_object_mut)
    }

    fn item(
        &mut self,
        item: &Value,
        bad: &impl Fn(&str) -> ApiError,
        skipped: &mut Vec<String>,
    ) -> Result<(), ApiError> {
        let kind = match item["type"].as_str() {
            Some(kind) => kind,
            None if item["role"].is_string() => "message",
            None => return Err(bad(" must have a type")),
        };
        match kind {
            "message" => self.message(item, bad),
            "reasoning" => {
                let text = reasoning(item);
                // A new turn begins with its reasoning.
                let fresh = |m: &Map<String, Value>| m["content"] == "" && !m.contains_key("tool_calls");
                if !text.is_empty()
                    && let Some(message) = self.assistant(fresh)
                {
                    let before = message.get("reasoning_content").and_then(Value::as_str).unwrap_or_default();
                    let text = format!("{before}{text}");
                    message.insert("reasoning_content".into(), text.into());
                }
                Ok(())
            }
            "function_call" => {
                let Some(name) = item["name"].as_str() else { return Err(bad(".name must be a string")) };
                let call = json!({"id": item["call_id"], "type": "function",
                                  "function": {"name": name, "arguments": item["arguments"]}});
                if let Some(message) = self.assistant(|_| true) {
                    let calls = message.entry("tool_calls").or_insert_with(|| json!([]));
                    if let Some(calls) = calls.as_array_mut() {
                        calls.push(call);
                    }
                }
                Ok(())
            }
            "function_call_output" => {
                let content = match &item["output"] {
                    Value::Array(_) => content(&item["output"], &|rest| bad(&format!(".output{rest}")))?,
                    Value::String(text) => json!(text),
                    _ => return Err(bad(".output must be a string or a list of parts")),
                };
                self.messages
                    .push(json!({"role": "tool", "tool_call_id": item["call_id"], "content": content}));
                Ok(())
            }
            "item_reference" => {
                Err(bad(" refers to a stored item: this server keeps nothing; send the item itself"))
            }
            // Steps of tools that only other servers run.
            other => {
                skipped.push(format!("item {other}"));
                Ok(())
            }
        }
    }

    fn message(&mut self, item: &Value, bad: &impl Fn(&str) -> ApiError) -> Result<(), ApiError> {
        let content = content(&item["content"], &|rest| bad(&format!(".content{rest}")))?;
        match item["role"].as_str() {
            Some("user") => self.messages.push(json!({"role": "user", "content": content})),
            Some("system" | "developer") => self.system(&plain(content)),
            Some("assistant") => {
                let fits = |m: &Map<String, Value>| m["content"] == "" && !m.contains_key("tool_calls");
                if let Some(message) = self.assistant(fits) {
                    message.insert("content".into(), plain(content));
                }
            }
            _ => return Err(bad(".role must be one of user, assistant, system, developer")),
        }
        Ok(())
    }
}

/// The reasoning of an item: its text, or else the form that came back unread, or else its summary.
fn reasoning(item: &Value) -> String {
    let texts = |name: &str| {
        let parts = item[name].as_array().into_iter().flatten();
        parts.filter_map(|part| part["text"].as_str()).collect::<String>()
    };
    let text = texts("content");
    if !text.is_empty() {
        return text;
    }
    let sealed = item["encrypted_content"].as_str().and_then(sealed::open);
    sealed.unwrap_or_else(|| texts("summary"))
}

/// Text parts alone as one string: other messages than a user's have no images.
fn plain(content: Value) -> Value {
    match &content {
        Value::Array(parts) if parts.iter().all(|part| part["type"] == "text") => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("").into()
        }
        _ => content,
    }
}

fn content(content: &Value, bad: &impl Fn(&str) -> ApiError) -> Result<Value, ApiError> {
    match content {
        Value::String(text) => Ok(json!(text)),
        Value::Array(parts) => {
            let mut out = Vec::with_capacity(parts.len());
            for (at, part) in parts.iter().enumerate() {
                let wrong = |what: &str| bad(&format!("[{at}]{what}"));
                match part["type"].as_str() {
                    Some("input_text" | "output_text" | "text" | "summary_text" | "reasoning_text") => {
                        let Some(text) = part["text"].as_str() else {
                            return Err(wrong(".text must be a string"));
                        };
                        out.push(json!({"type": "text", "text": text}));
                    }
                    Some("refusal") => {
                        out.push(
                            json!({"type": "text", "text": part["refusal"].as_str().unwrap_or_default()}),
                        );
                    }
                    Some("input_image") => out.push(part.clone()),
                    Some(other) => {
                        return Err(wrong(&format!(".type {other:?} is not one that this server reads")));
                    }
                    None => return Err(wrong(" must have a type")),
                }
            }
            Ok(Value::Array(out))
        }
        _ => Err(bad(" must be a string or a list of parts")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(request: &Value) -> Result<(Vec<Value>, Vec<String>), ApiError> {
        let map = request.as_object().cloned().unwrap_or_default();
        let mut skipped = Vec::new();
        messages(Fields(&map), &mut skipped).map(|messages| (messages, skipped))
    }

    #[test]
    fn a_whole_history() {
        let (messages, skipped) = read(&json!({"instructions": "Be short.", "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Rules."}]},
            {"role": "user", "content": "do"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
            {"type": "message", "role": "assistant", "id": "m", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            {"type": "web_search_call", "id": "ws"},
            {"type": "reasoning", "summary": [], "encrypted_content": sealed::close("then")},
            {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
            {"role": "developer", "content": "late"},
        ]}))
        .unwrap();
        let call = |id: &str, name: &str| json!({"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}});
        assert_eq!(
            json!(messages),
            json!([
                {"role": "system", "content": "Be short.\n\nRules."},
                {"role": "user", "content": "do"},
                {"role": "assistant", "content": "ok", "reasoning_content": "why",
                 "tool_calls": [call("c1", "f"), call("c2", "g")]},
                {"role": "tool", "tool_call_id": "c1", "content": "1"},
                {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "2"}]},
                {"role": "assistant", "content": "", "reasoning_content": "then", "tool_calls": [call("c3", "f")]},
                {"role": "system", "content": "late"},
            ])
        );
        assert_eq!(skipped, ["item web_search_call"]);
    }

    #[test]
    fn mistakes_are_named() {
        for (input, words) in [
            (json!(null), "input is missing"),
            (json!([]), "at least one"),
            (json!(5), "input must be"),
            (json!([{"role": "robot", "content": "x"}]), "input[0].role"),
            (
                json!([{"role": "user", "content": [{"type": "input_file"}]}]),
                "input[0].content[0].type \"input_file\"",
            ),
            (json!([{"type": "item_reference", "id": "x"}]), "keeps nothing"),
            (json!([{"x": 1}]), "input[0] must have a type"),
        ] {
            let error = read(&json!({"input": input})).err().unwrap();
            assert!(error.message.contains(words), "{}", error.message);
        }
    }
}

//! Tool calls in reply text: GLM's `arg_key` / `arg_value` markup, JSON bodies, and Qwen's `function=` markup.
//!
//! A block that cannot be read, or that names no offered tool, is not an error: it is text, at the place where it stood.

use std::collections::HashMap;
use std::sync::Arc;

use plugfold_abi::markup::close_brackets;
use serde_json::{Map, Value};

use super::{Piece, ReplyParser, add_content, held_len};

const OPEN: &str = "<tool_call>";
const CLOSE: &str = "</tool_call>";

/// A tool that a request offers.
#[derive(Clone, Debug)]
pub struct ToolSpec {
    /// Its name, as the client spells it.
    pub name: String,
    /// The JSON schema of its arguments, or null.
    pub parameters: Value,
}

/// A call that was read out of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolCall {
    /// Its id; empty until the reply is written in the client's dialect, or a plugin sees it.
    pub id: String,
    /// The tool's name, as the client spells it.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

impl ToolCall {
    fn new(name: &str, arguments: &Value) -> Self {
        Self { id: String::new(), name: name.to_owned(), arguments: arguments.to_string() }
    }
}

/// Decides which JSON value an argument's text stands for.
pub trait ArgumentTyping: Send + Sync {
    /// `schema` is that of the parameter, null where the tool declares none.
    fn value(&self, schema: &Value, text: &str) -> Value;
}

/// Typing by the parameter's own `type`: `string` takes the text as it is; anything else is JSON, or text where that
/// fails. An array or object that only lacks closing brackets is closed.
pub struct PlainTyping;

impl ArgumentTyping for PlainTyping {
    fn value(&self, schema: &Value, text: &str) -> Value {
        let declared = schema["type"].as_str();
        if declared == Some("string") {
            return Value::String(text.to_owned());
        }
        if let Ok(value) = serde_json::from_str(text) {
            return value;
        }
        let closed = match declared {
            Some("array" | "object") => {
                close_brackets(text).and_then(|t| serde_json::from_str::<Value>(&t).ok())
            }
            _ => None,
        };
        match (declared, closed) {
            (Some("array"), Some(value @ Value::Array(_)))
            | (Some("object"), Some(value @ Value::Object(_))) => value,
            _ => Value::String(text.to_owned()),
        }
    }
}

/// Takes tool calls out of text.
pub struct ToolCallReader {
    /// Offered tools by their name in lower case.
    tools: HashMap<String, ToolSpec>,
    typing: Arc<dyn ArgumentTyping>,
    /// Text that is not decided yet; a whole block from its opening tag on while one is open.
    held: String,
    /// Bytes of `held`, from an opening tag on, that are known to hold no closing tag.
    scanned: usize,
    /// Reads blocks when the reply ends only.
    patient: bool,
}

impl ToolCallReader {
    /// Reads calls of the given tools with [`PlainTyping`].
    pub fn new(tools: Vec<ToolSpec>) -> Self {
        Self::with_typing(tools, Arc::new(PlainTyping))
    }

    /// Reads calls of the given tools.
    pub fn with_typing(tools: Vec<ToolSpec>, typing: Arc<dyn ArgumentTyping>) -> Self {
        let tools = tools.into_iter().map(|tool| (tool.name.to_lowercase(), tool)).collect();
        Self { tools, typing, held: String::new(), scanned: 0, patient: false }
    }

    /// Keeps the first block and all text behind it to the end of the reply.
    #[must_use]
    pub fn patient(mut self) -> Self {
        self.patient = true;
        self
    }

    /// The call in the body of one block, if it is one.
    fn read(&self, body: &str) -> Option<ToolCall> {
        let body = body.trim();
        json_call(body)
            .and_then(|(name, arguments)| self.known(&name, arguments))
            .or_else(|| self.qwen_call(body))
            .or_else(|| self.glm_call(body))
    }

    fn known(&self, name: &str, arguments: Map<String, Value>) -> Option<ToolCall> {
        let tool = self.tools.get(&name.to_lowercase())?;
        Some(ToolCall::new(&tool.name, &Value::Object(arguments)))
    }

    fn typed(&self, name: &str, pairs: Vec<(String, &str)>) -> Option<ToolCall> {
        let tool = self.tools.get(&name.to_lowercase())?;
        let mut arguments = Map::new();
        for (key, text) in pairs {
            let value = self.typing.value(&tool.parameters["properties"][&key], text);
            arguments.insert(key, value);
        }
        Some(ToolCall::new(&tool.name, &Value::Object(arguments)))
    }

    /// `<function=NAME><parameter=KEY>VALUE</parameter></function>`
    fn qwen_call(&self, body: &str) -> Option<ToolCall> {
        let (name, mut rest) = body.strip_prefix("<function=")?.split_once('>')?;
        let mut pairs = Vec::new();
        while let Some((_, after)) = rest.split_once("<parameter=") {
            let (key, after) = after.split_once('>')?;
            let (value, after) = after.split_once("</parameter>")?;
            let value = value.strip_prefix('\n').unwrap_or(value);
            pairs.push((key.trim().to_owned(), value.strip_suffix('\n').unwrap_or(value)));
            rest = after;
        }
        self.typed(name.trim(), pairs)
    }

    /// `NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...`
    fn glm_call(&self, body: &str) -> Option<ToolCall> {
        let (name, mut rest) = match body.find("<arg_key>") {
            Some(at) => body.split_at(at),
            None => (body, ""),
        };
        let name = name.trim();
        if name.is_empty() || name.contains(['<', '\n']) {
            return None;
        }
        let mut pairs = Vec::new();
        while let Some((_, after)) = rest.split_once("<arg_key>") {
            let Some((key, value)) = after.split_once("</arg_key>") else { break };
            rest = after;
            let Some(value) = value.trim_start().strip_prefix("<arg_value>") else { continue };
            let Some((value, after)) = value.split_once("</arg_value>") else { break };
            pairs.push((key.trim().to_owned(), value));
            rest = after;
        }
        self.typed(name, pairs)
    }
}

/// A JSON object with a name and arguments, which may be JSON text themselves.
fn json_call(body: &str) -> Option<(String, Map<String, Value>)> {
    let Value::Object(mut call) = serde_json::from_str(body).ok()? else { return None };
    let Value::String(name) = call.get_mut("name")?.take() else { return None };
    let arguments = match call.get_mut("arguments").map(Value::take) {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(arguments)) => arguments,
        Some(Value::String(text)) => match serde_json::from_str(&text).ok()? {
            Value::Object(arguments) => arguments,
            _ => return None,
        },
        Some(_) => return None,
    };
    Some((name, arguments))
}

impl ReplyParser for ToolCallReader {
    fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        self.held.push_str(text);
        loop {
            let Some(start) = find_tag(&self.held, OPEN, 0) else {
                let certain = self.held.len() - held_len(&self.held, OPEN, true);
                add_content(out, &self.held[..certain]);
                self.held.drain(..certain);
                self.scanned = 0;
                return;
            };
            if start > 0 {
                add_content(out, &self.held[..start]);
                self.held.drain(..start);
                self.scanned = 0;
            }
            if self.patient {
                return;
            }
            let from = self.scanned.max(OPEN.len());
            let Some(end) = find_tag(&self.held, CLOSE, from) else {
                self.scanned = self.held.len().saturating_sub(CLOSE.len() - 1).max(OPEN.len());
                return;
            };
            let whole = end + CLOSE.len();
            match self.read(&self.held[OPEN.len()..end]) {
                Some(call) => out.push(Piece::Call(call)),
                None => add_content(out, &self.held[..whole]),
            }
            self.held.drain(..whole);
            self.scanned = 0;
        }
    }

    fn finish(&mut self, out: &mut Vec<Piece>) {
        if std::mem::take(&mut self.patient) {
            self.push("", out);
        }
        add_content(out, &std::mem::take(&mut self.held));
        self.scanned = 0;
    }
}

/// Where an ASCII tag stands in `text` at or after byte `from`, in any case of letters.
fn find_tag(text: &str, tag: &str, from: usize) -> Option<usize> {
    let bytes = text.as_bytes().get(from..)?;
    bytes
        .windows(tag.len())
        .position(|window| window.eq_ignore_ascii_case(tag.as_bytes()))
        .map(|at| from + at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(text: &str) -> Vec<Piece> {
        let tool = |name: &str, properties: Value| ToolSpec {
            name: name.into(),
            parameters: json!({"properties": properties}),
        };
        let mut reader = ToolCallReader::new(vec![
            tool(
                "bash",
                json!({"command": {"type": "string"}, "timeout": {"type": "integer"}, "quiet": {"type": "boolean"}}),
            ),
            tool("Edit", json!({"edits": {"type": "array"}, "options": {"type": "object"}})),
        ]);
        let mut out = Vec::new();
        reader.push(text, &mut out);
        reader.finish(&mut out);
        out
    }

    fn call(name: &str, arguments: &str) -> Piece {
        Piece::Call(ToolCall { id: String::new(), name: name.into(), arguments: arguments.into() })
    }

    fn content(text: &str) -> Piece {
        Piece::Content(text.into())
    }

    #[test]
    fn glm_calls() {
        let bash = "<tool_call>bash<arg_key>command</arg_key><arg_value>ls -la 42</arg_value><arg_key>timeout</arg_key>\
                    <arg_value>30</arg_value></tool_call>";
        let arguments = r#"{"command":"ls -la 42","timeout":30}"#;
        assert_eq!(read(&format!("Running it.{bash}")), [content("Running it."), call("bash", arguments)]);
        assert_eq!(
            read("<tool_call>\nbash\n<arg_key> quiet </arg_key>\n<arg_value>true</arg_value>\n</tool_call>"),
            [call("bash", r#"{"quiet":true}"#)]
        );
        assert_eq!(
            read("<tool_call>bash<arg_key>command</arg_key><arg_value>{\"a\": 1}\n</arg_value></tool_call>"),
            [call("bash", r#"{"command":"{\"a\": 1}\n"}"#)]
        );
        assert_eq!(
            read(
                "<tool_call>bash<arg_key>timeout</arg_key><arg_value>1</arg_value><arg_key>timeout</arg_key><arg_value>2\
                  </arg_value></tool_call>"
            ),
            [call("bash", r#"{"timeout":2}"#)]
        );
        assert_eq!(read("<tool_call>bash</tool_call>"), [call("bash", "{}")]);
        assert_eq!(
            read("<tool_call>bash<arg_key>unknown</arg_key><arg_value>[1]</arg_value></tool_call>"),
            [call("bash", r#"{"unknown":[1]}"#)]
        );
    }

    #[test]
    fn names_are_matched_without_case() {
        assert_eq!(
            read("<tool_call>bash</tool_call><TOOL_CALL>nope</Tool_Call><tool_call>BASH</tool_call>"),
            [call("bash", "{}"), content("<TOOL_CALL>nope</Tool_Call>"), call("bash", "{}")]
        );
        assert_eq!(read("<tool_call>edit</tool_call>"), [call("Edit", "{}")]);
    }

    #[test]
    fn other_bodies() {
        assert_eq!(
            read(r#"<tool_call>{"name":"bash","arguments":{"timeout": 5}}</tool_call>"#),
            [call("bash", r#"{"timeout":5}"#)]
        );
        assert_eq!(
            read(r#"<tool_call>{"name":"bash","arguments":"{\"timeout\":5}"}</tool_call>"#),
            [call("bash", r#"{"timeout":5}"#)]
        );
        assert_eq!(
            read(
                "<tool_call><function=bash>\n<parameter=command>\nls\n</parameter><parameter=timeout>7</parameter></function></tool_call>"
            ),
            [call("bash", r#"{"command":"ls","timeout":7}"#)]
        );
    }

    #[test]
    fn what_cannot_be_read_is_text() {
        for text in [
            "<tool_call></tool_call>",
            "<tool_call><b>bash</tool_call>",
            "<tool_call>ba\nsh<arg_key>a</arg_key><arg_value>b</arg_value></tool_call>",
            "<tool_call>bash",
            "a </tool_call> b <tool_cal",
            "<tool_call>{\"name\":5}</tool_call>",
        ] {
            assert_eq!(read(text), [content(text)], "{text}");
        }
    }

    #[test]
    fn short_arrays_and_objects_are_closed() {
        let edit = |key: &str, value: &str| {
            read(&format!(
                "<tool_call>edit<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
            ))
        };
        assert_eq!(edit("edits", r#"[{"a": "]"#), [call("Edit", r#"{"edits":"[{\"a\": \"]"}"#)]);
        assert_eq!(edit("edits", r#"[{"a": "]"}"#), [call("Edit", r#"{"edits":[{"a":"]"}]}"#)]);
        assert_eq!(edit("options", r#"{"a": [1"#), [call("Edit", r#"{"options":{"a":[1]}}"#)]);
        assert_eq!(edit("options", "[1"), [call("Edit", r#"{"options":"[1"}"#)]);
        assert_eq!(edit("other", "[1"), [call("Edit", r#"{"other":"[1"}"#)]);
    }
}

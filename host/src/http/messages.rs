//! Anthropic's Messages: from a request to a chat completion.

use serde_json::{Map, Value, json};

use super::dialect::{Translated, nested};
use super::error::ApiError;
use super::fields::Fields;

/// Begins a line of the system text that changes between requests and says nothing to the model.
const BILLING: &str = "x-anthropic-billing-header:";

/// Translates a request.
///
/// # Errors
/// 400 naming the field, in Anthropic's names.
pub fn translate(request: &Map<String, Value>) -> Result<Translated, ApiError> {
    let fields = Fields(request);
    let mut out = Translated::default();
    let mut messages = system(fields)?;
    let Some(turns) = request.get("messages").and_then(Value::as_array) else {
        return Err(ApiError::field("messages", "must be a list of messages"));
    };
    for (at, turn) in turns.iter().enumerate() {
        turn_of(turn, at, &mut messages)?;
    }
    if turns.is_empty() {
        return Err(ApiError::field("messages", "must hold at least one message"));
    }
    let body = &mut out.body;
    body.insert("messages".into(), Value::Array(messages));
    for name in ["model", "max_tokens", "temperature", "top_p", "top_k", "stream"] {
        if let Some(value) = fields.get(name) {
            body.insert(name.into(), value.clone());
        }
    }
    if let Some(stops) = fields.get("stop_sequences") {
        if !stops.is_array() {
            return Err(ApiError::field("stop_sequences", "must be a list of strings"));
        }
        body.insert("stop".into(), stops.clone());
    }
    thinking(fields, body)?;
    tools(fields, &mut out)?;
    Ok(out)
}

/// The system text as the first message, without the line that changes.
fn system(fields: Fields) -> Result<Vec<Value>, ApiError> {
    let texts: Vec<&str> = match fields.get("system") {
        None => Vec::new(),
        Some(Value::String(text)) => vec![text],
        Some(Value::Array(blocks)) => {
            let text = |(at, block): (usize, &'_ Value)| {
                block["text"].as_str().map(|_| at).ok_or_else(|| {
                    ApiError::invalid(nested("system", at, " must be a text block")).with_param("system")
                })
            };
            blocks.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?;
            blocks.iter().filter_map(|block| block["text"].as_str()).collect()
        }
        Some(_) => return Err(ApiError::field("system", "must be a string or a list of text blocks")),
    };
    let mut kept: Vec<&str> = Vec::with_capacity(texts.len());
    for (at, text) in texts.into_iter().enumerate() {
        // Otherwise no two requests would begin alike, and nothing could be resumed.
        let text = if at == 0 && text.starts_with(BILLING) {
            text.split_once('\n').map_or("", |(_, rest)| rest)
        } else {
            text
        };
        if !text.is_empty() {
            kept.push(text);
        }
    }
    if kept.is_empty() {
        return Ok(Vec::new());
    }
    Ok(vec![json!({"role": "system", "content": kept.join("\n\n")})])
}

/// The chat messages of one turn.
fn turn_of(turn: &Value, at: usize, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let bad = |rest: &str| ApiError::invalid(nested("messages", at, rest)).with_param("messages");
    let role = turn["role"].as_str().filter(|role| ["user", "assistant", "system"].contains(role));
    let Some(role) = role else { return Err(bad(".role must be one of user, assistant, system")) };
    let blocks = match &turn["content"] {
        Value::String(text) => {
            out.push(json!({"role": role, "content": text}));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => return Err(bad(".content must be a string or a list of blocks")),
    };
    if role == "assistant" { assistant(blocks, &bad, out) } else { user(role, blocks, &bad, out) }
}

fn user(
    role: &str,
    blocks: &[Value],
    bad: &impl Fn(&str) -> ApiError,
    out: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let mut parts = Vec::new();
    for (index, block) in blocks.iter().enumerate() {
        if block["type"] != "tool_result" {
            parts.push(part(block, &|what| bad(&format!(".content[{index}]{what}")))?);
            continue;
        }
        if !parts.is_empty() {
            out.push(json!({"role": role, "content": std::mem::take(&mut parts)}));
        }
        let content = match &block["content"] {
            Value::Null => json!(""),
            Value::String(text) => json!(text),
            Value::Array(inner) => {
                let bad = |what: &str| bad(&format!(".content[{index}].content{what}"));
                Value::Array(inner.iter().map(|b| part(b, &bad)).collect::<Result<_, _>>()?)
            }
            _ => return Err(bad(&format!(".content[{index}].content must be a string or a list of blocks"))),
        };
        out.push(json!({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}));
    }
    if !parts.is_empty() || blocks.is_empty() {
        out.push(json!({"role": role, "content": parts}));
    }
    Ok(())
}

/// A block as a part of a chat message.
fn part(block: &Value, bad: &impl Fn(&str) -> ApiError) -> Result<Value, ApiError> {
    let text = |text: &str| json!({"type": "text", "text": text});
    match block["type"].as_str() {
        Some("text") => match block["text"].as_str() {
            Some(words) => Ok(text(words)),
            None => Err(bad(".text must be a string")),
        },
        Some("image") => {
            let source = &block["source"];
            let url = match (source["type"].as_str(), source["data"].as_str(), source["url"].as_str()) {
                (Some("base64"), Some(data), _) => {
                    format!("data:{};base64,{data}", source["media_type"].as_str().unwrap_or("image/png"))
                }
                (Some("url"), _, Some(url)) => url.to_owned(),
                _ => return Err(bad(".source must be base64 data or a url")),
            };
            Ok(json!({"type": "image_url", "image_url": {"url": url}}))
        }
        Some("document") => match (block["source"]["type"].as_str(), block["source"]["data"].as_str()) {
            (Some("text"), Some(words)) => Ok(text(words)),
            _ => Err(bad(".source must be plain text: this server reads no other documents")),
        },
        Some(other) => Err(bad(&format!(".type {other:?} is not one that this server reads"))),
        None => Err(bad(" must be a block with a type")),
    }
}

/// An assistant's blocks as one message.
fn assistant(
    blocks: &[Value],
    bad: &impl Fn(&str) -> ApiError,
    out: &mut Vec<Value>,
) -> Result<(), ApiError> {
    let (mut reasoning, mut content, mut calls) = (String::new(), String::new(), Vec::new());
    for (index, block) in blocks.iter().enumerate() {
        let string = |name: &str| {
            let found = block[name].as_str();
            found.ok_or_else(|| bad(&format!(".content[{index}].{name} must be a string")))
        };
        match block["type"].as_str() {
            Some("text") => content += string("text")?,
            Some("thinking") => reasoning += string("thinking")?,
            // Another server's: there is nothing to read in it.
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let input = if block["input"].is_null() { json!({}) } else { block["input"].clone() };
                calls.push(json!({"id": block["id"], "type": "function",
                                  "function": {"name": string("name")?, "arguments": input}}));
            }
            other => {
                let kind = other.unwrap_or("none");
                return Err(bad(&format!(
                    ".content[{index}].type {kind:?} is not one that an assistant has"
                )));
            }
        }
    }
    let mut message = json!({"role": "assistant", "content": content});
    if !reasoning.is_empty() {
        message["reasoning_content"] = reasoning.into();
    }
    if !calls.is_empty() {
        message["tool_calls"] = calls.into();
    }
    out.push(message);
    Ok(())
}

/// Whether the model thinks, for how long, and how hard.
fn thinking(fields: Fields, body: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut on = false;
    if let Some(thinking) = fields.object("thinking")? {
        match thinking.get("type").and_then(Value::as_str) {
            Some("adaptive") => on = true,
            Some("enabled") => {
                on = true;
                if let Some(budget) = Fields(thinking).get("budget_tokens") {
                    body.insert("thinking_budget".into(), budget.clone());
                }
            }
            // After a tool's result, not before.
            Some("between_tools") => on = answers_a_tool(fields),
            Some("disabled") => {}
            _ => {
                return Err(ApiError::invalid(
                    "thinking.type must be one of enabled, adaptive, between_tools, disabled",
                )
                .with_param("thinking"));
            }
        }
    }
    let mut template = Map::new();
    template.insert("enable_thinking".into(), json!(on));
    if let Some(config) = fields.object("output_config")? {
        if let Some(effort) = Fields(config).string("effort")? {
            let Some(effort) = effort_name(effort) else {
                return Err(ApiError::invalid(
                    "output_config.effort must be one of low, medium, high, xhigh, max",
                )
                .with_param("output_config"));
            };
            template.insert("reasoning_effort".into(), json!(effort));
        }
        if let Some(format) = Fields(config).object("format")? {
            let schema = json!({"name": "output", "schema": format.get("schema")});
            body.insert("response_format".into(), json!({"type": format.get("type"), "json_schema": schema}));
        }
    }
    body.insert("chat_template_kwargs".into(), Value::Object(template));
    Ok(())
}

/// Whether the last turn holds a tool's result.
fn answers_a_tool(fields: Fields) -> bool {
    let last = fields.get("messages").and_then(Value::as_array).and_then(|turns| turns.last());
    let blocks = last.and_then(|turn| turn["content"].as_array());
    blocks.is_some_and(|blocks| blocks.iter().any(|block| block["type"] == "tool_result"))
}

/// The template's name of an effort.
pub fn effort_name(effort: &str) -> Option<&'static str> {
    match effort {
        "low" => Some("low"),
        "medium" | "high" => Some("high"),
        "xhigh" | "max" => Some("max"),
        _ => None,
    }
}

fn tools(fields: Fields, out: &mut Translated) -> Result<(), ApiError> {
    let mut offered = Vec::new();
    if let Some(tools) = fields.list("tools", usize::MAX)? {
        for (at, tool) in tools.iter().enumerate() {
            let kind = tool["type"].as_str().unwrap_or("custom");
            if kind != "custom" {
                out.skipped.push(kind.to_owned());
                continue;
            }
            if !tool["name"].is_string()
                || !(tool["input_schema"].is_object() || tool["input_schema"].is_null())
            {
                let message = nested("tools", at, " must have a name and an input_schema");
                return Err(ApiError::invalid(message).with_param("tools"));
            }
            let mut function = Map::new();
            function.insert("name".into(), tool["name"].clone());
            if tool["description"].is_string() {
                function.insert("description".into(), tool["description"].clone());
            }
            function.insert("parameters".into(), tool["input_schema"].clone());
            offered.push(json!({"type": "function", "function": function}));
        }
    }
    let body = &mut out.body;
    if let Some(choice) = fields.object("tool_choice")? {
        let chosen = match choice.get("type").and_then(Value::as_str) {
            Some("auto") => json!("auto"),
            Some("none") => json!("none"),
            Some("any") => json!("required"),
            Some("tool") => json!({"type": "function", "function": {"name": choice.get("name")}}),
            _ => {
                return Err(ApiError::invalid("tool_choice.type must be one of auto, any, tool, none")
                    .with_param("tool_choice"));
            }
        };
        body.insert("tool_choice".into(), chosen);
        if Fields(choice).boolean("disable_parallel_tool_use")? == Some(true) {
            body.insert("parallel_tool_calls".into(), json!(false));
        }
    }
    body.insert("tools".into(), Value::Array(offered));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(request: &Value) -> Result<Value, ApiError> {
        let request = request.as_object().cloned().unwrap_or_default();
        translate(&request).map(|t| Value::Object(t.body))
    }

    fn messages(request: &Value) -> Value {
        translated(request).unwrap()["messages"].clone()
    }

    #[test]
    fn the_changing_line_is_left_out_of_the_system_text_alone() {
        let request = |line: &str| {
            json!({"system": [{"type": "text", "text": line}, {"type": "text", "text": "Be short."}],
                   "messages": [{"role": "user", "content": "x-anthropic-billing-header: mine"}]})
        };
        let one = messages(&request("x-anthropic-billing-header: cc_version=2; cch=aaaaa;"));
        assert_eq!(one, messages(&request("x-anthropic-billing-header: cc_version=2; cch=bbbbb;")));
        assert_eq!(
            one,
            json!([{"role": "system", "content": "Be short."},
                   {"role": "user", "content": "x-anthropic-billing-header: mine"}])
        );
        let text = json!({"system": "x-anthropic-billing-header: a\nBe long.", "messages": [{"role": "user", "content": "x"}]});
        assert_eq!(messages(&text)[0]["content"], "Be long.");
    }

    #[test]
    fn turns() {
        let got = messages(&json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "system", "content": "note"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "why", "signature": "s"}, {"type": "text", "text": "b"},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"k": 1}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "r"}]},
                {"type": "text", "text": "c"}]},
        ]}));
        assert_eq!(
            got,
            json!([
                {"role": "user", "content": [{"type": "text", "text": "a"}]},
                {"role": "system", "content": "note"},
                {"role": "assistant", "content": "b", "reasoning_content": "why", "tool_calls": [
                    {"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"k": 1}}}]},
                {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "r"}]},
                {"role": "user", "content": [{"type": "text", "text": "c"}]},
            ])
        );
    }

    #[test]
    fn thinking_effort_tools_and_choice() {
        let user = json!([{"role": "user", "content": "x"}]);
        let body = translated(&json!({"messages": user, "thinking": {"type": "enabled", "budget_tokens": 99},
            "output_config": {"effort": "medium"}, "tool_choice": {"type": "any", "disable_parallel_tool_use": true},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}, {"type": "web_search_20250305", "name": "web"}],
            "stop_sequences": ["a"], "max_tokens": 5}))
        .unwrap();
        assert_eq!(body["thinking_budget"], 99);
        assert_eq!(
            body["chat_template_kwargs"],
            json!({"enable_thinking": true, "reasoning_effort": "high"})
        );
        assert_eq!((&body["tool_choice"], &body["parallel_tool_calls"]), (&json!("required"), &json!(false)));
        assert_eq!(body["tools"].as_array().unwrap().len(), 1);
        assert_eq!((&body["stop"], &body["max_tokens"]), (&json!(["a"]), &json!(5)));
        let off = translated(&json!({"messages": user})).unwrap();
        assert_eq!(off["chat_template_kwargs"]["enable_thinking"], false);
    }

    #[test]
    fn mistakes_are_named() {
        let user = json!([{"role": "user", "content": "x"}]);
        for (request, words) in [
            (json!({}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role"),
            (
                json!({"messages": [{"role": "user", "content": [{"type": "video"}]}]}),
                "content[0].type \"video\"",
            ),
            (json!({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}), "content[0].type"),
            (json!({"messages": user, "system": [{"type": "text"}]}), "system[0]"),
            (json!({"messages": user, "thinking": {"type": "on"}}), "thinking.type"),
            (json!({"messages": user, "tools": [{"input_schema": {}}]}), "tools[0]"),
            (json!({"messages": user, "tool_choice": {"type": "maybe"}}), "tool_choice.type"),
            (json!({"messages": user, "output_config": {"effort": "some"}}), "output_config.effort"),
        ] {
            let error = translated(&request).err().unwrap_or_else(|| panic!("{request}"));
            assert!(error.message.contains(words), "{request}: {}", error.message);
        }
    }
}

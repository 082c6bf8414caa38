//! `OpenAI`'s Responses: from a request to a chat completion. Nothing is stored: clients send the whole history.

mod items;
pub mod sealed;

use serde_json::{Map, Value, json};

use super::dialect::{Translated, nested};
use super::error::ApiError;
use super::fields::Fields;
use super::messages::effort_name;

/// Fields that would need something kept on this side.
const STATE: [(&str, &str); 3] = [
    ("previous_response_id", "send the whole history as input instead"),
    ("conversation", "send the whole history as input instead"),
    ("prompt", "send the text itself as instructions and input instead"),
];

/// Translates a request.
///
/// # Errors
/// 400 naming the field, in the names of the Responses API.
pub fn translate(request: &Map<String, Value>) -> Result<Translated, ApiError> {
    let fields = Fields(request);
    for (name, mend) in STATE {
        if fields.get(name).is_some() {
            return Err(ApiError::field(
                name,
                format_args!("is not possible: this server keeps nothing; {mend}"),
            ));
        }
    }
    if fields.boolean("background")? == Some(true) {
        return Err(ApiError::field(
            "background",
            "is not possible: this server keeps nothing; stream instead",
        ));
    }
    let mut out = Translated::default();
    let messages = items::messages(fields, &mut out.skipped)?;
    out.body.insert("messages".into(), Value::Array(messages));
    for (theirs, ours) in [
        ("model", "model"),
        ("max_output_tokens", "max_tokens"),
        ("temperature", "temperature"),
        ("top_p", "top_p"),
        ("stream", "stream"),
        ("parallel_tool_calls", "parallel_tool_calls"),
    ] {
        if let Some(value) = fields.get(theirs) {
            out.body.insert(ours.into(), value.clone());
        }
    }
    tools(fields, &mut out)?;
    reasoning(fields, &mut out)?;
    format(fields, &mut out)?;
    include(fields, &mut out)?;
    echo(fields, &mut out.echo);
    Ok(out)
}

/// Function tools as a chat completion has them. Other kinds are left out and named.
fn tools(fields: Fields, out: &mut Translated) -> Result<(), ApiError> {
    let mut offered: Vec<Value> = Vec::new();
    for (at, tool) in fields.list("tools", usize::MAX)?.unwrap_or_default().iter().enumerate() {
        let Some(kind) = tool["type"].as_str() else {
            return Err(ApiError::invalid(nested("tools", at, ".type must be a string")).with_param("tools"));
        };
        if kind != "function" {
            let name = tool["name"].as_str().map_or(String::new(), |name| format!(" {name}"));
            out.skipped.push(format!("{kind}{name}"));
            continue;
        }
        let mut function = tool.as_object().cloned().unwrap_or_default();
        function.shift_remove("type");
        offered.push(json!({"type": "function", "function": function}));
    }
    if let Some(choice) = fields.get("tool_choice") {
        let wrong = || ApiError::field("tool_choice", CHOICES);
        let chosen = match (choice, choice["type"].as_str()) {
            (Value::String(_), _) => choice.clone(),
            (_, Some("function")) => json!({"type": "function", "function": {"name": choice["name"]}}),
            (_, Some("allowed_tools")) => {
                let allowed = choice["tools"].as_array().ok_or_else(wrong)?;
                offered.retain(|tool| allowed.iter().any(|a| a["name"] == tool["function"]["name"]));
                choice["mode"].clone()
            }
            _ => return Err(wrong()),
        };
        out.body.insert("tool_choice".into(), chosen);
    }
    out.body.insert("tools".into(), Value::Array(offered));
    Ok(())
}

const CHOICES: &str = "must be \"auto\", \"none\", \"required\", {\"type\":\"function\",\"name\":...}, or \
                       {\"type\":\"allowed_tools\",\"mode\":...,\"tools\":[...]}";

fn reasoning(fields: Fields, out: &mut Translated) -> Result<(), ApiError> {
    let Some(reasoning) = fields.object("reasoning")? else { return Ok(()) };
    let template = match Fields(reasoning).string("effort")? {
        None => return Ok(()),
        Some("none" | "minimal") => json!({"enable_thinking": false}),
        Some(effort) => {
            let Some(name) = effort_name(effort) else {
                let names = "must be one of none, minimal, low, medium, high, xhigh, max";
                return Err(ApiError::invalid(format!("reasoning.effort {names}")).with_param("reasoning"));
            };
            json!({"enable_thinking": true, "reasoning_effort": name})
        }
    };
    out.body.insert("chat_template_kwargs".into(), template);
    Ok(())
}

/// `text.format`: the output's form.
fn format(fields: Fields, out: &mut Translated) -> Result<(), ApiError> {
    let Some(text) = fields.object("text")? else { return Ok(()) };
    let Some(format) = Fields(text).object("format")? else { return Ok(()) };
    let mut schema = format.clone();
    let kind = schema.shift_remove("type").unwrap_or_default();
    let wanted = match kind.as_str() {
        Some("text") => return Ok(()),
        Some("json_schema") => json!({"type": "json_schema", "json_schema": schema}),
        Some("json_object") => json!({"type": "json_object"}),
        _ => {
            return Err(ApiError::invalid("text.format.type must be one of text, json_object, json_schema")
                .with_param("text"));
        }
    };
    out.body.insert("response_format".into(), wanted);
    Ok(())
}

/// What the reply is to hold besides.
fn include(fields: Fields, out: &mut Translated) -> Result<(), ApiError> {
    let list = fields.list("include", 64)?.unwrap_or_default();
    let wants = |name: &str| list.iter().any(|entry| entry == name);
    out.seal = wants("reasoning.encrypted_content");
    let top = fields.integer("top_logprobs")?.filter(|top| *top != 0);
    if wants("message.output_text.logprobs") || top.is_some() {
        out.body.insert("logprobs".into(), json!(true));
        let top = top.map(|top| i64::try_from(top).unwrap_or(i64::MAX));
        out.body.insert("top_logprobs".into(), json!(top.unwrap_or(0)));
    }
    Ok(())
}

/// What a response repeats of its request.
fn echo(fields: Fields, out: &mut Map<String, Value>) {
    for (name, absent) in [
        ("instructions", Value::Null),
        ("max_output_tokens", Value::Null),
        ("metadata", json!({})),
        ("reasoning", json!({"effort": null, "summary": null})),
        ("temperature", json!(1.0)),
        ("text", json!({"format": {"type": "text"}})),
        ("tool_choice", json!("auto")),
        ("tools", json!([])),
        ("top_p", json!(0.95)),
        ("user", Value::Null),
    ] {
        out.insert(name.into(), fields.get(name).cloned().unwrap_or(absent));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn translated(request: &Value) -> Result<Translated, ApiError> {
        translate(&request.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn fields_are_put_into_chat_words() {
        let out = translated(&json!({
            "input": "x", "max_output_tokens": 9, "top_logprobs": 3, "include": ["reasoning.encrypted_content"],
            "reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": false,
            "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": true}},
            "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "web_search"},
                      {"type": "namespace", "name": "ns", "tools": []}],
            "tool_choice": {"type": "function", "name": "f"}}))
        .unwrap();
        assert_eq!(out.skipped, ["web_search", "namespace ns"]);
        assert!(out.seal);
        let body = Value::Object(out.body);
        assert_eq!(body["tools"], json!([{"type": "function", "function": {"name": "f", "parameters": {}}}]));
        assert_eq!(body["tool_choice"], json!({"type": "function", "function": {"name": "f"}}));
        assert_eq!(body["chat_template_kwargs"], json!({"enable_thinking": true, "reasoning_effort": "low"}));
        assert_eq!(
            body["response_format"],
            json!({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": true}})
        );
        assert_eq!((&body["max_tokens"], &body["top_logprobs"]), (&json!(9), &json!(3)));
    }

    #[test]
    fn what_needs_memory_is_refused() {
        for (name, value) in [
            ("previous_response_id", json!("resp_1")),
            ("conversation", json!({"id": "c"})),
            ("prompt", json!({"id": "p"})),
            ("background", json!(true)),
        ] {
            let error = translated(&json!({"input": "x", name: value})).err().unwrap();
            assert_eq!(error.param.as_deref(), Some(name));
        }
    }
}

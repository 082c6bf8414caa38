//! The tools that a request offers, after `tool_choice`.

use serde_json::Value;

use super::prompt::text_bytes;
use crate::http::app::App;
use crate::http::error::ApiError;
use crate::http::fields::Fields;
use crate::reply::tools::ToolSpec;

/// The tools a request offers, after `tool_choice`.
#[derive(Default)]
pub(super) struct Choice {
    /// As the template gets them.
    pub(super) offered: Vec<Value>,
    /// As the reply parser gets them.
    pub(super) specs: Vec<ToolSpec>,
    /// More than one call may be in a reply.
    pub(super) parallel: bool,
}

pub(super) fn tools(app: &App, fields: Fields) -> Result<Choice, ApiError> {
    let parallel = fields.boolean("parallel_tool_calls")?.unwrap_or(true);
    let given = fields.list("tools", app.settings.limits.tools)?.unwrap_or_default();
    schema_size(app, "tools", given.iter().map(text_bytes).sum())?;
    let mut offered = given.to_vec();
    let mut specs = Vec::with_capacity(offered.len());
    for (at, tool) in offered.iter().enumerate() {
        let function = if tool["function"].is_object() { &tool["function"] } else { tool };
        let Some(name) = function["name"].as_str().filter(|name| !name.is_empty()) else {
            return Err(
                ApiError::invalid(format!("tools[{at}] must be a function with a name")).with_param("tools")
            );
        };
        if !matches!(function["parameters"], Value::Null | Value::Object(_)) {
            return Err(ApiError::invalid(format!("tools[{at}].function.parameters must be an object"))
                .with_param("tools"));
        }
        specs.push(ToolSpec { name: name.to_owned(), parameters: function["parameters"].clone() });
    }
    match fields.get("tool_choice") {
        None => {}
        Some(Value::String(choice)) => match choice.as_str() {
            "auto" => {}
            "required" if !specs.is_empty() => {}
            "none" => {
                offered.clear();
                specs.clear();
            }
            "required" => {
                return Err(ApiError::field("tool_choice", "is required, but the request has no tools"));
            }
            _ => return Err(ApiError::field("tool_choice", CHOICES)),
        },
        Some(Value::Object(choice)) => {
            let named = choice.get("function").and_then(|f| f["name"].as_str());
            let Some(named) = named.filter(|_| choice.get("type").is_none_or(|t| t == "function")) else {
                return Err(ApiError::field("tool_choice", CHOICES));
            };
            let Some(at) = specs.iter().position(|tool| tool.name == named) else {
                return Err(ApiError::field(
                    "tool_choice",
                    format_args!("names {named:?}, which is not among the tools"),
                ));
            };
            offered = vec![offered.swap_remove(at)];
            specs = vec![specs.swap_remove(at)];
        }
        Some(_) => return Err(ApiError::field("tool_choice", CHOICES)),
    }
    Ok(Choice { offered, specs, parallel })
}

const CHOICES: &str =
    "must be \"auto\", \"none\", \"required\", or {\"type\":\"function\",\"function\":{\"name\":...}}";

pub(super) fn schema_size(app: &App, name: &str, bytes: usize) -> Result<(), ApiError> {
    let limit = app.settings.limits.schema_bytes;
    if bytes > limit {
        return Err(ApiError::field(
            name,
            format_args!("has {bytes} bytes of schemas; the limit is {limit}"),
        ));
    }
    Ok(())
}

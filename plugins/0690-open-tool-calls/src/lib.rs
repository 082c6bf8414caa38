//! Two repairs of the markup that a model writes its calls in: a last call that lacks only its closing tag, and keys that lack
//! their opening one.

mod tags;

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Document as _, DocumentObject, Reply, ReplyLink, ReplyLinkObject};
use plugfold_abi::{KnobValue, Knobs, List, OpError, TextBuf};
use serde_json::Value;

use tags::Tool;

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin.
pub struct OpenToolCalls;

impl Plugin for OpenToolCalls {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        Ok(List::from(vec![Offer::of(ReplyLinkObject::new(Tags::new(&setup.knobs)?))]))
    }
}

/// The repairs that are on.
pub struct Tags {
    open: bool,
    keys: bool,
}

impl Tags {
    /// The repairs among those of 0620.
    ///
    /// # Errors
    /// No such knob.
    pub fn new(knobs: &Knobs<'_>) -> Result<Self, OpError> {
        let KnobValue::List(names) = &knobs.get("0620.fixes")?.value else {
            return Err(OpError::invalid("0620.fixes must be a list of names"));
        };
        let has = |name: &str| names.iter().any(|n| n.as_str() == name);
        Ok(Self { open: has("opencalls"), keys: has("argkeys") })
    }
}

fn value(body: &DocumentObject, path: &str) -> Result<Value, OpError> {
    let json = body.get(path.into())?.into_option();
    Ok(json.and_then(|json| serde_json::from_str(&json).ok()).unwrap_or(Value::Null))
}

/// The tools that a request offers, after `tool_choice`; the server has checked them.
fn tools(body: &DocumentObject) -> Result<Vec<Tool>, OpError> {
    let choice = value(body, "/tool_choice")?;
    let named = choice["function"]["name"].as_str();
    let Value::Array(tools) = value(body, "/tools")? else { return Ok(Vec::new()) };
    if choice == "none" {
        return Ok(Vec::new());
    }
    let tool = |tool: &Value| {
        let function = if tool["function"].is_object() { &tool["function"] } else { tool };
        let name = function["name"].as_str()?.to_owned();
        let required = function["parameters"]["required"].as_array().into_iter().flatten();
        let required = required.filter_map(|key| key.as_str().map(str::to_owned)).collect();
        named.is_none_or(|named| named == name).then_some(Tool { name, required })
    };
    Ok(tools.iter().filter_map(tool).collect())
}

impl ReplyLink for Tags {
    fn repair(&self, body: &DocumentObject, reply: &mut Reply) -> Result<(), OpError> {
        if !(self.open || self.keys) || !reply.raw.contains('<') {
            return Ok(());
        }
        let tools = tools(body)?;
        if tools.is_empty() {
            return Ok(());
        }
        let mut raw = reply.raw.to_string();
        if self.keys {
            raw = tags::with_keys(&raw);
        }
        if self.open && reply.ended == "token" {
            // What a model thinks aloud is no answer.
            let answer =
                if reply.thinking { raw.find("</think>").map(|at| at + "</think>".len()) } else { Some(0) };
            if let Some(at) = answer
                && let Some(closed) = tags::closed(&raw[at..], &tools, self.keys)
            {
                raw.truncate(at);
                raw.push_str(&closed);
            }
        }
        if raw != reply.raw.as_str() {
            reply.raw = raw.into();
        }
        Ok(())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: OpenToolCalls);

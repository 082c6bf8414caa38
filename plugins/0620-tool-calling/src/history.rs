//! Reasoning of earlier replies: what it is kept under, and how it gets back into a history that lost it.

use plugfold_abi::OpError;
use plugfold_abi::points::{Document, DocumentObject};
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::memory::Memory;

/// A value of the body.
pub fn value(body: &DocumentObject, path: &str) -> Result<Value, OpError> {
    let json = body.get(path.into())?.into_option();
    Ok(json.and_then(|json| serde_json::from_str(&json).ok()).unwrap_or(Value::Null))
}

/// Whether the request offers tools.
pub fn offers_tools(body: &DocumentObject) -> Result<bool, OpError> {
    Ok(body.kind("/tools".into())?.as_str() == "array" && body.len("/tools".into())? > 0)
}

/// The text of a user message; parts are joined.
fn text_of(body: &DocumentObject, message: u32) -> Result<String, OpError> {
    let content = format!("/messages/{message}/content");
    if body.kind(content.as_str().into())?.as_str() != "array" {
        return Ok(value(body, &content)?.as_str().unwrap_or_default().to_owned());
    }
    let mut all = String::new();
    for part in 0..body.len(content.as_str().into())? {
        // Without the image parts, which may be large.
        if let Value::String(text) = value(body, &format!("{content}/{part}/text"))? {
            all.push_str(&text);
        }
    }
    Ok(all)
}

/// The text of the last user message before a place.
pub fn asked(body: &DocumentObject, before: u32) -> Result<String, OpError> {
    for message in (0..before).rev() {
        if value(body, &format!("/messages/{message}/role"))? == "user" {
            return text_of(body, message);
        }
    }
    Ok(String::new())
}

/// What calls are known by to clients that renumber ids: the question, the names and the arguments.
pub fn signature(asked: &str, calls: &[(String, Value)]) -> String {
    let calls = calls
        .iter()
        .map(|(name, arguments)| Value::Array(vec![Value::String(name.clone()), sorted(arguments.clone())]));
    let whole = Value::Array(vec![Value::String(asked.to_owned()), calls.collect()]);
    let hash = Sha256::digest(whole.to_string());
    hash.iter().fold("sig:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

/// A document with the keys of all its objects in order.
fn sorted(value: Value) -> Value {
    match value {
        Value::Array(items) => items.into_iter().map(sorted).collect(),
        Value::Object(map) => {
            let mut pairs: Vec<(String, Value)> = map.into_iter().map(|(k, v)| (k, sorted(v))).collect();
            pairs.sort_by(|a, b| a.0.cmp(&b.0));
            Value::Object(pairs.into_iter().collect())
        }
        other => other,
    }
}

/// The arguments of a call in a history, which may be JSON text.
pub fn arguments(given: &Value) -> Value {
    match given {
        Value::String(text) if text.trim().is_empty() => Value::Object(Map::new()),
        Value::String(text) => serde_json::from_str(text).unwrap_or_else(|_| given.clone()),
        Value::Null => Value::Object(Map::new()),
        other => other.clone(),
    }
}

/// Whether an id is one that this server gave.
pub fn is_own_id(id: &str) -> bool {
    let digits = id.strip_prefix("call_").unwrap_or_default();
    digits.len() == 24 && digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Puts remembered reasoning back into the turns of a history that called tools and have lost it.
pub fn restore(body: &DocumentObject, memory: &mut Memory) -> Result<(), OpError> {
    if memory.is_empty() || body.kind("/messages".into())?.as_str() != "array" {
        return Ok(());
    }
    for message in 0..body.len("/messages".into())? {
        let at = |name: &str| format!("/messages/{message}/{name}");
        if value(body, &at("role"))? != "assistant" {
            continue;
        }
        let Value::Array(calls) = value(body, &at("tool_calls"))? else { continue };
        let own = value(body, &at("reasoning_content"))?;
        if calls.is_empty() || own.is_string() || value(body, &at("reasoning"))?.is_string() {
            continue;
        }
        let content = value(body, &at("content"))?;
        let parts = content.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str());
        if content.as_str().into_iter().chain(parts).any(|text| text.contains("</think>")) {
            continue;
        }
        let ids = calls.iter().filter_map(|call| call["id"].as_str());
        let found = if let Some(text) = memory.find(ids) {
            Some(text)
        } else {
            let call = |call: &Value| {
                let function = if call["function"].is_object() { &call["function"] } else { call };
                Some((function["name"].as_str()?.to_owned(), arguments(&function["arguments"])))
            };
            let calls: Option<Vec<_>> = calls.iter().map(call).collect();
            let Some(calls) = calls else { continue };
            let signature = signature(&asked(body, message)?, &calls);
            memory.find([signature.as_str()].into_iter())
        };
        if let Some(text) = found {
            let json = Value::String(text).to_string();
            body.set(at("reasoning_content").as_str().into(), json.as_str().into())?;
        }
    }
    Ok(())
}

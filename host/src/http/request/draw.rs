//! How a reply is drawn, what is told of it, and where it ends.

use plugfold_engine::logprobs::MAX_TOP;
use plugfold_engine::service::{Sampling, ThinkingBudget};
use serde_json::Value;

use super::Kind;
use crate::http::app::App;
use crate::http::error::ApiError;
use crate::http::fields::Fields;
use crate::reply::stop::StopStrings;

pub(super) fn stop_strings(app: &App, fields: Fields) -> Result<StopStrings, ApiError> {
    let limits = &app.settings.limits;
    let stops: Vec<&str> = match fields.get("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(list)) => {
            if list.len() > limits.stop_strings {
                let problem = format!("has {} strings; the limit is {}", list.len(), limits.stop_strings);
                return Err(ApiError::field("stop", problem));
            }
            let strings: Option<Vec<&str>> = list.iter().map(Value::as_str).collect();
            strings.ok_or_else(|| ApiError::field("stop", "must be a string or a list of strings"))?
        }
        Some(_) => return Err(ApiError::field("stop", "must be a string or a list of strings")),
    };
    if let Some(long) = stops.iter().find(|stop| stop.len() > limits.stop_bytes) {
        let problem = format!("has a string of {} bytes; the limit is {}", long.len(), limits.stop_bytes);
        return Err(ApiError::field("stop", problem));
    }
    StopStrings::new(stops.into_iter().map(str::to_owned).collect())
        .ok_or_else(|| ApiError::field("stop", "cannot be searched for: use shorter strings"))
}

pub(super) fn sampling(fields: Fields) -> Result<Sampling, ApiError> {
    let temperature = fields.float("temperature")?.unwrap_or(1.0);
    let top_p = fields.float("top_p")?.unwrap_or(0.95);
    let top_k = fields.integer("top_k")?.unwrap_or(20);
    let top_k = u32::try_from(top_k.clamp(0, i128::from(u32::MAX))).unwrap_or(u32::MAX);
    let seed = match fields.integer("seed")? {
        None => None,
        Some(seed) if (i128::from(i64::MIN)..=i128::from(u64::MAX)).contains(&seed) => Some(seed as u64),
        Some(_) => return Err(ApiError::field("seed", "must be a 64-bit integer or null")),
    };
    let min_p = fields.float("min_p")?.unwrap_or(0.0);
    if !(0.0..=1.0).contains(&min_p) {
        return Err(ApiError::field("min_p", "must be between 0 and 1"));
    }
    Ok(Sampling { temperature, top_k, top_p, min_p, seed })
}

/// The reply budget that was asked for; `max_tokens` wins, 0 counts as not given.
pub(super) fn budget(fields: Fields) -> Result<Option<usize>, ApiError> {
    let mut asked = None;
    for name in ["max_completion_tokens", "max_tokens"] {
        match fields.integer(name)? {
            None | Some(0) => {}
            Some(tokens) if tokens < 0 => return Err(ApiError::field(name, "must not be negative")),
            Some(tokens) => asked = Some(usize::try_from(tokens).unwrap_or(usize::MAX)),
        }
    }
    Ok(asked)
}

/// Fields that would ask for several replies.
pub(super) fn counts(fields: Fields) -> Result<(), ApiError> {
    for name in ["n", "best_of"] {
        if fields.integer(name)?.is_some_and(|n| n != 1) {
            return Err(ApiError::field(name, "must be 1: a request gives one reply"));
        }
    }
    Ok(())
}

/// Whether log probabilities are told, and of how many alternatives. Chats have a switch and a number, completions the
/// number alone.
pub(super) fn logprobs(fields: Fields, kind: Kind) -> Result<Option<u32>, ApiError> {
    let within = |name: &str, count: i128| match u32::try_from(count) {
        Ok(count) if count <= MAX_TOP => Ok(count),
        _ => Err(ApiError::field(name, format_args!("must be between 0 and {MAX_TOP}"))),
    };
    if fields.get("logprobs") == Some(&Value::Bool(false)) || kind == Kind::Chat {
        let on = fields.boolean("logprobs")?.unwrap_or(false);
        let top = fields.integer("top_logprobs")?.map(|top| within("top_logprobs", top)).transpose()?;
        return match top {
            Some(top) if top > 0 && !on => Err(ApiError::field("top_logprobs", "needs logprobs: true")),
            top => Ok(on.then(|| top.unwrap_or(0))),
        };
    }
    fields.integer("logprobs")?.map(|top| within("logprobs", top)).transpose()
}

/// Tokens of reasoning after which it is ended.
pub(super) fn thinking_budget(app: &App, fields: Fields) -> Result<Option<ThinkingBudget>, ApiError> {
    let Some(tokens) = fields.integer("thinking_budget")? else { return Ok(None) };
    let Ok(tokens) = usize::try_from(tokens.min(i128::from(u32::MAX))) else {
        return Err(ApiError::field("thinking_budget", "must not be negative"));
    };
    match app.text.think_close {
        Some(close) => Ok(Some(ThinkingBudget { tokens, close })),
        None => Err(ApiError::field(
            "thinking_budget",
            "cannot be kept: this model has no token that ends reasoning",
        )),
    }
}

//! `/models`, `/health`, `/metrics` and `/tokenize`: what can be told without running the model.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::app::{App, HealthMode, Stall};
use super::body::{Incoming, object};
use super::completions::{off_thread, prepared};
use super::error::{ApiError, json_response, not_found};
use super::request;

/// A name of the model, as `/v1/models` lists it.
fn model(app: &App, name: &str) -> Value {
    let context = app.service.info().context;
    json!({"id": name, "object": "model", "owned_by": "tensorfold", "created": app.created(),
           "root": app.settings.served_name, "max_model_len": context, "context_length": context})
}

/// `GET /v1/models`: the one served model and its context size, then its other names.
pub fn models(app: &App) -> Response {
    let names = std::iter::once(&app.settings.served_name).chain(&app.settings.aliases);
    let models: Vec<Value> = names.map(|name| model(app, name)).collect();
    json_response(StatusCode::OK, &json!({"object": "list", "data": models}))
}

/// `GET /v1/models/NAME`: one name of the model.
pub fn one_model(app: &App, name: &str) -> Response {
    if name == app.settings.served_name || app.settings.aliases.iter().any(|alias| alias == name) {
        return json_response(StatusCode::OK, &model(app, name));
    }
    not_found()
}

/// `GET /health`: liveness, live totals, what stalls.
pub fn health(app: &App) -> Response {
    let stats = app.service.stats();
    let info = app.service.info();
    let (uptime_s, idle_s) = app.uptime();
    let (inflight, oldest_s) = app.inside();
    let stalls = app.stalls();
    let strict = app.settings.health == HealthMode::Strict;
    let ok = stats.fatal.is_none() && stalls.is_empty();
    let stalled: Vec<Value> = stalls
        .iter()
        .map(|Stall { prompt, quiet_s, allowed_s }| json!({"prompt": prompt, "quiet_s": quiet_s, "allowed_s": allowed_s}))
        .collect();
    let running = stats.decoding + stats.prefilling;
    let mut body = json!({
        "ok": ok,
        "mode": if strict { "strict" } else { "basic" },
        "uptime_s": uptime_s,
        "idle_s": (inflight == 0).then_some(idle_s),
        "inflight": inflight,
        "oldest_s": oldest_s,
        "requests": stats.requests,
        "errors": stats.errors,
        "stalled": stalled,
        "backend": "tensorfold",
        "busy": running > 0,
        "requests_running": running,
        "requests_waiting": stats.waiting,
        "requests_total": stats.requests,
        "prompt_tokens_total": stats.prompt_tokens,
        "completion_tokens_total": stats.completion_tokens,
        "cached_tokens_total": stats.cached_tokens,
        "prefill_seconds_total": stats.prefill_s,
        "decode_seconds_total": stats.decode_s,
        "rounds_total": stats.rounds,
        "drafted_total": stats.drafted,
        "accepted_total": stats.accepted,
        "streams": {"decoding": stats.decoding, "prefilling": stats.prefilling, "max": info.slots},
        "context_length": info.context,
        "ranks": info.ranks,
    });
    if let Some(fatal) = stats.fatal {
        body["fatal"] = json!(fatal);
    }
    let fit = ok || !strict;
    json_response(if fit { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, &body)
}

/// `GET /metrics`: Prometheus text.
pub fn metrics(app: &App) -> Response {
    match super::metrics::text(app) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => {
            ApiError::with_status(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
        }
    }
}

/// `POST /tokenize`: the ids a completion would have, without running it.
pub async fn tokenize(app: Arc<App>, incoming: Incoming) -> Response {
    let ids = async {
        let bytes = incoming.bytes(&app.settings.limits).await?;
        let shared = Arc::clone(&app);
        prepared(&app, move |fetched| {
            let mut body = object(&bytes, &shared.settings.limits)?;
            fetched.put(&mut body);
            request::tokenize(&shared, body)
        })
        .await
    };
    match ids.await {
        Ok(ids) => {
            let context = app.service.info().context;
            let body =
                json!({"count": ids.len(), "max_model_len": context, "tokens": ids, "token_strs": null});
            json_response(StatusCode::OK, &body)
        }
        Err(error) => {
            app.rejected.fetch_add(1, Ordering::Relaxed);
            error.into_response()
        }
    }
}

/// `POST /detokenize`: the text of token ids.
pub async fn detokenize(app: Arc<App>, incoming: Incoming) -> Response {
    let text = async {
        let bytes = incoming.bytes(&app.settings.limits).await?;
        let shared = Arc::clone(&app);
        off_thread(&app, move || {
            let ids = request::token_ids(&shared, &object(&bytes, &shared.settings.limits)?)?;
            Ok(shared.text.tokenizer.decode(&ids))
        })
        .await
    };
    match text.await {
        Ok(text) => json_response(StatusCode::OK, &json!({"prompt": text})),
        Err(error) => {
            app.rejected.fetch_add(1, Ordering::Relaxed);
            error.into_response()
        }
    }
}

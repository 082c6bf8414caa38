//! `/models`, `/health`, `/metrics` and `/tokenize`: what can be told without running the model.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use prometheus::{Counter, Encoder as _, Gauge, Opts, Registry, TextEncoder};
use serde_json::{Value, json};

use super::app::{App, HealthMode, Stall};
use super::body::{Incoming, object};
use super::completions::off_thread;
use super::error::{ApiError, json_response};
use super::request;

/// `GET /v1/models`: the one served model and its context size.
pub fn models(app: &App) -> Response {
    let name = &app.settings.served_name;
    let context = app.service.info().context;
    let model = json!({"id": name, "object": "model", "owned_by": "tensorfold", "created": app.created(), "root": name,
                       "max_model_len": context, "context_length": context});
    json_response(StatusCode::OK, &json!({"object": "list", "data": [model]}))
}

/// `GET /health`: liveness, live totals, what stalls.
pub fn health(app: &App) -> Response {
    let stats = app.service.stats();
    let info = app.service.info();
    let (uptime_s, idle_s) = app.uptime();
    let (inflight, oldest_s) = app.inside();
    let stalls = app.stalls();
    let strict = app.settings.health == HealthMode::Strict;
    let ok = !strict || (stats.fatal.is_none() && stalls.is_empty());
    let stalled: Vec<Value> = stalls
        .iter()
        .map(|Stall { prompt, quiet_s, allowed_s }| json!({"prompt": prompt, "quiet_s": quiet_s, "allowed_s": allowed_s}))
        .collect();
    let running = stats.decoding + stats.prefilling;
    let mut body = json!({
        "ok": ok,
        "mode": if strict { "strict" } else { "basic" },
        "uptime_s": uptime_s,
        "idle_s": if inflight > 0 { 0.0 } else { idle_s },
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
    json_response(if ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, &body)
}

/// `GET /metrics`: Prometheus text.
pub fn metrics(app: &App) -> Response {
    match metrics_text(app) {
        Ok(text) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response(),
        Err(error) => {
            ApiError::with_status(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response()
        }
    }
}

fn metrics_text(app: &App) -> prometheus::Result<Vec<u8>> {
    let stats = app.service.stats();
    let registry = Registry::new();
    let options =
        |name: &str, help: &str| Opts::new(name, help).const_label("model", &app.settings.served_name);
    let counters = [
        ("tensorfold_requests_total", "Requests ended", stats.requests as f64),
        ("tensorfold_request_errors_total", "Requests ended with an error", stats.errors as f64),
        (
            "tensorfold_requests_rejected_total",
            "Requests refused",
            app.rejected.load(Ordering::Relaxed) as f64,
        ),
        ("tensorfold_prompt_tokens_total", "Prompt tokens of ended requests", stats.prompt_tokens as f64),
        (
            "tensorfold_cached_tokens_total",
            "Prompt tokens that were not computed again",
            stats.cached_tokens as f64,
        ),
        ("tensorfold_completion_tokens_total", "Tokens generated", stats.completion_tokens as f64),
        ("tensorfold_decode_rounds_total", "Decode rounds", stats.rounds as f64),
        ("tensorfold_decode_seconds_total", "Seconds of decoding", stats.decode_s),
        ("tensorfold_prefill_seconds_total", "Seconds of prefill", stats.prefill_s),
    ];
    for (name, help, value) in counters {
        let counter = Counter::with_opts(options(name, help))?;
        counter.inc_by(value);
        registry.register(Box::new(counter))?;
    }
    let gauges = [
        ("tensorfold_requests_inflight", "Requests inside the server", app.inside().0 as f64),
        ("tensorfold_requests_running", "Requests in a slot", (stats.decoding + stats.prefilling) as f64),
        ("tensorfold_requests_waiting", "Requests waiting for a slot", stats.waiting as f64),
        ("tensorfold_requests_stalled", "Requests quiet for too long", app.stalls().len() as f64),
        (
            "tensorfold_engine_fatal",
            "1 once the engine cannot go on",
            f64::from(u8::from(stats.fatal.is_some())),
        ),
        ("tensorfold_uptime_seconds", "Seconds since the start", app.uptime().0),
    ];
    for (name, help, value) in gauges {
        let gauge = Gauge::with_opts(options(name, help))?;
        gauge.set(value);
        registry.register(Box::new(gauge))?;
    }
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text)?;
    Ok(text)
}

/// `POST /tokenize`: the ids a completion would have, without running it.
pub async fn tokenize(app: Arc<App>, incoming: Incoming) -> Response {
    let ids = async {
        let bytes = incoming.bytes(&app.settings.limits).await?;
        let shared = Arc::clone(&app);
        off_thread(&app, move || request::tokenize(&shared, &object(&bytes)?)).await
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

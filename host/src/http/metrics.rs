//! `/metrics`: the contract's families, and those of vLLM beside them so that existing dashboards work.
//!
//! A family is published only where there is something to tell: what this server does not do has no family at zero.

use std::sync::atomic::Ordering;

use plugfold_engine::service::{Finish, RequestStats};
use prometheus::core::Collector;
use prometheus::{
    Counter, CounterVec, Encoder as _, Gauge, Histogram, HistogramOpts, Opts, Registry, TextEncoder,
};

use super::app::App;
use super::pump::Ending;

/// Bounds of seconds from a token to minutes.
const SECONDS: [f64; 13] = [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
/// Bounds of the time between two tokens.
const STEPS: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0];
/// Bounds of token counts.
const TOKENS: [f64; 14] = [
    1.0,
    4.0,
    16.0,
    64.0,
    256.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    32768.0,
    65536.0,
    262_144.0,
    1_048_576.0,
];

/// What is measured of requests as they end.
pub struct Metrics {
    registry: Registry,
    latency: Vec<Histogram>,
    first: Vec<Histogram>,
    step: Option<Histogram>,
    queued: Option<Histogram>,
    prefill: Option<Histogram>,
    decode: Option<Histogram>,
    prompt: Option<Histogram>,
    generated: Option<Histogram>,
    ends: Option<CounterVec>,
}

impl Metrics {
    /// Nothing measured yet.
    pub fn new(model: &str) -> Self {
        let registry = Registry::new();
        let histogram = |name: &str, help: &str, bounds: &[f64]| {
            let label = if name.starts_with("vllm:") { "model_name" } else { "model" };
            let options = HistogramOpts::new(name, help).const_label(label, model).buckets(bounds.to_vec());
            // A name that was used before, which the tests below would show.
            let made = Histogram::with_opts(options).ok()?;
            registry.register(Box::new(made.clone())).ok()?;
            Some(made)
        };
        let two = |ours: &str, theirs: &str, help: &str| {
            [histogram(ours, help, &SECONDS), histogram(theirs, help, &SECONDS)]
                .into_iter()
                .flatten()
                .collect()
        };
        let latency = two(
            "tensorfold_request_latency_seconds",
            "vllm:e2e_request_latency_seconds",
            "Seconds from arrival to the end",
        );
        let first = two(
            "tensorfold_time_to_first_token_seconds",
            "vllm:time_to_first_token_seconds",
            "Seconds from arrival to the first token",
        );
        let step = histogram("vllm:time_per_output_token_seconds", "Seconds a token after the first", &STEPS);
        let queued = histogram("vllm:request_queue_time_seconds", "Seconds of waiting for a slot", &SECONDS);
        let prefill = histogram("vllm:request_prefill_time_seconds", "Seconds of prefill", &SECONDS);
        let decode = histogram("vllm:request_decode_time_seconds", "Seconds of decoding", &SECONDS);
        let prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", &TOKENS);
        let generated = histogram("vllm:request_generation_tokens", "Tokens of a reply", &TOKENS);
        let options = Opts::new("vllm:request_success_total", "Requests by how they ended");
        let ends = CounterVec::new(options.const_label("model_name", model), &["finished_reason"]).ok();
        let ends = ends.filter(|ends| registry.register(Box::new(ends.clone())).is_ok());
        Self { registry, latency, first, step, queued, prefill, decode, prompt, generated, ends }
    }

    /// A request has ended; gives how, in one word. `arrived_s`: seconds since it came.
    pub fn ended(&self, prompt: usize, ending: &Ending, arrived_s: f64) -> &'static str {
        let RequestStats { queued_s, prefill_s, decode_s, .. } = ending.stats;
        let reason = match ending.finish {
            _ if ending.stop.is_some() => "stop",
            Finish::Stop => "stop",
            Finish::Length => "length",
            Finish::Cancelled => "abort",
        };
        if let Some(ends) = &self.ends {
            ends.with_label_values(&[reason]).inc();
        }
        let tokens = ending.ids.len();
        for histogram in &self.latency {
            histogram.observe(arrived_s);
        }
        let observe = |histogram: &Option<Histogram>, value: f64| {
            if let Some(histogram) = histogram {
                histogram.observe(value);
            }
        };
        observe(&self.queued, queued_s);
        observe(&self.prompt, prompt as f64);
        observe(&self.generated, tokens as f64);
        if tokens > 0 {
            for histogram in &self.first {
                histogram.observe(queued_s + prefill_s);
            }
            observe(&self.prefill, prefill_s);
            observe(&self.decode, decode_s);
        }
        if tokens > 1 {
            observe(&self.step, decode_s / (tokens - 1) as f64);
        }
        reason
    }

    /// The client left before the reply was complete.
    pub fn left(&self) {
        if let Some(ends) = &self.ends {
            ends.with_label_values(&["abort"]).inc();
        }
    }
}

fn register(registry: &Registry, collector: impl Collector + 'static) -> prometheus::Result<()> {
    registry.register(Box::new(collector))
}

/// All families as Prometheus text.
///
/// # Errors
/// When a family cannot be made, which would be a mistake in this file.
pub fn text(app: &App) -> prometheus::Result<Vec<u8>> {
    let stats = app.service.stats();
    let name = &app.settings.served_name;
    let registry = Registry::new();
    let label = |name: &str| if name.starts_with("vllm:") { "model_name" } else { "model" };
    let options = |family: &str, help: &str| Opts::new(family, help).const_label(label(family), name);
    let mut counters = vec![
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
        ("tensorfold_generation_tokens_total", "Tokens generated", stats.completion_tokens as f64),
        ("tensorfold_decode_rounds_total", "Decode rounds", stats.rounds as f64),
        ("tensorfold_decode_seconds_total", "Seconds of decoding", stats.decode_s),
        ("tensorfold_prefill_seconds_total", "Seconds of prefill", stats.prefill_s),
        ("vllm:prompt_tokens_total", "Prompt tokens of ended requests", stats.prompt_tokens as f64),
        ("vllm:generation_tokens_total", "Tokens generated", stats.completion_tokens as f64),
    ];
    if stats.drafted > 0 {
        let (drafted, accepted) = (stats.drafted as f64, stats.accepted as f64);
        counters.extend([
            ("tensorfold_drafted_total", "Draft tokens verified", drafted),
            ("tensorfold_accepted_total", "Draft tokens accepted", accepted),
            ("vllm:spec_decode_num_draft_tokens_total", "Draft tokens verified", drafted),
            ("vllm:spec_decode_num_accepted_tokens_total", "Draft tokens accepted", accepted),
        ]);
    }
    if stats.cached_tokens > 0 {
        counters.extend([
            (
                "vllm:prefix_cache_queries_total",
                "Prompt tokens looked up in the caches",
                stats.prompt_tokens as f64,
            ),
            ("vllm:prefix_cache_hits_total", "Prompt tokens found there", stats.cached_tokens as f64),
        ]);
    }
    for (family, help, value) in counters {
        let counter = Counter::with_opts(options(family, help))?;
        counter.inc_by(value);
        register(&registry, counter)?;
    }
    let running = (stats.decoding + stats.prefilling) as f64;
    let waiting = stats.waiting as f64;
    for (family, help, value) in [
        ("tensorfold_requests_inflight", "Requests inside the server", app.inside().0 as f64),
        ("tensorfold_requests_running", "Requests in a slot", running),
        ("tensorfold_requests_waiting", "Requests waiting for a slot", waiting),
        ("tensorfold_requests_stalled", "Requests quiet for too long", app.stalls().len() as f64),
        (
            "tensorfold_engine_fatal",
            "1 once the engine cannot go on",
            f64::from(u8::from(stats.fatal.is_some())),
        ),
        ("tensorfold_uptime_seconds", "Seconds since the start", app.uptime().0),
        ("vllm:num_requests_running", "Requests in a slot", running),
        ("vllm:num_requests_waiting", "Requests waiting for a slot", waiting),
    ] {
        let gauge = Gauge::with_opts(options(family, help))?;
        gauge.set(value);
        register(&registry, gauge)?;
    }
    let mut families = registry.gather();
    families.extend(app.metrics.registry.gather());
    families.extend(app.figures.families()?);
    let mut text = Vec::new();
    TextEncoder::new().encode(&families, &mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_is_made_and_counts() {
        let metrics = Metrics::new("m");
        let ending = Ending {
            finish: Finish::Length,
            stop: None,
            ids: vec![1; 11],
            reasoning_tokens: 0,
            stats: RequestStats { prefill_s: 0.02, decode_s: 0.2, ..RequestStats::default() },
            reason: None,
            fields: serde_json::Map::new(),
        };
        metrics.ended(7, &ending, 0.3);
        metrics.left();
        let mut text = Vec::new();
        TextEncoder::new().encode(&metrics.registry.gather(), &mut text).unwrap();
        let text = String::from_utf8(text).unwrap();
        for line in [
            "vllm:request_success_total{finished_reason=\"length\",model_name=\"m\"} 1",
            "vllm:request_success_total{finished_reason=\"abort\",model_name=\"m\"} 1",
            "tensorfold_request_latency_seconds_bucket{model=\"m\",le=\"0.25\"} 0",
            "tensorfold_request_latency_seconds_bucket{model=\"m\",le=\"0.5\"} 1",
            "tensorfold_time_to_first_token_seconds_count{model=\"m\"} 1",
            "vllm:time_per_output_token_seconds_bucket{model_name=\"m\",le=\"0.025\"} 1",
            "vllm:request_generation_tokens_sum{model_name=\"m\"} 11",
            "vllm:request_prompt_tokens_sum{model_name=\"m\"} 7",
            "vllm:e2e_request_latency_seconds_count{model_name=\"m\"} 1",
        ] {
            assert!(text.contains(line), "{line} in {text}");
        }
    }
}

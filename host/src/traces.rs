//! Traces of requests: a span for each, with its wait for a slot, its prefill and its decoding as spans inside.
//!
//! A request's span is one of `tracing`, at [`TARGET`]. Built with the feature `otel`, spans go to an OpenTelemetry collector
//! (setting `otlp_endpoint`), and a W3C `traceparent` header makes a request part of its client's trace. Without the
//! feature, or without a collector, a span costs a look at a flag.

use std::time::SystemTime;

use axum::http::HeaderMap;
use plugfold_engine::service::RequestStats;
use tracing::Span;
use tracing::field::Empty;

/// Target of the spans.
pub const TARGET: &str = "plugfold::trace";

/// The span of a request that has just come.
pub fn request(path: &str, headers: &HeaderMap) -> Span {
    let span = tracing::info_span!(
        target: TARGET,
        "request",
        otel.kind = "server",
        otel.status_code = Empty,
        otel.status_description = Empty,
        url.path = path,
        prompt_tokens = Empty,
        completion_tokens = Empty,
        cached_tokens = Empty,
        finish = Empty,
    );
    #[cfg(feature = "otel")]
    otel::follow(&span, headers);
    #[cfg(not(feature = "otel"))]
    let _ = headers;
    span
}

/// A reply is complete: what it took, and the phases that it went through since it was submitted.
pub fn ended(
    span: &Span,
    submitted: SystemTime,
    prompt: usize,
    completion: usize,
    how: &str,
    stats: &RequestStats,
) {
    span.record("prompt_tokens", prompt);
    span.record("completion_tokens", completion);
    span.record("cached_tokens", stats.cached_tokens);
    span.record("finish", how);
    #[cfg(feature = "otel")]
    otel::phases(span, submitted, stats);
    #[cfg(not(feature = "otel"))]
    let _ = submitted;
}

/// A request failed or was refused.
pub fn failed(span: &Span, why: &dyn std::fmt::Display) {
    span.record("otel.status_code", "ERROR");
    span.record("otel.status_description", tracing::field::display(why));
}

#[cfg(feature = "otel")]
pub use otel::{Sending, sending};

#[cfg(feature = "otel")]
mod otel {
    use std::collections::HashMap;
    use std::time::{Duration, SystemTime};

    use axum::http::HeaderMap;
    use opentelemetry::global::BoxedTracer;
    use opentelemetry::propagation::TextMapPropagator as _;
    use opentelemetry::trace::{
        Span as _, SpanBuilder, TraceContextExt as _, Tracer as _, TracerProvider as _,
    };
    use opentelemetry::{Context, global};
    use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig as _};
    use opentelemetry_sdk::Resource;
    use opentelemetry_sdk::propagation::TraceContextPropagator;
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use plugfold_engine::service::RequestStats;
    use tracing::{Span, Subscriber};
    use tracing_opentelemetry::OpenTelemetrySpanExt as _;
    use tracing_subscriber::Layer;
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::registry::LookupSpan;

    use super::TARGET;

    /// How long the last spans may take to be sent.
    const GOODBYE: Duration = Duration::from_secs(3);
    /// The headers of the W3C's trace context.
    const HEADERS: [&str; 2] = ["traceparent", "tracestate"];

    /// Spans are being sent; the last go out when this is dropped.
    pub struct Sending(SdkTracerProvider);

    impl Drop for Sending {
        fn drop(&mut self) {
            if let Err(error) = self.0.shutdown_with_timeout(GOODBYE) {
                tracing::warn!(%error, "the last traces were not sent");
            }
        }
    }

    /// A layer that sends spans to a collector, OTLP with JSON over HTTP. `endpoint` is its base address.
    ///
    /// # Errors
    /// An address that is none.
    pub fn sending<S>(
        endpoint: &str,
        service: &str,
    ) -> Result<(impl Layer<S> + Send + Sync + use<S>, Sending), String>
    where
        S: Subscriber + for<'s> LookupSpan<'s> + Send + Sync,
    {
        let wrong = |why: &dyn std::fmt::Display| {
            format!(
                "otlp_endpoint {endpoint:?}: {why}; give the http address of a collector, as http://127.0.0.1:4318"
            )
        };
        if !endpoint.starts_with("http://") {
            return Err(wrong(&"no address that begins with http://"));
        }
        let address = format!("{}/v1/traces", endpoint.trim_end_matches('/'));
        let exporter =
            SpanExporter::builder().with_http().with_protocol(Protocol::HttpJson).with_endpoint(address);
        let exporter = exporter.build().map_err(|error| wrong(&error))?;
        let resource = Resource::builder().with_service_name(service.to_owned()).build();
        let provider =
            SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource).build();
        global::set_tracer_provider(provider.clone());
        let layer = tracing_opentelemetry::layer()
            .with_tracer(provider.tracer("plugfold"))
            .with_location(false)
            .with_threads(false)
            .with_tracked_inactivity(false)
            .with_filter(Targets::new().with_target(TARGET, LevelFilter::INFO));
        Ok((layer, Sending(provider)))
    }

    /// Makes a span part of the trace that a request's headers name.
    pub(super) fn follow(span: &Span, headers: &HeaderMap) {
        if span.is_disabled() {
            return;
        }
        let read = |name: &&str| Some(((*name).to_owned(), headers.get(*name)?.to_str().ok()?.to_owned()));
        let told: HashMap<String, String> = HEADERS.iter().filter_map(read).collect();
        let context = TraceContextPropagator::new().extract_with_context(&Context::new(), &told);
        if context.span().span_context().is_valid() {
            // A span that no layer sends has nothing to follow.
            let _ = span.set_parent(context);
        }
    }

    /// Spans of the phases, inside of a request's.
    pub(super) fn phases(span: &Span, submitted: SystemTime, stats: &RequestStats) {
        if span.is_disabled() {
            return;
        }
        let context = span.context();
        let tracer: BoxedTracer = global::tracer("plugfold");
        let mut begin = submitted;
        for (name, seconds) in
            [("queue", stats.queued_s), ("prefill", stats.prefill_s), ("decode", stats.decode_s)]
        {
            let end = begin + Duration::from_secs_f64(seconds.max(0.0));
            let phase = SpanBuilder::from_name(name).with_start_time(begin);
            tracer.build_with_context(phase, &context).end_with_timestamp(end);
            begin = end;
        }
    }
}

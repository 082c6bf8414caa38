//! What all requests share: the engine, the text model, settings and running totals.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use plugfold_engine::hooks::{HookError, Hooks};
use plugfold_engine::service::Service;
use serde::{Deserialize, Serialize};

use super::error::ApiError;
use super::keys::Keys;
use super::limits::{Limits, seconds};
use super::metrics::Metrics;
use crate::chains::Chains;
use crate::knobs::KnobTable;
use crate::plugins::services::Figures;
use crate::text::TextModel;
use crate::vision::Vision;
use crate::vision::fetch::{Bounds, Fetcher, Rules};

/// Names of the reply fields that carry reasoning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum ReasoningFields {
    /// `reasoning` and `reasoning_content`, the same text in each.
    #[default]
    Both,
    /// `reasoning` alone.
    Reasoning,
    /// `reasoning_content` alone.
    ReasoningContent,
}

impl ReasoningFields {
    /// The fields, in the order they are written.
    pub fn names(self) -> &'static [&'static str] {
        match self {
            Self::Both => &["reasoning", "reasoning_content"],
            Self::Reasoning => &["reasoning"],
            Self::ReasoningContent => &["reasoning_content"],
        }
    }
}

/// The effort that thinking requests get which name none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum DefaultEffort {
    /// Little reasoning.
    Low,
    /// Much.
    High,
    /// As much as the model likes.
    Max,
}

impl DefaultEffort {
    /// The value the template gets.
    pub fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::High => "high",
            Self::Max => "max",
        }
    }
}

/// What happens to the reasoning of earlier turns when a request does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ClearThinking {
    /// The template decides.
    #[default]
    #[serde(alias = "1")]
    Template,
    /// Left out of the prompt.
    Drop,
    /// Kept in the prompt.
    #[serde(alias = "0")]
    Keep,
}

/// When `/health` turns 503.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum HealthMode {
    /// Never.
    #[default]
    Basic,
    /// When the engine has failed or a request stalls; new requests are refused after a failure.
    Strict,
}

/// Settings of the HTTP layer.
#[derive(Clone, Debug, PartialEq)]
pub struct HttpSettings {
    /// The model's name in replies.
    pub served_name: String,
    /// Further names under which the model is listed.
    pub aliases: Vec<String>,
    /// Who may use the server.
    pub keys: Keys,
    /// What requests may set.
    pub knobs: Arc<KnobTable>,
    /// What `/plugins` lists; see [`super::loaded::describe`].
    pub plugins: Arc<Vec<serde_json::Value>>,
    /// Most tokens of a reply when the request names no budget.
    pub max_tokens: usize,
    /// Where reasoning is sent.
    pub reasoning_fields: ReasoningFields,
    /// Whether top-level `reasoning_effort` is read.
    pub effort_field: bool,
    /// Effort of thinking requests that name none; without it the template's own.
    pub default_effort: Option<DefaultEffort>,
    /// Reasoning of earlier turns.
    pub clear_thinking: ClearThinking,
    /// When `/health` turns 503.
    pub health: HealthMode,
    /// Seconds without a token after which a request counts as stalled; 0: never.
    pub stall_s: f64,
    /// Prompt tokens a second that a stalled-request check allows for before the first token.
    pub stall_prefill_tps: f64,
    /// Whether a client that leaves ends its request; otherwise only a stream that cannot be written does.
    pub disconnect: bool,
    /// Where images may be fetched from, and within which bounds.
    pub images: ImageSettings,
    /// Bounds on what clients can make the server hold.
    pub limits: Limits,
}

/// Settings of images that lie elsewhere.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ImageSettings {
    /// What may be fetched.
    pub rules: Rules,
    /// Seconds of one download.
    pub timeout_s: f64,
    /// Seconds of all downloads of a request.
    pub total_s: f64,
    /// Requests that fetch and prepare images at once.
    pub slots: usize,
    /// Requests that may wait for that.
    pub waiters: usize,
    /// Seconds they may.
    pub wait_s: f64,
}

impl Default for ImageSettings {
    fn default() -> Self {
        let rules = Rules { fetch: true, http: false, private: false };
        Self { rules, timeout_s: 10.0, total_s: 30.0, slots: 16, waiters: 128, wait_s: 60.0 }
    }
}

impl ImageSettings {
    fn bounds(&self, limits: &Limits) -> Bounds {
        Bounds {
            image: limits.image_bytes,
            request: limits.body_bytes,
            one: seconds(self.timeout_s),
            all: seconds(self.total_s),
            slots: self.slots,
            waiters: self.waiters,
            wait: seconds(self.wait_s),
        }
    }
}

impl HttpSettings {
    /// Defaults for a model served under a name.
    pub fn new(served_name: impl Into<String>) -> Self {
        Self {
            served_name: served_name.into(),
            aliases: Vec::new(),
            keys: Keys::default(),
            knobs: Arc::default(),
            plugins: Arc::default(),
            max_tokens: 4096,
            reasoning_fields: ReasoningFields::default(),
            effort_field: true,
            default_effort: None,
            clear_thinking: ClearThinking::default(),
            health: HealthMode::default(),
            stall_s: 0.0,
            stall_prefill_tps: 200.0,
            disconnect: true,
            images: ImageSettings::default(),
            limits: Limits::default(),
        }
    }
}

/// What all requests share.
pub struct App {
    /// Takes requests.
    pub service: Arc<dyn Service>,
    /// Tokenizer and template.
    pub text: Arc<TextModel>,
    /// The model's eyes, where it has any.
    pub vision: Option<Vision>,
    /// Settings.
    pub settings: HttpSettings,
    /// Start time.
    pub started: SystemTime,
    /// Permits to prepare text.
    pub(super) text_workers: Arc<tokio::sync::Semaphore>,
    fetcher: OnceLock<Result<Fetcher, String>>,
    clock: Instant,
    running: Mutex<HashMap<u64, Arc<Running>>>,
    next: AtomicU64,
    active_ms: AtomicU64,
    /// Requests that were refused.
    pub rejected: AtomicU64,
    /// What was measured of ended requests.
    pub metrics: Metrics,
    /// What plugins count.
    pub figures: Arc<Figures>,
    /// Links of plugins around requests.
    pub chains: Chains,
    /// Ids that end a reply: the text model's, and those of plugins.
    pub stop_ids: Vec<u32>,
    /// Hooks of plugins, for observers of threads.
    pub(super) hooks: Hooks,
}

/// One request inside the server.
pub struct Running {
    since: Instant,
    prompt: usize,
    /// Milliseconds of the app's clock at the last token; the start while there is none.
    heard_ms: AtomicU64,
    /// Tokens so far.
    tokens: AtomicUsize,
}

impl Running {
    /// Whether it has been quiet for too long at a time of the app's clock. Before its first token it may be quiet for its
    /// prefill as well.
    fn stall(&self, now_ms: u64, stall_s: f64, prefill_tps: f64) -> Option<Stall> {
        let quiet_s = now_ms.saturating_sub(self.heard_ms.load(Ordering::Relaxed)) as f64 / 1e3;
        let first = self.tokens.load(Ordering::Relaxed) == 0;
        let prefill = if first { self.prompt as f64 / prefill_tps.max(1e-3) } else { 0.0 };
        let allowed_s = stall_s + prefill;
        (quiet_s > allowed_s).then_some(Stall { prompt: self.prompt, quiet_s, allowed_s })
    }
}

/// A request that has not given a token for longer than it may.
#[derive(Debug, PartialEq)]
pub struct Stall {
    /// Prompt tokens.
    pub prompt: usize,
    /// Seconds since its last token.
    pub quiet_s: f64,
    /// Seconds it may be quiet.
    pub allowed_s: f64,
}

impl App {
    /// Puts the parts together.
    pub fn new(service: Arc<dyn Service>, text: Arc<TextModel>, settings: HttpSettings) -> Self {
        let workers = settings.limits.text_workers.max(1);
        let metrics = Metrics::new(&settings.served_name);
        let stop_ids = text.stop_ids.clone();
        Self {
            service,
            text,
            vision: None,
            settings,
            started: SystemTime::now(),
            text_workers: Arc::new(tokio::sync::Semaphore::new(workers)),
            fetcher: OnceLock::new(),
            clock: Instant::now(),
            running: Mutex::default(),
            next: AtomicU64::new(0),
            active_ms: AtomicU64::new(0),
            rejected: AtomicU64::new(0),
            metrics,
            figures: Arc::default(),
            chains: Chains::default(),
            stop_ids,
            hooks: Hooks::default(),
        }
    }

    /// Lets requests pass the chains of plugins.
    ///
    /// # Errors
    /// A plugin that cannot work with this tokenizer.
    pub fn with_hooks(mut self, hooks: &Hooks) -> Result<Self, HookError> {
        self.chains = Chains::new(hooks);
        self.hooks = hooks.clone();
        self.chains.ask_fields()?;
        self.stop_ids.extend(self.chains.start(&self.text.tokenizer)?);
        self.stop_ids.sort_unstable();
        self.stop_ids.dedup();
        self.chains.ends(&self.stop_ids)?;
        Ok(self)
    }

    /// Shows what plugins count.
    #[must_use]
    pub fn with_figures(mut self, figures: Arc<Figures>) -> Self {
        self.figures = figures;
        self
    }

    /// Lets the model see.
    #[must_use]
    pub fn with_vision(mut self, vision: Option<Vision>) -> Self {
        self.vision = vision;
        self
    }

    /// Who fetches images, made when the first is asked for.
    ///
    /// # Errors
    /// A TLS library that does not start.
    pub(super) fn fetcher(&self) -> Result<&Fetcher, ApiError> {
        let images = &self.settings.images;
        let made = self.fetcher.get_or_init(|| {
            Fetcher::new(images.rules, images.bounds(&self.settings.limits))
                .map_err(|error| error.to_string())
        });
        made.as_ref().map_err(|error| {
            let told = format!("images cannot be fetched: {error}; send them as data: URLs");
            ApiError::with_status(StatusCode::INTERNAL_SERVER_ERROR, told)
        })
    }

    /// Start time in unix seconds.
    pub fn created(&self) -> u64 {
        self.started.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
    }

    fn now_ms(&self) -> u64 {
        self.clock.elapsed().as_millis() as u64
    }

    /// Seconds since the start, and since the last activity.
    pub fn uptime(&self) -> (f64, f64) {
        let now = self.clock.elapsed().as_secs_f64();
        (now, now - self.active_ms.load(Ordering::Relaxed) as f64 / 1e3)
    }

    /// Counts a request in until the guard is dropped.
    pub fn enter(self: &Arc<Self>, prompt: usize) -> Guard {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let now = self.now_ms();
        self.active_ms.store(now, Ordering::Relaxed);
        let running = Arc::new(Running {
            since: Instant::now(),
            prompt,
            heard_ms: AtomicU64::new(now),
            tokens: AtomicUsize::new(0),
        });
        self.running.lock().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::clone(&running));
        Guard { app: Arc::clone(self), number, running }
    }

    /// Requests inside the server and the age of the oldest.
    pub fn inside(&self) -> (usize, f64) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = running.values().map(|r| r.since.elapsed()).max().unwrap_or(Duration::ZERO);
        (running.len(), oldest.as_secs_f64())
    }

    /// Requests that have been quiet for too long.
    pub fn stalls(&self) -> Vec<Stall> {
        let stall = self.settings.stall_s;
        if seconds(stall).is_zero() {
            return Vec::new();
        }
        let now = self.now_ms();
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        running.values().filter_map(|one| one.stall(now, stall, self.settings.stall_prefill_tps)).collect()
    }

    /// Refuses new completions once the engine has failed, in strict health mode.
    ///
    /// # Errors
    /// 503 with the engine's reason.
    pub fn refuse_when_failed(&self) -> Result<(), ApiError> {
        match self.service.stats().fatal {
            Some(reason) if self.settings.health == HealthMode::Strict => {
                Err(ApiError::unavailable(format!("the engine has failed and takes no requests: {reason}")))
            }
            _ => Ok(()),
        }
    }
}

/// Keeps a request counted among those inside.
pub struct Guard {
    app: Arc<App>,
    number: u64,
    running: Arc<Running>,
}

impl Guard {
    /// Notes that tokens arrived.
    pub fn heard(&self, tokens: usize) {
        let now = self.app.now_ms();
        self.running.tokens.fetch_add(tokens, Ordering::Relaxed);
        self.running.heard_ms.store(now, Ordering::Relaxed);
        self.app.active_ms.store(now, Ordering::Relaxed);
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.app.active_ms.store(self.app.now_ms(), Ordering::Relaxed);
        self.app.running.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_may_be_quiet_for_its_prefill_and_afterwards_for_the_limit_alone() {
        let one = Running {
            since: Instant::now(),
            prompt: 1000,
            heard_ms: AtomicU64::new(2_000),
            tokens: AtomicUsize::new(0),
        };
        // 10 s, and 1,000 tokens at 200 a second.
        let at = |ms: u64| one.stall(ms, 10.0, 200.0);
        assert_eq!(at(17_000), None);
        assert_eq!(at(17_001), Some(Stall { prompt: 1000, quiet_s: 15.001, allowed_s: 15.0 }));
        one.tokens.store(1, Ordering::Relaxed);
        one.heard_ms.store(20_000, Ordering::Relaxed);
        assert_eq!(at(30_000), None);
        assert_eq!(at(30_001), Some(Stall { prompt: 1000, quiet_s: 10.001, allowed_s: 10.0 }));
        // A clock that was read before the token came.
        assert_eq!(at(19_000), None);
    }
}

//! The chains around a request: links of plugins that see, refuse and change it on its way through the server.
//!
//! Links run in the order of the list. An error or a panic in one ends the request that it ran for, with the plugin's name,
//! and nothing else. All dialects pass the same chains, in the words of a chat completion. Without links nothing here runs.

mod document;
mod prompt;
mod reply;
mod stream;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::StatusCode;
use plugfold_abi::points::{
    Attachment, PromptLinkObject, Refusal, ReplyLinkObject, RequestLink, RequestLinkObject, StreamLinkObject,
};
use plugfold_abi::{KnobValue, Maybe, OpError, Slice};
use plugfold_engine::hooks::{HookError, Hooked, Hooks};
use plugfold_engine::service::EngineError;
use serde_json::{Map, Value};

pub use document::{Bounds, Draft, Frozen};
pub use prompt::PromptStages;
pub use reply::{End, Outcome, ReplyLinks};
pub use stream::StreamLinks;

use crate::http::error::ApiError;
use crate::http::limits::Limits;

/// All links of a server.
#[derive(Default)]
pub struct Chains {
    requests: Vec<Hooked<RequestLinkObject>>,
    /// Fields of bodies that request links obey.
    obeyed: Vec<String>,
    prompts: Vec<Hooked<PromptLinkObject>>,
    streams: Arc<[Hooked<StreamLinkObject>]>,
    replies: Arc<[Hooked<ReplyLinkObject>]>,
    /// Numbers of requests for stream links.
    next: AtomicU64,
}

impl Chains {
    /// The links among the hooks of all plugins.
    pub fn new(hooks: &Hooks) -> Self {
        Self {
            requests: hooks.requests.clone(),
            obeyed: Vec::new(),
            prompts: hooks.prompts.clone(),
            streams: hooks.streams.as_slice().into(),
            replies: hooks.replies.as_slice().into(),
            next: AtomicU64::new(1),
        }
    }

    /// Asks request links which fields they obey.
    ///
    /// # Errors
    /// A link that cannot say.
    pub fn ask_fields(&mut self) -> Result<(), HookError> {
        for h in &self.requests {
            let fields = h.call(RequestLink::fields)?;
            self.obeyed.extend(fields.iter().map(ToString::to_string));
        }
        Ok(())
    }

    /// Whether a request link obeys this field of a body.
    pub fn obeys(&self, field: &str) -> bool {
        self.obeyed.iter().any(|known| known == field)
    }

    /// `request.rewrite`: the body with what links make of it.
    ///
    /// # Errors
    /// What the client is told.
    pub fn rewrite(&self, body: Map<String, Value>, limits: &Limits) -> Result<Map<String, Value>, ApiError> {
        if self.requests.is_empty() {
            return Ok(body);
        }
        let draft = Draft::new(body, Bounds { bytes: limits.body_bytes, depth: limits.json_depth });
        draft.lend(|body| self.requests.iter().try_for_each(|h| h.call(|l| l.rewrite(body))))?;
        Ok(draft.into_body())
    }

    /// `request.check`.
    ///
    /// # Errors
    /// The first refusal.
    pub fn check(&self, body: &Map<String, Value>, knobs: &[KnobValue]) -> Result<(), ApiError> {
        Frozen(body).lend(|body| {
            self.requests.iter().try_for_each(|h| refused(h, h.call(|l| l.check(body, Slice::from(knobs)))?))
        })
    }

    /// `request.gate`.
    ///
    /// # Errors
    /// The first refusal.
    pub fn gate(&self) -> Result<(), ApiError> {
        self.requests.iter().try_for_each(|h| refused(h, h.call(RequestLink::gate)?))
    }

    /// `request.prepare`: what travels with the request to all ranks.
    ///
    /// # Errors
    /// A link that fails, a name twice, more bytes than the limit.
    pub fn prepare(
        &self,
        body: &Map<String, Value>,
        ids: &[u32],
        limits: &Limits,
    ) -> Result<Vec<Attachment>, ApiError> {
        let mut all: Vec<Attachment> = Vec::new();
        let mut bytes = 0usize;
        for h in &self.requests {
            let given = Frozen(body).lend(|body| h.call(|l| l.prepare(body, Slice::from(ids))))?;
            for attachment in given {
                let name = &attachment.name;
                if name.is_empty() || all.iter().any(|known| known.name == *name) {
                    return Err(fault(h, format!("attaches {name:?}, a name that is empty or taken")).into());
                }
                bytes = bytes.saturating_add(attachment.bytes.len() + name.len());
                let limit = limits.attachment_bytes;
                if bytes > limit {
                    let what = format!("with {name:?} {bytes} bytes are attached; the limit is {limit}");
                    return Err(fault(h, what).into());
                }
                all.push(attachment);
            }
        }
        Ok(all)
    }

    /// The stream links of one request; `None` when there are none.
    ///
    /// # Errors
    /// A link that fails to begin.
    pub fn stream(
        &self,
        body: &Map<String, Value>,
        limits: &Limits,
    ) -> Result<Option<StreamLinks>, HookError> {
        if self.streams.is_empty() {
            return Ok(None);
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        Ok(Some(StreamLinks::begin(self.streams.clone(), number, body, limits.stream_bytes)?))
    }

    /// The reply links; `None` when there are none.
    pub fn replies(&self) -> Option<Arc<[Hooked<ReplyLinkObject>]>> {
        (!self.replies.is_empty()).then(|| self.replies.clone())
    }
}

/// Something wrong that a link gave.
fn fault<T>(hooked: &Hooked<T>, what: impl Into<String>) -> HookError {
    hooked.named(&OpError::new(what))
}

/// A refusal as the client gets it.
fn refused<T>(hooked: &Hooked<T>, said: Maybe<Refusal>) -> Result<(), ApiError> {
    let Maybe::RSome(refusal) = said else { return Ok(()) };
    let status = StatusCode::from_u16(refusal.status).ok();
    let Some(status) = status.filter(|s| s.is_client_error() || s.is_server_error()) else {
        let what = format!("refuses a request with status {}; give one from 400 to 599", refusal.status);
        return Err(fault(hooked, what).into());
    };
    let mut error = ApiError::with_status(status, refusal.message);
    if !refusal.code.is_empty() {
        error = error.with_code(refusal.code.to_string());
    }
    if !refusal.param.is_empty() {
        error = error.with_param(&refusal.param);
    }
    Err(error)
}

impl From<HookError> for ApiError {
    fn from(error: HookError) -> Self {
        EngineError::from(error).into()
    }
}

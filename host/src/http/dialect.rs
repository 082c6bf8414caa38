//! The dialects of the API, and what translating one into a chat completion gives.

use axum::http::HeaderMap;
use axum::response::{IntoResponse as _, Response};
use serde_json::{Map, Value};

use super::error::{ApiError, json_response};

/// Which form requests, replies and errors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `OpenAI`'s chat completions.
    Chat,
    /// `OpenAI`'s completions.
    Text,
    /// `OpenAI`'s Responses.
    Responses,
    /// Anthropic's Messages.
    Messages,
}

impl Dialect {
    /// A refusal before any reply.
    pub fn refuse(self, error: &ApiError) -> Response {
        if self != Self::Messages {
            return error.clone().into_response();
        }
        let mut response = json_response(error.status, &error.anthropic());
        error.add_headers(response.headers_mut());
        response
    }
}

/// A request of another dialect in the words of a chat completion.
#[derive(Default)]
pub struct Translated {
    /// The chat completion.
    pub body: Map<String, Value>,
    /// Offered tools that this server cannot offer to the model.
    pub skipped: Vec<String>,
    /// What the reply repeats of the request.
    pub echo: Map<String, Value>,
    /// The reply's reasoning is wanted in a form that comes back unread.
    pub seal: bool,
}

/// Header that names tools which were left out.
pub const SKIPPED: &str = "x-plugfold-skipped-tools";
/// Longest value of it.
const SKIPPED_BYTES: usize = 512;

/// Names left-out tools in a header.
pub fn name_skipped(skipped: &[String], headers: &mut HeaderMap) {
    if skipped.is_empty() {
        return;
    }
    let clean = |c: char| if c.is_ascii_graphic() || c == ' ' { c } else { '?' };
    let text: String = skipped.join(", ").chars().map(clean).take(SKIPPED_BYTES).collect();
    if let Ok(value) = text.parse() {
        headers.insert(SKIPPED, value);
    }
}

/// A name of a nested field, for messages.
pub fn nested(list: &str, at: usize, rest: &str) -> String {
    format!("{list}[{at}]{rest}")
}

//! Errors in the form that OpenAI clients read.

use std::borrow::Cow;

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use plugfold_engine::service::EngineError;
use serde_json::{Value, json};

use crate::text::TextError;

/// Longest message of a failed check, in characters.
const CHECK_CHARS: usize = 2000;
/// Longest message of an engine failure, in characters.
const FAILURE_CHARS: usize = 500;

/// What a client is told when its request cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// Names the input, the limit and the mend.
    pub message: String,
    /// Machine-readable reason, where there is one.
    pub code: Option<Cow<'static, str>>,
    /// The request field at fault.
    pub param: Option<String>,
}

impl ApiError {
    /// A malformed or refused request (400).
    pub fn invalid(message: impl Into<String>) -> Self {
        Self { status: StatusCode::BAD_REQUEST, message: message.into(), code: None, param: None }
    }

    /// A malformed or refused field (400).
    pub fn field(name: &str, problem: impl std::fmt::Display) -> Self {
        Self::invalid(format!("{name} {problem}")).with_param(name)
    }

    /// Another status.
    pub fn with_status(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, ..Self::invalid(message) }
    }

    /// The server cannot take the request now (503).
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::with_status(StatusCode::SERVICE_UNAVAILABLE, message)
    }

    /// Names the field at fault.
    #[must_use]
    pub fn with_param(mut self, name: &str) -> Self {
        self.param = Some(name.to_owned());
        self
    }

    /// Adds a machine-readable reason.
    #[must_use]
    pub fn with_code(mut self, code: impl Into<Cow<'static, str>>) -> Self {
        self.code = Some(code.into());
        self
    }

    /// No API key, or none that is known (401).
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::with_status(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key")
    }

    /// Headers that belong to the status.
    pub fn add_headers(&self, headers: &mut HeaderMap) {
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
    }

    /// The JSON body in Anthropic's form.
    pub fn anthropic(&self) -> Value {
        let kind = match self.status.as_u16() {
            401 => "authentication_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        json!({"type": "error", "error": {"type": kind, "message": self.body()["error"]["message"]}})
    }

    /// The JSON body; also what an error event of a stream carries.
    pub fn body(&self) -> Value {
        let server = self.status.is_server_error();
        let limit = if server { FAILURE_CHARS } else { CHECK_CHARS };
        let message = match self.message.char_indices().nth(limit) {
            Some((end, _)) => &self.message[..end],
            None => &self.message,
        };
        let kind = if server { "server_error" } else { "invalid_request_error" };
        json!({"error": {"message": message, "type": kind, "param": self.param, "code": self.code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.body());
        self.add_headers(response.headers_mut());
        response
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Invalid(message) => Self::invalid(message),
            EngineError::Failed(message) => {
                Self::with_status(StatusCode::INTERNAL_SERVER_ERROR, format!("EngineError: {message}"))
            }
            EngineError::Unavailable(message) => Self::unavailable(message),
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::Hook(error) => error.into(),
            error => Self::invalid(error.to_string()),
        }
    }
}

/// A JSON reply.
pub fn json_response(status: StatusCode, body: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

/// The reply to a path or method that nothing is known of; here `error` is a plain string.
pub fn not_found() -> Response {
    json_response(StatusCode::NOT_FOUND, &json!({"error": "not found"}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_an_error() {
        let body = ApiError::field("top_k", "must be an integer or null").body();
        assert_eq!(
            body,
            json!({"error": {"message": "top_k must be an integer or null", "type": "invalid_request_error",
                             "param": "top_k", "code": null}})
        );
        let failed = ApiError::from(EngineError::Failed("x".repeat(600)));
        assert_eq!(failed.body()["error"]["type"], "server_error");
        assert_eq!(failed.body()["error"]["message"].as_str().unwrap().len(), 500);
        let long = ApiError::invalid("é".repeat(3000)).body();
        assert_eq!(long["error"]["message"].as_str().unwrap().chars().count(), 2000);
    }
}

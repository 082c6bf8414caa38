//! Reading a request body within bounds.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use http_body_util::BodyExt as _;
use serde_json::{Map, Value};
use tokio::sync::Notify;

use super::error::ApiError;
use super::limits::{Limits, seconds};

/// A request that was routed and whose body was not read yet.
pub struct Incoming {
    /// Its headers.
    pub headers: HeaderMap,
    /// Its body.
    pub body: Body,
    /// Drops the connection it came on.
    pub connection: Arc<Notify>,
}

impl Incoming {
    /// Reads the whole body.
    ///
    /// # Errors
    /// 415 for a compressed body, 413 over the size limit, 408 over the time limit, 400 when it breaks off.
    pub async fn bytes(self, limits: &Limits) -> Result<Bytes, ApiError> {
        match self.headers.get(header::CONTENT_ENCODING).map(HeaderValue::as_bytes) {
            None | Some(b"identity" | b"") => {}
            Some(_) => {
                return Err(ApiError::with_status(
                    StatusCode::UNSUPPORTED_MEDIA_TYPE,
                    "compressed request bodies are not accepted; send the JSON as it is",
                ));
            }
        }
        let limit = limits.body_bytes;
        let too_large = || {
            let message = format!("the request body is larger than the limit of {limit} bytes");
            ApiError::with_status(StatusCode::PAYLOAD_TOO_LARGE, message)
        };
        let announced =
            self.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
        if announced.is_some_and(|length| length > limit as u64) {
            return Err(too_large());
        }
        let mut body = self.body;
        let read = async {
            let mut whole = Vec::new();
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|_| ApiError::invalid("the request body ended early"))?;
                let Ok(data) = frame.into_data() else { continue };
                if whole.len() + data.len() > limit {
                    return Err(too_large());
                }
                whole.extend_from_slice(&data);
            }
            Ok(Bytes::from(whole))
        };
        match tokio::time::timeout(seconds(limits.body_s), read).await {
            Ok(result) => result,
            Err(_) => Err(ApiError::with_status(
                StatusCode::REQUEST_TIMEOUT,
                format!("the request body did not arrive within {} s", limits.body_s),
            )),
        }
    }
}

/// The JSON object in a body; an empty body counts as `{}`.
///
/// # Errors
/// 400 in the contract's words.
pub fn object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    if bytes.trim_ascii().is_empty() {
        return Ok(Map::new());
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ApiError::invalid("the request body must be a JSON object")),
        Err(_) => Err(ApiError::invalid("the request body is not JSON")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_counts_as_an_object() {
        assert!(object(b"").unwrap().is_empty());
        assert!(object(b" {} ").unwrap().is_empty());
        assert_eq!(object(b"{\"a\":1,\"a\":2}").unwrap()["a"], 2);
        for (text, message) in [
            (&b"[]"[..], "the request body must be a JSON object"),
            (b"null", "the request body must be a JSON object"),
            (b"{", "the request body is not JSON"),
            (b"\xff{}", "the request body is not JSON"),
            (b"{\"a\":\"\xff\"}", "the request body is not JSON"),
            ("\u{feff}{}".as_bytes(), "the request body is not JSON"),
            (b"{\"a\":NaN}", "the request body is not JSON"),
            (b"{\"a\":1e400}", "the request body is not JSON"),
        ] {
            assert_eq!(object(text).unwrap_err().message, message);
        }
        let deep = "[".repeat(100_000);
        assert!(object(format!("{{\"a\":{deep}").as_bytes()).is_err());
    }
}

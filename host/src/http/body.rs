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
    /// Its path.
    pub path: String,
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
/// 400 in the contract's words, or naming the depth limit.
pub fn object(bytes: &[u8], limits: &Limits) -> Result<Map<String, Value>, ApiError> {
    if bytes.trim_ascii().is_empty() {
        return Ok(Map::new());
    }
    let most = limits.json_depth;
    if deeper_than(bytes, most) {
        return Err(ApiError::invalid(format!(
            "the request body has more than {most} levels of objects and lists"
        )));
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ApiError::invalid("the request body must be a JSON object")),
        Err(_) => Err(ApiError::invalid("the request body is not JSON")),
    }
}

/// Whether brackets outside of strings nest deeper than `most`.
pub(crate) fn deeper_than(bytes: &[u8], most: usize) -> bool {
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for byte in bytes {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'[' | b'{' => {
                depth += 1;
                if depth > most {
                    return true;
                }
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
        super::object(bytes, &Limits::default())
    }

    #[test]
    fn depth_is_bounded_outside_of_strings() {
        let nested = |depth: usize| format!("{{\"a\":{}{}}}", "[".repeat(depth - 1), "]".repeat(depth - 1));
        assert!(object(nested(100).as_bytes()).is_ok());
        assert!(object(nested(101).as_bytes()).unwrap_err().message.contains("100 levels"));
        assert!(object(format!("{{\"a\":\"\\\"{}\"}}", "[".repeat(500)).as_bytes()).is_ok());
    }

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

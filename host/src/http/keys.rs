//! API keys: who may use the server.
//!
//! Only hashes are kept. A request's key is hashed and compared with every known hash in the same time, whether one
//! matches or not.

use std::path::Path;

use axum::http::{HeaderMap, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use sha2::{Digest as _, Sha256};
use subtle::{Choice, ConstantTimeEq as _};

use super::error::ApiError;

/// Shortest key that is accepted in a file.
const SHORTEST: usize = 8;
/// Before the hash of a key in a file.
const HASHED: &str = "sha256:";

/// The known keys; none: everybody may.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Keys(Vec<[u8; 32]>);

/// Never shows hashes.
impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} API keys", self.0.len())
    }
}

/// A key that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file.
    #[error("{path}: cannot read the API keys: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// A line of it.
    #[error("{path}, line {line}: {problem}")]
    Line {
        /// The file.
        path: String,
        /// Its line, from 1.
        line: usize,
        /// What is wrong and what would be right.
        problem: String,
    },
    /// The file holds none: the server would be open to all.
    #[error("{0}: holds no API key; write one a line, or leave the setting out to serve without keys")]
    Empty(String),
    /// A key that was given directly.
    #[error("the API key {0}")]
    Key(String),
}

impl Keys {
    /// Reads a file: one key a line, or `sha256:` and its hash; empty lines and lines with `#` in front count as nothing.
    ///
    /// # Errors
    /// A file that cannot be read, a line that is no key, a file without any.
    pub fn load(path: &Path) -> Result<Self, KeyError> {
        let shown = path.display().to_string();
        let text =
            std::fs::read_to_string(path).map_err(|source| KeyError::Read { path: shown.clone(), source })?;
        let mut keys = Self::default();
        for (at, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let hash = hash_of(line);
            keys.0.push(hash.map_err(|problem| KeyError::Line {
                path: shown.clone(),
                line: at + 1,
                problem,
            })?);
        }
        if keys.0.is_empty() { Err(KeyError::Empty(shown)) } else { Ok(keys) }
    }

    /// Adds one key, or `sha256:` and its hash.
    ///
    /// # Errors
    /// A key that is too short, or a hash that is none.
    pub fn add(&mut self, key: &str) -> Result<(), KeyError> {
        self.0.push(hash_of(key).map_err(KeyError::Key)?);
        Ok(())
    }

    /// Whether anybody may.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Checks a request.
    ///
    /// # Errors
    /// 401 without a key, or with one that is not known.
    pub fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        if self.0.is_empty() {
            return Ok(());
        }
        let Some(key) = given(headers) else {
            return Err(ApiError::unauthorized(
                "this server wants an API key: send it as Authorization: Bearer KEY, or as x-api-key",
            ));
        };
        let hash: [u8; 32] = Sha256::digest(key).into();
        let known = self.0.iter().fold(Choice::from(0), |known, one| known | one.ct_eq(&hash));
        if bool::from(known) { Ok(()) } else { Err(ApiError::unauthorized("this API key is not known")) }
    }
}

fn hash_of(line: &str) -> Result<[u8; 32], String> {
    let Some(hex) = line.strip_prefix(HASHED) else {
        if line.len() < SHORTEST {
            return Err(format!("is {} characters long; use at least {SHORTEST}", line.len()));
        }
        return Ok(Sha256::digest(line).into());
    };
    let wrong = || format!("{HASHED} must be followed by 64 hexadecimal digits");
    let mut hash = [0; 32];
    if hex.len() != 64 || !hex.is_ascii() {
        return Err(wrong());
    }
    for (byte, at) in hash.iter_mut().zip((0..).step_by(2)) {
        *byte = u8::from_str_radix(&hex[at..at + 2], 16).map_err(|_| wrong())?;
    }
    Ok(hash)
}

/// The key of a request: `Authorization: Bearer`, `x-api-key`, or the password that a browser asks for.
fn given(headers: &HeaderMap) -> Option<Vec<u8>> {
    if let Some(key) = headers.get("x-api-key") {
        return Some(key.as_bytes().to_vec());
    }
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, rest) = value.trim().split_once(' ')?;
    let rest = rest.trim();
    if scheme.eq_ignore_ascii_case("bearer") {
        return Some(rest.as_bytes().to_vec());
    }
    if scheme.eq_ignore_ascii_case("basic") {
        let pair = BASE64_STANDARD.decode(rest).ok()?;
        let at = pair.iter().position(|b| *b == b':')?;
        return Some(pair[at + 1..].to_vec());
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, value: &str) -> HeaderMap {
        HeaderMap::from_iter([(axum::http::HeaderName::from_static(name), value.parse().unwrap())])
    }

    #[test]
    fn keys_from_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        let hashed = Sha256::digest("second-key").iter().fold(String::new(), |s, b| format!("{s}{b:02x}"));
        std::fs::write(&path, format!("# ours\nfirst-key\n\n sha256:{hashed}\n")).unwrap();
        let keys = Keys::load(&path).unwrap();
        assert_eq!(format!("{keys:?}"), "2 API keys");
        for good in ["first-key", "second-key"] {
            assert!(keys.check(&headers("authorization", &format!("bearer {good}"))).is_ok());
            assert!(keys.check(&headers("x-api-key", good)).is_ok());
            let pair = BASE64_STANDARD.encode(format!("me:{good}"));
            assert!(keys.check(&headers("authorization", &format!("Basic {pair}"))).is_ok());
        }
        for bad in ["Bearer third-key", "Bearer ", "first-key", "Bearer first-key2", "Basic ???"] {
            assert_eq!(keys.check(&headers("authorization", bad)).unwrap_err().status, 401, "{bad}");
        }
        assert_eq!(keys.check(&HeaderMap::new()).unwrap_err().status, 401);
        assert!(Keys::default().check(&HeaderMap::new()).is_ok());
        for (text, words) in [
            ("# none\n", "holds no API key"),
            ("short\n", "line 1"),
            ("x\n", "at least 8"),
            ("sha256:ab\n", "64"),
        ] {
            std::fs::write(&path, text).unwrap();
            assert!(Keys::load(&path).unwrap_err().to_string().contains(words), "{text}");
        }
        assert!(Keys::load(&dir.path().join("nowhere")).unwrap_err().to_string().contains("nowhere"));
    }
}

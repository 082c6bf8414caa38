//! One JSON line a request: sizes, where its prompt came from, timings, hashes of its ids, lengths of shared prefixes. Never
//! text. What fails here is told once and never fails a request.

mod file;
mod line;
mod prefixes;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Ended, Host, HostObject, Level, Observer, ObserverObject, interest};
use plugfold_abi::{Knobs, List, OpError, Slice, Text, TextBuf};

use file::Rotating;
use prefixes::Prefixes;

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");
/// Longest salt that BLAKE2b takes as a key.
const SALT_BYTES: usize = 64;

/// The plugin.
pub struct RequestLog;

impl Plugin for RequestLog {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let host = setup.host();
        let log = Log::new(&setup.knobs, Some(host), host.rank()? == 0)?;
        Ok(List::from(vec![Offer::of(ObserverObject::new(log))]))
    }
}

/// The log of rank 0.
struct Log {
    /// `None`: off, or another rank.
    open: Option<Open>,
    host: Option<&'static HostObject>,
    warned: AtomicBool,
}

struct Open {
    file: Rotating,
    salt: Vec<u8>,
    prefixes: Mutex<Prefixes>,
}

impl Log {
    fn new(knobs: &Knobs<'_>, host: Option<&'static HostObject>, lead: bool) -> Result<Self, OpError> {
        let path = knobs.text("file")?;
        let salt = match knobs.text("salt")? {
            "none" => "",
            salt => salt,
        };
        if salt.len() > SALT_BYTES {
            return Err(OpError::invalid(format!(
                "salt has {} bytes: give at most {SALT_BYTES}",
                salt.len()
            )));
        }
        let number = |key: &str| -> Result<usize, OpError> {
            let value = knobs.int(key)?;
            usize::try_from(value).map_err(|_| OpError::invalid(format!("{key} is {value}: give 0 or more")))
        };
        let (keep, prompts, mb) = (number("keep")?, number("prompts")?, knobs.float("max_mb")?);
        if !(mb > 0.0 && mb.is_finite()) {
            return Err(OpError::invalid(format!("max_mb is {mb}: give a size above 0")));
        }
        let off = !lead || ["", "0", "off", "empty"].contains(&path);
        let open = (!off).then(|| Open {
            file: Rotating::new(path.into(), (mb * 1e6) as u64, keep),
            salt: salt.as_bytes().to_vec(),
            prefixes: Mutex::new(Prefixes::new(prompts)),
        });
        Ok(Self { open, host, warned: AtomicBool::new(false) })
    }

    /// Says once that the log does not work.
    fn warn(&self, why: &str) {
        if !self.warned.swap(true, Ordering::Relaxed)
            && let Some(host) = self.host
        {
            // Where even the log fails there is nobody left to tell.
            let _ =
                host.log(Level::Warn, Text::from(format!("the request log is not written: {why}").as_str()));
        }
    }
}

impl Observer for Log {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(if self.open.is_some() { interest::REQUEST } else { 0 })
    }

    fn arrived(&self, request: u64, ids: Slice<'_, u32>) -> Result<(), OpError> {
        if let Some(open) = &self.open {
            open.prefixes.lock().unwrap_or_else(PoisonError::into_inner).arrive(request, &ids);
        }
        Ok(())
    }

    fn request(&self, ended: &Ended<'_>) -> Result<TextBuf, OpError> {
        let Some(open) = &self.open else { return Ok(TextBuf::new()) };
        // Without its facts a request is a partner of others still.
        let facts = line::facts(ended);
        let nothing = serde_json::Value::Null;
        let conversation = line::conversation(&ended.ids, facts.as_ref().unwrap_or(&nothing)).len();
        let shared = {
            let mut prefixes = open.prefixes.lock().unwrap_or_else(PoisonError::into_inner);
            prefixes.end(ended.request, &ended.ids, conversation)
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        let written = facts.map(|facts| line::line(ended, &facts, &open.salt, &shared, now));
        let written = written.map_err(|error| error.to_string());
        if let Err(why) = written.and_then(|line| open.file.append(&line).map_err(|e| e.to_string())) {
            self.warn(&why);
        }
        Ok(TextBuf::new())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: RequestLog);

#[cfg(test)]
mod tests;

//! Room for the chunk sizes that requests may ask for.
//!
//! Request knobs themselves (validation, transport to all ranks, folding, the echo in the reply) are the host's and the
//! engine's, since every plugin's knobs need them; what is left is how large the buffers are that bound one of them.

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Limits, LimitsLink, LimitsLinkObject};
use plugfold_abi::{List, OpError, TextBuf};

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");
const KEY: &str = "prefill_rows_max";

/// The plugin.
pub struct RequestKnobs;

impl Plugin for RequestKnobs {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let value = setup.knobs.int(KEY)?;
        let rows = u32::try_from(value).ok().filter(|rows| *rows > 0);
        let rows = rows.ok_or_else(|| OpError::invalid(format!("{KEY} is {value}: give at least 1 row")))?;
        Ok(List::from(vec![Offer::of(LimitsLinkObject::new(Room { rows }))]))
    }
}

struct Room {
    rows: u32,
}

impl LimitsLink for Room {
    fn raise(&self, limits: &mut Limits) -> Result<(), OpError> {
        if self.rows < limits.prefill_rows {
            return Err(OpError::invalid(format!(
                "{KEY} is {}, below the server's own chunks of {} rows: give at least as many",
                self.rows, limits.prefill_rows
            )));
        }
        limits.prefill_rows_max = limits.prefill_rows_max.max(self.rows);
        Ok(())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: RequestKnobs);

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(rows: u32) -> Limits {
        Limits { context: 1, slots: 1, window_rows: 1, prefill_rows: rows, prefill_rows_max: rows, piece: 1 }
    }

    #[test]
    fn the_largest_chunk_grows_and_never_falls_below_the_servers_own() {
        let mut l = limits(64);
        Room { rows: 512 }.raise(&mut l).unwrap();
        assert_eq!((l.prefill_rows, l.prefill_rows_max), (64, 512));
        Room { rows: 64 }.raise(&mut l).unwrap();
        assert_eq!(l.prefill_rows_max, 512);
        let told = Room { rows: 63 }.raise(&mut l).unwrap_err().to_string();
        assert!(told.contains("63") && told.contains("64"), "{told}");
    }
}

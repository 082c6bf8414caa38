//! Many conversations resident: cache rows in shared pages, snapshots and tails beside them, copied back on resume.
//!
//! [`index`] decides and knows no bytes, [`pages`] holds bytes and decides nothing, [`store`] joins them to the engine.

pub mod index;
pub mod keys;
pub mod marks;
pub mod pages;
pub mod store;

use std::sync::{Arc, OnceLock};

use plugfold_0110_session_cache_api::SessionStoreObject;
use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Host, Level, ObserverObject, PlannerObject, StoreObject};
use plugfold_abi::{List, OpError, Text, TextBuf};

use marks::Rules;
use store::{Marks, Sessions, Settings, Told};

const MANIFEST: &str = include_str!("../plugin.toml");
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// The plugin.
#[derive(Default)]
pub struct SessionCache {
    /// The store, once it is configured and not off.
    sessions: OnceLock<Arc<Sessions>>,
}

/// A size in GiB as bytes.
fn bytes(key: &str, gib: f64) -> Result<u64, OpError> {
    let bytes = gib * GIB;
    if !gib.is_finite() || gib < 0.0 || bytes >= u64::MAX as f64 {
        return Err(OpError::invalid(format!("{key} is {gib}: give a number of GiB, 0 or more")));
    }
    Ok(bytes as u64)
}

fn tokens(key: &str, value: i64, least: i64) -> Result<u32, OpError> {
    let fits = u32::try_from(value).ok().filter(|_| value >= least);
    fits.ok_or_else(|| OpError::invalid(format!("{key} is {value}: give {least} to {} tokens", u32::MAX)))
}

impl Plugin for SessionCache {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let knobs = setup.knobs;
        let settings = Settings {
            budget: bytes("gib", knobs.float("gib")?)?,
            reserve: bytes("reserve_gib", knobs.float("reserve_gib")?)?,
            rules: Rules {
                every: tokens("every", knobs.int("every")?, 0)?,
                fork_min: tokens("fork_min", knobs.int("fork_min")?, 1)?,
            },
        };
        if settings.budget == 0 {
            let text = "gib is 0: no sessions are kept; give the GiB that they may take on each rank";
            setup.host.log(Level::Info, Text::from(text))?;
            return Ok(List::new());
        }
        let made = Arc::new(Sessions::new(settings, Some(setup.host())));
        let sessions = self.sessions.get_or_init(|| made).clone();
        Ok(List::from(vec![
            Offer::of(StoreObject::new(sessions.clone())),
            Offer::of(PlannerObject::new(Marks(sessions.clone()))),
            Offer::of(ObserverObject::new(Told(sessions))),
        ]))
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        let store = self.sessions.get().map(|s| Offer::of(SessionStoreObject::new(s.clone())));
        Ok(store.into_iter().collect())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: SessionCache::default());

#[cfg(test)]
mod tests {
    use plugfold_abi::{Knob, KnobValue, Knobs, Maybe, Slice};
    use plugfold_tests::host::Alone;

    use super::*;

    /// Interfaces that the plugin offers with these settings, and the log.
    fn configured(
        gib: f64,
        every: i64,
        fork_min: i64,
        reserve: f64,
    ) -> Result<(Vec<&'static str>, String), OpError> {
        let knob = |key: &str, value| Knob { key: key.into(), value, id: Maybe::RNone };
        let all = [
            knob("gib", KnobValue::float(gib)),
            knob("every", KnobValue::Int(every)),
            knob("fork_min", KnobValue::Int(fork_min)),
            knob("reserve_gib", KnobValue::float(reserve)),
        ];
        let alone = Alone::default();
        let host = alone.object();
        let knobs = Knobs { all: Slice::from(&all[..]) };
        let plugin = SessionCache::default();
        let offers = plugin.configure(&Setup { knobs, host, device_class: Text::from("cpu") })?;
        let services = plugin.publish()?;
        let names = offers.iter().chain(services.iter()).map(Offer::interface).collect();
        let told = alone.lines().join("\n");
        Ok((names, told))
    }

    #[test]
    fn the_manifest_is_sound() {
        let manifest = plugfold_manifest::Manifest::parse(MANIFEST, "plugin.toml").unwrap();
        assert_eq!(manifest.label(), "0110-session-cache");
        assert_eq!(manifest.knobs.len(), 4);
    }

    #[test]
    fn settings_that_make_no_sense_are_refused_by_name() {
        let ok = (1.0, 16384, 512, 2.0);
        assert_eq!(
            configured(ok.0, ok.1, ok.2, ok.3).unwrap().0,
            ["store", "planner", "observer", "session-store"]
        );
        let bad = [
            (-1.0, ok.1, ok.2, ok.3, "gib is -1"),
            (f64::NAN, ok.1, ok.2, ok.3, "gib is NaN"),
            (1e30, ok.1, ok.2, ok.3, "gib is 1000000"),
            (ok.0, -1, ok.2, ok.3, "every is -1: give 0"),
            (ok.0, ok.1, 0, ok.3, "fork_min is 0: give 1"),
            (ok.0, ok.1, 1 << 40, ok.3, "fork_min is 1099511627776"),
            (ok.0, ok.1, ok.2, -0.5, "reserve_gib is -0.5"),
        ];
        for (gib, every, fork_min, reserve, what) in bad {
            let told = configured(gib, every, fork_min, reserve).unwrap_err().to_string();
            assert!(told.contains(what), "{told}");
        }
    }

    #[test]
    fn off_is_said() {
        let (offers, told) = configured(0.0, 16384, 512, 2.0).unwrap();
        assert!(offers.is_empty() && told.contains("gib is 0"), "{told}");
    }
}

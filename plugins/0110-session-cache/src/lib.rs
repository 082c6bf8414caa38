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

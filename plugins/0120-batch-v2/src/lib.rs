//! Several requests at once: who enters, prompts in pieces beside requests that decode, background requests that yield.
//!
//! Rounds over many slots are the engine's; here are the decisions. They are rank 0's and travel in the plan.

pub mod fair;
pub mod planner;
pub mod stats;

use std::sync::{Arc, OnceLock};

use plugfold_0120_batch_v2_api::BatchViewObject;
use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Host, LimitsLinkObject, ObserverObject, PlannerObject};
use plugfold_abi::{List, OpError, TextBuf};

use planner::{Batch, Settings, Slots};
use stats::Stats;

const MANIFEST: &str = include_str!("../plugin.toml");
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// The plugin.
#[derive(Default)]
pub struct BatchV2 {
    /// The policies, once they are configured.
    batch: OnceLock<Arc<Batch>>,
}

fn bytes(key: &str, gib: f64) -> Result<u64, OpError> {
    let bytes = gib * GIB;
    if !gib.is_finite() || gib < 0.0 || bytes >= u64::MAX as f64 {
        return Err(OpError::invalid(format!("{key} is {gib}: give a number of GiB, 0 or more")));
    }
    Ok(bytes as u64)
}

impl Plugin for BatchV2 {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let knobs = setup.knobs;
        let piece = knobs.int("piece")?;
        let piece = u32::try_from(piece)
            .ok()
            .filter(|p| *p > 0)
            .ok_or_else(|| OpError::invalid(format!("piece is {piece}: give 1 to {} tokens", u32::MAX)))?;
        let share = knobs.float("prefill_share")?;
        if !(share > 0.0 && share <= 1.0) {
            return Err(OpError::invalid(format!(
                "prefill_share is {share}: give a part of the time, over 0 and at most 1"
            )));
        }
        let reserve = bytes("reserve_gib", knobs.float("reserve_gib")?)?;
        let admit = bytes("admit_gib", knobs.float("admit_gib")?)?;
        let settings = Settings { piece, share, reserve, admit };
        let host = setup.host();
        let batch = self.batch.get_or_init(|| Arc::new(Batch::new(settings, Some(host)))).clone();
        Ok(List::from(vec![
            Offer::of(LimitsLinkObject::new(Slots { settings, host: Some(host) })),
            Offer::of(PlannerObject::new(batch)),
            Offer::of(ObserverObject::new(Stats::new(host.rank()? == 0))),
        ]))
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        let view = self.batch.get().map(|b| Offer::of(BatchViewObject::new(b.clone())));
        Ok(view.into_iter().collect())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: BatchV2::default());

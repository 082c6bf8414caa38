//! Several requests at once: who enters, prompts in pieces beside requests that decode, background requests that yield.
//!
//! Rounds over many slots are the engine's; here are the decisions. They are rank 0's and travel in the plan.

pub mod depth;
pub mod fair;
pub mod planner;
pub mod stats;

use std::sync::{Arc, OnceLock};

use plugfold_0120_batch_v2_api::BatchViewObject;
use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{
    DraftPolicyObject, Host, LimitsLinkObject, ObserverObject, PlannerObject, Services, ServicesObject,
};
use plugfold_abi::{Knobs, List, OpError, Text, TextBuf};
use plugfold_base_auto_api::PoliciesObject;

use depth::{Costs, Depths};
use planner::{Batch, Settings, Slots};
use stats::Stats;

const MANIFEST: &str = include_str!("../plugin.toml");
const GIB: f64 = 1024.0 * 1024.0 * 1024.0;

/// The plugin.
#[derive(Default)]
pub struct BatchV2 {
    /// The policies, once they are configured.
    batch: OnceLock<Arc<Batch>>,
    depths: Arc<Depths>,
}

fn bytes(key: &str, gib: f64) -> Result<u64, OpError> {
    let bytes = gib * GIB;
    if !gib.is_finite() || gib < 0.0 || bytes >= u64::MAX as f64 {
        return Err(OpError::invalid(format!("{key} is {gib}: give a number of GiB, 0 or more")));
    }
    Ok(bytes as u64)
}

fn settings(knobs: Knobs<'_>) -> Result<Settings, OpError> {
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
    Ok(Settings { piece, share, reserve, admit })
}

impl Plugin for BatchV2 {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let settings = settings(setup.knobs)?;
        let host = setup.host();
        let batch = self.batch.get_or_init(|| Arc::new(Batch::new(settings, Some(host)))).clone();
        Ok(List::from(vec![
            Offer::of(LimitsLinkObject::new(Slots { settings, host: Some(host) })),
            Offer::of(PlannerObject::new(batch)),
            Offer::of(ObserverObject::new(Stats::new(host.rank()? == 0))),
            Offer::of(DraftPolicyObject::new(self.depths.clone())),
            Offer::of(ObserverObject::new(Costs(self.depths.clone()))),
        ]))
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        let view = self.batch.get().map(|b| Offer::of(BatchViewObject::new(b.clone())));
        Ok(view.into_iter().collect())
    }

    fn connect(&self, services: &ServicesObject) -> Result<(), OpError> {
        if let Some(found) = services.find(Text::from("policies"))?.into_option() {
            let policies = found.get::<PoliciesObject>();
            self.depths.connect(policies.map_err(|e| OpError::new(format!("service policies: {e}")))?);
        }
        Ok(())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: BatchV2::default());

#[cfg(test)]
mod tests {
    use plugfold_abi::{Knob, KnobValue, Maybe, Slice};

    use super::*;

    fn read(piece: i64, share: f64, reserve: f64, admit: f64) -> Result<Settings, OpError> {
        let knob = |key: &str, value| Knob { key: key.into(), value, id: Maybe::RNone };
        let all = [
            knob("piece", KnobValue::Int(piece)),
            knob("prefill_share", KnobValue::float(share)),
            knob("reserve_gib", KnobValue::float(reserve)),
            knob("admit_gib", KnobValue::float(admit)),
        ];
        settings(Knobs { all: Slice::from(&all[..]) })
    }

    #[test]
    fn the_manifest_is_sound() {
        let manifest = plugfold_manifest::Manifest::parse(MANIFEST, "plugin.toml").unwrap();
        assert_eq!(manifest.label(), "0120-batch-v2");
        assert_eq!(manifest.knobs.len(), 4);
    }

    #[test]
    fn settings_that_make_no_sense_are_refused_by_name() {
        let good = read(2048, 0.5, 4.0, 1.0).unwrap();
        assert_eq!((good.piece, good.reserve, good.admit), (2048, 4 << 30, 1 << 30));
        let bad = [
            (0, 0.5, 4.0, 1.0, "piece is 0"),
            (-3, 0.5, 4.0, 1.0, "piece is -3"),
            (1, 0.0, 4.0, 1.0, "prefill_share is 0"),
            (1, 1.5, 4.0, 1.0, "prefill_share is 1.5"),
            (1, f64::NAN, 4.0, 1.0, "prefill_share is NaN"),
            (1, 0.5, -4.0, 1.0, "reserve_gib is -4"),
            (1, 0.5, 4.0, f64::INFINITY, "admit_gib is inf"),
        ];
        for (piece, share, reserve, admit, what) in bad {
            let told = read(piece, share, reserve, admit).err().map_or_else(String::new, |e| e.to_string());
            assert!(told.contains(what), "{told}");
        }
    }
}

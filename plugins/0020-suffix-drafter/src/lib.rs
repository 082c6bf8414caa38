//! Prompt-lookup drafts: what followed the longest earlier occurrence of the text's end is proposed again.
//!
//! No weights and no clock: a proposal is a function of the tokens, and so is the choice to use it, with prices that every
//! rank has. The index is built from ids and never saved.

mod gate;
mod index;
mod seats;

use std::sync::Arc;

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Memory, Plugin, Setup};
use plugfold_abi::points::{
    DraftCutObject, DraftPolicyObject, DrafterObject, Limits, Services, ServicesObject,
};
use plugfold_abi::{List, OpError, Text, TextBuf};
use plugfold_base_auto_api::PoliciesObject;

pub use seats::Lookup;

const MANIFEST: &str = include_str!("../plugin.toml");
/// Host bytes of an indexed token: itself, its gram's place and the one before.
const TOKEN_BYTES: u64 = 40;

/// The plugin.
#[derive(Default)]
pub struct SuffixDrafter {
    lookup: Arc<Lookup>,
}

impl Plugin for SuffixDrafter {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let (on, min) = (setup.knobs.bool("lookup")?, setup.knobs.int("lookup_min")?);
        let min = u32::try_from(min).ok().filter(|m| (1..=64).contains(m));
        let min = min.ok_or_else(|| OpError::invalid("lookup_min: give 1 to 64 tokens"))?;
        self.lookup.configure(setup.knobs.id("lookup")?, on, setup.knobs.id("lookup_min")?, min);
        Ok(List::from(vec![
            Offer::of(DrafterObject::new(self.lookup.clone())),
            Offer::of(DraftPolicyObject::new(self.lookup.clone())),
            Offer::of(DraftCutObject::new(self.lookup.clone())),
        ]))
    }

    fn connect(&self, services: &ServicesObject) -> Result<(), OpError> {
        let found = services.find(Text::from("policies"))?.into_option();
        let found = found.ok_or_else(|| {
            OpError::invalid("needs the draft policies: list plugin base-auto before this one")
        })?;
        let policies =
            found.get::<PoliciesObject>().map_err(|e| OpError::new(format!("service policies: {e}")))?;
        self.lookup.connect(policies);
        Ok(())
    }

    fn memory(&self, limits: &Limits) -> Result<Memory, OpError> {
        // One index of a running sequence and one of the last, for each slot.
        let tokens = 2 * u64::from(limits.slots) * u64::from(limits.context);
        Ok(Memory { host: tokens * TOKEN_BYTES, device: 0 })
    }

    fn prepare(&self, limits: &Limits) -> Result<(), OpError> {
        self.lookup.limits(limits.slots, limits.window_rows.saturating_sub(1));
        Ok(())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: SuffixDrafter::default());

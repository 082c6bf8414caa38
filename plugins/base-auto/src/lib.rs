//! Draft policies: who drafts how much in a round. None of them can change a reply.

mod adapt;
mod link;

use std::sync::Arc;

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{DraftPolicyObject, Limits};
use plugfold_abi::{List, OpError, TextBuf};
use plugfold_base_auto_api::{Form, PoliciesObject};

pub use link::Policy;

const MANIFEST: &str = include_str!("../plugin.toml");
/// Drafts that a window has room for where nobody raised its rows.
const USUAL_DRAFTS: u32 = 7;

/// The plugin.
#[derive(Default)]
pub struct BaseAuto {
    link: Arc<Policy>,
}

impl BaseAuto {
    /// The policy that requests get that ask for none.
    fn own(setup: &Setup<'_>) -> Result<String, OpError> {
        let knobs = &setup.knobs;
        if knobs.bool("no_drafts")? {
            return Ok("0".into());
        }
        // A knob that nobody set arrives as a text.
        if let Some(drafts) = knobs.get("mtp_drafts")?.value.as_int() {
            return Ok(drafts.to_string());
        }
        let policy = knobs.text("policy")?;
        // How many drafts a window has room for is not known yet: that is checked once it is.
        Form::parse(policy, u32::MAX).map_err(|e| OpError::invalid(format!("knob `policy`: {e}")))?;
        Ok(policy.to_owned())
    }
}

impl Plugin for BaseAuto {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        self.link.configure(&Self::own(setup)?, setup.knobs.bool("no_drafts")?);
        Ok(List::from(vec![Offer::of(DraftPolicyObject::new(self.link.clone()))]))
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        Ok(List::from(vec![Offer::of(PoliciesObject::new(self.link.clone()))]))
    }

    fn prepare(&self, limits: &Limits) -> Result<(), OpError> {
        self.link.room(limits.window_rows.saturating_sub(1))
    }

    fn digest(&self) -> Result<List<TextBuf>, OpError> {
        let (policy, off) = self.link.settings();
        Ok([format!("policy = {policy}"), format!("no_drafts = {off}")]
            .map(TextBuf::from)
            .into_iter()
            .collect())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: BaseAuto::default());

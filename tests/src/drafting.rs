//! The drafting plugins, linked and configured as the loader would, with knobs given by tests.

use std::sync::Arc;

use plugfold_0020_suffix_drafter::SuffixDrafter;
use plugfold_abi::boundary::{Offer, Shared};
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Limits, Services, ServicesObject};
use plugfold_abi::{Knob, KnobValue, Knobs, Maybe, OpError, Slice, Text};
use plugfold_base_auto::BaseAuto;
use plugfold_base_mtp::BaseMtp;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::knobs::{Effect, Fold, KnobSpec};

use crate::host::Alone;

struct Found(Vec<Shared>);

impl Services for Found {
    fn find(&self, interface: Text<'_>) -> Result<Maybe<Shared>, OpError> {
        Ok(self.0.iter().find(|s| s.interface() == interface.get_str()).copied().into())
    }
}

/// Knobs of a rank.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::struct_excessive_bools)] // each is a knob of its own
pub struct Drafting {
    /// The server's own policy.
    pub policy: &'static str,
    /// `mtp_drafts`.
    pub mtp_drafts: Option<i64>,
    /// `no_drafts`.
    pub no_drafts: bool,
    /// `lookup`.
    pub lookup: bool,
    /// `lookup_min`.
    pub lookup_min: i64,
    /// Slots and rows of a window.
    pub sizes: (u32, u32),
    /// Leave base-mtp out.
    pub without_mtp: bool,
    /// Leave 0020 out.
    pub without_lookup: bool,
}

impl Default for Drafting {
    fn default() -> Self {
        Self {
            policy: "auto",
            mtp_drafts: None,
            no_drafts: false,
            lookup: true,
            lookup_min: 4,
            sizes: (4, 8),
            without_mtp: false,
            without_lookup: false,
        }
    }
}

fn knob(key: &str, value: KnobValue, id: Option<u32>) -> Knob {
    Knob { key: key.into(), value, id: id.into() }
}

impl Drafting {
    /// Their hooks. Request knobs: `lookup` 0, `lookup_min` 1.
    ///
    /// # Errors
    /// What a plugin refuses to start with.
    ///
    /// # Panics
    /// When an offer is of another build.
    pub fn hooks(&self) -> Result<Hooks, OpError> {
        self.parts().map(|(hooks, _)| hooks)
    }

    /// As [`Drafting::hooks`], with the services that the plugins offer to others.
    ///
    /// # Errors
    /// As [`Drafting::hooks`].
    ///
    /// # Panics
    /// As [`Drafting::hooks`].
    pub fn parts(&self) -> Result<(Hooks, Vec<Shared>), OpError> {
        let mut hooks = Hooks::default();
        let host = Alone::default().object();
        let mut plugins: Vec<(&str, Box<dyn Plugin>, Vec<Knob>)> = Vec::new();
        if !self.without_mtp {
            plugins.push(("base-mtp", Box::new(BaseMtp::default()), Vec::new()));
        }
        let drafts = self.mtp_drafts.map_or_else(|| KnobValue::text(""), KnobValue::Int);
        let auto = vec![
            knob("policy", KnobValue::text(self.policy), None),
            knob("mtp_drafts", drafts, None),
            knob("no_drafts", KnobValue::Bool(self.no_drafts), None),
        ];
        plugins.push(("base-auto", Box::new(BaseAuto::default()), auto));
        if !self.without_lookup {
            let knobs = vec![
                knob("lookup", KnobValue::Bool(self.lookup), Some(0)),
                knob("lookup_min", KnobValue::Int(self.lookup_min), Some(1)),
            ];
            plugins.push(("0020", Box::new(SuffixDrafter::default()), knobs));
            let spec = |name: &str| KnobSpec { name: name.into(), fold: Fold::Own, effect: Effect::Drafts };
            hooks.knobs.specs = [spec("0020.lookup"), spec("0020.lookup_min")].into();
            hooks.knobs.defaults = [KnobValue::Bool(self.lookup), KnobValue::Int(self.lookup_min)].into();
        }
        let limits = Limits {
            context: 1024,
            slots: self.sizes.0,
            window_rows: self.sizes.1,
            prefill_rows: 64,
            prefill_rows_max: 64,
            piece: 64,
        };
        let mut services = Found(Vec::new());
        for (id, plugin, knobs) in &plugins {
            let knobs = Knobs { all: Slice::from(&knobs[..]) };
            let setup = Setup { knobs, host, device_class: Text::from("cpu") };
            for offer in plugin.configure(&setup)? {
                hooks.add(id, &[], offer).unwrap_or_else(|e| panic!("{id}: {e}"));
            }
            plugin.connect(&ServicesObject::lend(&services))?;
            services.0.extend(plugin.publish()?.into_iter().map(Offer::share));
            plugin.prepare(&limits)?;
        }
        Ok((hooks, services.0))
    }

    /// Core options with their hooks.
    ///
    /// # Panics
    /// When a plugin refuses to start.
    pub fn core(&self) -> CoreOptions {
        let hooks = self.hooks().unwrap_or_else(|e| panic!("{e}"));
        CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
    }
}

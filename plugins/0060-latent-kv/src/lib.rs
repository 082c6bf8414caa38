//! The cache of latent attention holds a token's latent instead of its keys and values per head.
//!
//! A head's key and value are linear in the latent c, so its scores are `(Wk^T q) . c` and its output is Wv times the
//! weighted sum of latents. [`layout`] makes the cache rows latents, [`pass`] puts the two products around attention, and
//! [`provide`] runs all five operations on the CPU.

pub mod layout;
pub mod pass;
pub mod provide;

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::LayoutLinkObject;
use plugfold_abi::{List, OpError, PassObject, ProviderObject, TextBuf};

use layout::Rows;
use pass::Around;
use provide::{ALL, Latent};

const MANIFEST: &str = include_str!("../plugin.toml");

/// Format of the cache rows: the latent in f32, key and value of every head.
pub const FORMAT: &str = "latent.f32";
/// The cache family.
pub const FAMILY: &str = "mla.kv";
/// The weight whose rows are, head by head, the key's and the value's.
pub const KV_B: &str = "mla.kv_b";
/// The operation from queries to the latents' space.
pub const ABSORB: &str = "mla.absorb";
/// The operation from sums of latents to values.
pub const EXPAND: &str = "mla.expand";

/// The plugin.
pub struct LatentKv;

impl Plugin for LatentKv {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        match setup.knobs.text("latent_kv")? {
            "0" => return Ok(List::new()),
            "1" => {}
            other => return Err(OpError::invalid(format!("latent_kv is {other:?}: give 0 or 1"))),
        }
        plugfold_kernels::cpu::threads_of(setup.host)?;
        let mut offers = vec![
            Offer::of(LayoutLinkObject::new(Rows { host: Some(setup.host()) })),
            Offer::of(PassObject::new(Around)),
        ];
        offers.extend(ALL.map(|op| Offer::of(ProviderObject::new(Latent(op)))));
        Ok(offers.into())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: LatentKv);

#[cfg(test)]
mod tests {
    use plugfold_abi::{Knob, KnobValue, Knobs, Maybe, Slice, Text};
    use plugfold_tests::host::Alone;

    use super::*;

    fn configured(value: &str) -> Result<Vec<&'static str>, OpError> {
        let all = [Knob { key: "latent_kv".into(), value: KnobValue::text(value), id: Maybe::RNone }];
        let host = Alone::default().object();
        let knobs = Knobs { all: Slice::from(&all[..]) };
        let offers = LatentKv.configure(&Setup { knobs, host, device_class: Text::from("cpu") })?;
        Ok(offers.iter().map(Offer::interface).collect())
    }

    #[test]
    fn off_registers_nothing_and_other_values_are_refused() {
        assert!(configured("0").unwrap().is_empty());
        let on = configured("1").unwrap();
        assert_eq!(on[..2], ["cache-layout", "pass"]);
        assert_eq!(on[2..], ["provider"; 5]);
        assert!(configured("2").unwrap_err().to_string().contains("latent_kv is \"2\": give 0 or 1"));
    }

    #[test]
    fn the_manifest_is_sound_and_knows_two_values_at_start_only() {
        let manifest = plugfold_manifest::Manifest::parse(MANIFEST, "plugin.toml").unwrap();
        assert_eq!(
            (manifest.label().as_str(), manifest.off_by.as_deref()),
            ("0060-latent-kv", Some("latent_kv"))
        );
        let knob = &manifest.knobs[0];
        let unknown = |_: &str| None;
        assert!(knob.check(&KnobValue::text("1"), &unknown).is_ok());
        let parsed = knob.parse(&plugfold_manifest::Raw::Text("2".into()));
        assert!(parsed.unwrap_err().to_string().contains('0'));
        assert!(!knob.per_request() && knob.load_only.as_deref() == Some("a process has one cache layout"));
    }
}

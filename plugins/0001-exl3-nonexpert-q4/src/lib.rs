//! Matrices outside of the routed experts in 4 bits: [`classes`] says which, [`builder`] stores them with [`encode`], and
//! [`provide`] multiplies by them. Built while they are loaded; the values they were made of are dropped.

pub mod builder;
pub mod classes;
pub mod encode;
pub mod provide;

use plugfold_0001_exl3_nonexpert_q4_api::WeightClassesObject;
use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Memory, Plugin, Setup};
use plugfold_abi::points::{Host as _, Level, Limits, WeightBuilderObject};
use plugfold_abi::{List, OpError, ProviderObject, Text, TextBuf};

use builder::Builder;
use classes::Table;
use encode::Range;
use plugfold_kernels::cpu::groups::OPERATIONS;
use provide::Product;

const MANIFEST: &str = include_str!("../plugin.toml");

/// Format of the weights: 4 bits in groups of 64 inputs.
pub const FORMAT: &str = "q4.g64";
/// Inputs of a group.
pub const GROUP: usize = 64;
/// The matrix stays as the checkpoint has it.
pub const BF16: &str = "bf16";
/// The plugin's id.
pub const ID: &str = "0001";

/// The plugin.
#[derive(Default)]
pub struct NonexpertQ4 {
    table: Table,
}

impl Plugin for NonexpertQ4 {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let mode = setup.knobs.text("nonexpert")?;
        self.table.all(mode);
        setup.host.log(Level::Info, Text::from(&*format!("matrices outside of the experts: {mode}")))?;
        let mut offers: Vec<Offer> = [Range::Whole, Range::Best]
            .map(|range| Offer::of(WeightBuilderObject::new(Builder { range, table: self.table.clone() })))
            .into();
        offers.extend(OPERATIONS.map(|op| Offer::of(ProviderObject::new(Product(op)))));
        Ok(offers.into())
    }

    fn publish(&self) -> Result<List<Offer>, OpError> {
        Ok(List::from(vec![Offer::of(WeightClassesObject::new(self.table.clone()))]))
    }

    /// Plugins that bring further modes have put their table in force by now.
    fn memory(&self, _: &Limits) -> Result<Memory, OpError> {
        match self.table.unknown() {
            Some(mode) => Err(OpError::invalid(format!(
                "nonexpert is {mode:?}, and no plugin on the list stores matrices so: give bf16, q4 or q4mse"
            ))),
            None => Ok(Memory::default()),
        }
    }

    fn digest(&self) -> Result<List<TextBuf>, OpError> {
        Ok(List::from(vec![format!("matrices = {}", self.table.name()).into()]))
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: NonexpertQ4::default());

#[cfg(test)]
mod tests {
    use plugfold_abi::{Knob, KnobValue, Knobs, Maybe, Slice};
    use plugfold_tests::host::Alone;

    use super::*;

    fn configured(plugin: &NonexpertQ4, mode: &str) -> Result<Vec<&'static str>, OpError> {
        let all = [Knob { key: "nonexpert".into(), value: KnobValue::text(mode), id: Maybe::RNone }];
        let host = Alone::default().object();
        let knobs = Knobs { all: Slice::from(&all[..]) };
        let offers = plugin.configure(&Setup { knobs, host, device_class: Text::from("cpu") })?;
        Ok(offers.iter().map(Offer::interface).collect())
    }

    #[test]
    fn every_mode_registers_what_the_manifest_says() {
        for mode in ["bf16", "q4", "q4mse"] {
            let plugin = NonexpertQ4::default();
            let offers = configured(&plugin, mode).unwrap();
            assert_eq!(offers[..2], ["weight-builder"; 2]);
            assert_eq!(offers[2..], ["provider"; 5]);
            assert_eq!(plugin.digest().unwrap()[0], format!("matrices = {mode}"));
            assert!(plugin.memory(&limits()).is_ok());
        }
    }

    fn limits() -> Limits {
        Limits { context: 1, slots: 1, window_rows: 1, prefill_rows: 1, prefill_rows_max: 1, piece: 1 }
    }

    #[test]
    fn an_unknown_mode_fails_at_load_with_the_list_of_modes() {
        let manifest = plugfold_manifest::Manifest::parse(MANIFEST, "plugin.toml").unwrap();
        assert_eq!(manifest.label(), "0001-exl3-nonexpert-q4");
        let told =
            manifest.knobs[0].parse(&plugfold_manifest::Raw::Text("q5".into())).unwrap_err().to_string();
        assert!(["bf16", "q4", "q4mse"].iter().all(|mode| told.contains(mode)), "{told}");
        // A mode that another plugin's manifest allows, without that plugin.
        let plugin = NonexpertQ4::default();
        configured(&plugin, "q8").unwrap();
        let told = plugin.memory(&limits()).unwrap_err().to_string();
        assert!(told.contains("q8") && told.contains("bf16, q4 or q4mse"), "{told}");
    }
}

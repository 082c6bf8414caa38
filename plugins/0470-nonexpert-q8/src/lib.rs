//! Matrices outside of the routed experts in 8 bits, and a precision for each class of them: [`map`] decides, this plugin's
//! builder or one of 0001 stores, [`provide`] multiplies by what is in 8 bits.

pub mod builder;
pub mod encode;
pub mod map;
pub mod provide;

use std::sync::{Arc, OnceLock};

use plugfold_0001_exl3_nonexpert_q4_api::{Assigned, WeightClasses as _, WeightClassesObject};
use plugfold_abi::boundary::{Interface as _, Offer};
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Host as _, Level, Services as _, ServicesObject, WeightBuilderObject};
use plugfold_abi::{List, Maybe, OpError, ProviderObject, Text, TextBuf};
use plugfold_kernels::cpu::groups::OPERATIONS;

use builder::Builder;
use provide::Product;

const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin's id.
pub const ID: &str = "0470";
/// The mode that it brings.
pub const MODE: &str = "q8";
/// Where the tiles of the GPU's kernels stand if nobody says otherwise.
const DECODE_CFG: &str = "1,4,3,64";

/// The format of groups of so many inputs.
pub const fn format(group: usize) -> &'static str {
    if group == 128 { "q8.g128" } else { "q8.g64" }
}

/// Modes of all classes, once they are known.
pub type Table = Arc<OnceLock<Vec<Assigned>>>;

/// The plugin.
#[derive(Default)]
pub struct NonexpertQ8 {
    table: Table,
}

impl Plugin for NonexpertQ8 {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let knobs = setup.knobs;
        let text = knobs.get("map")?.value.to_string();
        let wrong = |why: String| OpError::invalid(format!("map is {text:?}: {why}"));
        let map = map::read(&text).map_err(wrong)?;
        let table = map::table(&map, knobs.text("0001.nonexpert")?).map_err(wrong)?;
        if self.table.set(table).is_err() {
            return Err(OpError::new("configured twice"));
        }
        for (key, usual) in [("decode_cfg", DECODE_CFG), ("tile", "")] {
            let value = knobs.get(key)?.value.to_string();
            if setup.device_class.get_str() == "cpu" && value != usual {
                let told =
                    format!("{key} = {value} does nothing on the CPU: it is a tile of the GPU's kernels");
                setup.host.log(Level::Warn, Text::from(&*told))?;
            }
        }
        let mut offers = vec![Offer::of(WeightBuilderObject::new(Builder { table: self.table.clone() }))];
        offers.extend(OPERATIONS.map(|op| Offer::of(ProviderObject::new(Product(op)))));
        Ok(offers.into())
    }

    fn connect(&self, services: &ServicesObject) -> Result<(), OpError> {
        let Maybe::RSome(found) = services.find(Text::from(WeightClassesObject::NAME))? else {
            return Err(OpError::new("0001 does not offer its classes: list it before"));
        };
        let classes = found.get::<WeightClassesObject>().map_err(|e| OpError::new(e.to_string()))?;
        let table = self.table.get().cloned().unwrap_or_default();
        classes.assign(Text::from(ID), table.into())
    }

    fn parse(&self, key: Text<'_>, text: Text<'_>) -> Result<TextBuf, OpError> {
        if key.get_str() != "map" {
            return Ok(text.get_str().into());
        }
        let map = map::read(&text).map_err(OpError::invalid)?;
        Ok(map::write(&map).into())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: NonexpertQ8::default());

#[cfg(test)]
mod tests {
    use plugfold_abi::{Knob, KnobValue, Knobs, Slice};
    use plugfold_tests::host::Alone;

    use super::*;

    fn configured(map: &str, cfg: &str, host: &Alone) -> Result<Vec<&'static str>, OpError> {
        let knob =
            |key: &str, value| Knob { key: key.into(), value: KnobValue::text(value), id: Maybe::RNone };
        let all = [knob("map", map), knob("decode_cfg", cfg), knob("tile", ""), knob("0001.nonexpert", "q8")];
        let knobs = Knobs { all: Slice::from(&all[..]) };
        let setup = Setup { knobs, host: host.object(), device_class: Text::from("cpu") };
        let offers = NonexpertQ8::default().configure(&setup)?;
        Ok(offers.iter().map(Offer::interface).collect())
    }

    #[test]
    fn it_registers_what_the_manifest_says_and_refuses_a_wrong_map() {
        let manifest = plugfold_manifest::Manifest::parse(MANIFEST, "plugin.toml").unwrap();
        assert_eq!(manifest.label(), "0470-nonexpert-q8");
        let offers = configured("", DECODE_CFG, &Alone::default()).unwrap();
        assert_eq!(offers[..1], ["weight-builder"; 1]);
        assert_eq!(offers[1..], ["provider"; 5]);
        let told = configured("kda=q9", DECODE_CFG, &Alone::default()).unwrap_err().to_string();
        assert!(told.contains("map is \"kda=q9\"") && told.contains("bf16, q4, q4mse, q8"), "{told}");
        let told = NonexpertQ8::default().parse("map".into(), "kda=q8,kda=q8".into()).unwrap_err();
        assert!(told.to_string().contains("twice"));
        assert_eq!(NonexpertQ8::default().parse("map".into(), " out=q8; ".into()).unwrap(), "out=q8");
    }

    #[test]
    fn a_tile_that_does_nothing_is_told() {
        let host = Alone::default();
        configured("", "2,4,3,64", &host).unwrap();
        assert!(host.lines().iter().any(|line| line.contains("decode_cfg") && line.contains("CPU")));
        let host = Alone::default();
        configured("", DECODE_CFG, &host).unwrap();
        assert!(host.lines().is_empty());
    }
}

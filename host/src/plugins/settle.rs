//! From resolved knobs to what each plugin, the engine and the digest get of them, in a form that travels to other ranks.

use plugfold_abi::{Knob, KnobValue};
use plugfold_engine::knobs::{KnobSpec, Knobs};
use plugfold_manifest::Manifest;
use serde::{Deserialize, Serialize};

use super::PluginError;
use crate::knobs::{Resolved, Sources};

/// A knob's value as its plugin gets it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnobRow {
    /// Key; `owner.key` for one that the plugin extends.
    pub key: String,
    /// Value at load.
    pub value: KnobValue,
    /// Number among the request knobs.
    pub id: Option<u32>,
}

/// All settings of all plugins, in their order.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Settled {
    /// For each plugin the knobs that it gets.
    pub rows: Vec<Vec<KnobRow>>,
    /// Knobs that must be equal on all ranks: `owner.key`, value.
    pub lines: Vec<(String, String)>,
    /// Declarations of the request knobs, by number.
    pub specs: Vec<KnobSpec>,
    /// Their values where a request says nothing.
    pub defaults: Vec<KnobValue>,
}

impl Settled {
    /// What plugins of these ids, in this order, get of resolved knobs.
    pub fn of<'i>(resolved: &Resolved, ids: impl Iterator<Item = &'i str>) -> Self {
        let table = resolved.table();
        let row = |knob: Knob| KnobRow { key: knob.key.into(), value: knob.value, id: knob.id.into_option() };
        let engine = table.engine();
        Self {
            rows: ids.map(|id| resolved.of_plugin(id, &table).into_iter().map(row).collect()).collect(),
            lines: resolved.digest(),
            specs: engine.specs.to_vec(),
            defaults: engine.defaults.to_vec(),
        }
    }

    /// What one plugin gets where nobody said anything and no other is loaded.
    ///
    /// # Errors
    /// Defaults that are no values of their knobs.
    pub fn alone(manifest: &Manifest) -> Result<Self, PluginError> {
        let resolved = Resolved::new(&Sources::default(), vec![manifest.clone()])
            .map_err(|e| PluginError::general(e.to_string()))?;
        Ok(Self::of(&resolved, std::iter::once(manifest.id.as_str())))
    }

    /// The request knobs, as the engine has them.
    pub fn request(&self) -> Knobs {
        Knobs { specs: self.specs.clone().into(), defaults: self.defaults.clone().into() }
    }
}

/// Knobs as they cross the boundary.
pub fn knobs(rows: &[KnobRow]) -> Vec<Knob> {
    let knob =
        |row: &KnobRow| Knob { key: row.key.as_str().into(), value: row.value.clone(), id: row.id.into() };
    rows.iter().map(knob).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plugins_get_their_own_and_what_they_extend() {
        let one = r#"
            id = "0003"
            [[knob]]
            key = "rows"
            type = "int"
            range = "1.."
            default = "window_rows * 2"
            scope = "both"
            effect = "schedule"
            fold = "split"
            request_key = "rows"
        "#;
        let two = r#"
            id = "0004"
            extends = ["0003"]
            extends_knobs = [{ knob = "0003.rows", words = ["auto"] }]
            [[knob]]
            key = "on"
            type = "bool"
            default = "1"
            scope = "load"
        "#;
        let read = |text| Manifest::read(text, "test").unwrap();
        let resolved = Resolved::new(&Sources::default(), vec![read(one), read(two)]).unwrap();
        let settled = Settled::of(&resolved, ["0003", "0004"].into_iter());
        let row = |key: &str, value, id| KnobRow { key: key.into(), value, id };
        let (rows, on) = (KnobValue::Int(16), KnobValue::Bool(true));
        assert_eq!(settled.rows[0], [row("rows", rows.clone(), Some(0))]);
        let mut second = settled.rows[1].clone();
        second.sort_by(|a, b| a.key.cmp(&b.key));
        assert_eq!(second, [row("0003.rows", rows.clone(), Some(0)), row("on", on, None)]);
        // Undeclared means bits, so `on` is compared between ranks.
        assert_eq!(settled.lines, [("0003.rows".into(), "16".into()), ("0004.on".into(), "true".into())]);
        assert_eq!(&settled.request().defaults[..], [rows]);
        let text = serde_json::to_string(&settled).unwrap();
        let travelled: Settled = serde_json::from_str(&text).unwrap();
        assert_eq!(travelled.rows, settled.rows);
    }
}

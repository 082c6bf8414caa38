//! From values of knobs to what each plugin, the engine and the digest get of them.

use plugfold_abi::{Knob, KnobValue};
use plugfold_engine::knobs::{Effect, Fold, KnobSpec};
use plugfold_manifest::{Expr, KnobType, Loaded, OwnedKnob, Raw};

use super::PluginError;
use super::life::{KnobRow, Settled};

/// Deals values out: to each plugin its own knobs and those that it extends, to the engine those that a request may set.
pub fn deal(loaded: &Loaded, value_of: impl Fn(&OwnedKnob) -> KnobValue) -> Settled {
    let mut rows: Vec<(KnobRow, &OwnedKnob)> = Vec::with_capacity(loaded.knobs().len());
    let mut request = 0;
    for knob in loaded.knobs() {
        let id = knob.schema.per_request().then(|| {
            request += 1;
            request - 1
        });
        rows.push((KnobRow { key: knob.schema.key.clone(), value: value_of(knob), id }, knob));
    }
    let of_plugin = |id: &str| {
        let own = rows.iter().filter(|(_, k)| k.owner == id).map(|(row, _)| row.clone());
        let extended = rows.iter().filter(|(_, k)| k.extended_by.iter().any(|by| by == id));
        own.chain(extended.map(|(row, k)| KnobRow { key: k.path(), ..row.clone() })).collect()
    };
    let per_request = || rows.iter().filter(|(row, _)| row.id.is_some());
    Settled {
        rows: loaded.manifests().iter().map(|m| of_plugin(&m.id)).collect(),
        lines: rows
            .iter()
            .filter(|(_, k)| k.in_digest())
            .map(|(row, k)| (k.path(), row.value.to_string()))
            .collect(),
        specs: per_request().map(|(_, k)| spec(k)).collect(),
        defaults: per_request().map(|(row, _)| row.value.clone()).collect(),
    }
}

fn spec(knob: &OwnedKnob) -> KnobSpec {
    let effect = match knob.schema.effect() {
        plugfold_manifest::Effect::Bits => Effect::Bits,
        plugfold_manifest::Effect::Schedule => Effect::Schedule,
        plugfold_manifest::Effect::Drafts => Effect::Drafts,
        plugfold_manifest::Effect::Speed => Effect::Speed,
        plugfold_manifest::Effect::Host => Effect::Host,
    };
    let fold = match knob.schema.fold() {
        plugfold_manifest::Fold::Own => Fold::Own,
        plugfold_manifest::Fold::All => Fold::All,
        plugfold_manifest::Fold::Any => Fold::Any,
        plugfold_manifest::Fold::Min => Fold::Min,
        plugfold_manifest::Fold::Max => Fold::Max,
        plugfold_manifest::Fold::Split => Fold::Split,
    };
    KnobSpec { name: knob.path(), fold, effect }
}

/// Knobs as they cross the boundary.
pub fn knobs(rows: &[KnobRow]) -> Vec<Knob> {
    let knob = |row: &KnobRow| Knob {
        key: row.key.as_str().into(),
        value: row.value.clone(),
        id: row.id.into(),
    };
    rows.iter().map(knob).collect()
}

/// Defaults of all knobs, for who has no settings: the probing process and `plugins check`.
///
/// `limit` gives the limits that expressions name.
///
/// # Errors
/// A default that is no value of its knob.
pub fn defaults(loaded: &Loaded, limit: impl Fn(&str) -> Option<f64>) -> Result<Settled, PluginError> {
    let mut values: Vec<(String, KnobValue)> = Vec::new();
    for knob in loaded.knobs() {
        let value = default(knob, &|name: &str| {
            let path = format!("{}.{name}", knob.owner);
            let known = values.iter().find(|(p, _)| *p == path || p == name);
            known.and_then(|(_, v)| v.as_float()).or_else(|| limit(name))
        });
        let value = value
            .map_err(|why| PluginError::general(format!("knob {} has no usable default: {why}", knob.path())))?;
        values.push((knob.path(), value));
    }
    let empty = KnobValue::text("");
    Ok(deal(loaded, |knob| {
        let path = knob.path();
        values.iter().find(|(p, _)| *p == path).map_or_else(|| empty.clone(), |(_, v)| v.clone())
    }))
}

fn default(knob: &OwnedKnob, names: &dyn Fn(&str) -> Option<f64>) -> Result<KnobValue, String> {
    let schema = &knob.schema;
    let Some(text) = &schema.default else { return Ok(KnobValue::text("")) };
    match (schema.parse(&Raw::Plain(text.clone())), schema.type_) {
        (Ok(value), _) => Ok(value),
        (Err(_), KnobType::Int) => Ok(KnobValue::Int(Expr::parse(text)?.eval(&names)? as i64)),
        (Err(_), KnobType::Float) => Ok(KnobValue::float(Expr::parse(text)?.eval(&names)?)),
        (Err(error), _) => Err(error.to_string()),
    }
}

/// What a program that has no model takes for its limits.
pub fn usual_limits(name: &str) -> Option<f64> {
    Some(match name {
        "context" => 4096.0,
        "slots" | "end_ids" => 1.0,
        "window_rows" => 8.0,
        "prefill_rows" | "prefill_rows_max" | "piece" => 64.0,
        "capacity" | "pool_tokens" => 4096.0,
        _ => return None,
    })
}


#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_manifest::Manifest;

    fn loaded() -> Loaded {
        let one = r#"
            id = "0003"
            [[knob]]
            key = "rows"
            type = "int"
            default = "window_rows * 2"
            scope = "both"
            effect = "schedule"
            fold = "split"
            request_key = "rows"
            [[knob]]
            key = "half"
            type = "int"
            default = "rows - 1"
            scope = "load"
            effect = "speed"
        "#;
        let two = r#"
            id = "0004"
            extends = ["0003"]
            extends_knobs = [{ knob = "0003.rows", words = ["auto"] }]
            [[knob]]
            key = "on"
            type = "bool"
            default = "1"
            scope = "both"
            fold = "any"
            request_key = "on"
        "#;
        let read = |text| Manifest::read(text, "test").unwrap();
        Loaded::new(vec![read(one), read(two)]).unwrap()
    }

    #[test]
    fn plugins_get_their_own_and_what_they_extend() {
        let settled = defaults(&loaded(), usual_limits).unwrap();
        let row = |key: &str, value, id| KnobRow { key: key.into(), value, id };
        let (rows, half) = (KnobValue::Int(16), KnobValue::Int(15));
        assert_eq!(settled.rows[0], [row("rows", rows.clone(), Some(0)), row("half", half, None)]);
        let on = KnobValue::Bool(true);
        assert_eq!(settled.rows[1], [row("on", on.clone(), Some(1)), row("0003.rows", rows.clone(), Some(0))]);
        // Undeclared means bits, so `on` is compared between ranks.
        assert_eq!(settled.lines, [("0003.rows".into(), "16".into()), ("0004.on".into(), "true".into())]);
        assert_eq!(&settled.defaults[..], [rows, on]);
        let specs = &settled.specs;
        assert_eq!((specs[0].fold, specs[0].effect), (Fold::Split, Effect::Schedule));
        assert_eq!((specs[1].name.as_str(), specs[1].fold, specs[1].effect), ("0004.on", Fold::Any, Effect::Bits));
    }

    #[test]
    fn a_default_that_cannot_be_computed_is_named() {
        let told = defaults(&loaded(), |_| None).unwrap_err().to_string();
        assert!(told.contains("0003.rows") && told.contains("window_rows"), "{told}");
    }
}

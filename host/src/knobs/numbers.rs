//! The numbers that expressions of ranges and defaults may name: limits and other knobs.

use std::collections::BTreeMap;

use plugfold_abi::KnobValue;
use plugfold_abi::points::Limits;
use plugfold_manifest::{Loaded, Names};

/// Limits and values of knobs as they are known; a name without an entry has no number.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Numbers {
    limits: BTreeMap<String, f64>,
    knobs: BTreeMap<String, f64>,
}

impl Numbers {
    /// The limits that follow from the engine's own settings and from the knobs behind which plugins raise them. `values`
    /// gives the value of a knob by its place in `loaded`, where it is settled.
    pub(super) fn new(loaded: &Loaded, values: &dyn Fn(usize) -> Option<KnobValue>) -> Self {
        let mut knobs = BTreeMap::new();
        for (index, knob) in loaded.knobs().iter().enumerate() {
            if let Some(number) = values(index).as_ref().and_then(KnobValue::as_float) {
                knobs.insert(knob.path(), number);
            }
        }
        let mut limits: BTreeMap<String, f64> = BTreeMap::new();
        let own = |key: &str| knobs.get(&format!("engine.{key}")).copied();
        for name in ["context", "slots", "window_rows", "prefill_rows"] {
            limits.extend(own(name).map(|number| (name.to_owned(), number)));
        }
        let mut raise = |name: &str, to: f64| {
            let limit = limits.entry(name.to_owned()).or_insert(to);
            *limit = limit.max(to);
        };
        for manifest in loaded.manifests() {
            for raised in &manifest.raises {
                let knob = raised.knob.as_ref().and_then(|key| knobs.get(&format!("{}.{key}", manifest.id)));
                if let Some(to) = knob {
                    raise(&raised.limit, *to);
                }
            }
        }
        if let Some(rows) = limits.get("prefill_rows").copied() {
            let most = limits.entry("prefill_rows_max".to_owned()).or_insert(rows);
            *most = most.max(rows);
        }
        if let (Some(context), Some(rows)) = (limits.get("context"), limits.get("window_rows")) {
            let capacity = context + rows;
            limits.entry("capacity".to_owned()).or_insert(capacity);
        }
        Self { limits, knobs }
    }

    /// Takes the limits that the engine settled on.
    pub(super) fn settle(&mut self, limits: &Limits) {
        let Limits { context, slots, window_rows, prefill_rows, prefill_rows_max, piece } = *limits;
        let settled = [
            ("context", context),
            ("slots", slots),
            ("window_rows", window_rows),
            ("prefill_rows", prefill_rows),
            ("prefill_rows_max", prefill_rows_max),
            ("piece", piece),
        ];
        self.limits.extend(settled.map(|(name, number)| (name.to_owned(), f64::from(number))));
    }

    /// The names as a knob of this owner sees them: its own knobs, then limits, then `owner.key`.
    pub fn of<'n>(&'n self, owner: &'n str) -> impl Names + 'n {
        move |name: &str| {
            let own = self.knobs.get(&format!("{owner}.{name}"));
            own.or_else(|| self.limits.get(name)).or_else(|| self.knobs.get(name)).copied()
        }
    }
}

//! Request knobs inside the engine: values by number, and how unequal values meet in a shared call.

use std::sync::Arc;

use plugfold_abi::KnobValue;
use serde::{Deserialize, Serialize};

/// How unequal values of a knob meet in a call of several sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Fold {
    /// They do not: each sequence's own decisions read it, a call sees the load value.
    #[default]
    Own,
    /// On where all have it on.
    All,
    /// On where any has it on.
    Any,
    /// The smallest.
    Min,
    /// The largest.
    Max,
    /// Sequences with unequal values never share a call.
    Split,
}

/// What a knob can change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effect {
    /// The bits that are computed. What is not declared counts as this.
    #[default]
    Bits,
    /// When and in what portions work is done.
    Schedule,
    /// Which drafts are proposed.
    Drafts,
    /// Which of several kernels with equal bits runs.
    Speed,
    /// Nothing in the engine.
    Host,
}

impl Effect {
    /// Whether a claim may depend on it: then its folded value is part of a shape.
    pub fn claims(self) -> bool {
        matches!(self, Effect::Bits | Effect::Speed)
    }
}

/// One request knob.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnobSpec {
    /// `owner.key`, for messages.
    pub name: String,
    /// How values meet.
    pub fold: Fold,
    /// What it can change.
    pub effect: Effect,
}

/// The values of a request, or of the server where a request says nothing.
pub type Values = Arc<[KnobValue]>;

/// All request knobs of the loaded plugins, by number.
#[derive(Clone, Debug, Default)]
pub struct Knobs {
    /// Their declarations.
    pub specs: Arc<[KnobSpec]>,
    /// Their values where a request says nothing; as many as there are declarations.
    pub defaults: Values,
}

impl Knobs {
    /// The values of a call over sequences with these values.
    pub fn fold<'v>(&self, mut sequences: impl Iterator<Item = &'v [KnobValue]> + Clone) -> Values {
        let Some(first) = sequences.next() else { return self.defaults.clone() };
        if sequences.clone().next().is_none() && self.specs.iter().all(|s| s.fold != Fold::Own) {
            return Arc::from(first);
        }
        let one = |(i, spec): (usize, &KnobSpec)| {
            let of = |values: &'v [KnobValue]| values.get(i).unwrap_or(&self.defaults[i]);
            let all = std::iter::once(first).chain(sequences.clone()).map(of);
            match spec.fold {
                Fold::Own => self.defaults[i].clone(),
                Fold::Split => of(first).clone(),
                Fold::All => KnobValue::Bool(all.clone().all(KnobValue::as_bool)),
                Fold::Any => KnobValue::Bool(all.clone().any(KnobValue::as_bool)),
                Fold::Min => extreme(all, false),
                Fold::Max => extreme(all, true),
            }
        };
        self.specs.iter().enumerate().map(one).collect()
    }

    /// Whether two sequences may share a call.
    pub fn meet(&self, a: &[KnobValue], b: &[KnobValue]) -> bool {
        let split = self.specs.iter().enumerate().filter(|(_, s)| s.fold == Fold::Split);
        split.into_iter().all(|(i, _)| a.get(i) == b.get(i))
    }

    /// The part of folded values that is part of a shape: where a claim may not look, the load value stands.
    pub fn of_shape(&self, folded: &[KnobValue]) -> Vec<KnobValue> {
        let each = self.specs.iter().zip(folded).zip(self.defaults.iter());
        each.map(|((s, v), d)| if s.effect.claims() { v.clone() } else { d.clone() }).collect()
    }

    /// Whether `shape` is what [`Knobs::of_shape`] gives for folded values.
    pub fn is_of_shape(&self, shape: &[KnobValue], folded: &[KnobValue]) -> bool {
        let each = self.specs.iter().zip(folded).zip(self.defaults.iter());
        shape.len() == self.specs.len().min(folded.len()).min(self.defaults.len())
            && each.zip(shape).all(|(((s, v), d), have)| have == if s.effect.claims() { v } else { d })
    }

    /// The values that decide bits: what a tag is computed for.
    pub fn of_bits(&self, values: &[KnobValue]) -> Vec<KnobValue> {
        let each = self.specs.iter().zip(values);
        each.filter(|(s, _)| s.effect == Effect::Bits).map(|(_, v)| v.clone()).collect()
    }
}

fn extreme<'v>(all: impl Iterator<Item = &'v KnobValue>, largest: bool) -> KnobValue {
    let key = |v: &&KnobValue| v.as_float().unwrap_or(0.0);
    let found = if largest {
        all.max_by(|a, b| key(a).total_cmp(&key(b)))
    } else {
        all.min_by(|a, b| key(a).total_cmp(&key(b)))
    };
    found.cloned().unwrap_or(KnobValue::Int(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(folds: &[Fold]) -> Knobs {
        let spec = |fold: &Fold| KnobSpec { name: "p.k".into(), fold: *fold, effect: Effect::Speed };
        Knobs {
            specs: folds.iter().map(spec).collect(),
            defaults: folds.iter().map(|_| KnobValue::Int(9)).collect(),
        }
    }

    #[test]
    fn unequal_values_meet_by_their_rule() {
        use Fold::{All, Any, Max, Min, Own, Split};
        let knobs = table(&[Own, All, Any, Min, Max, Split]);
        let a = [1, 1, 0, 3, 3, 5].map(KnobValue::Int);
        let b = [2, 0, 1, 4, 4, 5].map(KnobValue::Int);
        let folded = knobs.fold([&a[..], &b[..]].into_iter());
        let (int, bool) = (KnobValue::Int, KnobValue::Bool);
        assert_eq!(folded[..], [int(9), bool(false), bool(true), int(3), int(4), int(5)]);
        assert!(knobs.meet(&a, &b));
        let mut c = b.clone();
        c[5] = int(6);
        assert!(!knobs.meet(&a, &c), "split values keep sequences apart");
        assert_eq!(knobs.fold(std::iter::empty())[0], int(9));
    }
}

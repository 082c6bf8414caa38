//! Values of request knobs in calls that several requests share.

use plugfold_abi::KnobValue;

use crate::Fold;

/// Two requests whose values may not meet in one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// Number of the knob.
    pub knob: usize,
}

/// The fold rule and default of every request knob, by number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Folds {
    rules: Vec<Fold>,
    defaults: Vec<KnobValue>,
}

impl Folds {
    /// Rules and defaults, one of each a knob.
    pub fn new(rules: Vec<Fold>, defaults: Vec<KnobValue>) -> Self {
        debug_assert_eq!(rules.len(), defaults.len());
        Self { rules, defaults }
    }

    /// The values that requests have which set none.
    pub fn defaults(&self) -> &[KnobValue] {
        &self.defaults
    }

    /// The rules.
    pub fn rules(&self) -> &[Fold] {
        &self.rules
    }

    /// Whether two requests may share calls.
    pub fn may_share(&self, a: &[KnobValue], b: &[KnobValue]) -> bool {
        self.rules.iter().zip(a.iter().zip(b)).all(|(rule, (a, b))| *rule != Fold::Split || a == b)
    }

    /// What a call sees whose sequences have these values. A knob whose rule is `own` decides nothing in a shared call;
    /// the call sees its default.
    ///
    /// # Errors
    /// Values that may not meet.
    pub fn fold(&self, requests: &[&[KnobValue]]) -> Result<Vec<KnobValue>, Split> {
        let number = |value: &KnobValue| value.as_float().unwrap_or(0.0);
        let mut folded = Vec::with_capacity(self.rules.len());
        for (knob, (rule, default)) in self.rules.iter().zip(&self.defaults).enumerate() {
            let mut values = requests.iter().filter_map(|request| request.get(knob));
            let Some(first) = values.next() else {
                folded.push(default.clone());
                continue;
            };
            let value = match rule {
                Fold::Own => default.clone(),
                Fold::Split if values.all(|value| value == first) => first.clone(),
                Fold::Split => return Err(Split { knob }),
                Fold::All => switch(first, first.as_bool() && values.all(KnobValue::as_bool)),
                Fold::Any => switch(first, first.as_bool() || values.any(KnobValue::as_bool)),
                Fold::Min => values.fold(first, |a, b| if number(b) < number(a) { b } else { a }).clone(),
                Fold::Max => values.fold(first, |a, b| if number(b) > number(a) { b } else { a }).clone(),
            };
            folded.push(value);
        }
        Ok(folded)
    }
}

/// On or off in the type of another value.
fn switch(like: &KnobValue, on: bool) -> KnobValue {
    match like {
        KnobValue::Int(_) => KnobValue::Int(i64::from(on)),
        _ => KnobValue::Bool(on),
    }
}

//! Request knobs: their numbers, and the values of a request.

use std::collections::HashMap;
use std::sync::Arc;

use plugfold_abi::points::Limits;
use plugfold_abi::{KnobId, KnobValue, OpError};
use plugfold_engine::knobs::{Effect, Fold, KnobSpec, Knobs};
use plugfold_manifest::{KnobSchema, KnobType, Loaded, OwnedKnob, Raw, nearest};
use serde_json::{Map, Value as Json, json};

use super::resolve::Value;
use super::{Numbers, catalogue};

/// Characters of a key that a message repeats.
const SHOWN: usize = 60;

/// A knob that requests may set.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestKnob {
    /// Id of its owner.
    pub owner: String,
    /// Its name in `tf_knobs`.
    pub key: String,
    /// Its schema.
    pub schema: KnobSchema,
    /// The value at load.
    pub default: KnobValue,
}

/// All request knobs of the loaded plugins, numbered by plugin, then as the manifest lists them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct KnobTable {
    knobs: Vec<RequestKnob>,
    by_key: HashMap<String, usize>,
    /// Names that are set at load, with the reason why no request can set them.
    load_only: HashMap<String, String>,
    numbers: Numbers,
    defaults: Arc<[KnobValue]>,
    owners: Option<Owners>,
}

/// What the owners of knobs say of values that the schema allows. An error is the owner's own failure.
pub trait KnobOwners: Send + Sync {
    /// The canonical text of a knob that its owner parses itself; `Ok(Err(reason))`: it is none.
    ///
    /// # Errors
    /// The owner failed.
    fn parse(&self, _knob: &RequestKnob, text: &str) -> Result<Result<String, String>, OpError> {
        Ok(Ok(text.to_owned()))
    }
    /// Why a knob cannot have a value, where its owner knows a reason.
    ///
    /// # Errors
    /// The owner failed.
    fn veto(&self, knob: &RequestKnob, value: &KnobValue) -> Result<Option<String>, OpError>;
}

#[derive(Clone)]
struct Owners(Arc<dyn KnobOwners>);

impl std::fmt::Debug for Owners {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Owners")
    }
}

impl PartialEq for Owners {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Owners that only object.
struct Objections<F>(F);

impl<F: Fn(&RequestKnob, &KnobValue) -> Option<String> + Send + Sync> KnobOwners for Objections<F> {
    fn veto(&self, knob: &RequestKnob, value: &KnobValue) -> Result<Option<String>, OpError> {
        Ok((self.0)(knob, value))
    }
}

/// What is wrong with a request's `tf_knobs`; the text continues a sentence that begins with that name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct KnobError {
    /// The key.
    pub key: String,
    /// Names key, value and reason.
    pub message: String,
    /// Not the request is at fault, but the owner that was asked about it.
    pub failed: bool,
}

impl KnobTable {
    pub(super) fn new(loaded: &Loaded, values: &[Value], numbers: Numbers) -> Self {
        let mut table = Self { numbers, ..Self::default() };
        for (knob, value) in loaded.knobs().iter().zip(values) {
            let Some(key) = knob.schema.request_key.clone().filter(|_| knob.schema.per_request()) else {
                table.set_at_load(knob);
                continue;
            };
            table.by_key.insert(key.clone(), table.knobs.len());
            table.knobs.push(RequestKnob {
                owner: knob.owner.clone(),
                key,
                schema: knob.schema.clone(),
                default: value.value.clone(),
            });
        }
        table.defaults = table.knobs.iter().map(|knob| knob.default.clone()).collect();
        table
    }

    fn set_at_load(&mut self, knob: &OwnedKnob) {
        let reason = knob.schema.load_only.clone().unwrap_or_else(|| {
            let owner = catalogue().label(&knob.owner);
            format!("{owner} reads it once")
        });
        // `GLM53_TF_BATCH` is known to clients as `batch`.
        let short = knob.schema.env.iter().filter_map(|name| name.strip_prefix("GLM53_TF_"));
        for name in short.map(str::to_ascii_lowercase).chain([knob.schema.key.clone(), knob.path()]) {
            self.load_only.entry(name).or_insert_with(|| reason.clone());
        }
    }

    /// Takes the limits that the engine settled on: ranges that name one follow it.
    #[must_use]
    pub fn with_limits(mut self, limits: &Limits) -> Self {
        self.numbers.settle(limits);
        self
    }

    /// Asks `veto` about every value that a request sets; it may give a reason why the knob cannot have it.
    #[must_use]
    pub fn with_veto(
        self,
        veto: impl Fn(&RequestKnob, &KnobValue) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        self.with_owners(Arc::new(Objections(veto)))
    }

    /// Asks the owners of knobs about every value that a request sets.
    #[must_use]
    pub fn with_owners(mut self, owners: Arc<dyn KnobOwners>) -> Self {
        self.owners = Some(Owners(owners));
        self
    }

    /// Takes the values at load, as the owners of custom knobs have put them.
    #[must_use]
    #[allow(clippy::needless_pass_by_value)] // the list is shared, as everybody has it
    pub fn with_defaults(mut self, defaults: Arc<[KnobValue]>) -> Self {
        for (knob, value) in self.knobs.iter_mut().zip(defaults.iter()) {
            knob.default = value.clone();
        }
        self.defaults = self.knobs.iter().map(|knob| knob.default.clone()).collect();
        self
    }

    /// All of them, by number.
    pub fn knobs(&self) -> &[RequestKnob] {
        &self.knobs
    }

    /// The number of a knob, if a request may set it.
    pub fn number(&self, owner: &str, key: &str) -> Option<KnobId> {
        let found = self.knobs.iter().position(|knob| knob.owner == owner && knob.schema.key == key);
        found.map(|index| index as KnobId)
    }

    /// The values of a request that sets none.
    pub fn defaults(&self) -> &Arc<[KnobValue]> {
        &self.defaults
    }

    /// As the engine takes them: how unequal values meet in a call.
    pub fn engine(&self) -> Knobs {
        let spec = |knob: &RequestKnob| KnobSpec {
            name: format!("{}.{}", knob.owner, knob.schema.key),
            fold: match knob.schema.fold() {
                plugfold_manifest::Fold::Own => Fold::Own,
                plugfold_manifest::Fold::All => Fold::All,
                plugfold_manifest::Fold::Any => Fold::Any,
                plugfold_manifest::Fold::Min => Fold::Min,
                plugfold_manifest::Fold::Max => Fold::Max,
                plugfold_manifest::Fold::Split => Fold::Split,
            },
            effect: match knob.schema.effect() {
                plugfold_manifest::Effect::Bits => Effect::Bits,
                plugfold_manifest::Effect::Schedule => Effect::Schedule,
                plugfold_manifest::Effect::Drafts => Effect::Drafts,
                plugfold_manifest::Effect::Speed => Effect::Speed,
                plugfold_manifest::Effect::Host => Effect::Host,
            },
        };
        Knobs { specs: self.knobs.iter().map(spec).collect(), defaults: self.defaults.clone() }
    }

    /// The values of a request with this `tf_knobs`.
    ///
    /// # Errors
    /// An unknown key, one that is set at load, a value of another type or out of range, or one that its owner refuses.
    pub fn resolve_request(&self, asked: &Map<String, Json>) -> Result<Arc<[KnobValue]>, KnobError> {
        if asked.is_empty() {
            return Ok(self.defaults.clone());
        }
        let mut values = self.defaults.to_vec();
        for (key, given) in asked {
            let Some(&index) = self.by_key.get(key) else { return Err(self.unknown(key)) };
            let knob = &self.knobs[index];
            let wrong = |problem: String, failed: bool| KnobError {
                key: key.clone(),
                message: format!("key {key:?} {problem}"),
                failed,
            };
            let failed = |error: OpError| wrong(format!("cannot be settled: {error}"), true);
            let mut value = self.read(knob, given).map_err(|problem| wrong(problem, false))?;
            if let Some(Owners(owners)) = &self.owners {
                if let Some(text) = own_text(&knob.schema, &value) {
                    let form = knob.schema.allowed(&self.numbers.of(&knob.owner));
                    let text = owners.parse(knob, text).map_err(failed)?;
                    let wrong = |reason| wrong(format!("is {given}; it must be {form}: {reason}"), false);
                    value = KnobValue::text(text.map_err(wrong)?);
                }
                if let Some(reason) = owners.veto(knob, &value).map_err(failed)? {
                    return Err(wrong(format!("cannot be {given}: {reason}"), false));
                }
            }
            values[index] = value;
        }
        Ok(values.into())
    }

    fn read(&self, knob: &RequestKnob, given: &Json) -> Result<KnobValue, String> {
        let schema = &knob.schema;
        let names = self.numbers.of(&knob.owner);
        if let (Some(on), Some(off)) = (&schema.request_on, &schema.request_off) {
            let value =
                |text: &str| schema.parse(&Raw::Plain(text.to_owned())).map_err(|error| error.to_string());
            return match given {
                Json::Bool(false) => value(off),
                Json::Bool(true) if knob.default != value(off)? => Ok(knob.default.clone()),
                Json::Bool(true) => value(on),
                Json::Number(n) if n.as_i64() == Some(0) => value(off),
                Json::Number(n) if n.as_i64() == Some(1) => self.read(knob, &Json::Bool(true)),
                other => Err(format!("is {}; it must be 0 or 1", raw(other))),
            };
        }
        let given = raw(given);
        // The whole range is told, with today's limits, whatever is wrong.
        let must = || format!("is {given}; it must be {}", schema.allowed(&names));
        let value = schema.parse(&given).map_err(|_| must())?;
        schema.check(&value, &names).map_err(|_| must())?;
        let number = |value: &KnobValue| value.as_float();
        if schema.at_most_loaded && number(&value) > number(&knob.default) {
            let loaded = text(&knob.default);
            return Err(format!(
                "is {given}; the server was started with {loaded}, and a request can only go below"
            ));
        }
        Ok(value)
    }

    fn unknown(&self, key: &str) -> KnobError {
        let key: String = key.chars().take(SHOWN).collect();
        let list = || self.knobs.iter().map(|knob| knob.key.as_str());
        let valid = if self.knobs.is_empty() {
            "this server has no request knobs".to_owned()
        } else {
            format!("valid are {}", list().collect::<Vec<_>>().join(", "))
        };
        let absent = || {
            let setting = catalogue().owners.iter().find(|(_, known)| known.keys.contains(&key));
            catalogue().by_request(&key).map(|(owner, _)| owner).or(setting.map(|(owner, _)| owner.as_str()))
        };
        let message = if let Some(reason) = self.load_only.get(&key) {
            format!("key {key:?} is set when the server starts, not by a request: {reason}")
        } else if let Some(owner) = absent() {
            let plugin = catalogue().label(owner);
            format!("key {key:?} is a knob of plugin {plugin}, which this server has not loaded; {valid}")
        } else {
            let near =
                nearest(&key, list()).map(|name| format!("did you mean {name:?}? ")).unwrap_or_default();
            format!("has the unknown key {key:?}; {near}{valid}")
        };
        KnobError { key, message, failed: false }
    }

    /// Values as a reply shows them: every knob with the value that the request ran with; those without one are left out.
    pub fn echo(&self, values: &[KnobValue]) -> Map<String, Json> {
        let mut shown = Map::new();
        for (knob, value) in self.knobs.iter().zip(values) {
            if matches!(value, KnobValue::Text(text) if text.as_str().is_empty()) {
                continue;
            }
            let off = knob.schema.request_off.as_ref();
            let off = off.and_then(|text| knob.schema.parse(&Raw::Plain(text.clone())).ok());
            let value = match (off, value) {
                (Some(off), value) => json!(u8::from(*value != off)),
                (None, KnobValue::Bool(on)) => json!(u8::from(*on)),
                (None, KnobValue::Int(number)) => json!(number),
                (None, KnobValue::Float(bits)) => json!(f64::from_bits(*bits)),
                (None, value) => json!(text(value)),
            };
            shown.insert(knob.key.clone(), value);
        }
        shown
    }
}

/// The text of a knob that its owner parses itself; words of the schema mean the same for everybody.
pub fn own_text<'v>(schema: &KnobSchema, value: &'v KnobValue) -> Option<&'v str> {
    match value {
        KnobValue::Text(text) if schema.type_ == KnobType::Custom => {
            let text = text.as_str();
            (!text.is_empty() && !schema.words.iter().any(|word| word == text)).then_some(text)
        }
        _ => None,
    }
}

fn text(value: &KnobValue) -> String {
    match value {
        KnobValue::Bool(on) => u8::from(*on).to_string(),
        value => value.to_string(),
    }
}

fn raw(value: &Json) -> Raw {
    match value {
        Json::Null => Raw::Other("null"),
        Json::Bool(value) => Raw::Bool(*value),
        Json::Number(number) => match number.as_i64() {
            Some(whole) => Raw::Int(whole),
            None => Raw::Float(number.as_f64().unwrap_or(f64::NAN)),
        },
        Json::String(text) => Raw::Text(text.clone()),
        Json::Array(items) => {
            let item = |item: &Json| match item {
                Json::String(text) => Some(text.clone()),
                Json::Number(number) => Some(number.to_string()),
                _ => None,
            };
            let items: Option<Vec<String>> = items.iter().map(item).collect();
            items.map_or(Raw::Other("a list of other things than texts and numbers"), Raw::List)
        }
        Json::Object(_) => Raw::Other("an object"),
    }
}

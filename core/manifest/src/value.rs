//! From what people write to values.

use std::fmt::Write as _;

use plugfold_abi::{KnobValue, TextBuf};

use crate::{Expr, KnobSchema, KnobType, Names, ValueError};

/// Longest text, and most names or numbers of a list, that a value may have.
const LONGEST: usize = 4096;
const MOST: usize = 256;
/// Characters of a wrong value that a message repeats.
const SHOWN: usize = 60;

/// A value as it was written in a profile, a variable, a flag or a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Raw {
    /// `true` or `false`.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Any other number.
    Float(f64),
    /// A text that is a text: a word or a choice, no number in quotes. JSON, and TOML.
    Text(String),
    /// A text that stands for a value of any type: variables and flags know nothing else.
    Plain(String),
    /// A list; its items are texts or numbers.
    List(Vec<String>),
    /// What no knob takes (a table, null); its kind, for the message.
    Other(&'static str),
}

impl std::fmt::Display for Raw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let short = |text: &str| text.chars().take(SHOWN).collect::<String>();
        match self {
            Raw::Bool(value) => write!(f, "{value}"),
            Raw::Int(value) => write!(f, "{value}"),
            Raw::Float(value) => write!(f, "{value}"),
            Raw::Text(text) | Raw::Plain(text) => write!(f, "{:?}", short(text)),
            Raw::List(items) => write!(f, "[{}]", short(&items.join(", "))),
            Raw::Other(kind) => f.write_str(kind),
        }
    }
}

/// What a knob has while nobody sets it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Default {
    Value(KnobValue),
    Expr(Expr),
    /// Nothing: the empty text.
    Unset,
}

/// The value of a knob without a default that nobody set.
pub(crate) fn unset() -> KnobValue {
    KnobValue::text("")
}

fn list(items: impl IntoIterator<Item = impl Into<String>>) -> KnobValue {
    KnobValue::List(items.into_iter().map(|item| TextBuf::from(item.into())).collect())
}

/// One parser for all ways to say on and off.
fn on_or_off(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "on" | "yes" => Some(true),
        "0" | "false" | "off" | "no" => Some(false),
        _ => None,
    }
}

/// Whether a text is what a choice stands for; one that ends in `[:X]` may carry a number, and `NxK` is two of them.
fn is_choice(choice: &str, text: &str) -> bool {
    let number = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_digit());
    if choice == "NxK" {
        return text.split_once('x').is_some_and(|(n, k)| number(n) && number(k));
    }
    match choice.split_once("[:") {
        Some((name, _)) => {
            text == name || text.strip_prefix(name).and_then(|t| t.strip_prefix(':')).is_some_and(number)
        }
        None => choice == text,
    }
}

impl KnobSchema {
    /// Reads a value. Ranges are [`KnobSchema::check`]'s: their bounds may depend on other values.
    ///
    /// # Errors
    /// A value of another type, no choice, too long. Says what is allowed.
    pub fn parse(&self, raw: &Raw) -> Result<KnobValue, ValueError> {
        let wrong = || ValueError(format!("is {raw}; it must be {}", self.allowed(&|_: &str| None)));
        let text = match raw {
            Raw::Text(text) | Raw::Plain(text) => Some(text.trim()),
            _ => None,
        };
        if let Some(text) = text.filter(|text| text.len() > LONGEST) {
            return Err(ValueError(format!("has {} bytes; the limit is {LONGEST}", text.len())));
        }
        if let Some(value) = self.word(raw) {
            return Ok(value);
        }
        if text == Some("") && self.unset.is_some() {
            return Ok(unset());
        }
        let plain = if let Raw::Plain(_) = raw { text } else { None };
        let value = match self.type_ {
            KnobType::Bool => match raw {
                Raw::Bool(value) => Some(KnobValue::Bool(*value)),
                Raw::Int(0) => Some(KnobValue::Bool(false)),
                Raw::Int(1) => Some(KnobValue::Bool(true)),
                _ => plain.and_then(on_or_off).map(KnobValue::Bool),
            },
            KnobType::Int => match raw {
                Raw::Int(value) => Some(KnobValue::Int(*value)),
                Raw::Bool(value) => Some(KnobValue::Int(i64::from(*value))),
                _ => plain.and_then(|text| text.parse().ok()).map(KnobValue::Int),
            },
            KnobType::Float => match raw {
                Raw::Float(value) => Some(*value),
                Raw::Int(value) => Some(*value as f64),
                _ => plain.and_then(|text| text.parse().ok()),
            }
            .filter(|value| value.is_finite())
            .map(KnobValue::float),
            KnobType::Enum => self.choice(raw).map(KnobValue::text),
            KnobType::Text | KnobType::Path | KnobType::Custom => match raw {
                Raw::Text(_) | Raw::Plain(_) => text.map(KnobValue::text),
                Raw::Int(_) | Raw::Float(_) => Some(KnobValue::text(raw.to_string())),
                _ => None,
            },
            KnobType::Texts => items(raw, &[',']).filter(|items| items.len() <= MOST).map(list),
            KnobType::List => {
                let items = items(raw, &[',']);
                let known = |item: &String| self.choices.iter().any(|choice| is_choice(choice, item));
                items.filter(|items| items.len() <= MOST && items.iter().all(known)).map(list)
            }
            KnobType::Ints | KnobType::Tuple => {
                let items = items(raw, &[',', ' ', '/']).filter(|items| items.len() <= MOST);
                let fits = |items: &Vec<String>| {
                    let count = items.len();
                    self.type_ == KnobType::Ints || (self.least_places()..=self.places.len()).contains(&count)
                };
                let numbers = items.filter(fits).and_then(|items| {
                    let numbers: Option<Vec<i64>> = items.iter().map(|item| item.parse().ok()).collect();
                    numbers
                });
                numbers.map(|numbers| list(numbers.iter().map(ToString::to_string)))
            }
        };
        value.ok_or_else(wrong)
    }

    /// Places that must be given.
    pub(crate) fn least_places(&self) -> usize {
        self.places.iter().filter(|place| !place.ends_with('?')).count()
    }

    /// A word of the knob, as the value it stands for.
    fn word(&self, raw: &Raw) -> Option<KnobValue> {
        let given = match raw {
            Raw::Text(text) | Raw::Plain(text) => text.trim().to_owned(),
            Raw::Int(number) => number.to_string(),
            Raw::Bool(value) => u8::from(*value).to_string(),
            _ => return None,
        };
        let given = if given.is_empty() { "empty" } else { &given };
        let word = self.words.iter().find(|word| word.as_str() == given)?;
        let listed = matches!(self.type_, KnobType::List | KnobType::Ints | KnobType::Texts);
        Some(match word.as_str() {
            "0" | "off" | "none" if listed => list([""; 0]),
            "all" if listed => list(self.choices.iter().filter(|c| !self.not_in_all.contains(c)).cloned()),
            word if self.type_ == KnobType::Int && word.parse::<i64>().is_ok() => {
                KnobValue::Int(word.parse().unwrap_or_default())
            }
            word => KnobValue::text(word),
        })
    }

    fn choice(&self, raw: &Raw) -> Option<String> {
        let has = |text: &str| self.choices.iter().find(|choice| choice.eq_ignore_ascii_case(text)).cloned();
        let given = match raw {
            Raw::Text(text) | Raw::Plain(text) => text.trim().to_owned(),
            Raw::Int(number) => number.to_string(),
            Raw::Bool(value) => u8::from(*value).to_string(),
            _ => return None,
        };
        // `on` for a choice `1`.
        let synonym = || on_or_off(&given).and_then(|on| has(&u8::from(on).to_string()));
        has(&given).or_else(synonym)
    }

    /// Checks what depends on other values: range, step, rule.
    ///
    /// # Errors
    /// A number out of range. Says what is allowed.
    pub fn check(&self, value: &KnobValue, names: &dyn Names) -> Result<(), ValueError> {
        let numbers: Vec<f64> = match value {
            KnobValue::Int(number) => vec![*number as f64],
            KnobValue::Float(bits) => vec![f64::from_bits(*bits)],
            KnobValue::List(items) if matches!(self.type_, KnobType::Ints | KnobType::Tuple) => {
                items.iter().filter_map(|item| item.as_str().parse().ok()).collect()
            }
            _ => return Ok(()),
        };
        let further = |n: &f64| {
            let text = n.to_string();
            self.choices.contains(&text) || self.words.contains(&text)
        };
        if self.type_ == KnobType::Int && numbers.iter().all(further) {
            return Ok(());
        }
        let in_range = self.range.as_ref().is_none_or(|range| range.holds(&numbers, names));
        let stepped =
            self.step.is_none_or(|step| numbers.iter().all(|n| (*n as i64) % step.max(1) as i64 == 0));
        let power = |n: &f64| *n == 0.0 || (*n > 0.0 && (*n as u64).is_power_of_two());
        let ruled = self.rule.as_deref() != Some("power of two") || numbers.iter().all(power);
        if in_range && stepped && ruled {
            return Ok(());
        }
        Err(ValueError(format!("is {value}; it must be {}", self.allowed(names))))
    }

    /// What is allowed, in words: "a whole number from 1 to 64, or auto".
    pub fn allowed(&self, names: &dyn Names) -> String {
        let range = self.range.as_ref().map(|range| range.describe(names)).unwrap_or_default();
        let choices = self.choices.join(", ");
        let values = match self.type_ {
            KnobType::Bool => "0 or 1".to_owned(),
            KnobType::Int => format!("a whole number {range}"),
            KnobType::Float => format!("a number {range}"),
            KnobType::Enum => format!("one of {choices}"),
            KnobType::List => format!("some of {choices}, with commas between them"),
            KnobType::Ints => format!("whole numbers {range}, with commas between them"),
            KnobType::Tuple => {
                let places = self.places.join(",");
                let range = if range.is_empty() { range } else { format!(": {range}") };
                format!("{places} as whole numbers{range}")
            }
            KnobType::Text => "a text".to_owned(),
            KnobType::Texts => "texts, with commas between them".to_owned(),
            KnobType::Path => "a path".to_owned(),
            KnobType::Custom => self.form.clone().unwrap_or_else(|| "a text".to_owned()),
        };
        let mut text = values.trim_end().to_owned();
        if let Some(step) = self.step {
            let _ = write!(text, ", a multiple of {step}");
        }
        if let Some(rule) = &self.rule {
            let _ = write!(text, ", {rule}");
        }
        let further = if self.type_ == KnobType::Int { self.choices.as_slice() } else { &[] };
        let words: Vec<&str> = further.iter().chain(&self.words).map(String::as_str).collect();
        if !words.is_empty() {
            let _ = write!(text, ", or {}", words.join(", "));
        }
        text
    }

    /// What it has while nobody sets it.
    pub(crate) fn default_value(&self) -> Result<Default, String> {
        let Some(text) = &self.default else { return Ok(Default::Unset) };
        match self.parse(&Raw::Plain(text.clone())) {
            Ok(value) => Ok(Default::Value(value)),
            Err(error) if !matches!(self.type_, KnobType::Int | KnobType::Float) => {
                Err(format!("default {error}"))
            }
            Err(_) => Expr::parse(text).map(Default::Expr).map_err(|problem| format!("default {problem}")),
        }
    }

    /// The expression that gives its value while nobody sets it, where the default is no value.
    pub fn default_expr(&self) -> Option<Expr> {
        match self.default_value() {
            Ok(Default::Expr(expr)) => Some(expr),
            _ => None,
        }
    }
}

fn items(raw: &Raw, between: &[char]) -> Option<Vec<String>> {
    let parts = |text: &str| -> Vec<String> {
        let parts = text.split(between).map(str::trim).filter(|part| !part.is_empty());
        parts.map(str::to_owned).collect()
    };
    match raw {
        Raw::List(items) => Some(items.iter().map(|item| item.trim().to_owned()).collect()),
        Raw::Text(text) | Raw::Plain(text) => Some(parts(text)),
        Raw::Int(number) => Some(vec![number.to_string()]),
        _ => None,
    }
}

//! Values of knobs. Their schema is the manifest's; here is only what crosses at run time.

use serde::{Deserialize, Serialize};

use crate::{List, OpError, Slice, TextBuf};

/// A value. Floats compare and hash by their bits, so that a value can be part of a key.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KnobValue {
    /// On or off.
    Bool(bool),
    /// Whole number.
    Int(i64),
    /// Bits of an f64.
    Float(u64),
    /// Word or text.
    Text(TextBuf),
    /// Texts.
    List(List<TextBuf>),
}

impl KnobValue {
    /// A float.
    pub fn float(value: f64) -> Self {
        // Minus zero and zero are one value.
        KnobValue::Float((value + 0.0).to_bits())
    }
    /// A text.
    pub fn text(value: impl Into<String>) -> Self {
        KnobValue::Text(value.into().into())
    }
    /// Bool, or a number that is not zero.
    pub fn as_bool(&self) -> bool {
        match self {
            KnobValue::Bool(b) => *b,
            KnobValue::Int(i) => *i != 0,
            KnobValue::Float(bits) => f64::from_bits(*bits) != 0.0,
            KnobValue::Text(_) | KnobValue::List(_) => false,
        }
    }
    /// Whole number; a bool as 0 or 1.
    pub fn as_int(&self) -> Option<i64> {
        match self {
            KnobValue::Bool(b) => Some(i64::from(*b)),
            KnobValue::Int(i) => Some(*i),
            _ => None,
        }
    }
    /// Number.
    pub fn as_float(&self) -> Option<f64> {
        match self {
            KnobValue::Float(bits) => Some(f64::from_bits(*bits)),
            other => other.as_int().map(|i| i as f64),
        }
    }
    /// Text.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            KnobValue::Text(t) => Some(t.as_str()),
            _ => None,
        }
    }
}

impl std::fmt::Display for KnobValue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KnobValue::Bool(b) => write!(f, "{b}"),
            KnobValue::Int(i) => write!(f, "{i}"),
            KnobValue::Float(bits) => write!(f, "{}", f64::from_bits(*bits)),
            KnobValue::Text(t) => f.write_str(t),
            KnobValue::List(l) => {
                let words: Vec<&str> = l.iter().map(TextBuf::as_str).collect();
                f.write_str(&words.join(","))
            }
        }
    }
}

/// Number of a request knob among those of all loaded plugins: an index into a request's resolved values.
pub type KnobId = u32;

/// A knob of the plugin that is configured.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug)]
pub struct Knob {
    /// Its key.
    pub key: TextBuf,
    /// Its value at load.
    pub value: KnobValue,
    /// Its number where a request may override it.
    pub id: crate::Maybe<KnobId>,
}

/// The knobs of a plugin, its own and those of others that it extends (as `owner.key`).
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Knobs<'a> {
    /// All of them.
    pub all: Slice<'a, Knob>,
}

impl Knobs<'_> {
    /// A knob.
    ///
    /// # Errors
    /// A key that the manifest does not declare.
    pub fn get(&self, key: &str) -> Result<&Knob, OpError> {
        let found = self.all.iter().find(|k| k.key.as_str() == key);
        found.ok_or_else(|| OpError::new(format!("knob `{key}` is not in the manifest")))
    }
    fn typed<'k, T>(
        &'k self,
        key: &str,
        kind: &str,
        read: impl Fn(&'k KnobValue) -> Option<T>,
    ) -> Result<T, OpError> {
        let knob = self.get(key)?;
        read(&knob.value).ok_or_else(|| OpError::new(format!("knob `{key}` is {}, not {kind}", knob.value)))
    }
    /// A bool.
    ///
    /// # Errors
    /// As [`Knobs::get`].
    pub fn bool(&self, key: &str) -> Result<bool, OpError> {
        Ok(self.get(key)?.value.as_bool())
    }
    /// A whole number.
    ///
    /// # Errors
    /// As [`Knobs::get`], or another type.
    pub fn int(&self, key: &str) -> Result<i64, OpError> {
        self.typed(key, "a whole number", KnobValue::as_int)
    }
    /// A number.
    ///
    /// # Errors
    /// As [`Knobs::get`], or another type.
    pub fn float(&self, key: &str) -> Result<f64, OpError> {
        self.typed(key, "a number", KnobValue::as_float)
    }
    /// A text.
    ///
    /// # Errors
    /// As [`Knobs::get`], or another type.
    pub fn text(&self, key: &str) -> Result<&str, OpError> {
        self.typed(key, "a text", KnobValue::as_text)
    }
    /// The number of a request knob.
    ///
    /// # Errors
    /// As [`Knobs::get`], or a knob that is read at load only.
    pub fn id(&self, key: &str) -> Result<KnobId, OpError> {
        let none = || OpError::new(format!("knob `{key}` is read at load only"));
        self.get(key)?.id.into_option().ok_or_else(none)
    }
}

/// A request's value of a knob, or `None` where the host resolved no such knob.
pub fn value_of(values: Slice<'_, KnobValue>, id: KnobId) -> Option<&KnobValue> {
    values.get_ref().get(id as usize)
}

//! The schema of a knob: the single source of its parsing, default, help and error messages.

use serde::{Deserialize, Serialize};

use crate::{Effect, Fold, Place, Range, Scope};

/// What values a knob takes, beside its words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KnobType {
    /// On or off: `1`/`0`, `true`/`false`, `on`/`off`, `yes`/`no`.
    Bool,
    /// Whole number.
    Int,
    /// Number.
    Float,
    /// One of the choices.
    Enum,
    /// Any text.
    #[serde(alias = "string")]
    Text,
    /// Any texts, with commas between them.
    Texts,
    /// Some of the choices, with commas between them. A choice that ends in `[:X]` may carry a number.
    List,
    /// Whole numbers, with commas (or blanks) between them.
    Ints,
    /// A fixed number of whole numbers, one for each of the places; a place that ends in `?` may be left out.
    Tuple,
    /// File or folder.
    Path,
    /// A text that the plugin parses itself; `form` says what it may look like.
    Custom,
}

/// A knob, its names and where it acts.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct KnobSchema {
    /// Name inside its owner.
    pub key: String,
    /// Environment names beside `PLUGFOLD_<PLUGIN>_<KEY>`; one that ends in `*` stands for all that begin so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// What values it takes.
    #[serde(rename = "type")]
    pub type_: KnobType,
    /// Range of a number, of every number of a list, or of each place of a tuple.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<Range>,
    /// Values of an enum, names of a list, further values of an int.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<String>,
    /// Names of a list that the word `all` leaves out.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub not_in_all: Vec<String>,
    /// Places of a tuple.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub places: Vec<String>,
    /// Form of a custom text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub form: Option<String>,
    /// Only multiples of this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<u64>,
    /// A further rule: `power of two` is checked, anything else is the plugin's to check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Words accepted beside the type's own values.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub words: Vec<String>,
    /// Default: a value, a word, or an expression of limits and other knobs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default: Option<String>,
    /// Instead of a default: what happens while nobody sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unset: Option<String>,
    /// When it takes a value.
    pub scope: Scope,
    /// What it can change; see [`KnobSchema::effect`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub effect: Option<Effect>,
    /// Which ranks; see [`KnobSchema::place`].
    #[serde(rename = "where", default, skip_serializing_if = "Option::is_none")]
    pub place: Option<Place>,
    /// Fold in shared calls; see [`KnobSchema::fold`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fold: Option<Fold>,
    /// Name in a request's `tf_knobs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_key: Option<String>,
    /// A request may go down to, not above, the value at load (or may only turn it off).
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_most_loaded: bool,
    /// A request says 1 or 0 instead of a value: 1 is the value at load, or this one where that is `request_off`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_on: Option<String>,
    /// The value that a request's 0 stands for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_off: Option<String>,
    /// Its value is shown nowhere.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub secret: bool,
    /// One sentence for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub help: Option<String>,
    /// Why a request cannot set it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_only: Option<String>,
}

impl KnobSchema {
    /// What it can change. What is not declared counts as bits.
    pub fn effect(&self) -> Effect {
        self.effect.unwrap_or(Effect::Bits)
    }

    /// Which ranks it acts on; all if it does not say.
    pub fn place(&self) -> Place {
        self.place.unwrap_or(Place::All)
    }

    /// How unequal values meet in a call; they do not, if it does not say.
    pub fn fold(&self) -> Fold {
        self.fold.unwrap_or(Fold::Split)
    }

    /// Whether a request may set it.
    pub fn per_request(&self) -> bool {
        self.scope != Scope::Load
    }
}

/// What one plugin adds to a knob of another before it is validated.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct KnobExtension {
    /// `owner.key`.
    pub knob: String,
    /// Further choices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub choices: Vec<String>,
    /// Further words.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub words: Vec<String>,
    /// A range instead of the owner's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<Range>,
    /// Wider scope.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scope: Option<Scope>,
    /// Fold for the wider scope.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fold: Option<Fold>,
    /// Request name for the wider scope.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_key: Option<String>,
    /// As [`KnobSchema::at_most_loaded`].
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub at_most_loaded: bool,
    /// As [`KnobSchema::request_on`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_on: Option<String>,
    /// As [`KnobSchema::request_off`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request_off: Option<String>,
    /// What else to know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

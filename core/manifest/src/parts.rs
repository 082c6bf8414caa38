//! The tables of a manifest.

use serde::{Deserialize, Serialize};

use crate::{Bits, Need, Phase};

/// A claim on one operation.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// Operation.
    pub op: String,
    /// Phases.
    pub phases: Vec<Phase>,
    /// Bits.
    pub bits: Bits,
    /// Only for these weight formats; empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weight: Vec<String>,
    /// Only for these row formats (`latent.*` matches a family of formats); empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cache: Vec<String>,
    /// Only for this addressing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub addressing: Option<String>,
    /// The knob of this plugin behind which it stands: while that is off, it is not made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knob: Option<String>,
    /// Further conditions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<String>,
}

/// A provider that runs several consecutive operations at once.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Cover {
    /// Consecutive operations.
    pub ops: Vec<String>,
    /// Phases.
    pub phases: Vec<Phase>,
    /// Bits.
    pub bits: Bits,
    /// Only for these weight formats; empty: any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weight: Vec<String>,
    /// The knob of this plugin behind which it stands: while that is off, it is not made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knob: Option<String>,
    /// Further conditions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<String>,
}

/// An operation that a plugin adds to the table.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// Operation.
    pub op: String,
    /// Operands.
    pub what: String,
}

/// A rewriting of programs.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Pass {
    /// Name.
    pub name: String,
    /// Phases of the programs it rewrites.
    pub phases: Vec<Phase>,
    /// What it does.
    pub what: String,
}

/// An edit of the cache table.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct LayoutEdit {
    /// Which families.
    pub family: String,
    /// Which field, from what to what.
    pub edit: String,
}

/// A state part.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Name in snapshots.
    pub id: String,
    /// What it keeps.
    pub what: String,
}

/// Something with a name and a meaning: a section, rider, word, attachment or collective.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// Name.
    pub name: String,
    /// Meaning.
    pub what: String,
}

/// A field of the round table.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Field {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// One value a `row`, `seq`, `slot`, or `once`.
    pub per: String,
    /// Filled `early` (before the forward) or `late` (before sampling).
    pub when: String,
    /// Meaning.
    pub what: String,
}

/// Members that a plugin adds to a family of providers.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Family {
    /// Knob that selects.
    pub knob: String,
    /// Values its providers stand for.
    pub values: Vec<String>,
}

/// Device text in front of kernels.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Header {
    /// `weight`, `row` or `addressing`.
    pub kind: String,
    /// Format or addressing.
    pub name: String,
    /// What it can do.
    pub what: String,
}

/// A service that is offered to other plugins.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// Name.
    pub service: String,
    /// Meaning.
    pub what: String,
}

/// A service that is asked for.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Want {
    /// Name.
    pub service: String,
    /// Whether it must be there.
    pub need: Need,
    /// For what.
    pub what: String,
}

/// A limit that is raised.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Raise {
    /// Name.
    pub limit: String,
    /// To what, in words.
    pub to: String,
    /// The knob of this plugin whose value the limit is raised to at least. Expressions of other knobs that name the
    /// limit see that value before any library is configured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub knob: Option<String>,
}

/// Something chosen by its name.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct ByName {
    /// `drafter`, `transport`, ...
    pub kind: String,
    /// Its name.
    pub name: String,
}

/// Draft policy texts that a plugin understands.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Forms.
    pub forms: Vec<String>,
    /// Meaning.
    pub what: String,
}

/// A field of a request body.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct BodyField {
    /// Field.
    pub field: String,
    /// Values.
    pub what: String,
}

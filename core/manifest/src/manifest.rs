//! The manifest itself: reading, printing, what follows from it.

use serde::{Deserialize, Serialize};

use crate::{
    Bits, BodyField, ByName, Claim, Class, Cover, Definition, Effect, Family, Field, Header, KnobExtension,
    KnobSchema, LayoutEdit, ManifestError, Named, Offer, Part, Pass, Phase, Policy, Raise, Want,
};

/// Points that decide what a device does, or in which portions.
const DEVICE_POINTS: [&str; 11] = [
    "program",
    "cache.layout",
    "capture",
    "executor",
    "transport",
    "round-driver",
    "plan.spans",
    "plan.pieces",
    "plan.marks",
    "plan.place",
    "prepared-store",
];

/// What a plugin claims, needs, brings and can be set to.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
#[serde(deny_unknown_fields, default)]
pub struct Manifest {
    /// Four digits, or `base-` and a name.
    pub id: String,
    /// Short name, as `prefill-rows`; empty for `base-` plugins, whose id has it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// One line for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub title: String,
    /// Version, as `1.2.3`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub version: String,
    /// Must be loaded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub requires: Vec<String>,
    /// Comes after, if loaded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub extends: Vec<String>,
    /// Whose claims it stands above.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub over: Vec<String>,
    /// Must not be loaded.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conflicts: Vec<String>,
    /// Device classes it runs on (`cpu`, `sm_90`, `sm_*`); empty: any.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<String>,
    /// Chains, policies, observers and names it uses; operations follow from claims.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub points: Vec<String>,
    /// The knob that turns all of it off: nothing need be registered then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub off_by: Option<String>,
    /// Memory that it takes, in words; the bytes are told at the start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// Notices of others' algorithms.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notice: Option<String>,
    /// HTTP routes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<String>,
    /// Subcommands.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<String>,
    /// Operations it adds.
    #[serde(alias = "define", skip_serializing_if = "Vec::is_empty")]
    pub defines: Vec<Definition>,
    /// Operations it runs.
    #[serde(alias = "claim", skip_serializing_if = "Vec::is_empty")]
    pub claims: Vec<Claim>,
    /// Operations it runs together.
    #[serde(alias = "cover", skip_serializing_if = "Vec::is_empty")]
    pub covers: Vec<Cover>,
    /// Families it joins.
    #[serde(alias = "family", skip_serializing_if = "Vec::is_empty")]
    pub families: Vec<Family>,
    /// Passes over programs.
    #[serde(alias = "pass", skip_serializing_if = "Vec::is_empty")]
    pub passes: Vec<Pass>,
    /// Edits of the cache table.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub layout: Vec<LayoutEdit>,
    /// State parts.
    #[serde(alias = "part", skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Part>,
    /// Plan sections.
    #[serde(alias = "section", skip_serializing_if = "Vec::is_empty")]
    pub sections: Vec<Named>,
    /// Words that ride on the sampler exchange.
    #[serde(alias = "rider", skip_serializing_if = "Vec::is_empty")]
    pub riders: Vec<Named>,
    /// Round-table fields.
    #[serde(alias = "field", skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<Field>,
    /// Shape words.
    #[serde(alias = "word", skip_serializing_if = "Vec::is_empty")]
    pub words: Vec<Named>,
    /// Device headers.
    #[serde(alias = "header", skip_serializing_if = "Vec::is_empty")]
    pub headers: Vec<Header>,
    /// What its requests carry to all ranks.
    #[serde(alias = "attachment", skip_serializing_if = "Vec::is_empty")]
    pub attachments: Vec<Named>,
    /// Services offered.
    #[serde(alias = "offer", skip_serializing_if = "Vec::is_empty")]
    pub offers: Vec<Offer>,
    /// Services wanted.
    #[serde(alias = "want", skip_serializing_if = "Vec::is_empty")]
    pub wants: Vec<Want>,
    /// Limits raised.
    #[serde(alias = "raise", skip_serializing_if = "Vec::is_empty")]
    pub raises: Vec<Raise>,
    /// What it brings by name.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub by_name: Vec<ByName>,
    /// Draft policy forms.
    #[serde(alias = "policy", skip_serializing_if = "Vec::is_empty")]
    pub policies: Vec<Policy>,
    /// Fields of request bodies that it reads.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub body: Vec<BodyField>,
    /// Collectives of its observers.
    #[serde(alias = "collective", skip_serializing_if = "Vec::is_empty")]
    pub collectives: Vec<Named>,
    /// Knobs it owns.
    #[serde(alias = "knob", skip_serializing_if = "Vec::is_empty")]
    pub knobs: Vec<KnobSchema>,
    /// Knobs of others that it extends.
    #[serde(alias = "extend", skip_serializing_if = "Vec::is_empty")]
    pub extends_knobs: Vec<KnobExtension>,
}

impl Manifest {
    /// Reads and checks a manifest; `place` is its file (or library), for messages.
    ///
    /// # Errors
    /// Text that is not TOML, unknown or missing fields, and everything that [`Manifest::problems`] finds.
    pub fn parse(text: &str, place: &str) -> Result<Self, ManifestError> {
        let manifest = Self::read(text, place)?;
        let problems = manifest.problems();
        if problems.is_empty() {
            return Ok(manifest);
        }
        Err(ManifestError { place: format!("{place} ({})", manifest.label()), problems })
    }

    /// Reads a manifest without checking what it says.
    ///
    /// # Errors
    /// Text that is not TOML, unknown fields, values of the wrong type.
    pub fn read(text: &str, place: &str) -> Result<Self, ManifestError> {
        toml::from_str(text).map_err(|error| crate::check::explain(&error, text, place))
    }

    /// The manifest as TOML; [`Manifest::read`] gives it back.
    ///
    /// # Errors
    /// None that a manifest of readable parts can have.
    pub fn print(&self) -> Result<String, ManifestError> {
        toml::to_string(self)
            .map_err(|error| ManifestError { place: self.label(), problems: vec![error.to_string()] })
    }

    /// Everything that is wrong with it by itself.
    pub fn problems(&self) -> Vec<String> {
        crate::check::problems(self)
    }

    /// Id and name as people write them and folders are called: `0003-prefill-rows`, `base-mtp`.
    pub fn label(&self) -> String {
        if self.name.is_empty() { self.id.clone() } else { format!("{}-{}", self.id, self.name) }
    }

    /// Whether a name in a profile means this plugin: its id or its label.
    pub fn is_called(&self, name: &str) -> bool {
        name == self.id || name == self.label()
    }

    /// The stem of its library's file, without `lib` and the ending: `plugfold_0003_prefill_rows`.
    pub fn library(&self) -> String {
        format!("plugfold_{}", self.label().replace('-', "_"))
    }

    /// What users may expect of it: the strongest of its claims, and of what its points and knobs can change. Bits of its
    /// own in the draft phase alone change proposals, never replies.
    pub fn class(&self) -> Class {
        self.class_with(|_| true)
    }

    /// The class in force: without the claims and effects of knobs that are off.
    pub fn class_with(&self, on: impl Fn(&str) -> bool) -> Class {
        let stands = |knob: &Option<String>| knob.as_deref().is_none_or(&on);
        let claims = self.claims.iter().filter(|c| stands(&c.knob)).map(|c| (&c.bits, &c.phases));
        let covers = self.covers.iter().filter(|c| stands(&c.knob)).map(|c| (&c.bits, &c.phases));
        let claims = claims.chain(covers).map(|(bits, phases)| match (bits, phases.as_slice()) {
            (_, [Phase::D]) => Class::DraftsOnly,
            (Bits::Own(_), _) => Class::NewArithmetic,
            (Bits::Of(_), _) => Class::SameBits,
        });
        let points = self.points.iter().map(|point| match point.as_str() {
            "drafter" | "draft" | "drafts" => Class::DraftsOnly,
            point if DEVICE_POINTS.contains(&point) => Class::SameBits,
            _ => Class::HostOnly,
        });
        let knobs = self.knobs.iter().filter(|knob| on(&knob.key)).map(|knob| match knob.effect() {
            Effect::Bits => Class::NewArithmetic,
            Effect::Schedule => Class::SameBits,
            Effect::Drafts => Class::DraftsOnly,
            Effect::Speed | Effect::Host => Class::HostOnly,
        });
        claims.chain(points).chain(knobs).max().unwrap_or(Class::HostOnly)
    }

    /// A knob by its key.
    pub fn knob(&self, key: &str) -> Option<&KnobSchema> {
        self.knobs.iter().find(|knob| knob.key == key)
    }
}

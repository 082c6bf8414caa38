//! The map of the catalogue onto the hook points (`docs/hooks.toml`): reading it, checking it, printing it.
//!
//! Everything that later compares a plugin's manifest with the map starts at [`expect`].

mod check;
mod page;
mod points;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::OnceLock;

use serde::Deserialize;

pub use check::{catalogue_problems, problems, table_operations};
pub use page::{aliases_page, hooks_page};
pub use points::{Kind, POINTS, Point};

/// Why the map cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MapError {
    /// Not TOML, or a field of an unknown name or type.
    #[error("docs/hooks.toml: {0}")]
    Format(#[from] toml::de::Error),
    /// The file itself.
    #[error("{path}: {source}")]
    File {
        /// Which file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Phase of a forward in which a claim holds.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Window: decode and verify.
    W,
    /// Draft.
    D,
    /// Prefill.
    P,
}

/// Whose bits a claim gives.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(try_from = "String")]
pub enum Bits {
    /// An arithmetic of its own.
    Own(String),
    /// Proven equal to the named one; `ref` is the reference.
    Of(String),
}

impl TryFrom<String> for Bits {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let inner = |prefix: &str| {
            text.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(')')).filter(|name| !name.is_empty())
        };
        if let Some(name) = inner("own(") {
            Ok(Bits::Own(name.to_owned()))
        } else if let Some(name) = inner("of(") {
            Ok(Bits::Of(name.to_owned()))
        } else {
            Err(format!("bits `{text}`: write own(name) or of(name)"))
        }
    }
}

impl std::fmt::Display for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bits::Own(name) => write!(f, "own `{name}`"),
            Bits::Of(name) => write!(f, "of `{name}`"),
        }
    }
}

/// The class shown to users.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// No token and no device work changes.
    HostOnly,
    /// Proposals change, replies do not.
    DraftsOnly,
    /// Proven equal.
    SameBits,
    /// Replies may differ.
    NewArithmetic,
}

/// When a knob takes a value.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Scope {
    /// Read once at start.
    Load,
    /// Default at start, a request may override it.
    Both,
    /// In a request only.
    Request,
}

/// What a knob can change. Undeclared would mean bits; the map must declare it.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Effect {
    /// Tokens.
    Bits,
    /// Collectives, chunks, rounds.
    Schedule,
    /// Proposals.
    Drafts,
    /// Time only.
    Speed,
    /// The host only.
    Host,
}

/// On which ranks a knob acts.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Place {
    /// All.
    All,
    /// Rank 0; the effect travels in the plan.
    Rank0,
}

/// How unequal request values meet in one call.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Fold {
    /// A decision of each sequence.
    Own,
    /// On if on for all.
    All,
    /// On if on for any.
    Any,
    /// The least.
    Min,
    /// The most.
    Max,
    /// Unequal rows never share a call.
    Split,
}

/// A knob, its names and where it acts.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Knob {
    /// Name inside its owner.
    pub key: String,
    /// Environment names, original ones included.
    #[serde(default)]
    pub env: Vec<String>,
    /// `bool`, `int`, `float`, `enum`, `list`, `ints`, `tuple`, `path` or `string`.
    #[serde(rename = "type")]
    pub type_: String,
    /// Range of numbers, or of each place of a tuple.
    pub range: Option<String>,
    /// Values of an enum, names of a list.
    #[serde(default)]
    pub choices: Vec<String>,
    /// Names of a list that `all` leaves out.
    #[serde(default)]
    pub not_in_all: Vec<String>,
    /// Places of a tuple.
    #[serde(default)]
    pub places: Vec<String>,
    /// Form of a text that the owner parses.
    pub form: Option<String>,
    /// Only multiples of this.
    pub step: Option<u64>,
    /// A further rule in words.
    pub rule: Option<String>,
    /// Words accepted beside the type's own values.
    #[serde(default)]
    pub words: Vec<String>,
    /// Default, or what it is derived from.
    pub default: String,
    /// When it takes a value.
    pub scope: Scope,
    /// What it can change.
    pub effect: Option<Effect>,
    /// Which ranks.
    #[serde(rename = "where")]
    pub place: Option<Place>,
    /// Fold in shared calls.
    pub fold: Option<Fold>,
    /// Name in a request's `tf_knobs`.
    pub request_key: Option<String>,
}

/// What one plugin adds to a knob of another before it is validated.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct KnobExtension {
    /// `owner.key`.
    pub knob: String,
    /// Further choices.
    #[serde(default)]
    pub choices: Vec<String>,
    /// Further words.
    #[serde(default)]
    pub words: Vec<String>,
    /// Wider scope.
    pub scope: Option<Scope>,
    /// Fold for the wider scope.
    pub fold: Option<Fold>,
    /// Request name for the wider scope.
    pub request_key: Option<String>,
    /// What else to know.
    pub note: Option<String>,
}

/// A claim on one operation.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Claim {
    /// Operation.
    pub op: String,
    /// Phases.
    pub phases: Vec<Phase>,
    /// Bits.
    pub bits: Bits,
    /// Only for these weight formats; empty: any.
    #[serde(default)]
    pub weight: Vec<String>,
    /// Only for these row formats (`latent.*` matches a family of formats); empty: any.
    #[serde(default)]
    pub cache: Vec<String>,
    /// Only for this addressing.
    pub addressing: Option<String>,
    /// Further conditions.
    pub when: Option<String>,
}

/// A provider that runs several consecutive operations at once.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Cover {
    /// Consecutive operations.
    pub ops: Vec<String>,
    /// Phases.
    pub phases: Vec<Phase>,
    /// Bits.
    pub bits: Bits,
    /// Only for these weight formats; empty: any.
    #[serde(default)]
    pub weight: Vec<String>,
    /// Further conditions.
    pub when: Option<String>,
}

/// An operation that a plugin adds to the table.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Definition {
    /// Operation.
    pub op: String,
    /// Operands.
    pub what: String,
}

/// A rewriting of programs.
#[derive(Clone, Debug, Deserialize, PartialEq)]
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
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct LayoutEdit {
    /// Which families.
    pub family: String,
    /// Which field, from what to what.
    pub edit: String,
}

/// A state part.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// Name in snapshots.
    pub id: String,
    /// What it keeps.
    pub what: String,
}

/// Something with a name and a meaning: a section, rider, word, attachment or collective.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Named {
    /// Name.
    pub name: String,
    /// Meaning.
    pub what: String,
}

/// A field of the round table.
#[derive(Clone, Debug, Deserialize, PartialEq)]
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
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Family {
    /// Knob that selects.
    pub knob: String,
    /// Values its providers stand for.
    pub values: Vec<String>,
}

/// Device text in front of kernels.
#[derive(Clone, Debug, Deserialize, PartialEq)]
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
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Offer {
    /// Name.
    pub service: String,
    /// Meaning.
    pub what: String,
}

/// Whether a service must be there.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Need {
    /// The start is refused without it.
    Required,
    /// Works without.
    Optional,
}

/// A service that is asked for.
#[derive(Clone, Debug, Deserialize, PartialEq)]
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
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Raise {
    /// Name.
    pub limit: String,
    /// To what.
    pub to: String,
}

/// Something chosen by its name.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct ByName {
    /// `drafter`, `transport`, ...
    pub kind: String,
    /// Its name.
    pub name: String,
}

/// Draft policy texts that a plugin understands.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    /// Forms.
    pub forms: Vec<String>,
    /// Meaning.
    pub what: String,
}

/// A field of a request body.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct BodyField {
    /// Field.
    pub field: String,
    /// Values.
    pub what: String,
}

/// What one entry, or one base plugin, uses and needs.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Four digits, or a base's name.
    pub id: String,
    /// Name; bases have a title instead.
    #[serde(default)]
    pub name: String,
    /// Title of a base.
    #[serde(default)]
    pub title: String,
    /// Class; none for a base.
    pub class: Option<Class>,
    /// Why a claim is stronger than the class that users see.
    pub class_why: Option<String>,
    /// What became of it in the project it comes from.
    #[serde(default)]
    pub status: String,
    /// Must be loaded.
    #[serde(default)]
    pub requires: Vec<String>,
    /// Comes after, if loaded.
    #[serde(default)]
    pub extends: Vec<String>,
    /// Whose claims it stands above.
    #[serde(default)]
    pub over: Vec<String>,
    /// Must not be loaded.
    #[serde(default)]
    pub conflicts: Vec<String>,
    /// Chains, policies, observers and names it uses; operations follow from claims.
    #[serde(default)]
    pub points: Vec<String>,
    /// Operations it adds.
    #[serde(default)]
    pub defines: Vec<Definition>,
    /// Operations it runs.
    #[serde(default)]
    pub claims: Vec<Claim>,
    /// Operations it runs together.
    #[serde(default)]
    pub covers: Vec<Cover>,
    /// Families it joins.
    #[serde(default)]
    pub families: Vec<Family>,
    /// Passes over programs.
    #[serde(default)]
    pub passes: Vec<Pass>,
    /// Edits of the cache table.
    #[serde(default)]
    pub layout: Vec<LayoutEdit>,
    /// State parts.
    #[serde(default)]
    pub parts: Vec<Part>,
    /// Plan sections.
    #[serde(default)]
    pub sections: Vec<Named>,
    /// Words that ride on the sampler exchange.
    #[serde(default)]
    pub riders: Vec<Named>,
    /// Round-table fields.
    #[serde(default)]
    pub fields: Vec<Field>,
    /// Shape words.
    #[serde(default)]
    pub words: Vec<Named>,
    /// Device headers.
    #[serde(default)]
    pub headers: Vec<Header>,
    /// What its requests carry to all ranks.
    #[serde(default)]
    pub attachments: Vec<Named>,
    /// Services offered.
    #[serde(default)]
    pub offers: Vec<Offer>,
    /// Services wanted.
    #[serde(default)]
    pub wants: Vec<Want>,
    /// Limits raised.
    #[serde(default)]
    pub raises: Vec<Raise>,
    /// What it brings by name.
    #[serde(default)]
    pub by_name: Vec<ByName>,
    /// Draft policy forms.
    #[serde(default)]
    pub policies: Vec<Policy>,
    /// Body fields.
    #[serde(default)]
    pub body: Vec<BodyField>,
    /// Collectives of its observers.
    #[serde(default)]
    pub collectives: Vec<Named>,
    /// Knobs it owns.
    #[serde(default)]
    pub knobs: Vec<Knob>,
    /// Knobs of others that it extends.
    #[serde(default)]
    pub extends_knobs: Vec<KnobExtension>,
    /// HTTP routes.
    #[serde(default)]
    pub routes: Vec<String>,
    /// Subcommands.
    #[serde(default)]
    pub commands: Vec<String>,
    /// How it uses the points, and why it fits.
    pub uses: String,
    /// Which holes of the boundary it needs filled.
    #[serde(default)]
    pub holes: Vec<String>,
}

/// Something that the boundary cannot express yet.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Hole {
    /// Short name.
    pub id: String,
    /// Title.
    pub title: String,
    /// Types, methods and fields that are missing.
    pub need: String,
}

/// The whole map.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Map {
    /// Entries of the catalogue.
    #[serde(rename = "entry")]
    pub entries: Vec<Entry>,
    /// What they build on.
    #[serde(rename = "base")]
    pub bases: Vec<Entry>,
    /// Holes, most important first.
    #[serde(rename = "hole")]
    pub holes: Vec<Hole>,
}

/// The map's text as it was when the tests were built.
pub const TEXT: &str = include_str!("../../docs/hooks.toml");

impl Map {
    /// Reads a map.
    ///
    /// # Errors
    /// Not TOML, an unknown field, or a value of the wrong type; says where.
    pub fn parse(text: &str) -> Result<Self, MapError> {
        Ok(toml::from_str(text)?)
    }

    /// Entries, then bases.
    pub fn all(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().chain(&self.bases)
    }

    /// An entry or base by id.
    pub fn get(&self, id: &str) -> Option<&Entry> {
        self.all().find(|entry| entry.id == id)
    }

    /// Environment name to `owner.key`. Names that end in `*` stand for all that begin so and have no own line.
    pub fn aliases(&self) -> BTreeMap<String, String> {
        let mut aliases = BTreeMap::new();
        for entry in self.all() {
            for knob in &entry.knobs {
                for env in &knob.env {
                    aliases.insert(env.clone(), format!("{}.{}", entry.id, knob.key));
                }
            }
        }
        aliases
    }
}

impl Entry {
    /// The strongest class of its claims and knobs; a plugin's manifest must show the same.
    ///
    /// Own bits in draft phase alone change proposals, never replies.
    pub fn claimed_class(&self) -> Class {
        let claims = self.claims.iter().map(|claim| (&claim.bits, &claim.phases));
        let covers = self.covers.iter().map(|cover| (&cover.bits, &cover.phases));
        claims
            .chain(covers)
            .map(|(bits, phases)| match (bits, phases.as_slice()) {
                (_, [Phase::D]) => Class::DraftsOnly,
                (Bits::Own(_), _) => Class::NewArithmetic,
                (Bits::Of(_), _) => Class::SameBits,
            })
            .max()
            .unwrap_or(Class::HostOnly)
    }
}

/// The map of this checkout.
///
/// # Panics
/// When `docs/hooks.toml` cannot be read; the message says where.
pub fn map() -> &'static Map {
    static MAP: OnceLock<Map> = OnceLock::new();
    MAP.get_or_init(|| Map::parse(TEXT).unwrap_or_else(|error| panic!("{error}")))
}

/// What the map says about a plugin: the facts its manifest is compared with.
///
/// # Panics
/// When the map has no such entry.
pub fn expect(id: &str) -> &'static Entry {
    map()
        .get(id)
        .unwrap_or_else(|| panic!("docs/hooks.toml has no entry `{id}`; add one or correct the plugin's id"))
}

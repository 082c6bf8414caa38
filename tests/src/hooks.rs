//! The map of the catalogue onto the hook points (`docs/hooks.toml`): reading it, checking it, printing it.
//!
//! Everything that later compares a plugin's manifest with the map starts at [`expect`].

mod check;
mod page;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::OnceLock;

use serde::Deserialize;

pub use check::{catalogue_problems, problems, table_operations};
pub use page::{catalogue_page, hooks_page};
use plugfold_manifest::Manifest;
pub use plugfold_manifest::{
    Bits, Class, Effect, Fold, Kind, KnobSchema as Knob, KnobType, Need, POINTS, Phase, Place, Point, Scope,
};

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

/// What one entry, or one base plugin, uses and needs: its manifest, and what only the map says.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(try_from = "toml::Table")]
pub struct Entry {
    /// What a plugin's manifest has to agree with. Bases have a title instead of a name, entries have no title.
    pub manifest: Manifest,
    /// Class; none for a base.
    pub class: Option<Class>,
    /// Why a claim is stronger than the class that users see.
    pub class_why: Option<String>,
    /// What became of it in the project it comes from.
    pub status: String,
    /// The server does it for every deployment: there is no plugin of it.
    pub in_server: bool,
    /// When a shell profile switches it on; without it: when its first knob is not off.
    pub switch: Option<String>,
    /// How it uses the points, and why it fits.
    pub uses: String,
    /// Which holes of the boundary it needs filled.
    pub holes: Vec<String>,
}

/// What an entry says beside its manifest.
#[derive(Deserialize)]
struct Notes {
    class: Option<Class>,
    class_why: Option<String>,
    #[serde(default)]
    status: String,
    #[serde(default)]
    in_server: bool,
    switch: Option<String>,
    uses: String,
    #[serde(default)]
    holes: Vec<String>,
}

impl TryFrom<toml::Table> for Entry {
    type Error = toml::de::Error;
    fn try_from(table: toml::Table) -> Result<Self, toml::de::Error> {
        let notes = ["class", "class_why", "status", "in_server", "switch", "uses", "holes"];
        let is_note = |key: &str| notes.contains(&key);
        let (notes, facts): (toml::Table, toml::Table) = table.into_iter().partition(|(key, _)| is_note(key));
        // Facts first: a misspelt note is an unknown field there.
        let manifest = Manifest::deserialize(toml::Value::Table(facts))?;
        let Notes { class, class_why, status, in_server, switch, uses, holes } =
            Notes::deserialize(toml::Value::Table(notes))?;
        Ok(Self { manifest, class, class_why, status, in_server, switch, uses, holes })
    }
}

impl std::ops::Deref for Entry {
    type Target = Manifest;
    fn deref(&self) -> &Manifest {
        &self.manifest
    }
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

/// An entry that was walked through the points on paper, where building it would prove nothing more.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Paper {
    /// The entry.
    pub id: String,
    /// Title.
    pub title: String,
    /// Step by step, which points it uses.
    pub text: String,
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
    /// Entries that were walked through on paper.
    #[serde(rename = "paper", default)]
    pub papers: Vec<Paper>,
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

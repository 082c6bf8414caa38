//! What is known of every plugin of the catalogue, whether it is loaded, built or only planned: its names, for messages
//! and for importing shell profiles. Written from `docs/hooks.toml`.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use plugfold_manifest::env_name;
use serde::Deserialize;

/// The catalogue's names.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Catalogue {
    /// Environment name to `owner.key`. Names that end in `*` stand for all that begin so and have no own entry.
    pub aliases: BTreeMap<String, String>,
    /// Request key to `owner.key`.
    pub requests: BTreeMap<String, String>,
    /// Owner to its names and its switch.
    pub owners: BTreeMap<String, Known>,
}

/// What is known of a plugin.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Known {
    /// Name, as `prefill-rows`; empty for `base-` plugins and owners that are no plugins.
    pub name: String,
    /// Whether the project that it comes from runs it: `on`, `batch-only`, `opt-in`, `tool`, `rejected`, `superseded`.
    pub status: String,
    /// The server does it for every deployment: there is no plugin of it.
    pub in_server: bool,
    /// Must be loaded with it.
    pub requires: Vec<String>,
    /// `owner.key=value` for values that it adds to other plugins' knobs.
    pub adds: Vec<String>,
    /// Condition under which a shell profile switches it on: `owner.key`, a key of its own, perhaps with `=value,value`.
    pub switch: Option<String>,
    /// What the switch has where the profile says nothing.
    pub default: String,
    /// Keys of its knobs.
    pub keys: Vec<String>,
}

/// The catalogue of this program.
pub fn catalogue() -> &'static Catalogue {
    static CATALOGUE: OnceLock<Catalogue> = OnceLock::new();
    CATALOGUE.get_or_init(|| {
        // A test reads the same text; a catalogue without names only makes messages poorer.
        toml::from_str(include_str!("../../assets/catalogue.toml")).unwrap_or_default()
    })
}

impl Catalogue {
    /// `owner`, `key` of an environment name: an alias, or the name made from owner and key.
    pub fn by_env(&self, name: &str) -> Option<(String, String)> {
        let split =
            |path: &String| path.split_once('.').map(|(owner, key)| (owner.to_owned(), key.to_owned()));
        if let Some(path) = self.aliases.get(name) {
            return split(path);
        }
        let family = |alias: &String| alias.strip_suffix('*').is_some_and(|start| name.starts_with(start));
        if let Some((_, path)) = self.aliases.iter().find(|(alias, _)| family(alias)) {
            return split(path);
        }
        let named = |(owner, known): (&String, &Known)| {
            let key = known.keys.iter().find(|key| env_name(owner, key) == name)?;
            Some((owner.clone(), key.clone()))
        };
        self.owners.iter().find_map(named)
    }

    /// `owner`, `key` of a request key, or of a key that is set at load only.
    pub fn by_request(&self, name: &str) -> Option<(&str, &str)> {
        self.requests.get(name).and_then(|path| path.split_once('.'))
    }

    /// The id of an owner that is called by its id or label.
    pub fn owner(&self, name: &str) -> Option<&str> {
        let is = |(id, known): &(&String, &Known)| id.as_str() == name || label(id, known) == name;
        self.owners.iter().find(is).map(|(id, _)| id.as_str())
    }

    /// `0003-prefill-rows`; the id itself where nothing more is known.
    pub fn label(&self, id: &str) -> String {
        self.owners.get(id).map_or_else(|| id.to_owned(), |known| label(id, known))
    }
}

fn label(id: &str, known: &Known) -> String {
    if known.name.is_empty() { id.to_owned() } else { format!("{id}-{}", known.name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_found() {
        let read: Catalogue = toml::from_str(include_str!("../../assets/catalogue.toml")).unwrap();
        assert!(read.owners.len() > 84 && read.aliases.len() > 250);
        let path = |owner: &str, key: &str| Some((owner.to_owned(), key.to_owned()));
        assert_eq!(read.by_env("GLM53_TF_BATCH"), path("engine", "slots"));
        assert_eq!(read.by_env("PLUGFOLD_0240_KDA_BV"), path("0240", "kda_bv"));
        assert_eq!(read.by_env("NCCL_DEBUG"), path("base-nccl", "env"));
        assert_eq!(read.by_env("NCCL_IB_HCA"), path("base-nccl", "ib_hca"));
        assert_eq!(read.by_env("GLM53_TF_LOOKUPS"), None);
        assert_eq!(read.by_request("b12x"), Some(("0240", "bits")));
        assert_eq!(
            (read.owner("0003-prefill-rows"), read.owner("base-mtp")),
            (Some("0003"), Some("base-mtp"))
        );
        assert_eq!(read.label("0003"), "0003-prefill-rows");
    }
}

//! Plugins of the catalogue that are manifests and nothing else, for what is decided before a library is loaded.

use plugfold::config::ConfigError;
use plugfold::knobs::{Asked, Resolved, Sources};
use plugfold_manifest::Manifest;

use crate::hooks::expect;

/// The manifests that plugins of these ids have to agree with.
pub fn manifests(ids: &[&str]) -> Vec<Manifest> {
    let manifest = |id: &&str| Manifest { version: "1.0.0".into(), ..expect(id).manifest.clone() };
    ids.iter().map(manifest).collect()
}

/// Settings with these plugins: the text of a profile, variables, `--set` texts.
///
/// # Errors
/// What a start with them is refused for.
///
/// # Panics
/// When the profile cannot be written.
pub fn resolve(
    plugins: &[&str],
    profile: &str,
    variables: &[(&str, &str)],
    sets: &[&str],
) -> Result<Resolved, ConfigError> {
    let folder = tempfile::tempdir().unwrap_or_else(|error| panic!("a folder for a profile: {error}"));
    let file = folder.path().join("profile.toml");
    std::fs::write(&file, profile).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    let sets: Vec<String> = sets.iter().map(|text| (*text).to_owned()).collect();
    let sources = Sources::read(&Asked {
        profile: file.to_str(),
        environment: variables.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect(),
        sets: &sets,
        ..Asked::default()
    })?;
    Resolved::new(&sources, manifests(plugins))
}

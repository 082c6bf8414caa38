//! Manifests of the program's own settings.

use plugfold_manifest::{KnobSchema, Manifest};
use serde::Deserialize;

use crate::config::ConfigError;
use crate::http::limits::Limits;

/// Owners whose knobs are keys at the top of a profile, in the order in which a name is looked for.
pub const SETTINGS_OWNERS: [&str; 2] = ["server", "engine"];
/// Owner of the bounds on what clients can make the server hold.
pub(super) const LIMITS_OWNER: &str = "limits";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    owner: Vec<Manifest>,
}

/// The manifests of the owners that are always there.
///
/// # Errors
/// None, while `assets/settings.toml` is right (a test holds that).
pub fn manifests() -> Result<Vec<Manifest>, ConfigError> {
    let wrong =
        |error: &dyn std::fmt::Display| ConfigError::Wrong(format!("the program's own settings: {error}"));
    let file: File = toml::from_str(include_str!("../../assets/settings.toml")).map_err(|e| wrong(&e))?;
    let mut owners = file.owner;
    for owner in &mut owners {
        for knob in &mut owner.knobs {
            knob.env.insert(0, format!("PLUGFOLD_{}", knob.key.to_ascii_uppercase()));
        }
    }
    owners.push(limits().map_err(|e| wrong(&e))?);
    Ok(owners)
}

/// The bounds, from their defaults: whole numbers and seconds, none below zero.
fn limits() -> Result<Manifest, toml::de::Error> {
    let defaults = serde_json::to_value(Limits::default()).unwrap_or_default();
    let mut knobs: Vec<KnobSchema> = Vec::new();
    for (key, default) in defaults.as_object().into_iter().flatten() {
        let kind = if default.is_f64() { "float" } else { "int" };
        knobs.push(toml::from_str(&format!(
            "key = {key:?}\ntype = {kind:?}\nrange = \"0..\"\ndefault = \"{default}\"\nscope = \"load\"\neffect = \"host\"\n\
             where = \"rank0\"\n"
        ))?);
    }
    let title = "Bounds on what clients can make the server hold".to_owned();
    Ok(Manifest { id: LIMITS_OWNER.to_owned(), title, knobs, ..Manifest::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_manifest::Loaded;

    #[test]
    fn the_own_settings_are_sound() {
        let owners = manifests().unwrap();
        assert_eq!(owners.iter().map(|o| o.id.as_str()).collect::<Vec<_>>(), ["engine", "server", "limits"]);
        for owner in &owners {
            let problems = owner.problems();
            // They are no plugins: no id of four digits, no name, no version.
            let problems: Vec<_> = problems.iter().filter(|p| p.starts_with("knob")).collect();
            assert!(problems.is_empty(), "{}: {problems:?}", owner.id);
            for knob in &owner.knobs {
                assert!(knob.effect.is_some() && knob.place.is_some(), "{}", knob.key);
            }
        }
        Loaded::new(owners).unwrap();
    }
}

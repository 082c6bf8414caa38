//! Shell profiles: which knobs their names stand for, which plugins they switch on, and the profile that says the same.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use plugfold_abi::KnobValue;
use plugfold_manifest::{Loaded, Raw, did_you_mean};

use super::EnvFile;
use super::builtin::{SETTINGS_OWNERS, manifests};
use super::catalogue::{Catalogue, Known, catalogue};
use super::profile::Profile;
use super::sources::{Given, Origin, Target};
use crate::config::ConfigError;

/// Values that mean "not used".
const OFF: [&str; 7] = ["", "0", "off", "none", "false", "no", "unset"];
/// Owners in the catalogue that are no plugins.
const NO_PLUGINS: [&str; 3] = ["engine", "server", "launch"];

/// Why a shell profile cannot be imported.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}: {}", .problems.join("; "))]
pub struct ImportError {
    /// The file.
    pub name: String,
    /// Everything that is wrong.
    pub problems: Vec<String>,
}

/// What a shell profile says in the words of this program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Import {
    /// Plugins that it switches on and that are here, by label, in order.
    pub plugins: Vec<String>,
    /// Plugins that it switches on and that are not here.
    pub missing: Vec<String>,
    /// What it switches on and the server does without a plugin.
    pub in_server: Vec<String>,
    /// The profile, TOML.
    pub text: String,
}

/// What the program that reads shell profiles takes where one says nothing, and this one does not.
const OTHER_DEFAULTS: [(&str, &str); 2] = [("GLM53_TF_BATCH", "1"), ("GLM53_TF_EFFORT_FIELD", "0")];

/// One assignment.
struct Said<'f> {
    name: &'f str,
    value: &'f str,
    /// `None`: the file does not say it, its reader takes it.
    line: Option<usize>,
    owner: String,
    key: String,
}

impl Import {
    /// Translates a shell profile; `name` is its file, `here` says whether a plugin (by id) can be loaded.
    ///
    /// # Errors
    /// Names that nobody knows, and values that the program's own settings do not take.
    pub fn new(file: &EnvFile, name: &str, here: &dyn Fn(&str) -> bool) -> Result<Self, ImportError> {
        let failed = |problems| ImportError { name: name.to_owned(), problems };
        let own = own().map_err(|error| failed(vec![error.to_string()]))?;
        let here = &|id: &str| here(id) && !in_server(id);
        let said = said(file, &own, here).map_err(failed)?;
        let (done, on): (Vec<&str>, Vec<&str>) =
            switched_on(catalogue(), &said).into_iter().partition(|id| in_server(id));
        let (plugins, missing): (Vec<&str>, Vec<&str>) = on.into_iter().partition(|id| here(id));
        let label = |ids: Vec<&str>| ids.into_iter().map(|id| catalogue().label(id)).collect::<Vec<_>>();
        let (plugins, missing, in_server) = (label(plugins), label(missing), label(done));
        let text = print(name, &said, &own, &plugins, &missing).map_err(failed)?;
        Ok(Self { plugins, missing, in_server, text })
    }
}

/// Whether the server does what a plugin of the catalogue does.
fn in_server(id: &str) -> bool {
    catalogue().owners.get(id).is_some_and(|known| known.in_server)
}

/// The program's own settings.
fn own() -> Result<Loaded, ConfigError> {
    Loaded::new(manifests()?).map_err(|error| ConfigError::Wrong(error.to_string()))
}

/// Whose knob a name is.
fn owner_of(name: &str, own: &Loaded, here: &dyn Fn(&str) -> bool) -> Option<(String, String)> {
    let catalogued = catalogue().by_env(name);
    if catalogued.as_ref().is_some_and(|(owner, _)| here(owner)) {
        return catalogued;
    }
    let built_in = own.knobs().iter().find(|knob| knob.env().iter().any(|env| env == name));
    built_in.map(|knob| (knob.owner.clone(), knob.schema.key.clone())).or(catalogued)
}

fn said<'f>(
    file: &'f EnvFile,
    own: &Loaded,
    here: &dyn Fn(&str) -> bool,
) -> Result<Vec<Said<'f>>, Vec<String>> {
    let mut said = Vec::new();
    let mut problems = Vec::new();
    for (name, value, line) in &file.values {
        if let Some((owner, key)) = owner_of(name, own, here) {
            said.push(Said { name, value, line: Some(*line), owner, key });
        } else {
            let mend = did_you_mean(name, catalogue().aliases.keys().map(String::as_str));
            problems.push(format!("line {line}: nobody knows `{name}`; {mend}"));
        }
    }
    for (name, value) in OTHER_DEFAULTS {
        if file.get(name).is_none()
            && let Some((owner, key)) = owner_of(name, own, here)
        {
            said.retain(|one| one.name != name);
            said.push(Said { name, value, line: None, owner, key });
        }
    }
    if problems.is_empty() { Ok(said) } else { Err(problems) }
}

/// Ids of the plugins that a profile switches on: base plugins first, then by number.
fn switched_on<'c>(catalogue: &'c Catalogue, said: &[Said<'_>]) -> Vec<&'c str> {
    let value = |owner: &str, key: &str| {
        let found = said.iter().find(|said| said.owner == owner && said.key == key);
        found.map(|said| said.value)
    };
    let slots = value("engine", "slots").and_then(|slots| slots.parse::<u32>().ok()).unwrap_or(1);
    let is_off = |value: &str| OFF.contains(&value.trim().to_ascii_lowercase().as_str());
    let wanted = |id: &str, known: &Known| {
        let asked_for = match known.status.as_str() {
            "" | "on" => false,
            "batch-only" if slots > 1 => false,
            "batch-only" => return false,
            _ => true,
        };
        let Some(switch) = &known.switch else { return !asked_for };
        let (path, values) = match switch.split_once('=') {
            Some((path, values)) => (path.trim_end_matches('!'), Some(values)),
            None => (switch.as_str(), None),
        };
        let listed = |value: &str| values.is_some_and(|list| list.split(',').any(|item| item == value));
        if path == "always" {
            return !asked_for;
        }
        if path == "any" {
            return said.iter().any(|said| said.owner == id && !is_off(said.value));
        }
        let (owner, key) = path.split_once('.').unwrap_or((id, path));
        let set = value(owner, key).filter(|value| !value.is_empty());
        let on = |value: &str| match values {
            Some(_) if switch.contains("!=") => !is_off(value) && !listed(value),
            Some(_) => listed(value),
            None => !is_off(value),
        };
        match set {
            Some(value) => on(value),
            None => !asked_for && on(&known.default),
        }
    };
    let plugins = catalogue.owners.iter().filter(|(id, _)| !NO_PLUGINS.contains(&id.as_str()));
    let mut on: BTreeSet<&str> =
        plugins.filter(|(id, known)| wanted(id, known)).map(|(id, _)| id.as_str()).collect();
    // What builds on something that is off is off as well.
    loop {
        let needs = |id: &&&str| {
            let requires =
                catalogue.owners.get(**id).map(|known| known.requires.as_slice()).unwrap_or_default();
            requires.iter().any(|other| !on.contains(other.as_str()))
        };
        let Some(off) = on.iter().find(needs).copied() else { break };
        on.remove(off);
    }
    let (bases, numbers): (Vec<&str>, Vec<&str>) = on.into_iter().partition(|id| id.starts_with("base-"));
    bases.into_iter().chain(numbers).collect()
}

/// Values of one knob, which a family of names may give together.
fn joined<'s>(said: &'s [Said<'_>]) -> BTreeMap<&'s str, BTreeMap<&'s str, String>> {
    let mut owners: BTreeMap<&str, BTreeMap<&str, String>> = BTreeMap::new();
    for one in said {
        let exact = catalogue().aliases.contains_key(one.name) || !one.name.starts_with("NCCL_");
        let text = if exact { one.value.to_owned() } else { format!("{}={}", one.name, one.value) };
        let knobs = owners.entry(&one.owner).or_default();
        knobs.entry(&one.key).and_modify(|all| *all = format!("{all};{text}")).or_insert(text);
    }
    owners
}

fn quoted(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

fn print(
    name: &str,
    said: &[Said<'_>],
    own: &Loaded,
    plugins: &[String],
    missing: &[String],
) -> Result<String, Vec<String>> {
    let mut problems = Vec::new();
    let mut text =
        format!("# Written by `plugfold config import` from {}.\n\n", name.replace(['\n', '\r'], " "));
    if !missing.is_empty() {
        text += "# Switched on there, but not to be found here (add them to the list once they are):\n";
        for label in missing {
            let _ = writeln!(text, "#   {label}");
        }
    }
    text += "plugins = [\n";
    for label in plugins {
        let _ = writeln!(text, "  {},", quoted(label));
    }
    text += "]\n\n";
    for one in
        said.iter().filter(|one| SETTINGS_OWNERS.contains(&one.owner.as_str()) && !one.value.is_empty())
    {
        let Some(knob) = own.find(&one.owner, &one.key) else { continue };
        match knob.schema.parse(&Raw::Plain(one.value.to_owned())) {
            Ok(value) => {
                let value = match value {
                    KnobValue::Text(text) => quoted(text.as_str()),
                    other => other.to_string(),
                };
                let _ = writeln!(text, "{} = {value}", one.key);
            }
            Err(error) => {
                let place = one.line.map_or_else(String::new, |line| format!("line {line}: "));
                problems.push(format!("{place}{} {error}", one.name));
            }
        }
    }
    text += "\n# As it stood in the file; what belongs to plugins that are not in the list is not used, and said so.\n";
    for (owner, knobs) in joined(said) {
        let mine = |key: &str| SETTINGS_OWNERS.contains(&owner) && own.find(owner, key).is_some();
        let knobs: Vec<(&&str, &String)> =
            knobs.iter().filter(|(key, value)| !mine(key) && !value.is_empty()).collect();
        if knobs.is_empty() {
            continue;
        }
        let _ = writeln!(text, "[imported.{}]", quoted(owner));
        for (key, value) in knobs {
            let _ = writeln!(text, "{key} = {}", quoted(value));
        }
    }
    if problems.is_empty() { Ok(text) } else { Err(problems) }
}

/// A shell profile in place of a profile: its values, without a list of plugins.
pub(super) fn as_profile(file: &EnvFile, path: &Path) -> Result<Profile, ConfigError> {
    let place = path.display().to_string();
    let own = own()?;
    let said = said(file, &own, &|_| false)
        .map_err(|problems| ConfigError::Wrong(format!("{place}: {}", problems.join("; "))))?;
    let mut given = Vec::new();
    for (owner, knobs) in joined(&said) {
        for (key, value) in knobs {
            let said = said.iter().find(|one| one.owner == owner && one.key == key);
            let origin = match said.and_then(|one| one.line) {
                Some(line) => Origin::Profile { file: place.clone(), line: Some(line) },
                // Nothing in the file says it.
                None => Origin::Profile { file: format!("{place} (its reader's default)"), line: None },
            };
            given.push(Given {
                target: Target::Knob(owner.to_owned(), key.to_owned()),
                raw: Raw::Plain(value),
                origin,
                imported: true,
                base: None,
            });
        }
    }
    Ok(Profile { given, ..Profile::default() })
}

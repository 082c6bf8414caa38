//! Profiles: finding one, and reading one with the line of every key.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use plugfold_manifest::{Raw, did_you_mean};
use toml::Value;

use super::builtin::LIMITS_OWNER;
use super::sources::{Given, Listed, Origin, Target};
use crate::config::{CONFIG_DIR_ENV, ConfigError};

/// Largest profile.
const LONGEST: u64 = 1 << 20;
/// Keys of a profile that are no settings.
pub(super) const OWN_KEYS: [&str; 5] = ["plugins", "plugin_path", "limits", "knobs", "imported"];

/// What a profile says.
#[derive(Debug, Default)]
pub(super) struct Profile {
    pub plugins: Option<Vec<Listed>>,
    pub plugin_path: Vec<PathBuf>,
    pub given: Vec<Given>,
}

/// The file of a profile: a path, or a name with `config/NAME.toml` here, in [`CONFIG_DIR_ENV`], or above the program.
///
/// # Errors
/// No such file; says where it was looked for.
pub fn find_profile(name: &str) -> Result<PathBuf, ConfigError> {
    let is_path = name.contains(std::path::is_separator)
        || Path::new(name).extension().is_some_and(|end| end == "toml" || end == "env");
    let mut looked = Vec::new();
    if is_path {
        looked.push(PathBuf::from(name));
    } else {
        let file = format!("{name}.toml");
        looked.extend(std::env::var_os(CONFIG_DIR_ENV).map(|dir| PathBuf::from(dir).join(&file)));
        looked.push(Path::new("config").join(&file));
        let program = std::env::current_exe().unwrap_or_default();
        looked.extend(program.ancestors().skip(1).map(|dir| dir.join("config").join(&file)));
    }
    if let Some(path) = looked.iter().find(|path| path.is_file()) {
        return Ok(path.clone());
    }
    looked.truncate(4);
    Err(ConfigError::NoProfile { name: name.to_owned(), looked })
}

/// The text of a settings file.
pub(super) fn text(path: &Path) -> Result<String, ConfigError> {
    let wrong = |what: String| ConfigError::Wrong(format!("{}: {what}", path.display()));
    let size = std::fs::metadata(path).map_err(|e| wrong(e.to_string()))?.len();
    if size > LONGEST {
        return Err(wrong(format!("has {size} bytes; the limit is {LONGEST}")));
    }
    std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))
}

/// Reads a profile's text; `valid` are the names of settings, for messages.
pub(super) fn read(path: &Path, text: &str, valid: &[&str]) -> Result<Profile, ConfigError> {
    let place = path.display().to_string();
    let table: toml::Table = toml::from_str(text).map_err(|error| {
        let line = error.span().map(|s| text[..s.start.min(text.len())].matches('\n').count() + 1);
        let line = line.map(|line| format!(":{line}")).unwrap_or_default();
        ConfigError::Wrong(format!("{place}{line}: {}", error.message().trim()))
    })?;
    let lines = lines(text);
    let base = path.parent().unwrap_or(Path::new("")).to_path_buf();
    let origin = |keys: &str| Origin::Profile { file: place.clone(), line: lines.get(keys).copied() };
    let at = |keys: &str| origin(keys).to_string();
    let mut profile = Profile::default();
    let mut give = |target: Target, value: &Value, keys: &str, imported: bool| {
        let base = if imported { None } else { Some(base.clone()) };
        profile.given.push(Given { target, raw: raw(value, imported), origin: origin(keys), imported, base });
    };
    for (key, value) in &table {
        match (key.as_str(), value) {
            ("plugins" | "plugin_path", Value::Array(_)) => {}
            ("plugins" | "plugin_path", _) => {
                return Err(ConfigError::Wrong(format!("{}: {key} must be a list of names", at(key))));
            }
            ("limits", Value::Table(limits)) => {
                for (name, value) in limits {
                    let target = Target::Knob(LIMITS_OWNER.to_owned(), name.clone());
                    give(target, value, &format!("limits.{name}"), false);
                }
            }
            ("knobs" | "imported", Value::Table(owners)) => {
                for (owner, knobs) in owners {
                    let Value::Table(knobs) = knobs else {
                        let form = format!("write [{key}.{owner}] and its knobs beneath, one a line");
                        return Err(ConfigError::Wrong(format!("{}: {form}", at(&format!("{key}.{owner}")))));
                    };
                    for (name, value) in knobs {
                        let target = Target::Knob(owner.clone(), name.clone());
                        give(target, value, &format!("{key}.{owner}.{name}"), key == "imported");
                    }
                }
            }
            ("limits" | "knobs" | "imported", _) => {
                return Err(ConfigError::Wrong(format!("{}: {key} is a table; write [{key}]", at(key))));
            }
            (name, value) if valid.contains(&name) => {
                give(Target::Setting(name.to_owned()), value, name, false);
            }
            (name, _) => {
                let mend = did_you_mean(name, valid.iter().copied().chain(OWN_KEYS));
                return Err(ConfigError::UnknownKey { place: at(name), key: name.to_owned(), mend });
            }
        }
    }
    let names = |key: &str| -> Result<Option<Vec<String>>, ConfigError> {
        let Some(list) = table.get(key).and_then(Value::as_array) else { return Ok(None) };
        let name = |item: &Value| match item {
            Value::String(name) => Ok(name.clone()),
            other => Err(ConfigError::Wrong(format!("{}: {key} has {other}, which is no name", at(key)))),
        };
        list.iter().map(name).collect::<Result<_, _>>().map(Some)
    };
    profile.plugins = names("plugins")?.map(|names| {
        let listed = |name: String| {
            let line = lines.get(&format!("plugins.{name}")).or_else(|| lines.get("plugins")).copied();
            let origin = Origin::Profile { file: place.clone(), line };
            Listed { name, place: origin.to_string() }
        };
        names.into_iter().map(listed).collect()
    });
    let folders = names("plugin_path")?.unwrap_or_default();
    profile.plugin_path = folders.into_iter().map(|folder| base.join(folder)).collect();
    Ok(profile)
}

fn raw(value: &Value, plain: bool) -> Raw {
    match value {
        Value::Boolean(value) => Raw::Bool(*value),
        Value::Integer(value) => Raw::Int(*value),
        Value::Float(value) => Raw::Float(*value),
        Value::String(text) if plain => Raw::Plain(text.clone()),
        Value::String(text) => Raw::Text(text.clone()),
        Value::Array(items) => {
            let item = |item: &Value| match item {
                Value::String(text) => Some(text.clone()),
                Value::Integer(number) => Some(number.to_string()),
                _ => None,
            };
            items
                .iter()
                .map(item)
                .collect::<Option<_>>()
                .map_or(Raw::Other("a list of lists or tables"), Raw::List)
        }
        Value::Table(_) => Raw::Other("a table"),
        Value::Datetime(_) => Raw::Other("a date"),
    }
}

/// The line of every key by its dotted path; for the items of `plugins` the path is `plugins.ITEM`. Only for messages: a
/// text that is written in a way that this does not follow has no lines.
fn lines(text: &str) -> BTreeMap<String, usize> {
    let mut lines = BTreeMap::new();
    let mut table = String::new();
    let mut in_plugins = false;
    for (index, line) in text.lines().enumerate() {
        let number = index + 1;
        let line = line.trim();
        let items = if in_plugins { Some(line) } else { None };
        if line.starts_with('#') {
            continue;
        }
        if let (None, Some(header)) = (items, line.strip_prefix('[').and_then(|l| l.split_once(']'))) {
            table = path(header.0);
            lines.entry(table.clone()).or_insert(number);
            continue;
        }
        let assigned = if in_plugins { None } else { line.split_once('=') };
        if let Some((key, _)) = assigned {
            let key = path(key);
            let full = if table.is_empty() { key } else { format!("{table}.{key}") };
            in_plugins = full == "plugins";
            lines.entry(full).or_insert(number);
        }
        if in_plugins {
            let list = assigned.map_or(line, |(_, list)| list);
            let list = list.split('#').next().unwrap_or_default();
            for item in list.split('"').skip(1).step_by(2) {
                lines.entry(format!("plugins.{item}")).or_insert(number);
            }
            in_plugins = !list.contains(']');
        }
    }
    lines
}

/// A dotted key without quotes and blanks.
fn path(key: &str) -> String {
    let parts = key.split('.').map(|part| part.trim().trim_matches(['"', '\'']));
    parts.collect::<Vec<_>>().join(".")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_has_its_line() {
        let text = "# p\nport = 1\nplugins = [\n  \"0003\", # first\n  # \"0005\",\n  \"base-mtp\",\n]\n[knobs.\"0003\"]\n\
                    prefill_rows = 3\n[knobs]\nbase-mtp.x = 1\n";
        let lines = lines(text);
        let line = |key: &str| lines.get(key).copied();
        assert_eq!((line("port"), line("plugins"), line("plugins.0003")), (Some(2), Some(3), Some(4)));
        assert_eq!((line("plugins.0005"), line("plugins.base-mtp")), (None, Some(6)));
        assert_eq!((line("knobs.0003.prefill_rows"), line("knobs.base-mtp.x")), (Some(9), Some(11)));
    }
}

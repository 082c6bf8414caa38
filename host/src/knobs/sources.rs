//! What was said about settings, and where, before it is known what it means.

use std::path::{Path, PathBuf};

use plugfold_manifest::{Raw, did_you_mean};

use super::builtin::{LIMITS_OWNER, SETTINGS_OWNERS, manifests};
use super::profile::{self, Profile, find_profile};
use super::{EnvFile, catalogue, import};
use crate::config::ConfigError;
use crate::plugins::{plugin_id, same_plugin};

/// Prefixes of the variables that are settings.
const PREFIXES: [&str; 2] = ["PLUGFOLD_", "GLM53_TF_"];
/// Variables with the prefix that are not settings; those for tests begin with `PLUGFOLD_TEST_`.
const NOT_SETTINGS: [&str; 7] = [
    "PLUGFOLD_CONFIG_DIR",
    "PLUGFOLD_CACHE_DIR",
    "PLUGFOLD_RANKS_SECRET",
    "PLUGFOLD_LOG",
    plugfold_cuda::cache::CACHE_VARIABLE,
    plugfold_cuda::compile::NVRTC_VARIABLE,
    // Where this host has the library of that name.
    "PLUGFOLD_NCCL",
];
/// Variables that stand for keys of a profile which are no knobs.
const PLUGINS_ENV: &str = "PLUGFOLD_PLUGINS";
const PLUGIN_PATH_ENV: &str = "PLUGFOLD_PLUGIN_PATH";

/// A plugin of the list, and where it is listed.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Listed {
    /// Id or folder name.
    pub name: String,
    /// `config/prod.toml:7`, or what else listed it.
    pub place: String,
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The schema.
    Default,
    /// A profile.
    Profile {
        /// Its file.
        file: String,
        /// The line, where it could be found.
        line: Option<usize>,
    },
    /// A variable of the environment.
    Variable(String),
    /// A flag of the command line, as `--port`.
    Flag(String),
    /// The request itself.
    Request,
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::Profile { file, line: Some(line) } => write!(f, "{file}:{line}"),
            Origin::Profile { file, line: None } => f.write_str(file),
            Origin::Variable(name) => write!(f, "${name}"),
            Origin::Flag(flag) => f.write_str(flag),
            Origin::Request => f.write_str("request"),
        }
    }
}

/// What a value is for, as far as that can be said without manifests.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Target {
    /// A key at the top of a profile.
    Setting(String),
    /// Owner, by id or label, and key.
    Knob(String, String),
    /// The name of a variable.
    Variable(String),
}

/// One value of one source.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Given {
    pub target: Target,
    pub raw: Raw,
    pub origin: Origin,
    /// From a shell profile: what nobody takes is reported, not refused.
    pub imported: bool,
    /// The folder that relative paths are meant from.
    pub base: Option<PathBuf>,
}

/// What to read.
#[derive(Clone, Debug, Default)]
pub struct Asked<'a> {
    /// Profile: a name, or a file (TOML, or a shell profile that ends in `.env`).
    pub profile: Option<&'a str>,
    /// Variables.
    pub environment: Vec<(String, String)>,
    /// Settings that are flags, by their names.
    pub flags: serde_json::Map<String, serde_json::Value>,
    /// Texts of `--set owner.key=value`.
    pub sets: &'a [String],
}

impl<'a> Asked<'a> {
    /// With the environment of this process.
    pub fn here(
        profile: Option<&'a str>,
        flags: serde_json::Map<String, serde_json::Value>,
        sets: &'a [String],
    ) -> Self {
        // A name that is not UTF-8 is no setting; a value that is not is said to be wrong when it is read.
        let text = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
            Some((name.into_string().ok()?, value.to_string_lossy().into_owned()))
        };
        Self { profile, environment: std::env::vars_os().filter_map(text).collect(), flags, sets }
    }
}

/// Everything that was said, weakest source first.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// The plugins to load, in order.
    pub plugins: Vec<Listed>,
    /// Where libraries are looked for first.
    pub plugin_path: Vec<PathBuf>,
    /// Imported values, the profile, the environment, the command line.
    pub(super) layers: Vec<Vec<Given>>,
    /// What a person should see although it refuses nothing.
    pub(super) report: Vec<String>,
}

impl Sources {
    /// Reads all sources.
    ///
    /// # Errors
    /// A profile that does not exist or does not parse, a key at its top that nobody knows, a `--set` of another form.
    pub fn read(asked: &Asked<'_>) -> Result<Self, ConfigError> {
        let owners = manifests()?;
        let top = owners.iter().filter(|owner| SETTINGS_OWNERS.contains(&owner.id.as_str()));
        let valid: Vec<&str> =
            top.flat_map(|owner| owner.knobs.iter().map(|knob| knob.key.as_str())).collect();
        let mut sources = Self::default();
        let profile = match asked.profile {
            Some(name) => sources.profile(&find_profile(name)?, &valid)?,
            None => Profile::default(),
        };
        sources.plugin_path = profile.plugin_path;
        sources.plugins = profile.plugins.unwrap_or_default();
        let (imported, own) = profile.given.into_iter().partition(|given| given.imported);
        let environment = sources.environment(&asked.environment);
        let flags = flags(&asked.flags).chain(sets(asked.sets, &valid)?).collect();
        sources.layers = vec![imported, own, environment, flags];
        Ok(sources)
    }

    /// What the strongest source says of a setting of the program's own, as far as that can be said without manifests.
    pub fn said(&self, setting: &str) -> Option<String> {
        let variable = format!("PLUGFOLD_{}", setting.to_ascii_uppercase());
        let meant = |given: &&Given| match &given.target {
            Target::Setting(name) => name == setting,
            Target::Variable(name) => *name == variable,
            Target::Knob(..) => false,
        };
        let strongest = self.layers.iter().rev().find_map(|layer| layer.iter().rev().find(meant))?;
        match &strongest.raw {
            Raw::Plain(text) | Raw::Text(text) => Some(text.clone()),
            other => Some(other.to_string()),
        }
    }

    /// Forgets plugins and what was said for them. What is forgotten is reported.
    pub fn leave_out(&mut self, plugins: &[Listed]) {
        self.plugins.retain(|listed| !plugins.contains(listed));
        let is_theirs = |target: &Target| match target {
            Target::Setting(_) => false,
            Target::Knob(owner, _) => plugins.iter().any(|p| same_plugin(&p.name, owner)),
            Target::Variable(name) => plugins.iter().any(|p| {
                let owned = catalogue().by_env(name).is_some_and(|(owner, _)| same_plugin(&p.name, &owner));
                owned || name.starts_with(&plugfold_manifest::env_name(plugin_id(&p.name), ""))
            }),
        };
        for layer in &mut self.layers {
            let (theirs, rest) = layer.drain(..).partition(|given: &Given| is_theirs(&given.target));
            *layer = rest;
            let told = theirs
                .into_iter()
                .map(|given: Given| format!("not used: {}: its plugin is left out", given.origin));
            self.report.extend(told);
        }
    }

    fn profile(&mut self, path: &Path, valid: &[&str]) -> Result<Profile, ConfigError> {
        let text = profile::text(path)?;
        if path.extension().is_none_or(|end| end != "env") {
            return profile::read(path, &text, valid);
        }
        let file = EnvFile::parse(&text)
            .map_err(|error| ConfigError::Wrong(format!("{}: {error}", path.display())))?;
        let profile = import::as_profile(&file, path)?;
        self.report.push(format!(
            "{}: a shell profile names no plugins, so none is loaded from it; `plugfold config import {}` writes one that does",
            path.display(),
            path.display()
        ));
        Ok(profile)
    }

    fn environment(&mut self, variables: &[(String, String)]) -> Vec<Given> {
        let mut given = Vec::new();
        for (name, value) in variables {
            let is_setting = PREFIXES.iter().any(|prefix| name.starts_with(prefix));
            if !is_setting || NOT_SETTINGS.contains(&name.as_str()) || name.starts_with("PLUGFOLD_TEST_") {
                continue;
            }
            if is_of_an_orchestrator(name, value) {
                self.report.push(format!(
                    "${name} is an address that a container orchestrator sets, no setting: ignored"
                ));
                continue;
            }
            let parts = |between: char| value.split(between).map(str::trim).filter(|part| !part.is_empty());
            if name == PLUGINS_ENV {
                let place = format!("${name}");
                let listed = |name: &str| Listed { name: name.to_owned(), place: place.clone() };
                self.plugins = parts(',').map(listed).collect();
            } else if name == PLUGIN_PATH_ENV {
                self.plugin_path = parts(':').map(PathBuf::from).collect();
            } else {
                given.push(Given {
                    target: Target::Variable(name.clone()),
                    raw: Raw::Plain(value.clone()),
                    origin: Origin::Variable(name.clone()),
                    imported: false,
                    base: None,
                });
            }
        }
        given.sort_by_key(|given| given.origin.to_string());
        given
    }
}

/// Whether a variable is one of those that Kubernetes and Docker links set for a service that is called `plugfold`.
fn is_of_an_orchestrator(name: &str, value: &str) -> bool {
    let address = value.starts_with("tcp://") || value.starts_with("udp://") || value.starts_with("sctp://");
    let Some(rest) = name.strip_prefix("PLUGFOLD_") else { return false };
    let service = rest.contains("SERVICE_HOST") || rest.contains("SERVICE_PORT");
    let port = rest.split_once("PORT_").is_some_and(|(_, rest)| {
        let rest = rest.trim_start_matches(|c: char| c.is_ascii_digit());
        ["_TCP", "_UDP", "_SCTP"].iter().any(|kind| rest.starts_with(kind))
    });
    service || port || (rest.ends_with("PORT") && address)
}

fn flags(flags: &serde_json::Map<String, serde_json::Value>) -> impl Iterator<Item = Given> {
    use serde_json::Value;
    flags.iter().map(|(name, value)| {
        let raw = match value {
            Value::Bool(value) => Raw::Bool(*value),
            Value::Number(number) => match number.as_i64() {
                Some(whole) => Raw::Int(whole),
                None => Raw::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => Raw::Plain(text.clone()),
            Value::Array(items) => {
                Raw::List(items.iter().filter_map(Value::as_str).map(str::to_owned).collect())
            }
            Value::Object(_) | Value::Null => Raw::Other("a table"),
        };
        let origin = Origin::Flag(format!("--{}", name.replace('_', "-")));
        Given { target: Target::Setting(name.clone()), raw, origin, imported: false, base: None }
    })
}

fn sets(sets: &[String], valid: &[&str]) -> Result<Vec<Given>, ConfigError> {
    let set = |text: &String| {
        let form =
            || ConfigError::Wrong(format!("--set {text:?}: write OWNER.KEY=VALUE, as 0003.prefill_rows=128"));
        let (name, value) = text.split_once('=').ok_or_else(form)?;
        let name = name.trim();
        let target = match name.rsplit_once('.') {
            Some((owner, key)) => Target::Knob(owner.to_owned(), key.to_owned()),
            None if valid.contains(&name) => Target::Setting(name.to_owned()),
            None => {
                let mend = did_you_mean(name, valid.iter().copied());
                let place = "--set".to_owned();
                return Err(ConfigError::UnknownKey { place, key: name.to_owned(), mend });
            }
        };
        let origin = Origin::Flag(format!("--set {name}"));
        Ok(Given { target, raw: Raw::Plain(value.trim().to_owned()), origin, imported: false, base: None })
    };
    sets.iter().map(set).collect()
}

/// Owner and key of a setting at the top of a profile.
pub(super) fn setting_owner(loaded: &plugfold_manifest::Loaded, name: &str) -> Option<String> {
    let owners = SETTINGS_OWNERS.iter().chain(&[LIMITS_OWNER]);
    owners.copied().find(|owner| loaded.find(owner, name).is_some()).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_orchestrators_are_no_settings() {
        for (name, value) in [
            ("PLUGFOLD_SERVICE_HOST", "10.0.0.1"),
            ("PLUGFOLD_SERVICE_PORT", "80"),
            ("PLUGFOLD_SERVICE_PORT_HTTP", "80"),
            ("PLUGFOLD_PORT", "tcp://10.0.0.1:80"),
            ("PLUGFOLD_PORT_80_TCP", "tcp://10.0.0.1:80"),
            ("PLUGFOLD_PORT_80_TCP_ADDR", "10.0.0.1"),
            ("PLUGFOLD_WEB_PORT_53_UDP_PROTO", "udp"),
        ] {
            assert!(is_of_an_orchestrator(name, value), "{name}");
        }
        for (name, value) in [("PLUGFOLD_PORT", "80"), ("PLUGFOLD_PORT", "x"), ("PLUGFOLD_SERVED_NAME", "m")]
        {
            assert!(!is_of_an_orchestrator(name, value), "{name}");
        }
    }
}

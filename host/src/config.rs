//! Settings: defaults, a profile file, `PLUGFOLD_*` environment variables, flags, in this order of strength.

use std::path::{Path, PathBuf};

use figment::Figment;
use figment::error::Kind;
use figment::providers::{Env, Format as _, Serialized, Toml};
use figment::value::magic::RelativePathBuf;
use serde::{Deserialize, Serialize};

use crate::http::app::{ClearThinking, DefaultEffort, HealthMode, HttpSettings, ReasoningFields};
use crate::http::keys::{KeyError, Keys};
use crate::http::limits::Limits;

/// Where profiles are looked for by name, besides `config/` here and above the program.
pub const CONFIG_DIR_ENV: &str = "PLUGFOLD_CONFIG_DIR";
/// Variables with the prefix that are not settings; those for tests begin with `PLUGFOLD_TEST_`.
const NOT_SETTINGS: [&str; 3] = ["config_dir", "ranks_secret", "log"];
/// Short lists of valid names that an error message may carry.
const SHORT_LIST: usize = 12;

/// Where the model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The reference kernels on this machine's processor.
    #[default]
    Cpu,
}

/// All settings of a server. Every field is a key of a profile, a variable `PLUGFOLD_<KEY>`, and most are flags.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Folder of the checkpoint; in a profile relative to the profile's file.
    pub model: Option<RelativePathBuf>,
    /// Address to listen at.
    pub host: String,
    /// Port to listen at; 0 takes any free one.
    pub port: u16,
    /// The model's name in replies; without it the folder's name.
    pub served_name: Option<String>,
    /// Further names under which the model is listed.
    pub aliases: Vec<String>,
    /// File of the API keys; in a profile relative to the profile's file. Without it, and without `api_key`, anybody may
    /// use the server.
    pub api_key_file: Option<RelativePathBuf>,
    /// One API key, or `sha256:` and its hash; meant for the environment.
    #[serde(skip_serializing)]
    pub api_key: Option<String>,
    /// Tokens of a request, prompt and reply together; without it what the model allows.
    pub context: Option<usize>,
    /// Requests that run at once.
    pub slots: usize,
    /// Rows of a prefill chunk.
    pub prefill_rows: usize,
    /// Rows of the largest verify window.
    pub window_rows: usize,
    /// Processes the model is split over.
    pub ranks: usize,
    /// Where the model runs.
    pub device: Device,
    /// Threads of the kernels, a rank; without it one a core.
    pub threads: Option<usize>,
    /// Most tokens of a reply when the request names no budget.
    pub max_tokens: usize,
    /// Where reasoning is sent.
    pub reasoning_fields: ReasoningFields,
    /// Whether top-level `reasoning_effort` is read.
    pub effort_field: bool,
    /// Effort of thinking requests that name none.
    pub default_effort: Option<DefaultEffort>,
    /// Reasoning of earlier turns.
    pub clear_thinking: ClearThinking,
    /// When `/health` turns 503.
    pub health: HealthMode,
    /// Seconds without a token after which a request counts as stalled; 0: never.
    pub stall_s: f64,
    /// Prompt tokens a second allowed for before the first token.
    pub stall_prefill_tps: f64,
    /// Load weights that are not numbers.
    pub allow_nan: bool,
    /// Bounds on what clients can make the server hold.
    pub limits: Limits,
    /// Knobs of plugins, a table each.
    pub knobs: figment::value::Dict,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            model: None,
            host: "127.0.0.1".into(),
            port: 8000,
            served_name: None,
            aliases: Vec::new(),
            api_key_file: None,
            api_key: None,
            context: None,
            slots: 4,
            prefill_rows: 64,
            window_rows: 8,
            ranks: 1,
            device: Device::Cpu,
            threads: None,
            max_tokens: 4096,
            reasoning_fields: ReasoningFields::default(),
            effort_field: true,
            default_effort: None,
            clear_thinking: ClearThinking::default(),
            health: HealthMode::default(),
            stall_s: 0.0,
            stall_prefill_tps: 200.0,
            allow_nan: false,
            limits: Limits::default(),
            knobs: figment::value::Dict::new(),
        }
    }
}

/// What is wrong with the settings.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// No such profile.
    #[error("there is no profile {name:?}; looked for {}", .looked.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", "))]
    NoProfile {
        /// As it was asked for.
        name: String,
        /// The files that would have been it.
        looked: Vec<PathBuf>,
    },
    /// A key nobody knows.
    #[error("{place}: unknown key {key:?}; {mend}")]
    UnknownKey {
        /// File or environment.
        place: String,
        /// The key.
        key: String,
        /// The nearest valid one, or the valid ones.
        mend: String,
    },
    /// A value of the wrong kind, or a file that does not parse.
    #[error("{0}")]
    Wrong(String),
}

impl Settings {
    /// Puts the layers together. `flags` serializes to the settings that were given on the command line.
    ///
    /// # Errors
    /// A profile that does not exist, unknown keys, values of the wrong kind.
    pub fn load(profile: Option<&str>, flags: impl Serialize) -> Result<Self, ConfigError> {
        let mut figment = Figment::from(Serialized::defaults(Self::default()));
        if let Some(profile) = profile {
            figment = figment.merge(Toml::file_exact(find_profile(profile)?));
        }
        let environment = Env::prefixed("PLUGFOLD_")
            .filter(|key| !NOT_SETTINGS.iter().any(|name| key == name) && !key.starts_with("test_"))
            .map(|key| {
                let key = key.as_str().to_ascii_lowercase();
                match key.strip_prefix("limits_") {
                    Some(rest) => format!("limits.{rest}").into(),
                    None => key.into(),
                }
            });
        let settings: Self = figment
            .merge(environment)
            .merge(Serialized::defaults(flags))
            .extract()
            .map_err(|e| explain(&e))?;
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> Result<(), ConfigError> {
        let positive = [
            ("slots", self.slots),
            ("prefill_rows", self.prefill_rows),
            ("window_rows", self.window_rows),
            ("ranks", self.ranks),
            ("max_tokens", self.max_tokens),
            ("context", self.context.unwrap_or(1)),
            ("threads", self.threads.unwrap_or(1)),
        ];
        if let Some((name, _)) = positive.iter().find(|(_, value)| *value == 0) {
            return Err(ConfigError::Wrong(format!("{name} is 0; it must be at least 1")));
        }
        if let Some(plugin) = self.knobs.keys().next() {
            return Err(ConfigError::UnknownKey {
                place: "knobs".into(),
                key: plugin.clone(),
                mend: "no plugin is loaded that has knobs".into(),
            });
        }
        Ok(())
    }

    /// The model's folder.
    ///
    /// # Errors
    /// When none was given.
    pub fn model_dir(&self) -> Result<PathBuf, ConfigError> {
        match &self.model {
            Some(path) => Ok(path.relative()),
            None => {
                Err(ConfigError::Wrong("no model: give --model DIR, or a --profile that names one".into()))
            }
        }
    }

    /// The API keys, of the file and of the environment together.
    ///
    /// # Errors
    /// A file that cannot be read or has none, a key that is none.
    pub fn keys(&self) -> Result<Keys, KeyError> {
        let mut keys = match &self.api_key_file {
            Some(path) => Keys::load(&path.relative())?,
            None => Keys::default(),
        };
        if let Some(key) = &self.api_key {
            keys.add(key)?;
        }
        Ok(keys)
    }

    /// The settings of the HTTP layer, without API keys.
    pub fn http(&self, model: &Path) -> HttpSettings {
        let folder =
            || model.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned());
        HttpSettings {
            served_name: self.served_name.clone().unwrap_or_else(folder),
            aliases: self.aliases.clone(),
            keys: Keys::default(),
            max_tokens: self.max_tokens,
            reasoning_fields: self.reasoning_fields,
            effort_field: self.effort_field,
            default_effort: self.default_effort,
            clear_thinking: self.clear_thinking,
            health: self.health,
            stall_s: self.stall_s,
            stall_prefill_tps: self.stall_prefill_tps,
            limits: self.limits.clone(),
        }
    }
}

/// The file of a profile: a path, or a name with `config/NAME.toml` here, in [`CONFIG_DIR_ENV`], or above the program.
fn find_profile(name: &str) -> Result<PathBuf, ConfigError> {
    let is_path =
        name.contains(std::path::is_separator) || Path::new(name).extension().is_some_and(|e| e == "toml");
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

/// Says which key of which source is wrong, and what would be right.
fn explain(error: &figment::Error) -> ConfigError {
    let place = match &error.metadata {
        Some(metadata) => match &metadata.source {
            Some(source) => source.to_string(),
            None => metadata.name.to_string(),
        },
        None => "settings".into(),
    };
    let path = error.path.join(".");
    match &error.kind {
        Kind::UnknownField(key, valid) => {
            let nearest = valid.iter().map(|name| (strsim::jaro_winkler(key, name), *name));
            let nearest = nearest.max_by(|a, b| a.0.total_cmp(&b.0));
            let mend = match nearest {
                Some((alike, name)) if alike > 0.75 => format!("did you mean {name:?}?"),
                _ if valid.len() <= SHORT_LIST => format!("valid are {}", valid.join(", ")),
                _ => "see `plugfold serve --help` for the valid ones".into(),
            };
            ConfigError::UnknownKey { place, key: key.clone(), mend }
        }
        kind if path.is_empty() => ConfigError::Wrong(format!("{place}: {kind}")),
        kind => ConfigError::Wrong(format!("{place}: {path}: {kind}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use figment::Jail;
    use serde_json::json;

    fn load(profile: Option<&str>) -> Result<Settings, String> {
        Settings::load(profile, json!({})).map_err(|e| e.to_string())
    }

    #[test]
    #[allow(clippy::result_large_err)]
    fn layers_by_strength() {
        Jail::expect_with(|jail| {
            jail.create_dir("config")?;
            jail.create_file(
                "config/mine.toml",
                "model = \"../weights\"\nport = 1\nslots = 7\n[limits]\nstop_bytes = 9\n",
            )?;
            jail.set_env("PLUGFOLD_PORT", "2");
            jail.set_env("PLUGFOLD_LIMITS_BODY_BYTES", "77");
            jail.set_env("PLUGFOLD_RANKS_SECRET", "hush");
            let settings = Settings::load(Some("mine"), json!({"host": "::1"})).unwrap();
            assert_eq!((settings.port, settings.slots, settings.host.as_str()), (2, 7, "::1"));
            assert_eq!((settings.limits.body_bytes, settings.limits.stop_bytes), (77, 9));
            assert_eq!(settings.limits.stop_strings, Limits::default().stop_strings);
            let model = settings.model_dir().unwrap();
            assert!(model.ends_with("config/../weights"), "{}", model.display());
            let settings =
                Settings::load(Some("config/mine.toml"), json!({"port": 3, "model": "here"})).unwrap();
            assert_eq!((settings.port, settings.model_dir().unwrap()), (3, PathBuf::from("here")));
            Ok(())
        });
    }

    #[test]
    #[allow(clippy::result_large_err)]
    fn mistakes_are_named() {
        Jail::expect_with(|jail| {
            jail.create_file("a.toml", "prefil_rows = 3\n")?;
            let error = load(Some("a.toml")).unwrap_err();
            assert!(error.contains("a.toml") && error.contains("did you mean \"prefill_rows\"?"), "{error}");
            jail.create_file("b.toml", "port = \"x\"\n")?;
            let error = load(Some("b.toml")).unwrap_err();
            assert!(error.contains("b.toml") && error.contains("port"), "{error}");
            jail.create_file("c.toml", "[limits]\nbody_byte = 3\n")?;
            let error = load(Some("c.toml")).unwrap_err();
            assert!(error.contains("did you mean \"body_bytes\"?"), "{error}");
            jail.create_file("d.toml", "slots = 0\n")?;
            assert_eq!(load(Some("d.toml")).unwrap_err(), "slots is 0; it must be at least 1");
            jail.create_file("e.toml", "[knobs.mtp]\ndepth = 1\n")?;
            assert!(load(Some("e.toml")).unwrap_err().contains("\"mtp\""));
            assert!(load(Some("nowhere")).unwrap_err().contains("config/nowhere.toml"));
            jail.set_env("PLUGFOLD_SLOT", "2");
            assert!(load(None).unwrap_err().contains("did you mean \"slots\"?"));
            Ok(())
        });
    }

    #[test]
    fn a_model_must_be_named() {
        let settings = Settings::default();
        assert!(settings.model_dir().unwrap_err().to_string().contains("--model"));
        assert_eq!(settings.http(Path::new("/a/demo-model")).served_name, "demo-model");
    }
}

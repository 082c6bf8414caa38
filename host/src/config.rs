//! The program's own settings, as its parts read them. Where their values come from is the business of [`crate::knobs`].

use std::path::{Path, PathBuf};

use figment::Figment;
use figment::providers::Serialized;
use figment::value::magic::RelativePathBuf;
use serde::{Deserialize, Serialize};

use crate::http::app::{
    ClearThinking, DefaultEffort, HealthMode, HttpSettings, ImageSettings, ReasoningFields,
};
use crate::http::keys::{KeyError, Keys};
use crate::http::limits::Limits;
use crate::knobs::{Asked, Resolved, Sources};
use crate::vision::fetch::Rules;

/// Where profiles are looked for by name, besides `config/` here and above the program.
pub const CONFIG_DIR_ENV: &str = "PLUGFOLD_CONFIG_DIR";

/// Where the model runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The reference kernels on this machine's processor.
    #[default]
    Cpu,
    /// The kernels of `kernels/cuda` on NVIDIA's GPUs, one a rank.
    Cuda,
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Device::Cpu => "cpu",
            Device::Cuda => "cuda",
        })
    }
}

/// All settings of a server. Every field is a key of a profile, a variable `PLUGFOLD_<KEY>`, and most are flags.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields, default)]
#[allow(clippy::struct_excessive_bools)]
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
    /// Where rank 0 waits for ranks of other hosts, and these find it; without it rank 0 starts the others itself.
    pub ranks_at: Option<String>,
    /// Where the model runs.
    pub device: Device,
    /// Transport of collectives between ranks, by its name; without it the one that is built in.
    pub transport: Option<String>,
    /// Executor of programs, by its name; without it their steps run one after another.
    pub executor: Option<String>,
    /// Way to wait for the next round, by its name; without it a rank sleeps.
    pub plan_wait: Option<String>,
    /// Who runs rounds, by its name; without it their parts run one after another.
    pub round_driver: Option<String>,
    /// Seconds after which a plugin's hook that has not returned ends the engine; 0: never.
    pub hook_limit_s: f64,
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
    /// Whether a client that leaves ends its request; otherwise only a stream that cannot be written does.
    pub disconnect: bool,
    /// Whether images that messages name by `https` URLs are fetched.
    pub fetch: bool,
    /// Whether they may come by `http` and from any port, for tests.
    pub fetch_http: bool,
    /// Whether they may come from addresses that are not public, for tests.
    pub fetch_private: bool,
    /// Seconds of one download.
    pub fetch_timeout_s: f64,
    /// Seconds of all downloads of a request.
    pub fetch_total_s: f64,
    /// Requests that fetch and prepare images at once.
    pub prep_slots: usize,
    /// Requests that may wait for that.
    pub prep_waiters: usize,
    /// Seconds they may.
    pub prep_wait_s: f64,
    /// Address of an OpenTelemetry collector that traces go to.
    pub otlp_endpoint: Option<String>,
    /// Load weights that are not numbers.
    pub allow_nan: bool,
    /// Bounds on what clients can make the server hold.
    pub limits: Limits,
}

impl Default for Settings {
    fn default() -> Self {
        let images = ImageSettings::default();
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
            ranks_at: None,
            device: Device::Cpu,
            transport: None,
            executor: None,
            plan_wait: None,
            round_driver: None,
            hook_limit_s: 120.0,
            threads: None,
            max_tokens: 4096,
            reasoning_fields: ReasoningFields::default(),
            effort_field: true,
            default_effort: None,
            clear_thinking: ClearThinking::default(),
            health: HealthMode::default(),
            stall_s: 0.0,
            stall_prefill_tps: 200.0,
            disconnect: true,
            fetch: images.rules.fetch,
            fetch_http: images.rules.http,
            fetch_private: images.rules.private,
            fetch_timeout_s: images.timeout_s,
            fetch_total_s: images.total_s,
            prep_slots: images.slots,
            prep_waiters: images.waiters,
            prep_wait_s: images.wait_s,
            otlp_endpoint: None,
            allow_nan: false,
            limits: Limits::default(),
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
    /// The settings of a start without plugins. `flags` serializes to the settings that were given on the command line.
    ///
    /// # Errors
    /// A profile that does not exist, unknown keys, values of the wrong kind.
    pub fn load(profile: Option<&str>, flags: impl Serialize) -> Result<Self, ConfigError> {
        let flags = match serde_json::to_value(flags) {
            Ok(serde_json::Value::Object(flags)) => flags,
            _ => serde_json::Map::new(),
        };
        let sources = Sources::read(&Asked::here(profile, flags, &[]))?;
        Ok(Resolved::new(&sources, Vec::new())?.settings)
    }

    /// The settings with these values, by the names of their fields.
    pub(crate) fn from_values(values: &serde_json::Value) -> Result<Self, ConfigError> {
        let figment = Figment::from(Serialized::defaults(Self::default()));
        figment
            .merge(Serialized::defaults(values))
            .extract()
            .map_err(|error| ConfigError::Wrong(format!("the program's own settings: {error}")))
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

    /// The settings of the HTTP layer, without API keys, request knobs and plugins.
    pub fn http(&self, model: &Path) -> HttpSettings {
        let folder =
            || model.file_name().map_or_else(|| "model".into(), |n| n.to_string_lossy().into_owned());
        HttpSettings {
            served_name: self.served_name.clone().unwrap_or_else(folder),
            aliases: self.aliases.clone(),
            keys: Keys::default(),
            knobs: std::sync::Arc::default(),
            plugins: std::sync::Arc::default(),
            max_tokens: self.max_tokens,
            reasoning_fields: self.reasoning_fields,
            effort_field: self.effort_field,
            default_effort: self.default_effort,
            clear_thinking: self.clear_thinking,
            health: self.health,
            stall_s: self.stall_s,
            stall_prefill_tps: self.stall_prefill_tps,
            disconnect: self.disconnect,
            images: ImageSettings {
                rules: Rules { fetch: self.fetch, http: self.fetch_http, private: self.fetch_private },
                timeout_s: self.fetch_timeout_s,
                total_s: self.fetch_total_s,
                slots: self.prep_slots,
                waiters: self.prep_waiters,
                wait_s: self.prep_wait_s,
            },
            limits: self.limits.clone(),
        }
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
    fn the_defaults_are_those_of_the_schemas() {
        Jail::expect_with(|_| {
            let json = |settings: &Settings| serde_json::to_value(settings).unwrap();
            assert_eq!(json(&load(None).unwrap()), json(&Settings::default()));
            Ok(())
        });
    }

    #[test]
    fn every_setting_has_a_schema() {
        let settings = serde_json::to_value(Settings::default()).unwrap();
        let owners = crate::knobs::builtin_manifests().unwrap();
        let has = |key: &str| owners.iter().any(|owner| owner.knob(key).is_some());
        let missing: Vec<&String> = settings.as_object().unwrap().keys().filter(|key| !has(key)).collect();
        assert_eq!(missing, ["limits"], "add them to host/assets/settings.toml");
    }

    #[test]
    #[allow(clippy::result_large_err)]
    fn mistakes_are_named() {
        Jail::expect_with(|jail| {
            for (name, text, parts) in [
                ("a", "prefil_rows = 3\n", ["a.toml:1", "did you mean `prefill_rows`?"]),
                ("b", "\nport = \"x\"\n", ["b.toml:2: port is \"x\"", "a whole number from 0 to 65535"]),
                ("c", "[limits]\nbody_byte = 3\n", ["c.toml:2", "did you mean `body_bytes`?"]),
                ("d", "slots = 0\n", ["d.toml:1: slots is 0", "a whole number at least 1"]),
                ("e", "[knobs.mtp]\ndepth = 1\n", ["e.toml:2", "no plugin `mtp` is loaded"]),
                ("f", "plugins = [\"0003\"]\n", ["f.toml:1", "plugin 0003 is listed"]),
                ("g", "port = 1\nport = 2\n", ["g.toml:2", "duplicate key"]),
                ("h", "plugins = \"0003\"\n", ["h.toml:1", "must be a list"]),
                ("i", "[knobs]\nport = 3\n", ["i.toml:2", "[knobs.port]"]),
            ] {
                let file = format!("{name}.toml");
                jail.create_file(&file, text)?;
                let error = load(Some(&file)).unwrap_err();
                assert!(parts.iter().all(|part| error.contains(part)), "{file}: {error}");
            }
            assert!(load(Some("nowhere")).unwrap_err().contains("config/nowhere.toml"));
            jail.set_env("PLUGFOLD_SLOT", "2");
            assert!(load(None).unwrap_err().contains("did you mean `PLUGFOLD_SLOTS`?"));
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

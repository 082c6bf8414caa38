//! The command line.

mod ab;
mod bench;
mod bench_exchange;
mod bench_hooks;
mod bench_http;
mod bench_roofline;
mod bench_synthetic;
mod compare;
mod config;
mod convert;
mod debug;
mod exact;
mod exl3;
mod generate;
mod make_synthetic;
mod model;
mod plugin_command;
mod plugins;
mod progress;
mod quantize;
mod results;
mod serve;
mod setup;
mod shards;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand};
use plugfold::config::{Device, Settings};
use serde::Serialize;
use setup::Setup;
use tracing::Subscriber;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{Layer, Registry};

/// Serves GLM-5.3-Flash-architecture models over an OpenAI-compatible API.
#[derive(Parser)]
#[command(name = "plugfold", version, max_term_width = 110)]
struct Cli {
    #[command(flatten)]
    log: Log,
    #[command(subcommand)]
    command: Command,
}

#[derive(Args)]
struct Log {
    /// Which log lines to print, as `info` or `plugfold=debug,warn`.
    #[arg(long, global = true, env = "PLUGFOLD_LOG", default_value = "warn", value_name = "FILTER")]
    log: String,
    /// Print log lines as JSON.
    #[arg(long, global = true)]
    log_json: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Serve a model over HTTP. Without a model or profile: the quickstart profile.
    Serve(serve::Serve),
    /// Continue one prompt and print the reply.
    Generate(generate::Generate),
    /// Print the token ids of a text.
    Tokenize(generate::Tokenize),
    /// Write what the model computes to a file.
    #[command(subcommand)]
    Debug(debug::Debug),
    /// Measure.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Measure what plugins gain: a profile with and without them, in pairs.
    Ab(ab::Ab),
    /// What was measured.
    #[command(subcommand)]
    Results(results::Results),
    /// Show settings with their origins; write profiles from shell files.
    #[command(subcommand)]
    Config(config::Config),
    /// Write a checkpoint with its large matrices in EXL3.
    Quantize(quantize::Quantize),
    /// Write a checkpoint under other published names.
    Convert(convert::Convert),
    /// Write a random checkpoint of a real model's width.
    MakeSynthetic(make_synthetic::MakeSynthetic),
    /// Try what the engine promises: drafted == serial, batched == alone, resumed == fresh, and more.
    Exact(exact::Exact),
    /// What can be known of plugins.
    #[command(subcommand)]
    Plugins(plugins::Plugins),
    /// Loads libraries on trial; started by whoever has new ones.
    #[command(hide = true)]
    ProbePlugins,
    /// Be a further rank of an engine whose rank 0 is on another host.
    Join(Box<model::Join>),
    /// A further rank; started by rank 0.
    #[command(hide = true)]
    Rank(model::Follow),
    /// A subcommand of a plugin on the list.
    #[command(external_subcommand)]
    OfPlugin(Vec<OsString>),
}

/// Which model to load and how; the same for every command.
#[derive(Args, Clone, Default, Serialize)]
#[serde(rename_all = "snake_case")]
pub struct ModelArgs {
    /// Folder of the checkpoint.
    #[arg(long, value_name = "DIR")]
    #[serde(skip_serializing_if = "Option::is_none")]
    model: Option<PathBuf>,
    /// Profile: a name in config/, or a TOML file.
    #[arg(long, value_name = "NAME|PATH")]
    #[serde(skip)]
    profile: Option<String>,
    /// Tokens of a request, prompt and reply together.
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<usize>,
    /// Requests that run at once.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    slots: Option<usize>,
    /// Rows of a prefill chunk.
    #[arg(long, value_name = "ROWS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    prefill_rows: Option<usize>,
    /// Processes the model is split over.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    ranks: Option<usize>,
    /// Where the model runs.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<Device>,
    /// Threads of the kernels, a rank.
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    threads: Option<usize>,
    /// Load weights that are not numbers.
    #[arg(long)]
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    allow_nan: bool,
    /// A further plugin, after those of the profile; may be given more than once.
    #[arg(long = "plugin", value_name = "ID")]
    #[serde(skip)]
    further: Vec<String>,
    /// Folder with plugin libraries, looked through first; may be given more than once.
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    plugin_path: Vec<PathBuf>,
    /// Start without plugins, but for those of the profile `minimal`.
    #[arg(long)]
    #[serde(skip)]
    safe_mode: bool,
    /// A setting or a plugin's knob, as 0003.prefill_rows=128; may be given more than once.
    #[arg(long = "set", value_name = "OWNER.KEY=VALUE")]
    #[serde(skip)]
    sets: Vec<String>,
    /// Which half of a comparison this process is: with the further plugins, or without them.
    #[arg(skip)]
    #[serde(skip)]
    side: Option<ab::Side>,
}

impl ModelArgs {
    /// The program's own settings, `more` being further flags of the command.
    fn settings(&self, more: impl Serialize) -> anyhow::Result<Settings> {
        Ok(self.setup(more)?.resolved.settings)
    }

    /// All settings, knobs and plugins, `more` being further flags of the command.
    fn setup(&self, more: impl Serialize) -> anyhow::Result<Setup> {
        Setup::read(self, self.flags(more)?)
    }

    /// As [`ModelArgs::setup`], without the plugins of the profile.
    fn setup_bare(&self, more: impl Serialize) -> anyhow::Result<Setup> {
        Setup::bare(self, self.flags(more)?)
    }

    /// All settings that are flags.
    fn flags(&self, more: impl Serialize) -> anyhow::Result<serde_json::Map<String, serde_json::Value>> {
        let mut flags = serde_json::Map::new();
        for part in [serde_json::to_value(self)?, serde_json::to_value(more)?] {
            if let serde_json::Value::Object(part) = part {
                flags.extend(part);
            }
        }
        Ok(flags)
    }
}

/// Runs the command line.
pub fn run() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    // Serving starts its log itself: where traces go is one of its settings.
    if !matches!(cli.command, Command::Serve(_)) {
        cli.log.start()?;
    }
    ::plugfold::stacks::on_signal().context("the signal that prints stacks")?;
    match cli.command {
        Command::Serve(args) => return args.run(&cli.log),
        Command::Generate(args) => args.run()?,
        Command::Tokenize(args) => args.run()?,
        Command::Debug(args) => args.run()?,
        Command::Bench(args) => args.run()?,
        Command::Ab(args) => return args.run(),
        Command::Results(args) => args.run()?,
        Command::Config(args) => args.run()?,
        Command::Quantize(args) => args.run()?,
        Command::Convert(args) => args.run()?,
        Command::MakeSynthetic(args) => args.run()?,
        Command::Exact(args) => return args.run(),
        Command::Plugins(args) => return args.run(),
        Command::ProbePlugins => {
            ::plugfold::plugins::probe::child().context("standard input is no probe's")?;
        }
        Command::Join(args) => args.run()?,
        Command::Rank(args) => args.run()?,
        Command::OfPlugin(words) => return plugin_command::run(&words),
    }
    Ok(ExitCode::SUCCESS)
}

impl Log {
    /// The log lines as a layer.
    fn lines<S>(&self) -> anyhow::Result<Box<dyn Layer<S> + Send + Sync>>
    where
        S: Subscriber + for<'s> LookupSpan<'s> + Send + Sync,
    {
        let filter = tracing_subscriber::EnvFilter::try_new(&self.log)
            .with_context(|| format!("--log {:?} is not a filter", self.log))?;
        let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
        Ok(if self.log_json {
            lines.json().with_filter(filter).boxed()
        } else {
            lines.with_filter(filter).boxed()
        })
    }

    /// Lets log lines be printed from now on.
    fn start(&self) -> anyhow::Result<()> {
        Registry::default().with(self.lines()?).init();
        Ok(())
    }

    /// Runs what has to be known before log lines and traces can start, with its own lines.
    fn before<T>(&self, work: impl FnOnce() -> T) -> anyhow::Result<T> {
        let lines = Registry::default().with(self.lines()?);
        Ok(tracing::subscriber::with_default(lines, work))
    }

    /// As [`Log::start`], and lets traces be sent to a collector while what this gives lives.
    #[cfg(feature = "otel")]
    fn start_with_traces(&self, settings: &Settings) -> anyhow::Result<Option<::plugfold::traces::Sending>> {
        let Some(endpoint) = &settings.otlp_endpoint else {
            self.start()?;
            return Ok(None);
        };
        let (layer, sending) =
            ::plugfold::traces::sending(endpoint, "plugfold").map_err(anyhow::Error::msg)?;
        Registry::default().with(layer).with(self.lines()?).init();
        Ok(Some(sending))
    }

    /// As [`Log::start`]: this program was built without traces.
    #[cfg(not(feature = "otel"))]
    fn start_with_traces(&self, settings: &Settings) -> anyhow::Result<Option<()>> {
        if let Some(endpoint) = &settings.otlp_endpoint {
            bail!(
                "otlp_endpoint is {endpoint:?}, but this program was built without traces: build it with --features otel, or \
                 remove the setting"
            );
        }
        self.start()?;
        Ok(None)
    }
}

/// Says a line on standard error, in one write: a process that is killed, or another that shares the terminal, tears no line.
pub fn tell(text: &dyn std::fmt::Display) {
    let _ = std::io::stderr().write_all(format!("plugfold: {text}\n").as_bytes());
}

/// Writes a file whole or not at all.
fn write_whole(path: &Path, write: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<()> {
    let name = path.file_name().with_context(|| format!("{} is not a file name", path.display()))?;
    let partial = path.with_file_name(format!(".{}.{}", name.to_string_lossy(), std::process::id()));
    let done = write(&partial)
        .and_then(|()| std::fs::rename(&partial, path).map_err(Into::into))
        .with_context(|| format!("cannot write {}", path.display()));
    if done.is_err() {
        let _ = std::fs::remove_file(&partial);
    }
    done
}

/// Token ids as `1,2,3`.
fn ids(text: &str) -> anyhow::Result<Vec<u32>> {
    let ids: Result<Vec<u32>, _> = text.split(',').map(|id| id.trim().parse()).collect();
    match ids {
        Ok(ids) => Ok(ids),
        Err(_) => bail!("--ids {text:?}: give token ids with commas between them, as 1,2,3"),
    }
}

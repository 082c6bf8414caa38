//! `plugfold serve`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use plugfold::device;
use plugfold::http::app::{ClearThinking, DefaultEffort, HealthMode, ReasoningFields};
use plugfold::http::loaded::describe;
use plugfold::http::server::{ROLE, threads};
use plugfold::http::{App, HttpSettings, Server};
use plugfold::vision::Vision;
use plugfold_engine::service::Service;
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};

use super::model;
use super::{Log, ModelArgs};

/// How long a server with a failed engine answers before it exits.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// Serve a model.
#[derive(Args)]
pub struct Serve {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    flags: Flags,
}

#[derive(Args, Serialize)]
struct Flags {
    /// Address to listen at.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<String>,
    /// Port to listen at; 0 takes any free one.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    port: Option<u16>,
    /// The model's name in replies.
    #[arg(long, value_name = "NAME")]
    #[serde(skip_serializing_if = "Option::is_none")]
    served_name: Option<String>,
    /// A further name under which the model is listed; may be given more than once.
    #[arg(long = "alias", value_name = "NAME")]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    aliases: Vec<String>,
    /// File with the API keys, one a line; without it, and without PLUGFOLD_API_KEY, anybody may use the server.
    #[arg(long, value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    api_key_file: Option<std::path::PathBuf>,
    /// Most tokens of a reply when the request names no budget.
    #[arg(long, value_name = "TOKENS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    max_tokens: Option<usize>,
    /// Reply fields that carry reasoning.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_fields: Option<ReasoningFields>,
    /// Effort of thinking requests that name none.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    default_effort: Option<DefaultEffort>,
    /// Reasoning of earlier turns, when a request does not say.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    clear_thinking: Option<ClearThinking>,
    /// When /health turns 503.
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    health: Option<HealthMode>,
}

impl Serve {
    /// Serves until a signal comes or the engine fails.
    pub fn run(self, log: &Log) -> anyhow::Result<ExitCode> {
        let setup = log.before(|| self.model.setup(&self.flags))??;
        let settings = setup.settings();
        let _sending = log.start_with_traces(settings)?;
        // The server's own threads start when plugins are there to be told of them.
        let binding =
            tokio::runtime::Builder::new_current_thread().enable_all().build().context("the HTTP threads")?;
        let (host, port) = (settings.host.clone(), settings.port);
        let keys = settings.keys()?;
        let server = binding.block_on(Server::bind(&host, port)).with_context(|| {
            format!("cannot listen at {host} port {port}; free it, or choose another with --port")
        })?;
        let address = server.address()?;
        let folder = settings.model_dir()?;
        // The small files first: what is wrong with them is told before the weights are read.
        let mut text = model::text(&folder)?;
        // The tower has a stream of its own beside the engine's.
        let vision = Vision::load(&folder, || device::open(settings.device, 0))
            .map_err(|e| anyhow::anyhow!("the vision tower: {e}"))?;
        let (engine, mut others) = model::engine(&setup)?;
        let info = engine.info().clone();
        text.add_stop_ids(&info.eos_ids);
        let knobs = Arc::new(others.table(&setup.resolved));
        let manifests = setup.chosen.iter().map(|chosen| &chosen.library.manifest);
        let plugins = Arc::new(describe(manifests, &setup.resolved, &knobs));
        let http = HttpSettings { keys, knobs, plugins, ..settings.http(&folder) };
        let app = App::new(engine.clone(), Arc::new(text), http)
            .with_vision(vision)
            .with_figures(others.figures())
            .with_hooks(others.hooks())?;
        let app = Arc::new(app);
        let runtime = threads(others.hooks()).context("the HTTP threads")?;
        others.hooks().thread(ROLE);
        others.serving()?;
        println!(
            "serving {} at http://{address} ({} tokens of context, {} slots, {} ranks)",
            app.settings.served_name, info.context, info.slots, info.ranks
        );
        let failed = runtime.block_on(async {
            let (mut term, mut int) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
            let mut failed = None;
            let stop = async {
                tokio::select! {
                    _ = term.recv() => {}
                    _ = int.recv() => {}
                    reason = fatal(engine.as_ref()) => {
                        tracing::error!(%reason, "the engine has failed");
                        failed = Some(reason);
                        tokio::time::sleep(LAST_WORDS).await;
                    }
                }
            };
            server.run(app, stop).await?;
            anyhow::Ok(failed)
        })?;
        runtime.shutdown_timeout(Duration::from_secs(1));
        drop(engine);
        if let Some(reason) = failed {
            // A rank that hangs would not end by itself: dropping the others ends them.
            anyhow::bail!("the engine has failed: {reason}");
        }
        others.finish();
        Ok(ExitCode::SUCCESS)
    }
}

/// The reason why the engine cannot go on, once there is one.
async fn fatal(engine: &dyn Service) -> String {
    loop {
        if let Some(reason) = engine.stats().fatal {
            return reason;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

//! Opening a model on one or several ranks.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold::config::Settings;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::{Children, Lead, SECRET_ENV, Secret, World, spawn_local};

use super::progress::Loading;

/// How long ranks wait for each other at the start.
const MEETING: Duration = Duration::from_secs(60);
/// How long followers may take to end after rank 0 said goodbye.
const GOODBYE: Duration = Duration::from_secs(5);

/// A loaded model: rank 0 of it, and the processes of the others.
pub struct Model {
    /// Rank 0.
    pub rank: Rank,
    /// Ranks 1 and up.
    pub others: Others,
}

/// The other ranks' processes; they end with this.
pub struct Others(Option<Children>);

impl Others {
    /// Waits for the others to end by themselves. Rank 0 must be gone already.
    pub fn finish(self) {
        if let Some(children) = self.0
            && !children.finish(GOODBYE)
        {
            tracing::warn!("a rank did not end by itself");
        }
    }
}

/// Loads the model of the settings, starting the other ranks.
pub fn open(settings: &Settings) -> anyhow::Result<Model> {
    let options = options(settings)?;
    threads(settings.threads, settings.ranks)?;
    let (world, others) = meet(settings, &options)?;
    let loading = Loading::start(&options.model);
    let core = CoreOptions { progress: loading.told(), ..CoreOptions::default() };
    let rank = Rank::load(&options, core, world)?;
    Ok(Model { rank, others })
}

/// Loads the model and starts the engine.
pub fn engine(settings: &Settings) -> anyhow::Result<(Arc<Engine>, Others)> {
    let Model { rank, others } = open(settings)?;
    let engine = Engine::start(rank).context("the engine does not start")?;
    Ok((Arc::new(engine), others))
}

fn options(settings: &Settings) -> anyhow::Result<Options> {
    let model = settings.model_dir()?;
    if !model.is_dir() {
        bail!("{} is not a folder: give the folder of a checkpoint with --model", model.display());
    }
    Ok(Options {
        model,
        context: settings.context,
        slots: settings.slots,
        window_rows: settings.window_rows,
        prefill_rows: settings.prefill_rows,
        allow_nan: settings.allow_nan,
        transport: None,
    })
}

/// Sizes the pool of threads. Ranks on one machine share its cores.
pub fn threads(asked: Option<usize>, ranks: usize) -> anyhow::Result<()> {
    let share = || std::thread::available_parallelism().map_or(1, usize::from).div_ceil(ranks);
    let threads = asked.unwrap_or_else(share);
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("the threads of the kernels")
}

fn meet(settings: &Settings, options: &Options) -> anyhow::Result<(World, Others)> {
    if settings.ranks == 1 {
        return Ok((World::single(), Others(None)));
    }
    let secret = Secret::random()?;
    let lead = Lead::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    let program = std::env::current_exe().context("the path of this program")?;
    let settled = serde_json::to_string(options)?;
    let mut common: Vec<OsString> = vec!["rank".into(), "--lead".into(), lead.addr().to_string().into()];
    common.extend(["--ranks".into(), settings.ranks.to_string().into(), "--options".into(), settled.into()]);
    common.extend(settings.threads.into_iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
    let mut children = spawn_local(&program, settings.ranks, &secret, |rank| {
        common.iter().cloned().chain(["--rank".into(), rank.to_string().into()]).collect()
    })?;
    let world = lead.world(settings.ranks, &secret, MEETING, &mut || children.check())?;
    Ok((world, Others(Some(children))))
}

/// Arguments of a further rank.
#[derive(Args)]
pub struct Follow {
    #[arg(long)]
    lead: SocketAddr,
    #[arg(long)]
    rank: usize,
    #[arg(long)]
    ranks: usize,
    #[arg(long)]
    options: String,
    #[arg(long)]
    threads: Option<usize>,
}

impl Follow {
    /// Joins rank 0, loads, follows.
    pub fn run(self) -> anyhow::Result<()> {
        let secret = std::env::var(SECRET_ENV)
            .with_context(|| format!("{SECRET_ENV} is not set: ranks are started by rank 0, with --ranks"))?;
        let options: Options = serde_json::from_str(&self.options).context("--options")?;
        threads(self.threads, self.ranks)?;
        let world = World::join(self.lead, self.rank, self.ranks, &Secret::new(secret), MEETING)?;
        Rank::load(&options, CoreOptions::default(), world)?.follow()?;
        Ok(())
    }
}

/// The text model of a checkpoint; ids that its configuration names as ends of a reply are added once it is read.
pub fn text(model: &Path) -> anyhow::Result<plugfold::text::TextModel> {
    if !model.is_dir() {
        bail!("{} is not a folder: give the folder of a checkpoint with --model", model.display());
    }
    Ok(plugfold::text::TextModel::load(model, &[])?)
}

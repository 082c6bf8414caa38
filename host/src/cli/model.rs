//! Opening a model on one or several ranks.

use std::ffi::OsString;
use std::net::{Ipv4Addr, SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold::config::{Device, Settings};
use plugfold::device;
use plugfold::knobs::{KnobTable, Resolved};
use plugfold::plugins::life::{Chosen, Plugins, choose, free_memory};
use plugfold::plugins::sentinel::{Sentinel, crashed, forget};
use plugfold::plugins::services::Figures;
use plugfold::plugins::{Search, cache_folder};
use plugfold_abi::points::Limits;
use plugfold_engine::config::ModelConfig;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::program::HOST;
use plugfold_engine::rank::{Options, Rank, raised};
use plugfold_engine::ranks::{Children, Lead, SECRET_ENV, Secret, World, spawn_local};
use plugfold_manifest::Manifest;
use serde_json::json;

use super::ModelArgs;
use super::bench_exchange::{self, Work};
use super::progress::Loading;
use super::setup::{Company, Ordered, Setup};

/// How long ranks wait for each other at the start.
const MEETING: Duration = Duration::from_secs(60);
/// How long ranks of several hosts wait for each other: people start them one after another.
const ACROSS: Duration = Duration::from_secs(600);
/// How long followers may take to end after rank 0 said goodbye.
const GOODBYE: Duration = Duration::from_secs(5);
/// How long they may take where rank 0 failed.
const HEARD: Duration = Duration::from_millis(500);

/// A loaded model: rank 0 of it, and the processes of the others.
pub struct Model {
    /// Rank 0.
    pub rank: Rank,
    /// Ranks 1 and up.
    pub others: Others,
}

/// The processes of the other ranks. Those that still run when this is dropped are ended, which is no crash of theirs.
pub struct Followers(Option<Children>);

impl Followers {
    /// Those that run.
    fn running(&mut self) -> Vec<u32> {
        let Some(children) = &mut self.0 else { return Vec::new() };
        let pids = children.pids().into_iter().zip(1..);
        pids.filter(|(_, rank)| children.ended(*rank).is_none()).map(|(pid, _)| pid).collect()
    }

    /// Waits for all to end by themselves; `false`: some did not.
    pub fn finish(mut self) -> bool {
        let running = self.running();
        let fine = self.0.take().is_none_or(|children| children.finish(GOODBYE));
        forgotten(&running);
        fine
    }
}

impl Drop for Followers {
    fn drop(&mut self) {
        // The others end by themselves once they hear of it; one that has crashed may not be gone yet.
        let deadline = Instant::now() + HEARD;
        let mut running = self.running();
        while !running.is_empty() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
            running = self.running();
        }
        self.0.take();
        forgotten(&running);
    }
}

fn forgotten(pids: &[u32]) {
    // Without a folder there are no files either.
    if let (false, Ok(cache)) = (pids.is_empty(), cache_folder()) {
        forget(&cache, pids);
    }
}

/// What lives beside rank 0 of an engine: its plugins, and the other ranks' processes, which end with this.
pub struct Others {
    followers: Followers,
    plugins: Arc<Plugins>,
    limits: Limits,
    sentinel: Option<Sentinel>,
}

impl Others {
    /// The start is over.
    pub fn serving(&mut self) -> anyhow::Result<()> {
        let names: Vec<String> = self.plugins.manifests().map(Manifest::label).collect();
        tracing::info!(plugins = names.join(", "), "serving");
        self.sentinel.as_mut().map_or(Ok(()), |sentinel| Ok(sentinel.serving()?))
    }

    /// Runs a subcommand of a plugin; gives what is printed.
    pub fn command(&self, order: &Ordered) -> anyhow::Result<String> {
        Ok(self.plugins.run_command(&order.name, &order.texts())?)
    }

    /// What the plugins count.
    pub fn figures(&self) -> Arc<Figures> {
        self.plugins.figures().clone()
    }

    /// The plugins' hooks.
    pub fn hooks(&self) -> &Hooks {
        self.plugins.hooks()
    }

    /// The request knobs, with the limits in force and the plugins' own objections.
    pub fn table(&self, resolved: &Resolved) -> KnobTable {
        let defaults = self.plugins.hooks().knobs.defaults.clone();
        resolved.table().with_defaults(defaults).with_limits(&self.limits).with_owners(self.plugins.clone())
    }

    /// Waits for the others to end by themselves. Rank 0 must be gone already.
    pub fn finish(self) {
        if !self.followers.finish() {
            tracing::warn!("a rank did not end by itself");
        }
    }
}

/// Loads one rank's plugins and its share of the model, in step with the others.
fn load(
    options: &Options,
    core: CoreOptions,
    world: World,
    chosen: Vec<Chosen>,
    company: &Company,
) -> anyhow::Result<(Rank, Plugins)> {
    let cache = if chosen.is_empty() { PathBuf::new() } else { cache_folder()? };
    let class = core.device.as_ref().map_or(HOST, |device| device.class()).to_owned();
    let mut plugins = Plugins::load(chosen, &company.settled, &world, &class, &cache)?;
    if let Some(order) = &company.ordered {
        plugins.begin_command(&order.name, &order.texts())?;
    }
    let mut whole = options.clone();
    if whole.context.is_none() {
        whole.context = Some(ModelConfig::from_dir(&options.model)?.context);
    }
    plugins.of_model(&options.model);
    plugins.prepare(&raised(&whole, plugins.hooks())?, free_memory())?;
    if world.is_lead() {
        for note in plugins.notes() {
            super::tell(&note);
        }
    }
    let core = CoreOptions { hooks: Arc::new(plugins.hooks().clone()), lines: plugins.lines()?, ..core };
    let rank = Rank::load(options, core, world)?;
    plugins.ready()?;
    Ok((rank, plugins))
}

/// Loads the model of a setup, starting the other ranks.
pub fn open(setup: &Setup) -> anyhow::Result<Model> {
    let settings = setup.settings();
    let options = options(settings)?;
    let company = setup.company()?;
    let mut sentinel = None;
    if !setup.chosen.is_empty() {
        let cache = cache_folder()?;
        for running in crashed(&cache) {
            super::tell(&running);
        }
        let names = setup.chosen.iter().map(|c| c.library.name.clone()).collect();
        sentinel = Some(Sentinel::raise(&cache, (0, settings.ranks), names)?);
    }
    threads(settings.threads, settings.ranks)?;
    let (world, followers) = meet(settings, &options, &company, None)?;
    let loading = Loading::start(&options.model);
    let device = device::open(settings.device, 0)?;
    let core = CoreOptions { progress: loading.told(), device, ..CoreOptions::default() };
    let (rank, plugins) = load(&options, core, world, setup.chosen.clone(), &company)?;
    let limits = rank.limits;
    Ok(Model { rank, others: Others { followers, plugins: Arc::new(plugins), limits, sentinel } })
}

/// Loads the model and starts the engine.
pub fn engine(setup: &Setup) -> anyhow::Result<(Arc<Engine>, Others)> {
    let Model { rank, others } = open(setup)?;
    let engine = Engine::start(rank).context("the engine does not start")?;
    Ok((Arc::new(engine), others))
}

/// What every rank is started with.
pub fn options(settings: &Settings) -> anyhow::Result<Options> {
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
        transport: settings.transport.clone(),
        executor: settings.executor.clone(),
        plan_wait: settings.plan_wait.clone(),
        round_driver: settings.round_driver.clone(),
        hook_limit_ms: (settings.hook_limit_s.max(0.0) * 1e3) as u64,
    })
}

/// Sizes the pool of threads. Ranks on one machine share its cores.
pub fn threads(asked: Option<usize>, ranks: usize) -> anyhow::Result<()> {
    let share = || std::thread::available_parallelism().map_or(1, usize::from).div_ceil(ranks);
    let threads = asked.unwrap_or_else(share);
    rayon::ThreadPoolBuilder::new().num_threads(threads).build_global().context("the threads of the kernels")
}

/// Starts the other ranks and meets them. They load the model, or measure exchanges.
pub fn meet(
    settings: &Settings,
    options: &Options,
    company: &Company,
    exchange: Option<&Work>,
) -> anyhow::Result<(World, Followers)> {
    if settings.ranks == 1 {
        return Ok((World::single(), Followers(None)));
    }
    if let Some(at) = &settings.ranks_at {
        let (lead, secret) = (Lead::bind(address(at)?)?, shared_secret()?);
        let (addr, last) = (lead.addr(), settings.ranks - 1);
        super::tell(&format_args!("rank 0 waits at {addr} for ranks 1 to {last} (`plugfold join --rank N`)"));
        return Ok((lead.world(settings.ranks, &secret, ACROSS, &mut || Ok(()))?, Followers(None)));
    }
    let secret = Secret::random()?;
    let lead = Lead::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
    let program = std::env::current_exe().context("the path of this program")?;
    let settled = serde_json::to_string(options)?;
    let mut common: Vec<OsString> = vec!["rank".into(), "--lead".into(), lead.addr().to_string().into()];
    common.extend(["--ranks".into(), settings.ranks.to_string().into(), "--options".into(), settled.into()]);
    common.extend(["--plugins".into(), serde_json::to_string(company)?.into()]);
    common.extend(["--device".into(), settings.device.to_string().into()]);
    if let Some(work) = exchange {
        common.extend(["--exchange".into(), serde_json::to_string(work)?.into()]);
    }
    common.extend(settings.threads.into_iter().flat_map(|n| ["--threads".into(), n.to_string().into()]));
    let children = spawn_local(&program, settings.ranks, &secret, |rank| {
        common.iter().cloned().chain(["--rank".into(), rank.to_string().into()]).collect()
    })?;
    let mut followers = Followers(Some(children));
    let mut check = || followers.0.as_mut().map_or(Ok(()), Children::check);
    let world = lead.world(settings.ranks, &secret, MEETING, &mut check)?;
    Ok((world, followers))
}

/// The secret that ranks of several hosts are given.
fn shared_secret() -> anyhow::Result<Secret> {
    let secret = std::env::var(SECRET_ENV).with_context(|| {
        format!("{SECRET_ENV} is not set: ranks of several hosts know each other by it, so set it to one text on all of them")
    })?;
    Ok(Secret::new(secret))
}

/// The address that the setting `ranks_at` names.
fn address(at: &str) -> anyhow::Result<SocketAddr> {
    let found = at.to_socket_addrs().with_context(|| format!("ranks_at is {at:?}: give ADDRESS:PORT"))?;
    found.into_iter().next().with_context(|| format!("ranks_at is {at:?}: no such host"))
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
    plugins: String,
    #[arg(long)]
    device: Device,
    #[arg(long)]
    threads: Option<usize>,
    /// What to measure, instead of loading a model.
    #[arg(long)]
    exchange: Option<String>,
}

impl Follow {
    /// Joins rank 0, loads, follows.
    pub fn run(self) -> anyhow::Result<()> {
        let secret = std::env::var(SECRET_ENV)
            .with_context(|| format!("{SECRET_ENV} is not set: ranks are started by rank 0, with --ranks"))?;
        let options: Options = serde_json::from_str(&self.options).context("--options")?;
        threads(self.threads, self.ranks)?;
        let company: Company = serde_json::from_str(&self.plugins).context("--plugins")?;
        let class = device::class(self.device)?;
        let chosen = choose(&company.list, &Search::only(company.folders.clone()), &class)?;
        let sentinel = sentinel(&chosen, self.rank, self.ranks)?;
        let world = World::join(self.lead, self.rank, self.ranks, &Secret::new(secret), MEETING)?;
        let device = device::open(self.device, self.rank)?;
        if let Some(work) = &self.exchange {
            let work = bench_exchange::read(work)?;
            work.run(&options, &company, chosen, &world, device.as_ref())?;
            return Ok(());
        }
        follow(&options, device, world, chosen, &company, sentinel)
    }
}

/// A further rank of an engine whose rank 0 is on another host: the same settings and plugins as there, with `ranks_at` the address
/// at which that waits.
#[derive(Args)]
pub struct Join {
    #[command(flatten)]
    model: ModelArgs,
    /// This rank, from 1 on.
    #[arg(long, value_name = "N")]
    rank: usize,
    /// Which of this host's ranks it is: the first takes the first GPU.
    #[arg(long, value_name = "N", default_value_t = 0)]
    place: usize,
}

impl Join {
    /// Joins rank 0, loads, follows.
    pub fn run(self) -> anyhow::Result<()> {
        let setup = self.model.setup(json!({}))?;
        let settings = setup.settings();
        let Some(at) = &settings.ranks_at else {
            bail!("--set ranks_at=ADDRESS:PORT: give the address at which rank 0 waits");
        };
        if self.rank == 0 || self.rank >= settings.ranks {
            let last = settings.ranks.saturating_sub(1);
            bail!("--rank {} of --ranks {}: further ranks are 1 to {last}", self.rank, settings.ranks);
        }
        let (at, secret, options) = (address(at)?, shared_secret()?, options(settings)?);
        let company = setup.company()?;
        threads(settings.threads, 1)?;
        let sentinel = sentinel(&setup.chosen, self.rank, settings.ranks)?;
        let world = World::join(at, self.rank, settings.ranks, &secret, ACROSS)?;
        let device = device::open(settings.device, self.place)?;
        follow(&options, device, world, setup.chosen, &company, sentinel)
    }
}

fn sentinel(chosen: &[Chosen], rank: usize, ranks: usize) -> anyhow::Result<Option<Sentinel>> {
    if chosen.is_empty() {
        return Ok(None);
    }
    let names = chosen.iter().map(|c| c.library.name.clone()).collect();
    Ok(Some(Sentinel::raise(&cache_folder()?, (rank, ranks), names)?))
}

/// A follower's life.
fn follow(
    options: &Options,
    device: Option<Arc<dyn plugfold_kernels::device::Device>>,
    world: World,
    chosen: Vec<Chosen>,
    company: &Company,
    mut sentinel: Option<Sentinel>,
) -> anyhow::Result<()> {
    let core = CoreOptions { device, ..CoreOptions::default() };
    let (rank, plugins) = load(options, core, world, chosen, company)?;
    sentinel.as_mut().map_or(Ok(()), Sentinel::serving)?;
    rank.follow_or(|_| {
        // The other ranks know the reason; this process would never end.
        std::thread::sleep(Duration::from_secs(1));
        std::process::exit(1);
    })?;
    drop(plugins);
    drop(sentinel);
    Ok(())
}

/// The text model of a checkpoint; ids that its configuration names as ends of a reply are added once it is read.
pub fn text(model: &Path) -> anyhow::Result<plugfold::text::TextModel> {
    if !model.is_dir() {
        bail!("{} is not a folder: give the folder of a checkpoint with --model", model.display());
    }
    Ok(plugfold::text::TextModel::load(model, &[])?)
}

//! One loaded rank, before and beside serving: loading in step, following, traces.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use plugfold_abi::points::{
    Bell, BellObject, BootPhase, Limits, LimitsLink, Observer, ObserverObject, PlanWait, RoundDriver,
    SequencesObject, SlotMemory, Store, interest,
};
use plugfold_abi::{OpError, Phase, Text};
use serde::{Deserialize, Serialize};

use crate::core::{Core, CoreOptions, Hooking, LoadError, SeqRows, SequencesOf, Want};
use crate::hooks::{Calls, ChoiceError, HookError, Hooked, Hooks, chosen};
use crate::plan::{Order, Plan};
use crate::ranks::{RankError, SettingsDigest, World};
use crate::rounds::{Report, RoundError, Rounds};
use crate::split::Split;
use crate::transport;
use crate::watchdog::{Hung, Watchdog};
use crate::weights::Origin;

/// Settings that every rank must be started with alike.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Options {
    /// Folder of the checkpoint.
    pub model: PathBuf,
    /// Tokens a sequence may hold; `None`: what the model allows.
    pub context: Option<usize>,
    /// Sequences at once.
    pub slots: usize,
    /// Rows of the largest verify window.
    pub window_rows: usize,
    /// Rows of a prefill chunk.
    pub prefill_rows: usize,
    /// Load weights that are not numbers.
    pub allow_nan: bool,
    /// Name of the transport of collectives; `None`: the built-in one, over TCP.
    pub transport: Option<String>,
    /// Name of the executor of programs; `None`: their steps run one after another.
    #[serde(default)]
    pub executor: Option<String>,
    /// Name of the way to wait for the next round; `None`: asleep.
    #[serde(default)]
    pub plan_wait: Option<String>,
    /// Name of who runs rounds; `None`: their parts run one after another.
    #[serde(default)]
    pub round_driver: Option<String>,
    /// Milliseconds after which a hook that has not returned ends the engine; 0: never.
    #[serde(default)]
    pub hook_limit_ms: u64,
}

impl Options {
    /// The defaults: one slot, windows of 8 rows, chunks of 64.
    pub fn new(model: impl Into<PathBuf>) -> Self {
        Self {
            model: model.into(),
            context: None,
            slots: 1,
            window_rows: 8,
            prefill_rows: 64,
            allow_nan: false,
            transport: None,
            executor: None,
            plan_wait: None,
            round_driver: None,
            hook_limit_ms: 120_000,
        }
    }
}

/// Why a rank does not start or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// This rank's share of the model.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The connection between ranks, or settings that differ.
    #[error(transparent)]
    Rank(#[from] RankError),
    /// Another rank could not load its share.
    #[error("{0}")]
    Elsewhere(String),
    /// A round that ended the engine.
    #[error(transparent)]
    Round(#[from] RoundError),
    /// Settings that make no sense.
    #[error("{0}")]
    Options(String),
    /// A plugin.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// A control message that cannot be read: the ranks run different builds.
    #[error("rank 0 sent a message that this build cannot read ({0}): start all ranks from one build")]
    Message(String),
}

/// Progress of loading: (bytes made, total bytes of the checkpoint's share or 0 when unknown).
pub type LoadProgress = Arc<dyn Fn(usize) + Send + Sync>;

/// One rank with its model and its connection to the others.
pub struct Rank {
    /// The model.
    pub core: Core,
    /// The other ranks.
    pub world: World,
    /// Running sequences.
    pub rounds: Rounds,
    /// Sizes in force, after all plugins had their say.
    pub limits: Limits,
    options: Options,
}

/// Other hooks for a rank that is loaded, with all that follows from them.
pub struct Company {
    hooking: Hooking,
    rounds: Rounds,
    options: Options,
}

/// Logits (and streams) of every position of a prompt.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// `[positions, vocabulary]`.
    pub logits: Vec<f32>,
    /// `[positions, hidden]`, what the head reads.
    pub rows: Vec<f32>,
    /// Per layer `[positions, streams * hidden]`; empty unless asked for.
    pub streams: Vec<Vec<f32>>,
}

impl Rank {
    /// Loads this rank's share, in step with the others: if one cannot, none starts, and all know why.
    ///
    /// # Errors
    /// This rank's reason, another's, or settings that differ between ranks.
    pub fn load(options: &Options, core_options: CoreOptions, world: World) -> Result<Self, StartError> {
        if options.prefill_rows == 0 {
            return Err(StartError::Options("prefill rows must be at least 1".into()));
        }
        let hooks = core_options.hooks.clone();
        let lines = core_options.lines.clone();
        let mut limits = raised(options, &hooks)?;
        let mut options = options.clone();
        options.slots = limits.slots as usize;
        options.window_rows = limits.window_rows as usize;
        options.prefill_rows = limits.prefill_rows as usize;
        let core_options = CoreOptions {
            context: options.context.map(|_| limits.context as usize),
            slots: options.slots,
            window_rows: options.window_rows,
            allow_nan: options.allow_nan,
            executor: options.executor.clone(),
            ..core_options
        };
        let ranks = Split { rank: world.rank(), ranks: world.ranks() };
        let mut boot = Boot::new(&hooks)?;
        let device = core_options.device.as_deref();
        let comm = transport::open(options.transport.as_deref(), &hooks, &world, device)?;
        boot.over("transport", 0)?;
        let loaded = Core::load_weights(&options.model, &core_options, ranks, comm);
        let bytes = loaded.as_ref().map_or(0, |core| core.memory().0);
        boot.over(
            if loaded.as_ref().is_ok_and(|c| *c.origin() != Origin::Built) { PREPARED } else { BUILT },
            bytes,
        )?;
        let mut core = together(&world, "loaded", "load the model", loaded)?;
        boot.over("waiting for the other ranks", 0)?;
        let fit = together(&world, "slots", "say how many slots fit", fitting(&core, options.slots))?;
        let slots = if world.ranks() > 1 { world.agree_min("fewest slots", fit)? } else { fit } as usize;
        if slots < options.slots {
            tracing::warn!(
                "{slots} of {} slots fit, with {} bytes each: serving {slots} sequences at once",
                options.slots,
                core.cache_table().slot_bytes()
            );
        }
        limits.slots = slots as u32;
        let opened = core.allocate(slots).and_then(|()| open_stores(&mut core));
        together(&world, "stores", "open its stores", opened)?;
        boot.over("caches and programs", core.memory().1)?;
        let mut digest = digest(&mut core, &options, &limits)?;
        options.slots = slots;
        for (name, value) in &lines {
            digest.add(name.clone(), value);
        }
        // After the settings of plugins, which say more about a difference.
        digest.add("weights as plugins change them", core.changed_weights());
        digest.compare(&world)?;
        let driver = options.round_driver.as_deref();
        let driver = chosen(&hooks.drivers, "round driver", driver, RoundDriver::name).map_err(refused)?;
        chosen(&hooks.waits, "way to wait", options.plan_wait.as_deref(), PlanWait::name).map_err(refused)?;
        let rounds = Rounds::new(&core, options.prefill_rows, limits.prefill_rows_max as usize)?;
        let rounds = rounds.driven_by(driver);
        if !hooks.observers.is_empty() {
            rayon::broadcast(|_| hooks.thread("worker"));
        }
        Ok(Self { core, world, rounds, limits, options })
    }

    /// Prepares other hooks for this rank, to be exchanged with those in force: of the options those count that choose
    /// hooks by name (executor, way to wait, round driver).
    ///
    /// # Errors
    /// A hook that cannot say what it is, or one that is chosen and not there.
    pub fn company(&self, options: &Options, hooks: &Arc<Hooks>) -> Result<Company, StartError> {
        let options = Options {
            executor: options.executor.clone(),
            plan_wait: options.plan_wait.clone(),
            round_driver: options.round_driver.clone(),
            ..self.options.clone()
        };
        let driver = options.round_driver.as_deref();
        let driver = chosen(&hooks.drivers, "round driver", driver, RoundDriver::name).map_err(refused)?;
        chosen(&hooks.waits, "way to wait", options.plan_wait.as_deref(), PlanWait::name).map_err(refused)?;
        let hooking = self.core.hooking(hooks.clone(), options.executor.as_deref())?;
        let most = self.limits.prefill_rows_max as usize;
        let rounds = Rounds::with_hooks(&self.core, hooks, options.prefill_rows, most)?.driven_by(driver);
        Ok(Company { hooking, rounds, options })
    }

    /// Exchanges the hooks in force for others, while no sequence runs: the same weights, caches and memory are then used by
    /// both in turn.
    pub fn exchange_hooks(&mut self, other: &mut Company) {
        self.core.exchange_hooks(&mut other.hooking);
        std::mem::swap(&mut self.rounds, &mut other.rounds);
        std::mem::swap(&mut self.options, &mut other.options);
    }

    /// Settings in force.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// A follower's life: runs what rank 0 orders until it says goodbye.
    ///
    /// # Errors
    /// What ends the engine; every rank ends with the same.
    pub fn follow(self) -> Result<(), StartError> {
        self.follow_or(|_| {})
    }

    /// As [`Rank::follow`]. `hung` is told, on another thread, of a hook that never returns: the other ranks have ended then,
    /// and this call will not come back.
    ///
    /// # Errors
    /// As [`Rank::follow`], and when the system gives no thread.
    pub fn follow_or(mut self, hung: impl FnOnce(&Hung) + Send + 'static) -> Result<(), StartError> {
        let guard = self.world.guard();
        let _watchdog = self
            .watch(move |found| {
                tracing::error!("{found}: all ranks end");
                guard.fail(found.to_string());
                hung(&found);
            })
            .map_err(|e| StartError::Options(format!("the watch over hooks does not start: {e}")))?;
        let hooks = self.core.hooks().clone();
        hooks.thread("round");
        let name = self.options.plan_wait.as_deref();
        let wait = chosen(&hooks.waits, "way to wait", name, PlanWait::name).map_err(refused)?;
        loop {
            if let Some(h) = wait {
                let bell = FollowerBell { world: &self.world, calls: &h.calls };
                let waited = h.call(|w| w.follow(&BellObject::lend(&bell)));
                waited.map_err(|e| self.give_up(e.into()))?;
            }
            let Some(message) = self.world.receive()? else { break };
            let order = postcard::from_bytes(&message).map_err(|e| StartError::Message(e.to_string()))?;
            let done = match order {
                Order::Round(plan) => self.round(plan).map(|_| ()),
                Order::Trace { ids, chunk, streams } => {
                    trace(&mut self.core, &ids, chunk, streams).map(|_| ())
                }
            };
            if let Err(error) = done {
                return Err(self.give_up(error));
            }
        }
        self.world.goodbye();
        Ok(())
    }

    /// Watches this rank's hooks from another thread.
    pub(crate) fn watch(&self, hung: impl FnOnce(Hung) + Send + 'static) -> std::io::Result<Watchdog> {
        let (guard, exchanging) = (self.world.guard(), self.core.exchanging().clone());
        let limit = Duration::from_millis(self.options.hook_limit_ms);
        Watchdog::start(self.core.hooks(), limit, move || exchanging.runs() || guard.waits(), hung)
    }

    /// Runs a plan on this rank; a panic in it becomes the reason that ends all ranks.
    pub(crate) fn round(&mut self, plan: Plan) -> Result<Report, RoundError> {
        let ran = catch_unwind(AssertUnwindSafe(|| self.rounds.run(&mut self.core, &self.world, plan)));
        ran.unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
            Err(RoundError::Forward(format!("a panic in a round: {}", text.unwrap_or_default())))
        })
    }

    /// Ends all ranks with this rank's reason, unless they have ended already for another.
    pub(crate) fn give_up(&self, error: RoundError) -> StartError {
        match error {
            RoundError::Rank(error) => StartError::Rank(error),
            other => match self.world.ended() {
                Some(end) => StartError::Rank(RankError::Ended(end)),
                None => StartError::Rank(self.world.fail(other.to_string())),
            },
        }
    }

    /// Rank 0: sends an order to the followers.
    pub(crate) fn order(&self, order: &Order) -> Result<(), RankError> {
        if self.world.ranks() == 1 {
            return Ok(());
        }
        match postcard::to_stdvec(order) {
            Ok(bytes) => self.world.broadcast(&bytes),
            Err(e) => Err(self.world.fail(format!("a plan that cannot be written: {e}"))),
        }
    }

    /// Rank 0: runs a prompt on all ranks and gathers the logits of every position. Uses slot 0.
    ///
    /// # Errors
    /// Ids outside the vocabulary, a prompt over the context, a failure while running.
    pub fn trace(&mut self, ids: &[u32], streams: bool) -> Result<Trace, StartError> {
        let vocab = self.core.config().vocab_size;
        if let Some(id) = ids.iter().find(|id| **id as usize >= vocab) {
            return Err(StartError::Options(format!(
                "token id {id} is outside the vocabulary of {vocab} ids"
            )));
        }
        let most = self.core.capacity().tokens;
        if ids.is_empty() || ids.len() > most {
            let n = ids.len();
            return Err(StartError::Options(format!(
                "{n} ids: give 1 to {most}, the context of this engine"
            )));
        }
        let chunk = self.options.prefill_rows;
        self.order(&Order::Trace { ids: ids.to_vec(), chunk, streams })?;
        trace(&mut self.core, ids, chunk, streams).map_err(|e| self.give_up(e))
    }
}

/// Weights that were read as they had been built.
const PREPARED: &str = "weights, prepared";
/// Weights that were built.
const BUILT: &str = "weights, built";

/// Tells observers how the start goes.
struct Boot<'h> {
    observers: Vec<&'h Hooked<ObserverObject>>,
    since: Instant,
}

impl<'h> Boot<'h> {
    fn new(hooks: &'h Hooks) -> Result<Self, HookError> {
        let mut observers = Vec::new();
        for observer in &hooks.observers {
            if observer.call(Observer::interests)? & interest::BOOT != 0 {
                observers.push(observer);
            }
        }
        Ok(Self { observers, since: Instant::now() })
    }

    /// A phase is over, in which so many bytes were taken.
    fn over(&mut self, name: &str, bytes: usize) -> Result<(), HookError> {
        let seconds = self.since.elapsed().as_secs_f64();
        let phase = BootPhase { name: Text::from(name), seconds, bytes: bytes as u64 };
        self.observers.iter().try_for_each(|o| o.call(|o| o.boot(&phase)))?;
        self.since = Instant::now();
        Ok(())
    }
}

#[allow(clippy::needless_pass_by_value)] // as `map_err` gives it
fn refused(error: ChoiceError) -> StartError {
    StartError::Options(error.to_string())
}

/// What a follower's way to wait listens to.
struct FollowerBell<'a> {
    world: &'a World,
    calls: &'a Calls,
}

impl Bell for FollowerBell<'_> {
    fn sleep(&self, seconds: f64) -> Result<bool, OpError> {
        let within = Duration::try_from_secs_f64(seconds.max(0.0)).ok();
        self.calls.sleep(|| self.world.arrived(within)).map_err(|e| OpError::fatal(e.to_string()))
    }
    fn arrived(&self) -> Result<u32, OpError> {
        self.sleep(0.0).map(u32::from)
    }
}

/// The sizes asked for, as plugins raise them.
///
/// # Errors
/// A plugin that fails, lowers a limit, or leaves a chunk size over the largest.
pub fn raised(options: &Options, hooks: &Hooks) -> Result<Limits, StartError> {
    let mut limits = Limits {
        context: options.context.map_or(0, |c| c as u32),
        slots: options.slots as u32,
        window_rows: options.window_rows as u32,
        prefill_rows: options.prefill_rows as u32,
        prefill_rows_max: options.prefill_rows as u32,
        piece: options.prefill_rows as u32,
    };
    for h in &hooks.limits {
        let before = limits;
        h.call(|l| l.raise(&mut limits))?;
        let fields =
            |l: &Limits| [l.context, l.slots, l.window_rows, l.prefill_rows, l.prefill_rows_max, l.piece];
        // The chunk size is a choice, not a bound: it may fall.
        let lowered =
            fields(&before).iter().zip(fields(&limits)).enumerate().any(|(i, (b, a))| i != 3 && a < *b);
        if lowered || limits.prefill_rows == 0 || limits.prefill_rows > limits.prefill_rows_max {
            return Err(StartError::Options(format!(
                "plugin {} lowers a limit or leaves chunks over the largest: {before:?} became {limits:?}",
                h.owner
            )));
        }
    }
    Ok(limits)
}

/// Takes a step of the start on all ranks: what one could not do, none goes on from, and all know why.
fn together<T>(world: &World, label: &str, what: &str, mine: Result<T, LoadError>) -> Result<T, StartError> {
    if world.ranks() > 1 {
        let said = mine.as_ref().err().map_or_else(String::new, ToString::to_string);
        let all = world.gather_to_all(label, said.as_bytes())?;
        if let (Some(rank), true) = (all.iter().position(|m| !m.is_empty()), mine.is_ok()) {
            let said = String::from_utf8_lossy(&all[rank]).into_owned();
            return Err(StartError::Elsewhere(format!("{} cannot {what}: {said}", world.who(rank))));
        }
    }
    Ok(mine?)
}

/// How many of the slots this rank can make.
fn fitting(core: &Core, asked: usize) -> Result<u64, LoadError> {
    let memory = SlotMemory {
        slots: asked as u32,
        slot_bytes: core.cache_table().slot_bytes() as u64,
        free_bytes: core.free_bytes()?,
    };
    let mut slots = memory.slots;
    for h in &core.hooks().limits {
        slots = slots.min(h.call(|l| l.fit(&memory))?.max(1));
    }
    Ok(u64::from(slots))
}

fn open_stores(core: &mut Core) -> Result<(), LoadError> {
    let hooks = core.hooks().clone();
    let sequences = SequencesOf::new(core);
    let lent = SequencesObject::lend(&sequences);
    Ok(hooks.stores.iter().try_for_each(|h| h.call(|s| s.open(&lent)))?)
}

fn digest(core: &mut Core, options: &Options, limits: &Limits) -> Result<SettingsDigest, LoadError> {
    let mut digest = SettingsDigest::default();
    digest.add("engine", env!("CARGO_PKG_VERSION"));
    digest.add("device class", core.device_class());
    digest.add("checkpoint", core.content());
    digest.add("draft head", &core.has_mtp());
    let capacity = core.capacity();
    digest.add("context", &capacity.tokens);
    // Those asked for: the ranks have agreed on how many there are.
    digest.add("slots", &options.slots);
    digest.add("window rows", &capacity.window_rows);
    digest.add("prefill rows", &options.prefill_rows);
    digest.add("largest prefill chunk", &limits.prefill_rows_max);
    digest.add("prompt piece", &limits.piece);
    digest.add("transport", options.transport.as_deref().unwrap_or("built in"));
    digest.add("executor", options.executor.as_deref().unwrap_or("built in"));
    digest.add("way to wait", options.plan_wait.as_deref().unwrap_or("built in"));
    digest.add("round driver", options.round_driver.as_deref().unwrap_or("built in"));
    for (interface, owner) in core.hooks().list() {
        digest.add(format!("hooks of kind {interface}"), owner);
    }
    for spec in core.hooks().knobs.specs.iter() {
        digest.add(format!("request knob {}", spec.name), &format!("{:?}, {:?}", spec.effect, spec.fold));
    }
    // Bytes a row are not among them: shares of heads may differ by one.
    for f in core.cache_table().families() {
        digest.add(
            format!("cache {} of {:?}", f.id, f.owner),
            &format!("{:?} x {} rows, {}, {:?}", f.layers, f.rows, f.format, f.addressing),
        );
    }
    digest.add("reference arithmetic", plugfold_kernels::cpu::VERSION);
    let knobs = core.hooks().knobs.defaults.clone();
    for (name, phase) in [("window", Phase::Window), ("prefill", Phase::Prefill)] {
        let (bits, _) = core.bits(phase, 1, &knobs)?;
        digest.add(format!("bits of {name}"), &bits.join(" "));
    }
    Ok(digest)
}

/// Every rank's part of a trace.
fn trace(core: &mut Core, ids: &[u32], chunk: usize, streams: bool) -> Result<Trace, RoundError> {
    core.begin(0);
    let hooks = core.hooks().clone();
    hooks.stores.iter().try_for_each(|h| h.call(|s| s.overwritten(0, 0)))?;
    let layers = core.config().layers.len();
    let mut out = Trace { streams: vec![Vec::new(); if streams { layers } else { 0 }], ..Trace::default() };
    for tokens in ids.chunks(chunk) {
        let rows = [SeqRows { slot: 0, tokens, want: Want::All, embeds: &[] }];
        let forward = core.forward(Phase::Prefill, &rows, None, streams)?;
        if let Some(failure) = &forward.failure {
            return Err(RoundError::Forward(failure.to_string()));
        }
        let share = core.output(&forward, "logits").map(<[f32]>::to_vec).unwrap_or_default();
        out.logits.extend(whole_rows(core, &share, tokens.len())?);
        out.rows.extend_from_slice(core.output(&forward, "rows").unwrap_or(&[]));
        for (i, stream) in out.streams.iter_mut().enumerate() {
            stream.extend_from_slice(core.output(&forward, &format!("layer.{i}")).unwrap_or(&[]));
        }
        core.commit(&forward, &[tokens.len()])?;
    }
    Ok(out)
}

/// Puts all ranks' shares of logits rows together.
fn whole_rows(core: &Core, share: &[f32], rows: usize) -> Result<Vec<f32>, RoundError> {
    let Some(comm) = core.comm() else { return Ok(share.to_vec()) };
    let (vocab, split) = (core.config().vocab_size, core.split());
    let most = vocab.div_ceil(split.ranks);
    let width = split.share(vocab).len();
    let mut mine = vec![0.0f32; rows * most];
    for (to, from) in mine.chunks_mut(most).zip(share.chunks(width)) {
        to[..width].copy_from_slice(from);
    }
    let mut all = vec![0.0f32; mine.len() * split.ranks];
    comm.gather(bytemuck::cast_slice(&mine), bytemuck::cast_slice_mut(&mut all))
        .map_err(crate::exchange::ExchangeError::from)?;
    let mut out = vec![0.0; rows * vocab];
    for (rank, part) in all.chunks(mine.len()).enumerate() {
        let place = split.share_of(rank, vocab);
        for (to, from) in out.chunks_mut(vocab).zip(part.chunks(most)) {
            to[place.clone()].copy_from_slice(&from[..place.len()]);
        }
    }
    Ok(out)
}

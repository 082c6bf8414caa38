//! One rank's model with its sequences: forwards, commits, snapshots. Knows nothing of requests.

mod families;
mod hooking;
mod programs;
mod sequences;
mod stage;
mod tags;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use plugfold_abi::points::{Executor, ExecutorObject, Launched, Mode};
use plugfold_abi::points::{Owner, StatePart};
use plugfold_abi::{Comm as _, CommObject, OpError, Phase, RoundTable, Slice, SlotState, Text, View};
use plugfold_kernels::device::{Device, DeviceError, Memory};

use crate::checkpoint::{Checkpoint, CheckpointError, CheckpointErrors};
use crate::config::{ConfigError, ModelConfig};
use crate::hooks::{ChoiceError, Exchanging, HookError, Hooked, Hooks, chosen};
use crate::knobs::Values;
use crate::memory::free_bytes;
use crate::program::{Arena, Failure, HOST, Read, Registry, ResolveError, Resolved, RunInputs, run};
use crate::split::{Split, SplitError};
use crate::state::{CacheTable, Capacity, Slot, Snapshot, reference_families};
use crate::weights::{self, Given, Origin, Progress, Shelf, Source, WeightError, WeightTable};
pub use hooking::Hooking;
use programs::{Key, Kind, Programs};
pub use sequences::SequencesOf;
use stage::Stages;
pub use tags::Tag;

/// Why a model cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// `config.json`.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The tensors.
    #[error(transparent)]
    Tensors(#[from] CheckpointErrors),
    /// A tensor's values.
    #[error(transparent)]
    Values(#[from] CheckpointError),
    /// The rank count.
    #[error(transparent)]
    Split(#[from] SplitError),
    /// A program that does not resolve.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// A plugin's hook.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// The device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The collectives.
    #[error("the transport: {0}")]
    Comm(#[from] OpError),
    /// An executor that cannot be had.
    #[error(transparent)]
    Choice(#[from] ChoiceError),
    /// Two plugins that edit the same thing.
    #[error("{0}")]
    Layout(String),
    /// A plugin that changes or stores weights.
    #[error("{0}")]
    Weights(String),
    /// A size that makes no sense.
    #[error("{0}")]
    Size(String),
}

impl<E: std::error::Error + 'static> From<WeightError<E>> for LoadError
where
    LoadError: From<E>,
{
    fn from(error: WeightError<E>) -> Self {
        match error {
            WeightError::Source(error) => error.into(),
            other => Self::Weights(other.to_string()),
        }
    }
}

/// Which rows of a sequence's part of a forward want logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// None.
    Nothing,
    /// The last row.
    Last,
    /// All rows.
    All,
}

/// One sequence's rows of a forward.
#[derive(Clone, Copy, Debug)]
pub struct SeqRows<'a> {
    /// Slot.
    pub slot: usize,
    /// Tokens, following the committed ones.
    pub tokens: &'a [u32],
    /// Which rows want logits.
    pub want: Want,
    /// Per row, the row that stands in for its embedding; empty when there are none.
    pub embeds: &'a [Option<&'a [f32]>],
}

/// One sequence's rows of the draft head.
#[derive(Clone, Copy, Debug)]
pub struct MtpRows<'a> {
    /// Slot.
    pub slot: usize,
    /// Position of the first row.
    pub start: usize,
    /// The token that follows each row.
    pub next_ids: &'a [u32],
    /// `[rows, hidden]`: the model's final rows, or the head's own in a chain.
    pub hidden: &'a [f32],
    /// Which rows want logits.
    pub want: Want,
    /// Per row, the row that stands in for the embedding of the token that follows; empty when there are none.
    pub embeds: &'a [Option<&'a [f32]>],
}

/// The round table's memory.
#[derive(Debug, Default)]
pub struct RoundBuffer {
    tokens: Vec<u32>,
    positions: Vec<u32>,
    row_seq: Vec<u32>,
    seq_first: Vec<u32>,
    seq_rows: Vec<u32>,
    seq_start: Vec<u32>,
    seq_slot: Vec<u32>,
    seq_parity: Vec<u32>,
    seq_keep: Vec<u32>,
    out_rows: Vec<u32>,
    embeds: Vec<usize>,
    fields: Vec<View>,
}

impl Clone for RoundBuffer {
    fn clone(&self) -> Self {
        let mut made = Self::default();
        made.clone_from(self);
        made
    }
    /// Keeps the memory that there is.
    fn clone_from(&mut self, from: &Self) {
        self.tokens.clone_from(&from.tokens);
        self.positions.clone_from(&from.positions);
        self.row_seq.clone_from(&from.row_seq);
        self.seq_first.clone_from(&from.seq_first);
        self.seq_rows.clone_from(&from.seq_rows);
        self.seq_start.clone_from(&from.seq_start);
        self.seq_slot.clone_from(&from.seq_slot);
        self.seq_parity.clone_from(&from.seq_parity);
        self.seq_keep.clone_from(&from.seq_keep);
        self.out_rows.clone_from(&from.out_rows);
        self.embeds.clone_from(&from.embeds);
        self.fields.clone_from(&from.fields);
    }
}

impl RoundBuffer {
    /// Forgets the rows, keeps the memory.
    fn clear(&mut self) {
        let Self { tokens, positions, row_seq, seq_first, seq_rows, seq_start, .. } = self;
        for list in [tokens, positions, row_seq, seq_first, seq_rows, seq_start] {
            list.clear();
        }
        let Self { seq_slot, seq_parity, seq_keep, out_rows, embeds, fields, .. } = self;
        for list in [seq_slot, seq_parity, seq_keep, out_rows] {
            list.clear();
        }
        embeds.clear();
        fields.clear();
    }

    fn push(&mut self, at: SlotState, start: usize, tokens: &[u32], want: Want) {
        let seq = self.seq_first.len() as u32;
        let first = self.tokens.len() as u32;
        let rows = tokens.len() as u32;
        self.tokens.extend_from_slice(tokens);
        self.positions.extend((0..rows).map(|i| start as u32 + i));
        self.row_seq.extend((0..rows).map(|_| seq));
        self.seq_first.push(first);
        self.seq_rows.push(rows);
        self.seq_start.push(start as u32);
        self.seq_slot.push(at.slot);
        self.seq_parity.push(at.parity);
        self.seq_keep.push(rows);
        match want {
            Want::Nothing => {}
            Want::Last => self.out_rows.push(first + rows - 1),
            Want::All => self.out_rows.extend(first..first + rows),
        }
    }

    /// The table.
    pub fn table(&self) -> RoundTable<'_> {
        RoundTable {
            tokens: Slice::from(&self.tokens[..]),
            positions: Slice::from(&self.positions[..]),
            row_seq: Slice::from(&self.row_seq[..]),
            seq_first: Slice::from(&self.seq_first[..]),
            seq_rows: Slice::from(&self.seq_rows[..]),
            seq_start: Slice::from(&self.seq_start[..]),
            seq_slot: Slice::from(&self.seq_slot[..]),
            seq_parity: Slice::from(&self.seq_parity[..]),
            seq_keep: Slice::from(&self.seq_keep[..]),
            out_rows: Slice::from(&self.out_rows[..]),
            embeds: Slice::from(&self.embeds[..]),
            fields: Slice::from(&self.fields[..]),
        }
    }
}

/// A forward that ran; its outputs stay readable until the next one.
pub struct Forward {
    resolved: Arc<Resolved>,
    round: RoundBuffer,
    phase: Phase,
    /// Candidates asked for, before the limit of this rank's share.
    asked: Option<usize>,
    /// What failed, if anything: then nothing may be committed.
    pub failure: Option<Failure>,
    /// Hash of the exchanges that ran.
    pub collectives: u64,
    /// How it ran.
    pub mode: Mode,
}

impl Forward {
    /// How many rows wanted logits.
    pub fn out_rows(&self) -> usize {
        self.round.out_rows.len()
    }
    /// Candidates of a wanted row on the rank with the largest share (`most`) of the vocabulary.
    pub fn candidates(&self, most: usize) -> usize {
        self.asked.map_or(0, |c| c.min(most))
    }
}

/// Tensors that are made as they are read.
pub type Made = Arc<dyn Source<Error = CheckpointError> + Send>;

/// What a core is loaded with.
#[derive(Clone)]
pub struct CoreOptions {
    /// Tokens a sequence may hold; `None`: what the model allows.
    pub context: Option<usize>,
    /// Sequences at once.
    pub slots: usize,
    /// Rows of the largest verify window.
    pub window_rows: usize,
    /// Load weights that are not numbers.
    pub allow_nan: bool,
    /// Told the bytes of each weight that was made.
    pub progress: Progress,
    /// Where weights, caches and buffers lie and operations run; `None`: the host.
    pub device: Option<Arc<dyn Device>>,
    /// Tensors that are made instead of read from the checkpoint, for measuring; the folder has its configuration only.
    pub tensors: Option<Made>,
    /// Hooks of plugins.
    pub hooks: Arc<Hooks>,
    /// Name of the executor; `None`: steps run one after another.
    pub executor: Option<String>,
    /// Further lines that must be equal on all ranks: name, value.
    pub lines: Vec<(String, String)>,
}

impl Default for CoreOptions {
    fn default() -> Self {
        Self {
            context: None,
            slots: 1,
            window_rows: 8,
            allow_nan: false,
            progress: Arc::new(|_| {}),
            device: None,
            tensors: None,
            hooks: Arc::default(),
            executor: None,
            lines: Vec::new(),
        }
    }
}

/// Round tables that are kept for the next forward.
const SPARE: usize = 4;

/// Candidates rounded up so that few shapes occur. More than are needed never change a draw.
fn bucket(candidates: usize) -> usize {
    candidates.checked_next_power_of_two().unwrap_or(candidates)
}

fn gb(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

/// Refuses a checkpoint whose share cannot lie on a device. What its bytes become is often more, never much less.
fn holds(device: &dyn Device, bytes: u64, ranks: u64) -> Result<(), LoadError> {
    let (share, free) = (bytes / ranks, device.free_bytes()?);
    if share <= free {
        return Ok(());
    }
    Err(LoadError::Size(format!(
        "the checkpoint has {}, {} on each of {ranks} ranks, and {} are free on {}: it takes {} or more such ranks, or a \
         checkpoint with fewer bits a weight (`plugfold quantize`)",
        gb(bytes),
        gb(share),
        gb(free),
        device.name(),
        bytes.div_ceil(free.max(1))
    )))
}

/// The recordings that were made on a device for a model: they go with it, since what they hold goes.
struct Recordings(Option<Arc<dyn Device>>);

impl Drop for Recordings {
    fn drop(&mut self) {
        if let Some(device) = &self.0 {
            device.forget_recordings();
        }
    }
}

/// One rank's model and sequences.
pub struct Core {
    config: Arc<ModelConfig>,
    split: Split,
    capacity: Capacity,
    has_mtp: bool,
    weights: WeightTable,
    origin: Origin,
    /// What plugins made of the checkpoint's weights; empty where they are as they were.
    changed: String,
    caches: CacheTable,
    registry: Registry,
    programs: Programs,
    executor: Option<Hooked<ExecutorObject>>,
    device: Option<Arc<dyn Device>>,
    arena: Arena,
    /// Rows that stand in for embeddings, on a device.
    embeds: Memory,
    /// Round tables that are not in use.
    spare: Vec<RoundBuffer>,
    exchanging: Arc<Exchanging>,
    /// Before the collectives: recordings hold exchanges.
    _recordings: Recordings,
    comm: Option<Arc<CommObject>>,
    /// Whether exchanges may be part of a recording.
    recorded: bool,
    slots: Vec<Slot>,
    hooks: Arc<Hooks>,
    stages: Stages,
    tags: HashMap<Vec<plugfold_abi::KnobValue>, Tag>,
    content: String,
}

impl Core {
    /// Loads one rank's share of a checkpoint.
    ///
    /// # Errors
    /// Everything that is wrong with the checkpoint, before any memory for it is taken.
    pub fn load(
        dir: &Path,
        options: &CoreOptions,
        ranks: Split,
        comm: Option<Arc<CommObject>>,
    ) -> Result<Self, LoadError> {
        let mut core = Self::load_weights(dir, options, ranks, comm)?;
        core.allocate(options.slots)?;
        Ok(core)
    }

    /// As [`Core::load`], without memory for sequences: [`Core::allocate`] has to follow.
    ///
    /// # Errors
    /// As [`Core::load`].
    pub fn load_weights(
        dir: &Path,
        options: &CoreOptions,
        ranks: Split,
        comm: Option<Arc<CommObject>>,
    ) -> Result<Self, LoadError> {
        let config = ModelConfig::from_dir(dir)?;
        if let Some(made) = &options.tensors {
            return Self::without_slots(config, made, false, "made".into(), options, ranks, comm, None);
        }
        let tensors = Checkpoint::open(dir)?.check(&config)?.with_allow_nan(options.allow_nan);
        if let Some(device) = &options.device {
            let bytes: u64 = tensors.checkpoint().files().map(|(_, bytes)| bytes).sum();
            holds(&**device, bytes, ranks.ranks as u64)?;
        }
        let content = tensors.content_id()?;
        let mtp = tensors.mtp;
        let mut lines = vec![format!("checkpoint = {content}"), format!("allow_nan = {}", options.allow_nan)];
        lines.extend(tensors.checkpoint().files().map(|(name, bytes)| format!("file {name} = {bytes}")));
        Self::without_slots(config, &tensors, mtp, content, options, ranks, comm, Some((dir, lines)))
    }

    /// Builds a rank from any source of tensors.
    ///
    /// # Errors
    /// As [`Core::load`], as far as they apply.
    pub fn from_source<S: Source>(
        config: ModelConfig,
        source: &S,
        mtp: bool,
        content: String,
        options: &CoreOptions,
        ranks: Split,
        comm: Option<Arc<CommObject>>,
    ) -> Result<Self, LoadError>
    where
        LoadError: From<S::Error>,
    {
        let mut core = Self::without_slots(config, source, mtp, content, options, ranks, comm, None)?;
        core.allocate(options.slots)?;
        Ok(core)
    }

    fn without_slots<S: Source>(
        config: ModelConfig,
        source: &S,
        mtp: bool,
        content: String,
        options: &CoreOptions,
        ranks: Split,
        comm: Option<Arc<CommObject>>,
        of: Option<(&Path, Vec<String>)>,
    ) -> Result<Self, LoadError>
    where
        LoadError: From<S::Error>,
    {
        let split = Split::new(ranks.rank, ranks.ranks, &config)?;
        let tokens = options.context.unwrap_or(config.context);
        if tokens == 0 || tokens > config.context {
            let most = config.context;
            return Err(LoadError::Size(format!(
                "context {tokens} is outside 1 to {most}, the model's own limit"
            )));
        }
        if options.slots == 0 || options.window_rows == 0 {
            return Err(LoadError::Size("slots and window rows must be at least 1".into()));
        }
        let capacity = Capacity { slots: options.slots, tokens, window_rows: options.window_rows };
        let list = weights::recipes(&config, split, mtp);
        let given = Given {
            hooks: &options.hooks,
            layers: config.layers.len(),
            allow_nan: options.allow_nan,
            progress: &options.progress,
            device: options.device.as_ref(),
            shelf: of.map(|(dir, lines)| Shelf { dir, lines, split }),
        };
        let loaded = weights::load(source, &list, &given)?;
        let families = families::laid_out(reference_families(&config, split, capacity, mtp), &options.hooks)?;
        let caches = CacheTable::new(families.all.into(), 0, None)?;
        let executor =
            chosen(&options.hooks.executors, "executor", options.executor.as_deref(), Executor::name)?;
        Ok(Self {
            config: Arc::new(config),
            split,
            capacity,
            has_mtp: mtp,
            weights: loaded.table,
            origin: loaded.origin,
            changed: loaded.identity,
            caches,
            registry: Registry::new(
                &options.hooks,
                split.rank as u32,
                split.ranks as u32,
                options.device.as_ref(),
            )?,
            programs: Programs::default(),
            executor: executor.cloned(),
            arena: Arena::new(options.device.clone()),
            embeds: Memory::default(),
            device: options.device.clone(),
            spare: Vec::new(),
            exchanging: Arc::default(),
            _recordings: Recordings(options.device.clone()),
            recorded: match &comm {
                None => true,
                Some(comm) => options.device.is_some() && comm.exchanges()?.recorded,
            },
            comm,
            slots: Vec::new(),
            stages: Stages::new(&options.hooks)?,
            hooks: options.hooks.clone(),
            tags: HashMap::new(),
            content,
        })
    }

    /// Takes memory for so many sequences.
    ///
    /// # Errors
    /// A program that does not resolve; a device's memory that is used up.
    pub fn allocate(&mut self, slots: usize) -> Result<(), LoadError> {
        let families = self.caches.families().to_vec();
        self.caches = CacheTable::new(families.clone(), 0, None)?;
        if self.device.is_some() {
            let (slot, free) = (self.caches.slot_bytes() as u64, self.free_bytes()?);
            if slot * slots as u64 > free {
                let (fit, context) = (free / slot.max(1), self.capacity.tokens);
                let mend = match fit {
                    0 => "give a shorter --context".to_owned(),
                    fit => format!("give --slots {fit} or a shorter --context"),
                };
                return Err(LoadError::Size(format!(
                    "{slots} sequences of {context} tokens need {} of caches, and {} are free beside the weights: {mend}",
                    gb(slot * slots as u64),
                    gb(free)
                )));
            }
        }
        self.caches = CacheTable::new(families, slots, self.device.as_ref())?;
        self.slots = vec![Slot::default(); slots];
        self.capacity.slots = slots;
        // Programs hold the addresses of caches.
        self.programs.clear();
        let defaults = self.hooks.knobs.defaults.clone();
        self.tag(&defaults)?;
        Ok(())
    }

    /// The model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
    /// This rank's share.
    pub fn split(&self) -> Split {
        self.split
    }
    /// Sizes.
    pub fn capacity(&self) -> Capacity {
        self.capacity
    }
    /// Whether the checkpoint has a draft head.
    pub fn has_mtp(&self) -> bool {
        self.has_mtp
    }
    /// The collectives.
    pub fn comm(&self) -> Option<&Arc<CommObject>> {
        self.comm.as_ref()
    }
    /// A slot.
    pub fn slot(&self, slot: usize) -> &Slot {
        &self.slots[slot]
    }
    /// Identity of the checkpoint.
    pub fn content(&self) -> &str {
        &self.content
    }
    /// Identity of what plugins made of the checkpoint's weights; empty where they are as they were.
    pub fn changed_weights(&self) -> &str {
        &self.changed
    }
    /// Where the weights came from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }
    /// The weights.
    pub fn weights(&self) -> &WeightTable {
        &self.weights
    }
    /// Bytes of (weights, caches).
    pub fn memory(&self) -> (usize, usize) {
        (self.weights.bytes(), self.caches.bytes())
    }
    /// The families' layout, for digests.
    pub fn cache_table(&self) -> &CacheTable {
        &self.caches
    }
    /// Hooks of plugins.
    pub fn hooks(&self) -> &Arc<Hooks> {
        &self.hooks
    }
    /// The passes in force, with their plugins.
    pub fn passes(&self) -> Vec<(String, String)> {
        self.registry.passes()
    }

    /// The class of the device.
    pub fn device_class(&self) -> &str {
        self.device.as_ref().map_or(HOST, |d| d.class())
    }

    /// Bytes of memory that the device, or the host, could still give.
    ///
    /// # Errors
    /// What a device says.
    pub fn free_bytes(&self) -> Result<u64, DeviceError> {
        self.device.as_ref().map_or_else(|| Ok(free_bytes()), |d| d.free_bytes())
    }

    /// Set while other ranks may be waited for.
    pub(crate) fn exchanging(&self) -> &Arc<Exchanging> {
        &self.exchanging
    }

    /// Starts a sequence in a slot, from nothing, with the server's own knobs.
    ///
    /// # Panics
    /// As [`Core::begin_with`], where a plugin keeps state a sequence.
    pub fn begin(&mut self, slot: usize) {
        let defaults = self.hooks.knobs.defaults.clone();
        if let Err(error) = self.begin_with(slot, defaults) {
            panic!("{error}");
        }
    }

    /// Starts a sequence in a slot, from nothing.
    ///
    /// # Errors
    /// A plugin that cannot begin its state.
    pub fn begin_with(&mut self, slot: usize, knobs: Values) -> Result<(), HookError> {
        let s = &mut self.slots[slot];
        s.ids.clear();
        s.parity = 0;
        s.knobs = knobs;
        self.caches.clear_state(SlotState { slot: slot as u32, parity: 0 })?;
        self.hooks.parts.iter().try_for_each(|p| p.call(|part| part.begin(slot as u32)))
    }

    /// Copies a sequence's state at its committed length.
    ///
    /// # Errors
    /// A program that does not resolve, or a plugin that cannot save its part.
    pub fn snapshot(&mut self, slot: usize) -> Result<Snapshot, LoadError> {
        let knobs = self.slots[slot].knobs.clone();
        let tag = self.tag(&knobs)?.id;
        let s = &self.slots[slot];
        let at = SlotState { slot: slot as u32, parity: s.parity };
        let ids = Arc::from(&s.ids[..]);
        let parts = sequences::save_parts(&self.hooks, slot as u32)?;
        Ok(Snapshot { ids, slot, tag, state: self.caches.copy_state(at)?, parts })
    }

    /// Continues from a snapshot, in a slot that has begun. Returns whether it was still valid; if not, the slot is left as
    /// it was.
    ///
    /// # Errors
    /// A plugin that cannot take its part over: the slot is then empty.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<bool, LoadError> {
        let knobs = self.slots[snapshot.slot].knobs.clone();
        let tag = self.tag(&knobs)?.id;
        let s = &mut self.slots[snapshot.slot];
        if snapshot.tag != tag || !s.holds(snapshot) {
            return Ok(false);
        }
        s.ids.clear();
        s.ids.extend_from_slice(&snapshot.ids);
        s.parity = 0;
        self.caches.put_state(SlotState { slot: snapshot.slot as u32, parity: 0 }, &snapshot.state)?;
        sequences::load_parts(&self.hooks, snapshot.slot as u32, &snapshot.parts)?;
        Ok(true)
    }

    /// The whole committed state of a slot, for bit-for-bit comparison.
    ///
    /// # Panics
    /// When a plugin does not know where its rows lie, or the device fails.
    pub fn image(&mut self, slot: usize) -> Vec<(String, Vec<u32>)> {
        let (parity, length) = (self.slots[slot].parity, self.slots[slot].len());
        let (hooks, families) = (self.hooks.clone(), self.caches.families().to_vec());
        let paged = |family: usize, rows: u32| {
            let places = sequences::places(&hooks, &families[family], slot as u32, 0, rows, false);
            places.unwrap_or_else(|e| panic!("the rows of a slot: {e}"))
        };
        let image = self.caches.image(SlotState { slot: slot as u32, parity }, length, Owner::Model, paged);
        image.unwrap_or_else(|e| panic!("the state of a slot: {e}"))
    }

    fn selects(&self, end: usize) -> bool {
        end >= self.config.index.topk + self.config.index.pool
    }

    /// Runs rows of any set of sequences. Commits nothing.
    ///
    /// `candidates`: how many of the best logits each wanted row needs; `None` for all logits.
    ///
    /// # Errors
    /// A program that does not resolve. A failure while running is in the result, since collectives had to go on.
    ///
    /// # Panics
    /// When rows do not fit a slot's capacity or a window is larger than the window rows: callers plan within limits.
    pub fn forward(
        &mut self,
        phase: Phase,
        seqs: &[SeqRows<'_>],
        candidates: Option<usize>,
        streams: bool,
    ) -> Result<Forward, ResolveError> {
        let mut round = self.table();
        let mut end = 0;
        for s in seqs {
            let slot = &mut self.slots[s.slot];
            let start = slot.len();
            assert!(start + s.tokens.len() <= self.capacity.tokens, "rows beyond the slot's capacity");
            assert!(
                phase != Phase::Window || s.tokens.len() <= self.capacity.window_rows,
                "window too large"
            );
            slot.written.truncate(start);
            end = end.max(start + s.tokens.len());
            round.push(SlotState { slot: s.slot as u32, parity: slot.parity }, start, s.tokens, s.want);
        }
        if seqs.iter().any(|s| !s.embeds.is_empty()) {
            for s in seqs {
                let given = s.embeds.iter().map(|e| e.map_or(0, |r| r.as_ptr() as usize));
                round.embeds.extend(given.chain(std::iter::repeat(0)).take(s.tokens.len()));
            }
        }
        let outs = round.out_rows.len() as u32;
        let (rows, count) = (round.tokens.len() as u32, seqs.len() as u32);
        let mut key = Key::new(Kind::Forward, phase, rows, count, outs);
        key.select = self.selects(end);
        let share = self.split.share(self.config.vocab_size).len();
        let asked = candidates.map(bucket);
        key.candidates = asked.map_or(0, |c| c.min(share) as u32);
        key.streams = streams;
        Ok(Forward { asked, ..self.execute(key, round, &[])? })
    }

    /// A round table without rows, with the memory of one that is done with.
    fn table(&mut self) -> RoundBuffer {
        let mut round = self.spare.pop().unwrap_or_default();
        round.clear();
        round
    }

    /// Takes back what a forward held, for the next one.
    pub fn recycle(&mut self, forward: Forward) {
        if self.spare.len() < SPARE {
            self.spare.push(forward.round);
        }
    }

    /// Brings the rows that stand in for embeddings onto the device, and their addresses into the round table.
    fn bring(&mut self, round: &mut RoundBuffer) -> Result<(), DeviceError> {
        if self.device.is_none() || round.embeds.is_empty() {
            return Ok(());
        }
        let numbers = self.config.hidden_size;
        let bytes = numbers * 4;
        if self.embeds.len() < round.embeds.len() * bytes {
            self.embeds = Memory::default();
            self.embeds =
                Memory::new(self.device.as_ref(), "rows of embeddings", round.embeds.len() * bytes)?;
        }
        for (row, address) in round.embeds.iter_mut().enumerate().filter(|(_, a)| **a != 0) {
            // SAFETY: `forward` and `mtp` took the address from a slice of `hidden` numbers that its caller holds until the
            // forward is over.
            let given = unsafe { std::slice::from_raw_parts(*address as *const f32, numbers) };
            self.embeds.write(row * bytes, bytemuck::cast_slice(given))?;
            *address = self.embeds.address() as usize + row * bytes;
        }
        Ok(())
    }

    fn execute(
        &mut self,
        mut key: Key,
        mut round: RoundBuffer,
        hidden: &[f32],
    ) -> Result<Forward, ResolveError> {
        let (knobs, staged) = self.stages.stage(&self.hooks, &self.slots, &mut key, &mut round);
        let staged = staged.and(self.bring(&mut round).map_err(HookError::from));
        let at = self.find(key, &knobs)?;
        let resolved = self.programs.at(&at).resolved.clone();
        let (mode, chosen) = self.mode(&at);
        let told = Launched {
            program: Text::from(key.kind.name()),
            phase: key.phase,
            rows: round.tokens.len() as u32,
            seqs: round.seq_first.len() as u32,
            mode,
        };
        let began = self.stages.clock();
        let table = round.table();
        let stages = &self.stages;
        let launched = || stages.launched(&told);
        let late = || stages.fill(&self.hooks, key.phase, &round, &knobs, true);
        let watcher = |call: &plugfold_abi::Call<'_>| stages.ran(call);
        let timer = stages.timer(&resolved.program.shape, &knobs);
        let inputs = RunInputs {
            round: &table,
            weights: &self.weights,
            comm: self.comm.as_deref(),
            recorded: self.recorded,
            hidden,
            knobs: &knobs,
            launched: &launched,
            late: &late,
            timer: timer.as_deref(),
            watcher: &watcher,
            executor: self.executor.as_ref().map(|h| (h, mode)),
            device: self.device.as_deref(),
            exchanging: &self.exchanging,
            failed: staged.and(chosen).err().map(|e| Failure::of_hook("what comes before its steps", &e)),
        };
        let outcome = run(&resolved, &mut self.arena, &inputs);
        drop(timer);
        if let Some(began) = began {
            self.stages.forward(&told, began);
        }
        Ok(Forward {
            resolved,
            phase: key.phase,
            asked: None,
            failure: outcome.failure,
            collectives: outcome.collectives,
            mode: outcome.mode,
            round,
        })
    }

    /// An output of the forward that ran last: "rows" `[rows, hidden]`, "logits" `[wanted, share of the vocabulary]`,
    /// "values" and "ids" `[wanted, candidates]`, "layer.I" `[rows, streams * hidden]`.
    pub fn output(&mut self, forward: &Forward, name: &str) -> Option<&[f32]> {
        forward.resolved.output(&mut self.arena, name, &forward.round.table())
    }

    /// As [`Core::output`], without looking for a name.
    pub(crate) fn read(&mut self, forward: &Forward, what: Read) -> Option<&[f32]> {
        forward.resolved.read(&mut self.arena, what, &forward.round.table())
    }

    /// Keeps the first `keep[i]` rows of each sequence of a forward.
    ///
    /// # Errors
    /// A commit program that fails. Nothing is kept then: it writes beside the committed state, so each sequence of the forward
    /// is what it was before it.
    ///
    /// # Panics
    /// When the forward failed, a count is 0 or too large, or a prefill is not kept whole.
    pub fn commit(&mut self, forward: &Forward, keep: &[usize]) -> Result<(), CommitError> {
        assert!(forward.failure.is_none(), "a failed forward is never committed");
        let rows = &forward.round.seq_rows;
        assert_eq!(keep.len(), rows.len(), "one count a sequence");
        let partial = keep.iter().zip(rows).any(|(k, r)| *k < *r as usize);
        assert!(keep.iter().zip(rows).all(|(k, r)| *k >= 1 && *k <= *r as usize), "kept rows out of range");
        if partial {
            assert!(forward.phase == Phase::Window, "only windows are cut");
            let mut round = self.table();
            round.clone_from(&forward.round);
            round.seq_keep.clear();
            round.seq_keep.extend(keep.iter().map(|&k| k as u32));
            round.out_rows.clear();
            let shape = &forward.resolved.program.shape;
            let key = Key::new(Kind::Commit, shape.phase, shape.rows, shape.seqs, 0);
            let committed = self.execute(key, round, &[])?;
            if let Some(failure) = committed.failure {
                return Err(CommitError::Run(failure));
            }
            self.recycle(committed);
        }
        for (i, &k) in keep.iter().enumerate() {
            let first = forward.round.seq_first[i] as usize;
            let slot = &mut self.slots[forward.round.seq_slot[i] as usize];
            let tokens = &forward.round.tokens[first..first + k];
            slot.ids.extend_from_slice(tokens);
            slot.written.extend_from_slice(tokens);
            slot.parity ^= 1;
        }
        Ok(())
    }

    /// Runs rows of the draft head (its caches are its own; nothing is committed or needs to be).
    ///
    /// # Errors
    /// As [`Core::forward`].
    ///
    /// # Panics
    /// When the checkpoint has no draft head or rows do not fit.
    pub fn mtp(
        &mut self,
        seqs: &[MtpRows<'_>],
        zero_first: bool,
        candidates: Option<usize>,
    ) -> Result<Forward, ResolveError> {
        assert!(self.has_mtp, "the checkpoint has no draft head");
        let mut round = self.table();
        let mut hidden = Vec::new();
        let mut end = 0;
        for s in seqs {
            end = end.max(s.start + s.next_ids.len());
            assert!(end <= self.capacity.tokens, "rows beyond the slot's capacity");
            let parity = self.slots[s.slot].parity;
            round.push(SlotState { slot: s.slot as u32, parity }, s.start, s.next_ids, s.want);
            hidden.extend_from_slice(s.hidden);
        }
        if seqs.iter().any(|s| !s.embeds.is_empty()) {
            for s in seqs {
                let given = s.embeds.iter().map(|e| e.map_or(0, |r| r.as_ptr() as usize));
                round.embeds.extend(given.chain(std::iter::repeat(0)).take(s.next_ids.len()));
            }
        }
        let outs = round.out_rows.len() as u32;
        let (rows, count) = (round.tokens.len() as u32, seqs.len() as u32);
        let mut key = Key::new(Kind::Mtp, Phase::Draft, rows, count, outs);
        key.select = self.selects(end);
        let share = self.split.share(self.config.vocab_size).len();
        let asked = candidates.map(bucket);
        key.candidates = asked.map_or(0, |c| c.min(share) as u32);
        key.zero_first = zero_first;
        Ok(Forward { asked, ..self.execute(key, round, &hidden)? })
    }
}

/// Why a commit failed.
#[derive(Debug, thiserror::Error)]
pub enum CommitError {
    /// The commit program does not resolve.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// It failed while running.
    #[error(transparent)]
    Run(Failure),
}

#[cfg(test)]
mod tests {
    use plugfold_abi::ProviderObject;

    use super::*;

    struct Small;

    impl Device for Small {
        fn class(&self) -> &'static str {
            "small"
        }
        fn name(&self) -> String {
            "a small device".into()
        }
        fn free_bytes(&self) -> Result<u64, DeviceError> {
            Ok(8_000_000_000)
        }
        fn allocate(&self, what: &str, _: usize) -> Result<u64, DeviceError> {
            Err(DeviceError { message: what.into(), fatal: false })
        }
        fn release(&self, _: u64) {}
        fn upload(&self, _: u64, _: &[u8]) -> Result<(), DeviceError> {
            Ok(())
        }
        fn download(&self, _: u64, _: &mut [u8]) -> Result<(), DeviceError> {
            Ok(())
        }
        fn zero(&self, _: u64, _: usize) -> Result<(), DeviceError> {
            Ok(())
        }
        fn providers(&self) -> Vec<ProviderObject> {
            Vec::new()
        }
    }

    #[test]
    fn a_checkpoint_that_a_device_cannot_hold_is_refused_with_what_would_fit() {
        assert!(holds(&Small, 15_900_000_000, 2).is_ok());
        let said = holds(&Small, 163_000_000_000, 2).unwrap_err().to_string();
        assert_eq!(
            said,
            "the checkpoint has 163.0 GB, 81.5 GB on each of 2 ranks, and 8.0 GB are free on a small device: it takes 21 or \
             more such ranks, or a checkpoint with fewer bits a weight (`plugfold quantize`)"
        );
    }
}

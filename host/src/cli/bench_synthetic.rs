//! `plugfold bench synthetic`: steps, windows and prefills of a model of random numbers, as large as the device holds.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold::device;
use plugfold_abi::points::{Observer, ObserverObject, OpDone, Sequences, interest};
use plugfold_abi::{KnobValue, OpError, Phase, Slice};
use plugfold_engine::core::{Core, CoreOptions, Made, SeqRows, SequencesOf, Want};
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use serde_json::{Value, json};

use super::bench::save;
use super::compare::Spread;
use super::make_synthetic::Like;
use super::{ModelArgs, exact, model};

/// What to measure.
#[derive(Args)]
pub struct Synthetic {
    #[command(flatten)]
    like: Like,
    #[command(flatten)]
    model: ModelArgs,
    /// Tokens before the rows that are timed. They are not computed: their rows are zeros.
    #[arg(long, value_delimiter = ',', default_value = "1024,8192,65536", value_name = "N,N")]
    at: Vec<usize>,
    /// Rows of verify windows.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16", value_name = "N,N")]
    windows: Vec<usize>,
    /// Tokens of prompts.
    #[arg(long, value_delimiter = ',', default_value = "2048,8192,32768", value_name = "N,N")]
    prompts: Vec<usize>,
    /// Timed forwards of each kind, after three that are not; a prompt is timed once.
    #[arg(long, default_value_t = 10, value_name = "N")]
    runs: usize,
    /// Seconds after which no further prompt is begun.
    #[arg(long, default_value_t = 120.0, value_name = "S")]
    seconds: f64,
    /// Write all numbers to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Calls and seconds by operation.
type Sums = BTreeMap<String, (usize, f64)>;

/// Sums over operations, while somebody asks for them.
#[derive(Default)]
struct Times(Arc<Mutex<Option<Sums>>>);

impl Observer for Times {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::OPERATION)
    }
    fn times(&self, _: Slice<'_, KnobValue>) -> Result<bool, OpError> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).is_some())
    }
    fn operation(&self, done: &OpDone<'_>) -> Result<(), OpError> {
        if let Some(sums) = &mut *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            let (count, seconds) = sums.entry(done.op.to_string()).or_default();
            *count += 1;
            *seconds += done.seconds;
        }
        Ok(())
    }
}

fn failed(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow::anyhow!("{error}")
}

/// A sequence in slot 0 of so many tokens whose rows are zeros.
fn pretend(core: &mut Core, tokens: usize) -> anyhow::Result<()> {
    core.begin(0);
    let state = vec![0u8; core.cache_table().state_len() * 4];
    let ids = vec![1u32; tokens];
    let (ids, state) = (Slice::from(&ids[..]), Slice::from(&state[..]));
    SequencesOf::new(core).resume(0, ids, state, Slice::from(&[][..])).map_err(failed)
}

fn ids(core: &Core, rows: usize) -> Vec<u32> {
    let vocab = core.config().vocab_size;
    (0..rows).map(|i| ((i * 7919 + 13) % vocab) as u32).collect()
}

/// One forward that is kept whole; its seconds.
fn forward(core: &mut Core, phase: Phase, tokens: &[u32], candidates: usize) -> anyhow::Result<f64> {
    let want = if phase == Phase::Window { Want::All } else { Want::Last };
    let began = Instant::now();
    let rows = [SeqRows { slot: 0, tokens, want, embeds: &[] }];
    let f = core.forward(phase, &rows, Some(candidates), false)?;
    if let Some(failure) = &f.failure {
        bail!("{failure}");
    }
    core.commit(&f, &[tokens.len()])?;
    core.recycle(f);
    Ok(began.elapsed().as_secs_f64())
}

/// Candidates of a row, as sampling with usual settings asks for them.
const CANDIDATES: usize = 64;

impl Synthetic {
    /// Measures and prints.
    pub fn run(mut self) -> anyhow::Result<()> {
        if self.model.profile.is_none() && self.model.model.is_none() {
            // No plugins but those of the command line, and no other checkpoint.
            let folder =
                if self.like.path().is_dir() { Some(self.like.path()) } else { self.like.path().parent() };
            self.model.model = folder.map(Into::into);
        }
        let (_, json, config) = self.like.read()?;
        let setup = self.model.setup(json!({"slots": 1}))?;
        let settings = setup.settings().clone();
        model::threads(settings.threads, 1)?;
        let folder = tempfile::tempdir().context("a folder for the configuration")?;
        std::fs::write(folder.path().join("config.json"), json.to_string())?;
        // Operations of a whole chunk are timed after the fewest of them.
        let chunk = self.at.iter().min().map(|n| n + settings.prefill_rows);
        let longest = self.at.iter().map(|n| n + 512).chain(self.prompts.iter().copied()).chain(chunk).max();
        let options = Options {
            model: folder.path().to_owned(),
            slots: 1,
            context: Some(longest.unwrap_or(1).min(config.context)),
            window_rows: self.windows.iter().copied().max().unwrap_or(1).max(settings.window_rows),
            prefill_rows: settings.prefill_rows,
            transport: settings.transport.clone(),
            executor: settings.executor.clone(),
            ..Options::new(folder.path())
        };
        let began = Instant::now();
        let tensors: Made = Arc::new(self.like.source(&config)?);
        let load = exact::loader(&setup)?;
        let worlds = World::local(settings.ranks)?;
        let report = std::thread::scope(|scope| {
            let one = |(rank, world): (usize, World)| {
                let (options, tensors, load) = (&options, tensors.clone(), load.clone());
                let this = &self;
                scope.spawn(move || -> anyhow::Result<Value> {
                    let mut company = load(&world, options).map_err(failed)?;
                    let times = Arc::default();
                    company.hooks.add_object("bench", ObserverObject::new(Times(Arc::clone(&times))))?;
                    let core = CoreOptions {
                        hooks: Arc::new(company.hooks),
                        lines: company.lines,
                        device: device::open(settings.device, rank)?,
                        tensors: Some(tensors),
                        ..CoreOptions::default()
                    };
                    let mut rank = Rank::load(options, core, world)?;
                    let took = began.elapsed().as_secs_f64();
                    let report = this.measure(&mut rank, &times, took);
                    match &report {
                        Ok(_) => {
                            // Who leaves first must not leave another in an exchange.
                            let _ = rank.world.agree_all("bench: done", true);
                            rank.world.goodbye();
                        }
                        Err(error) => drop(rank.world.fail(format!("{error:#}"))),
                    }
                    report
                })
            };
            let threads: Vec<_> = worlds.into_iter().enumerate().map(one).collect();
            let mut reports = threads
                .into_iter()
                .map(|t| t.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a rank's thread panicked"))));
            let first = reports.next().unwrap_or_else(|| Err(anyhow::anyhow!("no rank")));
            reports.fold(first, |first, other| other.and(first))
        })?;
        self.json.as_deref().map_or(Ok(()), |path| save(path, &report))
    }

    fn measure(&self, rank: &mut Rank, times: &Mutex<Option<Sums>>, loaded: f64) -> anyhow::Result<Value> {
        let prints = rank.world.is_lead();
        let say = |text: String| {
            if prints {
                println!("{text}");
            }
        };
        let core = &mut rank.core;
        let (weights, caches) = core.memory();
        let step = step_bytes(core);
        say(format!(
            "{} layers, {:.1} GB of weights ({:.2} GB read by a step), {:.1} GB of caches, loaded in {loaded:.0} s",
            core.config().layers.len(),
            weights as f64 / 1e9,
            step as f64 / 1e9,
            caches as f64 / 1e9,
        ));
        let mut report = json!({
            "bench": "synthetic", "layers": core.config().layers.len(), "device": core.device_class(),
            "weight_bytes": weights, "step_bytes": step, "cache_bytes": caches, "load_s": loaded,
            "windows": [], "prompts": [], "operations": [],
        });
        for &at in &self.at {
            for &rows in &self.windows {
                pretend(core, at)?;
                let tokens = ids(core, rows);
                let mut seconds = Vec::new();
                for number in 0..self.runs + 3 {
                    let took = forward(core, Phase::Window, &tokens, CANDIDATES)?;
                    if number >= 3 {
                        seconds.push(took * 1e3);
                    }
                }
                let spread = Spread::of(seconds.iter().copied()).context("--runs 0: time at least one")?;
                say(format!("window of {rows:2} rows at {at:6}: {:8.3} ms", spread.median));
                push(
                    &mut report,
                    "windows",
                    json!({"at": at, "rows": rows, "ms": spread.median, "all_ms": seconds}),
                );
            }
        }
        let began = Instant::now();
        for &length in &self.prompts {
            if began.elapsed().as_secs_f64() > self.seconds {
                say(format!("prompt of {length}: left out after {} s", self.seconds));
                continue;
            }
            core.begin(0);
            let tokens = ids(core, length);
            let mut took = 0.0;
            // As a server does it; the first chunk of a size makes its program.
            for chunk in tokens.chunks(rank.limits.prefill_rows as usize) {
                took += forward(core, Phase::Prefill, chunk, CANDIDATES)?;
            }
            say(format!("prompt of {length:6}: {:8.1} tokens/s", length as f64 / took));
            push(
                &mut report,
                "prompts",
                json!({"tokens": length, "s": took, "tokens_per_s": length as f64 / took}),
            );
        }
        let chunk = rank.limits.prefill_rows as usize;
        for (phase, rows) in [(Phase::Window, 1), (Phase::Prefill, chunk)] {
            let at = self.at.iter().copied().min().unwrap_or(0);
            pretend(core, at)?;
            let tokens = ids(core, rows);
            *times.lock().unwrap_or_else(PoisonError::into_inner) = Some(BTreeMap::new());
            forward(core, phase, &tokens, CANDIDATES)?;
            let sums = times.lock().unwrap_or_else(PoisonError::into_inner).take().unwrap_or_default();
            let mut sums: Vec<_> = sums.into_iter().collect();
            sums.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
            let all: f64 = sums.iter().map(|(_, (_, s))| s).sum();
            say(format!("{phase:?} of {rows} rows at {at}, each operation waited for: {:.3} ms", all * 1e3));
            for (op, (count, seconds)) in &sums {
                say(format!("  {op:18} {count:4} calls {:9.3} ms", seconds * 1e3));
            }
            let list: Vec<Value> =
                sums.iter().map(|(op, (n, s))| json!({"op": op, "calls": n, "ms": s * 1e3})).collect();
            push(
                &mut report,
                "operations",
                json!({"phase": format!("{phase:?}"), "rows": rows, "at": at, "all": list}),
            );
        }
        Ok(report)
    }
}

fn push(report: &mut Value, list: &str, entry: Value) {
    if let Some(list) = report[list].as_array_mut() {
        list.push(entry);
    }
}

/// Bytes of weights that a step of one row reads: of stacks of experts as many as a row is given, of tables one row.
fn step_bytes(core: &Core) -> usize {
    let moe = core.config().moe;
    let bytes = |weight: &plugfold_abi::Weight| -> usize {
        let all: usize =
            weight.planes.iter().filter(|p| !p.ptr.is_null()).map(plugfold_abi::View::span_bytes).sum();
        let (count, format) = (weight.count as usize, weight.format.get_str());
        match () {
            () if format.starts_with("rows.") => all / (weight.n as usize).max(1),
            // A stack may hold the shared experts behind the routed ones.
            () if count > 1 => all / count * (moe.per_token + count.saturating_sub(moe.experts)).min(count),
            () => all,
        }
    };
    core.weights().all().map(|(_, _, _, weight)| bytes(weight)).sum()
}

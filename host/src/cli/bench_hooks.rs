//! `plugfold bench hooks`: what a decode step pays for the boundary, with a null hook at every point.
//!
//! Two engines of one process differ by several percent, by where their memory lies. So there is one, whose hooks are exchanged
//! between blocks of steps while weights, caches and memory stay where they are: bare, null, null, bare, then the other way
//! round. Blocks of one such four meet the same drift of the machine.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold::plugins::null;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::rank::{Company, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{Event, Request, Service as _};
use serde_json::json;

use super::compare::{Spread, machine, made_up};
use super::{ModelArgs, bench, model};

/// What null hooks may add to a decode step.
const BOUND: f64 = 0.01;
/// Steps before each block that are not measured: threads are new, and caches hold what the other hooks left.
const WARM: usize = 4;
/// Prompt tokens of those.
const SHORT: usize = 4;

/// How to measure the boundary.
#[derive(Args)]
pub struct HooksArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Measured fours of blocks, after one that is not: two with null hooks and two without.
    #[arg(long, default_value_t = 100, value_name = "N")]
    fours: usize,
    /// Decode steps of each block.
    #[arg(long, default_value_t = 32, value_name = "N")]
    steps: usize,
    /// Prompt tokens.
    #[arg(long, default_value_t = 32, value_name = "N")]
    prompt: usize,
    /// Write all numbers to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Seconds a decode step of a reply, and its ids.
fn step(engine: &Engine, ids: Vec<u32>, steps: usize) -> anyhow::Result<(f64, Vec<u32>)> {
    let handle = engine.submit(Request { ids, max_tokens: steps + 1, ..Request::default() })?;
    let mut reply = Vec::new();
    loop {
        match handle.events.recv().context("the engine dropped the request")? {
            Event::Tokens(ids) => reply.extend(ids),
            Event::Prefill { .. } | Event::Logprobs(_) => {}
            Event::Done { stats, .. } => return Ok((stats.decode_s / stats.rounds.max(1) as f64, reply)),
            Event::Error(error) => bail!("{error}"),
        }
    }
}

/// The rank, with the hooks in force and the others.
struct Switched {
    rank: Option<Rank>,
    other: Company,
    null: bool,
}

impl Switched {
    /// Runs something on an engine with null hooks or without any.
    fn with<T>(&mut self, null: bool, run: impl FnOnce(&Engine) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let mut rank = self.rank.take().context("the engine did not give its rank back")?;
        if null != self.null {
            rank.exchange_hooks(&mut self.other);
            self.null = null;
        }
        let engine = Engine::start(rank).context("the engine does not start")?;
        let ran = run(&engine);
        self.rank = engine.release();
        ran
    }
}

/// Bounds between which the median lies in 95 of 100 cases, by order alone: nothing is assumed of how values scatter.
fn bounds(mut values: Vec<f64>) -> Option<(f64, f64)> {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    let skip = (n as f64 / 2.0 - 0.98 * (n as f64).sqrt()).floor().max(0.0) as usize;
    Some((*values.get(skip)?, *values.get(n.checked_sub(skip + 1)?)?))
}

impl HooksArgs {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<()> {
        if self.fours == 0 || self.steps == 0 || self.prompt == 0 {
            bail!("--fours, --steps and --prompt: give at least 1 each");
        }
        // The plugins of the profile stay out: nothing is compared with a hook that does nothing.
        let setup = self.model.setup_bare(json!({"slots": 1}))?;
        let settings = setup.settings();
        if settings.ranks != 1 {
            bail!("bench hooks measures one rank: leave out --ranks {}", settings.ranks);
        }
        let options = model::options(settings)?;
        model::threads(settings.threads, 1)?;
        let hooks = Arc::new(null::hooks()?);
        let (count, counters) = (hooks.list().len(), hooks.calls());
        let device = plugfold::device::open(settings.device, 0)?;
        let core = CoreOptions { device, ..CoreOptions::default() };
        let rank = Rank::load(&options, core, World::single())?;
        let other = rank.company(&null::options(options), &hooks)?;
        let capacity = rank.core.capacity().tokens;
        let vocab = rank.core.config().vocab_size;
        if self.prompt + 2 * self.steps + 1 > capacity {
            bail!(
                "a prompt of {} tokens and {} steps do not fit into the context of {capacity}",
                self.prompt,
                2 * self.steps
            );
        }
        let mut switched = Switched { rank: Some(rank), other, null: false };
        // Calls of hooks in a step: those of a long reply beyond those of a short one.
        let called = |engine: &Engine, steps: usize| -> anyhow::Result<u64> {
            let all = || counters.iter().map(|(_, _, calls)| calls.begun()).sum::<u64>();
            let before = all();
            step(engine, made_up(0, self.prompt, vocab), steps)?;
            Ok(all() - before)
        };
        let steps = self.steps;
        let calls = switched.with(true, |e| Ok((called(e, 2 * steps)? - called(e, steps)?) as f64))?;
        let calls = calls / steps as f64;
        let mut rows = Vec::with_capacity(self.fours);
        for number in 0..=self.fours {
            let turned = number % 2 == 1;
            let mut seconds = [0.0; 4];
            let mut replies: Vec<Vec<u32>> = Vec::with_capacity(4);
            for (place, null) in [false, true, true, false].into_iter().enumerate() {
                let ids = made_up(1 + number, self.prompt, vocab);
                let short = made_up(usize::MAX / 2 - number, SHORT, vocab);
                let (took, reply) = switched.with(null != turned, |engine| {
                    step(engine, short, WARM)?;
                    step(engine, ids, steps)
                })?;
                seconds[place] = took;
                replies.push(reply);
            }
            if replies.iter().any(|reply| *reply != replies[0]) {
                bail!("null hooks changed a reply: {replies:?}");
            }
            if number > 0 {
                let [a, b, c, d] = seconds;
                // Bare first.
                rows.push(if turned { [b, a, d, c] } else { [a, b, d, c] });
            }
        }
        let bare = |r: &[f64; 4]| f64::midpoint(r[0], r[2]);
        let null = |r: &[f64; 4]| f64::midpoint(r[1], r[3]);
        let ratios: Vec<f64> = rows.iter().map(|r| null(r) / bare(r)).collect();
        let spreads = [
            ("without hooks, ms", Spread::of(rows.iter().map(|r| bare(r) * 1e3))),
            ("null hooks, ms", Spread::of(rows.iter().map(|r| null(r) * 1e3))),
            ("ratio", Spread::of(ratios.iter().copied())),
            ("ratio of bare to bare", Spread::of(rows.iter().map(|r| r[2] / r[0]))),
        ];
        println!("{:<28} {:>10} {:>10} {:>10}", "a decode step", "quarter", "median", "quarter");
        let mut found = Vec::with_capacity(spreads.len());
        for (name, spread) in spreads {
            let Some(s) = spread else { bail!("a decode step took no time: give more --steps") };
            println!("{name:<28} {:>10.4} {:>10.4} {:>10.4}", s.low, s.median, s.high);
            found.push(s);
        }
        let (none, ratio) = (found[0], found[2]);
        let (low, high) = bounds(ratios).context("nothing was measured")?;
        let verdict = if high - 1.0 <= BOUND {
            "within"
        } else if low - 1.0 > BOUND {
            "over"
        } else {
            "too noisy to decide on"
        };
        let over = ratio.median - 1.0;
        println!(
            "{count} null hooks add {:.2}% to a step of {:.3} ms (95% of such medians: {:.2}% to {:.2}%), {verdict} the bound of \
             {:.0}%: {} fours of blocks of {steps} steps",
            over * 100.0,
            none.median,
            (low - 1.0) * 100.0,
            (high - 1.0) * 100.0,
            BOUND * 100.0,
            self.fours,
        );
        println!(
            "a step calls hooks {calls:.0} times: {:.0} ns a call",
            over * none.median * 1e6 / calls.max(1.0)
        );
        let folder = settings.model_dir()?;
        let name = folder.file_name().map(|name| name.to_string_lossy());
        let report = json!({
            "bench": "hooks", "model": name, "machine": machine(),
            "threads": rayon::current_num_threads(), "hooks": count, "calls_a_step": calls, "fours": self.fours,
            "steps": steps, "prompt_tokens": self.prompt, "none_ms": none, "null_ms": found[1], "ratio": ratio,
            "ratio_bounds": [low, high], "noise": found[3], "bound": BOUND, "verdict": verdict, "seconds_a_step": rows,
        });
        self.json.as_deref().map_or(Ok(()), |path| bench::save(path, &report))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_of_a_median_come_closer_with_more_values() {
        let of = |n: usize| bounds((0..n).map(|i| i as f64 / n as f64).collect());
        assert_eq!(bounds(Vec::new()), None);
        assert_eq!(of(1), Some((0.0, 0.0)));
        let (few, many) = (of(20).unwrap_or_default(), of(2000).unwrap_or_default());
        for (low, high) in [few, many] {
            assert!(low < 0.5 && high > 0.48, "{low} to {high}");
        }
        assert!(many.1 - many.0 < 0.06 && few.1 - few.0 > 0.3, "{few:?} {many:?}");
    }
}

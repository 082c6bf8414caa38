//! `plugfold bench hooks`: what a decode step pays for the boundary, with a null hook at every point.

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold::plugins::null;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{Event, Request, Service as _};
use serde_json::json;

use super::compare::{Spread, machine, made_up};
use super::{ModelArgs, bench, model};

/// What null hooks may add to a decode step.
const BOUND: f64 = 0.01;

/// How to measure the boundary.
#[derive(Args)]
pub struct HooksArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// Measured pairs, after one that is not.
    #[arg(long, default_value_t = 100, value_name = "N")]
    pairs: usize,
    /// Decode steps of each half of a pair.
    #[arg(long, default_value_t = 8, value_name = "N")]
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

impl HooksArgs {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<()> {
        if self.pairs == 0 || self.steps == 0 || self.prompt == 0 {
            bail!("--pairs, --steps and --prompt: give at least 1 each");
        }
        // The plugins of the profile stay out: nothing is compared with a hook that does nothing.
        let setup = self.model.setup_bare(json!({"slots": 1}))?;
        let settings = setup.settings();
        if settings.ranks != 1 {
            bail!("bench hooks measures one rank: leave out --ranks {}", settings.ranks);
        }
        let options = model::options(settings)?;
        model::threads(settings.threads, 1)?;
        let start = |options: &Options, hooks: Hooks| -> anyhow::Result<Engine> {
            let device = plugfold::device::open(settings.device, 0)?;
            let core = CoreOptions { hooks: Arc::new(hooks), device, ..CoreOptions::default() };
            Engine::start(Rank::load(options, core, World::single())?).context("the engine does not start")
        };
        let hooks = null::hooks()?;
        let chosen = null::options(options.clone());
        let count = hooks.list().len();
        let (bare, hooked) = (start(&options, Hooks::default())?, start(&chosen, hooks)?);
        let info = bare.info().clone();
        if self.prompt + self.steps + 1 > info.context {
            bail!(
                "a prompt of {} tokens and {} steps do not fit into the context of {}",
                self.prompt,
                self.steps,
                info.context
            );
        }
        let mut rows = Vec::with_capacity(self.pairs);
        for number in 0..=self.pairs {
            let ids = made_up(number, self.prompt, info.vocab_size);
            // The second bare part says what the machine's own noise is.
            let mut halves = Vec::with_capacity(3);
            for engine in [&bare, &hooked, &bare] {
                halves.push(step(engine, ids.clone(), self.steps)?);
            }
            if halves.iter().any(|(_, reply)| *reply != halves[0].1) {
                bail!("null hooks changed a reply: {halves:?}");
            }
            if number > 0 {
                rows.push([halves[0].0, halves[1].0, halves[2].0]);
            }
        }
        let none = Spread::of(rows.iter().map(|r| f64::midpoint(r[0], r[2]) * 1e3));
        let null = Spread::of(rows.iter().map(|r| r[1] * 1e3));
        let ratio = Spread::of(rows.iter().map(|r| r[1] / f64::midpoint(r[0], r[2])));
        let noise = Spread::of(rows.iter().map(|r| r[2] / r[0]));
        let (Some(none), Some(null), Some(ratio), Some(noise)) = (none, null, ratio, noise) else {
            bail!("a decode step took no time: give more --steps");
        };
        let over = ratio.median - 1.0;
        println!("{:<28} {:>10} {:>10} {:>10}", "a decode step", "quarter", "median", "quarter");
        for (name, s) in [
            ("without hooks, ms", none),
            ("null hooks, ms", null),
            ("ratio", ratio),
            ("ratio of bare to bare", noise),
        ] {
            println!("{name:<28} {:>10.4} {:>10.4} {:>10.4}", s.low, s.median, s.high);
        }
        // Two standard errors of a median, from the quartiles: what is nearer to the bound than that decides nothing.
        let error = 2.0 * 0.93 * (ratio.high - ratio.low) / (self.pairs as f64).sqrt();
        let verdict = if over + error <= BOUND {
            "within"
        } else if over - error > BOUND {
            "over"
        } else {
            "too noisy to decide on"
        };
        println!(
            "{count} null hooks add {:.2}% to a step of {:.3} ms, {verdict} the bound of {:.0}% ({} pairs of {} steps)",
            over * 100.0,
            none.median,
            BOUND * 100.0,
            self.pairs,
            self.steps
        );
        let folder = settings.model_dir()?;
        let name = folder.file_name().map(|name| name.to_string_lossy());
        let report = json!({
            "bench": "hooks", "model": name, "machine": machine(),
            "threads": rayon::current_num_threads(), "hooks": count, "pairs": self.pairs, "steps": self.steps,
            "prompt_tokens": self.prompt, "none_ms": none, "null_ms": null, "ratio": ratio, "noise": noise,
            "bound": BOUND, "error": error, "verdict": verdict, "seconds_a_step": rows,
        });
        self.json.as_deref().map_or(Ok(()), |path| bench::save(path, &report))
    }
}

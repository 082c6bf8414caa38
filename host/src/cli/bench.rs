//! `plugfold bench`: what this machine does.

use std::path::PathBuf;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use plugfold_engine::service::{Event, Request, RequestStats, Service};
use serde_json::{Value, json};

use super::progress::Prefilling;
use super::{
    ModelArgs, bench_exchange, bench_hooks, bench_http, bench_roofline, bench_synthetic, exl3, model,
    write_whole,
};

/// Measure.
#[derive(Subcommand)]
pub enum Bench {
    /// What this machine or its GPU can do at most, and each kernel's fraction of its bound.
    Roofline(bench_roofline::RooflineArgs),
    /// Tokens a second of one-token rounds.
    Decode(Run),
    /// Prompt tokens a second.
    Prefill(Run),
    /// EXL3 products against what memory and arithmetic allow, and the encoder's speed and error.
    Exl3(exl3::Measure),
    /// A decode step with a null hook at every point against one with none.
    Hooks(bench_hooks::HooksArgs),
    /// Steps, windows and prompts of a model of random numbers with a real model's sizes.
    Synthetic(Box<bench_synthetic::Synthetic>),
    /// Exchanges between ranks over the transport of the settings: on the host, on devices, recorded.
    Exchange(bench_exchange::Exchange),
    /// The server alone: first text, slots of clients that leave, many streams at once.
    Http(bench_http::HttpArgs),
}

/// What to measure with.
#[derive(Args)]
pub struct Run {
    #[command(flatten)]
    model: ModelArgs,
    /// Prompt tokens (decode: 32, prefill: 512, or what fits).
    #[arg(long, value_name = "N")]
    prompt: Option<usize>,
    /// Tokens to generate when measuring decode.
    #[arg(long, default_value_t = 64, value_name = "N")]
    tokens: usize,
    /// Measured runs, after one that is not.
    #[arg(long, default_value_t = 3, value_name = "N")]
    runs: usize,
    /// Write all numbers to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Bench {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<()> {
        let (kind, args) = match self {
            Self::Roofline(args) => return args.run(),
            Self::Decode(args) => ("decode", args),
            Self::Prefill(args) => ("prefill", args),
            Self::Exl3(args) => return args.run(),
            Self::Hooks(args) => return args.run(),
            Self::Synthetic(args) => return args.run(),
            Self::Exchange(args) => return args.run(),
            Self::Http(args) => return args.run(),
        };
        let decode = kind == "decode";
        if args.runs == 0 {
            bail!("--runs 0: measure at least once");
        }
        let setup = args.model.setup(json!({"slots": 1}))?;
        let settings = setup.settings();
        let (engine, others) = model::engine(&setup)?;
        let info = engine.info().clone();
        let tokens = if decode { args.tokens.max(2) } else { 1 };
        let fits = info.context.saturating_sub(tokens);
        let length = args.prompt.unwrap_or(if decode { 32 } else { 512 }.min(fits));
        if length == 0 || length > fits {
            bail!(
                "a prompt of {length} and {tokens} new tokens do not fit into the context of {}",
                info.context
            );
        }
        let mut rates = Vec::new();
        let mut runs = Vec::new();
        for number in 0..=args.runs {
            // Another prompt each time: nothing of an earlier run can be used again.
            let ids =
                (0..length).map(|at| ((at * 7919 + number * 104_729) % info.vocab_size) as u32).collect();
            let stats = measure(engine.as_ref(), ids, tokens)?;
            if number > 0 {
                let rate = if decode {
                    (tokens - 1) as f64 / stats.decode_s
                } else {
                    length as f64 / stats.prefill_s
                };
                rates.push(rate);
                runs.push(json!({"tokens_per_s": rate, "prefill_s": stats.prefill_s, "decode_s": stats.decode_s,
                                 "rounds": stats.rounds, "drafted": stats.drafted, "accepted": stats.accepted}));
            }
        }
        drop(engine);
        others.finish();
        rates.sort_by(f64::total_cmp);
        let (low, median, high) = (rates[0], rates[rates.len() / 2], rates[rates.len() - 1]);
        println!(
            "{kind}: {median:.1} tokens/s (median of {}, {low:.1} to {high:.1}), prompt {length}",
            rates.len()
        );
        let report = json!({
            "bench": kind, "model": settings.model_dir()?, "prompt_tokens": length, "new_tokens": tokens,
            "ranks": info.ranks, "threads": rayon::current_num_threads(), "prefill_rows": settings.prefill_rows,
            "median_tokens_per_s": median, "min_tokens_per_s": low, "max_tokens_per_s": high, "runs": runs,
        });
        args.json.as_deref().map_or(Ok(()), |path| save(path, &report))
    }
}

/// Writes a report.
pub fn save(path: &std::path::Path, report: &Value) -> anyhow::Result<()> {
    write_whole(path, |path| Ok(std::fs::write(path, serde_json::to_string_pretty(report)? + "\n")?))
}

fn measure(engine: &dyn Service, ids: Vec<u32>, tokens: usize) -> anyhow::Result<RequestStats> {
    let bar = Prefilling::start(ids.len());
    let request = Request { ids, max_tokens: tokens, ..Request::default() };
    let handle = engine.submit(request)?;
    loop {
        match handle.events.recv().context("the engine dropped the request")? {
            Event::Prefill { done, .. } => bar.at(done),
            Event::Tokens(_) | Event::Logprobs(_) => bar.done(),
            Event::Done { stats, .. } => return Ok(stats),
            Event::Error(error) => bail!("{error}"),
        }
    }
}

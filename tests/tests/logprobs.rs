//! Log probabilities and the thinking budget: true values, and the same drafted, batched, alone and on every rank count.
#![allow(clippy::unwrap_used)]

use plugfold_engine::engine::Engine;
use plugfold_engine::logprobs::TokenLogprobs;
use plugfold_engine::service::{EngineError, Event, Handle, Request, Sampling, Service, ThinkingBudget};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::guess::{Guess, guessing};
use plugfold_tests::model::{engine, on_ranks, options, plain, request};

const SAMPLED: Sampling = Sampling { temperature: 1.3, top_k: 8, top_p: 0.9, min_p: 0.01, seed: None };
/// Ends the reasoning in these tests.
const CLOSE: u32 = 7;

/// Tokens with what was told of each.
type Told = Vec<(u32, TokenLogprobs)>;

fn told(handle: &Handle) -> Told {
    let (mut out, mut waiting) = (Vec::new(), Vec::new());
    for event in &handle.events {
        match event {
            Event::Logprobs(more) => waiting = more,
            Event::Tokens(tokens) => {
                assert_eq!(tokens.len(), waiting.len());
                out.extend(tokens.into_iter().zip(waiting.drain(..)));
            }
            Event::Done { .. } => return out,
            Event::Error(error) => panic!("{error}"),
            Event::Prefill { .. } => {}
        }
    }
    panic!("no end")
}

fn ask(engine: &Engine, job: &Request) -> Told {
    told(&engine.submit(job.clone()).unwrap())
}

/// Proposes a recorded reply.
struct Recorded(Vec<u32>);

impl Guess for Recorded {
    fn guess(&self, ids: &[u32], budget: usize) -> Vec<u32> {
        self.0.iter().skip(ids.len()).take(budget).copied().collect()
    }
}

fn jobs() -> Vec<Request> {
    let job = |seed, prompt, tokens, sampling| Request {
        logprobs: Some(5),
        thinking: Some(ThinkingBudget { tokens: 6, close: CLOSE }),
        ..request(seed, prompt, tokens, sampling)
    };
    let mut jobs = vec![job(1, 40, 16, Sampling::GREEDY), job(2, 70, 20, SAMPLED), job(3, 5, 12, SAMPLED)];
    jobs[0].logprobs = Some(20);
    jobs[2].logprobs = Some(0);
    jobs
}

#[test]
fn values_are_those_of_the_whole_softmax() {
    for ranks in [1, 2] {
        let options = options(&tiny_dir(), 1, 32);
        let engine = engine(&options, ranks, plain);
        for job in jobs() {
            let reply = ask(&engine, &job);
            let ids: Vec<u32> = job.ids.iter().copied().chain(reply.iter().map(|t| t.0)).collect();
            let trace = on_ranks(&options, ranks, |rank| rank.trace(&ids, false).unwrap());
            let vocab = trace.logits.len() / ids.len();
            for (i, (token, told)) in reply.iter().enumerate() {
                let row = &trace.logits[(job.ids.len() + i - 1) * vocab..][..vocab];
                let sum: f64 = row.iter().map(|v| f64::from(*v).exp()).sum();
                let of = |id: u32| f64::from(row[id as usize]) - sum.ln();
                assert!((told.token - of(*token)).abs() < 1e-9, "{ranks} ranks, token {i}: {told:?}");
                let mut best: Vec<u32> = (0..vocab as u32).collect();
                best.sort_by(|a, b| of(*b).total_cmp(&of(*a)).then(a.cmp(b)));
                assert_eq!(told.top.len(), job.logprobs.unwrap() as usize);
                for ((id, value), want) in told.top.iter().zip(best) {
                    assert!(
                        *id == want && (value - of(want)).abs() < 1e-9,
                        "{ranks} ranks, token {i}: {told:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn drafted_batched_and_alone_tell_the_same() {
    for ranks in [1, 2] {
        let jobs = jobs();
        let serial = engine(&options(&tiny_dir(), 1, 32), ranks, plain);
        let alone: Vec<Told> = jobs.iter().map(|job| ask(&serial, job)).collect();
        drop(serial);
        let four = engine(&options(&tiny_dir(), 4, 48), ranks, plain);
        let handles: Vec<Handle> = jobs.iter().map(|job| four.submit(job.clone()).unwrap()).collect();
        assert_eq!(handles.iter().map(told).collect::<Vec<_>>(), alone, "batched on {ranks} ranks");
        for (job, want) in jobs.iter().zip(&alone) {
            let all: Vec<u32> = job.ids.iter().copied().chain(want.iter().map(|t| t.0)).collect();
            // Once with all drafts right, once with the draft for the forced token wrong.
            for wrong in [None, Some(job.ids.len() + 6)] {
                let mut script = all.clone();
                if let Some(at) = wrong {
                    script[at] = CLOSE + 1;
                }
                let drafted =
                    engine(&options(&tiny_dir(), 1, 64), ranks, |_| guessing(Recorded(script.clone())));
                assert_eq!(&ask(&drafted, job), want, "drafted on {ranks} ranks");
            }
        }
    }
}

#[test]
fn the_thinking_budget_forces_its_token_once_and_only_when_needed() {
    let engine = engine(&options(&tiny_dir(), 2, 64), 1, plain);
    let reply = |job: &Request| ask(&engine, job).iter().map(|t| t.0).collect::<Vec<_>>();
    let mut job = Request { logprobs: Some(0), thinking: None, ..request(9, 30, 14, SAMPLED) };
    let free = reply(&job);
    for tokens in [0, 1, 5, 13] {
        let close = (0..480).find(|id| !free.contains(id)).unwrap();
        job.thinking = Some(ThinkingBudget { tokens, close });
        let bound = reply(&job);
        assert_eq!(bound[..tokens], free[..tokens]);
        assert_eq!(bound[tokens], close, "after {tokens} tokens");
        assert!(!bound[tokens + 1..].iter().take(1).any(|t| *t == close), "{bound:?}");
    }
    // A reply that ends its reasoning in time, or whose budget is never reached, is left alone.
    for (tokens, close) in [(5, free[4]), (14, 479)] {
        job.thinking = Some(ThinkingBudget { tokens, close });
        assert_eq!(reply(&job), free);
    }
}

#[test]
fn what_could_never_run_is_refused() {
    let engine = engine(&options(&tiny_dir(), 1, 64), 1, plain);
    let refused = |job: Request| match engine.submit(job) {
        Err(EngineError::Invalid(message)) => message,
        _ => panic!("taken"),
    };
    let job = request(9, 30, 14, SAMPLED);
    assert!(refused(Request { logprobs: Some(21), ..job.clone() }).contains("20"));
    let thinking = Some(ThinkingBudget { tokens: 1, close: 512 });
    assert!(refused(Request { thinking, ..job }).contains("512"));
}

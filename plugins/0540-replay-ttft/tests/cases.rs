//! Prompts that are sent again, and drafts over kept and stored states: faults that were reported against servers of this
//! kind, replayed on the tiny model. Tests of a case are named after its number.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

#[path = "../../0120-batch-v2/tests/support/mod.rs"]
mod support;

use std::sync::Arc;

use plugfold_0110_session_cache::marks::Rules;
use plugfold_0110_session_cache::store::{Marks, Sessions, Settings, Told};
use plugfold_0540_replay_ttft::BeforeEnd;
use plugfold_abi::points::{ObserverObject, PlannerObject, StoreObject};
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::Options;
use plugfold_engine::service::{Request, Sampling, Service as _};
use plugfold_tests::drafting::Drafting;
use tempfile::TempDir;

use support::{SAMPLED, ask, engine, ids, request, tiny};

/// Tokens from one periodic mark of the store to the next.
const EVERY: usize = 768;

/// Adds the planner, perhaps with a store before it.
fn with(mut hooks: Hooks, store: bool) -> Hooks {
    if store {
        let rules = Rules { every: EVERY as u32, fork_min: 512 };
        let settings = Settings { budget: 1 << 30, reserve: 0, rules };
        let sessions = Arc::new(Sessions::new(settings, None));
        hooks.add_object("0110", StoreObject::new(sessions.clone())).unwrap();
        hooks.add_object("0110", PlannerObject::new(Marks(sessions.clone()))).unwrap();
        hooks.add_object("0110", ObserverObject::new(Told(sessions))).unwrap();
    }
    hooks.add_object("0540", PlannerObject::new(BeforeEnd)).unwrap();
    hooks
}

/// The tiny model with room for long prompts, and options for it.
fn of(context: usize) -> (TempDir, Options) {
    let folder = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(tiny()).unwrap().flatten() {
        std::os::unix::fs::symlink(file.path(), folder.path().join(file.file_name())).unwrap();
    }
    let config = folder.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    let longer = text.replace("\"max_position_embeddings\": 4096", "\"max_position_embeddings\": 65536");
    assert_ne!(longer, text);
    std::fs::remove_file(&config).unwrap();
    std::fs::write(&config, longer).unwrap();
    let options = Options { context: Some(context), prefill_rows: 256, ..Options::new(folder.path()) };
    (folder, Options { slots: 1, ..options })
}

/// Sends a prompt three times, perhaps with another between that takes its slot: the same bytes, and all but the last grain
/// resumed.
fn again(engine: &Engine, prompt: &[u32], budget: usize, between: bool) {
    let asked = Request { sampling: SAMPLED, ..request(prompt.to_vec(), budget) };
    let (first, stats) = ask(engine, asked.clone());
    assert_eq!(stats.cached_tokens, 0, "{} tokens", prompt.len());
    for time in 1..3 {
        if between {
            ask(engine, request(ids(99, 70), 1));
        }
        let (reply, stats) = ask(engine, asked.clone());
        let what = format!("{} tokens, another between: {between}, time {time}", prompt.len());
        assert_eq!(reply, first, "{what}");
        assert_eq!(stats.cached_tokens, (prompt.len() - 1) / 64 * 64, "{what}");
    }
}

#[test]
fn case_31_replay_at_exact_multiples_of_every_grain() {
    let (_folder, options) = of(1024);
    for store in [false, true] {
        let engine = engine(&options, 1, |_| with(Hooks::default(), store));
        // Tokens of a pool, of the grid, of a page of the store.
        for multiple in [4, 64, 128, 256, 512] {
            for length in [multiple - 1, multiple, multiple + 1] {
                // Another beginning each, or one would resume from another.
                again(&engine, &ids(1000 + length as u64, length), 3, store);
            }
        }
        // Near the context's end: what fits is served, and resumed as anything else.
        for left in [64, 1] {
            again(&engine, &ids(left as u64, 1024 - left), left, store);
        }
        let over = engine.submit(request(ids(5, 1024), 1));
        assert!(over.is_err(), "a prompt that fills the context leaves no room for a reply");
    }
}

#[test]
fn case_31_replay_at_multiples_of_the_periodic_marks() {
    let (_folder, options) = of(1600);
    let engine = engine(&options, 1, |_| with(Hooks::default(), true));
    for (at, length) in [EVERY - 1, EVERY, EVERY + 1, 2 * EVERY].into_iter().enumerate() {
        again(&engine, &ids(length as u64, length), 3, at % 2 == 1);
    }
}

#[test]
fn replies_and_ranks_are_the_same_with_and_without() {
    let (_folder, options) = of(1024);
    for ranks in [1, 2] {
        let plain = engine(&options, ranks, |_| Hooks::default());
        let early = engine(&options, ranks, |_| with(Hooks::default(), true));
        let mut turn = ids(7, 200);
        for (at, more) in [0, 40, 1, 63, 64].into_iter().enumerate() {
            turn.extend(ids(100 + at as u64, more));
            for _ in 0..2 {
                let asked = Request { sampling: SAMPLED, ..request(turn.clone(), 12) };
                let (want, _) = ask(&plain, asked.clone());
                let (reply, stats) = ask(&early, asked);
                assert_eq!(reply, want, "{} tokens on {ranks} ranks", turn.len());
                assert!(at == 0 || stats.cached_tokens >= 192, "turn {at}: {stats:?}");
            }
        }
    }
}

/// Twenty descriptions with one frame, and the order to repeat them: drafts are often right and often wrong.
fn repeat_the_list() -> Vec<u32> {
    let frame = ids(1, 14);
    let mut prompt = ids(2, 30);
    for tool in 0..20 {
        prompt.extend_from_slice(&frame[..7]);
        prompt.extend(ids(100 + tool, 4));
        prompt.extend_from_slice(&frame[7..]);
    }
    prompt.extend(ids(3, 6));
    prompt
}

#[test]
fn case_32_drafted_equals_serial_with_a_warm_cache() {
    let a = repeat_the_list();
    let b = [&a[..], &ids(4, 300)].concat();
    let (_folder, options) = of(b.len() + 100);
    for sampling in [Sampling::GREEDY, SAMPLED] {
        let job = |prompt: &[u32], policy: &str| Request {
            ids: prompt.to_vec(),
            max_tokens: 24,
            sampling,
            draft: !policy.is_empty(),
            policy: policy.into(),
            ..Request::default()
        };
        let sequence = [&a, &b, &a];
        let plain = engine(&options, 1, |_| Hooks::default());
        let want = sequence.map(|prompt| ask(&plain, job(prompt, "")).0);
        drop(plain);
        let hooks = || Drafting { sizes: (1, 8), ..Drafting::default() }.hooks().unwrap();
        // No drafts, the draft layer, lookup, all of them.
        for policy in ["", "3", "l7:2", "auto"] {
            for store in [false, true] {
                let engine = engine(&options, 1, |_| if store { with(hooks(), true) } else { hooks() });
                let passes: &[&str] = if store { &["cold", "warm"] } else { &["off"] };
                for pass in passes {
                    for (at, prompt) in sequence.iter().enumerate() {
                        let (reply, stats) = ask(&engine, job(prompt, policy));
                        let what = format!("request {at}, policy {policy:?}, cache {pass}: {stats:?}");
                        assert_eq!(reply, want[at], "{what}");
                        assert!(policy.is_empty() || stats.drafted > 0, "{what}");
                        if *pass == "warm" && !policy.is_empty() {
                            assert_eq!(stats.cached_tokens, (prompt.len() - 1) / 64 * 64, "{what}");
                        }
                    }
                }
            }
        }
    }
}

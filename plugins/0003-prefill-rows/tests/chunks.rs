//! The acceptance list of 0003, on the tiny model: whole states, resumed turns, drafts, ranks.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::sync::{Arc, Mutex};
use std::thread;

use plugfold_0003_prefill_rows::PrefillRows;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Observer, ObserverObject, SequenceEvent, interest};
use plugfold_abi::{Knob, KnobValue, Knobs, OpError, Slice, Text};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::knobs::{Effect, Fold, KnobSpec};
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{Request, Sampling, Service as _};
use plugfold_tests::drafting::Drafting;
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::host::Alone;
use plugfold_tests::model::{engine, ids, options, reply_with_stats};
use plugfold_tests::states::States;

const SAMPLED: Sampling = Sampling { temperature: 0.8, top_k: 20, top_p: 0.95, min_p: 0.0, seed: Some(5) };

/// The drafting plugins and 0003 with chunks of so many rows.
fn hooks(rows: i64) -> Hooks {
    let mut hooks = Drafting::default().hooks().unwrap();
    // After the two request knobs of the drafting plugins.
    let all = [Knob { key: "prefill_rows".into(), value: KnobValue::Int(rows), id: Some(2).into() }];
    let setup = Setup {
        knobs: Knobs { all: Slice::from(&all[..]) },
        host: Alone::default().object(),
        device_class: Text::from("cpu"),
    };
    for offer in PrefillRows.configure(&setup).unwrap() {
        hooks.add("0003", &[], offer).unwrap();
    }
    let spec = KnobSpec { name: "0003.prefill_rows".into(), fold: Fold::Split, effect: Effect::Schedule };
    hooks.knobs.specs = hooks.knobs.specs.iter().cloned().chain([spec]).collect();
    hooks.knobs.defaults = hooks.knobs.defaults.iter().cloned().chain([KnobValue::Int(rows)]).collect();
    hooks
}

fn wide() -> Options {
    Options { context: Some(1536), ..options(&tiny_dir(), 1, 64) }
}

/// An engine with chunks of so many rows, and what it notes of its states.
fn chunked(rows: i64, ranks: usize) -> (Engine, States) {
    let noted = Mutex::new(States::default());
    let engine = engine(&wide(), ranks, |rank| {
        let mut hooks = hooks(rows);
        let states = States::of(&mut hooks);
        if rank == 0 {
            *noted.lock().unwrap() = states;
        }
        CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
    });
    (engine, noted.into_inner().unwrap())
}

fn job(ids: Vec<u32>, sampling: Sampling, policy: &str) -> Request {
    // One room for the reply: whatever reaches the end of it ends with its budget.
    Request { ids, sampling, policy: policy.into(), max_tokens: 7, ..Request::default() }
}

fn ask(engine: &Engine, request: Request) -> (Vec<u32>, usize) {
    let (tokens, _, stats) = reply_with_stats(&engine.submit(request).unwrap()).unwrap();
    (tokens, stats.cached_tokens)
}

#[test]
fn states_and_first_tokens_are_the_same_for_every_chunk_size() {
    let prompts: Vec<Vec<u32>> = [45, 300, 700, 1300].map(|n| ids(n as u64, n, 480)).to_vec();
    let run = |rows: i64| {
        let (engine, states) = chunked(rows, 1);
        // With drafts the draft layer catches up on its rows, so that those of the prompt are all there at the end.
        let replies: Vec<Vec<u32>> =
            prompts.iter().map(|p| ask(&engine, job(p.clone(), Sampling::GREEDY, "3")).0).collect();
        (replies, states.take())
    };
    let (replies, want) = run(64);
    assert_eq!(want.len(), 8, "after each prompt and each reply");
    for ((reply, ids), state) in &want {
        let rows = state.draft.0 as usize;
        assert!(!reply || rows >= ids.len() - 16, "{rows} draft rows of {} tokens", ids.len());
    }
    for rows in [1, 7, 100, 333, 512] {
        let (told, states) = run(rows);
        assert_eq!(told, replies, "chunks of {rows}");
        assert_eq!(states.len(), want.len());
        for ((key, state), (same, wanted)) in states.iter().zip(&want) {
            assert_eq!(key, same);
            let what = format!("{} tokens, reply: {}, chunks of {rows}", key.1.len(), key.0);
            assert!(state.model == wanted.model, "{what}: another state");
            // Before drafts were asked for, rows may still wait for the layer, by the size of the chunks.
            assert!(!key.0 || state.draft == wanted.draft, "{what}: other rows of the draft layer");
        }
    }
}

#[test]
fn a_turn_resumed_after_700_tokens_in_chunks_of_512_equals_a_fresh_one() {
    for (sampling, ranks) in [(Sampling::GREEDY, 1), (SAMPLED, 2)] {
        let ((resumed, one), (fresh, other)) = (chunked(512, ranks), chunked(512, ranks));
        let first = job(ids(8, 700, 480), sampling, "auto");
        let (said, _) = ask(&resumed, first.clone());
        let turn: Vec<u32> = [&first.ids[..], &said, &ids(9, 40, 480)].concat();
        one.take();
        let (a, b) =
            (ask(&resumed, job(turn.clone(), sampling, "auto")), ask(&fresh, job(turn, sampling, "auto")));
        assert_eq!((&a.0, b.1), (&b.0, 0));
        assert!((700..740).contains(&a.1), "resumed {} tokens", a.1);
        assert_eq!(one.take(), other.take(), "{ranks} ranks");
    }
}

#[test]
fn drafted_equals_serial_with_chunks_of_512_rows() {
    let (engine, _) = chunked(512, 1);
    let part = ids(3, 320, 480);
    let prompt = [&part[..], &part].concat();
    for sampling in [Sampling::GREEDY, SAMPLED] {
        let serial = Request { draft: false, max_tokens: 24, ..job(prompt.clone(), sampling, "") };
        let (want, _) = ask(&engine, serial.clone());
        for policy in ["auto", "1", "3", "7"] {
            let drafted = Request { draft: true, policy: policy.into(), ..serial.clone() };
            assert_eq!(ask(&engine, drafted).0, want, "policy {policy}");
        }
    }
}

#[test]
fn a_chunk_over_the_buffers_is_refused_and_ends_its_request_alone() {
    let (engine, _) = chunked(96, 2);
    let asked = |rows: i64| {
        let knobs: Arc<[KnobValue]> = [KnobValue::Bool(true), KnobValue::Int(4), KnobValue::Int(rows)].into();
        Request { knobs: Some(knobs), ..job(ids(4, 200, 480), Sampling::GREEDY, "0") }
    };
    let (want, _) = ask(&engine, asked(96));
    let error = reply_with_stats(&engine.submit(asked(97)).unwrap()).unwrap_err().to_string();
    assert!(error.contains("prefill_rows is 97") && error.contains("1 to 96 rows"), "{error}");
    assert_eq!(ask(&engine, asked(5)).0, want, "the next is served as ever");
}

#[test]
fn ranks_with_different_chunks_do_not_start() {
    let load = |world: World, rows: i64| {
        let core = CoreOptions { hooks: Arc::new(hooks(rows)), ..CoreOptions::default() };
        Rank::load(&wide(), core, world).err().map(|e| e.to_string()).unwrap_or_default()
    };
    let mut worlds = World::local(2).unwrap();
    let other = worlds.remove(1);
    let follower = thread::spawn(move || load(other, 128));
    let lead = load(worlds.remove(0), 64);
    for told in [lead, follower.join().unwrap()] {
        assert!(told.contains("prefill rows: rank 0 has `64`, rank 1 has `128`"), "{told}");
    }
}

/// Rows of the prompt pieces that were absorbed, in order.
#[derive(Clone, Default)]
struct Chunks(Arc<Mutex<Vec<u32>>>);

impl Observer for Chunks {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::SEQUENCE)
    }
    fn sequence(&self, _: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        if let SequenceEvent::Absorbed { tokens, .. } = event {
            self.0.lock().unwrap().push(*tokens);
        }
        Ok(())
    }
}

/// An engine of chunks of 96 rows, and the chunks that each rank ran.
fn watched(ranks: usize) -> (Engine, Vec<Chunks>) {
    let seen: Vec<Chunks> = (0..ranks).map(|_| Chunks::default()).collect();
    let engine = engine(&wide(), ranks, |rank| {
        let mut hooks = hooks(96);
        hooks.add_object("watch", ObserverObject::new(seen[rank].clone())).unwrap();
        CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
    });
    (engine, seen)
}

fn knobs(lookup: bool, min: i64, rows: i64) -> Arc<[KnobValue]> {
    [KnobValue::Bool(lookup), KnobValue::Int(min), KnobValue::Int(rows)].into()
}

/// 0090: whatever a request sets, it gets the tokens of serial decoding.
#[test]
fn fourteen_sets_of_request_knobs_give_the_serial_tokens() {
    let sets = [
        (true, 4, 96),
        (false, 4, 96),
        (true, 1, 96),
        (true, 64, 96),
        (true, 4, 1),
        (true, 4, 7),
        (true, 4, 64),
        (false, 1, 7),
        (true, 1, 7),
        (true, 64, 1),
        (false, 64, 64),
        (true, 2, 33),
        (false, 2, 50),
        (true, 1, 64),
    ];
    let part = ids(6, 60, 480);
    let prompt = [&part[..], &part[..41]].concat();
    for ranks in [1, 2] {
        for sampling in [Sampling::GREEDY, SAMPLED] {
            let (engine, _) = watched(ranks);
            let serial = Request { draft: false, ..job(prompt.clone(), sampling, "") };
            let (want, _) = ask(&engine, serial.clone());
            let more = [&prompt[..], &want, &part[..5]].concat();
            let (next, _) = ask(&engine, Request { ids: more.clone(), ..serial.clone() });
            for (lookup, min, rows) in sets {
                let what = format!("lookup {lookup}, {min} and {rows} rows on {ranks} ranks");
                let set = |ids: &[u32], draft| Request {
                    ids: ids.to_vec(),
                    draft,
                    policy: if draft { "auto".into() } else { String::new() },
                    knobs: Some(knobs(lookup, min, rows)),
                    ..serial.clone()
                };
                // Fresh or from what the one before it left, drafted and not: the same.
                assert_eq!(ask(&engine, set(&prompt, true)).0, want, "{what}");
                let (told, cached) = ask(&engine, set(&more, true));
                assert_eq!(told, next, "{what}, resumed");
                assert!(cached > 0, "{what}: the second turn goes on from the first");
                assert_eq!(ask(&engine, set(&more, false)).0, next, "{what}, serial");
            }
        }
    }
}

/// 0090: a request's values are its own: the next has the server's, on every rank, whatever became of the one before.
#[test]
fn after_a_request_and_after_one_that_fails_the_values_are_the_servers_again() {
    let (engine, seen) = watched(2);
    let chunks = |seed: u64, rows: Option<i64>| {
        let knobs = rows.map(|rows| knobs(true, 4, rows));
        let asked = Request { knobs, ..job(ids(seed, 200, 480), Sampling::GREEDY, "0") };
        let done = reply_with_stats(&engine.submit(asked).unwrap());
        let of = |c: &Chunks| std::mem::take(&mut *c.0.lock().unwrap());
        (done.is_ok(), seen.iter().map(of).collect::<Vec<_>>())
    };
    // Pieces of 64 tokens, cut into chunks.
    let own = (true, vec![vec![64, 64, 64, 8]; 2]);
    assert_eq!(chunks(1, None), own);
    assert_eq!(chunks(2, Some(32)), (true, vec![vec![32, 32, 32, 32, 32, 32, 8]; 2]));
    assert_eq!(chunks(3, None), own);
    assert_eq!(chunks(4, Some(97)), (false, vec![Vec::new(); 2]), "over the buffers");
    assert_eq!(chunks(5, None), own);
}

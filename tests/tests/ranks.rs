//! Ranks in step: replies, failures, replay.
#![allow(clippy::unwrap_used)]

use std::sync::{Arc, Mutex};

use plugfold_abi::{
    Below, BelowObject, Bits, Call, Claim, Granted, OpError, Plan as KernelPlan, Provider, ProviderObject,
    Query, TextBuf,
};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::plan::{Admission, Piece, Plan};
use plugfold_engine::rank::Rank;
use plugfold_engine::ranks::World;
use plugfold_engine::rounds::{Outcome, Rounds};
use plugfold_engine::service::{EngineError, Event, Finish, Handle, Request, Sampling, Service};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::guess::{Guess, guessing};
use plugfold_tests::model::{engine, ids, options, plain, reply, request};

const VOCAB: u32 = 480;
const SAMPLED: Sampling = Sampling { temperature: 0.9, top_k: 20, top_p: 0.95, min_p: 0.0, seed: None };

#[test]
fn batched_alone_and_on_any_number_of_ranks_of_one_split() {
    let jobs: Vec<Request> = [(1, 70, 12), (2, 5, 30), (3, 36, 9), (4, 100, 20), (5, 1, 16)]
        .into_iter()
        .map(|(s, n, t)| request(s, n, t, if s % 2 == 0 { SAMPLED } else { Sampling::GREEDY }))
        .collect();
    for ranks in [1, 2] {
        let one = engine(&options(&tiny_dir(), 1, 32), ranks, plain);
        let alone: Vec<_> = jobs.iter().map(|j| reply(&one.submit(j.clone()).unwrap()).unwrap()).collect();
        drop(one);
        for (job, (tokens, finish)) in jobs.iter().zip(&alone) {
            assert_eq!((tokens.len(), *finish), (job.max_tokens, Finish::Length));
        }
        let four = engine(&options(&tiny_dir(), 4, 48), ranks, plain);
        let handles: Vec<_> = jobs.iter().map(|j| four.submit(j.clone()).unwrap()).collect();
        let batched: Vec<_> = handles.iter().map(|h| reply(h).unwrap()).collect();
        assert_eq!(batched, alone, "on {ranks} ranks");
    }
}

/// Proposes what a recorded reply says, with a mistake now and then.
struct Recorded(Vec<u32>);

impl Guess for Recorded {
    fn guess(&self, ids: &[u32], budget: usize) -> Vec<u32> {
        let at = ids.len();
        let mut drafts: Vec<u32> = self.0.iter().skip(at).take(budget).copied().collect();
        if at.is_multiple_of(3)
            && let Some(last) = drafts.last_mut()
        {
            *last = (*last + 1) % VOCAB;
        }
        drafts
    }
}

#[test]
fn drafted_equals_serial() {
    for sampling in [Sampling::GREEDY, SAMPLED] {
        let job = request(9, 50, 40, sampling);
        let serial =
            reply(&engine(&options(&tiny_dir(), 1, 64), 1, plain).submit(job.clone()).unwrap()).unwrap();
        let all: Vec<u32> = job.ids.iter().chain(&serial.0).copied().collect();
        for ranks in [1, 2] {
            let drafted = engine(&options(&tiny_dir(), 1, 64), ranks, |_| guessing(Recorded(all.clone())));
            let handle = drafted.submit(job.clone()).unwrap();
            let mut tokens = Vec::new();
            let mut rounds = 0;
            for event in &handle.events {
                match event {
                    Event::Tokens(new) => tokens.extend(new),
                    Event::Done { stats, .. } => {
                        rounds = stats.rounds;
                        break;
                    }
                    Event::Error(e) => panic!("{e}"),
                    Event::Prefill { .. } | Event::Logprobs(_) => {}
                }
            }
            // One and two ranks have different sums; each must equal its own serial reply.
            let serial = if ranks == 1 {
                serial.0.clone()
            } else {
                reply(&engine(&options(&tiny_dir(), 1, 64), 2, plain).submit(job.clone()).unwrap()).unwrap().0
            };
            assert_eq!(tokens, serial, "{sampling:?} on {ranks} ranks");
            assert!(rounds < 25, "drafts were accepted: {rounds} rounds for 40 tokens");
        }
    }
}

#[test]
fn a_stop_id_ends_the_reply_and_is_counted() {
    let engine = engine(&options(&tiny_dir(), 1, 64), 1, plain);
    let mut job = request(1, 70, 12, Sampling::GREEDY);
    let whole = reply(&engine.submit(job.clone()).unwrap()).unwrap().0;
    job.stop_ids = vec![whole[5]];
    let first = whole.iter().position(|t| *t == whole[5]).unwrap();
    assert_eq!(reply(&engine.submit(job).unwrap()).unwrap(), (whole[..=first].to_vec(), Finish::Stop));
}

/// What a planted provider does on rows with a given token.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Plant {
    Error,
    Panic,
    Delay,
    /// Behaves: the ranks have to be alike in what they load.
    Nothing,
}

/// Wraps an operation and misbehaves on calls whose table has a given token.
struct Planted {
    op: &'static str,
    token: u32,
    plant: Plant,
}

impl Provider for Planted {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.op.into())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::of("ref"))))
    }
    fn run(&self, call: &Call<'_>, _: &KernelPlan, below: &BelowObject) -> Result<(), OpError> {
        if call.round.tokens.contains(&self.token) {
            match self.plant {
                Plant::Error => return Err(OpError::new("this is planted")),
                Plant::Panic => panic!("this is planted"),
                Plant::Delay => std::thread::sleep(std::time::Duration::from_millis(30)),
                Plant::Nothing => {}
            }
        }
        below.run(call)
    }
}

impl Planted {
    /// Options of a core with this provider, under the id "planted".
    fn options(self) -> CoreOptions {
        let mut hooks = Hooks::default();
        hooks.add_object("planted", ProviderObject::new(self)).unwrap();
        CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
    }
}

/// Every operation of a forward of the tiny model that is not an exchange.
fn operations() -> Vec<&'static str> {
    vec![
        "embed",
        "hc.dots",
        "hc.finish",
        "hc.post",
        "dense",
        "norm",
        "kda.mix",
        "mla.write",
        "mla.dense",
        "idx.write",
        "moe.logits",
        "moe.pick",
        "moe.group",
        "moe.up",
        "moe.act",
        "moe.down",
        "moe.combine",
        "mlp.act",
        "final",
        "rows.pick",
        "head",
        "sample.candidates",
        "comm.sum",
    ]
}

#[test]
fn a_failure_on_any_rank_ends_only_its_request() {
    // Token 481 is outside the ids that `ids` makes, so only the poisoned request has it, in its last row.
    let good = request(4, 20, 6, Sampling::GREEDY);
    let mut bad = request(5, 24, 6, Sampling::GREEDY);
    bad.ids[23] = 481;
    for ranks in [1, 2] {
        let fresh = engine(&options(&tiny_dir(), 2, 16), ranks, plain);
        let want = reply(&fresh.submit(good.clone()).unwrap()).unwrap();
        drop(fresh);
        for (i, op) in operations().into_iter().enumerate() {
            let plant = [Plant::Error, Plant::Panic, Plant::Delay][i % 3];
            // An exchange that fails cannot be made good: the ranks are out of step. That ends the engine, see below.
            if op == "comm.sum" && (ranks == 1 || plant != Plant::Delay) {
                continue;
            }
            let rank = i % ranks;
            let two = engine(&options(&tiny_dir(), 2, 16), ranks, |r| {
                let plant = if r == rank { plant } else { Plant::Nothing };
                Planted { op, token: 481, plant }.options()
            });
            let what = format!("{plant:?} in {op} on rank {rank} of {ranks}");
            let (a, b) = (two.submit(good.clone()).unwrap(), two.submit(bad.clone()).unwrap());
            if plant == Plant::Delay {
                assert_eq!(reply(&b).unwrap().0.len(), 6, "{what}");
            } else {
                let error = reply(&b).unwrap_err();
                let EngineError::Failed(message) = &error else { panic!("{what}: {error:?}") };
                let named = ["this is planted", "planted", op].iter().all(|w| message.contains(w));
                assert!(named, "{what}: {message}");
                assert!(ranks == 1 || message.starts_with(&format!("rank {rank}:")), "{what}: {message}");
            }
            assert_eq!(reply(&a).unwrap(), want, "the other request, {what}");
            assert_eq!(reply(&two.submit(good.clone()).unwrap()).unwrap(), want, "the next request, {what}");
            let stats = two.stats();
            let errors = u64::from(plant != Plant::Delay);
            assert_eq!((stats.errors, stats.decoding, stats.prefilling), (errors, 0, 0), "{what}");
            assert_eq!(stats.fatal, None, "{what}");
        }
    }
}

#[test]
fn an_exchange_that_fails_ends_all_ranks_with_the_reason() {
    let mut bad = request(5, 24, 6, Sampling::GREEDY);
    bad.ids[23] = 481;
    for rank in [0, 1] {
        let two = engine(&options(&tiny_dir(), 1, 16), 2, |r| {
            let plant = if r == rank { Plant::Error } else { Plant::Nothing };
            Planted { op: "comm.sum", token: 481, plant }.options()
        });
        let error = reply(&two.submit(bad.clone()).unwrap()).unwrap_err();
        assert!(matches!(&error, EngineError::Unavailable(m) if m.contains("this is planted")), "{error:?}");
        assert!(two.stats().fatal.is_some_and(|f| f.contains(&format!("rank {rank} of 2"))));
    }
}

#[test]
fn a_rank_that_dies_ends_the_engine_by_name() {
    let mut worlds = World::local(2).unwrap();
    let follower = worlds.pop().unwrap();
    let opts = options(&tiny_dir(), 1, 16);
    let theirs = opts.clone();
    let thread = std::thread::spawn(move || {
        let rank = Rank::load(&theirs, CoreOptions::default(), follower).unwrap();
        drop(rank); // without a goodbye: as if the process had gone
    });
    let lead = Rank::load(&opts, CoreOptions::default(), worlds.remove(0)).unwrap();
    let engine = Engine::start(lead).unwrap();
    thread.join().unwrap();
    // Either it is found before the request is taken, or the request ends with it.
    let message = match engine.submit(request(1, 10, 5, Sampling::GREEDY)) {
        Err(EngineError::Unavailable(message)) => message,
        Err(other) => panic!("{other:?}"),
        Ok(handle) => match reply(&handle) {
            Err(EngineError::Unavailable(message)) => message,
            other => panic!("{other:?}"),
        },
    };
    assert!(message.contains("rank 1 of 2"), "{message}");
    assert!(engine.stats().fatal.is_some_and(|f| f.contains("rank 1 of 2")));
}

#[test]
fn different_settings_refuse_to_start_and_name_the_line() {
    let mut worlds = World::local(2).unwrap();
    let follower = worlds.pop().unwrap();
    let theirs = options(&tiny_dir(), 1, 32);
    let thread =
        std::thread::spawn(move || Rank::load(&theirs, CoreOptions::default(), follower).err().unwrap());
    let mine =
        Rank::load(&options(&tiny_dir(), 1, 16), CoreOptions::default(), worlds.remove(0)).err().unwrap();
    for error in [mine.to_string(), thread.join().unwrap().to_string()] {
        assert!(error.contains("prefill rows") && error.contains("16") && error.contains("32"), "{error}");
    }
}

/// Invariant: a follower that replays the plans of rank 0 does the same work, whatever else is different there.
#[test]
fn followers_replay_recorded_plans() {
    let admission = |slot, seed, n| Admission {
        slot,
        ids: ids(seed, n, VOCAB),
        temperature: 0.8,
        top_k: 10,
        top_p: 0.9,
        seed,
        max_tokens: 6,
        stop_ids: vec![],
        draft: true,
        ..Admission::default()
    };
    let piece = |slot, tokens| Piece { slot, tokens };
    let plans = [
        Plan { admissions: vec![admission(0, 1, 40)], pieces: vec![piece(0, 16)], ..Plan::default() },
        Plan {
            admissions: vec![admission(2, 2, 20)],
            pieces: vec![piece(2, 20), piece(0, 24)],
            ..Plan::default()
        },
        Plan { decode: vec![0, 2], ..Plan::default() },
        Plan {
            cancels: vec![0],
            admissions: vec![admission(0, 3, 9)],
            pieces: vec![piece(0, 9)],
            decode: vec![2],
            ..Plan::default()
        },
        Plan { decode: vec![0, 2], ..Plan::default() },
        Plan { decode: vec![0, 2], ..Plan::default() },
    ];
    let run = |spare: usize, context: usize| {
        let options = CoreOptions { slots: 3 + spare, context: Some(context), ..CoreOptions::default() };
        let mut core = plugfold_engine::core::Core::load(
            &tiny_dir(),
            &options,
            plugfold_engine::split::Split::WHOLE,
            None,
        )
        .unwrap();
        let mut rounds = Rounds::new(&core, 64, 64).unwrap();
        let world = World::single();
        let log: Vec<Vec<(usize, Outcome)>> =
            plans.iter().map(|p| rounds.run(&mut core, &world, p.clone()).unwrap().outcomes).collect();
        (log, core.image(0), core.image(2))
    };
    let first = run(0, 256);
    assert_eq!(first, run(2, 1024));
    assert!(
        first.0[4].iter().all(|(_, o)| matches!(o, Outcome::Tokens { shared: 2, .. })),
        "{:?}",
        first.0[4]
    );
}

#[test]
fn cancelled_requests_free_their_slot() {
    let engine = engine(&options(&tiny_dir(), 1, 8), 1, plain);
    let mut long = request(1, 900, 100, Sampling::GREEDY);
    long.max_tokens = 100;
    let running = engine.submit(long.clone()).unwrap();
    let waiting = engine.submit(long).unwrap();
    // Wait until the first is being worked on, then leave; the second leaves while queued.
    let first = running.events.recv().unwrap();
    assert!(matches!(first, Event::Prefill { .. }));
    waiting.cancel();
    running.cancel();
    let done =
        |h: &Handle| h.events.iter().any(|e| matches!(e, Event::Done { finish: Finish::Cancelled, .. }));
    assert!(done(&running) && done(&waiting));
    let good = request(4, 40, 5, Sampling::GREEDY);
    assert_eq!(reply(&engine.submit(good).unwrap()).unwrap().0.len(), 5);
    assert_eq!(engine.stats().decoding + engine.stats().prefilling + engine.stats().waiting, 0);
}

#[test]
fn requests_that_could_never_run_are_refused_with_the_limit() {
    let engine = engine(&options(&tiny_dir(), 1, 64), 1, plain);
    let base = request(1, 10, 5, Sampling::GREEDY);
    let refused = Mutex::new(Vec::new());
    let refuse = |change: &dyn Fn(&mut Request), words: &[&str]| {
        let mut job = base.clone();
        change(&mut job);
        let Err(EngineError::Invalid(message)) = engine.submit(job) else { panic!("taken: {words:?}") };
        assert!(words.iter().all(|w| message.contains(w)), "{message} should name {words:?}");
        refused.lock().unwrap().push(message);
    };
    refuse(&|r| r.ids.clear(), &["empty"]);
    refuse(&|r| r.ids[3] = 512, &["512", "position 3"]);
    refuse(&|r| r.max_tokens = 0, &["max_tokens"]);
    refuse(&|r| r.max_tokens = 1015, &["1024", "1025"]);
    refuse(&|r| r.max_tokens = usize::MAX, &["1024"]);
    assert_eq!(refused.lock().unwrap().len(), 5);
    // Exactly the context is served.
    let mut most = base.clone();
    most.ids = ids(1, 1020, VOCAB);
    most.max_tokens = 4;
    assert_eq!(reply(&engine.submit(most).unwrap()).unwrap().0.len(), 4);
}

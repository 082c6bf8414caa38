//! The acceptance list of 0120, on the tiny model.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

mod support;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use plugfold_0120_batch_v2::depth::{Costs, Depths};
use plugfold_0120_batch_v2::planner::{Batch, Settings, Slots};
use plugfold_0120_batch_v2::stats::Stats;
use plugfold_abi::points::{
    DraftPolicyObject, Limits, LimitsLink, LimitsLinkObject, ObserverObject, PlannerObject, SlotMemory,
};
use plugfold_abi::{OpError, Phase};
use plugfold_base_auto_api::PoliciesObject;
use plugfold_engine::core::{Core, CoreOptions, SeqRows, Want};
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{Event, Finish, Request, Service};
use plugfold_engine::split::Split;
use plugfold_tests::drafting::Drafting;

use support::{
    Gate, SAMPLED, SaveMoment, Seen, States, alone, ask, engine, guesses, ids, options, outcome, request,
};

const SETTINGS: Settings = Settings { piece: 48, share: 0.5, reserve: 0, admit: 0 };

fn batch(settings: Settings, rank: usize) -> Hooks {
    let mut hooks = Hooks::default();
    hooks.add_object("0120", LimitsLinkObject::new(Slots { settings, host: None })).unwrap();
    hooks.add_object("0120", PlannerObject::new(Batch::new(settings, None))).unwrap();
    hooks.add_object("0120", ObserverObject::new(Stats::new(rank == 0))).unwrap();
    guesses(&mut hooks);
    hooks
}

/// An engine that waits after so many decoding rounds until the gate is dropped.
fn gated(slots: usize, ranks: usize, after: u32) -> (Engine, Gate) {
    let gate = Mutex::new(None);
    let engine = engine(&options(slots), ranks, |rank| {
        // Prompts never wait for those who decode: how long a round takes must not decide who meets whom.
        let mut hooks = batch(Settings { share: 1.0, ..SETTINGS }, rank);
        // All ranks have the same hooks; only rank 0 plans, and it is the last to be made.
        *gate.lock().unwrap() = Some(support::gate(&mut hooks, after));
        hooks
    });
    (engine, gate.into_inner().unwrap().unwrap())
}

/// Requests whose policies and sampling all differ; every other one is past the dense limit.
fn mixed(n: usize) -> Vec<Request> {
    let policies = ["g3", "", "b7", "g7"];
    let one = |i: usize| {
        let pattern = ids(40 + i as u64, 9).repeat(30);
        let sampling = if i % 3 == 1 { SAMPLED } else { Request::default().sampling };
        let prompt = pattern[..[30, 210, 75, 160][i % 4]].to_vec();
        Request { sampling, policy: policies[i % 4].into(), draft: i % 4 != 1, ..request(prompt, 24 + i) }
    };
    (0..n).map(one).collect()
}

#[test]
fn concurrent_requests_with_mixed_policies_equal_each_alone_and_serial() {
    for (slots, ranks) in [(2, 1), (4, 1), (4, 2)] {
        let (engine, gate) = gated(slots, ranks, 0);
        let requests = mixed(slots + 1);
        let handles: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        drop(gate);
        let mut shared = 0;
        for (i, (request, handle)) in requests.iter().zip(&handles).enumerate() {
            let (tokens, stats, _) = outcome(handle).unwrap();
            assert_eq!(tokens, alone(request), "request {i} of {slots} slots on {ranks} ranks");
            shared += stats.batched_rounds;
            let told = stats.fields.get("batch").unwrap_or_else(|| panic!("no field `batch`"));
            assert!(told["tokens_per_round"].as_f64().unwrap() >= 1.0, "{told}");
        }
        assert!(shared > 0, "no round was shared");
    }
}

/// The batch with the drafting plugins, whose priced policies look at the whole round.
fn priced(rank: usize) -> Hooks {
    let (mut hooks, services) = Drafting::default().parts().unwrap();
    let settings = Settings { share: 1.0, ..SETTINGS };
    hooks.add_object("0120", LimitsLinkObject::new(Slots { settings, host: None })).unwrap();
    hooks.add_object("0120", PlannerObject::new(Batch::new(settings, None))).unwrap();
    hooks.add_object("0120", ObserverObject::new(Stats::new(rank == 0))).unwrap();
    let depths = Arc::new(Depths::default());
    let policies = services.iter().find(|s| s.interface() == "policies").unwrap();
    depths.connect(policies.get::<PoliciesObject>().unwrap());
    hooks.add_object("0120", DraftPolicyObject::new(depths.clone())).unwrap();
    hooks.add_object("0120", ObserverObject::new(Costs(depths))).unwrap();
    hooks
}

#[test]
fn requests_whose_depth_is_priced_by_the_round_equal_each_alone_and_serial() {
    for ranks in [1, 2] {
        let engine = engine(&options(4), ranks, priced);
        let policies = ["o", "om", "om3", "auto", "3", ""];
        let requests: Vec<Request> = (0..6)
            .map(|i| {
                let pattern = ids(60 + i as u64, 11).repeat(20);
                let sampling = if i % 2 == 1 { SAMPLED } else { Request::default().sampling };
                let prompt = pattern[..[40, 150, 90][i % 3]].to_vec();
                Request { sampling, policy: policies[i].into(), ..request(prompt, 40) }
            })
            .collect();
        let handles: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).unwrap()).collect();
        let mut shared = 0;
        for (i, (request, handle)) in requests.iter().zip(&handles).enumerate() {
            let (tokens, stats, _) = outcome(handle).unwrap();
            assert_eq!(tokens, alone(request), "request {i} on {ranks} ranks");
            assert!(stats.drafted > 0, "request {i} drafted nothing");
            shared += stats.batched_rounds;
        }
        assert!(shared > 0, "no round was shared");
    }
}

/// The rows' logits of sequences that run together, each after a prompt of its own.
fn window(core: &mut Core, prompts: &[(usize, &[u32], &[u32])]) -> Vec<Vec<f32>> {
    for (slot, prompt, _) in prompts {
        core.begin(*slot);
        for tokens in prompt.chunks(64) {
            let rows = [SeqRows { slot: *slot, tokens, want: Want::Nothing, embeds: &[] }];
            let forward = core.forward(Phase::Prefill, &rows, None, false).unwrap();
            core.commit(&forward, &[tokens.len()]).unwrap();
        }
    }
    let rows: Vec<SeqRows<'_>> = prompts
        .iter()
        .map(|(slot, _, tokens)| SeqRows { slot: *slot, tokens, want: Want::All, embeds: &[] })
        .collect();
    let forward = core.forward(Phase::Window, &rows, None, false).unwrap();
    let logits = core.output(&forward, "logits").unwrap().to_vec();
    let hidden = core.output(&forward, "rows").unwrap().to_vec();
    let total: usize = prompts.iter().map(|p| p.2.len()).sum();
    let (vocab, width) = (logits.len() / total, hidden.len() / total);
    let row = |i: usize| [&logits[i * vocab..(i + 1) * vocab], &hidden[i * width..(i + 1) * width]].concat();
    (0..total).map(row).collect()
}

#[test]
fn batched_rows_equal_lone_rows_on_both_sides_of_the_dense_limit_and_across_it() {
    let core_options = CoreOptions { slots: 3, context: Some(512), ..CoreOptions::default() };
    let mut core = Core::load(&support::tiny(), &core_options, Split::WHOLE, None).unwrap();
    let limit = core.config().index.topk + core.config().index.pool - 1;
    let tokens = ids(5, 8);
    let lengths = [limit / 2, limit - 3, limit + 20];
    let prompts: Vec<Vec<u32>> = lengths.iter().map(|n| ids(*n as u64, *n)).collect();
    let all: Vec<(usize, &[u32], &[u32])> =
        prompts.iter().enumerate().map(|(slot, p)| (slot, &p[..], &tokens[..8 - slot])).collect();
    let together = window(&mut core, &all);
    let mut first = 0;
    for one in &all {
        let lone = window(&mut core, std::slice::from_ref(one));
        for (i, row) in lone.iter().enumerate() {
            let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(row), bits(&together[first + i]), "row {i} of slot {}", one.0);
        }
        first += lone.len();
    }
}

#[test]
fn a_prompt_in_pieces_ends_in_the_state_of_one_prefill() {
    let prompt = ids(3, 301);
    let states = |piece: Option<u32>| -> (States, usize) {
        let kept = Arc::new(Mutex::new(None));
        let engine = engine(&options(2), 1, |rank| {
            let mut hooks =
                piece.map_or_else(Hooks::default, |piece| batch(Settings { piece, ..SETTINGS }, rank));
            *kept.lock().unwrap() = Some(support::spy(&mut hooks));
            hooks
        });
        let (_, stats) = ask(&engine, request(prompt.clone(), 5));
        let states = kept.lock().unwrap().take().unwrap();
        (states, stats.pieces)
    };
    let (whole, _) = states(None);
    let whole = whole.lock().unwrap();
    assert_eq!(whole.len(), 2, "after the prompt and after the reply");
    for (piece, pieces) in [(7, 43), (64, 5), (100, 4), (1000, 1)] {
        let (cut, took) = states(Some(piece));
        assert_eq!(took, pieces, "pieces of {piece}");
        assert_eq!(*cut.lock().unwrap(), *whole, "pieces of {piece}");
    }
}

#[test]
fn a_long_prompt_leaves_those_who_decode_a_token_a_piece() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let settings = Settings { share: 1.0, ..SETTINGS };
    let gate = Mutex::new(None);
    let engine = engine(&options(2), 1, |rank| {
        let mut hooks = batch(settings, rank);
        *seen.lock().unwrap() = support::watch(&mut hooks);
        *gate.lock().unwrap() = Some(support::gate(&mut hooks, 2));
        hooks
    });
    let seen = seen.lock().unwrap().clone();
    let decoder = engine.submit(request(ids(1, 20), 400)).unwrap();
    while !matches!(decoder.events.recv().unwrap(), Event::Tokens(_)) {}
    let long = engine.submit(request(ids(2, 700), 1)).unwrap();
    drop(gate);
    outcome(&long).unwrap();
    decoder.cancel();
    let rounds = support::rounds(&seen);
    let beside: Vec<_> = rounds.iter().filter(|[_, prefill, ..]| *prefill > 20).collect();
    assert!(beside.len() >= 700 / 48, "{rounds:?}");
    for [round, prefill, decoded, ..] in beside {
        assert!(*prefill <= 48 && *decoded == 1, "round {round}: {prefill} prompt rows, {decoded} decoded");
    }
}

#[test]
fn a_client_that_leaves_frees_its_slot_and_changes_nothing_for_others() {
    let (engine, gate) = gated(2, 1, 4);
    let stays = Request { policy: "g5".into(), ..request(ids(4, 12).repeat(4), 60) };
    let (kept, gone) =
        (engine.submit(stays.clone()).unwrap(), engine.submit(request(ids(5, 40), 500)).unwrap());
    let third = engine.submit(request(ids(6, 30), 4)).unwrap();
    while !matches!(gone.events.recv().unwrap(), Event::Tokens(_)) {}
    gone.cancel();
    drop(gate);
    assert_eq!(outcome(&gone).unwrap().2, Finish::Cancelled);
    assert_eq!(outcome(&third).unwrap().0, alone(&request(ids(6, 30), 4)), "it got the slot");
    assert_eq!(outcome(&kept).unwrap().0, alone(&stays));
}

#[test]
fn a_background_request_steps_aside_and_its_caller_gets_each_token_once() {
    for sampling in [Request::default().sampling, SAMPLED] {
        let (engine, gate) = gated(1, 1, 4);
        let slow = Request { background: true, sampling, policy: "g3".into(), ..request(ids(8, 30), 200) };
        let handle = engine.submit(slow.clone()).unwrap();
        let mut tokens = Vec::new();
        while tokens.len() < 3 {
            if let Event::Tokens(new) = handle.events.recv().unwrap() {
                tokens.extend(new);
            }
        }
        let urgent = request(ids(9, 25), 6);
        let handle_of_urgent = engine.submit(urgent.clone()).unwrap();
        drop(gate);
        assert_eq!(outcome(&handle_of_urgent).unwrap().0, alone(&urgent));
        assert_eq!(engine.stats().preempted, 1);
        let (rest, stats, _) = outcome(&handle).unwrap();
        tokens.extend(rest);
        assert_eq!(tokens, alone(&slow));
        assert_eq!(stats.preempted, 1);
    }
}

/// Says how many slots fit on this rank.
struct Fits(u32);

impl LimitsLink for Fits {
    fn raise(&self, _: &mut Limits) -> Result<(), OpError> {
        Ok(())
    }
    fn fit(&self, memory: &SlotMemory) -> Result<u32, OpError> {
        assert!(memory.slot_bytes > 0 && memory.slots == 4, "{memory:?}");
        Ok(self.0)
    }
}

#[test]
fn with_too_little_memory_all_ranks_make_the_same_fewer_slots() {
    let few = engine(&options(4), 2, |rank| {
        let mut hooks = Hooks::default();
        hooks.add_object("fits", LimitsLinkObject::new(Fits([3, 2][rank]))).unwrap();
        guesses(&mut hooks);
        hooks
    });
    assert_eq!(few.info().slots, 2);
    let handles: Vec<_> = mixed(3).into_iter().map(|r| (r.clone(), few.submit(r).unwrap())).collect();
    for (request, handle) in handles {
        assert_eq!(outcome(&handle).unwrap().0, alone(&request));
    }
    let none = engine(&options(4), 2, |rank| batch(Settings { reserve: u64::MAX, ..SETTINGS }, rank));
    assert_eq!(none.info().slots, 1, "the engine's own slot");
}

#[test]
fn different_slots_on_the_ranks_refuse_to_start() {
    struct More(u32);
    impl LimitsLink for More {
        fn raise(&self, limits: &mut Limits) -> Result<(), OpError> {
            limits.slots = self.0;
            Ok(())
        }
    }
    let (lead, followers) = support::start(&options(1), 2, |rank| {
        let mut hooks = Hooks::default();
        hooks.add_object("more", LimitsLinkObject::new(More([4, 2][rank]))).unwrap();
        hooks
    });
    let told = lead.err().map_or_else(String::new, |e| e.to_string());
    assert!(told.contains("slots: rank 0 has `4`, rank 1 has `2`"), "{told}");
    for follower in followers {
        assert!(follower.join().unwrap().is_err());
    }
}

#[test]
fn a_follower_with_settings_of_its_own_makes_the_same_windows_keeps_and_snapshots() {
    let seen = [Mutex::new(Seen::default()), Mutex::new(Seen::default())];
    let (engine, followers) = support::start(&options(3), 2, |rank| {
        // What is rank 0's alone differs on the follower.
        let settings = Settings { share: [0.5, 0.01][rank], admit: [0, u64::MAX][rank], ..SETTINGS };
        let mut hooks = batch(settings, rank);
        *seen[rank].lock().unwrap() = support::watch(&mut hooks);
        hooks
    });
    let engine = engine.unwrap_or_else(|e| panic!("{e}"));
    let handles: Vec<_> = mixed(5).into_iter().map(|r| engine.submit(r).unwrap()).collect();
    for h in &handles {
        outcome(h).unwrap();
    }
    drop(engine);
    for follower in followers {
        follower.join().unwrap().unwrap();
    }
    let logs: Vec<Vec<String>> = seen.iter().map(|s| s.lock().unwrap().lock().unwrap().clone()).collect();
    assert!(logs[0].len() > 50, "{}", logs[0].len());
    assert_eq!(logs[0], logs[1]);
}

#[test]
fn a_request_waits_for_memory_until_it_is_alone() {
    let engine = engine(&options(2), 1, |rank| batch(Settings { admit: u64::MAX, ..SETTINGS }, rank));
    let handles: Vec<_> = mixed(3).into_iter().map(|r| (r.clone(), engine.submit(r).unwrap())).collect();
    for (request, handle) in handles {
        let (tokens, stats, _) = outcome(&handle).unwrap();
        assert_eq!(tokens, alone(&request));
        assert_eq!(stats.batched_rounds, 0, "never beside another");
        assert!(Duration::from_secs_f64(stats.queued_s) < Duration::from_secs(60));
    }
}

#[test]
fn states_after_prompt_and_reply_are_those_of_a_request_alone() {
    let run = |slots: usize, together: bool| -> States {
        let kept = Arc::new(Mutex::new(None));
        let engine = engine(&options(slots), 1, |rank| {
            let mut hooks = batch(SETTINGS, rank);
            *kept.lock().unwrap() = Some(support::spy(&mut hooks));
            hooks
        });
        let requests: Vec<Request> = mixed(4).into_iter().filter(|r| r.draft).collect();
        if together {
            let handles: Vec<_> = requests.into_iter().map(|r| engine.submit(r).unwrap()).collect();
            for h in &handles {
                outcome(h).unwrap();
            }
        } else {
            for r in requests {
                ask(&engine, r);
            }
        }
        kept.lock().unwrap().take().unwrap()
    };
    let (lone, shared) = (run(1, false), run(4, true));
    let (lone, shared) = (lone.lock().unwrap(), shared.lock().unwrap());
    assert_eq!(lone.keys().filter(|k| k.0 == SaveMoment::Reply).count(), 3);
    assert_eq!(*lone, *shared);
}

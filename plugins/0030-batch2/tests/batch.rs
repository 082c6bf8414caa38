//! The acceptance list of 0030, on the tiny model.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

#[path = "../../0120-batch-v2/tests/support/mod.rs"]
mod support;

use std::sync::{Arc, Mutex};

use plugfold_0030_batch2::Scheduler;
use plugfold_abi::points::PlannerObject;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{Event, Request, Service};

use support::{SAMPLED, Seen, alone, ask, engine, guesses, ids, options, outcome, request};

fn small() -> Hooks {
    let mut hooks = Hooks::default();
    hooks.add_object("0030", PlannerObject::new(Scheduler)).unwrap();
    guesses(&mut hooks);
    hooks
}

#[test]
fn two_requests_queued_together_equal_their_lone_and_serial_replies() {
    for ranks in [1, 2] {
        let engine = engine(&options(2), ranks, |_| small());
        for (first, second) in [("g3", ""), ("b5", "g7"), ("g1", "g1")] {
            let one = Request { policy: first.into(), ..request(ids(1, 11).repeat(5), 30) };
            let two = Request { policy: second.into(), sampling: SAMPLED, ..request(ids(2, 90), 20) };
            let handles = [&one, &two].map(|r| engine.submit(r.clone()).unwrap());
            let replies = handles.each_ref().map(|h| outcome(h).unwrap().0);
            assert_eq!(replies, [alone(&one), alone(&two)], "{first} and {second} on {ranks} ranks");
        }
    }
}

#[test]
fn a_third_request_behind_a_full_batch_and_a_client_that_leaves_change_nothing() {
    let engine = engine(&options(2), 1, |_| small());
    let stays = request(ids(4, 50), 60);
    let third = request(ids(6, 33), 7);
    let handles = [&stays, &request(ids(5, 40), 500), &third].map(|r| engine.submit(r.clone()).unwrap());
    while !matches!(handles[1].events.recv().unwrap(), Event::Tokens(_)) {}
    handles[1].cancel();
    assert_eq!(outcome(&handles[2]).unwrap().0, alone(&third));
    assert_eq!(outcome(&handles[0]).unwrap().0, alone(&stays));
}

#[test]
fn the_next_turn_lands_on_the_slot_that_holds_its_prefix() {
    let engine = engine(&options(3), 1, |_| small());
    let prompts = [ids(7, 70), ids(8, 80), ids(9, 90)];
    let turns = prompts.map(|prompt| {
        let (reply, stats) = ask(&engine, request(prompt.clone(), 10));
        ([prompt, reply].concat(), stats.slot)
    });
    assert_eq!(turns.each_ref().map(|t| t.1), [0, 1, 2], "where nobody was for longest");
    for i in [1, 0, 2] {
        let (said, slot) = &turns[i];
        let next = request([&said[..], &ids(77, 12)].concat(), 8);
        let (reply, stats) = ask(&engine, next.clone());
        // The last token of a reply was never run through the model.
        assert_eq!((stats.slot, stats.cached_tokens), (*slot, said.len() - 1));
        assert_eq!(reply, alone(&next));
    }
}

#[test]
fn prompts_are_prefilled_whole() {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let engine = engine(&options(2), 1, |_| {
        let mut hooks = small();
        *seen.lock().unwrap() = support::watch(&mut hooks);
        hooks
    });
    let seen = seen.lock().unwrap().clone();
    let (_, stats) = ask(&engine, request(ids(1, 500), 3));
    assert_eq!(support::rounds(&seen)[0][1], 500);
    assert!(stats.pieces <= 1, "{}", stats.pieces);
}

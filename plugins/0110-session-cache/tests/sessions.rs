//! The acceptance list of 0110, on the tiny model.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

#[path = "../../0120-batch-v2/tests/support/mod.rs"]
mod support;

use std::sync::{Arc, Mutex};

use plugfold_0110_session_cache::marks::Rules;
use plugfold_0110_session_cache::store::{Marks, Sessions, Settings, Told};
use plugfold_abi::points::{
    DrafterObject, Figure, ObserverObject, PlannerObject, RequestFacts, SaveFacts, SequencesObject,
    StatePartObject, Store, StoreObject, StoreOffer,
};
use plugfold_abi::{List, OpError, Slice, TextBuf};
use plugfold_base_mtp::Chains;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{Request, Service};

use support::{SAMPLED, States, alone, ask, engine, guesses, ids, options, request};

const MIB: u64 = 1 << 20;
const SETTINGS: Settings =
    Settings { budget: 512 * MIB, reserve: 0, rules: Rules { every: 0, fork_min: 512 } };

fn hooks(settings: Settings) -> Hooks {
    let mut hooks = Hooks::default();
    let sessions = Arc::new(Sessions::new(settings, None));
    hooks.add_object("0110", StoreObject::new(sessions.clone())).unwrap();
    hooks.add_object("0110", PlannerObject::new(Marks(sessions.clone()))).unwrap();
    hooks.add_object("0110", ObserverObject::new(Told(sessions))).unwrap();
    guesses(&mut hooks);
    hooks
}

fn figure(engine: &Engine, name: &str) -> u64 {
    let stats = engine.stats();
    let found = stats.stores.iter().find(|(store, n, _)| store == "sessions" && n == name);
    found.map_or_else(|| panic!("no figure {name} in {:?}", stats.stores), |f| f.2 as u64)
}

/// One turn of a conversation: the prompt so far, with what is new.
fn turn(session: &mut Vec<u32>, new: &[u32], sampled: bool) -> Request {
    session.extend_from_slice(new);
    let sampling = if sampled { SAMPLED } else { Request::default().sampling };
    Request { sampling, policy: "g3".into(), ..request(session.clone(), 9) }
}

/// Plays turns of three conversations over one system prompt; gives replies, cached tokens and committed states.
fn play(
    order: &[usize],
    slots: usize,
    ranks: usize,
    sampled: bool,
    fresh: bool,
) -> (Vec<(Vec<u32>, usize)>, States) {
    let states = Mutex::new(States::default());
    let start = || {
        engine(&options(slots), ranks, |rank| {
            let mut hooks = if fresh { Hooks::default() } else { hooks(SETTINGS) };
            if fresh {
                guesses(&mut hooks);
            }
            let spied = support::spy(&mut hooks);
            if rank == 0 {
                let before = std::mem::replace(&mut *states.lock().unwrap(), spied.clone());
                spied.lock().unwrap().append(&mut before.lock().unwrap());
            }
            hooks
        })
    };
    let system = ids(1, 300);
    let mut sessions: Vec<Vec<u32>> = (0..3).map(|s| [&system[..], &ids(10 + s, 40)].concat()).collect();
    let mut one = start();
    let mut out = Vec::new();
    for (i, &s) in order.iter().enumerate() {
        if fresh && i > 0 {
            one = start();
        }
        let asked = turn(&mut sessions[s], &ids(100 + i as u64, 20), sampled);
        let (reply, stats) = ask(&one, asked);
        sessions[s].extend_from_slice(&reply);
        out.push((reply, stats.cached_tokens));
    }
    (out, states.into_inner().unwrap())
}

#[test]
fn interleaved_sessions_equal_fresh_prefills_in_replies_and_states() {
    let order = [0, 1, 0, 2, 1, 0];
    for (slots, ranks, sampled) in [(1, 1, false), (1, 1, true), (2, 1, false), (1, 2, true)] {
        let what = format!("{slots} slots, {ranks} ranks, sampled: {sampled}");
        let (with, states) = play(&order, slots, ranks, sampled, false);
        let (without, yardstick) = play(&order, slots, ranks, sampled, true);
        let replies = |all: &[(Vec<u32>, usize)]| all.iter().map(|r| r.0.clone()).collect::<Vec<_>>();
        assert_eq!(replies(&with), replies(&without), "{what}");
        assert!(without.iter().all(|r| r.1 == 0), "the yardstick resumes nothing");
        // A's second turn, B's second and A's third resume all but the token drawn last.
        for i in [2, 4, 5] {
            assert!(with[i].1 > 300, "turn {i} resumed {} tokens; {what}", with[i].1);
        }
        let (states, yardstick) = (states.lock().unwrap(), yardstick.lock().unwrap());
        assert_eq!(yardstick.len(), 12, "after each prompt and each reply");
        assert_eq!(*states, *yardstick, "{what}");
    }
}

#[test]
fn cached_tokens_are_the_entrys_length_and_requests_without_drafts_leave_the_store_alone() {
    let engine = engine(&options(1), 1, |_| hooks(SETTINGS));
    let a = ids(1, 400);
    ask(&engine, request(a.clone(), 1));
    ask(&engine, request(ids(2, 100), 1));
    assert_eq!(figure(&engine, "entries"), 2);
    let longer = [&a[..], &ids(3, 30)].concat();
    let off = Request { draft: false, ..request(longer.clone(), 3) };
    let before = engine.stats().stores;
    let (reply, stats) = ask(&engine, off.clone());
    assert_eq!(stats.cached_tokens, 0);
    assert_eq!(reply, alone(&off));
    assert_eq!(engine.stats().stores, before, "neither read nor written");
    let (_, stats) = ask(&engine, request(longer, 3));
    assert_eq!(stats.cached_tokens, 400);
    assert_eq!(figure(&engine, "hits"), 1);
    assert!(stats.fields["sessions"]["entries"].as_u64().unwrap() >= 3, "{:?}", stats.fields);
}

#[test]
fn a_restore_into_caches_that_hold_the_pages_copies_none() {
    let rules = Rules { every: 768, fork_min: 1 };
    let engine = engine(&options(1), 1, |_| hooks(Settings { rules, ..SETTINGS }));
    let a = ids(1, 900);
    ask(&engine, request(a.clone(), 1));
    assert_eq!(figure(&engine, "entries"), 2, "the mark at 768 and the prompt");
    // What the slot keeps is of 900 tokens and no prefix of this one; the mark is in the store.
    let forked = request([&a[..800], &ids(2, 30)].concat(), 4);
    let (reply, stats) = ask(&engine, forked.clone());
    assert_eq!((stats.cached_tokens, reply), (768, alone(&forked)));
    let pages = |name| figure(&engine, name);
    assert_eq!((pages("copied_pages"), pages("skipped_pages")), (0, 2));
    // Another conversation overwrites the slot: now they have to be copied.
    ask(&engine, request(ids(3, 300), 1));
    let again = request([&a[..800], &ids(4, 30)].concat(), 4);
    let (reply, stats) = ask(&engine, again.clone());
    assert_eq!((stats.cached_tokens, reply), (768, alone(&again)));
    assert_eq!((pages("copied_pages"), pages("skipped_pages")), (2, 2));
}

#[test]
fn a_fork_is_marked_and_serves_the_next_that_forks_there() {
    let engine = engine(&options(1), 1, |_| hooks(SETTINGS));
    let system = ids(1, 600);
    let prompt = |seed| request([&system[..], &ids(seed, 50)].concat(), 3);
    let asked = [2, 3, 4].map(|seed| ask(&engine, prompt(seed)));
    let cached = asked.each_ref().map(|a| a.1.cached_tokens);
    assert_eq!(cached, [0, 0, 512], "the second leaves a mark at the page before the fork");
    for (seed, (reply, _)) in [2, 3, 4].into_iter().zip(&asked) {
        assert_eq!(*reply, alone(&prompt(seed)), "{seed}");
    }
}

#[test]
fn a_tiny_budget_is_kept_and_what_is_larger_is_skipped() {
    let probe = engine(&options(1), 1, |_| hooks(SETTINGS));
    ask(&probe, request(ids(1, 200), 1));
    let one = figure(&probe, "used_bytes");
    let budget = one * 5 / 2;
    let engine = engine(&options(1), 1, |_| hooks(Settings { budget, ..SETTINGS }));
    for seed in 1..6 {
        ask(&engine, request(ids(seed, 200), 1));
        assert!(figure(&engine, "used_bytes") <= budget);
    }
    assert_eq!((figure(&engine, "entries"), figure(&engine, "evicted")), (2, 3));
    let large = request(ids(9, 900), 2);
    assert_eq!(ask(&engine, large.clone()).0, alone(&large));
    assert_eq!((figure(&engine, "entries"), figure(&engine, "skipped")), (2, 2), "prompt and reply");
    let (_, stats) = ask(&engine, request([ids(5, 200), ids(7, 9)].concat(), 1));
    assert_eq!(stats.cached_tokens, 200, "the last is still there");
}

#[test]
fn drafts_after_a_restore_are_those_of_a_fresh_prefill() {
    let prompt = ids(1, 600);
    let next = Request { policy: "g4".into(), ..request([&prompt[..], &ids(2, 30)].concat(), 16) };
    for ranks in [1, 2] {
        let run = |store: bool| {
            let heard = Mutex::new(support::Proposals::default());
            let engine = engine(&options(1), ranks, |rank| {
                let mut hooks = Hooks::default();
                let chains = Arc::new(Chains::default());
                hooks.add_object("base-mtp", DrafterObject::new(chains.clone())).unwrap();
                hooks.add_object("base-mtp", StatePartObject::new(chains)).unwrap();
                support::by_name(&mut hooks);
                let proposals = support::listen(&mut hooks);
                if rank == 0 {
                    *heard.lock().unwrap() = proposals;
                }
                if store {
                    let sessions = Arc::new(Sessions::new(SETTINGS, None));
                    hooks.add_object("0110", StoreObject::new(sessions)).unwrap();
                }
                hooks
            });
            let heard = heard.into_inner().unwrap();
            if store {
                // The reply's drafts leave a backlog in the draft layer; another conversation takes the slot over.
                ask(&engine, Request { policy: "g2".into(), ..request(prompt.clone(), 5) });
                ask(&engine, Request { policy: "g3".into(), ..request(ids(3, 700), 5) });
                heard.lock().unwrap().clear();
            }
            let (reply, stats) = ask(&engine, next.clone());
            let proposals = heard.lock().unwrap().clone();
            (reply, stats.cached_tokens, proposals)
        };
        let (with, without) = (run(true), run(false));
        assert_eq!((with.1, without.1), (600, 0), "{ranks} ranks");
        assert_eq!(with.0, without.0);
        assert!(without.2.iter().map(Vec::len).sum::<usize>() > 20, "{:?}", without.2);
        assert_eq!(with.2, without.2, "{ranks} ranks");
    }
}

/// A store on one rank that forgets its first save.
struct Forgets(Arc<Sessions>, Mutex<bool>);

impl Store for Forgets {
    fn name(&self) -> Result<TextBuf, OpError> {
        self.0.name()
    }
    fn open(&self, sequences: &SequencesObject) -> Result<(), OpError> {
        self.0.open(sequences)
    }
    fn offer(&self, request: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        self.0.offer(request)
    }
    fn decide(&self, save: &SaveFacts<'_>, sequences: &SequencesObject) -> Result<List<u8>, OpError> {
        self.0.decide(save, sequences)
    }
    fn save(
        &self,
        save: &SaveFacts<'_>,
        decision: Slice<'_, u8>,
        sequences: &SequencesObject,
    ) -> Result<(), OpError> {
        if std::mem::replace(&mut *self.1.lock().unwrap(), false) {
            return Ok(());
        }
        self.0.save(save, decision, sequences)
    }
    fn resume(&self, ticket: u64, slot: u32, sequences: &SequencesObject) -> Result<bool, OpError> {
        self.0.resume(ticket, slot, sequences)
    }
    fn digest(&self) -> Result<u64, OpError> {
        self.0.digest()
    }
    fn overwritten(&self, slot: u32, length: u32) -> Result<(), OpError> {
        self.0.overwritten(slot, length)
    }
    fn figures(&self) -> Result<List<Figure>, OpError> {
        self.0.figures()
    }
}

#[test]
fn an_index_that_differs_between_ranks_ends_the_engine_by_name() {
    let engine = engine(&options(1), 2, |rank| {
        let mut hooks = Hooks::default();
        let sessions = Arc::new(Sessions::new(SETTINGS, None));
        let store = Forgets(sessions, Mutex::new(rank == 1));
        hooks.add_object("0110", StoreObject::new(store)).unwrap();
        hooks
    });
    ask(&engine, request(ids(1, 50), 1));
    let handle = engine.submit(request(ids(2, 50), 500)).unwrap();
    let told = support::outcome(&handle).err().unwrap_or_default();
    assert!(told.contains("plugin 0110") && told.contains("differs between ranks"), "{told}");
}

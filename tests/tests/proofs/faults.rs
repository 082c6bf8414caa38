//! One rank's failure is everybody's: an error, a panic and a delay at every hook and every operation, on every rank in turn.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{EngineError, Finish, Request, Sampling, Service};
use plugfold_tests::faulty::{Deed, Fuse, OWNER, hooks, operations};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{options, reply, request};

/// Ranks of an engine.
const RANKS: usize = 2;
/// Longest that anybody may wait for the end.
const LONGEST: Duration = Duration::from_secs(10);

/// What an error or a panic at a point comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Comes {
    /// It is logged; the reply is as it would be.
    Nothing,
    /// It ends its request, with its name, on all ranks alike.
    ItsRequest,
    /// It ends the engine on all ranks, with its name: nobody can know how far the others are, or all depend on it.
    TheEngine,
}
use Comes::{ItsRequest, Nothing, TheEngine};

/// Points that are called while an engine serves: on which ranks, and what a fault there comes to.
const POINTS: &[(&str, &[usize], Comes)] = &[
    ("words.value", &[0, 1], ItsRequest),
    ("field.fill", &[0, 1], ItsRequest),
    ("field.fill late", &[0, 1], ItsRequest),
    ("capture.bounds", &[0, 1], ItsRequest),
    ("capture.mode", &[0, 1], ItsRequest),
    ("executor.run before", &[0, 1], ItsRequest),
    ("executor.run between", &[0, 1], ItsRequest),
    ("executor.run after", &[0, 1], ItsRequest),
    ("plan-wait.idle", &[0], TheEngine),
    ("plan-wait.gather", &[0], TheEngine),
    ("plan-wait.follow", &[1], TheEngine),
    ("round-driver.round", &[0, 1], TheEngine),
    ("planner.order", &[0], TheEngine),
    ("planner.step_aside", &[0], TheEngine),
    ("planner.place", &[0], ItsRequest),
    ("planner.admit", &[0], ItsRequest),
    ("planner.marks", &[0], Nothing),
    ("planner.pieces", &[0], TheEngine),
    ("planner.decode", &[0], TheEngine),
    ("spans.spans", &[0, 1], ItsRequest),
    ("drafter.begun", &[0, 1], ItsRequest),
    ("drafter.absorb", &[0, 1], ItsRequest),
    ("drafter.propose", &[0, 1], ItsRequest),
    ("drafter.ended", &[0, 1], Nothing),
    ("policy.decide", &[0, 1], ItsRequest),
    ("policy.observe", &[0, 1], ItsRequest),
    ("policy.begun", &[0, 1], ItsRequest),
    ("policy.ended", &[0, 1], Nothing),
    ("drafts.cut", &[0, 1], ItsRequest),
    ("observer.planned", &[0], Nothing),
    ("observer.round", &[0, 1], Nothing),
    ("observer.sequence", &[0, 1], Nothing),
    ("observer.times", &[0, 1], Nothing),
    ("observer.operation", &[0, 1], Nothing),
    ("observer.ran", &[0, 1], Nothing),
    ("observer.launched", &[0, 1], Nothing),
    ("observer.forward", &[0, 1], Nothing),
    ("observer.arrived", &[0], Nothing),
    ("observer.request", &[0], Nothing),
    ("store.offer", &[0], Nothing),
    ("store.decide", &[0], Nothing),
    ("store.save", &[0, 1], TheEngine),
    ("store.resume", &[0, 1], Nothing),
    ("store.digest", &[0, 1], Nothing),
    ("store.overwritten", &[0, 1], ItsRequest),
    ("store.figures", &[0], Nothing),
    ("part.begin", &[0, 1], ItsRequest),
    ("part.save", &[0, 1], Nothing),
    ("section.write", &[0], TheEngine),
    ("section.read", &[0, 1], TheEngine),
    ("rider.write", &[0, 1], TheEngine),
    ("rider.read", &[0, 1], TheEngine),
];

/// Operations that no program of this model has.
const NOT_RUN: &[&str] = &["tap"];

/// What a fault of an operation comes to.
fn of_operation(op: &str) -> Comes {
    // The other ranks are in the exchange already.
    if op.starts_with("comm.") { TheEngine } else { ItsRequest }
}

/// Every point with the ranks that call it.
fn points() -> Vec<(String, Vec<usize>, Comes)> {
    let named = POINTS.iter().map(|(point, ranks, comes)| ((*point).to_owned(), ranks.to_vec(), *comes));
    let ops = operations().into_iter().filter(|op| !NOT_RUN.contains(&op.as_str()));
    named.chain(ops.map(|op| (op.clone(), vec![0, 1], of_operation(&op)))).collect()
}

/// An engine over two ranks with a fuse each.
struct Two {
    engine: Engine,
    fuses: Vec<Arc<Fuse>>,
    follower: JoinHandle<Result<(), String>>,
}

fn settings() -> Options {
    let named = || Some(OWNER.to_owned());
    Options { executor: named(), plan_wait: named(), round_driver: named(), ..options(&tiny_dir(), 2, 16) }
}

fn start() -> Two {
    let fuses: Vec<Arc<Fuse>> = (0..RANKS).map(|_| Arc::default()).collect();
    let mut worlds = World::local(RANKS).unwrap();
    let core = |rank: usize| CoreOptions { hooks: Arc::new(hooks(&fuses[rank])), ..CoreOptions::default() };
    let (theirs, world) = (core(1), worlds.pop().unwrap());
    let follower = std::thread::spawn(move || {
        let rank = Rank::load(&settings(), theirs, world).map_err(|e| e.to_string())?;
        rank.follow().map_err(|e| e.to_string())
    });
    let lead = Rank::load(&settings(), core(0), worlds.remove(0)).unwrap();
    Two { engine: Engine::start(lead).unwrap(), fuses, follower }
}

type Ended = Result<(Vec<u32>, Finish), EngineError>;

impl Two {
    fn run(&self, request: &Request) -> Ended {
        self.engine.submit(request.clone()).and_then(|handle| reply(&handle))
    }
}

/// Long enough for the choice of keys, of an odd length for stores, and cut by drafts.
fn victim() -> Request {
    request(5, 41, 6, Sampling::GREEDY)
}

fn bystander() -> Request {
    request(4, 20, 5, Sampling::GREEDY)
}

fn every_fault(deed: Deed, rank: usize) {
    let mut two = start();
    let want = (two.run(&victim()).unwrap(), two.run(&bystander()).unwrap());
    for (point, ranks, comes) in points() {
        if !ranks.contains(&rank) {
            continue;
        }
        let what = format!("{deed:?} at {point} on rank {rank}");
        let fired = two.fuses[rank].fired();
        two.fuses[rank].light(&point, deed);
        let began = Instant::now();
        let mut got = two.run(&victim());
        assert!(began.elapsed() < LONGEST, "{what}: took {:?}", began.elapsed());
        // Some points come after the reply, or when a request finds the engine idle: then the next request is told.
        while two.fuses[rank].fired() == fired && began.elapsed() < LONGEST {
            got = two.run(&victim());
        }
        if comes == TheEngine && deed != Deed::Delay && got.is_ok() {
            got = two.run(&victim());
        }
        assert!(!two.fuses[rank].put_out() && two.fuses[rank].fired() == fired + 1, "{what}: was not called");
        let comes = if deed == Deed::Delay { Nothing } else { comes };
        let planted = format!("planted at {point}");
        match comes {
            Nothing => assert_eq!(got.as_ref(), Ok(&want.0), "{what}"),
            ItsRequest => {
                let Err(EngineError::Failed(message)) = &got else { panic!("{what}: {got:?}") };
                assert!(message.contains(OWNER) && message.contains(&planted), "{what}: {message}");
                let by = format!("rank {rank}: ");
                // Planners are asked before a rank has anything to do with it.
                assert!(message.starts_with(&by) || point.starts_with("planner"), "{what}: {message}");
            }
            TheEngine => {
                let Err(EngineError::Unavailable(message)) = &got else { panic!("{what}: {got:?}") };
                assert!(message.contains(&planted) && message.contains(OWNER), "{what}: {message}");
                assert_eq!(two.engine.stats().fatal.as_ref(), Some(message), "{what}");
                drop(two.engine);
                let told = two.follower.join().unwrap().unwrap_err();
                assert!(
                    told.contains(&planted) && told.contains(OWNER),
                    "{what}: the follower ends with {told}"
                );
                assert!(began.elapsed() < LONGEST, "{what}: took {:?}", began.elapsed());
                two = start();
                continue;
            }
        }
        assert_eq!(two.engine.stats().fatal, None, "{what}");
        assert_eq!(two.run(&bystander()).as_ref(), Ok(&want.1), "the next request, {what}");
        assert_eq!(two.run(&victim()).as_ref(), Ok(&want.0), "the same request again, {what}");
    }
    let stats = two.engine.stats();
    assert_eq!((stats.decoding, stats.prefilling, stats.waiting), (0, 0, 0));
    drop(two.engine);
    two.follower.join().unwrap().unwrap();
}

#[test]
fn an_error_anywhere_on_rank_0_ends_alike() {
    every_fault(Deed::Error, 0);
}
#[test]
fn an_error_anywhere_on_rank_1_ends_alike() {
    every_fault(Deed::Error, 1);
}
#[test]
fn a_panic_anywhere_on_rank_0_ends_alike() {
    every_fault(Deed::Panic, 0);
}
#[test]
fn a_panic_anywhere_on_rank_1_ends_alike() {
    every_fault(Deed::Panic, 1);
}
#[test]
fn a_delay_anywhere_on_rank_0_changes_nothing() {
    every_fault(Deed::Delay, 0);
}
#[test]
fn a_delay_anywhere_on_rank_1_changes_nothing() {
    every_fault(Deed::Delay, 1);
}

/// The kinds of hooks that an engine calls while it serves are all among the points.
#[test]
fn no_kind_of_hook_is_left_out() {
    // Asked at the start only: what they do wrong refuses it.
    // A map of pages is asked by stores only, whose faults are among the points.
    let at_the_start = [
        "pass",
        "limits",
        "cache-layout",
        "transport",
        "weight-link",
        "weight-builder",
        "prepared-store",
        "command",
        "mapper",
    ];
    // Called by the HTTP side, request by request.
    let of_http = ["request", "prompt", "stream", "reply"];
    let fuse = Arc::default();
    let all = hooks(&fuse);
    let mine: std::collections::BTreeSet<&str> = all.list().into_iter().map(|(kind, _)| kind).collect();
    let null = plugfold::plugins::null::hooks().unwrap();
    for (kind, _) in null.list() {
        let known = mine.contains(kind) || at_the_start.contains(&kind) || of_http.contains(&kind);
        assert!(known, "no fault is planted at hooks of kind {kind}");
    }
}

/// A state part that cannot be taken over costs a prefill.
#[test]
fn a_part_that_does_not_load_is_prefilled_instead() {
    for rank in 0..RANKS {
        let two = start();
        let first = bystander();
        let (said, _) = two.run(&first).unwrap();
        let mut more = first.clone();
        more.ids.extend(&said);
        more.ids.push(7);
        assert_eq!(more.ids.len() % 2, 0, "the store has no offer for it");
        let fresh = start().run(&more).unwrap();
        two.fuses[rank].light("part.load", Deed::Error);
        assert_eq!(two.run(&more).unwrap(), fresh);
        assert_eq!(two.fuses[rank].fired(), 1, "the slot's state was resumed");
    }
}

/// A commit that fails on one rank ends its sequences on all; what the slot kept before it, and who comes next, are as if
/// it had never been.
#[test]
fn a_commit_that_fails_ends_its_sequences_and_leaves_nothing_behind() {
    let turn = || {
        let two = start();
        let (said, _) = two.run(&victim()).unwrap();
        (two, Request { ids: [victim().ids, said, vec![7]].concat(), ..victim() })
    };
    let (fresh, more) = turn();
    let want = fresh.run(&more).unwrap();
    for rank in 0..RANKS {
        for deed in [Deed::Error, Deed::Panic] {
            let (two, more) = turn();
            // A neighbour that shares the window ends with it, or has its whole reply: nothing in between.
            let neighbour = two.engine.submit(bystander()).unwrap();
            two.fuses[rank].light("kda.commit", deed);
            let told = two.run(&more);
            let beside = reply(&neighbour);
            let of_it = |told: &Ended| {
                let Err(EngineError::Failed(message)) = told else { return false };
                message.starts_with(&format!("rank {rank}: kda.commit of layer")) && message.contains(OWNER)
            };
            assert_eq!(two.fuses[rank].fired(), 1, "{deed:?} on rank {rank}");
            assert!(of_it(&told) || of_it(&beside), "{deed:?} on rank {rank}: {told:?}, {beside:?}");
            for ended in [&told, &beside] {
                assert!(ended.is_ok() || of_it(ended), "{deed:?} on rank {rank}: {ended:?}");
            }
            assert_eq!(two.engine.stats().fatal, None);
            // Once more in the same slots, from what was kept: the reply of a fresh engine, and no state of the failed commit.
            assert_eq!(two.run(&more).unwrap(), want, "{deed:?} on rank {rank}");
            assert_eq!(two.run(&bystander()).unwrap(), fresh.run(&bystander()).unwrap(), "{deed:?}");
        }
    }
}

//! A hook that does not return: it is named, and the engine ends, on whatever rank it is.

use std::sync::Arc;
use std::time::{Duration, Instant};

use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{EngineError, Sampling, Service};
use plugfold_tests::faulty::{Deed, Fuse, hooks};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{options, reply, request};

/// Long enough for every hook of a tiny model on a busy machine.
const LIMIT_MS: u64 = 3000;

fn hang(point: &str, kind: &str, rank: usize) {
    let fuses: Vec<Arc<Fuse>> = (0..2).map(|_| Arc::default()).collect();
    let named = || Some("faulty".to_owned());
    let options = Options {
        executor: named(),
        plan_wait: named(),
        hook_limit_ms: LIMIT_MS,
        ..options(&tiny_dir(), 2, 16)
    };
    let mut worlds = World::local(2).unwrap();
    let core = |rank: usize| CoreOptions { hooks: Arc::new(hooks(&fuses[rank])), ..CoreOptions::default() };
    let (theirs, world, settings) = (core(1), worlds.pop().unwrap(), options.clone());
    let (told, follower) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let hung = told.clone();
        let ran = Rank::load(&settings, theirs, world).map_err(|e| e.to_string()).and_then(|rank| {
            // The thread of a rank that hangs says nothing any more: the watchdog does.
            rank.follow_or(move |found| hung.send(found.to_string()).unwrap_or_default())
                .map_err(|e| e.to_string())
        });
        told.send(ran.err().unwrap_or_default()).unwrap_or_default();
    });
    let lead = Rank::load(&options, core(0), worlds.remove(0)).unwrap();
    let engine = Engine::start(lead).unwrap();
    let warm = request(1, 41, 3, Sampling::GREEDY);
    assert_eq!(reply(&engine.submit(warm.clone()).unwrap()).unwrap().0.len(), 3);
    let what = format!("{point} on rank {rank}");
    fuses[rank].light(point, Deed::Hang);
    let began = Instant::now();
    let (first, second) = (engine.submit(warm.clone()).unwrap(), engine.submit(warm.clone()).unwrap());
    let says = format!("plugin faulty: its hook of kind `{kind}` has not returned for ");
    for handle in [&first, &second] {
        let Err(EngineError::Unavailable(message)) = reply(handle) else { panic!("{what}: a reply") };
        assert!(message.contains(&says), "{what}: {message}");
    }
    let waited = began.elapsed();
    assert!(waited >= Duration::from_millis(LIMIT_MS), "{what}: {waited:?}");
    let fatal = engine.stats().fatal.unwrap();
    assert!(fatal.contains(&says), "{what}: /health says {fatal}");
    let refused = engine.submit(warm).err().unwrap();
    assert!(matches!(&refused, EngineError::Unavailable(m) if m.contains(&says)), "{what}: {refused:?}");
    let told = follower.recv().unwrap();
    assert!(told.contains(&says), "{what}: the follower ends with {told}");
    // Does not wait for a thread that never ends.
    drop(engine);
}

#[test]
fn a_hook_that_hangs_in_a_round_is_named_and_ends_the_engine() {
    hang("spans.spans", "spans", 0);
    hang("spans.spans", "spans", 1);
}
#[test]
fn a_hook_that_hangs_in_an_operation_is_named_and_ends_the_engine() {
    hang("moe.pick", "provider", 0);
    hang("moe.pick", "provider", 1);
}
#[test]
fn a_hook_that_hangs_in_an_exchange_is_named_and_ends_the_engine() {
    hang("comm.sum", "provider", 0);
    hang("comm.sum", "provider", 1);
}
#[test]
fn a_hook_that_hangs_in_an_executor_is_named_and_ends_the_engine() {
    hang("executor.run between", "executor", 1);
}
#[test]
fn a_hook_that_hangs_in_a_drafter_is_named_and_ends_the_engine() {
    hang("drafter.propose", "drafter", 0);
    hang("drafter.propose", "drafter", 1);
}
#[test]
fn a_hook_that_hangs_while_planning_is_named_and_ends_the_engine() {
    hang("planner.pieces", "planner", 0);
}
#[test]
fn a_hook_that_hangs_at_rest_is_named_and_ends_the_engine() {
    hang("plan-wait.follow", "plan-wait", 1);
}

#[test]
fn a_hook_that_takes_its_time_is_left_alone() {
    let fuse: Arc<Fuse> = Arc::default();
    let core = CoreOptions { hooks: Arc::new(hooks(&fuse)), ..CoreOptions::default() };
    let options = Options { hook_limit_ms: 60_000, ..options(&tiny_dir(), 1, 16) };
    let engine = Engine::start(Rank::load(&options, core, World::single()).unwrap()).unwrap();
    fuse.light("spans.spans", Deed::Delay);
    assert_eq!(reply(&engine.submit(request(1, 9, 3, Sampling::GREEDY)).unwrap()).unwrap().0.len(), 3);
    assert_eq!((fuse.fired(), engine.stats().fatal), (1, None));
}

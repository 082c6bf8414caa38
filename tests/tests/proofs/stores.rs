//! Stores and sections, thin: a store in memory (0110), beneath it what that pushes out (0250), whose index goes with every plan.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use plugfold_abi::points::{SectionObject, StoreObject};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{EngineError, Request, Sampling, Service};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::keeper::{Index, Keeper};
use plugfold_tests::model::{engine, options, plain, reply, reply_with_stats, request};

/// The two stores of each rank.
type Chains = Vec<(Arc<Keeper>, Arc<Keeper>)>;

fn chained(ranks: usize) -> (Engine, Chains) {
    let chain = |_| {
        let disk = Keeper::new("disk", 0, None);
        (Keeper::new("memory", 1, Some(disk.clone())), disk)
    };
    let chains: Chains = (0..ranks).map(chain).collect();
    let engine = engine(&options(&tiny_dir(), 1, 16), ranks, |rank| {
        let (memory, disk) = chains[rank].clone();
        let mut hooks = Hooks::default();
        hooks.add_object("0110", StoreObject::new(memory)).unwrap();
        hooks.add_object("0250", StoreObject::new(disk.clone())).unwrap();
        hooks.add_object("0250", SectionObject::new(Index(disk))).unwrap();
        CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
    });
    (engine, chains)
}

/// A prompt, and the same with a question behind it.
fn pair(seed: u64) -> (Request, Request) {
    let first = request(seed, 37, 4, Sampling::GREEDY);
    let mut second = first.clone();
    second.ids.extend([11, 12, 13, 14]);
    (first, second)
}

#[test]
fn what_one_store_pushes_out_the_next_resumes() {
    for ranks in [1, 2] {
        let fresh = engine(&options(&tiny_dir(), 1, 16), ranks, plain);
        let (a, a2) = pair(1);
        let (b, b2) = pair(2);
        let want: Vec<_> = [&a2, &b2].map(|r| reply(&fresh.submit(r.clone()).unwrap()).unwrap()).into();
        drop(fresh);
        let (engine, chains) = chained(ranks);
        for request in [&a, &b] {
            reply(&engine.submit(request.clone()).unwrap()).unwrap();
        }
        for (memory, disk) in &chains {
            assert_eq!((memory.lengths(), disk.lengths()), (vec![37], vec![37]), "a was pushed out by b");
        }
        for (request, want) in [(&a2, &want[0]), (&b2, &want[1])] {
            let (tokens, finish, stats) = reply_with_stats(&engine.submit(request.clone()).unwrap()).unwrap();
            assert_eq!((&tokens, &finish), (&want.0, &want.1), "{ranks} ranks");
            assert_eq!(stats.cached_tokens, 37);
        }
        for (_, disk) in &chains {
            assert_eq!(disk.resumed().first(), Some(&37), "the first came from beneath, on every rank");
        }
    }
}

#[test]
fn a_read_that_fails_on_one_rank_is_a_prefill_on_all() {
    let (a, a2) = pair(3);
    let want = reply(&engine(&options(&tiny_dir(), 1, 16), 2, plain).submit(a2.clone()).unwrap()).unwrap();
    for culprit in [0, 1] {
        let (engine, chains) = chained(2);
        reply(&engine.submit(a.clone()).unwrap()).unwrap();
        reply(&engine.submit(pair(4).0).unwrap()).unwrap();
        chains[culprit].1.fails.store(1, Ordering::SeqCst);
        let (tokens, finish, stats) = reply_with_stats(&engine.submit(a2.clone()).unwrap()).unwrap();
        assert_eq!((tokens, finish), want, "rank {culprit} fails");
        assert_eq!(stats.cached_tokens, 0);
        assert_eq!(engine.stats().fatal, None);
    }
}

#[test]
fn an_index_that_differs_ends_the_engine_with_its_name() {
    let (engine, chains) = chained(2);
    for seed in [5, 6] {
        reply(&engine.submit(pair(seed).0).unwrap()).unwrap();
    }
    chains[1].1.lose();
    let failed = reply(&engine.submit(pair(7).0).unwrap()).unwrap_err();
    let EngineError::Unavailable(told) = &failed else { panic!("{failed:?}") };
    assert!(told.contains("plugin 0250") && told.contains("the index of disk differs"), "{told}");
    assert!(told.contains("rank 1"), "{told}");
}

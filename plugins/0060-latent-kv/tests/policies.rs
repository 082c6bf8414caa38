//! Every draft policy under a cache of latents: none changes a reply, alone, in company, resumed, on two ranks.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::sync::Arc;

use plugfold_0060_latent_kv::layout::Rows;
use plugfold_0060_latent_kv::pass::Around;
use plugfold_0060_latent_kv::provide::{ALL, Latent};
use plugfold_abi::points::LayoutLinkObject;
use plugfold_abi::{PassObject, ProviderObject};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{EngineError, Request, Sampling, Service as _};
use plugfold_tests::drafting::Drafting;
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{engine, ids, options, reply, reply_with_stats};

const SAMPLED: Sampling = Sampling { temperature: 0.7, top_k: 20, top_p: 0.95, min_p: 0.0, seed: Some(11) };

/// One of every form that a checkpoint without a block drafter can have.
const POLICIES: [&str; 19] = [
    "auto",
    "auto:1:2:0.1",
    "0",
    "1",
    "2",
    "3",
    "4",
    "5",
    "6",
    "7",
    "a",
    "a:0.1:0.2",
    "c3:0.35",
    "c7:0.01",
    "l7",
    "l3:1",
    "o",
    "om",
    "om5",
];

fn with_latents(mut hooks: Hooks) -> CoreOptions {
    hooks.add_object("0060", LayoutLinkObject::new(Rows { host: None })).unwrap();
    hooks.add_object("0060", PassObject::new(Around)).unwrap();
    for op in ALL {
        hooks.add_object("0060", ProviderObject::new(Latent(op))).unwrap();
    }
    CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
}

fn latent(slots: usize, ranks: usize) -> Engine {
    engine(&options(&tiny_dir(), slots, 24), ranks, |_| with_latents(Drafting::default().hooks().unwrap()))
}

/// Prompts that repeat themselves, short, crossing the dense limit while decoding, past it; greedy and sampled.
fn cases() -> Vec<Request> {
    let prompt = |seed: u64, n: usize| -> Vec<u32> {
        let part = ids(seed, n.div_ceil(2), 480);
        part.iter().chain(&part).copied().take(n).collect()
    };
    [(1, 9), (2, 28), (3, 61)]
        .into_iter()
        .flat_map(|(seed, n)| [Sampling::GREEDY, SAMPLED].map(|s| (prompt(seed, n), s)))
        .map(|(ids, sampling)| Request { ids, sampling, max_tokens: 30, ..Request::default() })
        .collect()
}

#[test]
fn every_policy_equals_serial_in_company_on_one_rank_and_on_two() {
    let serial = latent(1, 1);
    let want: Vec<Vec<u32>> = cases()
        .into_iter()
        .map(|r| reply(&serial.submit(Request { draft: false, ..r }).unwrap()).unwrap().0)
        .collect();
    for ranks in [1, 2] {
        let drafted = latent(4, ranks);
        let mut running = Vec::new();
        for policy in POLICIES {
            for (i, case) in cases().into_iter().enumerate() {
                let asked = Request { policy: policy.into(), ..case };
                running.push((policy, i, drafted.submit(asked).unwrap()));
            }
        }
        for (policy, i, handle) in running {
            assert_eq!(reply(&handle).unwrap().0, want[i], "case {i} with policy {policy} on {ranks} ranks");
        }
        let stats = drafted.stats();
        assert!(stats.errors == 0 && stats.accepted > 0 && stats.drafted > stats.accepted, "{stats:?}");
    }
    for policy in ["f3", "fc5:0.3", "fa", "of"] {
        let told = serial.submit(Request { policy: policy.into(), ..cases()[0].clone() }).err();
        assert!(
            matches!(&told, Some(EngineError::Invalid(m)) if m.contains("dflash2")),
            "{policy}: {told:?}"
        );
    }
}

#[test]
fn a_resumed_turn_equals_a_fresh_one_with_its_drafts() {
    for policy in ["auto", "3", "c7:0.02", "l7", "o", "0"] {
        let (resumed, fresh) = (latent(1, 1), latent(1, 1));
        let first = Request { policy: policy.into(), ..cases()[4].clone() };
        let said = reply(&resumed.submit(first.clone()).unwrap()).unwrap().0;
        let turn = Request { ids: [&first.ids[..], &said, &ids(9, 7, 480)].concat(), ..first };
        let ask = |e: &Engine| reply_with_stats(&e.submit(turn.clone()).unwrap()).unwrap();
        let (a, b) = (ask(&resumed), ask(&fresh));
        assert_eq!((&a.0, &a.2.keeps, a.2.drafted), (&b.0, &b.2.keeps, b.2.drafted), "policy {policy}");
        assert!(a.2.cached_tokens > 61 && b.2.cached_tokens == 0, "policy {policy}: {}", a.2.cached_tokens);
    }
}

//! The acceptance list of 0060: against the goldens, through the gates, and what is refused.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::sync::Arc;
use std::thread;

use plugfold::exact::{GATES, Setup, Verdict, run};
use plugfold_0060_latent_kv::layout::Rows;
use plugfold_0060_latent_kv::pass::Around;
use plugfold_0060_latent_kv::provide::{ALL, Latent};
use plugfold_0060_latent_kv::{FAMILY, FORMAT};
use plugfold_abi::points::{LayoutLinkObject, Owner};
use plugfold_abi::{List, PassObject, Phase, ProviderObject, Shape};
use plugfold_engine::core::{Core, CoreOptions, MtpRows, Want};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::split::Split;
use plugfold_tests::goldens::{Goldens, fixtures, tiny_dir, within};
use plugfold_tests::model::{argmax, forward, ids, on_ranks_with, options, prefill};

fn hooks() -> Hooks {
    let mut hooks = Hooks::default();
    hooks.add_object("0060", LayoutLinkObject::new(Rows { host: None })).unwrap();
    hooks.add_object("0060", PassObject::new(Around)).unwrap();
    for op in ALL {
        hooks.add_object("0060", ProviderObject::new(Latent(op))).unwrap();
    }
    hooks
}

fn with(hooks: Hooks) -> CoreOptions {
    CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
}

fn core(hooks: Hooks, context: usize) -> Core {
    let options = CoreOptions { context: Some(context), ..with(hooks) };
    Core::load(&tiny_dir(), &options, Split::WHOLE, None).unwrap()
}

#[test]
fn logits_are_those_of_the_oracle_on_one_rank_and_on_two() {
    let goldens = Goldens::tiny();
    for ranks in [1, 2] {
        on_ranks_with(
            &options(&tiny_dir(), 1, 64),
            ranks,
            |_| with(hooks()),
            |rank| {
                for n in [1, 5, 64, 65, 200, 700] {
                    let ids = goldens.ids(&format!("text.{n}.input_ids"));
                    let got = rank.trace(&ids, false).unwrap();
                    let golden = goldens.f32(&format!("text.{n}.logits"));
                    within(&format!("text.{n} on {ranks} ranks"), &got.logits, &golden, 1e-4);
                }
            },
        );
    }
}

/// Heads that begin inside a panel of the matrix, latents that are no power of two.
#[test]
fn logits_of_models_of_other_shapes() {
    for (name, lengths) in [("odd", vec![3, 22, 90]), ("soft", vec![9, 60])] {
        let dir = fixtures().join(name);
        let goldens = Goldens::open(&dir.join("goldens.safetensors"));
        for ranks in [1, 2] {
            on_ranks_with(
                &options(&dir, 1, 16),
                ranks,
                |_| with(hooks()),
                |rank| {
                    for &n in &lengths {
                        let got = rank.trace(&goldens.ids(&format!("text.{n}.input_ids")), false).unwrap();
                        let golden = goldens.f32(&format!("text.{n}.logits"));
                        within(&format!("{name} text.{n} on {ranks} ranks"), &got.logits, &golden, 1e-4);
                    }
                },
            );
        }
    }
}

#[test]
fn the_draft_head_keeps_latents_too() {
    let goldens = Goldens::tiny();
    let mut core = core(hooks(), 1024);
    for n in [5, 65, 200] {
        let prompt = goldens.ids(&format!("greedy.{n}.input_ids"));
        core.begin(0);
        let f = forward(&mut core, Phase::Prefill, 0, &prompt, Want::Nothing);
        let hidden = core.output(&f, "rows").unwrap().to_vec();
        core.commit(&f, &[n]).unwrap();
        let next_ids = goldens.ids(&format!("mtp.{n}.next_ids"));
        let golden = goldens.f32(&format!("mtp.{n}.zero_first.logits"));
        let at = [MtpRows {
            slot: 0,
            start: 0,
            next_ids: &next_ids,
            hidden: &hidden,
            want: Want::All,
            embeds: &[],
        }];
        let f = core.mtp(&at, true, None).unwrap();
        assert_eq!(f.failure, None);
        let got = core.output(&f, "logits").unwrap();
        within(&format!("mtp.{n}"), &got[got.len() - golden.len()..], &golden, 1e-4);
    }
}

#[test]
fn greedy_continuations_are_those_of_the_oracle() {
    let goldens = Goldens::tiny();
    let mut core = core(hooks(), 1024);
    for n in [65, 700] {
        let mut row = prefill(&mut core, 0, &goldens.ids(&format!("greedy.{n}.input_ids")), 64);
        for (i, token) in goldens.ids(&format!("greedy.{n}.tokens")).into_iter().enumerate() {
            assert_eq!(argmax(&row), token, "greedy.{n} step {i}");
            let f = forward(&mut core, Phase::Window, 0, &[token], Want::Last);
            row = core.output(&f, "logits").unwrap().to_vec();
            core.commit(&f, &[1]).unwrap();
        }
    }
}

/// Drafted == serial, batched == alone, resumed == fresh, chunks, kept parts of windows, rows by themselves: windows of 1
/// to 8 rows below and above the dense limit.
#[test]
fn every_gate_holds() {
    for ranks in [1, 2] {
        let options = Options { context: Some(128), ..Options::new(tiny_dir()) };
        let setup = Setup::with_hooks(options, ranks, |_| Ok(hooks()));
        for gate in GATES {
            let verdict = run(gate, &setup);
            let fine = match &verdict {
                Verdict::Holds(count) => *count > 0,
                // Its arithmetic is its own: it promises no equal bits.
                Verdict::Nothing(_) => gate.name == "same-bits" || (gate.name == "ranks" && ranks == 1),
                Verdict::Broken(_) => false,
            };
            assert!(fine, "{} on {ranks} ranks: {verdict}", gate.name);
        }
    }
}

#[test]
fn prefill_in_chunks_of_64_and_512_leaves_the_same_state() {
    let prompt = ids(4, 700, 480);
    let mut core = core(hooks(), 1024);
    let logits = prefill(&mut core, 0, &prompt, 64);
    let want = core.image(0);
    assert_eq!(prefill(&mut core, 0, &prompt, 512), logits);
    assert!(core.image(0) == want, "another state");
}

#[test]
fn a_token_takes_a_latent_a_layer_and_the_index_is_as_before() {
    let (plain, latent) = (core(Hooks::default(), 256), core(hooks(), 256));
    let (rank, heads, key, value) = (64, 4, 32, 32);
    let mut owners = Vec::new();
    for (before, after) in plain.cache_table().families().iter().zip(latent.cache_table().families()) {
        assert_eq!((&before.id, before.owner, &before.layers), (&after.id, after.owner, &after.layers));
        if after.id.as_str() == FAMILY {
            owners.push(after.owner);
            assert_eq!(after.format.as_str(), FORMAT);
            assert_eq!((before.row_bytes, after.row_bytes), (4 * heads * (key + value), 4 * rank));
        } else {
            assert_eq!(before, after);
        }
    }
    assert_eq!(owners, [Owner::Model, Owner::Mtp]);
    assert!(latent.cache_table().slot_bytes() < plain.cache_table().slot_bytes());
}

#[test]
fn states_have_a_tag_of_their_own() {
    let (mut plain, mut latent) = (core(Hooks::default(), 256), core(hooks(), 256));
    let (before, after) = (plain.tag(&[]).unwrap(), latent.tag(&[]).unwrap());
    assert_ne!(before.id, after.id);
    assert_eq!((after.grid, after.window), (1, true), "windows compute what prefill does");
    let (names, _) = latent.bits(Phase::Prefill, 64, &[]).unwrap();
    for name in [
        "mla.write=latent-f32",
        "mla.absorb=latent-fma",
        "mla.dense=latent-tile16",
        "mla.sparse=latent-tile16",
        "mla.expand=latent-fma",
    ] {
        assert!(names.iter().any(|n| n == name), "{name} of {names:?}");
    }
}

#[test]
fn memory_between_calls_does_not_grow_with_the_context() {
    let total = |context| {
        let shape = Shape {
            kind: "forward".into(),
            phase: Phase::Prefill,
            rows: 512,
            seqs: 1,
            out_rows: 1,
            select: true,
            candidates: 0,
            words: List::new(),
            knobs: List::new(),
        };
        core(hooks(), context).program(&shape).unwrap().placement.total
    };
    assert_eq!(total(128), total(1024));
}

#[test]
fn ranks_with_different_settings_do_not_start() {
    let options = options(&tiny_dir(), 1, 64);
    let mut worlds = World::local(2).unwrap();
    let other = worlds.remove(1);
    let theirs = options.clone();
    let follower = thread::spawn(move || Rank::load(&theirs, CoreOptions::default(), other).err());
    let lead = Rank::load(&options, with(hooks()), worlds.remove(0)).err().map(|e| e.to_string());
    let follower = follower.join().unwrap().map(|e| e.to_string());
    for told in [lead.unwrap(), follower.unwrap()] {
        assert!(told.contains("cache mla.kv") || told.contains("hooks of kind"), "{told}");
    }
}

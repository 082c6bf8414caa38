//! The gates hold on the bare engine, and every planted fault is noticed by a gate that should.
#![allow(clippy::unwrap_used)]

use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::Options;

use super::plants::{PLANTS, Plant};
use super::{GATES, Setup, Silent, Verdict, run};

fn tiny(ranks: usize) -> Setup {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny");
    let options = Options { context: Some(128), ..Options::new(model) };
    Setup::bare(options, ranks)
}

#[test]
fn every_gate_holds_on_the_bare_engine() {
    for ranks in [1, 2] {
        for gate in GATES {
            let verdict = run(gate, &tiny(ranks));
            let fine = match &verdict {
                Verdict::Holds(count) => *count > 0,
                Verdict::Nothing(_) => gate.name == "same-bits" || (gate.name == "ranks" && ranks == 1),
                Verdict::Broken(_) => false,
            };
            assert!(fine, "{} on {ranks} ranks: {verdict}", gate.name);
        }
    }
}

#[test]
fn every_planted_fault_is_noticed_by_each_gate_that_should() {
    assert!(PLANTS.len() >= 12);
    let mut missed = Vec::new();
    for plant in PLANTS {
        let setup = Setup { plant: Some(plant), ..tiny(plant.ranks) };
        for name in plant.caught_by {
            let gate = GATES.iter().find(|g| g.name == *name).unwrap();
            let verdict = run(gate, &setup);
            if !matches!(verdict, Verdict::Broken(_)) {
                missed.push(format!("{} against {name}: {verdict}", plant.name));
            }
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
}

/// Ranks with a fault that stands for a plugin; without it they are bare.
fn with_plugin(fault: &'static str, ranks: usize) -> Setup {
    let plant = Plant::named(fault).unwrap();
    let with = move |rank: usize| {
        let mut hooks = Hooks::default();
        plant.put(&mut hooks, rank, ranks)?;
        Ok(hooks)
    };
    let bare = tiny(ranks);
    let (name, class) = ("9999-liar".to_owned(), "same-bits".to_owned());
    let silent = vec![Silent { name, class, without: bare.load.clone(), transport: false, executor: false }];
    Setup { silent, ..Setup::with_hooks(bare.options, ranks, with) }
}

#[test]
fn a_plugin_that_changes_what_it_promises_to_keep_is_named() {
    let gate = GATES.iter().find(|g| g.name == "same-bits").unwrap();
    for ranks in [1, 2] {
        for (fault, what) in [("other-rounding", ""), ("state-only", "of the state differs first at number")]
        {
            let Verdict::Broken(broken) = run(gate, &with_plugin(fault, ranks)) else {
                panic!("{fault} went unnoticed on {ranks} ranks")
            };
            let told = broken.to_string();
            assert!(
                told.contains("same-bits plugin 9999-liar on, not off: rank 0") && told.contains(what),
                "{told}"
            );
        }
    }
}

#[test]
fn only_a_comparison_with_the_plugin_off_finds_what_is_wrong_on_every_row_alike() {
    for gate in GATES.iter().filter(|g| g.name != "same-bits") {
        for fault in ["other-rounding", "state-only"] {
            let verdict = run(gate, &with_plugin(fault, 1));
            assert!(!matches!(verdict, Verdict::Broken(_)), "{fault}, {}: {verdict}", gate.name);
        }
    }
}

#[test]
fn a_plugin_that_keeps_its_promise_holds_on_every_rank() {
    let gate = GATES.iter().find(|g| g.name == "same-bits").unwrap();
    // A mark that is lost changes no bit where nobody asks for marks.
    let Verdict::Holds(n) = run(gate, &with_plugin("lost-mark", 2)) else { panic!("it broke") };
    assert!(n > 20, "{n}");
}

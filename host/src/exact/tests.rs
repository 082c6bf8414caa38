//! The gates hold on the bare engine, and every planted fault is noticed by a gate that should.
#![allow(clippy::unwrap_used)]

use plugfold_engine::rank::Options;

use super::plants::PLANTS;
use super::{GATES, Setup, Verdict, run};

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
                Verdict::Nothing(_) => gate.name == "ranks" && ranks == 1,
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

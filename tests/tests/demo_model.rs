//! The demo model that comes with the repository: the numbers of another implementation, and drafts that are worth
//! something.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use plugfold_tests::drafts::{Acceptance, Drafted, requests};
use plugfold_tests::goldens::{Goldens, within};
use plugfold_tests::model::{on_ranks, options};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn model() -> PathBuf {
    root().join("../host/assets/demo-model")
}

#[test]
fn logits_of_twenty_prompts() {
    let goldens = Goldens::open(&root().join("demo-model/goldens.safetensors"));
    for ranks in [1, 2] {
        on_ranks(&options(&model(), 1, 64), ranks, |rank| {
            for i in 0..20 {
                let ids = goldens.ids(&format!("prompt.{i}.input_ids"));
                let golden = goldens.f32(&format!("prompt.{i}.logits_last"));
                let got = rank.trace(&ids, false).unwrap().logits;
                within(
                    &format!("prompt {i} on {ranks} ranks"),
                    &got[got.len() - golden.len()..],
                    &golden,
                    1e-4,
                );
            }
        });
    }
}

#[test]
fn first_drafts_are_accepted() {
    let mut model = Drafted::load(&model(), 2048);
    for (skill, bar) in [("edit", 0.8), ("arithmetic", 0.6), ("tool", 0.6), ("json", 0.6)] {
        let mut sum = Acceptance::default();
        for request in requests(&root().join(format!("demo-model/eval/{skill}.jsonl")), 3) {
            let one = model.measure(&request, 200);
            sum.drafted += one.drafted;
            sum.accepted += one.accepted;
        }
        assert!(sum.drafted > 20 && sum.rate() >= bar, "{skill}: {sum:?}, the bar is {bar}");
    }
}

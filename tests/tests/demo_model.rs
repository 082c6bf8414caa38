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

/// The logarithm of the sum of all exponentials.
fn lse(row: &[f32]) -> f32 {
    let most = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    (most + row.iter().map(|v| (f64::from(*v) - most).exp()).sum::<f64>().ln()) as f32
}

/// Every logit of the last two positions; of every position the logit of the best token and the sum over all.
#[test]
fn logits_of_twenty_prompts() {
    let goldens = Goldens::open(&root().join("demo-model/goldens.safetensors"));
    for ranks in [1, 2] {
        on_ranks(&options(&model(), 1, 64), ranks, |rank| {
            for i in 0..20 {
                let what = format!("prompt {i} on {ranks} ranks");
                let golden = |name: &str| goldens.f32(&format!("prompt.{i}.{name}"));
                let ids = goldens.ids(&format!("prompt.{i}.input_ids"));
                let best = goldens.ids(&format!("prompt.{i}.best"));
                let got = rank.trace(&ids, false).unwrap().logits;
                let last = golden("logits_last");
                within(&format!("{what}, last"), &got[got.len() - last.len()..], &last, 1e-4);
                let rows: Vec<&[f32]> = got.chunks(got.len() / ids.len()).collect();
                let of_best: Vec<f32> = rows.iter().zip(&best).map(|(row, b)| row[*b as usize]).collect();
                let most: Vec<f32> =
                    rows.iter().map(|row| row.iter().copied().fold(f32::MIN, f32::max)).collect();
                let sums: Vec<f32> = rows.iter().map(|row| lse(row)).collect();
                within(&format!("{what}, best tokens"), &of_best, &golden("top"), 1e-4);
                within(&format!("{what}, largest logits"), &most, &golden("top"), 1e-4);
                within(&format!("{what}, sums"), &sums, &golden("lse"), 1e-4);
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

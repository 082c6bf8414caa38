//! Measures how often the demo model's draft head guesses right, per skill of its evaluation set.
//!
//!     cargo run --release -p plugfold-tests --bin demo-drafts -- [ITEMS A SKILL]

use std::path::Path;

use plugfold_tests::drafts::{Acceptance, Drafted, requests};

fn main() {
    let items = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(20);
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut model = Drafted::load(&root.join("../host/assets/demo-model"), 2048);
    let mut files: Vec<_> = std::fs::read_dir(root.join("demo-model/eval"))
        .into_iter()
        .flatten()
        .filter_map(|e| e.ok().map(|e| e.path()))
        .filter(|p| p.extension().is_some_and(|x| x == "jsonl"))
        .collect();
    files.sort();
    println!("| skill | first drafts | accepted | share |\n| --- | ---: | ---: | ---: |");
    for file in files {
        let mut sum = Acceptance::default();
        for request in requests(&file, items) {
            let one = model.measure(&request, 400);
            sum.drafted += one.drafted;
            sum.accepted += one.accepted;
        }
        let skill = file.file_stem().unwrap_or_default().to_string_lossy();
        println!("| {skill} | {} | {} | {:.3} |", sum.drafted, sum.accepted, sum.rate());
    }
}

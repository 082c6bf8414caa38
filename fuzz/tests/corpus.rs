//! Every target over its stored corpus and over a fixed number of mutations of it. What a fuzzer found goes into the corpus.
#![allow(clippy::unwrap_used)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use plugfold_fuzz::mutate::Mutations;
use plugfold_fuzz::{TARGETS, Target};

fn corpus(target: &Target) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name);
    let mut files: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() >= 4, "{} has a corpus", target.name);
    files.iter().map(|file| std::fs::read(file).unwrap()).collect()
}

fn check(name: &str, mutations: usize) {
    let target = TARGETS.iter().find(|target| target.name == name).unwrap();
    let corpus = corpus(target);
    let run = |input: &[u8]| {
        let held = catch_unwind(AssertUnwindSafe(|| (target.run)(input)));
        let told =
            || format!("{name} fails on {:?}: b\"{}\"", String::from_utf8_lossy(input), input.escape_ascii());
        held.unwrap_or_else(|_| panic!("{}", told()))
    };
    // Most of what a fuzzer keeps is refused early, in its own way: mutations start from what is not.
    let seeds: Vec<Vec<u8>> = corpus.into_iter().filter(|input| run(input)).collect();
    let deep = Mutations::new(&seeds, target.words, 7).take(mutations).filter(|input| run(input)).count();
    // Inputs that all end at the first check would show nothing.
    assert!(deep * 100 > mutations, "{name}: only {deep} of {mutations} inputs came past the first checks");
}

#[test]
fn requests() {
    check("request", 20_000);
}

#[test]
fn tool_calls_in_any_chunking() {
    check("tool_calls", 8_000);
}

#[test]
fn chat_rendering() {
    check("chat", 1_500);
}

#[test]
fn knobs_and_manifests() {
    check("knobs", 20_000);
}

#[test]
fn schemas_and_grammars() {
    check("schema", 20_000);
}

#[test]
fn streams() {
    check("sse", 200);
}

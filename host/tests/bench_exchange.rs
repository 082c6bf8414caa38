//! `plugfold bench exchange` works over the built-in transport, and a transport that needs a GPU is refused without one.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Output};

fn bench(more: &[&str]) -> Output {
    let cache = tempfile::tempdir().unwrap();
    Command::new(env!("CARGO_BIN_EXE_plugfold"))
        .args(["bench", "exchange"])
        .args(more)
        .env("PLUGFOLD_CACHE_DIR", cache.path())
        .output()
        .unwrap()
}

fn told(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[test]
fn ranks_exchange_what_they_are_told() {
    for ranks in ["1", "3"] {
        let output = bench(&["--bytes", "64,4096", "--turns", "3", "--ranks", ranks]);
        let (out, err) = told(&output);
        assert!(output.status.success(), "{err}");
        assert!(out.contains(&format!("{ranks} ranks, transport built in, cpu")), "{out}");
        assert_eq!(out.lines().filter(|l| l.contains("memory of the host")).count(), 2, "{out}");
    }
}

#[test]
fn sizes_and_names_that_cannot_be_are_refused() {
    for (more, words) in [
        (&["--bytes", "6"][..], "multiples of 4"),
        (&["--turns", "0"], "at least once"),
        (&["--set", "transport=nccl"], "nccl"),
    ] {
        let output = bench(more);
        let (_, err) = told(&output);
        assert!(!output.status.success() && err.contains(words), "{err}");
    }
}

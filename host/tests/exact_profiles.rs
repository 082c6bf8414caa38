//! The promises hold for every profile that ships, on one rank and on two, on the tiny model.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::process::Command;

use plugins::ROOT;

fn exact(profile: &str, ranks: usize) {
    plugins::built();
    let cache = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_plugfold"))
        .args(["exact", "--profile", profile, "--model", "tests/fixtures/tiny", "--threads", "1"])
        .args(["--ranks", &ranks.to_string()])
        .env("PLUGFOLD_CACHE_DIR", cache.path())
        .current_dir(ROOT)
        .output()
        .unwrap();
    let (told, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{profile} on {ranks} ranks: {told}\n{errors}");
    // Every gate compared something, except that one rank agrees with itself, and that no plugin is none to turn off.
    let idle: Vec<&str> = told.lines().filter(|l| !l.contains("holds (")).collect();
    for line in &idle {
        let fine = (line.starts_with("ranks ") && ranks == 1)
            || (line.starts_with("same-bits ") && profile == "minimal");
        assert!(fine && line.contains("nothing to compare"), "{told}");
    }
    assert_eq!(told.lines().count(), plugfold::exact::GATES.len(), "{told}");
}

macro_rules! profiles {
    ($($test:ident: $profile:literal on $ranks:literal,)*) => {
        $(#[test] fn $test() { exact($profile, $ranks); })*
    };
}

profiles! {
    quickstart: "quickstart" on 1,
    quickstart_on_two_ranks: "quickstart" on 2,
    minimal: "minimal" on 1,
    minimal_on_two_ranks: "minimal" on 2,
    single_stream: "single-stream" on 1,
    single_stream_on_two_ranks: "single-stream" on 2,
    batch_4x256k: "batch-4x256k" on 1,
    batch_4x256k_on_two_ranks: "batch-4x256k" on 2,
    prod: "prod" on 1,
    prod_on_two_ranks: "prod" on 2,
}

#[test]
fn more_ranks_than_the_model_has_parts_are_refused_once() {
    plugins::built();
    let cache = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_plugfold"))
        .args(["exact", "--profile", "quickstart", "--model", "tests/fixtures/tiny", "--ranks", "60"])
        .env("PLUGFOLD_CACHE_DIR", cache.path())
        .current_dir(ROOT)
        .output()
        .unwrap();
    let (told, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(!output.status.success() && told.is_empty(), "no gate ran: {told}");
    assert_eq!(errors.matches("60 ranks are too many for this model").count(), 1, "{errors}");
    assert!(errors.contains("use 1 to "), "{errors}");
}

//! The promises hold on a checkpoint with experts in EXL3, plain and with 0001 and 0470 in each mode, on one rank and on two; and
//! weights that were prepared are what the next start reads.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::path::Path;
use std::process::{Command, Output};

use plugins::ROOT;

fn plugfold(cache: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_plugfold"))
        .args(arguments)
        .env("PLUGFOLD_CACHE_DIR", cache)
        .current_dir(ROOT)
        .output()
        .unwrap()
}

fn text(output: &Output) -> String {
    let (told, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    format!("{told}\n{errors}")
}

/// The tiny model's first four layers and its draft head, experts in 4 bits of EXL3, the rest in bf16.
fn checkpoint(out: &Path) -> String {
    let out = out.to_str().unwrap();
    let rates = ["--bits", "16", "--expert-bits", "4", "--head-bits", "16"];
    let like = ["make-synthetic", "--like", "tests/fixtures/tiny", "--layers", "4", "--out", out];
    let made = plugfold(Path::new(out), &[&like[..], &rates].concat());
    assert!(made.status.success(), "{}", text(&made));
    out.to_owned()
}

fn exact(ranks: &str, more: &[&str]) {
    plugins::built();
    let (model, cache) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let dir = checkpoint(&model.path().join("model"));
    let line = ["exact", "--profile", "minimal", "--model", &dir, "--threads", "1", "--ranks", ranks];
    let output = plugfold(cache.path(), &[&line[..], more].concat());
    assert!(output.status.success(), "{more:?} on {ranks} ranks: {}", text(&output));
    // Whether a plugin promises equal bits depends on the list.
    let held = text(&output).lines().filter(|l| l.contains("holds (") && !l.starts_with("same-bits")).count();
    assert_eq!(held, if ranks == "1" { 7 } else { 8 }, "{}", text(&output));
}

macro_rules! modes {
    ($($test:ident: $more:expr, on $ranks:literal;)*) => {
        $(#[test] fn $test() { exact($ranks, $more); })*
    };
}

const DRAFTING: [&str; 4] = ["--plugin", "base-mtp", "--plugin", "base-auto"];
const Q4: &[&str] = &["--plugin", "0001", "--set", "0001.nonexpert=q4"];
const Q4MSE: &[&str] =
    &["--plugin", "0001", "--set", "0001.nonexpert=q4mse", "--plugin", "base-mtp", "--plugin", "base-auto"];
const LATENT: &[&str] =
    &["--plugin", "0001", "--set", "0001.nonexpert=q4", "--plugin", "0060", "--set", "0060.latent_kv=1"];
/// The tiny model has matrices whose inputs are no multiple of 64.
const MAP: &[&str] = &[
    "--plugin",
    "0001",
    "--plugin",
    "0140",
    "--plugin",
    "0470",
    "--set",
    "0001.nonexpert=q8",
    "--set",
    "0470.map=kda_fb=bf16,kda_gb=bf16,dsa_qb=bf16,idx_qb=bf16",
];

modes! {
    plain: &DRAFTING, on "1";
    plain_on_two_ranks: &[], on "2";
    bf16_with_a_head_of_4_bits_for_drafting: &["--plugin", "0001", "--plugin", "base-mtp", "--plugin", "base-auto"], on "1";
    q4: Q4, on "1";
    q4_on_two_ranks: Q4, on "2";
    q4mse: Q4MSE, on "1";
    q4mse_on_two_ranks: Q4MSE, on "2";
    q4_with_latents_on_two_ranks: LATENT, on "2";
    q8_on_two_ranks: MAP, on "2";
}

/// Every way to store what is not an expert, the copy of the head for drafting among them.
#[test]
fn a_start_reads_what_prepare_wrote_in_every_mode() {
    let q8 = ["--plugin", "0470", "--set", MAP[MAP.len() - 1]];
    for (mode, more) in [("bf16", &[][..]), ("q4", &[]), ("q4mse", &[]), ("q8", &q8)] {
        start_reads_what_prepare_wrote(mode, more);
    }
}

fn start_reads_what_prepare_wrote(mode: &str, more: &[&str]) {
    plugins::built();
    let place = tempfile::tempdir().unwrap();
    let (dir, cache) = (checkpoint(&place.path().join("model")), place.path().join("cache"));
    let root = format!("0140.dir={}", place.path().join("prepared").display());
    let with =
        ["--profile", "minimal", "--model", &dir, "--ranks", "2", "--plugin", "0001", "--plugin", "0140"];
    let mode = format!("0001.nonexpert={mode}");
    let sets = [&["--set", &root, "--set", &mode][..], more].concat();
    let run = |command: &[&str], more: &[&str]| plugfold(&cache, &[command, &with[..], &sets, more].concat());
    let generate =
        || run(&["generate", "--ids", "1,2,3,4,5", "--max-tokens", "12", "--json"], &["--log", "info"]);
    let ids = |output: &Output| {
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        let json: serde_json::Value =
            serde_json::from_str(told.lines().last().unwrap_or_default()).unwrap_or_default();
        json["ids"].clone()
    };
    let before = generate();
    assert!(before.status.success() && text(&before).contains("no prepared weights in"), "{}", text(&before));
    let prepared = run(&["prepare"], &[]);
    assert!(prepared.status.success() && text(&prepared).contains("wrote "), "{}", text(&prepared));
    let status = run(&["prepared", "status"], &[]);
    assert_eq!(text(&status).matches(" GB, key ").count(), 2, "a folder a rank: {}", text(&status));
    assert!(run(&["prepared", "verify"], &[]).status.success());
    let after = generate();
    assert!(text(&after).contains("weights, prepared") && ids(&before).is_array(), "{}", text(&after));
    assert_eq!(ids(&after), ids(&before));
    let unknown = run(&["prepared", "nothing"], &[]);
    assert!(!unknown.status.success() && text(&unknown).contains("prepared status"), "{}", text(&unknown));
    let off = plugfold(&cache, &[&["prepared", "status"][..], &with].concat());
    assert!(!off.status.success() && text(&off).contains("0140.dir"), "{}", text(&off));
}

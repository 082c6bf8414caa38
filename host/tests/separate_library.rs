//! A plugin at many points at once in a library of its own: a fusion, a pass, a store, its section, a part, an observer. It is
//! loaded as every plugin is, keeps the engine's promises, and what it is made to do wrong is noticed.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::process::Output;

use plugins::{Place, built, file_name, tiny};
use serde_json::json;

const PROOF: &str = "9901-proof";

/// The library lies beside the program, as all of the workspace do.
fn place() -> Place {
    assert!(built().join(file_name(PROOF)).exists());
    Place::new()
}

/// `exact` with the proof and a drafter, so that windows are cut and drafts kept.
fn exact(place: &Place, ranks: usize, more: &[&str]) -> (String, Output) {
    let profile = place.profile(&["base-mtp", "base-auto", PROOF]);
    let ranks = ranks.to_string();
    let mut command = place.plugfold(&["exact", "--profile", profile.to_str().unwrap(), "--ranks", &ranks]);
    let output = command.args(["--threads", "1"]).args(more).output().unwrap();
    let told =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (told, output)
}

#[test]
fn it_keeps_every_promise_on_one_rank_and_on_two() {
    let place = place();
    for ranks in [1, 2] {
        let (told, output) = exact(&place, ranks, &[]);
        assert!(output.status.success(), "{ranks} ranks: {told}");
        assert_eq!(told.matches("holds (").count(), if ranks == 1 { 8 } else { 9 }, "{ranks} ranks: {told}");
        assert!(told.lines().any(|l| l.starts_with("same-bits ") && l.contains("holds (")), "{told}");
    }
}

#[test]
fn what_is_in_force_is_what_the_resolver_prints() {
    let place = place();
    let profile = place.profile(&[PROOF]);
    let output =
        place.plugfold(&["plugins", "resolve", "--profile", profile.to_str().unwrap()]).output().unwrap();
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    // Its pass cuts chunks of prompts into pieces, where the operations do not follow one another: there is no fusion.
    let (fused, prefill) = told.split_once("prefill:").unwrap_or_else(|| panic!("{told}"));
    assert!(!prefill.contains("fused"), "{told}");
    for op in ["moe.logits", "moe.pick", "moe.group"] {
        let lines: Vec<&str> = fused.lines().filter(|l| l.trim_start().starts_with(op)).collect();
        assert!(
            !lines.is_empty() && lines.iter().all(|l| l.contains("9901") && l.contains("ref")),
            "{op}: {told}"
        );
    }
    assert!(told.contains("pieces"), "its pass is listed: {told}");
}

#[test]
fn a_fusion_that_is_wrong_on_every_row_is_noticed_by_turning_it_off() {
    let place = place();
    let (told, output) = exact(&place, 1, &["--set", "9901.fault=wrong"]);
    assert!(!output.status.success(), "{told}");
    let mut broken = told.lines().filter(|l| l.contains("BROKEN"));
    assert!(broken.any(|l| l.starts_with("same-bits ") && l.contains(PROOF)), "{told}");
}

#[test]
fn an_index_that_differs_between_ranks_ends_the_engine_by_name() {
    let place = place();
    let output =
        place.generate(&[PROOF], "", &["--model", &tiny(), "--ranks", "2", "--set", "9901.fault=drifts"]);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{told}");
    assert!(told.contains("plugin 9901: round ") && told.contains("index differs from rank 0's"), "{told}");
}

/// One counter of the plugin; 0 where it was never counted.
fn counted(metrics: &str, name: &str) -> f64 {
    let family = format!("plugfold_plugin_{name}_total{{");
    let line = metrics.lines().find(|l| l.starts_with(&family));
    line.and_then(|l| l.rsplit(' ').next()).map_or(0.0, |value| value.parse().unwrap())
}

#[test]
fn its_store_resumes_with_its_part_and_every_thread_is_announced_to_it() {
    let place = place();
    for (fault, resumes) in [("none", true), ("forgets", false)] {
        let served = place.serve(&[PROOF], "", &["--set", &format!("9901.fault={fault}"), "--slots", "1"]);
        let ask = |prompt: &str| {
            let body = json!({"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": true});
            let (status, reply) = served.post("/v1/completions", &body);
            assert_eq!(status, 200, "{reply}");
            reply
        };
        let first = "Plugfold keeps states of its conversations. Tell me about them, please: ";
        // The second prompt takes the slot's own states away: the third is resumed from the store or not at all.
        ask(first);
        ask("Something else altogether, which shares nothing with what was said before it.");
        let third = ask(&format!("{first}what are they?"));
        let cached = third["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0);
        assert_eq!(cached > 0, resumes, "{fault}: {third}");
        let metrics = served.get("/metrics");
        for role in ["http", "round", "worker"] {
            let name = format!("proof_threads_{role}");
            assert!(counted(&metrics, &name) >= 1.0, "{fault}: {name} in {metrics}");
        }
        // A thread for each reply as well.
        assert!(counted(&metrics, "proof_threads_http") >= 4.0, "{metrics}");
        assert!(counted(&metrics, "proof_records_loaded") >= 1.0, "{fault}: {metrics}");
        assert!(counted(&metrics, "proof_mismatches") < 1.0, "{fault}: {metrics}");
    }
}

#[test]
fn the_tiny_model_says_the_same_with_it_and_without_it() {
    let place = place();
    let said = |plugins: &[&str]| {
        let output = place.generate(plugins, "", &["--model", &tiny()]);
        assert!(output.status.success(), "{output:?}");
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        told["ids"].clone()
    };
    let bare = said(&[]);
    assert!(bare.as_array().is_some_and(|ids| ids.len() == 4), "{bare}");
    assert_eq!(said(&[PROOF]), bare);
}

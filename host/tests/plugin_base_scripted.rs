//! Plugin base-scripted as users load it: what the file says comes out of the server, byte for byte, in company and with faults;
//! a rank that a script aborts is told at the next start.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::path::PathBuf;
use std::thread;

use plugins::{Place, ROOT};
use serde_json::{Value, json};

const SCRIPTED: &str = "base-scripted";

/// Writes a file of scripts; `head` comes before them.
fn file(place: &Place, head: &str, scripts: &str) -> PathBuf {
    let path = place.path("scripts.toml");
    std::fs::write(&path, format!("{head}\n{scripts}")).unwrap();
    path
}

/// The demo model's tokens.
fn demo() -> String {
    format!("end = \"<|endoftext|>\"\ntokenizer = \"{ROOT}/host/assets/demo-model/tokenizer.json\"")
}

fn set(file: &std::path::Path) -> String {
    format!("{SCRIPTED}.file={}", file.display())
}

#[test]
fn what_a_file_says_is_served_to_each_in_company() {
    let place = Place::new();
    let script = |i: usize| {
        let (times, chunk) = (1 + i % 3, 1 + i % 8);
        format!(
            "[[script]]\nwhen = \"#{i}.\"\nsteps = [{{ text = \"{i}: naïve 你好 🙂; \", times = {times}, chunk = {chunk} }}]\n"
        )
    };
    let bad = "[[script]]\nwhen = \"bad\"\nsteps = [{ text = \"so \" }, { fault = \"panic\", rank = 1 }]\n";
    let scripts: String = (0..24).map(script).chain([bad.into()]).collect();
    let file = file(&place, &demo(), &scripts);
    let served = place.serve(&[SCRIPTED], "", &["--set", &set(&file), "--ranks", "2", "--slots", "8"]);
    let ask = |prompt: &str, temperature: f64| {
        let body = json!({"prompt": prompt, "max_tokens": 200, "temperature": temperature});
        served.post("/v1/completions", &body)
    };
    thread::scope(|scope| {
        let all: Vec<_> =
            (0..24).map(|i| scope.spawn(move || ask(&format!("please, #{i}."), f64::from(i % 3)))).collect();
        let failed = scope.spawn(|| ask("a bad one", 0.0));
        for (i, one) in all.into_iter().enumerate() {
            let (status, told) = one.join().unwrap();
            let want = format!("{i}: naïve 你好 🙂; ").repeat(1 + i % 3);
            assert_eq!((status, &told["choices"][0]["text"]), (200, &Value::from(want)), "{told}");
            assert_eq!(told["choices"][0]["finish_reason"], "stop", "{told}");
        }
        let (status, told) = failed.join().unwrap();
        let message = told["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 500 && message.contains("the script says that this panics"), "{status}: {told}");
    });
    let (status, told) = ask("nobody knows this", 0.0);
    assert!(status >= 400 && told.to_string().contains("no script is for this prompt"), "{status}: {told}");
    assert_eq!(ask("again #3.", 0.0).0, 200);
}

#[test]
fn without_a_file_it_is_off_and_a_bad_one_refuses_the_start() {
    let place = Place::new();
    let bare = place.generate(&[], "", &[]);
    let off = place.generate(&[SCRIPTED], "", &[]);
    let ids = |output: &std::process::Output| {
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["ids"].clone()
    };
    assert!(off.status.success() && ids(&off) == ids(&bare), "{off:?}");
    let bad = file(&place, "end = 1", "[[script]]\nsteps = [{ text = \"a\", chunk = 9 }, { chunk = 2 }]");
    for (file, words) in [
        (bad.display().to_string(), "script 1, step 2: give it one of text, bytes, ids or fault"),
        ("/nowhere.toml".into(), "/nowhere.toml"),
    ] {
        let output = place.generate(&[SCRIPTED], "", &["--set", &format!("{SCRIPTED}.file={file}")]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && told.contains(words) && told.contains(SCRIPTED), "{told}");
    }
}

#[test]
fn a_rank_that_crashes_is_told_by_its_number_at_the_next_start() {
    let place = Place::new();
    let scripts = "[[script]]\nsteps = [{ ids = [5, 6] }, { fault = \"abort\", rank = 1 }]";
    let crash = file(&place, "end = 9", scripts);
    let ranks = ["--ranks", "2"];
    let run = |more: &[&str]| place.generate(&[SCRIPTED], "", &[&ranks[..], more].concat());
    let crashed = run(&["--set", &set(&crash)]);
    let told = String::from_utf8_lossy(&crashed.stderr);
    assert!(!crashed.status.success() && told.contains("rank 1"), "{told}");
    let next = run(&[]);
    let told = String::from_utf8_lossy(&next.stderr);
    assert!(next.status.success(), "{told}");
    for word in ["(rank 1 of 2)", "ended without a word", SCRIPTED, "--safe-mode"] {
        assert!(told.contains(word), "no {word:?} in {told}");
    }
    assert!(!told.contains("rank 0 of 2"), "rank 0 has said why it ended: {told}");
    let after = run(&[]);
    assert!(!String::from_utf8_lossy(&after.stderr).contains("without a word"), "told once");
}

//! Knobs that a plugin parses itself: at the start, in every request, and in what replies show.
#![allow(clippy::unwrap_used)]

mod plugins;

use plugins::{HOSTILE, Place};
use serde_json::{Value, json};

#[test]
fn a_text_that_its_plugin_does_not_take_refuses_the_start() {
    let place = Place::new();
    for (text, why) in [
        ("mad", "its knob mood is \"mad\"; it must be calm or odd:N: hostile: no mood of mine"),
        ("odd:256", "its knob mood is \"odd:256\""),
        ("panic", "hostile: a panic at parse"),
    ] {
        let output = place.generate(&[HOSTILE], "", &["--set", &format!("9900.mood={text}")]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{text}: {told}");
        for part in ["plugin 9900-hostile (", "profile.toml:3)", why] {
            assert!(told.contains(part), "{text}: no {part:?} in {told}");
        }
    }
}

#[test]
fn requests_have_them_parsed_vetoed_and_shown() {
    let place = Place::new();
    let served = place.serve(&[HOSTILE], "", &["--set", "9900.mood= ODD:03 "]);
    let ask = |knobs: Value| {
        let body = json!({"prompt": "abc", "max_tokens": 2, "temperature": 0, "tf_knobs": knobs});
        let (status, reply) = served.post("/v1/completions", &body);
        let told = reply["error"]["message"].as_str().unwrap_or_default().to_owned();
        (status, reply["tensorfold"]["tf_knobs"]["hostile_mood"].clone(), told)
    };
    assert_eq!(ask(json!({})), (200, json!("odd:3"), String::new()));
    assert_eq!(ask(json!({"hostile_mood": "Calm"})), (200, json!("calm"), String::new()));
    assert_eq!(ask(json!({"hostile_mood": "odd:004"})), (200, json!("odd:4"), String::new()));
    for (text, status, told) in [
        (
            "mad",
            400,
            "tf_knobs key \"hostile_mood\" is \"mad\"; it must be calm or odd:N: hostile: no mood of mine",
        ),
        ("Odd:9", 400, "tf_knobs key \"hostile_mood\" cannot be \"Odd:9\": hostile: nine is too odd"),
        ("panic", 500, "plugin 9900: panicked in plugin.parse: hostile: a panic at parse"),
        ("odd:13", 500, "plugin 9900: panicked in plugin.veto: hostile: a panic at veto"),
    ] {
        let (had, _, message) = ask(json!({"hostile_mood": text}));
        assert!(had == status && message.contains(told), "{text}: {had} {message}");
        assert_eq!(served.complete().0, 200, "{text}: the next request");
    }
}

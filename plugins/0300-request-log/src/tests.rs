//! The plugin as the engine uses it.
#![allow(clippy::unwrap_used)]

use super::*;
use plugfold_abi::{Knob, KnobValue, Maybe};
use serde_json::Value;

const KEYS: &[&str] = &[
    "ts",
    "start",
    "n",
    "kind",
    "prompt",
    "cached",
    "cache_src",
    "prefill_s",
    "prefill_tps",
    "queue_s",
    "first_s",
    "decode_tokens",
    "decode_s",
    "decode_tps",
    "tokens_per_round",
    "rounds",
    "pieces",
    "slot",
    "kv_pages",
    "kv_free",
    "marks",
    "thinking",
    "effort",
    "effort_asked",
    "max_tokens",
    "max_tokens_eff",
    "finish",
    "error",
    "tools",
    "messages",
    "policy",
    "fast_prefill",
    "head_hash",
    "head_len",
    "sys_len",
    "sys_hash",
    "conv",
    "lcp",
    "lcp_same",
    "lcp_other",
];

fn knobs(file: &str, salt: &str) -> Vec<Knob> {
    let knob = |key: &str, value| Knob { key: key.into(), value, id: Maybe::RNone };
    vec![
        knob("file", KnobValue::text(file)),
        knob("max_mb", KnobValue::float(64.0)),
        knob("keep", KnobValue::Int(3)),
        knob("prompts", KnobValue::Int(8)),
        knob("salt", KnobValue::text(salt)),
    ]
}

fn log(knobs: &[Knob], lead: bool) -> Result<Log, OpError> {
    Log::new(&Knobs { all: Slice::from(knobs) }, None, lead)
}

fn end(log: &Log, request: u64, reason: &str, cached: usize, ids: &[u32]) {
    let facts = serde_json::json!({
        "front": {"kind": "chat", "messages": 2, "tools": 0},
        "engine": {"cached_tokens": cached, "prefill_s": 0.5, "decode_s": 0.25, "queued_s": 0.1, "rounds": 2, "pieces": 1,
                   "slot": 0, "max_tokens": 9, "policy": "auto"},
    });
    let facts = facts.to_string();
    let ended = Ended {
        request,
        reason: Text::from(reason),
        facts: Text::from(facts.as_str()),
        ids: Slice::from(ids),
        reply: Slice::from(&[7, 8, 9][..]),
    };
    assert!(log.request(&ended).unwrap().is_empty());
}

fn lines(path: &std::path::Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

#[test]
fn a_line_has_every_key_and_says_how_the_request_went() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log.jsonl");
    let log = log(&knobs(path.to_str().unwrap(), "none"), true).unwrap();
    assert_eq!(log.interests().unwrap(), interest::REQUEST);
    for (n, reason, cached) in [(1, "stop", 0), (2, "length", 3), (3, "cancelled", 0), (4, "error", 0)] {
        log.arrived(n, Slice::from(&[1, 2, 3, 4][..])).unwrap();
        end(&log, n, reason, cached, &[1, 2, 3, 4]);
    }
    let lines = lines(&path);
    for line in &lines {
        let keys: Vec<&str> = line.as_object().unwrap().keys().map(String::as_str).collect();
        let (mut have, mut want) = (keys.clone(), KEYS.to_vec());
        have.sort_unstable();
        want.sort_unstable();
        assert_eq!(have, want);
    }
    let finish: Vec<&str> = lines.iter().map(|l| l["finish"].as_str().unwrap()).collect();
    assert_eq!(finish, ["stop", "length", "cancelled", "error"]);
    assert_eq!((&lines[0]["cache_src"], &lines[1]["cache_src"]), (&"none".into(), &"slot".into()));
    assert_eq!((&lines[0]["lcp"], &lines[1]["lcp_same"]), (&Value::Null, &4.into()));
    assert_eq!(lines[0]["prefill_tps"], 8.0);
    assert_eq!(lines[0]["decode_tps"], 8.0);
    assert_eq!(lines[0]["error"], Value::Null);
}

#[test]
fn a_salt_changes_hashes_and_too_long_a_one_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let hash = |salt: &str| {
        let path = dir.path().join(format!("{}.jsonl", salt.len()));
        let log = log(&knobs(path.to_str().unwrap(), salt), true).unwrap();
        end(&log, 1, "stop", 0, &[1, 2, 3]);
        lines(&path)[0]["head_hash"].clone()
    };
    assert_ne!(hash("none"), hash("pepper"));
    let told = log(&knobs("x", &"s".repeat(65)), true).err().unwrap().to_string();
    assert!(told.contains("65 bytes"), "{told}");
}

#[test]
fn off_or_elsewhere_nothing_is_asked_for_and_nothing_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log.jsonl");
    for (file, lead) in [("off", true), ("0", true), (path.to_str().unwrap(), false)] {
        let log = log(&knobs(file, "none"), lead).unwrap();
        assert_eq!(log.interests().unwrap(), 0);
        end(&log, 1, "stop", 0, &[1]);
    }
    assert!(!path.exists());
}

#[test]
fn a_file_that_cannot_be_written_fails_no_request() {
    let log = log(&knobs("/proc/no/such/place.jsonl", "none"), true).unwrap();
    for n in 1..4 {
        end(&log, n, "stop", 0, &[1, 2]);
    }
    assert!(log.warned.load(Ordering::Relaxed));
}

#[test]
fn what_the_server_tells_is_in_the_line() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log.jsonl");
    let log = log(&knobs(path.to_str().unwrap(), "none"), true).unwrap();
    let told = |request: u64, ids: &[u32], reason: &str, last: u32| {
        let facts = serde_json::json!({
            "front": {"kind": "chat", "thinking": true, "effort": "high", "effort_asked": "medium", "max_tokens": 7,
                      "messages": 3, "tools": 2, "sys_len": 2, "conv_len": 4, "call_end": 50},
            "engine": {},
        });
        let facts = facts.to_string();
        log.arrived(request, Slice::from(ids)).unwrap();
        let reply = [7, last];
        let ended = Ended {
            request,
            reason: Text::from(reason),
            facts: Text::from(facts.as_str()),
            ids: Slice::from(ids),
            reply: Slice::from(&reply[..]),
        };
        log.request(&ended).unwrap();
    };
    told(1, &[1, 2, 3, 4, 5], "stop", 50);
    told(2, &[1, 2, 3, 4, 6, 7], "stop", 9);
    told(3, &[1, 2, 3, 9], "length", 50);
    let lines = lines(&path);
    let of = |key: &str| lines.iter().map(|line| line[key].clone()).collect::<Vec<_>>();
    assert_eq!(of("finish"), ["tool_calls", "stop", "length"]);
    for (key, value) in [
        ("kind", serde_json::json!("chat")),
        ("thinking", true.into()),
        ("effort", "high".into()),
        ("effort_asked", "medium".into()),
        ("max_tokens", 7.into()),
        ("messages", 3.into()),
        ("tools", 2.into()),
        ("sys_len", 2.into()),
    ] {
        assert_eq!(lines[0][key], value, "{key}");
    }
    // Two turns of one conversation, then another with the same system text.
    assert!(lines[0]["conv"] == lines[1]["conv"] && lines[1]["conv"] != lines[2]["conv"]);
    assert!(lines[0]["sys_hash"].is_string() && lines[0]["sys_hash"] == lines[2]["sys_hash"]);
    assert_eq!((&lines[1]["lcp_same"], &lines[2]["lcp_other"]), (&4.into(), &3.into()));
}

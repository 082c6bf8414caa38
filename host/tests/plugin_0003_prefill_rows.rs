//! Plugin 0003, as its entry of the catalogue asks: any chunk size gives the same replies; sizes that cannot be are refused.
#![allow(clippy::unwrap_used)]

mod plugins;

use plugins::{Place, ROWS};
use serde_json::{Value, json};

/// Ids of a reply to so many prompt tokens in chunks of so many rows, greedy or sampled.
fn reply(place: &Place, prompt: usize, rows: Option<u32>, sampled: bool) -> Value {
    let profile = place.profile(if rows.is_some() { &[ROWS] } else { &[] });
    let ids: Vec<String> = (0..prompt).map(|i| ((i * 37 + 11) % 480).to_string()).collect();
    let mut command =
        place.plugfold(&["generate", "--profile", profile.to_str().unwrap(), "--ignore-eos", "--json"]);
    command.args(["--ids", &ids.join(","), "--max-tokens", "6"]);
    if sampled {
        command.args(["--temperature", "0.9", "--seed", "7"]);
    }
    if let Some(rows) = rows {
        command.args(["--set", &format!("0003.prefill_rows={rows}")]);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{prompt} tokens in chunks of {rows:?}: {output:?}");
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    told["ids"].clone()
}

#[test]
fn any_chunk_size_gives_the_same_reply() {
    let place = Place::new();
    for (prompt, sampled) in [(45, false), (300, true)] {
        let want = reply(&place, prompt, None, sampled);
        assert_eq!(want.as_array().unwrap().len(), 6);
        for rows in [1, 7, 64, 100, 333, 512] {
            assert_eq!(
                reply(&place, prompt, Some(rows), sampled),
                want,
                "{prompt} tokens in chunks of {rows}"
            );
        }
    }
}

#[test]
fn sizes_that_are_none_refuse_the_start() {
    let place = Place::new();
    for value in ["0", "-1", "x", "1.5"] {
        let set = format!("0003.prefill_rows={value}");
        let output = place.generate(&[ROWS], "", &["--set", &set]);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && told.contains("prefill_rows") && told.contains(value),
            "{value}: {told}"
        );
    }
}

#[test]
fn a_request_may_ask_for_what_the_buffers_hold() {
    let place = Place::new();
    let served = place.serve(&[ROWS], "", &["--set", "0003.prefill_rows=96"]);
    let ask = |rows: Value| {
        let body = json!({
            "prompt": "The quick brown fox jumps over the lazy dog, again and again and again.", "max_tokens": 4,
            "temperature": 0, "tf_knobs": {"prefill_rows": rows},
        });
        served.post("/v1/completions", &body)
    };
    let (status, whole) = ask(json!(96));
    assert_eq!(status, 200, "{whole}");
    let (status, small) = ask(json!(1));
    assert_eq!((status, &small["choices"][0]["text"]), (200, &whole["choices"][0]["text"]), "{small}");
    assert_eq!(small["tensorfold"]["tf_knobs"]["prefill_rows"], json!(1), "{small}");
    for bad in [json!(0), json!(97), json!("1"), json!(true)] {
        let (status, told) = ask(bad.clone());
        let message = told["error"]["message"].as_str().unwrap_or_default();
        // A bool is a number here: true is 1.
        let right = if bad == json!(true) {
            status == 200
        } else {
            status == 400 && message.contains("prefill_rows")
        };
        assert!(right, "{bad}: {status} {told}");
    }
}

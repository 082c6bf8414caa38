//! Case 42: what a request may not set is a 400 that says why; what it may set is in the reply; nothing is taken in silence.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use plugfold::http::HttpSettings;
use plugfold_tests::catalogue::resolve;
use plugfold_tests::http::{TestServer, say, settings};
use serde_json::{Value, json};

const PLUGINS: [&str; 6] = ["0001", "0003", "0020", "0050", "0070", "0090"];

fn server() -> TestServer {
    let resolved = resolve(&PLUGINS, "", &[], &["0090.prefill_rows_max=512"]).unwrap();
    let server = TestServer::with(HttpSettings { knobs: Arc::new(resolved.table()), ..settings() }, 4096, 4);
    server.scripts.set("hello", say("hi"));
    server
}

fn refusal(server: &TestServer, knobs: &Value, stream: bool) -> String {
    let reply = server.chat("hello", json!({"tf_knobs": knobs, "stream": stream}));
    let body = reply.json();
    assert_eq!((reply.status, &body["error"]["param"]), (400, &json!("tf_knobs")), "{body}");
    body["error"]["message"].as_str().unwrap().to_owned()
}

#[test]
fn wrong_knobs_are_refused_with_the_reason() {
    let server = server();
    for (knobs, expected) in [
        (json!({"nonexpert": "q4"}), "key \"nonexpert\" is set when the server starts, not by a request"),
        (json!({"calib": "real"}), "key \"calib\" is set when the server starts"),
        (json!({"prefill_rows_max": 64}), "key \"prefill_rows_max\" is set when the server starts"),
        (json!({"batch": 2}), "key \"batch\" is set when the server starts"),
        (
            json!({"lokup": 1}),
            "has the unknown key \"lokup\"; did you mean \"lookup\"? valid are prefill_rows, lookup",
        ),
        (json!({"GLM53_TF_LOOKUP": 1}), "has the unknown key \"GLM53_TF_LOOKUP\""),
        (json!({"lookup": 1, "0020.lookup": 0}), "0020.lookup"),
        (json!({"lookup_min": 65}), "key \"lookup_min\" is 65; it must be a whole number from 1 to 64"),
        (json!({"lookup_min": "3"}), "key \"lookup_min\" is \"3\"; it must be a whole number from 1 to 64"),
        (json!({"lookup_min": 2.0}), "it must be a whole number from 1 to 64"),
        (json!({"lookup_min": null}), "key \"lookup_min\" is null"),
        (json!({"lookup": 2}), "key \"lookup\" is 2; it must be 0 or 1"),
        (json!({"prefill_rows": 513}), "from 1 to 512 (prefill_rows_max)"),
        (json!({"b12x": 4}), "plugin 0240-b12x-prefill, which this server has not loaded"),
        (json!([1]), "tf_knobs"),
        (json!("lookup"), "tf_knobs"),
    ] {
        for stream in [false, true] {
            let message = refusal(&server, &knobs, stream);
            assert!(message.contains(expected), "{knobs}: expected {expected:?}, was told {message:?}");
        }
    }
    assert!(refusal(&server, &json!({"x".repeat(100_000): 1}), false).len() < 1000);
}

#[test]
fn what_ran_is_in_the_reply() {
    let server = server();
    let shown = |knobs: Value| {
        server.chat("hello", json!({"tf_knobs": knobs})).json()["tensorfold"]["tf_knobs"].clone()
    };
    let defaults =
        json!({"prefill_rows": 64, "lookup": 1, "lookup_min": 4, "longctx_graphs": 1, "calib_online": 0});
    assert_eq!(shown(Value::Null), defaults);
    assert_eq!(shown(json!({})), defaults);
    let asked = json!({"prefill_rows": 512, "lookup": false, "lookup_min": 64, "longctx_graphs": 0, "calib_online": true});
    let echoed =
        json!({"prefill_rows": 512, "lookup": 0, "lookup_min": 64, "longctx_graphs": 0, "calib_online": 1});
    assert_eq!(shown(asked), echoed);
}

#[test]
fn an_owner_may_refuse_a_value() {
    let resolved = resolve(&PLUGINS, "", &[], &[]).unwrap();
    let table = resolved.table().with_veto(|knob, value| {
        (knob.key == "calib_online" && value.as_bool()).then(|| "several requests run at once".to_owned())
    });
    let server = TestServer::with(HttpSettings { knobs: Arc::new(table), ..settings() }, 4096, 4);
    server.scripts.set("hello", say("hi"));
    let message = refusal(&server, &json!({"calib_online": 1}), false);
    assert!(message.contains("key \"calib_online\" cannot be 1: several requests run at once"), "{message}");
}

#[test]
fn a_server_without_knobs_says_so() {
    let server = TestServer::start();
    let message = refusal(&server, &json!({"lookup": 1}), false);
    assert!(message.contains("has not loaded; this server has no request knobs"), "{message}");
}

#[test]
fn what_an_imported_profile_cannot_have_is_said() {
    let profile = "[imported.0240]\nbits = \"4\"\n[imported.0020]\nlookup = \"0\"\n";
    let resolved = resolve(&PLUGINS, profile, &[], &[]).unwrap();
    assert_eq!(resolved.report, ["not used: plugin 0240-b12x-prefill is not loaded: bits"]);
    assert_eq!(resolved.get("0020", "lookup").unwrap().value, plugfold_abi::KnobValue::Bool(false));
    // Written by hand it is a mistake.
    let error = resolve(&PLUGINS, "[knobs.0240]\nbits = 4\n", &[], &[]).unwrap_err().to_string();
    assert!(
        error.contains("add \"0240-b12x-prefill\" to `plugins` in the profile, or remove the setting"),
        "{error}"
    );
}

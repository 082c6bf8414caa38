//! Faults of tool calls that were reported against servers of this kind and that the repairs mend, replayed. Tests are
//! named after the number of their case.
#![allow(clippy::unwrap_used)]

mod support;

use plugfold_tests::http::{Aftercheck, Said, bytes, say};
use serde_json::json;

use support::{all, pair};

#[test]
fn case_1_nullable_string_arguments_keep_their_type() {
    let server = all();
    let after = Aftercheck::begin(&server);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "x": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "y": {"type": ["string", "integer"]},
        "z": {"type": "string"}}}}}]);
    let pairs = [pair("x", "hello"), pair("y", "123"), pair("z", "true")].concat();
    let text = format!("</think><tool_call>f{pairs}</tool_call>");
    for script in [say(&format!("{text}<|observation|>")), {
        let mut script = say("</think>");
        script.extend(bytes(text.strip_prefix("</think>").unwrap().as_bytes()));
        script.extend(say("<|observation|>"));
        script
    }] {
        server.scripts.set("#types", script);
        for stream in [false, true] {
            let said = Said::read(&server.chat("#types", json!({"tools": tools, "stream": stream})));
            let arguments = r#"{"x":"hello","y":"123","z":"true"}"#.to_owned();
            assert_eq!(said.calls, [("f".to_owned(), arguments)], "stream {stream}");
            assert_eq!(said.finish, "tool_calls");
        }
    }
    after.finish();
}

#[test]
fn case_8_a_call_inside_of_an_unclosed_think_block() {
    let server = all();
    let after = Aftercheck::begin(&server);
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "k": {"type": "string"}}}}}]);
    let text = format!("I should look.\n<tool_call>f{}</tool_call><|observation|>", pair("k", "v"));
    server.scripts.set("#open", say(&text));
    for stream in [false, true] {
        let said = Said::read(&server.chat("#open", json!({"tools": tools, "stream": stream})));
        assert_eq!(said.calls, [("f".to_owned(), r#"{"k":"v"}"#.to_owned())], "stream {stream}");
        assert_eq!((said.content.as_str(), said.finish.as_str()), ("", "tool_calls"), "stream {stream}");
        assert!(said.reasoning.starts_with("I should look."), "{}", said.reasoning);
        // What a stream has sent as reasoning cannot be taken back; a whole reply is clean.
        assert!(stream || !said.reasoning.contains("<tool_call>"), "{}", said.reasoning);
    }
    after.finish();
}

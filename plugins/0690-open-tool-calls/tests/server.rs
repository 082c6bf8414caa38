//! The repairs in a server, with those of 0620.
#![allow(clippy::unwrap_used)]

use plugfold::text::testing::tokenizer;
use plugfold_0690_open_tool_calls::Tags;
use plugfold_abi::points::ReplyLinkObject;
use plugfold_abi::{Knob, KnobValue, Knobs, Maybe, Slice};
use plugfold_engine::hooks::Hooks;
use plugfold_tests::http::{TestServer, say, settings};
use serde_json::{Value, json};

fn with(names: &[&str]) -> TestServer {
    let list = KnobValue::List(names.iter().map(|name| (*name).into()).collect());
    let knobs = [Knob { key: "0620.fixes".into(), value: list, id: Maybe::RNone }];
    let tags = Tags::new(&Knobs { all: Slice::from(&knobs[..]) }).unwrap();
    let mut hooks = Hooks::default();
    hooks.add_object("0690", ReplyLinkObject::new(tags)).unwrap();
    TestServer::hooked(settings(), &hooks)
}

/// Content, arguments and finish of a reply; whole and streamed must agree.
fn asked(server: &TestServer, said: &str, more: &Value) -> (Value, Vec<String>, Value) {
    let tools = json!([{"type": "function", "function": {"name": "read", "parameters": {
        "type": "object", "required": ["path"], "properties": {"path": {"type": "string"}, "limit": {"type": "integer"}}}}}]);
    server.scripts.set("please", say(said));
    let mut body = json!({"messages": [{"role": "user", "content": "please"}], "tools": tools});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let whole = server.post("/v1/chat/completions", &body).json();
    let choice = whole["choices"][0].clone();
    let arguments = |call: &Value| call["function"]["arguments"].as_str().map(str::to_owned);
    let calls = choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
    let calls: Vec<String> = calls.iter().filter_map(arguments).collect();
    body["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &body).events();
    let deltas = || events.iter().map(|e| &e["choices"][0]["delta"]);
    let streamed: Vec<String> = deltas().filter_map(|d| arguments(&d["tool_calls"][0])).collect();
    let text: String = deltas().filter_map(|d| d["content"].as_str()).collect();
    assert_eq!(streamed, calls, "{said}");
    assert_eq!(text, choice["message"]["content"].as_str().unwrap_or_default(), "{said}");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], choice["finish_reason"], "{said}");
    (choice["message"]["content"].clone(), calls, choice["finish_reason"].clone())
}

const OPEN: &str = "Why</think>Now. <tool_call>read<arg_key>path</arg_key><arg_value>a</arg_value>";
const KEYLESS: &str = "Why</think><tool_call>read path</arg_key><arg_value>a</arg_value></tool_call>";

#[test]
fn a_call_that_lacks_its_closing_tag_is_one_when_the_model_ended_the_reply() {
    let server = with(&["opencalls", "argkeys"]);
    let (content, calls, finish) = asked(&server, &format!("{OPEN}<|observation|>"), &json!({}));
    assert_eq!((content, finish), (json!("Now. "), json!("tool_calls")));
    assert_eq!(calls, ["{\"path\":\"a\"}"]);
    let spent = tokenizer().encode(OPEN).unwrap().len();
    for (said, more) in [
        (format!("{OPEN}<|observation|>"), json!({"max_tokens": spent})),
        (format!("{OPEN}END"), json!({"stop": "END"})),
        (format!("{OPEN}<arg_key>limit</arg_key><arg_value>1<|observation|>"), json!({})),
        (format!("{OPEN} and so on<|observation|>"), json!({})),
        (OPEN.replace("path", "limit") + "<|observation|>", json!({})),
        (OPEN.replace("read", "write") + "<|observation|>", json!({})),
        (format!("{OPEN}</think><|observation|>"), json!({})),
        (format!("{OPEN}<|observation|>"), json!({"tool_choice": "none"})),
    ] {
        let (_, calls, finish) = asked(&server, &said, &more);
        assert!(calls.is_empty() && finish != "tool_calls", "{said} {more}");
    }
}

#[test]
fn keys_are_mended_with_their_name_on_only() {
    for (names, calls) in [(&["argkeys"][..], 1), (&["opencalls"], 0), (&[], 0)] {
        let server = with(names);
        let (content, found, _) = asked(&server, &format!("{KEYLESS}<|observation|>"), &json!({}));
        assert_eq!(found.len(), calls, "{names:?}");
        let text = KEYLESS.split_once("</think>").unwrap().1;
        assert_eq!(content, if calls == 1 { Value::Null } else { json!(text) }, "{names:?}");
        // Open and keyless: both names are needed.
        let open = KEYLESS.trim_end_matches("</tool_call>");
        let (_, found, _) = asked(&server, &format!("{open}<|observation|>"), &json!({}));
        assert!(found.is_empty(), "{names:?}");
    }
    let server = with(&["opencalls", "argkeys"]);
    let open = KEYLESS.trim_end_matches("</tool_call>");
    let (_, found, _) = asked(&server, &format!("{open}<|observation|>"), &json!({}));
    assert_eq!(found, ["{\"path\":\"a\"}"]);
}

#[test]
fn what_is_well_formed_stays_as_it_is() {
    let (server, bare) = (with(&["opencalls", "argkeys"]), TestServer::start());
    for said in [
        "Why</think>a <tool_call>read<arg_key>path</arg_key><arg_value>x</arg_key></arg_value></tool_call> b<|observation|>",
        "Why</think>a <tool_call>nobody</tool_call> b<|endoftext|>",
        "Why</think>plain<|endoftext|>",
    ] {
        assert_eq!(asked(&server, said, &json!({})), asked(&bare, said, &json!({})), "{said}");
    }
}

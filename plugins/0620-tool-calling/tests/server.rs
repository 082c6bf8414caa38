//! The repairs in a server.
#![allow(clippy::unwrap_used)]

mod support;

use plugfold::text::testing::tokenizer;
use plugfold_tests::http::{TestServer, say};
use serde_json::{Value, json};

use support::{all, fixes, pair, with};

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {
        "command": {"type": "string"}, "timeout": {"type": ["integer", "null"]}, "note": {"type": ["string", "null"]},
        "quiet": {"anyOf": [{"type": "boolean"}, {"type": "null"}]}}}}}])
}

fn call(pairs: &[(&str, &str)]) -> String {
    let pairs: String = pairs.iter().map(|(key, value)| pair(key, value)).collect();
    format!("<tool_call>bash{pairs}</tool_call>")
}

/// Content, reasoning and calls of a reply, whole; a stream must have the same calls and finish.
fn asked(server: &TestServer, mark: &str, more: &Value) -> (Value, Value, Vec<Value>, Value) {
    let mut body = json!({"messages": [{"role": "user", "content": mark}], "tools": tools()});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    let whole = server.post("/v1/chat/completions", &body).json();
    let choice = whole["choices"][0].clone();
    let message = &choice["message"];
    let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
    body["stream"] = json!(true);
    let events = server.post("/v1/chat/completions", &body).events();
    let deltas = events.iter().filter_map(|e| e["choices"][0]["delta"]["tool_calls"][0].as_object());
    let streamed: Vec<Value> = deltas.map(|d| d["function"].clone()).collect();
    let functions: Vec<Value> = calls.iter().map(|c| c["function"].clone()).collect();
    assert_eq!(streamed, functions, "{mark}");
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], choice["finish_reason"], "{mark}");
    (message["content"].clone(), message["reasoning"].clone(), calls, choice["finish_reason"].clone())
}

fn arguments(calls: &[Value]) -> Vec<Value> {
    let text = |call: &Value| call["function"]["arguments"].as_str().unwrap().to_owned();
    calls.iter().map(|call| serde_json::from_str(&text(call)).unwrap()).collect()
}

fn history(question: &str, id: &str, arguments: &Value, more: &Value) -> Value {
    let mut turn = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": id, "type": "function", "function": {"name": "bash", "arguments": arguments}}]});
    turn.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    json!({"tools": tools(), "messages": [{"role": "user", "content": question}, turn,
        {"role": "tool", "tool_call_id": id, "content": "a.txt"}]})
}

/// The prompt that a body makes.
fn prompt(server: &TestServer, body: &Value) -> Vec<u32> {
    assert_eq!(server.post("/v1/chat/completions", body).status, 200);
    let ids = server.prompts().pop().unwrap();
    let counted = server.post("/tokenize", body).json();
    assert_eq!(counted["tokens"], json!(ids), "what is counted is what runs");
    ids
}

#[test]
fn reasoning_comes_back_by_id_and_by_what_was_called() {
    let (server, bare) = (all(), TestServer::start());
    let said = format!("Look first.</think>{}<|observation|>", call(&[("command", "ls"), ("timeout", "5")]));
    server.scripts.set("what is here", say(&said));
    let (_, reasoning, calls, finish) = asked(&server, "what is here", &json!({}));
    assert_eq!((reasoning, finish), (json!("Look first."), json!("tool_calls")));
    let id = calls[0]["id"].as_str().unwrap();
    let text = json!("{\"timeout\": 5, \"command\": \"ls\"}");
    let kept = json!({"reasoning_content": "Look first."});
    let own = json!({"reasoning": "My own."});
    let none = json!({});
    let with_close = json!({"content": "said</think>so"});
    let object = json!({"command": "ls", "timeout": 5});
    let restored = prompt(&bare, &history("what is here", "x", &object, &kept));
    for (question, id, arguments, more, expected) in [
        ("what is here", id, &text, &none, Some(&kept)),
        ("another question", id, &text, &none, Some(&kept)),
        ("what is here", "renumbered", &text, &none, Some(&kept)),
        ("what is here", "renumbered", &object, &none, Some(&kept)),
        ("another question", "renumbered", &text, &none, None),
        ("what is here", "renumbered", &json!("{\"command\": \"cat\"}"), &none, None),
        ("what is here", id, &text, &own, None),
        ("what is here", id, &text, &with_close, None),
    ] {
        let body = history(question, id, arguments, more);
        let expected = match expected {
            Some(kept) => history(question, id, arguments, kept),
            None => body.clone(),
        };
        assert_eq!(prompt(&server, &body), prompt(&bare, &expected), "{body}");
        // The prompt after a prompt: doing it twice changes nothing.
        assert_eq!(prompt(&server, &expected), prompt(&bare, &expected), "{body}");
    }
    let parts = json!([{"type": "text", "text": "what is "}, {"type": "text", "text": "here"}]);
    let mut body = history("", "renumbered", &text, &none);
    body["messages"][0]["content"] = parts;
    let mut expected = body.clone();
    expected["messages"][1]["reasoning_content"] = json!("Look first.");
    assert_eq!(prompt(&server, &body), prompt(&bare, &expected), "parts are joined");
    assert_eq!(prompt(&server, &history("what is here", "y", &object, &none)), restored);
}

#[test]
fn zero_limits_remember_nothing() {
    let bare = TestServer::start();
    for (entries, mb) in [(0, 32), (1024, 0)] {
        let server = with(&["reasoning"], entries, mb);
        server.scripts.set("what is here", say(&format!("Look.</think>{}", call(&[("command", "ls")]))));
        let (_, _, calls, _) = asked(&server, "what is here", &json!({}));
        let body =
            history("what is here", calls[0]["id"].as_str().unwrap(), &json!({"command": "ls"}), &json!({}));
        assert_eq!(prompt(&server, &body), prompt(&bare, &body));
    }
}

#[test]
fn arguments_are_typed_by_the_whole_schema() {
    let (server, bare) = (all(), TestServer::start());
    let pairs = [("command", "42"), ("timeout", "3.0"), ("note", "123"), ("quiet", "True")];
    let said = format!("So.</think>{}{}", call(&pairs), "<tool_call>nobody</tool_call>");
    let said = format!("{said}{}<|observation|>", call(&[("timeout", "null"), ("note", "null")]));
    for server in [&server, &bare] {
        server.scripts.set("typed", say(&said));
    }
    let (content, _, calls, _) = asked(&server, "typed", &json!({}));
    let typed = json!({"command": "42", "timeout": 3, "note": "123", "quiet": true});
    assert_eq!(arguments(&calls), [typed, json!({"timeout": null, "note": null})]);
    assert_eq!(content, "<tool_call>nobody</tool_call>");
    let (_, _, calls, _) = asked(&bare, "typed", &json!({}));
    assert_eq!(arguments(&calls)[0]["note"], json!(123), "by the type alone, without the plugin");
    let (_, _, calls, _) = asked(&server, "typed", &json!({"parallel_tool_calls": false}));
    assert_eq!(calls.len(), 1);
}

#[test]
fn calls_in_an_open_think_block_are_calls_under_all_conditions_only() {
    let server = all();
    let bash = call(&[("command", "ls"), ("timeout", "\"7\"")]);
    let expected = json!({"command": "ls", "timeout": 7});
    for (mark, said) in [
        ("plain", format!("I look.\n{bash}<|observation|>")),
        ("closed behind", format!("I look.\n{bash}</think><|observation|>")),
        ("two", format!("I look.\n{bash}\n{bash}\n<|observation|>")),
    ] {
        server.scripts.set(mark, say(&said));
        let (content, reasoning, calls, finish) = asked(&server, mark, &json!({}));
        let found = arguments(&calls);
        assert_eq!(found[0], expected, "{mark}");
        assert_eq!(found.len(), if mark == "two" { 2 } else { 1 }, "{mark}");
        assert_eq!(
            (content, reasoning, finish),
            (json!(null), json!("I look."), json!("tool_calls")),
            "{mark}"
        );
    }
    let spent = tokenizer().encode(&format!("I look.{bash}")).unwrap().len();
    for (mark, said, more) in [
        ("user token", format!("I look.{bash}<|user|>"), json!({})),
        ("no token", format!("I look.{bash}"), json!({})),
        ("text behind", format!("I look.{bash} or not<|observation|>"), json!({})),
        ("unknown tool", "I look.<tool_call>nobody</tool_call><|observation|>".to_owned(), json!({})),
        ("answer", format!("I look.{bash}</think>An answer.<|observation|>"), json!({})),
        ("length", format!("I look.{bash}<|observation|>"), json!({"max_tokens": spent})),
        ("no tools", format!("I look.{bash}<|observation|>"), json!({"tools": []})),
        ("none", format!("I look.{bash}<|observation|>"), json!({"tool_choice": "none"})),
        ("stopped", format!("I look.{bash}</think>END<|observation|>"), json!({"stop": "END"})),
    ] {
        server.scripts.set(mark, say(&said));
        let (_, _, calls, finish) = asked(&server, mark, &more);
        assert_eq!(calls, [] as [Value; 0], "{mark}");
        assert_ne!(finish, "tool_calls", "{mark}");
    }
}

#[test]
fn without_tools_and_without_fixes_everything_is_as_before() {
    let (server, bare) = (all(), TestServer::start());
    let said = format!("Why</think>see {} there<|endoftext|>", call(&[("command", "ls")]));
    for server in [&server, &bare] {
        server.scripts.set("markup", say(&said));
    }
    let body = json!({"messages": [{"role": "user", "content": "markup"}]});
    let message = |server: &TestServer| {
        server.post("/v1/chat/completions", &body).json()["choices"][0]["message"].clone()
    };
    assert_eq!(message(&server), message(&bare));
    assert_eq!(server.prompts(), bare.prompts());
    assert!(fixes(&[], 1024, 32).unwrap().is_none());
    let with_grammar = fixes(&["args", "grammar"], 1024, 32).unwrap().unwrap();
    let refused = with_grammar.meet(None).unwrap_err().to_string();
    assert!(refused.contains("0610"), "{refused}");
    fixes(&["args"], 1024, 32).unwrap().unwrap().meet(None).unwrap();
    assert!(fixes(&["args"], -1, 32).is_err());
}

//! Log probabilities, thinking budget and keep-alive over HTTP.
#![allow(clippy::unwrap_used)]

use plugfold::http::{HttpSettings, Limits};
use plugfold::scripted::{Gate, Step};
use plugfold_tests::http::{Aftercheck, Said, TestServer, bytes, chat, post, say, settings};
use serde_json::{Value, json};
use std::io::{Read as _, Write as _};

/// The bytes of a list of entries.
fn joined(entries: &[Value]) -> Vec<u8> {
    let bytes = |entry: &Value| serde_json::from_value::<Vec<u8>>(entry["bytes"].clone()).unwrap();
    entries.iter().flat_map(bytes).collect()
}

/// The entries of all events of a stream, of one kind.
fn streamed(events: &[Value], kind: &str) -> Vec<Value> {
    let lists = events.iter().filter_map(|event| event["choices"][0]["logprobs"][kind].as_array());
    lists.flatten().cloned().collect()
}

#[test]
fn case_16_bytes_of_log_probabilities_join_to_the_text() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let text = "ďábelské 🌶️ ไทย 客单价";
    let script = [say("hm</think>"), bytes(text.as_bytes()), say("<|endoftext|>")].concat();
    server.scripts.set("#lp", script);
    let more = json!({"logprobs": true, "top_logprobs": 2});
    let whole = server.chat("#lp", more.clone()).json();
    let told = &whole["choices"][0]["logprobs"];
    let content = told["content"].as_array().unwrap().clone();
    assert_eq!(joined(&content), text.as_bytes());
    assert_eq!(joined(told["reasoning"].as_array().unwrap()), b"hm</think>");
    let tokens = content.len() + told["reasoning"].as_array().unwrap().len();
    assert_eq!(whole["usage"]["completion_tokens"], tokens);
    assert_eq!(content.last().unwrap()["token"], "<|endoftext|>");
    let top = content[0]["top_logprobs"].as_array().unwrap();
    assert_eq!(top.len(), 2);
    assert_eq!(top[0]["logprob"], content[0]["logprob"]);
    assert!((content[0]["logprob"].as_f64().unwrap().exp() - 0.5).abs() < 1e-9);

    let mut stream = more;
    stream["stream"] = true.into();
    let events = server.chat("#lp", stream).events();
    assert_eq!(streamed(&events, "content"), content);
    assert_eq!(json!(streamed(&events, "reasoning")), told["reasoning"]);
    assert!(server.chat("#lp", json!({})).json()["choices"][0].get("logprobs").is_none());
    after.finish();
}

#[test]
fn completions_tell_them_in_lists() {
    let server = TestServer::start();
    server.scripts.set("#t", say("hello<|endoftext|>"));
    let body = server.post("/v1/completions", &json!({"prompt": "#t", "logprobs": 1})).json();
    let told = &body["choices"][0]["logprobs"];
    assert_eq!(told["tokens"], json!(["hel", "l", "o", "<|endoftext|>"]));
    assert_eq!(told["text_offset"], json!([0, 3, 4, 5]));
    assert_eq!(told["token_logprobs"].as_array().unwrap().len(), 4);
    assert_eq!(told["top_logprobs"][1].as_object().unwrap().keys().collect::<Vec<_>>(), ["l"]);
    let events =
        server.post("/v1/completions", &json!({"prompt": "#t", "logprobs": 0, "stream": true})).events();
    let tokens = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["tokens"].as_array()).flatten();
    assert_eq!(tokens.count(), 4);
}

#[test]
fn the_thinking_budget_reaches_the_engine() {
    let server = TestServer::start();
    server.scripts.set("#think", say("abcdefgh</think>done<|endoftext|>"));
    let said = Said::read(&server.chat("#think", json!({"thinking_budget": 3})));
    assert_eq!((said.reasoning.as_str(), said.content.as_str()), ("abc", "efgh</think>done"));
    let free = Said::read(&server.chat("#think", json!({"thinking_budget": 8})));
    assert_eq!((free.reasoning.as_str(), free.content.as_str()), ("abcdefgh", "done"));
    // Without thinking there is nothing to end.
    let off = Said::read(&server.chat("#think", json!({"thinking_budget": 3, "reasoning_effort": "none"})));
    assert_eq!(off.content, "abcdefgh</think>done");
}

#[test]
fn a_quiet_stream_is_kept_alive_with_comments() {
    let limits = Limits { keep_alive_s: 0.02, ..Limits::default() };
    let server = TestServer::with(HttpSettings { limits, ..settings() }, 4096, 4);
    let after = Aftercheck::begin(&server);
    for (path, body, comment) in [
        ("/v1/chat/completions", chat("#quiet", json!({"stream": true})), ": keep-alive\n\n"),
        (
            "/v1/messages",
            json!({"messages": [{"role": "user", "content": "#quiet"}], "stream": true}),
            "event: ping\ndata: {\"type\":\"ping\"}\n\n",
        ),
    ] {
        let gate = Gate::default();
        server.scripts.set("#quiet", [vec![Step::Wait(gate.clone())], say("ok<|endoftext|>")].concat());
        let mut stream = server.connect();
        stream.write_all(&post(path, body.to_string().as_bytes())).unwrap();
        let mut seen = Vec::new();
        let mut piece = [0; 4096];
        // Three comments come while the engine says nothing.
        while String::from_utf8_lossy(&seen).matches(comment).count() < 3 {
            let count = stream.read(&mut piece).unwrap();
            assert!(count > 0, "{}", String::from_utf8_lossy(&seen));
            seen.extend_from_slice(&piece[..count]);
        }
        gate.open();
        stream.read_to_end(&mut seen).unwrap();
        let text = String::from_utf8_lossy(&seen);
        assert!(text.contains("[DONE]") || text.contains("message_stop"), "{text}");
    }
    after.finish();
}

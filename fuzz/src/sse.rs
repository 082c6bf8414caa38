//! Streams: any tokens in any rounds give well-formed events in every dialect, which join to the reply that is not streamed.

use std::sync::OnceLock;

use plugfold::scripted::Step;
use plugfold::text::testing::tokenizer;
use plugfold_tests::http::{Said, TestServer};
use serde_json::{Value, json};

use crate::cuts;

fn server() -> &'static TestServer {
    static SERVER: OnceLock<TestServer> = OnceLock::new();
    SERVER.get_or_init(TestServer::start)
}

/// The first line chooses the rounds, the rest is what the model says; control tokens in it are tokens.
///
/// `true`: something was said.
///
/// # Panics
/// When an invariant does not hold.
pub fn run(data: &[u8]) -> bool {
    let (sizes, said) = cuts(data);
    let ids = match std::str::from_utf8(said) {
        Ok(text) => tokenizer().encode(text).unwrap_or_default(),
        Err(_) => said.iter().map(|byte| u32::from(*byte)).collect(),
    };
    let mut rounds = Vec::new();
    let (mut rest, mut size) = (&ids[..], sizes.iter().cycle());
    while !rest.is_empty() {
        let (round, later) = rest.split_at(size.next().map_or(1, |size| (*size).min(rest.len())));
        rounds.push(Step::Tokens(round.to_vec()));
        rest = later;
    }
    let server = server();
    server.scripts.set("#fuzz", rounds);
    let tool = json!({"name": "look", "parameters": {"properties": {"n": {"type": "integer"}}}});
    for tools in [json!([]), json!([{"type": "function", "function": tool}])] {
        let ask = |stream: bool| {
            let more = json!({"tools": tools, "stream": stream, "stream_options": {"include_usage": stream}});
            Said::read(&server.chat("#fuzz", more))
        };
        assert_eq!(ask(true), ask(false));
    }
    messages(server);
    responses(server, &tool);
    !ids.is_empty()
}

fn messages(server: &TestServer) {
    let body = |stream: bool| {
        json!({"max_tokens": 2000, "messages": [{"role": "user", "content": "#fuzz"}], "stream": stream,
               "thinking": {"type": "adaptive"}, "tools": [{"name": "look", "input_schema": {"type": "object"}}]})
    };
    let whole = server.post("/v1/messages", &body(false)).json();
    let mut blocks: Vec<Value> = Vec::new();
    let mut parts: Vec<String> = Vec::new();
    let events = server.post("/v1/messages", &body(true)).named_events();
    for event in &events {
        match event["type"].as_str().unwrap_or_default() {
            "content_block_start" => {
                blocks.push(event["content_block"]["type"].clone());
                parts.push(String::new());
            }
            "content_block_delta" => {
                let delta = &event["delta"];
                let text = ["text", "thinking", "partial_json"].iter().find_map(|key| delta[key].as_str());
                let last = parts.last_mut().unwrap_or_else(|| panic!("a delta before its block: {event}"));
                last.push_str(text.unwrap_or_default());
            }
            _ => {}
        }
    }
    assert_eq!(events.last().map(|event| &event["type"]), Some(&json!("message_stop")));
    let content = whole["content"].as_array().map(Vec::as_slice).unwrap_or_default();
    assert_eq!(blocks, content.iter().map(|block| block["type"].clone()).collect::<Vec<_>>(), "{whole}");
    for (block, part) in content.iter().zip(&parts) {
        match block["type"].as_str() {
            Some("tool_use") => {
                assert_eq!(serde_json::from_str::<Value>(part).ok().as_ref(), Some(&block["input"]));
            }
            Some(kind) => assert_eq!(block[kind].as_str(), Some(part.as_str()), "{whole}"),
            None => panic!("{whole}"),
        }
    }
}

fn responses(server: &TestServer, tool: &Value) {
    let mut offered = tool.clone();
    offered["type"] = json!("function");
    let body = |stream: bool| json!({"input": "#fuzz", "max_output_tokens": 2000, "stream": stream, "tools": [offered]});
    let whole = server.post("/v1/responses", &body(false)).json();
    let events = server.post("/v1/responses", &body(true)).named_events();
    let mut text = String::new();
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at, "{event}");
        if event["type"] == "response.output_text.delta" {
            text += event["delta"].as_str().unwrap_or_default();
        }
    }
    let last = events.last().unwrap_or_else(|| panic!("no events"));
    assert!(["response.completed", "response.incomplete"].iter().any(|kind| last["type"] == *kind), "{last}");
    let plain = |response: &Value| {
        let items = response["output"].as_array().into_iter().flatten();
        items.map(|item| (item["type"].clone(), item["arguments"].clone(), texts(item))).collect::<Vec<_>>()
    };
    assert_eq!(plain(&last["response"]), plain(&whole));
    assert_eq!(text, plain(&whole).iter().map(|(_, _, text)| text.as_str()).collect::<String>());
}

/// The visible text of an item.
fn texts(item: &Value) -> String {
    let parts = item["content"].as_array().into_iter().flatten();
    parts.filter(|part| part["type"] == "output_text").filter_map(|part| part["text"].as_str()).collect()
}

//! What real agents send, replayed: the forms of their requests, recorded by `agents_for_real.rs`, with the words cut down.
//! Every one gets the reply that the agent needs: a call of a tool that it offers, streamed in its dialect to a proper end.
#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::path::Path;

use plugfold::text::testing::tokenizer;
use plugfold_tests::http::{Reply, TestServer, say, settings};
use serde_json::{Value, json};

/// The recordings: name and content.
fn recordings() -> Vec<(String, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/agents");
    let mut files: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let read = |file: &Path| serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    files.iter().map(|file| (file.file_stem().unwrap().to_str().unwrap().to_owned(), read(file))).collect()
}

fn of(agent: &str) -> Vec<(String, Value)> {
    let all: Vec<_> = recordings().into_iter().filter(|(name, _)| name.starts_with(agent)).collect();
    assert!(all.len() > 1, "{agent} has recordings");
    all
}

fn send(server: &TestServer, recording: &Value) -> Reply {
    let body = if recording["body"].is_null() { String::new() } else { recording["body"].to_string() };
    let mut head = format!(
        "{} {} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n",
        recording["method"].as_str().unwrap(),
        recording["path"].as_str().unwrap()
    );
    for (name, value) in recording["headers"].as_object().unwrap() {
        write!(head, "{name}: {}\r\n", value.as_str().unwrap()).unwrap();
    }
    Reply::parse(&server.raw(format!("{head}Content-Length: {}\r\n\r\n{body}", body.len()).as_bytes()))
}

/// Names of the function tools that a request offers.
fn functions(body: &Value) -> Vec<String> {
    let tools = body["tools"].as_array().into_iter().flatten();
    let functions = tools.filter(|tool| tool["type"].is_null() || tool["type"] == "function");
    let name = |tool: &Value| tool["name"].as_str().or(tool["function"]["name"].as_str()).map(str::to_owned);
    functions.filter_map(name).collect()
}

/// Plays a recording to a model that calls the first tool that is offered; gives that tool's name, if there is one.
fn played(name: &str, recording: &Value) -> (TestServer, Option<String>, Reply) {
    let server = TestServer::with(settings(), 1 << 18, 2);
    let tools = functions(&recording["body"]);
    let call = tools.first().map(|tool| format!("<tool_call>{tool}</tool_call><|observation|>"));
    server.scripts.set("", say(&format!("why</think>I look.{}", call.unwrap_or("<|endoftext|>".into()))));
    let reply = send(&server, recording);
    assert_eq!(reply.status, 200, "{name}: {}", reply.text());
    if let [prompt] = &server.prompts()[..] {
        let prompt = tokenizer().decode(prompt);
        for tool in &tools {
            assert!(prompt.contains(&format!("\"{tool}\"")), "{name}: the prompt has no tool {tool}");
        }
    }
    server.wait_idle();
    (server, tools.into_iter().next(), reply)
}

#[test]
fn opencode() {
    for (name, recording) in of("opencode") {
        let (server, tool, reply) = played(&name, &recording);
        // The request without tools is that for a title: it yields to the turn that is sent beside it.
        assert_eq!(server.requests()[0].background, tool.is_none(), "{name}");
        let events = reply.events();
        let calls: Vec<&Value> = events
            .iter()
            .filter_map(|event| event["choices"][0]["delta"]["tool_calls"].as_array())
            .flatten()
            .map(|call| &call["function"]["name"])
            .collect();
        assert_eq!(
            calls,
            tool.iter().map(|tool| json!(tool)).collect::<Vec<_>>().iter().collect::<Vec<_>>(),
            "{name}"
        );
        let finish = if tool.is_some() { "tool_calls" } else { "stop" };
        assert!(events.iter().any(|event| event["choices"][0]["finish_reason"] == finish), "{name}");
        assert!(
            events.last().unwrap()["usage"]["prompt_tokens"].as_u64().unwrap() > 0,
            "{name}: usage was asked for"
        );
    }
}

#[test]
fn codex() {
    for (name, recording) in of("codex") {
        let (_, tool, reply) = played(&name, &recording);
        let events = reply.named_events();
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!((kinds[0], kinds[kinds.len() - 1]), ("response.created", "response.completed"), "{name}");
        let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
        let calls: Vec<&Value> =
            done.map(|event| &event["item"]).filter(|item| item["type"] == "function_call").collect();
        if let Some(tool) = tool {
            assert!(calls.len() == 1 && calls[0]["name"] == tool.as_str(), "{name}: {calls:?}");
            assert!(calls[0]["call_id"].is_string(), "{name}: {calls:?}");
        }
        let usage = &events.last().unwrap()["response"]["usage"];
        for count in ["input_tokens", "output_tokens", "total_tokens"] {
            assert!(usage[count].as_u64().unwrap() > 0, "{name}: {usage}");
        }
        // Tools of other kinds are named, not refused.
        let others = recording["body"]["tools"]
            .as_array()
            .into_iter()
            .flatten()
            .any(|tool| tool["type"] != "function");
        assert_eq!(reply.headers.contains_key("x-plugfold-skipped-tools"), others, "{name}");
    }
}

#[test]
fn claude_code() {
    for (name, recording) in of("claude") {
        let (_, tool, reply) = played(&name, &recording);
        if recording["body"]["stream"] != true {
            assert!(
                reply.json()["type"] == "message" || reply.json()["input_tokens"].is_u64(),
                "{name}: {}",
                reply.text()
            );
            continue;
        }
        let events = reply.named_events();
        let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        assert_eq!((kinds[0], kinds[kinds.len() - 1]), ("message_start", "message_stop"), "{name}");
        let blocks: Vec<&Value> =
            events.iter().map(|event| &event["content_block"]).filter(|b| b.is_object()).collect();
        let used: Vec<&str> =
            blocks.iter().filter(|b| b["type"] == "tool_use").map(|b| b["name"].as_str().unwrap()).collect();
        assert_eq!(used, tool.iter().map(String::as_str).collect::<Vec<_>>(), "{name}");
        let reason = if tool.is_some() { "tool_use" } else { "end_turn" };
        assert!(events.iter().any(|event| event["delta"]["stop_reason"] == reason), "{name}");
    }
}

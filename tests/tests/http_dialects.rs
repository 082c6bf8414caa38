//! The Responses and Messages dialects, with a scripted engine.
#![allow(clippy::unwrap_used)]

use plugfold::http::HttpSettings;
use plugfold::scripted::Step;
use plugfold_engine::service::EngineError;
use plugfold_tests::http::{Aftercheck, TestServer, say, settings};
use serde_json::{Value, json};

const CALLS: &str = "hm</think>I look.<tool_call>look<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>\n\
                     <tool_call>look</tool_call><|observation|>";

fn with(base: &Value, more: Value) -> Value {
    let mut body = base.clone();
    if let Value::Object(more) = more {
        body.as_object_mut().unwrap().extend(more);
    }
    body
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

/// The ids of a conversation's prompt.
fn prompt(server: &TestServer, path: &str, body: &Value) -> Vec<u32> {
    let mut body = body.clone();
    body["max_tokens"] = 1.into();
    body["max_output_tokens"] = 1.into();
    assert_eq!(server.post(path, &body).status, 200);
    server.prompts().last().unwrap().clone()
}

#[test]
fn messages_whole_and_streamed_agree() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    server.scripts.set("#m", say(CALLS));
    let tool = json!({"name": "look", "description": "d",
                      "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}});
    let base = json!({"model": "claude", "max_tokens": 500, "messages": [{"role": "user", "content": "#m"}],
                      "tools": [tool, {"type": "web_search_20250305", "name": "web_search"}],
                      "thinking": {"type": "enabled", "budget_tokens": 400}});
    let reply = server.post("/v1/messages?beta=true", &base);
    assert_eq!(reply.headers["x-plugfold-skipped-tools"], "web_search_20250305");
    let whole = reply.json();
    assert_eq!(
        (&whole["type"], &whole["role"], &whole["model"], &whole["stop_reason"]),
        (&json!("message"), &json!("assistant"), &json!("scripted"), &json!("tool_use"))
    );
    let content = whole["content"].as_array().unwrap();
    assert_eq!(content.len(), 4);
    assert_eq!((&content[0]["type"], &content[0]["thinking"]), (&json!("thinking"), &json!("hm")));
    assert_eq!(content[1], json!({"type": "text", "text": "I look."}));
    assert_eq!((&content[2]["name"], &content[2]["input"]), (&json!("look"), &json!({"n": 3})));
    assert_eq!(content[3]["input"], json!({}));
    assert!(content[2]["id"].as_str().unwrap().starts_with("toolu_") && content[2]["id"] != content[3]["id"]);

    let reply = server.post("/v1/messages", &with(&base, json!({"stream": true})));
    assert_eq!(reply.headers["x-plugfold-skipped-tools"], "web_search_20250305");
    let events = reply.named_events();
    assert_eq!((types(&events)[0], *types(&events).last().unwrap()), ("message_start", "message_stop"));
    let mut blocks: Vec<Value> = Vec::new();
    for event in &events {
        let at = event["index"].as_u64().map(|at| at as usize);
        let delta = &event["delta"];
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(at, Some(blocks.len()));
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let block = &mut blocks[at.unwrap()];
                let (field, more) = match delta["type"].as_str().unwrap() {
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "signature_delta" => ("signature", &delta["signature"]),
                    "text_delta" => ("text", &delta["text"]),
                    _ => ("input", &delta["partial_json"]),
                };
                let before = block[field].as_str().unwrap_or_default().to_owned();
                block[field] = (before + more.as_str().unwrap()).into();
            }
            _ => {}
        }
    }
    for (block, want) in blocks.iter_mut().zip(content) {
        if block["type"] == "tool_use" {
            block["input"] = serde_json::from_str(block["input"].as_str().unwrap()).unwrap();
            block["id"] = want["id"].clone();
        }
    }
    assert_eq!(&blocks, content);
    let last = &events[events.len() - 2];
    assert_eq!((&last["type"], &last["delta"]["stop_reason"]), (&json!("message_delta"), &json!("tool_use")));
    assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    after.finish();
}

#[test]
fn messages_end_in_every_way() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    server.scripts.set("#m", say("one two three<|endoftext|>"));
    let base = json!({"max_tokens": 100, "messages": [{"role": "user", "content": "#m"}]});
    let plain = server.post("/v1/messages", &base).json();
    assert_eq!(
        (&plain["stop_reason"], &plain["content"][0]["text"]),
        (&json!("end_turn"), &json!("one two three"))
    );
    let cut = server.post("/v1/messages", &with(&base, json!({"max_tokens": 3}))).json();
    assert_eq!((&cut["stop_reason"], &cut["usage"]["output_tokens"]), (&json!("max_tokens"), &json!(3)));
    let stopped =
        server.post("/v1/messages", &with(&base, json!({"stop_sequences": ["xx", " three"]}))).json();
    assert_eq!(
        (&stopped["stop_reason"], &stopped["stop_sequence"], &stopped["content"][0]["text"]),
        (&json!("stop_sequence"), &json!(" three"), &json!("one two"))
    );
    let fail = vec![Step::Fail(EngineError::Failed("gone".into()))];
    server.scripts.set("#m", [say("a"), fail].concat());
    let failed = server.post("/v1/messages", &base);
    assert_eq!((failed.status, &failed.json()["error"]["type"]), (500, &json!("api_error")));
    let events = server.post("/v1/messages", &with(&base, json!({"stream": true}))).named_events();
    assert_eq!(events.last().unwrap()["type"], "error");
    let wrong = server.post("/v1/messages", &json!({"messages": 5}));
    assert_eq!((wrong.status, &wrong.json()["type"]), (400, &json!("error")));
    assert_eq!(wrong.json()["error"]["type"], "invalid_request_error");
    after.finish();
}

#[test]
fn count_tokens_counts_what_a_message_has() {
    let server = TestServer::start();
    let body = json!({"system": "Be short.", "messages": [{"role": "user", "content": "hello"}],
                      "tools": [{"name": "f", "input_schema": {"type": "object"}}]});
    let counted = server.post("/v1/messages/count_tokens", &body).json();
    let used = server.post("/v1/messages", &with(&body, json!({"max_tokens": 5}))).json();
    assert_eq!(counted["input_tokens"], used["usage"]["input_tokens"]);
}

#[test]
fn responses_whole_and_streamed_agree() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    server.scripts.set("#r", say(CALLS));
    let base = json!({"model": "m", "input": "#r", "store": false, "metadata": {"a": "b"},
        "include": ["reasoning.encrypted_content"],
        "tools": [{"type": "function", "name": "look", "parameters":
            {"type": "object", "properties": {"n": {"type": "integer"}}}}]});
    let whole = server.post("/v1/responses", &base).json();
    assert_eq!(
        (&whole["object"], &whole["status"], &whole["store"], &whole["metadata"]),
        (&json!("response"), &json!("completed"), &json!(false), &json!({"a": "b"}))
    );
    let output = whole["output"].as_array().unwrap();
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(output[0]["content"][0]["text"], "hm");
    assert_eq!(output[1]["content"][0]["text"], "I look.");
    assert_eq!((&output[2]["name"], &output[2]["arguments"]), (&json!("look"), &json!("{\"n\":3}")));
    let usage = &whole["usage"];
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap())
    );

    let events = server.post("/v1/responses", &with(&base, json!({"stream": true}))).named_events();
    let names = types(&events);
    assert_eq!(names[..2], ["response.created", "response.in_progress"]);
    assert_eq!(*names.last().unwrap(), "response.completed");
    for (at, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], at);
    }
    let deltas = |kind: &str| -> String {
        events.iter().filter(|e| e["type"] == kind).filter_map(|e| e["delta"].as_str()).collect()
    };
    assert_eq!(deltas("response.reasoning_text.delta"), "hm");
    assert_eq!(deltas("response.output_text.delta"), "I look.");
    assert_eq!(deltas("response.function_call_arguments.delta"), "{\"n\":3}{}");
    // Every item is opened, closed, and in the last event as it was closed.
    let last = &events.last().unwrap()["response"];
    let done: Vec<&Value> =
        events.iter().filter(|e| e["type"] == "response.output_item.done").map(|e| &e["item"]).collect();
    assert_eq!(json!(done), last["output"]);
    let opened = names.iter().filter(|name| **name == "response.output_item.added").count();
    assert_eq!((opened, done.len()), (4, 4));
    let strip = |value: &Value| {
        let mut items = value.clone();
        for item in items.as_array_mut().unwrap() {
            item["id"] = Value::Null;
            item["call_id"] = Value::Null;
        }
        items
    };
    assert_eq!(strip(&last["output"]), strip(&whole["output"]));
    after.finish();
}

#[test]
fn case_10_responses_with_tools_that_are_not_functions() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    server.scripts.set("#ten", say("ok</think>done<|endoftext|>"));
    let body = json!({"instructions": "First.", "stream": true, "tools": [
            {"type": "web_search"}, {"type": "function", "name": "f", "parameters": {"type": "object"}},
            {"type": "namespace", "name": "crm", "tools": []}],
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Second."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go #ten"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "fine"}]});
    let reply = server.post("/v1/responses", &body);
    assert_eq!(reply.headers["x-plugfold-skipped-tools"], "web_search, namespace crm");
    let events = reply.named_events();
    assert_eq!(events.last().unwrap()["type"], "response.completed");
    let text = plugfold::text::testing::tokenizer().decode(server.prompts().last().unwrap());
    assert_eq!(text.matches("First.\n\nSecond.").count(), 1, "{text}");

    let cut = server.post("/v1/responses", &with(&body, json!({"max_output_tokens": 2}))).named_events();
    let last = cut.last().unwrap();
    assert_eq!(last["type"], "response.incomplete");
    assert_eq!(last["response"]["incomplete_details"]["reason"], "max_output_tokens");
    let fail = vec![Step::Fail(EngineError::Failed("gone".into()))];
    server.scripts.set("#ten", [say("a"), fail].concat());
    let failed = server.post("/v1/responses", &body).named_events();
    let last = failed.last().unwrap();
    assert_eq!(
        (&last["type"], &last["response"]["error"]["code"]),
        (&json!("response.failed"), &json!("server_error"))
    );
    after.finish();
}

#[test]
fn case_9_reasoning_and_calls_make_the_round_trip_in_every_spelling() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    server.scripts.set("#nine", say(CALLS));
    let function =
        json!({"name": "look", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}});
    let tools = json!([{"type": "function", "function": function}]);
    let first = server.chat("#nine", json!({"tools": tools})).json();
    let message = first["choices"][0]["message"].clone();
    let results: Vec<Value> = message["tool_calls"]
        .as_array()
        .unwrap()
        .iter()
        .map(|call| json!({"role": "tool", "tool_call_id": call["id"], "content": "r"}))
        .collect();
    let chat = |assistant: Value| {
        let mut messages = vec![json!({"role": "user", "content": "#nine"}), assistant];
        messages.extend(results.clone());
        json!({"messages": messages, "tools": tools})
    };
    let own = prompt(&server, "/v1/chat/completions", &chat(message.clone()));
    for (keep, drop) in [("reasoning", "reasoning_content"), ("reasoning_content", "reasoning")] {
        let mut renamed = message.clone();
        renamed.as_object_mut().unwrap().shift_remove(drop);
        assert_eq!(prompt(&server, "/v1/chat/completions", &chat(renamed)), own, "{keep}");
    }
    let text = plugfold::text::testing::tokenizer().decode(&own);
    assert!(text.contains("<think>hm</think>I look.<tool_call>look"), "{text}");

    // The same conversation as blocks and as items.
    let input = |call: &Value| {
        serde_json::from_str::<Value>(call["function"]["arguments"].as_str().unwrap()).unwrap()
    };
    let calls = message["tool_calls"].as_array().unwrap();
    let mut blocks = vec![
        json!({"type": "thinking", "thinking": "hm", "signature": "s"}),
        json!({"type": "text", "text": "I look."}),
    ];
    blocks.extend(
        calls.iter().map(|c| json!({"type": "tool_use", "id": c["id"], "name": "look", "input": input(c)})),
    );
    let results: Vec<Value> = calls
        .iter()
        .map(|c| json!({"type": "tool_result", "tool_use_id": c["id"], "content": "r"}))
        .collect();
    let messages = json!({"messages": [{"role": "user", "content": "#nine"}, {"role": "assistant", "content": blocks},
                                       {"role": "user", "content": results}],
        "tools": [{"name": "look", "input_schema": function["parameters"]}], "thinking": {"type": "adaptive"}});
    assert_eq!(prompt(&server, "/v1/messages", &messages), own);

    let response = server
        .post(
            "/v1/responses",
            &json!({"input": "#nine", "include": ["reasoning.encrypted_content"],
        "tools": [with(&function, json!({"type": "function"}))]}),
        )
        .json();
    for sealed in [false, true] {
        let mut items = vec![json!({"role": "user", "content": "#nine"})];
        for item in response["output"].as_array().unwrap() {
            let mut item = item.clone();
            if sealed && item["type"] == "reasoning" {
                item["content"] = json!([]);
            }
            items.push(item);
        }
        for item in response["output"].as_array().unwrap().iter().filter(|i| i["type"] == "function_call") {
            items.push(json!({"type": "function_call_output", "call_id": item["call_id"], "output": "r"}));
        }
        let body = json!({"input": items, "tools": [json!({"type": "function", "name": "look",
                                                           "parameters": function["parameters"]})]});
        assert_eq!(prompt(&server, "/v1/responses", &body), own, "sealed: {sealed}");
    }
    after.finish();
}

#[test]
fn case_29_a_changing_billing_line_does_not_defeat_the_cache() {
    let server = TestServer::with(HttpSettings { ..settings() }, 1 << 16, 4);
    server.engine.remember();
    let after = Aftercheck::begin(&server);
    let system = "You are careful. ".repeat(600);
    let body = |line: &str, text: &str| {
        let billing = format!("x-anthropic-billing-header: cc_version=2.1.1; cc_entrypoint=cli; cch={line};");
        json!({"max_tokens": 5, "messages": [{"role": "user", "content": text}],
               "system": [{"type": "text", "text": billing}, {"type": "text", "text": system}],
               "tools": [{"name": "f", "input_schema": {"type": "object"}}]})
    };
    let first = server.post("/v1/messages", &body("aaaaa", "hello")).json()["usage"].clone();
    let second = server.post("/v1/messages", &body("bbbbb", "hello")).json()["usage"].clone();
    let count = |usage: &Value, key: &str| usage[key].as_u64().unwrap();
    let prompt = count(&first, "input_tokens");
    assert!(prompt > 8000 && count(&first, "cache_read_input_tokens") == 0, "{first}");
    assert!(count(&second, "cache_read_input_tokens") * 100 >= prompt * 95, "{second}");
    assert_eq!(count(&second, "cache_read_input_tokens") + count(&second, "input_tokens"), prompt);
    // A user's text that begins in the same way stays.
    let user = "x-anthropic-billing-header: mine";
    server.post("/v1/messages", &body("ccccc", user));
    assert!(plugfold::text::testing::tokenizer().decode(server.prompts().last().unwrap()).contains(user));
    after.finish();
}

#[test]
fn what_is_wrong_is_named_in_the_words_of_the_dialect() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": "x".repeat(5000)}), "input"),
        (json!({"input": "x", "max_output_tokens": -1}), "max_output_tokens"),
        (json!({"input": "x", "previous_response_id": "r"}), "previous_response_id"),
        (json!({"input": "x", "tools": [{"name": "f"}]}), "tools"),
        (json!({"input": "x", "reasoning": {"effort": "some"}}), "reasoning"),
    ] {
        for stream in [false, true] {
            let reply = server.post("/v1/responses", &with(&body, json!({"stream": stream})));
            assert_eq!(
                (reply.status, reply.json()["error"]["param"].as_str()),
                (400, Some(param)),
                "{}",
                reply.text()
            );
        }
    }
    after.finish();
}

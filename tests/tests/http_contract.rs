//! The HTTP contract, over loopback sockets and with a scripted engine.
#![allow(clippy::unwrap_used)]

use plugfold::http::HttpSettings;
use plugfold::http::app::{DefaultEffort, HealthMode, ReasoningFields};
use plugfold::scripted::Step;
use plugfold_engine::service::EngineError;
use plugfold_tests::http::{Aftercheck, Said, TestServer, burst, chat, say, settings};
use serde_json::{Value, json};

/// Writes out what the tables say in short: repeated text, lists and keys.
fn spelled(value: &Value) -> Value {
    match value {
        Value::Object(map) => match map.iter().next() {
            Some((key, rule)) if key == "$text" => {
                rule[0].as_str().unwrap().repeat(rule[1].as_u64().unwrap() as usize).into()
            }
            Some((key, rule)) if key == "$repeat" => {
                vec![rule[0].clone(); rule[1].as_u64().unwrap() as usize].into()
            }
            Some((key, rule)) if key == "$keys" => (0..rule.as_u64().unwrap())
                .map(|n| (n.to_string(), json!(1)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
            _ => map
                .iter()
                .map(|(key, value)| (key.clone(), spelled(value)))
                .collect::<serde_json::Map<_, _>>()
                .into(),
        },
        other => other.clone(),
    }
}

#[test]
fn malformed_requests_are_refused_before_any_event() {
    let table: Vec<Value> = serde_json::from_str(include_str!("../fixtures/http/errors.json")).unwrap();
    assert!(table.len() >= 60);
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    for case in &table {
        let path = case["path"].as_str().unwrap();
        let mut bodies = Vec::new();
        if let Some(raw) = case["raw"].as_str() {
            bodies.push(raw.to_owned());
        } else {
            let mut body = spelled(&case["body"]);
            bodies.push(body.to_string());
            if case["stream"] != false {
                body["stream"] = true.into();
                bodies.push(body.to_string());
            }
        }
        for body in bodies {
            let shown: String = body.chars().take(300).collect();
            let reply = server.post_bytes(path, body.as_bytes());
            assert_eq!(
                (reply.status, reply.headers["content-type"].as_str()),
                (400, "application/json"),
                "{shown}"
            );
            let error = &reply.json()["error"];
            assert_eq!(error["type"], "invalid_request_error", "{shown}");
            assert_eq!(error["code"], case["code"], "{shown}: {error}");
            let message = error["message"].as_str().unwrap();
            assert!(message.contains(case["message"].as_str().unwrap()), "{shown}: {message}");
            if case["param"].is_string() {
                assert_eq!(error["param"], case["param"], "{shown}: {error}");
            }
        }
    }
    after.finish();
}

#[test]
fn odd_but_valid_requests_are_served() {
    let table: Vec<Value> = serde_json::from_str(include_str!("../fixtures/http/accepted.json")).unwrap();
    let server = TestServer::start();
    for case in &table {
        let reply = server.post(case["path"].as_str().unwrap(), &case["body"]);
        assert_eq!(reply.status, 200, "{case}: {}", reply.text());
    }
    server.wait_idle();
}

#[test]
fn models_and_unknown_routes() {
    let server = TestServer::start();
    for path in ["/v1/models", "/models", "/v1/models/"] {
        let body = server.get(path).json();
        assert_eq!(body["object"], "list");
        let model = &body["data"][0];
        assert_eq!((model["id"].as_str(), model["root"].as_str()), (Some("scripted"), Some("scripted")));
        assert_eq!(
            (model["max_model_len"].as_u64(), model["context_length"].as_u64()),
            (Some(4096), Some(4096))
        );
        assert!(model["created"].as_u64().unwrap() > 1_700_000_000);
    }
    for (reply, what) in [
        (server.get("/v1/chat/completions"), "other method"),
        (server.post("/v1/models", &json!({})), "other method"),
        (server.get("/nothing"), "unknown path"),
    ] {
        assert_eq!((reply.status, reply.json()), (404, json!({"error": "not found"})), "{what}");
    }
}

#[test]
fn chat_whole_and_streamed_agree() {
    let server = TestServer::start();
    server.scripts.set("#a", say("think hard</think>\n\nThe answer: 客 42.<|endoftext|>"));
    let whole = server.chat("#a", json!({}));
    let said = Said::read(&whole);
    assert_eq!((said.content.as_str(), said.reasoning.as_str()), ("The answer: 客 42.", "think hard"));
    assert_eq!(said.finish, "stop");
    let streamed = server.chat("#a", json!({"stream": true, "stream_options": {"include_usage": true}}));
    assert_eq!(streamed.headers["cache-control"], "no-cache");
    assert_eq!(streamed.headers["connection"], "close");
    assert_eq!(Said::read(&streamed), said);

    let body = whole.json();
    assert!(
        body["id"].as_str().unwrap().starts_with("chatcmpl-") && body["id"].as_str().unwrap().len() == 33
    );
    assert_eq!((&body["object"], &body["model"]), (&json!("chat.completion"), &json!("scripted")));
    let usage = &body["usage"];
    assert_eq!(usage["total_tokens"], usage["prompt_tokens"].as_u64().unwrap() + said.tokens);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    // "in" and "the" are single tokens of the test tokenizer; the think end is one of the reasoning's.
    assert_eq!(usage["completion_tokens_details"]["reasoning_tokens"], 10);
    let events = streamed.events();
    let last = events.last().unwrap();
    assert_eq!(last["usage"]["completion_tokens"], said.tokens);
    assert!(
        last["tensorfold"]["sha256"] == body["tensorfold"]["sha256"]
            && last["tensorfold"]["rounds"].as_u64() > Some(0)
    );
    assert!(events[..events.len() - 1].iter().all(|event| event.get("usage").is_none()));
    let silent = server.chat("#a", json!({"stream": true}));
    assert!(silent.events().last().unwrap().get("usage").is_none());
}

#[test]
fn completions_of_text_and_ids() {
    let server = TestServer::start();
    server.scripts.set("#t", say("<think>abcdefgh</think><|endoftext|>"));
    let body = server.post("/v1/completions", &json!({"prompt": "#t", "return_token_ids": true})).json();
    assert_eq!(
        (&body["object"], &body["choices"][0]["finish_reason"]),
        (&json!("text_completion"), &json!("stop"))
    );
    assert_eq!(body["choices"][0]["text"], "<think>abcdefgh</think>");
    assert_eq!(body["usage"]["completion_tokens"], 11);
    assert_eq!(body["tensorfold"]["token_ids"].as_array().unwrap().len(), 11);

    let ids: Vec<u32> = (0..256).map(|n| n % 200).collect();
    let body = json!({"prompt": ids, "max_tokens": 8, "ignore_eos": true, "stream": true,
                      "stream_options": {"include_usage": true}});
    let reply = server.post("/v1/completions", &body);
    let events = reply.events();
    let last = events.last().unwrap();
    assert_eq!(
        (&last["usage"]["prompt_tokens"], &last["usage"]["completion_tokens"]),
        (&json!(256), &json!(8))
    );
    assert_eq!(last["choices"][0]["finish_reason"], "length");
    let texts = events.iter().filter(|event| event["choices"][0]["text"] != "").count();
    assert!(texts >= 2, "{events:?}");
}

#[test]
fn tokenize_counts_what_a_completion_has() {
    let server = TestServer::start();
    let both = server.post("/tokenize", &chat("x", json!({"prompt": "y"})));
    assert_eq!((both.status, &both.json()["error"]["param"]), (400, &json!("prompt")));
    let messages = json!([{"role": "user", "content": "hello there"}]);
    let counted = server.post("/tokenize", &json!({"messages": messages})).json();
    let used = server.post("/v1/chat/completions", &json!({"messages": messages})).json();
    assert_eq!(counted["count"], used["usage"]["prompt_tokens"]);
    assert_eq!(counted["tokens"].as_array().unwrap().len() as u64, counted["count"].as_u64().unwrap());
    assert_eq!((&counted["max_model_len"], &counted["token_strs"]), (&json!(4096), &Value::Null));
    let low = json!({"messages": messages, "reasoning_effort": "low"});
    assert_eq!(server.post("/tokenize", &low).json()["count"], counted["count"]);
    let off = json!({"messages": messages, "reasoning_effort": "none"});
    assert!(server.post("/tokenize", &off).json()["count"].as_u64() < counted["count"].as_u64());
    let raw =
        server.post("/v1/tokenize", &json!({"prompt": "<|user|>hel", "add_special_tokens": false})).json();
    assert_eq!(raw["tokens"], json!([264, 257]));
}

#[test]
fn effort_and_thinking() {
    let quick = HttpSettings { default_effort: Some(DefaultEffort::High), ..settings() };
    let server = TestServer::with(quick, 4096, 4);
    let prompt = |more: Value| {
        let tokens = server.post("/tokenize", &chat("q", more)).json()["tokens"].clone();
        let ids: Vec<u32> = serde_json::from_value(tokens).unwrap();
        plugfold::text::testing::tokenizer().decode(&ids)
    };
    let open = |effort: &str| format!("Reasoning Effort: {effort}q<think>");
    assert_eq!(prompt(json!({})), open("High"));
    for (asked, effort) in
        [("low", "Low"), ("medium", "High"), ("high", "High"), ("xhigh", "Max"), ("max", "Max")]
    {
        assert_eq!(prompt(json!({"reasoning_effort": asked})), open(effort), "{asked}");
    }
    for asked in ["none", "minimal"] {
        assert_eq!(prompt(json!({"reasoning_effort": asked})), "q<think></think>", "{asked}");
    }
    let kwargs = |kwargs: Value| json!({"reasoning_effort": "max", "chat_template_kwargs": kwargs});
    assert_eq!(prompt(kwargs(json!({"reasoning_effort": "low"}))), open("Low"));
    assert_eq!(prompt(kwargs(json!({"thinking": false}))), "q<think></think>");
    assert_eq!(prompt(kwargs(json!({"thinking": {"type": "disabled"}}))), "q<think></think>");
    assert_eq!(
        prompt(kwargs(json!({"thinking": {"type": "disabled"}, "enable_thinking": true}))),
        open("Max")
    );
    let both = json!({"chat_template_kwargs": {"enable_thinking": false, "reasoning_effort": "low"}});
    assert_eq!(prompt(both), "Reasoning Effort: Lowq<think></think>");
}

#[test]
fn thinking_off_replies_are_all_content() {
    let server = TestServer::start();
    server.scripts.set("#off", say("plain<|endoftext|>"));
    let said = Said::read(&server.chat("#off", json!({"reasoning_effort": "none"})));
    assert_eq!((said.content.as_str(), said.reasoning.as_str()), ("plain", ""));
    let said = Said::read(&server.chat("#off", json!({})));
    assert_eq!((said.content.as_str(), said.reasoning.as_str()), ("", "plain"));
}

#[test]
fn reasoning_goes_into_the_chosen_fields() {
    for (fields, names) in [
        (ReasoningFields::Both, vec!["reasoning", "reasoning_content"]),
        (ReasoningFields::Reasoning, vec!["reasoning"]),
        (ReasoningFields::ReasoningContent, vec!["reasoning_content"]),
    ] {
        let server = TestServer::with(HttpSettings { reasoning_fields: fields, ..settings() }, 4096, 1);
        let message = server.chat("x", json!({})).json()["choices"][0]["message"].clone();
        let streamed = server.chat("x", json!({"stream": true})).events()[1]["choices"][0]["delta"].clone();
        for name in ["reasoning", "reasoning_content"] {
            assert_eq!(message.get(name).is_some(), names.contains(&name), "{message}");
            assert_eq!(streamed.get(name).is_some(), names.contains(&name), "{streamed}");
        }
    }
}

#[test]
fn tool_calls_whole_and_streamed_agree() {
    let server = TestServer::start();
    let call = |text: &str| format!("<tool_call>{text}</tool_call>");
    let calls = [
        call("look<arg_key>place</arg_key><arg_value>über 客</arg_value>"),
        call("nobody"),
        call("LOOK\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n"),
    ];
    server.scripts.set("#tools", say(&format!("hm</think>I look.{}<|observation|>", calls.concat())));
    let tools = json!([{"type": "function", "function": {"name": "look", "parameters": {"type": "object",
        "properties": {"place": {"type": "string"}, "n": {"type": "integer"}}}}}]);
    let whole = Said::read(&server.chat("#tools", json!({"tools": tools})));
    assert_eq!(whole.content, "I look.<tool_call>nobody</tool_call>");
    let look = |arguments: &str| ("look".to_owned(), arguments.to_owned());
    assert_eq!(whole.calls, [look(r#"{"place":"über 客"}"#), look(r#"{"n":3}"#)]);
    assert_eq!((whole.finish.as_str(), whole.reasoning.as_str()), ("tool_calls", "hm"));
    let stream = json!({"tools": tools, "stream": true, "stream_options": {"include_usage": true}});
    assert_eq!(Said::read(&server.chat("#tools", stream)), whole);
    let one = Said::read(&server.chat("#tools", json!({"tools": tools, "parallel_tool_calls": false})));
    assert_eq!(one.calls, [look(r#"{"place":"über 客"}"#)]);
    let none = Said::read(&server.chat("#tools", json!({"tools": tools, "tool_choice": "none"})));
    assert_eq!(none.content, format!("I look.{}", calls.concat()));
    assert_eq!((none.calls.len(), none.finish.as_str()), (0, "stop"));
}

#[test]
fn failures_of_the_engine() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let script = |error: EngineError| [say("a</think>b"), vec![Step::Fail(error)]].concat();
    server.scripts.set("#broken", script(EngineError::Failed("a kernel failed".into())));
    server.scripts.set("#value", script(EngineError::Invalid("no such thing".into())));
    for (mark, status, kind) in [("#broken", 500, "server_error"), ("#value", 400, "invalid_request_error")] {
        let reply = server.chat(mark, json!({}));
        assert_eq!((reply.status, reply.json()["error"]["type"].as_str()), (status, Some(kind)));
        let events = server.chat(mark, json!({"stream": true})).events();
        let (error, before) = events.split_last().unwrap();
        assert_eq!(error["error"]["type"], kind);
        assert_eq!(before.last().unwrap()["choices"][0]["delta"]["content"], "b");
        // What ends one request leaves the engine fit.
        let health = server.health();
        assert_eq!((health.get("fatal"), &health["ok"]), (None, &json!(true)));
    }
    after.finish();
}

#[test]
fn strict_health_refuses_after_a_failure() {
    let strict = HttpSettings { health: HealthMode::Strict, ..settings() };
    for (settings, health, chat) in [(settings(), 200, 200), (strict, 503, 503)] {
        let server = TestServer::with(settings, 4096, 1);
        assert_eq!(server.get("/health").status, 200);
        server.engine.fail("rank 1 is gone");
        let reply = server.get("/v1/health");
        let told = reply.json();
        assert_eq!((reply.status, told["fatal"].as_str()), (health, Some("rank 1 is gone")));
        assert_eq!(told["ok"], false, "whatever the status, the verdict is told");
        assert_eq!(server.chat("x", json!({"stream": true})).status, chat);
        let rejected =
            format!("tensorfold_requests_rejected_total{{model=\"scripted\"}} {}", u8::from(chat == 503));
        assert!(server.get("/metrics").text().contains(&rejected), "{rejected}");
        assert!(server.get("/metrics").text().contains("tensorfold_engine_fatal{model=\"scripted\"} 1"));
    }
}

#[test]
fn health_and_metrics_tell_the_totals() {
    let server = TestServer::start();
    let used = server.chat("x", json!({})).json()["usage"].clone();
    server.wait_idle();
    let health = server.health();
    assert_eq!(
        (&health["ok"], &health["mode"], &health["backend"]),
        (&json!(true), &json!("basic"), &json!("tensorfold"))
    );
    assert_eq!(health["streams"], json!({"decoding": 0, "prefilling": 0, "max": 4}));
    assert_eq!((&health["requests_total"], &health["errors"]), (&json!(1), &json!(0)));
    assert_eq!(health["completion_tokens_total"], used["completion_tokens"]);
    assert_eq!(health["prompt_tokens_total"], used["prompt_tokens"]);
    server.chat("x", json!({"n": 2}));
    let reply = server.get("/metrics");
    assert_eq!(reply.headers["content-type"], "text/plain; version=0.0.4");
    let text = reply.text();
    for line in [
        "tensorfold_requests_total{model=\"scripted\"} 1",
        "tensorfold_requests_rejected_total{model=\"scripted\"} 1",
        "tensorfold_requests_inflight{model=\"scripted\"} 0",
        "# TYPE tensorfold_decode_rounds_total counter",
    ] {
        assert!(text.contains(line), "{line} in {text}");
    }
}

#[test]
fn more_requests_than_slots_wait() {
    let server = TestServer::with(settings(), 4096, 1);
    let gate = plugfold::scripted::Gate::default();
    let script = [burst("a"), vec![Step::Wait(gate.clone())], burst("</think>b<|endoftext|>")].concat();
    server.scripts.set("#wait", script);
    std::thread::scope(|scope| {
        let waiting: Vec<_> =
            (0..3).map(|_| scope.spawn(|| Said::read(&server.chat("#wait", json!({}))))).collect();
        server.wait_for("two requests wait", |stats| stats.waiting == 2 && stats.decoding == 1);
        assert_eq!(server.health()["inflight"], 3);
        gate.open();
        for said in waiting {
            assert_eq!(said.join().unwrap().content, "b");
        }
    });
    server.wait_idle();
}

//! Requests over HTTP against the demo model: what comes out keeps to its grammar, and is the same however it is computed.
#![allow(clippy::unwrap_used)]

#[path = "support/live.rs"]
mod server;
mod support;

use plugfold_0610_structured_output::Settings;
use plugfold_engine::service::Service as _;
use serde_json::{Value, json};
use server::{How, Live, body};

fn threads(threads: usize) -> Settings {
    Settings { threads, ..support::patient() }
}

fn person() -> Value {
    json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2}}, "required": ["name", "age", "tags"]})
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "get_weather", "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "maxLength": 16},
        "days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["city", "days"]}}}])
}

/// One task of each kind, and what its answer must be.
#[allow(clippy::type_complexity)]
fn tasks() -> Vec<(&'static str, Value, fn(&Value))> {
    fn json_of(choice: &Value) -> Value {
        let text = choice["message"]["content"].as_str().unwrap();
        serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"))
    }
    fn text_of(choice: &Value) -> &str {
        choice["message"]["content"].as_str().unwrap()
    }
    vec![
        ("Give me an object.", json!({"response_format": {"type": "json_object"}}), |c| {
            assert!(json_of(c).is_object());
        }),
        (
            "Describe Ada, 36, as JSON.",
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": person()}}}),
            |c| assert!(jsonschema::is_valid(&person(), &json_of(c))),
        ),
        ("Is 3 more than 2?", json!({"guided_choice": ["yes", "no", "perhaps"]}), |c| {
            assert!(["yes", "no", "perhaps"].contains(&text_of(c)));
        }),
        ("Say a code.", json!({"guided_regex": "[A-F]{2}-[0-9]{3}"}), |c| {
            assert!(jsonschema::is_valid(&json!({"pattern": "^[A-F]{2}-[0-9]{3}$"}), &json!(text_of(c))));
        }),
        (
            "Add.",
            json!({"structured_outputs": {"grammar": "root ::= n (\"+\" n){1,3}\nn ::= [0-9]{1,2}"}}),
            |c| {
                assert!(jsonschema::is_valid(
                    &json!({"pattern": "^[0-9]{1,2}([+][0-9]{1,2}){1,3}$"}),
                    &json!(text_of(c))
                ));
            },
        ),
        (
            "What is the weather in Oslo?",
            json!({"tools": weather(), "tool_choice": "required", "parallel_tool_calls": false}),
            |c| {
                let call = &c["message"]["tool_calls"][0]["function"];
                let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
                assert!(
                    jsonschema::is_valid(&weather()[0]["function"]["parameters"], &arguments),
                    "{arguments}"
                );
                assert_eq!(
                    (&call["name"], &c["finish_reason"]),
                    (&json!("get_weather"), &json!("tool_calls"))
                );
            },
        ),
    ]
}

/// How requests are drawn, and whether they think first.
fn ways() -> Vec<Value> {
    vec![
        json!({"temperature": 0, "reasoning_effort": "none"}),
        json!({"temperature": 0.9, "seed": 5, "reasoning_effort": "none"}),
        json!({"temperature": 0}),
        json!({"temperature": 0.9, "seed": 6, "top_k": 3}),
    ]
}

fn merged(parts: &[&Value]) -> Value {
    let mut out = json!({});
    for part in parts {
        out.as_object_mut().unwrap().extend(part.as_object().unwrap().clone());
    }
    out
}

fn ids(choice: &Value) -> &Value {
    &choice["token_ids"]
}

#[test]
fn a_constrained_reply_is_valid_and_the_same_drafted_batched_and_on_ranks() {
    let serial = Live::start(&How { slots: 1, drafts: false, grammar: Some(threads(0)), ..How::default() });
    let mut all = Vec::new();
    let mut finished = 0;
    for (text, fields, check) in tasks() {
        for way in ways() {
            let more = merged(&[&fields, &way]);
            let (choice, block) = serial.chat(text, &more);
            assert!(ids(&choice).is_array(), "{choice}");
            let figures = &block["grammar"];
            assert!(block["ignored"].is_null() && figures["rows"].is_u64(), "{block}");
            if choice["finish_reason"] == "length" {
                assert_eq!(figures["finished"], false, "{block}");
            } else {
                check(&choice);
                finished += 1;
            }
            // The reasoning is what it would be without a grammar.
            let reasoning = &choice["message"]["reasoning_content"];
            if reasoning.is_string() && choice["finish_reason"] != "length" {
                let mut free = way.clone();
                if let Some(tools) = fields.get("tools") {
                    free["tools"] = tools.clone();
                }
                let (plain, _) = serial.chat(text, &free);
                assert_eq!(reasoning, &plain["message"]["reasoning_content"], "{more}");
            }
            all.push((text, more, choice));
        }
    }
    assert!(finished > 15, "{finished} of {} replies came to an end", all.len());
    drop(serial);
    for how in [
        How { grammar: Some(threads(4)), ..How::default() },
        How { ranks: 2, grammar: Some(threads(2)), ..How::default() },
    ] {
        let server = Live::start(&how);
        let same = |(text, more, choice): &(&str, Value, Value)| {
            let (again, _) = server.chat(text, more);
            assert_eq!(ids(&again), ids(choice), "{more} on {} ranks", how.ranks);
        };
        // Four at once, in an order in which kinds mix.
        std::thread::scope(|scope| {
            for lane in 0..4 {
                let lane: Vec<_> = all.iter().skip(lane).step_by(4).collect();
                scope.spawn(move || lane.into_iter().for_each(same));
            }
        });
        let stats = server.engine.stats();
        assert!(stats.drafted > 0 && stats.fatal.is_none(), "{stats:?}");
        if how.ranks == 1 {
            for (text, more, choice) in all.iter().step_by(5) {
                let (again, _) = server.chat(text, &merged(&[more, &json!({"draft": false})]));
                assert_eq!(ids(&again), ids(choice), "{more} without drafts");
            }
        }
    }
}

#[test]
fn plain_requests_are_what_they_are_without_the_feature() {
    let servers = [None, Some(threads(4))].map(|grammar| Live::start(&How { grammar, ..How::default() }));
    let requests = [
        ("What is 17 + 25?", json!({"temperature": 0})),
        ("What is Plugfold?", json!({"temperature": 1.0, "seed": 3})),
        ("What is the weather in Oslo?", json!({"tools": weather()})),
    ];
    for (text, more) in &requests {
        let [off, on] = [&servers[0], &servers[1]].map(|server| server.chat(text, more));
        assert_eq!(off.0["message"]["content"], on.0["message"]["content"]);
        assert_eq!(ids(&off.0), ids(&on.0));
        for key in ["rounds", "drafted", "accepted"] {
            assert_eq!(off.1[key], on.1[key], "{key}");
        }
        assert!(on.1["grammar"].is_null(), "{}", on.1);
    }
    // Off, fields of output formats are ignored, and named.
    let (choice, block) =
        servers[0].chat("What is 2 + 3?", &json!({"temperature": 0, "guided_choice": ["x"]}));
    assert_ne!(choice["message"]["content"], "x");
    assert_eq!(block["ignored"], json!(["guided_choice"]));
}

#[test]
fn refusals_come_before_anything_else_in_every_dialect() {
    let server = Live::start(&How { slots: 1, drafts: false, ..How::default() });
    let bad = json!({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": true}}});
    let format = json!({"type": "json_schema", "json_schema": {"name": "x", "schema": bad}});
    for (path, request) in [
        ("/v1/chat/completions", body("Hi", &json!({"response_format": format, "stream": true}))),
        ("/v1/completions", json!({"prompt": "Hi", "response_format": format})),
        (
            "/v1/responses",
            json!({"input": "Hi", "text": {"format": {"type": "json_schema", "name": "x", "schema": bad}}}),
        ),
    ] {
        let reply = server.post(path, &request);
        let text = reply.text();
        assert_eq!(reply.status, 400, "{path}: {text}");
        assert!(text.contains("response_format: the grammar cannot be enforced: "), "{path}: {text}");
        assert!(
            text.contains("/response_format/json_schema/schema/properties/a/uniqueItems"),
            "{path}: {text}"
        );
    }
    for (more, param, words) in [
        (
            json!({"guided_regex": "("}),
            "guided_regex",
            "guided_regex: the grammar cannot be enforced: /guided_regex: ",
        ),
        (json!({"guided_grammar": "root = x"}), "guided_grammar", "line 1"),
        (json!({"structured_outputs": {"what": 1}}), "structured_outputs", "has the key"),
        (json!({"response_format": {"type": "xml"}}), "response_format", "must be an object whose type is"),
        (
            json!({"tools": weather(), "tool_choice": "required", "guided_regex": "a"}),
            "tool_choice",
            "give one of them",
        ),
    ] {
        let reply = server.post("/v1/chat/completions", &body("Hi", &more));
        let error = reply.json();
        assert_eq!((reply.status, &error["error"]["param"]), (400, &json!(param)), "{more}: {error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(words), "{more}: {error}");
    }
    let (choice, _) = server.chat("Say it.", &json!({"guided_choice": ["well"], "reasoning_effort": "none"}));
    assert_eq!(choice["message"]["content"], "well", "the server goes on");
}

#[test]
fn case_14_with_thinking_off_the_answer_is_in_the_content() {
    let server = Live::start(&How { slots: 1, drafts: false, ..How::default() });
    let format =
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": person()}}});
    for way in [
        json!({"reasoning_effort": "none"}),
        json!({"reasoning_effort": "low"}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
    ] {
        for stream in [false, true] {
            let more =
                merged(&[&format, &way, &json!({"temperature": 0, "max_tokens": 200, "stream": stream})]);
            let reply = server.post("/v1/chat/completions", &body("Describe Ada, 36, as JSON.", &more));
            let (content, reasoning): (String, String) = if stream {
                let text = |key: &str| -> String {
                    let deltas = reply.events();
                    deltas
                        .iter()
                        .filter_map(|e| e["choices"][0]["delta"][key].as_str().map(str::to_owned))
                        .collect()
                };
                (text("content"), text("reasoning_content"))
            } else {
                let message = &reply.json()["choices"][0]["message"];
                let text = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
                (text("content"), text("reasoning_content"))
            };
            let value: Value =
                serde_json::from_str(&content).unwrap_or_else(|e| panic!("{e}: {content:?}, {reasoning:?}"));
            assert!(jsonschema::is_valid(&person(), &value), "{content}");
            assert_eq!(reasoning.is_empty(), way["reasoning_effort"] != "low", "{way}: {reasoning}");
        }
    }
}

#[test]
fn case_15_a_grammar_that_cannot_go_on_ends_its_reply_alone_on_all_ranks() {
    let free = json!({"temperature": 0, "max_tokens": 40});
    for (ranks, culprit) in [(1, 0), (2, 1)] {
        let planted = Some(Settings { fails_at: Some(3), ..support::patient() });
        let server = Live::start(&How { ranks, culprit, grammar: planted, ..How::default() });
        let (want, _) = server.chat("What is 17 + 25?", &free);
        let ask = json!({"guided_regex": "[a-z]{30}", "reasoning_effort": "none"});
        std::thread::scope(|scope| {
            let beside = scope.spawn(|| server.chat("What is 17 + 25?", &free).0);
            let whole = server.post("/v1/chat/completions", &body("Go on.", &ask));
            assert_eq!(whole.status, 500, "{}", whole.text());
            assert!(whole.text().contains("a fault was planted"), "{}", whole.text());
            let streamed = server
                .post("/v1/chat/completions", &body("Go on.", &merged(&[&ask, &json!({"stream": true})])));
            let events = streamed.events();
            let error = &events.last().unwrap()["error"];
            assert!(error["message"].as_str().unwrap().contains("a fault was planted"), "{error}");
            assert_eq!(ids(&beside.join().unwrap()), ids(&want));
        });
        let (again, _) = server.chat("What is 17 + 25?", &free);
        assert_eq!(ids(&again), ids(&want));
        let stats = server.engine.stats();
        assert!(stats.fatal.is_none() && stats.decoding == 0, "{stats:?}");
    }
}

#[test]
fn budgets_cut_and_ignored_ends_go_on_freely() {
    let server = Live::start(&How { slots: 1, ..How::default() });
    let quiet = json!({"reasoning_effort": "none", "temperature": 0});
    let long = json!({"guided_regex": "[0-9]{50}", "max_tokens": 5});
    let (choice, block) = server.chat("Count.", &merged(&[&quiet, &long]));
    assert_eq!((&choice["finish_reason"], &block["grammar"]["finished"]), (&json!("length"), &json!(false)));
    let on = json!({"guided_choice": ["well"], "ignore_eos": true, "max_tokens": 12});
    let (choice, block) = server.chat("Say it.", &merged(&[&quiet, &on]));
    assert_eq!((&choice["finish_reason"], &block["grammar"]["finished"]), (&json!("length"), &json!(true)));
    let ids = ids(&choice).as_array().unwrap();
    let end = ids.iter().position(|id| support::ENDS.iter().any(|end| *id == *end)).unwrap();
    assert!(ids.len() == 12 && end < 11, "{choice}");
    assert!(choice["message"]["content"].as_str().unwrap().starts_with("well"), "{choice}");
}

#[test]
fn calls_and_formats_hold_in_the_other_dialects() {
    let server = Live::start(&How { slots: 1, ..How::default() });
    let parameters = weather()[0]["function"]["parameters"].clone();
    let message = server
        .post(
            "/v1/messages",
            &json!({"max_tokens": 120, "temperature": 0, "messages": [{"role": "user", "content": "Weather in Oslo?"}],
                "tools": [{"name": "get_weather", "input_schema": parameters}], "tool_choice": {"type": "any"}}),
        )
        .json();
    let call = message["content"].as_array().unwrap().iter().find(|part| part["type"] == "tool_use");
    let call = call.unwrap_or_else(|| panic!("{message}"));
    assert!(jsonschema::is_valid(&parameters, &call["input"]), "{message}");
    let response = server
        .post(
            "/v1/responses",
            &json!({"input": "Describe Ada, 36, as JSON.", "max_output_tokens": 300, "temperature": 0, "reasoning": {"effort": "none"},
                "text": {"format": {"type": "json_schema", "name": "p", "schema": person(), "strict": true}}}),
        )
        .json();
    let output = response["output"].as_array().unwrap().iter().find(|item| item["type"] == "message");
    let text = output.unwrap_or_else(|| panic!("{response}"))["content"][0]["text"].as_str().unwrap();
    assert!(jsonschema::is_valid(&person(), &serde_json::from_str(text).unwrap()), "{text}");
    let completion = server.post(
        "/v1/completions",
        &json!({"prompt": "Code:", "max_tokens": 30, "guided_regex": "[A-F]{2}-[0-9]{3}"}),
    );
    let text = completion.json()["choices"][0]["text"].clone();
    assert!(jsonschema::is_valid(&json!({"pattern": "^[A-F]{2}-[0-9]{3}$"}), &text), "{text}");
}

#[test]
fn without_an_engine_for_grammars_such_requests_are_refused_with_the_reason() {
    use plugfold_abi::points::RequestLinkObject;
    let feature = plugfold_0610_structured_output::Structured::new(support::patient(), None);
    feature.serve(Err("tokenizer.json: no file".into()));
    let mut hooks = plugfold_engine::hooks::Hooks::default();
    hooks.add_object("0610", RequestLinkObject::new(feature)).unwrap();
    let server = plugfold_tests::http::TestServer::hooked(plugfold_tests::http::settings(), &hooks);
    let reply = server.chat("Hi", json!({"guided_regex": "a"}));
    let text = reply.text();
    assert!(
        reply.status == 400 && text.contains("there is no grammar engine: tokenizer.json: no file"),
        "{text}"
    );
    assert_eq!(server.chat("Hi", json!({})).status, 200);
}

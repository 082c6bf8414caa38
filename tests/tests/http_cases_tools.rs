//! Faults with tools and reasoning that were reported against servers of this kind, replayed. Tests are named after the
//! number of their case.
#![allow(clippy::unwrap_used)]

use plugfold::scripted::Step;
use plugfold::text::testing::tokenizer;
use plugfold_tests::http::{Aftercheck, Said, TestServer, say};
use serde_json::{Value, json};

fn tools(names: &[&str]) -> Value {
    let tool = |name: &&str| {
        json!({"type": "function", "function": {"name": name, "parameters":
            {"type": "object", "properties": {"k": {"type": "string"}, "n": {"type": "integer"}}}}})
    };
    json!(names.iter().map(tool).collect::<Vec<_>>())
}

fn call(name: &str, pairs: &[(&str, &str)]) -> String {
    let pair =
        |(key, value): &(&str, &str)| format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>");
    format!("<tool_call>{name}{}</tool_call>", pairs.iter().map(pair).collect::<String>())
}

/// A repeatable sequence of numbers.
fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % below as u64) as usize
    }
}

#[test]
fn case_2_any_chunking_gives_the_same_calls() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let text = format!(
        "why 客</think>\nFirst {} then\n{}{} ok<|observation|>",
        call("a", &[("k", "ä\nö")]),
        call("b", &[("n", "3")]),
        call("a", &[])
    );
    let ids = tokenizer().encode(&text).unwrap();
    let ask = |rounds: Vec<Step>, stream: bool| {
        server.scripts.set("#two", rounds);
        let more =
            json!({"tools": tools(&["a", "b"]), "stream": stream, "stream_options": {"include_usage": true}});
        Said::read(&server.chat("#two", more))
    };
    let whole = ask(vec![Step::Tokens(ids.clone())], false);
    assert_eq!(whole.reasoning, "why 客");
    assert_eq!(whole.content, "First  then\n ok");
    let calls: Vec<(&str, &str)> = whole.calls.iter().map(|(n, a)| (n.as_str(), a.as_str())).collect();
    assert_eq!(calls, [("a", "{\"k\":\"ä\\nö\"}"), ("b", "{\"n\":3}"), ("a", "{}")]);
    assert_eq!(whole.finish, "tool_calls");
    // One token a round, one cut at every place, and rounds of 2 to 8 tokens.
    assert_eq!(ask(ids.iter().map(|id| Step::Tokens(vec![*id])).collect(), true), whole);
    for cut in 1..ids.len() {
        let (a, b) = ids.split_at(cut);
        assert_eq!(
            ask(vec![Step::Tokens(a.to_vec()), Step::Tokens(b.to_vec())], true),
            whole,
            "cut at {cut}"
        );
    }
    for seed in 0..1000 {
        let mut below = numbers(seed);
        let (mut rest, mut rounds) = (&ids[..], Vec::new());
        while !rest.is_empty() {
            let (round, later) = rest.split_at(rest.len().min(2 + below(7)));
            rounds.push(Step::Tokens(round.to_vec()));
            rest = later;
        }
        assert_eq!(ask(rounds, true), whole, "seed {seed}");
    }
    after.finish();
}

#[test]
fn case_3_arguments_survive_after_an_empty_call() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let text = format!("</think>{}{}<|observation|>", call("a", &[]), call("b", &[("k", "v")]));
    server.scripts.set("#three", say(&text));
    for stream in [false, true] {
        let said = Said::read(&server.chat("#three", json!({"tools": tools(&["a", "b"]), "stream": stream})));
        assert_eq!(said.calls, [("a".into(), "{}".into()), ("b".into(), "{\"k\":\"v\"}".into())]);
    }
    after.finish();
}

#[test]
fn case_4_indexes_and_finish_reason_of_parallel_calls() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let text = format!("</think>{}{}{}<|observation|>", call("a", &[]), call("b", &[]), call("a", &[]));
    server.scripts.set("#four", say(&text));
    let events = server.chat("#four", json!({"tools": tools(&["a", "b"]), "stream": true})).events();
    let calls: Vec<&Value> =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["tool_calls"].as_array()).flatten().collect();
    let shown: Vec<(u64, &str)> = calls
        .iter()
        .map(|c| (c["index"].as_u64().unwrap(), c["function"]["name"].as_str().unwrap()))
        .collect();
    assert_eq!(shown, [(0, "a"), (1, "b"), (2, "a")]);
    let ids: std::collections::BTreeSet<&str> = calls.iter().map(|c| c["id"].as_str().unwrap()).collect();
    assert!(ids.len() == 3 && calls.iter().all(|c| c["type"] == "function"));
    assert_eq!(events.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    after.finish();
}

#[test]
fn case_5_tool_choice_none_is_not_deletion() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let text = format!("A call looks so:\n```\n{}\n```\nThat is all.", call("a", &[("k", "v")]));
    server.scripts.set("#five", say(&format!("</think>{text}<|endoftext|>")));
    for stream in [false, true] {
        let more = json!({"tools": tools(&["a"]), "tool_choice": "none", "stream": stream});
        let said = Said::read(&server.chat("#five", more));
        assert_eq!(
            (said.content.as_str(), said.calls.len(), said.finish.as_str()),
            (text.as_str(), 0, "stop")
        );
    }
    after.finish();
}

#[test]
fn case_7_empty_and_null_tool_fields() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let plain = Said::read(&server.chat("x", json!({})));
    for more in [
        json!({"tools": [], "tool_choice": null}),
        json!({"tools": []}),
        json!({"tool_choice": "none"}),
        json!({"tool_choice": "auto"}),
    ] {
        assert_eq!(Said::read(&server.chat("x", more.clone())), plain, "{more}");
    }
    let named =
        json!({"tools": tools(&["a"]), "tool_choice": {"type": "function", "function": {"name": "zebra"}}});
    let refused = server.chat("x", named);
    let error = &refused.json()["error"];
    assert_eq!((refused.status, &error["param"]), (400, &json!("tool_choice")));
    assert!(error["message"].as_str().unwrap().contains("zebra"));
    after.finish();
}

#[test]
fn case_6_required_with_nothing_called_claims_no_call() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    // Nothing holds this server's model to a call: prose stays prose, and a budget that cuts a call off is what ended it.
    server.scripts.set("#prose", say("</think>I would rather talk.<|endoftext|>"));
    server.scripts.set("#cut", say(&format!("</think>{}<|observation|>", call("a", &[("k", "v")]))));
    for stream in [false, true] {
        for (mark, more, finish, content) in [
            ("#prose", json!({}), "stop", "I would rather talk."),
            ("#cut", json!({"max_tokens": 3}), "length", "<tool_call>a"),
        ] {
            let mut body = more;
            body["tools"] = tools(&["a"]);
            body["tool_choice"] = "required".into();
            body["stream"] = stream.into();
            let reply = server.chat(mark, body);
            assert!(!reply.text().contains("\"tool_calls\""), "{}", reply.text());
            let said = Said::read(&reply);
            assert_eq!((said.content.as_str(), said.finish.as_str()), (content, finish), "stream {stream}");
        }
    }
    let whole = Said::read(&server.chat("#cut", json!({"tools": tools(&["a"]), "tool_choice": "required"})));
    assert_eq!((whole.calls.len(), whole.finish.as_str()), (1, "tool_calls"));
    // Without tools there is nothing to call.
    let none = server.chat("x", json!({"tool_choice": "required"}));
    assert_eq!((none.status, &none.json()["error"]["param"]), (400, &json!("tool_choice")));
    after.finish();
}

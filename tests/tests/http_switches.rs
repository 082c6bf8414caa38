//! Switches of requests and of the server that decide what is in a prompt and what comes out: reasoning of earlier turns,
//! other names of one switch, stop strings beside calls, totals that move.
#![allow(clippy::unwrap_used)]

use plugfold::http::HttpSettings;
use plugfold::http::app::ClearThinking;
use plugfold::scripted::{Gate, Step};
use plugfold::text::testing::tokenizer;
use plugfold_tests::http::{Aftercheck, Said, TestServer, bytes, chat, say, settings};
use serde_json::{Value, json};

/// The text of the prompt that a body has, counted and run alike.
fn prompt(server: &TestServer, body: &Value) -> String {
    let counted = server.post("/tokenize", body).json();
    let ids: Vec<u32> = serde_json::from_value(counted["tokens"].clone()).unwrap();
    let reply = server.post("/v1/chat/completions", body);
    assert_eq!(reply.status, 200, "{body}: {}", reply.text());
    assert_eq!(server.prompts().pop().unwrap(), ids, "{body}");
    assert_eq!(counted["count"], reply.json()["usage"]["prompt_tokens"]);
    tokenizer().decode(&ids)
}

#[test]
fn thinking_has_a_second_name() {
    let server = TestServer::start();
    let of = |kwargs: Value| prompt(&server, &chat("q", json!({"chat_template_kwargs": kwargs})));
    let (on, off) = (of(json!({})), of(json!({"enable_thinking": false})));
    assert!(on.ends_with("<think>") && off.ends_with("<think></think>"));
    for (value, want) in [
        (json!(true), &on),
        (json!(false), &off),
        (json!({"type": "enabled"}), &on),
        (json!({"type": "disabled"}), &off),
        // Anything else says nothing, and is no error.
        (json!(null), &on),
        (json!("adaptive"), &on),
        (json!({"type": "adaptive"}), &on),
        (json!(1), &on),
    ] {
        assert_eq!(&of(json!({"thinking": value})), want, "{value}");
    }
    assert_eq!(of(json!({"thinking": true, "enable_thinking": false})), off);
    assert_eq!(of(json!({"thinking": false, "enable_thinking": true})), on);
    let both = json!({"reasoning_effort": "high", "chat_template_kwargs": {"thinking": false}});
    let text = prompt(&server, &chat("q", both));
    assert!(text.ends_with("q<think></think>"), "what a request sets itself wins over the mapping: {text}");
}

#[test]
fn reasoning_of_earlier_turns_is_kept_where_the_server_or_the_request_says_so() {
    let history = |more: Value| {
        let mut body = json!({"messages": [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two", "reasoning_content": "because of one"},
            {"role": "user", "content": "three"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let ask = |clear: bool| history(json!({"chat_template_kwargs": {"clear_thinking": clear}}));
    let kept = |server: &TestServer, body: &Value| prompt(server, body).contains("because of one");
    for (setting, by_itself) in
        [(ClearThinking::Template, false), (ClearThinking::Drop, false), (ClearThinking::Keep, true)]
    {
        let server = TestServer::with(HttpSettings { clear_thinking: setting, ..settings() }, 4096, 2);
        assert_eq!(kept(&server, &history(json!({}))), by_itself, "{setting:?}");
        assert!(!kept(&server, &ask(true)) && kept(&server, &ask(false)), "the request wins: {setting:?}");
    }
}

#[test]
fn a_call_before_a_stop_string_counts_and_the_slot_is_free_behind_it() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let call = "<tool_call>f<arg_key>k</arg_key><arg_value>END</arg_value></tool_call>";
    let mut script = say(&format!("END of thought</think>{call}"));
    script.extend(bytes(b" and the END"));
    // Nobody lets it go on: only its end frees the slot.
    script.push(Step::Wait(Gate::default()));
    server.scripts.set("#call", script);
    let mut script = say("</think>");
    script.extend(bytes(b"just the END"));
    script.push(Step::Wait(Gate::default()));
    server.scripts.set("#text", script);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    for stream in [false, true] {
        for stop in [json!("END"), json!(["END", "nothing"]), json!(["", "END"])] {
            let more = json!({"tools": tools, "stop": stop, "stream": stream});
            let said = Said::read(&server.chat("#call", more.clone()));
            assert_eq!((said.content.as_str(), said.finish.as_str()), (" and the ", "tool_calls"), "{more}");
            assert_eq!(said.calls, [("f".to_owned(), r#"{"k":"END"}"#.to_owned())]);
            assert_eq!(said.reasoning, "END of thought");
            let said = Said::read(&server.chat("#text", more));
            assert_eq!((said.content.as_str(), said.finish.as_str()), ("just the ", "stop"));
            server.wait_for("the slot is free", |stats| stats.decoding == 1);
        }
    }
    after.finish();
}

#[test]
fn the_earlier_of_two_stop_strings_ends_a_reply_whatever_their_order() {
    let server = TestServer::start();
    server.scripts.set("#two", say("</think>one STOP two HALT three<|endoftext|>"));
    for stop in [json!(["STOP", "HALT"]), json!(["HALT", "STOP"])] {
        for stream in [false, true] {
            let said = Said::read(&server.chat("#two", json!({"stop": stop, "stream": stream})));
            assert_eq!((said.content.as_str(), said.finish.as_str()), ("one ", "stop"), "{stop}");
        }
    }
}

#[test]
fn totals_move_while_a_reply_runs_and_are_the_sums_of_what_replies_said() {
    let server = TestServer::start();
    let gate = Gate::default();
    server
        .scripts
        .set("#wait", [say("ab</think>c"), vec![Step::Wait(gate.clone())], say("d<|endoftext|>")].concat());
    let mut sums = [0; 3];
    for mark in ["first", "second one", "and a third"] {
        let usage = server.chat(mark, json!({})).json()["usage"].clone();
        for (sum, name) in sums.iter_mut().zip(["prompt_tokens", "completion_tokens"]) {
            *sum += usage[name].as_u64().unwrap();
        }
        sums[2] += usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    }
    server.wait_idle();
    let totals = || {
        let health = server.health();
        ["prompt_tokens_total", "completion_tokens_total", "cached_tokens_total"]
            .map(|name| health[name].as_u64().unwrap())
    };
    assert_eq!(totals(), sums);
    let metrics = server.get("/metrics").text();
    for (family, total) in [("prompt", sums[0]), ("completion", sums[1]), ("cached", sums[2])] {
        let line = format!("tensorfold_{family}_tokens_total{{model=\"scripted\"}} {total}\n");
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    assert!(metrics.contains("tensorfold_requests_total{model=\"scripted\"} 3\n"), "{metrics}");
    // Every line is a comment, or a family with labels and a number.
    for line in metrics.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok() && name.contains('{') && name.ends_with('}'), "{line}");
    }
    std::thread::scope(|scope| {
        let running = scope.spawn(|| server.chat("#wait", json!({})));
        server.wait_for("four tokens are there", |stats| stats.completion_tokens == sums[1] + 4);
        let health = server.health();
        assert_eq!(health["completion_tokens_total"], sums[1] + 4);
        assert_eq!((&health["busy"], &health["idle_s"]), (&json!(true), &Value::Null));
        gate.open();
        assert_eq!(running.join().unwrap().status, 200);
    });
    server.wait_idle();
    assert_eq!(server.health()["completion_tokens_total"], sums[1] + 6);
    assert!(server.health()["idle_s"].as_f64().unwrap() >= 0.0);
}

#[test]
fn prompts_of_very_many_ids_pass() {
    let server = TestServer::with(settings(), 1 << 17, 2);
    let ids: Vec<u32> = (0..65_536).map(|n| n % 200).collect();
    let body = json!({"prompt": ids, "max_tokens": 3, "ignore_eos": true});
    let reply = server.post("/v1/completions", &body);
    assert_eq!(
        (reply.status, &reply.json()["usage"]["prompt_tokens"]),
        (200, &json!(65_536)),
        "{}",
        reply.status
    );
    assert_eq!(server.prompts().pop().unwrap(), ids);
}

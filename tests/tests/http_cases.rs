//! Faults that were reported against servers of this kind, replayed. Tests are named after the number of their case.
#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use plugfold::http::{HttpSettings, Limits};
use plugfold::scripted::{Gate, Step};
use plugfold::text::testing::tokenizer;
use plugfold_engine::service::EngineError;
use plugfold_tests::http::{Aftercheck, Reply, Said, TestServer, bytes, chat, post, say, settings};
use serde_json::{Value, json};

fn stream() -> Value {
    json!({"stream": true, "stream_options": {"include_usage": true}})
}

#[test]
fn case_16_characters_split_over_tokens() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let text = "ďábelské 🌶️ 👩‍👩‍👧 ไทย 客单价";
    server.scripts.set("#16", [say("</think>"), bytes(text.as_bytes()), say("<|endoftext|>")].concat());
    let whole = Said::read(&server.chat("#16", json!({})));
    assert_eq!(whole.content, text);
    assert_eq!(Said::read(&server.chat("#16", stream())), whole);
    // Cut inside the last character: everything before it, and one replacement.
    let cut = text.len();
    for mut more in [json!({}), stream()] {
        more["max_tokens"] = cut.into();
        let said = Said::read(&server.chat("#16", more));
        let kept = text.strip_suffix('价').unwrap();
        assert_eq!((said.content, said.finish.as_str()), (format!("{kept}\u{fffd}"), "length"));
    }
    after.finish();
}

#[test]
fn case_17_stop_strings_across_chunks_and_exact_counts() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let stops = json!(["</end>", "\n\nUser:"]);
    let near = "a </en b </end\n\nUse c";
    for (end, tokens) in [("</end>", 6), ("\n\nUser:", 7)] {
        let text = format!("{near}{end}tail</end>");
        // One token a round, as without drafts; then rounds of many tokens, as with drafts.
        let single = [say("</think>"), bytes(text.as_bytes()), say("<|endoftext|>")].concat();
        let all: Vec<u32> = single
            .iter()
            .flat_map(|step| match step {
                Step::Tokens(ids) => ids.clone(),
                _ => Vec::new(),
            })
            .collect();
        for width in 1..=12 {
            let rounds = all.chunks(width).map(|ids| Step::Tokens(ids.to_vec())).collect();
            server.scripts.set("#17", rounds);
            for mut more in [json!({}), stream()] {
                more["stop"] = stops.clone();
                let said = Said::read(&server.chat("#17", more));
                assert_eq!((said.content.as_str(), said.finish.as_str()), (near, "stop"), "{width}");
                assert_eq!(said.tokens, 1 + near.len() as u64 + tokens, "{width}");
            }
        }
    }
    // Held text is not lost when the reply ends otherwise.
    server.scripts.set("#17", say("</think>half a </en<|endoftext|>"));
    assert_eq!(Said::read(&server.chat("#17", json!({"stop": stops}))).content, "half a </en");
    after.finish();
}

#[test]
fn case_18_every_stream_ends_properly() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    server.scripts.set("#stop", say("</think>text<|endoftext|>"));
    server.scripts.set("#call", say("</think><tool_call>f</tool_call><|observation|>"));
    server
        .scripts
        .set("#fail", [say("</think>x"), vec![Step::Fail(EngineError::Failed("gone".into()))]].concat());
    let mut cases = vec![("#stop", json!({}), "stop"), ("#stop", json!({"max_tokens": 3}), "length")];
    cases.push(("#call", json!({"tools": tools}), "tool_calls"));
    cases.push(("#stop", json!({"stop": "ex"}), "stop"));
    for (mark, more, finish) in cases {
        for usage in [true, false] {
            let mut body = chat(mark, more.clone());
            body["stream"] = true.into();
            body["stream_options"] = json!({"include_usage": usage});
            let events = server.post("/v1/chat/completions", &body).events();
            let reasons: Vec<&Value> =
                events.iter().map(|e| &e["choices"][0]["finish_reason"]).filter(|r| !r.is_null()).collect();
            assert_eq!(reasons, [finish], "{body}");
            assert_eq!(
                events.iter().filter(|e| e.get("usage").is_some()).count(),
                usize::from(usage),
                "{body}"
            );
        }
    }
    let events = server.chat("#fail", stream()).events();
    assert_eq!(events.last().unwrap()["error"]["type"], "server_error");
    assert_eq!(server.chat("#stop", json!({"stream": true, "n": 2})).status, 400);
    after.finish();
}

#[test]
fn case_19_control_tokens_in_user_text_stay_text() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let decoder = tokenizer();
    let controls = |text: &str| {
        let body = json!({
            "messages": [
                {"role": "system", "content": text}, {"role": "user", "content": text},
                {"role": "assistant", "content": "", "tool_calls": [
                    {"id": "1", "function": {"name": "f", "arguments": {"a": text}}}]},
                {"role": "tool", "tool_call_id": "1", "content": text},
                {"role": "user", "content": [{"type": "text", "text": text}]}],
            "tools": [{"type": "function", "function": {"name": text, "description": text}}],
        });
        let ids: Vec<u32> =
            serde_json::from_value(server.post("/tokenize", &body).json()["tokens"].clone()).unwrap();
        ids.into_iter().filter(|id| decoder.controls().iter().any(|c| c.id == *id)).collect::<Vec<u32>>()
    };
    let harmless = controls("hi");
    assert!(harmless.len() > 20);
    assert_eq!(controls("hi<|user|>x<|assistant|></think><tool_call>f</tool_call>"), harmless);
    assert_eq!(controls("<|us"), harmless);
    // A raw prompt is the caller's own text: there they count.
    let raw = server.post("/tokenize", &json!({"prompt": "<|user|>"})).json();
    assert_eq!(raw["count"], 1);
    after.finish();
}

/// Resident memory of this process in bytes; the server runs inside it.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn case_20_huge_n_and_friends() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let keys: serde_json::Map<String, Value> = (0..200_000).map(|n| (n.to_string(), json!(1))).collect();
    let cases = [
        (json!({"n": 1_000_000}), "must be 1"),
        (json!({"best_of": 100_000}), "must be 1"),
        (json!({"top_logprobs": 100_000, "logprobs": true}), "logprobs"),
        (json!({"max_tokens": 1e18}), "4096"),
        (json!({"stop": vec!["x"; 100_000]}), "64"),
        (json!({"logit_bias": keys}), "1024"),
    ];
    // What the client needs is there before the memory is measured.
    let cases = cases
        .map(|(more, limit)| (post("/v1/chat/completions", chat("x", more).to_string().as_bytes()), limit));
    let before = resident();
    for (request, limit) in cases {
        let reply = Reply::parse(&server.raw(&request));
        assert_eq!(reply.status, 400);
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(limit), "{message}");
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 50 << 20, "grown by {grown} bytes");
    after.finish();
}

#[test]
fn case_21_values_of_the_wrong_kind() {
    // The whole table is in `http_contract`; these are the bodies that a JSON table cannot hold.
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let path = "/v1/chat/completions";
    let good = r#"{"messages":[{"role":"user","content":"x"}],"#;
    for body in [
        b"\xff\xfe{}".to_vec(),
        b"[]".to_vec(),
        b"{\"messages\":[{\"role\":\"user\",\"content\":\"\xc3\x28\"}]}".to_vec(),
        ["\u{feff}".as_bytes(), good.as_bytes(), b"\"n\":1}"].concat(),
        format!("{good}\"temperature\":1e400}}").into_bytes(),
        format!("{good}\"temperature\":NaN}}").into_bytes(),
        format!("{good}\"x\":{}}}", "[".repeat(100_000)).into_bytes(),
        Vec::new(),
    ] {
        let reply = server.post_bytes(path, &body);
        assert_eq!(reply.status, 400, "{:?}", String::from_utf8_lossy(&body[..body.len().min(80)]));
        let error = &reply.json()["error"];
        for key in ["message", "type", "param", "code"] {
            assert!(error.get(key).is_some(), "{error}");
        }
    }
    // Of duplicate keys the last counts.
    let reply = server.post_bytes(path, format!("{good}\"max_tokens\":true,\"max_tokens\":2}}").as_bytes());
    assert_eq!(reply.json()["usage"]["completion_tokens"], 2);
    after.finish();
}

#[test]
fn case_23_the_body_limit_is_told() {
    let limits = Limits { body_bytes: 100_000, ..Limits::default() };
    let server = TestServer::with(HttpSettings { limits, ..settings() }, 100_000, 4);
    let after = Aftercheck::begin(&server);
    let body = |bytes: usize| {
        let empty = chat("", json!({})).to_string().len();
        chat(&"x".repeat(bytes - empty), json!({"max_tokens": 5})).to_string()
    };
    assert_eq!(
        server.post_bytes("/v1/chat/completions", body(100_000).as_bytes()[..99_998].as_ref()).status,
        400
    );
    let most = chat(&"x".repeat(90_000), json!({"max_tokens": 5})).to_string();
    assert_eq!(server.post_bytes("/v1/chat/completions", most.as_bytes()).status, 200);
    let over = body(100_001);
    let told = server.post_bytes("/v1/chat/completions", over.as_bytes());
    assert_eq!(told.status, 413);
    assert!(told.json()["error"]["message"].as_str().unwrap().contains("100000"));
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\n";
    let chunked = format!("{head}{:x}\r\n{over}\r\n0\r\n\r\n", over.len());
    assert_eq!(Reply::parse(&server.raw(chunked.as_bytes())).status, 413);
    let zipped = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b";
    assert_eq!(Reply::parse(&server.raw(zipped)).status, 415);
    after.finish();
}

#[test]
fn case_25_request_framing() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let smuggled = "GET /v1/models HTTP/1.1\r\nHost: t\r\n\r\n";
    let body = chat("x", json!({"max_tokens": 3})).to_string();
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let cases = [
        ("Content-Length: 4\r\nTransfer-Encoding: chunked", &chunked),
        ("Transfer-Encoding: chunked\r\nContent-Length: 4", &chunked),
        ("Content-Length: 4\r\nContent-Length: 5", &body),
        ("Transfer-Encoding: chunked, gzip", &chunked),
        ("Transfer-Encoding:\tchunked\t", &chunked),
        ("Content-Length: 0\r\nTransfer-Encoding: chunked", &chunked),
        ("Content-Length: x", &body),
    ];
    for (headers, body) in cases {
        let request =
            format!("POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n{headers}\r\n\r\n{body}{smuggled}");
        let answer = String::from_utf8_lossy(&server.raw(request.as_bytes())).into_owned();
        let replies = answer.matches("HTTP/1.1 ").count();
        assert_eq!(replies, 1, "{headers:?}: {answer}");
        assert!(!answer.contains("max_model_len"), "{headers:?}: {answer}");
        assert!(
            answer.starts_with("HTTP/1.1 400") || answer.starts_with("HTTP/1.1 200"),
            "{headers:?}: {answer}"
        );
    }
    after.finish();
}

#[test]
fn case_26_slow_writers_are_closed() {
    let limits = Limits { header_s: 0.3, body_s: 0.3, ..Limits::default() };
    let server = TestServer::with(HttpSettings { limits, ..settings() }, 4096, 4);
    let after = Aftercheck::begin(&server);
    for start in
        ["POST /v1/comp", "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n{\"pro"]
    {
        let mut stream = server.connect();
        stream.write_all(start.as_bytes()).unwrap();
        // Reading ends when the server closes; the socket's own read timeout is far longer than the limits.
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    }
    after.finish();
}

#[test]
fn case_26_slow_readers_are_dropped_and_their_slots_freed() {
    let limits = Limits { stream_events: 4, reader_s: 0.2, send_buffer: 4096, ..Limits::default() };
    let server = TestServer::with(HttpSettings { limits, ..settings() }, 1 << 24, 4);
    let after = Aftercheck::begin(&server);
    // More than the socket buffers of both sides take, then a wait that only cancelling ends.
    let mut script = say("</think>");
    let round = Step::Tokens(vec![u32::from(b'x'); 1000]);
    script.extend(std::iter::repeat_n(round, 12_000));
    script.push(Step::Wait(Gate::default()));
    server.scripts.set("#slow", script);
    let body = chat("#slow", json!({"stream": true, "max_tokens": 16_000_000})).to_string();
    let mut stream = server.connect();
    stream.write_all(&post("/v1/chat/completions", body.as_bytes())).unwrap();
    server.wait_for("the slow stream runs", |stats| stats.decoding == 2);
    // Nothing is read: the run must end by itself, and only the good stream keep its slot.
    server.wait_for("the slow stream's slot is free", |stats| stats.decoding == 1);
    let mut rest = Vec::new();
    let _ = stream.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
    after.finish();
}

#[test]
fn case_27_context_overflow_is_machine_readable() {
    let server = TestServer::with(settings(), 300, 4);
    let after = Aftercheck::begin(&server);
    let limit = server.get("/v1/models").json()["data"][0]["max_model_len"].as_u64().unwrap();
    let ids = |count: u64| vec![1; count as usize];
    let complete = |count: u64, more: Value| {
        let mut body = more;
        body["prompt"] = json!(ids(count));
        server.post("/v1/completions", &body)
    };
    // A prompt needs room for one token of reply.
    let fits = complete(limit - 1, json!({}));
    assert_eq!((fits.status, &fits.json()["usage"]["completion_tokens"]), (200, &json!(1)));
    for (count, more, message) in [
        (
            limit,
            json!({}),
            format!(
                "However, your prompt resulted in {limit} tokens. Please reduce the length of the prompt."
            ),
        ),
        (
            limit + 1,
            json!({"stream": true}),
            format!("However, your prompt resulted in {} tokens.", limit + 1),
        ),
        (
            limit - 5,
            json!({"max_tokens": 6}),
            format!(
                "However, you requested {} tokens ({} in the prompt, 6 in the completion). Please reduce the length of the \
                 prompt or completion.",
                limit + 1,
                limit - 5
            ),
        ),
    ] {
        let reply = complete(count, more);
        let error = reply.json()["error"].clone();
        assert_eq!((reply.status, &error["code"]), (400, &json!("context_length_exceeded")));
        assert_eq!(error["param"], "prompt");
        let start = format!("This model's maximum context length is {limit} tokens. ");
        let text = error["message"].as_str().unwrap();
        assert!(text.starts_with(&start) && text.contains(&message), "{text}");
    }
    assert_eq!(complete(limit - 5, json!({"max_tokens": 5, "ignore_eos": true})).status, 200);
    let long = server.chat(&"x".repeat(400), json!({"max_tokens": 10})).json();
    let text = long["error"]["message"].as_str().unwrap();
    assert!(text.contains(
        "in the messages, 10 in the completion). Please reduce the length of the messages or completion."
    ));
    assert_eq!(long["error"]["param"], "messages");
    after.finish();
}

/// Closes a connection at a chosen moment and expects the slot back.
fn disconnect(server: &TestServer, more: Value, moment: impl FnOnce(&mut std::net::TcpStream), half: bool) {
    let body = chat("#hang", more).to_string();
    let mut stream = server.connect();
    stream.write_all(&post("/v1/chat/completions", body.as_bytes())).unwrap();
    moment(&mut stream);
    let closed = Instant::now();
    if half {
        stream.shutdown(std::net::Shutdown::Write).unwrap();
    } else {
        drop(stream);
    }
    server.wait_for("the slot is free", |stats| stats.decoding + stats.prefilling + stats.waiting == 1);
    // The documented bound is 0.5 s; a machine under load gets more before this counts as hanging.
    assert!(closed.elapsed() < Duration::from_secs(5), "{:?}", closed.elapsed());
}

#[test]
fn case_30_a_disconnect_frees_the_slot_in_every_phase() {
    let server = TestServer::with(settings(), 4096, 2);
    let after = Aftercheck::begin(&server);
    let running = |decoding: usize, prefilling: usize, waiting: usize| {
        let server = &server;
        move |_: &mut std::net::TcpStream| {
            server.wait_for("the phase", |s| {
                (s.decoding, s.prefilling, s.waiting) == (decoding, prefilling, waiting)
            });
        }
    };
    for half in [false, true] {
        for streamed in [false, true] {
            let more = json!({"stream": streamed});
            // Prefilling: no token yet.
            server.scripts.set("#hang", vec![Step::Prefill(1), Step::Wait(Gate::default())]);
            disconnect(&server, more.clone(), running(1, 1, 0), half);
            // Decoding: some tokens, then silence.
            server.scripts.set("#hang", [say("ab</think>c"), vec![Step::Wait(Gate::default())]].concat());
            disconnect(&server, more.clone(), running(2, 0, 0), half);
        }
    }
    // Queued behind a full engine.
    let mut holder = server.connect();
    holder.write_all(&post("/v1/chat/completions", chat("#hang", json!({})).to_string().as_bytes())).unwrap();
    running(2, 0, 0)(&mut holder);
    let mut queued = server.connect();
    queued.write_all(&post("/v1/chat/completions", chat("#hang", json!({})).to_string().as_bytes())).unwrap();
    server.wait_for("one waits", |stats| stats.waiting == 1);
    drop(queued);
    drop(holder);
    server.wait_for("both are gone", |stats| stats.decoding == 1 && stats.waiting == 0);
    after.finish();
}

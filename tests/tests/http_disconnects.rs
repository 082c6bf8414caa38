//! Clients that leave: in every phase of a request its slot is free at once, and what never ran never runs. (Queued, in
//! the prompt, decoding, half-closed: `http_cases`, case 30.)
#![allow(clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use plugfold::http::{HttpSettings, Limits};
use plugfold::scripted::{Gate, Step};
use plugfold_abi::points::{Document as _, DocumentObject, PromptLink, PromptLinkObject};
use plugfold_abi::{OpError, TextBuf};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::Service as _;
use plugfold_tests::http::{Aftercheck, Reply, Said, TestServer, chat, post, say, settings};
use serde_json::{Value, json};

/// The documented bound is 0.5 s; a machine under load gets more before a slot counts as held.
const BOUND: Duration = Duration::from_secs(5);

fn ask(server: &TestServer, mark: &str, more: Value) -> std::net::TcpStream {
    let mut stream = server.connect();
    stream.write_all(&post("/v1/chat/completions", chat(mark, more).to_string().as_bytes())).unwrap();
    stream
}

/// A number of a family of `/metrics`.
fn metric(server: &TestServer, line: &str) -> f64 {
    let text = server.get("/metrics").text();
    let found = text.lines().find_map(|l| l.strip_prefix(line).map(str::trim));
    found.map_or(0.0, |number| number.parse().unwrap())
}

/// Rendering that says when it begins and waits for leave to end.
struct Slow {
    begun: Mutex<Sender<()>>,
    leave: Mutex<Receiver<()>>,
}

impl PromptLink for Slow {
    fn text(&self, body: &DocumentObject, _: &mut TextBuf) -> Result<(), OpError> {
        let asked: Option<TextBuf> = body.get("/messages".into())?.into();
        if asked.is_some_and(|text| text.contains("#slow")) {
            let _ = self.begun.lock().unwrap_or_else(PoisonError::into_inner).send(());
            let _ = self.leave.lock().unwrap_or_else(PoisonError::into_inner).recv();
        }
        Ok(())
    }
}

#[test]
fn case_30_a_client_that_leaves_while_its_text_is_prepared_never_reaches_the_engine() {
    let (begun, began) = channel();
    let (go, leave) = channel();
    let mut hooks = Hooks::default();
    let slow = Slow { begun: Mutex::new(begun), leave: Mutex::new(leave) };
    hooks.add_object("slow", PromptLinkObject::new(slow)).unwrap();
    // One connection for the good stream, one for the client: another is taken once the server has let go of that.
    let limits = Limits { connections: 2, text_workers: 2, ..Limits::default() };
    let server = TestServer::hooked(HttpSettings { limits, ..settings() }, &hooks);
    let after = Aftercheck::begin(&server);
    let before = server.requests().len();
    for streamed in [false, true] {
        for half in [false, true] {
            let stream = ask(&server, "#slow", json!({"stream": streamed}));
            began.recv_timeout(Duration::from_secs(60)).unwrap();
            if half {
                stream.shutdown(Shutdown::Write).unwrap();
            } else {
                drop(stream);
            }
            assert_eq!(server.get("/health").status, 200);
            go.send(()).unwrap();
        }
    }
    // The last of them is through once it is counted.
    let deadline = Instant::now() + BOUND;
    while metric(&server, "vllm:request_success_total{finished_reason=\"abort\",model_name=\"scripted\"}")
        < 4.0
    {
        assert!(Instant::now() < deadline, "{}", server.get("/metrics").text());
    }
    assert_eq!(server.requests().len(), before, "none of them ran");
    after.finish();
}

#[test]
fn case_30_a_slow_reader_that_leaves_frees_its_slot() {
    // Its patience is not what ends it.
    let limits = Limits {
        stream_events: 4,
        reader_s: 3600.0,
        write_s: 3600.0,
        stream_bytes: 1 << 30,
        send_buffer: 4096,
        ..Limits::default()
    };
    let server = TestServer::with(HttpSettings { limits, ..settings() }, 1 << 24, 4);
    let after = Aftercheck::begin(&server);
    let mut script = say("</think>");
    script.extend(std::iter::repeat_n(Step::Tokens(vec![u32::from(b'x'); 1000]), 12_000));
    script.push(Step::Wait(Gate::default()));
    server.scripts.set("#slow", script);
    for half in [false, true] {
        let said = server.engine.stats().completion_tokens;
        let stream = ask(&server, "#slow", json!({"stream": true, "max_tokens": 16_000_000}));
        server.wait_for("all is said and most of it waits", |s| s.completion_tokens > said + 12_000_000);
        assert_eq!(server.engine.stats().decoding, 2);
        let left = Instant::now();
        if half {
            stream.shutdown(Shutdown::Write).unwrap();
        } else {
            drop(stream);
        }
        server.wait_for("the slot is free", |s| s.decoding == 1);
        assert!(left.elapsed() < BOUND, "half {half}: {:?}", left.elapsed());
    }
    after.finish();
}

#[test]
fn a_client_that_leaves_in_a_held_back_call_frees_its_slot() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let tools = json!([{"type": "function", "function": {"name": "f"}}]);
    let script =
        [say("</think><tool_call>f<arg_key>k</arg_key><arg_value>v"), vec![Step::Wait(Gate::default())]];
    server.scripts.set("#call", script.concat());
    for streamed in [false, true] {
        let said = server.engine.stats().completion_tokens;
        let stream = ask(&server, "#call", json!({"stream": streamed, "tools": tools}));
        server.wait_for("inside of the call", |s| s.decoding == 2 && s.completion_tokens > said + 6);
        let left = Instant::now();
        drop(stream);
        server.wait_for("the slot is free", |s| s.decoding == 1);
        assert!(left.elapsed() < BOUND, "{:?}", left.elapsed());
    }
    after.finish();
}

#[test]
fn a_second_request_behind_the_first_is_no_leaving() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let gate = Gate::default();
    let script = [say("a"), vec![Step::Wait(gate.clone())], say("</think>one<|endoftext|>")].concat();
    server.scripts.set("#first", script);
    server.scripts.set("#second", say("</think>two<|endoftext|>"));
    let body = |mark: &str| chat(mark, json!({})).to_string();
    let first = body("#first");
    let head = "POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\n";
    let mut stream = server.connect();
    write!(stream, "{head}Content-Length: {}\r\n\r\n{first}", first.len()).unwrap();
    stream.write_all(&post("/v1/chat/completions", body("#second").as_bytes())).unwrap();
    server.wait_for("the first runs", |s| s.decoding == 2);
    gate.open();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let second = answer.rfind("HTTP/1.1 200").unwrap();
    assert!(second > 0 && answer[..second].contains("\"content\":\"one\""), "{answer}");
    assert_eq!(Said::read(&Reply::parse(&answer.as_bytes()[second..])).content, "two");
    after.finish();
}

#[test]
fn with_disconnect_off_only_a_stream_that_cannot_be_written_ends() {
    let server = TestServer::with(HttpSettings { disconnect: false, ..settings() }, 1 << 24, 4);
    let after = Aftercheck::begin(&server);
    let gate = Gate::default();
    let script = [say("a"), vec![Step::Wait(gate.clone())], say("</think>one<|endoftext|>")].concat();
    server.scripts.set("#wait", script);
    // Half-closed: the client still reads, and gets its reply.
    let mut half = ask(&server, "#wait", json!({}));
    half.shutdown(Shutdown::Write).unwrap();
    // Gone: the reply is made for nobody.
    let gone = ask(&server, "#wait", json!({}));
    server.wait_for("both run", |s| s.decoding == 3);
    drop(gone);
    let done = server.engine.stats().requests;
    gate.open();
    let mut answer = Vec::new();
    half.read_to_end(&mut answer).unwrap();
    assert_eq!(Said::read(&Reply::parse(&answer)).content, "one");
    server.wait_for("both are done", |s| s.requests == done + 2 && s.decoding == 1);
    let ended = |how: &str| {
        let labels = format!("{{finished_reason=\"{how}\",model_name=\"scripted\"}}");
        metric(&server, &format!("vllm:request_success_total{labels}"))
    };
    // The first of them is the greedy request of the aftercheck.
    assert_eq!((ended("stop"), ended("abort")), (3.0, 0.0));
    // A stream ends with its first write that fails.
    let mut endless = say("</think>");
    endless.extend(std::iter::repeat_n(Step::Tokens(vec![u32::from(b'x'); 1000]), 12_000));
    endless.push(Step::Wait(Gate::default()));
    server.scripts.set("#endless", endless);
    let stream = ask(&server, "#endless", json!({"stream": true, "max_tokens": 16_000_000}));
    server.wait_for("the stream runs", |s| s.decoding == 2);
    drop(stream);
    server.wait_for("its slot is free", |s| s.decoding == 1);
    after.finish();
}

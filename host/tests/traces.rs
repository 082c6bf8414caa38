//! Traces reach a collector: a span for a request inside of its client's trace, and its phases inside of it.
#![cfg(feature = "otel")]
#![allow(clippy::unwrap_used)]

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::mpsc::{Sender, channel};
use std::thread;

use plugfold::scripted::Step;
use plugfold::traces::sending;
use plugfold_engine::service::EngineError;
use plugfold_tests::http::{TestServer, chat, say};
use serde_json::{Value, json};
use tracing_subscriber::layer::SubscriberExt as _;

/// Takes what is posted, says that all is well, and hands the bodies on.
fn answer(stream: TcpStream, bodies: &Sender<Value>) -> Option<()> {
    let mut writer = stream.try_clone().ok()?;
    let mut reader = BufReader::new(stream);
    loop {
        let (mut line, mut length) = (String::new(), 0);
        reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
        assert!(line.starts_with("POST /v1/traces "), "{line}");
        while line != "\r\n" {
            line.clear();
            reader.read_line(&mut line).ok()?;
            if let Some((name, value)) = line.split_once(':') {
                match name.to_lowercase().as_str() {
                    "content-length" => length = value.trim().parse().unwrap(),
                    "content-type" => assert_eq!(value.trim(), "application/json"),
                    _ => {}
                }
            }
        }
        let mut body = vec![0; length];
        reader.read_exact(&mut body).ok()?;
        bodies.send(serde_json::from_slice(&body).unwrap()).ok()?;
        writer
            .write_all(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
            .ok()?;
    }
}

fn post(server: &TestServer, body: &Value, header: &str) -> String {
    let body = body.to_string();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\n{header}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    String::from_utf8(server.raw(request.as_bytes())).unwrap()
}

/// Attributes by their names, integers and strings alike.
fn attributes(span: &Value) -> HashMap<String, String> {
    let all = span["attributes"].as_array().into_iter().flatten();
    let text = |v: &Value| {
        let value = v["stringValue"].as_str().or_else(|| v["intValue"].as_str()).map(str::to_owned);
        value.unwrap_or_else(|| v["intValue"].to_string())
    };
    all.map(|a| (a["key"].as_str().unwrap().to_owned(), text(&a["value"]))).collect()
}

fn time(span: &Value, name: &str) -> u64 {
    let value = &span[name];
    value.as_str().map_or_else(|| value.as_u64().unwrap(), |text| text.parse().unwrap())
}

#[test]
fn a_request_and_its_phases_are_spans_of_its_clients_trace() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}/", listener.local_addr().unwrap());
    let (sender, bodies) = channel();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let sender = sender.clone();
            thread::spawn(move || answer(stream, &sender));
        }
    });
    let (layer, sent) = sending(&endpoint, "under-test").unwrap();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(layer)).unwrap();

    let server = TestServer::start();
    server.scripts.set("#traced", say("why</think>because<|endoftext|>"));
    let fails = vec![Step::Fail(EngineError::Failed("a kernel failed".into()))];
    server.scripts.set("#fails", [say("a"), fails].concat());
    let (trace, parent) = ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7");
    let header = format!("traceparent: 00-{trace}-{parent}-01\r\n");
    assert!(post(&server, &chat("#traced", json!({})), &header).starts_with("HTTP/1.1 200"));
    assert!(
        post(&server, &chat("#traced", json!({"stream": true})), "")
            .ends_with("data: [DONE]\n\n\r\n0\r\n\r\n")
    );
    assert!(
        post(&server, &chat("#fails", json!({})), "traceparent: nonsense\r\n").starts_with("HTTP/1.1 500")
    );
    assert!(post(&server, &chat("#traced", json!({"n": 2})), "").starts_with("HTTP/1.1 400"));
    server.wait_idle();
    drop(server);
    drop(sent);

    let mut spans = Vec::new();
    let mut services = Vec::new();
    // What was sent has been answered.
    while let Ok(body) = bodies.try_recv() {
        for resource in body["resourceSpans"].as_array().unwrap() {
            services.push(attributes(&resource["resource"])["service.name"].clone());
            for scope in resource["scopeSpans"].as_array().unwrap() {
                spans.extend(scope["spans"].as_array().unwrap().iter().cloned());
            }
        }
    }
    assert!(services.iter().all(|name| name == "under-test"), "{services:?}");
    let requests: Vec<&Value> = spans.iter().filter(|span| span["name"] == "request").collect();
    assert_eq!(requests.len(), 4, "{spans:?}");
    let traced = requests.iter().find(|span| span["traceId"] == trace).unwrap();
    assert_eq!(traced["parentSpanId"], parent);
    let others: Vec<&&Value> = requests.iter().filter(|span| span["traceId"] != trace).collect();
    assert_eq!(others.len(), 3, "a request without a trace, or with nonsense, begins one");
    assert!(others.iter().all(|span| span["parentSpanId"].as_str().unwrap_or_default().is_empty()));

    let told = attributes(traced);
    assert_eq!(told["url.path"], "/v1/chat/completions");
    assert_eq!((told["finish"].as_str(), told["completion_tokens"].as_str()), ("stop", "12"), "{told:?}");
    let phases: Vec<&Value> = ["queue", "prefill", "decode"]
        .iter()
        .map(|name| {
            let inside = |span: &&Value| span["name"] == *name && span["parentSpanId"] == traced["spanId"];
            let found: Vec<&Value> = spans.iter().filter(inside).collect();
            assert_eq!(found.len(), 1, "{name} in {spans:?}");
            assert_eq!(found[0]["traceId"], trace);
            found[0]
        })
        .collect();
    let mut at = time(traced, "startTimeUnixNano");
    for phase in &phases {
        assert!(time(phase, "startTimeUnixNano") >= at, "{phases:?}");
        at = time(phase, "endTimeUnixNano");
    }
    let broken = requests.iter().filter(|span| span["status"]["code"] == 2).count();
    assert_eq!(broken, 2, "the failed and the refused one: {requests:?}");
}

#[test]
fn an_address_that_is_none_is_refused() {
    for endpoint in ["collector:4318", "https://collector", "http://not an address"] {
        let refused = sending::<tracing_subscriber::Registry>(endpoint, "x").err().unwrap();
        assert!(refused.contains(endpoint) && refused.contains("http://127.0.0.1:4318"), "{refused}");
    }
}

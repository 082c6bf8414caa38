//! The documentation of the API is what the server does.
#![allow(clippy::unwrap_used)]

use plugfold::http::doc::{self, Kind, bodies, values::VALUES};
use plugfold_tests::http::{Aftercheck, TestServer, chat};
use serde_json::{Value, json};

#[test]
fn the_written_page_is_fresh() {
    let written = include_str!("../../docs/API.md");
    assert!(written == doc::markdown(), "docs/API.md is old: cargo run -p plugfold-tests --bin api-doc");
}

#[test]
fn the_served_pages() {
    let server = TestServer::start();
    let document = server.get("/openapi.json");
    assert_eq!((document.status, document.headers["content-type"].as_str()), (200, "application/json"));
    assert!(document.json()["paths"]["/v1/chat/completions"]["post"].is_object());
    for path in ["/", "/docs"] {
        let page = server.get(path);
        assert_eq!((page.status, page.headers["content-type"].as_str()), (200, "text/html; charset=utf-8"));
        assert!(page.headers["content-security-policy"].contains("default-src 'none'"));
        assert!(page.text().starts_with("<!doctype html>"));
    }
    let head =
        String::from_utf8(server.raw(b"HEAD / HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")).unwrap();
    assert!(head.starts_with("HTTP/1.1 200") && head.ends_with("\r\n\r\n"), "{head}");
}

#[test]
fn case_21_the_table_of_odd_values_holds() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    for (field, value, status, why) in VALUES {
        let value: Value = serde_json::from_str(value).unwrap();
        let reply = server.chat("x", json!({field: value}));
        assert_eq!(reply.status, status, "{field}: {value} ({why}): {}", reply.text());
        if status != 200 {
            let error = &reply.json()["error"];
            assert!(
                ["message", "type", "param", "code"].iter().all(|key| error.get(key).is_some()),
                "{error}"
            );
        }
    }
    after.finish();
}

/// A value that a field of this form must refuse.
fn wrong(kind: &Kind) -> Value {
    match kind {
        Kind::Integer(..) => json!(1.5),
        Kind::Any(_) | Kind::Flag => json!(2.5),
        _ => json!(true),
    }
}

#[test]
fn documented_fields_are_read() {
    let server = TestServer::start();
    // Of these the server reads nothing, or they are checked as a whole by the grammar feature.
    let unread = [
        "priority",
        "response_format",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "metadata",
    ];
    for (path, body, good) in [
        ("/v1/chat/completions", &bodies::CHAT, chat("x", json!({}))),
        ("/v1/completions", &bodies::TEXT, json!({"prompt": "x"})),
        ("/v1/responses", &bodies::RESPONSES, json!({"input": "x"})),
        ("/v1/messages", &bodies::MESSAGES, json!({"messages": [{"role": "user", "content": "x"}]})),
        (
            "/v1/messages/count_tokens",
            &bodies::COUNT_TOKENS,
            json!({"messages": [{"role": "user", "content": "x"}]}),
        ),
        ("/detokenize", &bodies::DETOKENIZE, json!({"tokens": []})),
    ] {
        assert_eq!(server.post(path, &good).status, 200, "{path}");
        for field in body.all().filter(|field| !unread.contains(&field.name)) {
            let mut request = good.clone();
            request[field.name] = wrong(&field.kind);
            let reply = server.post(path, &request);
            assert_eq!(reply.status, 400, "{path} {}: {}", field.name, reply.text());
            request[field.name] = Value::Null;
            if !body.required.contains(&field.name) {
                assert_eq!(server.post(path, &request).status, 200, "{path} {}: null", field.name);
            }
        }
    }
}

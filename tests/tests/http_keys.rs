//! API keys, aliases and detokenize.
#![allow(clippy::unwrap_used)]

use plugfold::http::HttpSettings;
use plugfold::http::keys::Keys;
use plugfold_tests::http::{Aftercheck, Reply, TestServer, chat, settings};
use serde_json::json;

#[test]
fn every_route_but_health_wants_a_key() {
    let mut keys = Keys::default();
    keys.add("the-first-key").unwrap();
    keys.add("the-second-key").unwrap();
    let server = TestServer::with(HttpSettings { keys, ..settings() }, 4096, 4);
    for path in ["/health", "/v1/health"] {
        assert_eq!(server.get(path).status, 200);
    }
    for path in ["/", "/v1/models", "/metrics", "/openapi.json", "/docs", "/nothing"] {
        let reply = server.get(path);
        assert_eq!(reply.status, 401, "{path}");
        assert_eq!(reply.json()["error"]["code"], "invalid_api_key");
        assert!(reply.headers["www-authenticate"].starts_with('B'), "{path}");
        assert_eq!(server.get_with(path, "Authorization: Bearer nope\r\n").status, 401);
        let known = server.get_with(path, "Authorization: Bearer the-second-key\r\n").status;
        assert_eq!(known, if path == "/nothing" { 404 } else { 200 }, "{path}");
        assert_ne!(server.get_with(path, "x-api-key: the-first-key\r\n").status, 401, "{path}");
    }
    for path in ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/responses"] {
        let reply = server.post(path, &json!({}));
        assert_eq!((reply.status, &reply.json()["error"]["type"]), (401, &json!("invalid_request_error")));
    }
    let reply = server.post("/v1/messages", &json!({}));
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (401, &json!("authentication_error")));
    let body = chat("x", json!({})).to_string();
    let request = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nAuthorization: Bearer the-first-key\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    assert_eq!(Reply::parse(&server.raw(request.as_bytes())).status, 200);
    // The gate is before the body: nothing of it is read or kept.
    let huge =
        b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: 99999999\r\n\r\n{";
    assert_eq!(Reply::parse(&server.raw(huge)).status, 401);
}

#[test]
fn aliases_are_listed_after_the_served_name() {
    let server = TestServer::with(HttpSettings { aliases: vec!["gpt-x".into()], ..settings() }, 4096, 4);
    let models = server.get("/v1/models").json();
    let ids: Vec<&str> =
        models["data"].as_array().unwrap().iter().map(|m| m["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["scripted", "gpt-x"]);
    assert_eq!(server.get("/v1/models/gpt-x").json()["root"], "scripted");
    assert_eq!(server.get("/v1/models/nobody").status, 404);
    let reply = server.chat("x", json!({"model": "gpt-x"})).json();
    assert_eq!(reply["model"], "scripted");
}

#[test]
fn detokenize_turns_tokenize_back() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let text = "the hel客\n<think>";
    let ids = server.post("/tokenize", &json!({"prompt": text})).json()["tokens"].clone();
    for path in ["/detokenize", "/v1/detokenize"] {
        assert_eq!(server.post(path, &json!({"tokens": ids})).json(), json!({"prompt": text}));
    }
    after.finish();
}

//! Clients as they are installed from PyPI, against the server with a scripted engine.
#![allow(clippy::unwrap_used)]

use plugfold_tests::http::{Aftercheck, TestServer, say, settings};
use plugfold_tests::python;

/// A server whose model calls a tool when it is asked for the weather.
fn server() -> TestServer {
    let server = TestServer::with(settings(), 1 << 16, 4);
    server.scripts.set(
        "weather in Paris",
        say(
            "need it</think>Let me look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>\
             </tool_call><|observation|>",
        ),
    );
    server
}

#[test]
fn the_openai_package() {
    let server = server();
    let after = Aftercheck::begin(&server);
    python::run("openai_client.py", &format!("http://{}/v1", server.address));
    after.finish();
}

#[test]
fn the_anthropic_package() {
    let server = server();
    let after = Aftercheck::begin(&server);
    python::run("anthropic_client.py", &format!("http://{}", server.address));
    after.finish();
}

#[test]
fn langchain_with_a_bound_tool() {
    let server = server();
    let after = Aftercheck::begin(&server);
    python::run("langchain_client.py", &format!("http://{}/v1", server.address));
    after.finish();
}

#[test]
fn schemathesis_gets_no_server_error() {
    let server = server();
    let after = Aftercheck::begin(&server);
    python::run("api_schema.py", &format!("http://{}", server.address));
    after.finish();
}

#[test]
fn the_page_in_chromium() {
    let server = server();
    let after = Aftercheck::begin(&server);
    python::run("page_client.py", &format!("http://{}", server.address));
    after.finish();
}

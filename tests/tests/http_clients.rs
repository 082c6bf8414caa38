//! Clients as they are installed from PyPI and npm, against the server with a scripted engine; and that each test of a
//! client fails when the server misbehaves.
#![allow(clippy::unwrap_used)]

use std::process::Output;
use std::sync::Arc;

use plugfold::http::HttpSettings;
use plugfold::http::loaded::describe;
use plugfold_abi::KnobValue;
use plugfold_tests::catalogue::{manifests, resolve};
use plugfold_tests::http::{Aftercheck, TestServer, say, settings};
use plugfold_tests::spoiler::Spoiler;
use plugfold_tests::{node, python};

fn server() -> TestServer {
    weather(TestServer::with(settings(), 1 << 16, 4))
}

/// The model calls a tool when it is asked for the weather.
fn weather(server: TestServer) -> TestServer {
    server.scripts.set(
        "weather in Paris",
        say(
            "need it</think>Let me look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>\
             </tool_call><|observation|>",
        ),
    );
    server
}

/// What a client's script is run with.
struct Client {
    output: fn(&str, &str) -> Output,
    script: &'static str,
    /// The end of the base address.
    path: &'static str,
}

impl Client {
    fn at(&self, address: std::net::SocketAddr) -> Output {
        (self.output)(self.script, &format!("http://{address}{}", self.path))
    }

    /// All is well; then, for each fault of the server, the script fails.
    fn check(&self, faults: &[(&'static str, &'static str)]) {
        let server = server();
        let after = Aftercheck::begin(&server);
        python::succeeded(self.script, &self.at(server.address));
        after.finish();
        for (from, to) in faults {
            let spoiler = Spoiler::start(server.address, from, to);
            let output = self.at(spoiler.address);
            assert!(spoiler.spoiled() > 0, "{}: {from:?} is in no reply", self.script);
            assert!(
                !output.status.success(),
                "{}: {to:?} for {from:?} was not noticed: {output:?}",
                self.script
            );
        }
        server.wait_idle();
    }
}

/// The two packages of OpenAI have the same script in two languages.
fn openai(output: fn(&str, &str) -> Output, script: &'static str) {
    Client { output, script, path: "/v1" }.check(&[
        (r#""delta":{"content":"#, r#""delta":{"contenX":"#),
        (r#""finish_reason":"tool_calls""#, r#""finish_reason":"stop"      "#),
        (r#"{\"city\":"#, r#"{\"cite\":"#),
        (r#""ignored":["response_format"]"#, r#""ignores":["response_format"]"#),
        (r#""type":"response.completed""#, r#""type":"response.completeX""#),
        (r#""code":"context_length_exceeded""#, r#""code":"context_length_exceedex""#),
    ]);
}

#[test]
fn openai_of_pypi() {
    openai(python::output, "openai_client.py");
}

#[test]
fn openai_of_npm() {
    openai(node::output, "openai_client.mjs");
}

#[test]
fn anthropic_of_pypi() {
    Client { output: python::output, script: "anthropic_client.py", path: "" }.check(&[
        (r#""stop_reason":"tool_use""#, r#""stop_reason":"end_turn""#),
        (r#""type":"thinking_delta""#, r#""type":"thinking_deltX""#),
        (r#""type":"input_json_delta""#, r#""type":"input_json_deltX""#),
        (r#""input_tokens":"#, r#""input_tokenX":"#),
        (r#""type":"invalid_request_error""#, r#""type":"invalid_request_errox""#),
    ]);
}

#[test]
fn langchain_with_a_bound_tool() {
    Client { output: python::output, script: "langchain_client.py", path: "/v1" }.check(&[
        (r#""finish_reason":"tool_calls""#, r#""finish_reason":"stop"      "#),
        (r#""name":"get_weather""#, r#""name":"get_weathex""#),
        (r#"{\"city\":"#, r#"{\"cite\":"#),
    ]);
}

#[test]
fn the_ai_sdk_of_npm() {
    Client { output: node::output, script: "ai_client.mjs", path: "/v1" }.check(&[
        (r#""delta":{"content":"#, r#""delta":{"contenX":"#),
        (r#""finish_reason":"tool_calls""#, r#""finish_reason":"stop"      "#),
        (r#"{\"city\":"#, r#"{\"cite\":"#),
        (r#""completion_tokens":"#, r#""completion_tokenX":"#),
    ]);
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
    let ids = ["0003", "0020", "0090"];
    let resolved = resolve(&ids, "", &[], &[]).unwrap();
    let knobs = Arc::new(resolved.table());
    let plugins = Arc::new(describe(&manifests(&ids), &resolved, &knobs));
    let server = weather(TestServer::with(HttpSettings { knobs, plugins, ..settings() }, 1 << 16, 4));
    let after = Aftercheck::begin(&server);
    python::run("page_client.py", &format!("http://{}", server.address));
    after.finish();
    // What the page's control for a knob was set to has reached the engine.
    let knob = resolved.table().number("0020", "lookup_min").unwrap() as usize;
    let asked = |value: i64| {
        server.requests().iter().any(|r| r.knobs.as_ref().is_some_and(|k| k[knob] == KnobValue::Int(value)))
    };
    assert!(asked(7) && !asked(99));
}

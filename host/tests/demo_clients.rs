//! Clients as they are installed from PyPI and npm, against the program with the demo model.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::process::Command;

use plugfold_tests::{node, python};
use plugins::Served;

/// The quickstart profile.
fn served() -> Served {
    plugins::built();
    let mut command = Command::new(env!("CARGO_BIN_EXE_plugfold"));
    command.args(["serve", "--port", "0"]).current_dir(plugins::ROOT);
    Served::start(command)
}

#[test]
fn the_packages_of_pypi() {
    let served = served();
    for (script, path) in
        [("openai_client.py", "/v1"), ("anthropic_client.py", ""), ("langchain_client.py", "/v1")]
    {
        python::run(script, &format!("http://{}{path}", served.address));
    }
    assert!(served.end("-TERM").success());
}

#[test]
fn the_packages_of_npm() {
    let served = served();
    for script in ["openai_client.mjs", "ai_client.mjs"] {
        node::run(script, &format!("http://{}/v1", served.address));
    }
    assert!(served.end("-TERM").success());
}

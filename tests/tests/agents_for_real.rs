//! Real agents, offline, against the server with a scripted model: each does one small edit, and no edit comes about when the
//! server does not give the call.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use plugfold::text::testing::tokenizer;
use plugfold_tests::agents::{self, Agent, Done};
use plugfold_tests::http::{TestServer, settings};
use plugfold_tests::isolated::isolated;

/// Longest prompt and reply: agents send up to 80 kB, a token a byte here.
const CONTEXT: usize = 1 << 20;

/// What an agent has done with a model, and the prompts that it was asked.
fn at_work(agent: Agent, says: fn(&str) -> Option<String>) -> (TestServer, Done, Vec<String>) {
    let server = TestServer::with(settings(), CONTEXT, 4);
    server.scripts.otherwise(move |prompt| {
        let said = says(prompt).unwrap_or_else(|| "</think>A small edit<|endoftext|>".into());
        agents::spoken(prompt, &said)
    });
    let done = agent.work(server.address);
    let prompts = server.prompts().iter().map(|ids| tokenizer().decode(ids)).collect();
    (server, done, prompts)
}

fn number(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find(|line| line.starts_with(name) && !line.starts_with('#'));
    let value = line.and_then(|line| line.rsplit(' ').next()).and_then(|value| value.parse().ok());
    value.unwrap_or_else(|| panic!("no {name} in {metrics}"))
}

fn check(agent: Agent) {
    let (server, done, prompts) = at_work(agent, agents::reply);
    assert!(done.changed, "{}\nprompts: {}", done.told, prompts.len());
    // Nothing that it sent was refused or ended in an error, and it brought the call's result back.
    let metrics = server.get("/metrics").text();
    for name in ["tensorfold_requests_rejected_total", "tensorfold_request_errors_total"] {
        assert!(number(&metrics, name).abs() < 0.5, "{metrics}");
    }
    let of_call = |prompt: &&String| prompt.contains("<tool_response>");
    assert!(prompts.len() > 1 && prompts.iter().any(|prompt| !of_call(&prompt)), "{prompts:?}");
    let back = prompts.iter().rfind(of_call).unwrap_or_else(|| panic!("no result came back: {}", done.told));
    assert!(back.contains("Let me do that.<tool_call>"), "the call is not in the history: {back}");
    server.wait_idle();

    let (server, done, prompts) = at_work(agent, |prompt| {
        agents::reply(prompt).map(|_| "A tool could do this.</think>I would rather not.<|endoftext|>".into())
    });
    assert!(!done.changed, "it changed the file by itself: {}", done.told);
    assert!(!prompts.is_empty(), "it asked nobody: {}", done.told);
    server.wait_idle();
}

#[test]
fn opencode_changes_a_word() {
    isolated("opencode_changes_a_word", agents::install, || check(Agent::Opencode));
}

#[test]
fn codex_changes_a_word() {
    isolated("codex_changes_a_word", agents::install, || check(Agent::Codex));
}

#[test]
fn claude_code_changes_a_word() {
    isolated("claude_code_changes_a_word", agents::install, || check(Agent::ClaudeCode));
}

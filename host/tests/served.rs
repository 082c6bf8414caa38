//! The program itself: processes, signals, files.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

fn plugfold(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plugfold"));
    command.args(arguments).current_dir(ROOT);
    command
}

fn run(arguments: &[&str]) -> Output {
    plugfold(arguments).output().unwrap()
}

/// Fails with one line that says all of `words`, and prints nothing else.
fn refused(arguments: &[&str], words: &[&str]) {
    let output = run(arguments);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty(), "{arguments:?}: {output:?}");
    assert_eq!(told.trim_end().lines().count(), 1, "{arguments:?}: {told}");
    assert!(told.starts_with("plugfold: ") && !told.contains("panicked"), "{told}");
    for word in words {
        assert!(told.contains(word), "{arguments:?}: no {word:?} in {told}");
    }
}

fn tiny() -> String {
    format!("{ROOT}/tests/fixtures/tiny")
}

/// A running server; killed when dropped.
struct Served {
    child: Child,
    address: String,
}

impl Served {
    fn start(arguments: &[&str]) -> Self {
        plugins::built();
        let mut command = plugfold(&["serve", "--port", "0"]);
        let mut child = command.args(arguments).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.split("http://").nth(1).and_then(|rest| rest.split(' ').next());
        let address = address.unwrap_or_else(|| panic!("no address in {line:?}")).to_owned();
        Self { child, address }
    }

    fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.address).unwrap();
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        )
        .unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap())
    }

    /// Sends the polite signal and waits.
    fn stop(mut self) -> std::process::ExitStatus {
        let id = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
        self.child.wait().unwrap()
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_quickstart_serves_and_ends_on_a_signal() {
    // Without arguments `serve` takes the quickstart profile.
    let served = Served::start(&[]);
    let body = serde_json::json!({"messages": [{"role": "user", "content": "What is 2 + 3?"}], "temperature": 0,
                                  "reasoning_effort": "none"});
    let (status, reply) = served.post("/v1/chat/completions", &body);
    assert_eq!((status, reply["model"].as_str()), (200, Some("plugfold-demo")), "{reply}");
    assert!(reply["choices"][0]["message"]["content"].as_str().unwrap().contains('5'), "{reply}");
    let (again, same) = served.post("/v1/chat/completions", &body);
    assert_eq!((again, &same["choices"]), (200, &reply["choices"]));
    // A prompt that is sent again is resumed from its last multiple of 64 before its end.
    let long = "What is 2 + 3? ".repeat(40);
    let body = serde_json::json!({"messages": [{"role": "user", "content": long}], "max_tokens": 8});
    let (_, first) = served.post("/v1/chat/completions", &body);
    let tokens = first["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens > 200, "{first}");
    for _ in 0..2 {
        let (_, again) = served.post("/v1/chat/completions", &body);
        assert_eq!(again["choices"], first["choices"]);
        assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], (tokens - 1) / 64 * 64);
    }
    assert!(served.stop().success());
}

#[test]
fn two_ranks_say_what_one_says() {
    let say = |ranks: &str| {
        let output = run(&[
            "generate",
            "--model",
            &tiny(),
            "--ids",
            "5,6,7,8",
            "--max-tokens",
            "12",
            "--ranks",
            ranks,
            "--json",
        ]);
        assert!(output.status.success(), "{output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["ids"].as_array().unwrap().len(), 12);
        report["ids"].clone()
    };
    assert_eq!(say("1"), say("2"));
}

#[test]
fn traces_are_written_whole_or_not_at_all() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    let shapes = |path: &Path| {
        let bytes = std::fs::read(path).unwrap();
        let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        let mut shapes: Vec<(String, Vec<usize>)> =
            tensors.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec())).collect();
        shapes.sort();
        shapes
    };
    let trace = |what: &str, out: &Path, ids: &str| {
        run(&["debug", what, "--model", &tiny(), "--ids", ids, "--out", out.to_str().unwrap()])
    };
    assert!(trace("logits", &file("l"), "1,2,3").status.success());
    assert_eq!(shapes(&file("l")), [("logits".to_owned(), vec![3, 512])]);
    assert!(trace("hidden", &file("h"), "1,2").status.success());
    let hidden = shapes(&file("h"));
    assert_eq!(hidden[0], ("final".to_owned(), vec![2, 128]));
    assert_eq!(hidden[1], ("layer.0".to_owned(), vec![2, 4, 128]));
    assert!(!trace("logits", &file("bad"), "1,99999").status.success());
    assert!(!trace("logits", &file("no/such/folder"), "1").status.success());
    let mut left: Vec<_> =
        std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["h", "l"]);
}

#[test]
fn bad_input_is_one_clear_line() {
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = holder.local_addr().unwrap().port().to_string();
    refused(&["serve", "--model", &tiny(), "--port", &port], &["cannot listen", &port, "--port"]);
    refused(&["serve", "--model", "/nowhere/at/all", "--port", "0"], &["/nowhere/at/all", "--model"]);
    refused(&["serve", "--profile", "nosuch"], &["nosuch", "config/nosuch.toml"]);
    refused(&["serve", "--model", &tiny(), "--port", "0"], &["tokenizer.json"]);
    refused(&["serve", "--model", &tiny(), "--port", "0", "--slots", "0"], &["slots", "at least 1"]);
    #[cfg(not(feature = "otel"))]
    refused(
        &["serve", "--model", &tiny(), "--port", "0", "--set", "server.otlp_endpoint=http://127.0.0.1:1"],
        &["otlp_endpoint", "--features otel"],
    );
    refused(&["generate", "--model", &tiny(), "--ids", "1,x"], &["--ids"]);
    refused(&["generate", "--model", &tiny(), "--ids", "512"], &["512", "vocabulary"]);
    refused(&["generate", "--model", &tiny(), "--prompt", "x"], &["tokenizer.json", "--ids"]);
    refused(&["tokenize", "--model", &tiny(), "--prompt", "x"], &["tokenizer.json"]);
    refused(&["--log", "plugfold=loud", "tokenize", "--prompt", "x"], &["--log"]);
    let empty = tempfile::tempdir().unwrap();
    refused(&["generate", "--model", empty.path().to_str().unwrap(), "--ids", "1"], &["config.json"]);
    std::fs::write(empty.path().join("config.json"), "{").unwrap();
    refused(&["generate", "--model", empty.path().to_str().unwrap(), "--ids", "1"], &["config.json"]);
    let profile = empty.path().join("p.toml");
    std::fs::write(&profile, "served_nam = \"x\"\n").unwrap();
    refused(
        &["serve", "--profile", profile.to_str().unwrap()],
        &["p.toml", "served_nam", "did you mean `served_name`"],
    );
}

#[test]
fn tokenize_prints_ids() {
    let output = run(&["tokenize", "--chat", "hi<|user|>", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let texts: Vec<&str> = report["texts"].as_array().unwrap().iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(texts.concat(), "Reasoning Effort: Maxhi<|user|><think>");
    let plain = run(&["tokenize", "--prompt", "<|user|>"]);
    assert_eq!(String::from_utf8_lossy(&plain.stdout).trim().split(',').count(), 1);
}

/// Counts only: times belong to a quiet machine.
#[test]
fn the_http_bench_loses_and_mixes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("http.json");
    let output =
        run(&["bench", "http", "--streams", "200", "--seconds", "3", "--json", file.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    let replies = report["replies"].as_u64().unwrap();
    assert!(replies >= 200 && report["tokens"].as_u64().unwrap() > 100 * replies, "{report}");
    assert_eq!(report["slot_free_ms"].as_object().unwrap().len(), 4, "{report}");
}

/// Replies and counts only, as above: the command compares the replies with null hooks to those without itself.
#[test]
fn the_hooks_bench_exchanges_hooks_on_one_engine() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("hooks.json");
    let model = ["--model", "tests/fixtures/tiny", "--context", "256"];
    let sizes = ["--fours", "3", "--steps", "4", "--prompt", "9", "--json", file.to_str().unwrap()];
    let output = run(&[&["bench", "hooks"][..], &model, &sizes].concat());
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    assert_eq!(report["seconds_a_step"].as_array().unwrap().len(), 3, "{report}");
    // Every operation of a step is a call of a null provider, and there are hooks beside them.
    assert!(report["calls_a_step"].as_f64().unwrap() > 100.0, "{report}");
    refused(&[&["bench", "hooks"][..], &model, &["--steps", "200"]].concat(), &["256", "400 steps"]);
}

//! Case 28: a rank that is killed or hangs is told by `/health`, by the replies that wait, and by the exit status.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::{Duration, Instant};

use plugins::{ROOT, Served, built, children};
use serde_json::{Value, json};

/// Only a broken server uses it up; the documented bound is 5 s.
const PATIENCE: Duration = Duration::from_secs(60);

/// One exchange, if the server still takes it.
fn exchange(address: &str, request: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    stream.write_all(request.as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

fn a_rank_gets(signal: &str) {
    built();
    let folder = tempfile::tempdir().unwrap();
    let said = folder.path().join("stderr");
    let mut command = Command::new(env!("CARGO_BIN_EXE_plugfold"));
    command.args(["serve", "--port", "0", "--ranks", "2", "--health", "strict", "--model"]);
    command.arg(format!("{ROOT}/host/assets/demo-model")).current_dir(ROOT);
    command.stderr(std::fs::File::create(&said).unwrap());
    let mut served = Served::start(command);
    assert_eq!(served.complete().0, 200);
    assert_eq!(served.health().0, 200);
    let ranks = children(served.child.id());
    let [rank] = ranks[..] else { panic!("one further rank: {ranks:?}") };

    // A reply that is on its way when it happens.
    let body = json!({"prompt": "abc", "max_tokens": 2_000, "ignore_eos": true, "stream": true}).to_string();
    let mut waiting = TcpStream::connect(&served.address).unwrap();
    waiting.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        waiting,
        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    let mut start = [0; 400];
    waiting.read_exact(&mut start).unwrap();

    assert!(Command::new("kill").args([signal, &rank.to_string()]).status().unwrap().success());
    let begun = Instant::now();
    let mut told = None;
    while let Some(answer) =
        exchange(&served.address, "GET /health HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n")
    {
        assert!(begun.elapsed() < PATIENCE, "{signal}: nobody notices");
        if answer.starts_with("HTTP/1.1 503") {
            let (_, body) = answer.split_once("\r\n\r\n").unwrap();
            told = Some(serde_json::from_str::<Value>(body).unwrap());
            break;
        }
    }
    // The server says so for a moment before it ends; a machine under load may sleep through that.
    if let Some(health) = told {
        let fatal = health["fatal"].as_str().unwrap();
        assert!(health["ok"] == false && fatal.contains("rank 1"), "{signal}: {health}");
    }
    let mut rest = String::new();
    waiting.read_to_string(&mut rest).unwrap();
    let error =
        rest.lines().filter_map(|line| line.strip_prefix("data: ")).find(|data| data.contains("\"error\""));
    assert!(error.is_some_and(|error| error.contains("rank 1")), "{signal}: the reply ends with {rest:?}");
    let status = served.child.wait().unwrap();
    assert!(status.code().is_some_and(|code| code != 0), "{signal}: {status:?}");
    let said = std::fs::read_to_string(said).unwrap();
    let last = said.lines().last().unwrap_or_default();
    assert!(last.starts_with("plugfold: ") && last.contains("rank 1"), "{signal}: {said}");
    // Nothing is left behind, not even what hung.
    while std::fs::read_to_string(format!("/proc/{rank}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
        assert!(begun.elapsed() < PATIENCE, "{signal}: rank 1 is left behind");
        std::thread::yield_now();
    }
}

#[test]
fn a_rank_that_is_killed() {
    a_rank_gets("-KILL");
}

#[test]
fn a_rank_that_hangs() {
    a_rank_gets("-STOP");
}

//! `SIGUSR1` prints the stacks of all threads, on every rank, and the server goes on.
#![allow(clippy::unwrap_used)]

mod plugins;

use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::Duration;

use plugins::{ROOT, Served, children};

#[test]
fn every_rank_tells_its_stacks_and_serving_goes_on() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plugfold"));
    command.args(["serve", "--port", "0", "--ranks", "2", "--model"]);
    command.arg(format!("{ROOT}/host/assets/demo-model")).current_dir(ROOT).stderr(Stdio::piped());
    let mut served = Served::start(command);
    let lines = BufReader::new(served.child.stderr.take().unwrap()).lines();
    let (sender, told) = channel();
    // Both ranks write to it; it ends with them.
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let mut ranks = vec![served.child.id()];
    ranks.extend(children(served.child.id()));
    assert_eq!(ranks.len(), 2);
    for pass in 0..2 {
        for rank in &ranks {
            assert!(Command::new("kill").args(["-USR1", &rank.to_string()]).status().unwrap().success());
            let mut dump = Vec::new();
            while dump.last().is_none_or(|line| line != "end of stacks") {
                dump.push(told.recv_timeout(Duration::from_secs(60)).unwrap());
            }
            let dump = dump.join("\n");
            assert!(dump.contains(&format!("stacks of process {rank}:")), "{dump}");
            // The thread that waits for work, by its name and with what it waits in.
            let engine = if *rank == ranks[0] { "\"plugfold-engine\"" } else { "\"plugfold\"" };
            let stack = dump.split("\nthread ").find(|stack| stack.contains(engine));
            let stack = stack.unwrap_or_else(|| panic!("no thread {engine} in {dump}"));
            assert!(stack.contains("plugfold_engine::"), "{stack}");
        }
        let body =
            serde_json::json!({"messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 4});
        let (status, reply) = served.post("/v1/chat/completions", &body);
        assert_eq!(status, 200, "after dump {pass}: {reply}");
    }
}

//! Ranks that are started by hand and meet by address give what ranks give that rank 0 starts; what cannot meet is told.
#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Command, Stdio};

/// A command over the tiny model, on two ranks.
fn plugfold(words: &[&str], cache: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_plugfold"));
    let tiny = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
    command.args(words).arg("--model").arg(tiny).args(["--ranks", "2", "--threads", "1", "--slots", "1"]);
    command.env("PLUGFOLD_CACHE_DIR", cache).env("PLUGFOLD_RANKS_SECRET", "a secret of this test");
    command
}

const REPLY: [&str; 5] = ["generate", "--ids", "5,6,7", "--max-tokens", "4"];

#[test]
fn ranks_meet_by_address() {
    let cache = tempfile::tempdir().unwrap();
    let alone = plugfold(&REPLY, cache.path()).output().unwrap();
    assert!(alone.status.success(), "{}", String::from_utf8_lossy(&alone.stderr));
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
    let at = format!("ranks_at=127.0.0.1:{port}");
    // Whichever is first waits for the other.
    let mut joined = plugfold(&["join", "--rank", "1", "--set", &at], cache.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lead = plugfold(&REPLY, cache.path()).args(["--set", &at]).output().unwrap();
    let told = String::from_utf8_lossy(&lead.stderr);
    if !lead.status.success() {
        let _ = joined.kill();
        panic!("{told}\n{}", String::from_utf8_lossy(&joined.wait_with_output().unwrap().stderr));
    }
    assert!(told.contains("waits at 127.0.0.1") && told.contains("plugfold join"), "{told}");
    assert_eq!(lead.stdout, alone.stdout);
    let joined = joined.wait_with_output().unwrap();
    assert!(joined.status.success(), "{}", String::from_utf8_lossy(&joined.stderr));
}

#[test]
fn who_cannot_join_is_told_why() {
    let cache = tempfile::tempdir().unwrap();
    for (words, told) in [
        (&["join", "--rank", "1"][..], "give the address at which rank 0 waits"),
        (&["join", "--rank", "2", "--set", "ranks_at=127.0.0.1:9"], "further ranks are 1 to 1"),
        (&["join", "--rank", "1", "--set", "ranks_at=nowhere"], "ranks_at is \"nowhere\": give ADDRESS:PORT"),
    ] {
        let output = plugfold(words, cache.path()).output().unwrap();
        let err = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && err.contains(told), "{err}");
    }
    let output = plugfold(&["join", "--rank", "1", "--set", "ranks_at=127.0.0.1:9"], cache.path())
        .env_remove("PLUGFOLD_RANKS_SECRET")
        .output()
        .unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(err.contains("PLUGFOLD_RANKS_SECRET is not set"), "{err}");
}

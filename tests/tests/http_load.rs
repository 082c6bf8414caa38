//! Many streams at once, and texts that are hard to tokenize.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use plugfold::text::TextModel;
use plugfold_tests::http::{Aftercheck, Said, TestServer, chat, say, settings};
use serde_json::json;

#[test]
fn two_hundred_streams_lose_and_mix_nothing() {
    let server = TestServer::with(settings(), 4096, 200);
    let after = Aftercheck::begin(&server);
    let text = |stream: usize| format!("{stream}:").repeat(40);
    for stream in 0..200 {
        server.scripts.set(&format!("#{stream}."), say(&format!("</think>{}<|endoftext|>", text(stream))));
    }
    std::thread::scope(|scope| {
        for stream in 0..200 {
            let server = &server;
            scope.spawn(move || {
                for _ in 0..3 {
                    let said = Said::read(&server.chat(&format!("#{stream}."), json!({"stream": true})));
                    assert_eq!(said.content, text(stream));
                }
            });
        }
    });
    after.finish();
}

#[test]
fn case_24_tokenizer_bombs() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/assets/demo-model");
    let server = TestServer::with_text(settings(), 4096, 4, TextModel::load(&demo, &[]).unwrap());
    let ending = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let slowest = scope.spawn(|| {
            let mut slowest = Duration::ZERO;
            while !ending.load(Ordering::Relaxed) {
                let begun = Instant::now();
                assert_eq!(server.get("/health").status, 200);
                slowest = slowest.max(begun.elapsed());
            }
            slowest
        });
        let base64 = "QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=+/0".repeat(12_500);
        for (what, text) in [
            ("letters", "a".repeat(1_000_000)),
            ("marks", "^".repeat(1_000_000)),
            ("lines", "_".repeat(500_000)),
            ("blanks", " ".repeat(1_000_000)),
            ("newlines", "\n".repeat(1_000_000)),
            ("combining marks", "\u{301}".repeat(1_000_000)),
            ("base64", base64),
        ] {
            let begun = Instant::now();
            let reply = server.post("/v1/chat/completions", &chat(&text, json!({})));
            // Answered or refused; the bound is 2 s, a machine under load gets more.
            assert!(
                reply.status == 200 || reply.status == 400 || reply.status == 503,
                "{what}: {}",
                reply.status
            );
            assert!(begun.elapsed() < Duration::from_secs(20), "{what}: {:?}", begun.elapsed());
        }
        ending.store(true, Ordering::Relaxed);
        // The bound is 50 ms, a machine under load gets more.
        let slowest = slowest.join().unwrap();
        assert!(slowest < Duration::from_secs(2), "{slowest:?}");
    });
    server.wait_idle();
}

//! Case 26 once more: clients that are slow without ever being silent, and very many of them.
#![allow(clippy::unwrap_used)]

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use plugfold::http::{HttpSettings, Limits};
use plugfold_tests::http::{Aftercheck, TestServer, settings};

/// Connections that hold up nobody.
const MANY: usize = 400;

/// Sends a byte again and again until the server closes; gives what it said.
fn trickle(mut stream: TcpStream, byte: u8) -> String {
    // The pause between two bytes is the time in which nothing comes back.
    stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    let (began, mut answer, mut buffer) = (Instant::now(), Vec::new(), [0; 4096]);
    loop {
        assert!(began.elapsed() < Duration::from_secs(20), "the connection stays open");
        let written = stream.write_all(&[byte]);
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => answer.extend_from_slice(&buffer[..read]),
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                // Closed for writing, and nothing more comes.
                if written.is_err() {
                    break;
                }
            }
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn case_26_bytes_that_trickle_give_no_more_time() {
    let limits = Limits { header_s: 0.4, body_s: 0.4, ..Limits::default() };
    let server = TestServer::with(HttpSettings { limits, ..settings() }, 4096, 4);
    let after = Aftercheck::begin(&server);
    for start in [
        "POST /v1/completions HTTP/1.1\r\nX-Long: ",
        "POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 100000\r\n\r\n{\"prompt\": \"",
    ] {
        let mut stream = server.connect();
        stream.write_all(start.as_bytes()).unwrap();
        let answer = trickle(stream, b'x');
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    }
    after.finish();
}

#[test]
fn case_26_hundreds_of_slow_clients_disturb_no_good_one() {
    let server = TestServer::start();
    let after = Aftercheck::begin(&server);
    let start = |at: usize| {
        let mut stream = server.connect();
        let part: &[u8] = if at.is_multiple_of(2) {
            b"POST /v1/comp"
        } else {
            b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9\r\n\r\n{"
        };
        stream.write_all(part).unwrap();
        stream
    };
    let slow: Vec<TcpStream> = (0..MANY).map(start).collect();
    // A good stream and good requests, with all of them open.
    after.finish();
    let after = Aftercheck::begin(&server);
    drop(slow);
    after.finish();
}

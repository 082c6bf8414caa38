//! A proxy that spoils replies: what it is told to look for, it replaces. It shows that a client's test can fail.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A proxy in front of a server.
pub struct Spoiler {
    /// Where it listens.
    pub address: SocketAddr,
    spoiled: Arc<AtomicUsize>,
}

impl Spoiler {
    /// Replaces `from` by `to` in everything that `server` sends. Both are of one length, so that lengths that the server
    /// has announced stay true. Its threads last as long as the process.
    ///
    /// # Panics
    /// When the lengths differ, or no port is free.
    #[allow(clippy::expect_used)]
    pub fn start(server: SocketAddr, from: &'static str, to: &'static str) -> Self {
        assert!(from.len() == to.len() && !from.is_empty(), "{from:?} and {to:?} must have one length");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("its address");
        let spoiled = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&spoiled);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let Ok(upstream) = TcpStream::connect(server) else { continue };
                let (Ok(client_in), Ok(upstream_in)) = (client.try_clone(), upstream.try_clone()) else {
                    continue;
                };
                std::thread::spawn(move || pass(client_in, upstream, |bytes| bytes.len()));
                let count = Arc::clone(&count);
                std::thread::spawn(move || {
                    pass(upstream_in, client, |bytes| replace(bytes, from.as_bytes(), to.as_bytes(), &count))
                });
            }
        });
        Self { address, spoiled }
    }

    /// How often it found what it looks for.
    pub fn spoiled(&self) -> usize {
        self.spoiled.load(Ordering::Relaxed)
    }
}

/// Replaces all finds; gives how many bytes may go on, because nothing from there on can be the start of one.
fn replace(bytes: &mut [u8], from: &[u8], to: &[u8], count: &AtomicUsize) -> usize {
    let mut at = 0;
    while let Some(found) = bytes[at..].windows(from.len()).position(|window| window == from) {
        at += found;
        bytes[at..at + to.len()].copy_from_slice(to);
        at += to.len();
        count.fetch_add(1, Ordering::Relaxed);
    }
    let held = (1..from.len()).rev().find(|len| bytes[at..].ends_with(&from[..*len]));
    bytes.len() - held.unwrap_or(0)
}

/// Hands on what arrives until one side closes. `change` says how many bytes may go on now.
fn pass(mut from: TcpStream, mut to: TcpStream, change: impl Fn(&mut [u8]) -> usize) -> io::Result<()> {
    let mut waiting = Vec::new();
    let mut buffer = [0; 16 << 10];
    loop {
        let read = from.read(&mut buffer).unwrap_or(0);
        waiting.extend_from_slice(&buffer[..read]);
        let ready = if read == 0 { waiting.len() } else { change(&mut waiting) };
        if to.write_all(&waiting[..ready]).is_err() || read == 0 {
            let _ = from.shutdown(Shutdown::Read);
            return to.shutdown(Shutdown::Write);
        }
        waiting.drain(..ready);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_are_replaced_wherever_the_bytes_are_cut() {
        let (from, to) = (b"abab".as_slice(), b"XXXX".as_slice());
        let text = b"ababab..aba abab ab";
        for cut in 0..=text.len() {
            let count = AtomicUsize::new(0);
            let mut got = Vec::new();
            let mut waiting = Vec::new();
            for part in [&text[..cut], &text[cut..]] {
                waiting.extend_from_slice(part);
                let ready = replace(&mut waiting, from, to, &count);
                got.extend(waiting.drain(..ready));
            }
            got.extend(waiting);
            assert_eq!(
                (got.as_slice(), count.into_inner()),
                (b"XXXXab..aba XXXX ab".as_slice(), 2),
                "cut at {cut}"
            );
        }
    }
}

//! Notes of the handshake: one line of JSON each, with the protocol's version outside of what versions may change.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Version of everything that ranks say to each other.
pub const PROTOCOL: u32 = 1;
/// Longest note, in bytes.
const LIMIT: usize = 64 << 10;

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Role {
    Control,
    Watch,
    Data,
}

/// The first note on every connection.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub token: [u8; 32],
    pub rank: usize,
    pub ranks: usize,
    /// Tells two processes apart that claim one rank.
    pub id: u64,
    pub pid: u32,
    pub role: Role,
    /// Where this rank takes data connections.
    pub data: SocketAddr,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Accepted,
    Refused(String),
    /// All ranks are there: each in words, and where followers take data connections.
    Welcome {
        who: Vec<String>,
        data: Vec<SocketAddr>,
    },
}

#[derive(Serialize, Deserialize)]
struct Line<T> {
    plugfold_ranks: u32,
    note: T,
}

pub(super) fn write(mut stream: &TcpStream, note: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(&Line { plugfold_ranks: PROTOCOL, note })?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// The next note, or in words why there is none.
pub(super) fn read<T: DeserializeOwned>(mut stream: &TcpStream, deadline: Instant) -> Result<T, String> {
    let closed = |error: io::Error| format!("it closed the connection ({error})");
    stream.set_read_timeout(Some(Duration::from_millis(20))).map_err(closed)?;
    let mut line = Vec::new();
    // Byte by byte: what follows the line is for another reader.
    let mut byte = [0];
    while line.last() != Some(&b'\n') {
        match stream.read(&mut byte) {
            Ok(0) => return Err(closed(ErrorKind::UnexpectedEof.into())),
            Ok(_) if line.len() < LIMIT => line.push(byte[0]),
            Ok(_) => return Err(format!("its greeting is over {LIMIT} bytes")),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if !matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Err(closed(error));
            }
            Err(_) if Instant::now() >= deadline => return Err("it does not answer".to_owned()),
            Err(_) => {}
        }
    }
    let line: Line<Value> = serde_json::from_slice(&line)
        .map_err(|_| "it does not speak the protocol of Plugfold's ranks".to_owned())?;
    let theirs = line.plugfold_ranks;
    if theirs != PROTOCOL {
        return Err(format!(
            "it speaks version {theirs} of the ranks' protocol, not {PROTOCOL}: run the same build on every rank"
        ));
    }
    serde_json::from_value(line.note).map_err(|error| format!("its greeting cannot be read ({error})"))
}

/// Whether the other side has closed the connection.
pub(super) fn closed(stream: &TcpStream) -> bool {
    matches!(peek(stream), Ahead::End)
}

/// Whether a note, or the end of the connection, waits to be read; frames do not begin like a note.
pub(super) fn waits(stream: &TcpStream) -> bool {
    matches!(peek(stream), Ahead::End | Ahead::Byte(b'{'))
}

/// What comes next on a connection.
enum Ahead {
    Nothing,
    End,
    Byte(u8),
}

/// Looks without taking.
fn peek(stream: &TcpStream) -> Ahead {
    let mut first = [0];
    let peek = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut first));
    let _ = stream.set_nonblocking(false);
    match peek {
        Ok(1) => Ahead::Byte(first[0]),
        Err(error) if error.kind() == ErrorKind::WouldBlock => Ahead::Nothing,
        _ => Ahead::End,
    }
}

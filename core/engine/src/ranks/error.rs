//! What can go wrong between ranks.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Why a world ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndKind {
    /// The rank's process or host is gone, stopped or cut off.
    Died,
    /// The rank said that it cannot go on.
    Failed,
    /// The rank said goodbye.
    Left,
    /// The ranks do not make the same calls in the same order.
    OutOfStep,
    /// What the rank sent did not arrive as it was sent.
    Damaged,
}

/// The end of a world: the same on every rank that could still be told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct End {
    /// The rank that caused it.
    pub rank: usize,
    /// That rank in words: `rank 1 of 2 (pid 1234, 10.0.0.2:7001)`.
    pub who: String,
    /// What happened to it.
    pub kind: EndKind,
    /// What was seen.
    pub reason: String,
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { who, reason, .. } = self;
        match self.kind {
            EndKind::Died => write!(f, "{who} stopped answering: {reason}; all ranks stop: start them again"),
            EndKind::Failed => write!(f, "{who} gave up: {reason}"),
            EndKind::Left => write!(f, "{who} has left in good order{reason}"),
            EndKind::Damaged => {
                write!(f, "{who} cannot be understood: {reason}; look for a faulty network or host")
            }
            EndKind::OutOfStep => write!(f, "the ranks are out of step: {reason}"),
        }
    }
}

/// A named line on which ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The line's name.
    pub name: String,
    /// Each rank's value, in rank order; `None` where a rank has no such line.
    pub values: Vec<Option<String>>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.name)?;
        let mut told: Vec<&Option<String>> = Vec::new();
        for value in &self.values {
            if told.contains(&value) {
                continue;
            }
            let ranks: Vec<String> =
                (0..self.values.len()).filter(|&r| &self.values[r] == value).map(|r| r.to_string()).collect();
            let (plural, verb) = if ranks.len() == 1 { ("", "has") } else { ("s", "have") };
            let separator = if told.is_empty() { "" } else { "," };
            write!(f, "{separator} rank{plural} {} {verb} ", ranks.join(", "))?;
            match value {
                Some(value) => write!(f, "`{value}`")?,
                None => f.write_str("no such line")?,
            }
            told.push(value);
        }
        Ok(())
    }
}

/// An error of the ranks layer.
#[derive(Debug, thiserror::Error)]
pub enum RankError {
    /// The world has ended; every later call says the same.
    #[error("{0}")]
    Ended(End),
    /// The address cannot be listened at.
    #[error("rank {rank} cannot listen at {addr}: {source}; free the port or give another address")]
    Listen {
        /// This rank.
        rank: usize,
        /// The address.
        addr: SocketAddr,
        /// The system's answer.
        source: io::Error,
    },
    /// The system refused what a rank needs for its connections.
    #[error("rank {rank} cannot set up its connections: {source}")]
    Setup {
        /// This rank.
        rank: usize,
        /// The system's answer.
        source: io::Error,
    },
    /// Another rank cannot be reached at the start.
    #[error("rank {rank} of {ranks} cannot reach {peer} at {addr} within {} s: {reason}", timeout.as_secs_f32())]
    Unreachable {
        /// This rank.
        rank: usize,
        /// How many ranks this one was told of.
        ranks: usize,
        /// The rank asked for.
        peer: String,
        /// Its address.
        addr: SocketAddr,
        /// How long it was tried.
        timeout: Duration,
        /// What was seen.
        reason: String,
    },
    /// The start was refused: another protocol, secret, number of ranks, or a rank twice.
    #[error("{0}")]
    Refused(String),
    /// Not all ranks came in time.
    #[error("{missing} of {ranks} did not join at {addr} within {} s{strangers}", timeout.as_secs_f32())]
    Absent {
        /// The ranks that are missing.
        missing: String,
        /// How many ranks were to come.
        ranks: usize,
        /// Where they were to come.
        addr: SocketAddr,
        /// How long they were waited for.
        timeout: Duration,
        /// Callers that were turned away meanwhile.
        strangers: String,
    },
    /// A message is longer than the limit; nothing was sent.
    #[error("{what} of {len} bytes is over the limit of {limit} bytes; send less at a time")]
    TooLarge {
        /// What was to be sent.
        what: &'static str,
        /// Its length.
        len: usize,
        /// The limit.
        limit: usize,
    },
    /// The buffer for all parts has another size than ranks times one part; nothing was sent.
    #[error("rank {rank} gathers {part} bytes from each of {ranks} ranks into {all} bytes, not {}", ranks * part)]
    Size {
        /// This rank.
        rank: usize,
        /// How many ranks there are.
        ranks: usize,
        /// Bytes of one part.
        part: usize,
        /// Bytes of the buffer.
        all: usize,
    },
    /// A call that this rank may not make.
    #[error("rank {rank} of {ranks} called {call}: {rule}")]
    Misuse {
        /// This rank.
        rank: usize,
        /// How many ranks there are.
        ranks: usize,
        /// The call.
        call: &'static str,
        /// What holds.
        rule: &'static str,
    },
    /// The ranks do not have the same settings.
    #[error("the ranks differ in {}; {mend}", list(.differences))]
    Differ {
        /// Every line that is not the same on all ranks.
        differences: Vec<Difference>,
        /// What to do.
        mend: &'static str,
    },
    /// A rank's process could not be started.
    #[error("cannot start rank {rank} ({exe}): {source}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The program.
        exe: String,
        /// The system's answer.
        source: io::Error,
    },
    /// A rank's process ended too early.
    #[error("rank {rank} of {ranks} (pid {pid}) ended with {status}{last}")]
    ChildEnded {
        /// The rank.
        rank: usize,
        /// How many ranks there are.
        ranks: usize,
        /// Its process.
        pid: u32,
        /// Exit code or signal.
        status: String,
        /// Its last words on standard error.
        last: String,
    },
}

impl RankError {
    /// The end of the world, if that is what this error tells.
    pub fn end(&self) -> Option<&End> {
        match self {
            Self::Ended(end) => Some(end),
            _ => None,
        }
    }
}

fn list(differences: &[Difference]) -> String {
    let lines: Vec<String> = differences.iter().map(ToString::to_string).collect();
    match lines.as_slice() {
        [one] => one.clone(),
        many => format!("{} settings:\n  {}\n", many.len(), many.join("\n  ")),
    }
}

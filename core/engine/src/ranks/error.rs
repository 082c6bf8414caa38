//! What can go wrong between ranks.

use std::fmt;

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

/// An error of the ranks layer. Each text names the rank, what was found, what was expected and the mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RankError {
    /// The world has ended; every later call says the same.
    #[error("{0}")]
    Ended(End),
    /// The world did not come to be: an address, a secret, a number of ranks, a rank that is missing or twice, a process
    /// that does not start or ended early.
    #[error("{0}")]
    Start(String),
    /// A call with a wrong size or by the wrong rank. Nothing was sent and the world goes on.
    #[error("{0}")]
    Call(String),
    /// The ranks do not have the same settings; the same on every rank. The world goes on.
    #[error("the ranks differ in {}; {mend}", list(.differences))]
    Differ {
        /// Every line that is not the same on all ranks.
        differences: Vec<Difference>,
        /// What to do.
        mend: &'static str,
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
        [one] => format!("one setting: {one}"),
        many => format!("{} settings: {}", many.len(), many.join("; ")),
    }
}

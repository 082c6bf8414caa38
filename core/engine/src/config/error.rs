//! What can be wrong with a `config.json`.

use std::fmt;
use std::path::PathBuf;

/// A configuration that cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file is missing or cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is longer than any configuration is.
    #[error("{} has {bytes} bytes; a configuration has at most {limit}", path.display())]
    TooLong {
        /// The file.
        path: PathBuf,
        /// Its length in bytes.
        bytes: u64,
        /// The most that is read.
        limit: u64,
    },
    /// The text is not JSON.
    #[error("{name} is not valid JSON: {source}")]
    Json {
        /// File name, or where the text came from.
        name: String,
        /// Line, column and reason.
        source: serde_json::Error,
    },
    /// The text is JSON, but names things that this engine cannot run. All of them, not only the first.
    #[error("{}", list(name, problems))]
    Unsupported {
        /// File name, or where the text came from.
        name: String,
        /// What it names; never empty.
        problems: Vec<Problem>,
    },
}

/// One field that cannot be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// Dotted path from the top of the file, such as `text_config.hidden_act`.
    pub field: String,
    /// The value found there, as JSON; `absent` when it is missing.
    pub value: String,
    /// What would be accepted.
    pub supported: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}; supported: {}", self.field, self.value, self.supported)
    }
}

fn list(name: &str, problems: &[Problem]) -> String {
    let mut text = match problems.len() {
        1 => format!("{name} describes what cannot be run:"),
        n => format!("{name} describes what cannot be run, for {n} reasons:"),
    };
    for problem in problems {
        text.push_str("\n  ");
        text.push_str(&problem.to_string());
    }
    text
}

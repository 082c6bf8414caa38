//! What any bytes from outside must not break.
//!
//! Each target is a function over bytes that panics when an invariant does not hold. `fuzz/run` runs it
//! with coverage, from `fuzz_targets/`; `tests/corpus.rs` runs it over the stored corpus and over a fixed number of its mutations, on any
//! toolchain.

pub mod chat;
pub mod knobs;
pub mod mutate;
pub mod request;
pub mod schema;
pub mod sse;
pub mod tool_calls;

/// One target.
pub struct Target {
    /// Its name, and that of its corpus' folder.
    pub name: &'static str,
    /// Runs it on one input; whether that came past the first checks.
    pub run: fn(&[u8]) -> bool,
    /// Words that mutations put in.
    pub words: &'static [&'static str],
}

/// All targets.
pub static TARGETS: [Target; 6] = [
    Target { name: "request", run: request::run, words: &request::WORDS },
    Target { name: "tool_calls", run: tool_calls::run, words: &tool_calls::WORDS },
    Target { name: "chat", run: chat::run, words: &chat::WORDS },
    Target { name: "knobs", run: knobs::run, words: &knobs::WORDS },
    Target { name: "schema", run: schema::run, words: &schema::WORDS },
    Target { name: "sse", run: sse::run, words: &tool_calls::WORDS },
];

/// The first line as sizes of cuts, one a byte (1 to 9), and the rest.
pub(crate) fn cuts(data: &[u8]) -> (Vec<usize>, &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let sizes: Vec<usize> = data[..end].iter().map(|byte| usize::from(byte % 9) + 1).collect();
    (if sizes.is_empty() { vec![1] } else { sizes }, data.get(end + 1..).unwrap_or_default())
}

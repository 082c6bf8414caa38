//! The promises of the engine, tried on a model: drafted equals serial, batched equals alone, resumed equals fresh, chunk
//! sizes change nothing, ranks agree, a forward commits nothing, a row's bits depend on the row.
//!
//! Every gate runs the same script on every rank and compares tokens and whole committed states; it says which gate, which
//! case and what differed first. [`plants`] breaks each promise on purpose, to see that its gate notices.

mod gates;
mod lab;
pub mod plants;
mod script;

use std::sync::Arc;

use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::Options;

pub use gates::{GATES, Gate};
pub use plants::Plant;

/// Makes the hooks of a rank.
pub type MakeHooks = Arc<dyn Fn(usize) -> Result<Hooks, String> + Send + Sync>;

/// What is tried.
#[derive(Clone)]
pub struct Setup {
    /// The model and its sizes.
    pub options: Options,
    /// Ranks, all in this process.
    pub ranks: usize,
    /// Hooks of each rank.
    pub hooks: MakeHooks,
    /// A fault to plant.
    pub plant: Option<&'static Plant>,
}

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{gate}: {case}: {what}")]
pub struct Broken {
    /// Which gate.
    pub gate: &'static str,
    /// Which case of it.
    pub case: String,
    /// What differed first, or what failed.
    pub what: String,
}

/// The outcome of one gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// So many comparisons, none differed.
    Holds(usize),
    /// Why there was nothing to compare.
    Nothing(String),
    /// The first difference.
    Broken(Broken),
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Verdict::Holds(n) => write!(f, "holds ({n} comparisons)"),
            Verdict::Nothing(why) => write!(f, "nothing to compare: {why}"),
            Verdict::Broken(broken) => write!(f, "BROKEN: {}: {}", broken.case, broken.what),
        }
    }
}

/// Runs one gate.
pub fn run(gate: &'static Gate, setup: &Setup) -> Verdict {
    match (gate.run)(setup) {
        Ok(verdict) => verdict,
        Err((case, what)) => Verdict::Broken(Broken { gate: gate.name, case, what }),
    }
}

#[cfg(test)]
mod tests;

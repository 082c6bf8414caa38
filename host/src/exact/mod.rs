//! The promises of the engine, tried on a model: drafted equals serial, batched equals alone, resumed equals fresh, chunk
//! sizes change nothing, ranks agree, a forward commits nothing, a row's bits depend on the row, plugins that promise to
//! change no reply change none.
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
use plugfold_engine::ranks::World;
use plugfold_kernels::device::Device;

pub use gates::{GATES, Gate};
pub use plants::Plant;

/// What a rank is loaded with.
pub struct Company {
    /// Hooks of its plugins.
    pub hooks: Hooks,
    /// Lines that must be equal on all ranks.
    pub lines: Vec<(String, String)>,
    /// What has to live as long as the rank.
    pub keep: Box<dyn std::any::Any + Send>,
}

/// Loads a rank's plugins, in step with the other ranks.
pub type Load = Arc<dyn Fn(&World, &Options) -> Result<Company, String> + Send + Sync>;

/// A loaded plugin that promises to change no reply.
#[derive(Clone)]
pub struct Silent {
    /// Its name.
    pub name: String,
    /// What it promises: "same-bits", "drafts-only" or "host-only".
    pub class: String,
    /// Loads a rank's plugins without it, and without those that need it.
    pub without: Load,
    /// Whether it brings the transport in force: without it the built-in one is used.
    pub transport: bool,
    /// The same of the executor.
    pub executor: bool,
}

/// What is tried.
#[derive(Clone)]
pub struct Setup {
    /// The model and its sizes.
    pub options: Options,
    /// Ranks, all in this process.
    pub ranks: usize,
    /// The device of each rank; none: all run on the host.
    pub devices: Vec<Option<Arc<dyn Device>>>,
    /// Plugins of each rank.
    pub load: Load,
    /// Those of them that promise to change no reply.
    pub silent: Vec<Silent>,
    /// A fault to plant.
    pub plant: Option<&'static Plant>,
}

impl Setup {
    /// Ranks with these hooks.
    pub fn with_hooks(
        options: Options,
        ranks: usize,
        hooks: impl Fn(usize) -> Result<Hooks, String> + Send + Sync + 'static,
    ) -> Self {
        let load = move |world: &World, _: &Options| {
            Ok(Company { hooks: hooks(world.rank())?, lines: Vec::new(), keep: Box::new(()) })
        };
        Self { options, ranks, devices: Vec::new(), load: Arc::new(load), silent: Vec::new(), plant: None }
    }

    /// The bare engine.
    pub fn bare(options: Options, ranks: usize) -> Self {
        Self::with_hooks(options, ranks, |_| Ok(Hooks::default()))
    }
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

/// Loads the ranks once, without a planted fault: what keeps them from starting would break every gate.
///
/// # Errors
/// The reason of the rank that cannot start.
pub fn starts(setup: &Setup) -> Result<(), String> {
    lab::on_all(&Setup { plant: None, ..setup.clone() }, |_| Ok(())).map(|_| ())
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

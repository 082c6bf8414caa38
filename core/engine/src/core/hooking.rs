//! What a core has because of its hooks, apart from weights, caches and memory.

use std::collections::HashMap;
use std::mem::swap;
use std::sync::Arc;

use plugfold_abi::points::{Executor, ExecutorObject};

use super::stage::Stages;
use super::{Core, LoadError, Programs, Tag};
use crate::hooks::{Hooked, Hooks, chosen};
use crate::program::Registry;

/// Hooks with everything that a core derives from them: providers, programs, words and fields, tags.
///
/// A core may exchange them for others while no sequence runs, so that two sets are compared on the same memory. What
/// hooks decided before anything was allocated (limits, layouts, weights) stays as the first set decided it.
pub struct Hooking {
    hooks: Arc<Hooks>,
    registry: Registry,
    programs: Programs,
    executor: Option<Hooked<ExecutorObject>>,
    stages: Stages,
    tags: HashMap<Vec<plugfold_abi::KnobValue>, Tag>,
}

impl Core {
    /// Prepares other hooks for this core. `executor`: the name of the one in force.
    ///
    /// # Errors
    /// A hook that cannot say what it is, or an executor that cannot be had.
    pub fn hooking(&self, hooks: Arc<Hooks>, executor: Option<&str>) -> Result<Hooking, LoadError> {
        let executor = chosen(&hooks.executors, "executor", executor, Executor::name)?.cloned();
        let (rank, ranks) = (self.split.rank as u32, self.split.ranks as u32);
        Ok(Hooking {
            registry: Registry::new(&hooks, rank, ranks, self.device.as_ref())?,
            programs: Programs::default(),
            executor,
            stages: Stages::new(&hooks)?,
            tags: HashMap::new(),
            hooks,
        })
    }

    /// Exchanges the hooks in force for others. Sequences that run belong to the hooks that they began with: there must be
    /// none.
    pub fn exchange_hooks(&mut self, other: &mut Hooking) {
        swap(&mut self.hooks, &mut other.hooks);
        swap(&mut self.registry, &mut other.registry);
        swap(&mut self.programs, &mut other.programs);
        swap(&mut self.executor, &mut other.executor);
        swap(&mut self.stages, &mut other.stages);
        swap(&mut self.tags, &mut other.tags);
    }
}

//! Ranks of a model in this process, all running one script.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use plugfold_engine::core::CoreOptions;
use plugfold_engine::rank::Rank;
use plugfold_engine::ranks::World;

use super::{Company, Setup};

/// Runs a script on every rank; gives what each rank gave.
///
/// # Errors
/// A rank that cannot start, or the script's own error, or its panic.
pub(super) fn on_all<T: Send>(
    setup: &Setup,
    script: impl Fn(&mut Rank) -> Result<T, String> + Sync,
) -> Result<Vec<T>, String> {
    let worlds = World::local(setup.ranks).map_err(|e| e.to_string())?;
    let done = thread::scope(|scope| {
        let script = &script;
        let one = |(rank, world): (usize, World)| {
            scope.spawn(move || {
                let caught = catch_unwind(AssertUnwindSafe(|| on_one(setup, rank, world, script)));
                caught.unwrap_or_else(|panic| {
                    let text = panic.downcast_ref::<String>().cloned();
                    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                    Err(format!("rank {rank} panicked: {}", text.unwrap_or_default()))
                })
            })
        };
        let threads: Vec<_> = worlds.into_iter().enumerate().map(one).collect();
        let ended = |t: thread::ScopedJoinHandle<'_, Result<T, String>>| {
            t.join().unwrap_or_else(|_| Err("a rank's thread panicked".into()))
        };
        threads.into_iter().map(ended).collect::<Vec<_>>()
    });
    done.into_iter().collect()
}

fn on_one<T>(
    setup: &Setup,
    rank: usize,
    world: World,
    script: &(impl Fn(&mut Rank) -> Result<T, String> + Sync),
) -> Result<T, String> {
    let Company { mut hooks, lines, keep } = (setup.load)(&world, &setup.options)?;
    if let Some(plant) = setup.plant {
        plant.put(&mut hooks, rank, setup.ranks)?;
    }
    let device = setup.devices.get(rank).cloned().flatten();
    let core = CoreOptions { hooks: Arc::new(hooks), lines, device, ..CoreOptions::default() };
    let mut loaded = Rank::load(&setup.options, core, world).map_err(|e| e.to_string())?;
    let out = script(&mut loaded);
    match &out {
        Ok(_) => {
            // Who leaves first must not leave another in an exchange. Where one has failed, it says so itself.
            let _ = loaded.world.agree_all("script: done", true);
            loaded.world.goodbye();
        }
        // The others must not wait for this rank.
        Err(error) => drop(loaded.world.fail(error.clone())),
    }
    drop(loaded);
    drop(keep);
    out
}

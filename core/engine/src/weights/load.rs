//! Loading the weights of a rank: read as they were built before, or built.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use plugfold_kernels::device::Device;
use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::builders::{Job, jobs};
use super::prepared::{self, Shelf};
use super::{Linked, Progress, Recipe, Source, WeightError, WeightTable};
use crate::hooks::Hooks;

/// Where weights came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// Built from the checkpoint's tensors.
    Built,
    /// Read from the store of this name, as they had been built before.
    Prepared(String),
}

/// The weights of a rank.
pub struct Loaded {
    /// The weights.
    pub table: WeightTable,
    /// Where they came from.
    pub origin: Origin,
    /// What links and builders made of the checkpoint, as a number; empty where there are none. Part of the identity of
    /// whatever is computed with these weights.
    pub identity: String,
}

/// What decides the weights of a rank besides the tensors.
pub struct Given<'a> {
    /// Hooks of plugins.
    pub hooks: &'a Hooks,
    /// Layers without the multi-token-prediction one.
    pub layers: usize,
    /// Values that are no numbers may be loaded.
    pub allow_nan: bool,
    /// Told how far it is.
    pub progress: &'a Progress,
    /// Where the weights go; `None`: they stay where they were made.
    pub device: Option<&'a Arc<dyn Device>>,
    /// Where prepared weights are looked for, and under which name; `None` for sources that are no checkpoint.
    pub shelf: Option<Shelf<'a>>,
}

/// Makes every weight of a rank.
///
/// # Errors
/// The first unreadable tensor; a plugin whose links or builders fail or contradict another's.
pub fn load<S: Source>(
    source: &S,
    list: &[Recipe],
    given: &Given<'_>,
) -> Result<Loaded, WeightError<S::Error>> {
    let linked = Linked::new(source, &given.hooks.weights, list, given.allow_nan)?;
    let (jobs, builders) = jobs(&linked, list, &given.hooks.builders, given.layers)?;
    let lines: Vec<String> = linked.identity().iter().cloned().chain(builders).collect();
    let identity = number(&lines);
    let store = match &given.shelf {
        Some(shelf) => prepared::open(&given.hooks.prepared, shelf, &lines)?,
        None => None,
    };
    if let Some(store) = &store
        && let Some(mut table) = store.read(&jobs)
    {
        if let Some(device) = given.device {
            table.move_to(device)?;
        }
        table.alias(list);
        (given.progress)(table.bytes());
        return Ok(Loaded { table, origin: Origin::Prepared(store.name().to_owned()), identity });
    }
    // A store keeps what lies on the host: then all of it is made before it moves.
    let device = given.device.filter(|_| store.is_none());
    let mut table = build(&linked, &jobs, given.progress, device)?;
    if let Some(store) = &store {
        store.keep(&jobs, &table);
        if let Some(device) = given.device {
            table.move_to(device)?;
        }
    }
    table.alias(list);
    Ok(Loaded { table, origin: Origin::Built, identity })
}

fn build<S: Source>(
    source: &Linked<'_, S>,
    jobs: &[Job<'_>],
    progress: &Progress,
    device: Option<&Arc<dyn Device>>,
) -> Result<WeightTable, WeightError<S::Error>> {
    let done = AtomicUsize::new(0);
    let made: Vec<_> = jobs
        .par_iter()
        .map(|job| {
            let mut made = job.run(source)?;
            if let Some(device) = device {
                // As each is made: the host need not hold the whole model.
                made.planes.iter_mut().try_for_each(|(plane, _)| plane.move_to(device))?;
            }
            let bytes: usize = made.planes.iter().map(|(plane, _)| plane.bytes()).sum();
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes);
            Ok(made)
        })
        .collect::<Result<_, WeightError<S::Error>>>()?;
    let mut table = WeightTable::default();
    for (job, made) in jobs.iter().zip(made) {
        let views: Vec<_> = made.planes.iter().map(|(plane, rows)| plane.view(*rows)).collect();
        table.push(job, made.format, &views);
        table.planes.push(made.planes.into_iter().map(|(plane, _)| plane).collect());
    }
    Ok(table)
}

/// Lines as one number, in hexadecimal; nothing of no lines.
fn number(lines: &[String]) -> String {
    use std::fmt::Write;
    if lines.is_empty() {
        return String::new();
    }
    let mut hash = Sha256::new();
    for line in lines {
        hash.update((line.len() as u64).to_le_bytes());
        hash.update(line);
    }
    let mut text = String::with_capacity(16);
    for byte in &hash.finalize()[..8] {
        // Writing into a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

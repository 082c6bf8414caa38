//! Work over the one pool of threads.
//!
//! Work is split over outputs only (columns, heads, rows), never inside a sum, so how it is split has no influence on bits.

use plugfold_abi::points::{Host, HostObject, Level};
use plugfold_abi::{OpError, Text};
use rayon::prelude::*;

/// Below this many multiply-adds a call is not worth waking another thread.
const SERIAL_BELOW: usize = 1 << 18;

/// Threads of the pool.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Gives the pool so many threads, before anything runs on it; gives how many it has. They are others where the pool was
/// made before.
pub fn size_pool(threads: usize) -> usize {
    let made = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).build_global();
    // The only other reason for an error is that there is a pool.
    if made.is_err() { self::threads() } else { threads.max(1) }
}

/// Gives a plugin's copy of the kernels as many threads as its host uses; a warning says where that is too late.
///
/// # Errors
/// A host that fails.
pub fn threads_of(host: &HostObject) -> Result<(), OpError> {
    let wanted = host.threads()?.max(1) as usize;
    let have = size_pool(wanted);
    if have != wanted {
        let text = format!(
            "works with {have} threads, not the {wanted} of the server: its pool was in use before it was loaded"
        );
        host.log(Level::Warn, Text::from(text.as_str()))?;
    }
    Ok(())
}

/// Runs `f(index, item)` on every item; on the pool when `work` (multiply-adds or moved elements of all items) is worth it.
pub(crate) fn each<I>(items: I, work: usize, f: impl Fn(usize, I::Item) + Sync)
where
    I: IntoIterator<IntoIter: ExactSizeIterator, Item: Send>,
{
    let items = items.into_iter();
    if items.len() < 2 || work < SERIAL_BELOW {
        items.enumerate().for_each(|(i, item)| f(i, item));
    } else {
        items
            .collect::<Vec<_>>()
            .into_par_iter()
            .enumerate()
            .with_max_len(1)
            .for_each(|(i, item)| f(i, item));
    }
}

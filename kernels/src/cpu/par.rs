//! Work over the one pool of threads.
//!
//! Work is split over outputs only (columns, heads, rows), never inside a sum, so how it is split has no influence on bits.

use rayon::prelude::*;

/// Below this many multiply-adds a call is not worth waking another thread.
const SERIAL_BELOW: usize = 1 << 18;

/// Threads of the pool.
pub fn threads() -> usize {
    rayon::current_num_threads()
}

/// Runs `f(index, item)` on every item; on the pool when `work` (multiply-adds or moved elements of all items) is worth it.
pub(crate) fn each<T: Send>(items: Vec<T>, work: usize, f: impl Fn(usize, T) + Sync) {
    if items.len() < 2 || work < SERIAL_BELOW {
        items.into_iter().enumerate().for_each(|(i, item)| f(i, item));
    } else {
        items.into_par_iter().enumerate().with_max_len(1).for_each(|(i, item)| f(i, item));
    }
}

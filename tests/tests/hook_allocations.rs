//! What a decode step allocates because of hooks: counted, since time on a busy machine hides it.
#![allow(clippy::unwrap_used)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use plugfold::plugins::null;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{Request, Service as _};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{ids, options, reply};

/// The system's allocator, counting.
struct Counting;

static COUNT: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above; the block came from `alloc`.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Steps that are counted.
const STEPS: u64 = 128;

fn start(options: &Options, hooks: Hooks) -> Engine {
    let core = CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() };
    let rank = Rank::load(options, core, World::single()).unwrap();
    Engine::start(rank).unwrap()
}

/// Allocations of one decode step: those of a long reply beyond those of a short one.
fn a_step(engine: &Engine) -> f64 {
    let vocab = engine.info().vocab_size as u32;
    let of = |seed: u64, steps: u64| {
        let ids = ids(seed, 9, vocab);
        let request = Request { ids, max_tokens: steps as usize + 1, ..Request::default() };
        let before = COUNT.load(Ordering::Relaxed);
        let (tokens, _) = reply(&engine.submit(request).unwrap()).unwrap();
        assert_eq!(tokens.len() as u64, steps + 1);
        COUNT.load(Ordering::Relaxed) - before
    };
    // Programs of all shapes are made, and buffers grown, before anything is counted.
    of(1, 2 * STEPS);
    let (short, long) = (of(2, STEPS), of(3, 2 * STEPS));
    (long as f64 - short as f64) / STEPS as f64
}

#[test]
fn null_hooks_at_every_point_add_no_allocation_to_a_step() {
    let options = options(&tiny_dir(), 1, 64);
    let bare = a_step(&start(&options, Hooks::default()));
    let hooked = a_step(&start(&null::options(options.clone()), null::hooks().unwrap()));
    println!(
        "allocations a decode step: {bare:.2} without hooks, {hooked:.2} with a null hook at every point"
    );
    assert!(bare > 0.0, "the counter counts");
    let added = hooked - bare;
    // Less than one in two steps: lists that grow with the reply double now and then.
    assert!(
        added < 0.5,
        "a null hook at every point adds {added:.2} allocations to a decode step ({bare:.2} without): what hooks need again \
         in every step belongs into buffers that are kept"
    );
}

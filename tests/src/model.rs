//! Small models, loaded on one rank or on several in one process.

use std::path::Path;
use std::sync::{Arc, Barrier};
use std::thread;

use plugfold_abi::{CommObject, Phase};
use plugfold_cuda::CudaDevice;
use plugfold_emulated::HostMachine;
use plugfold_engine::core::{Core, CoreOptions, Forward, SeqRows, Want};
use plugfold_engine::engine::Engine;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{EngineError, Event, Finish, Handle, Request, RequestStats, Sampling};
use plugfold_engine::split::Split;
use plugfold_kernels::device::Device;

use crate::goldens::tiny_dir;

/// The tiny model on one rank.
///
/// # Panics
/// When it cannot be loaded.
pub fn tiny_core(slots: usize, context: usize) -> Core {
    let options = CoreOptions { slots, context: Some(context), ..CoreOptions::default() };
    Core::load(&tiny_dir(), &options, Split::WHOLE, None).unwrap_or_else(|e| panic!("{e}"))
}

/// A device that runs the CUDA kernels on the CPU; `guarded`: the host cannot reach its memory, and each launch takes longer.
pub fn emulated(guarded: bool) -> Arc<dyn Device> {
    let machine = if guarded { HostMachine::guarded() } else { HostMachine::default() };
    Arc::new(CudaDevice::new(Arc::new(machine)))
}

/// Loads `ranks` ranks of a model in threads and runs rank 0's part in this one; the others follow.
///
/// # Panics
/// When a rank cannot be loaded or ends with an error.
pub fn on_ranks<T>(options: &Options, ranks: usize, lead: impl FnOnce(&mut Rank) -> T) -> T {
    on_ranks_with(options, ranks, |_| CoreOptions::default(), lead)
}

/// As [`on_ranks`], with core options of each rank's own.
///
/// # Panics
/// As [`on_ranks`].
pub fn on_ranks_with<T>(
    options: &Options,
    ranks: usize,
    core_options: impl Fn(usize) -> CoreOptions + Sync,
    lead: impl FnOnce(&mut Rank) -> T,
) -> T {
    let mut worlds = World::local(ranks).unwrap_or_else(|e| panic!("{e}")).into_iter();
    let zero = worlds.next().unwrap_or_else(|| panic!("rank 0 exists"));
    thread::scope(|scope| {
        for world in worlds {
            let core_options = &core_options;
            scope.spawn(move || {
                let rank = world.rank();
                let loaded = Rank::load(options, core_options(rank), world);
                loaded.and_then(Rank::follow).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
            });
        }
        let mut rank = Rank::load(options, core_options(0), zero).unwrap_or_else(|e| panic!("{e}"));
        let out = lead(&mut rank);
        rank.world.goodbye();
        out
    })
}

/// Runs something on every rank of a model, each in a thread; gives what each came to, in rank order. On one rank there is
/// nobody to exchange with.
///
/// # Panics
/// When a rank cannot be loaded or panics.
pub fn cores_on_ranks<T: Send, E: std::fmt::Display>(
    ranks: usize,
    load: impl Fn(Split, Option<Arc<CommObject>>) -> Result<Core, E> + Sync,
    run: impl Fn(&mut Core) -> T + Sync,
) -> Vec<T> {
    if ranks == 1 {
        return vec![run(&mut load(Split::WHOLE, None).unwrap_or_else(|e| panic!("{e}")))];
    }
    let worlds = World::local(ranks).unwrap_or_else(|e| panic!("{e}"));
    // Who leaves first must not leave another in an exchange.
    let done = Barrier::new(ranks);
    let one = |world: World| {
        let (rank, comm) = (world.rank(), Arc::new(CommObject::new(world.comm())));
        let mut core = load(Split { rank, ranks }, Some(comm)).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
        let out = run(&mut core);
        done.wait();
        world.goodbye();
        out
    };
    thread::scope(|scope| {
        let one = &one;
        let threads: Vec<_> = worlds.into_iter().map(|world| scope.spawn(move || one(world))).collect();
        threads.into_iter().map(|t| t.join().unwrap_or_else(|_| panic!("a rank panicked"))).collect()
    })
}

/// Options for a small model.
pub fn options(model: &Path, slots: usize, prefill_rows: usize) -> Options {
    Options { slots, prefill_rows, context: Some(1024), ..Options::new(model) }
}

/// One forward of one sequence.
///
/// # Panics
/// When it fails.
pub fn forward(core: &mut Core, phase: Phase, slot: usize, tokens: &[u32], want: Want) -> Forward {
    let rows = [SeqRows { slot, tokens, want, embeds: &[] }];
    let forward = core.forward(phase, &rows, None, false).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(forward.failure, None);
    forward
}

/// Prefills a slot from nothing, in chunks; gives the last row's logits.
///
/// # Panics
/// When it fails.
pub fn prefill(core: &mut Core, slot: usize, ids: &[u32], chunk: usize) -> Vec<f32> {
    core.begin(slot);
    extend(core, slot, ids, chunk)
}

/// Prefills a slot further.
///
/// # Panics
/// When it fails.
pub fn extend(core: &mut Core, slot: usize, ids: &[u32], chunk: usize) -> Vec<f32> {
    let mut last = Vec::new();
    for tokens in ids.chunks(chunk) {
        let f = forward(core, Phase::Prefill, slot, tokens, Want::Last);
        last = core.output(&f, "logits").map(<[f32]>::to_vec).unwrap_or_default();
        core.commit(&f, &[tokens.len()]).unwrap_or_else(|e| panic!("{e}"));
    }
    last
}

/// The index of the largest value, ties to the lower.
pub fn argmax(row: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    best as u32
}

/// Pseudo-random ids below `vocab`, the same for the same seed.
pub fn ids(seed: u64, n: usize, vocab: u32) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % u64::from(vocab)) as u32
        })
        .collect()
}

/// A request of pseudo-random ids below 480 that ends with its budget.
pub fn request(seed: u64, prompt: usize, tokens: usize, sampling: Sampling) -> Request {
    Request { ids: ids(seed, prompt, 480), sampling, max_tokens: tokens, ..Request::default() }
}

/// The reply's tokens, or the error.
///
/// # Errors
/// What the request ended with.
///
/// # Panics
/// When the engine forgets to say how it ended.
pub fn reply(handle: &Handle) -> Result<(Vec<u32>, Finish), EngineError> {
    reply_with_stats(handle).map(|(tokens, finish, _)| (tokens, finish))
}

/// As [`reply`], with what the request took.
///
/// # Errors
/// As [`reply`].
///
/// # Panics
/// As [`reply`].
pub fn reply_with_stats(handle: &Handle) -> Result<(Vec<u32>, Finish, RequestStats), EngineError> {
    let mut tokens = Vec::new();
    for event in &handle.events {
        match event {
            Event::Tokens(new) => tokens.extend(new),
            Event::Done { finish, stats } => return Ok((tokens, finish, stats)),
            Event::Error(error) => return Err(error),
            Event::Prefill { .. } | Event::Logprobs(_) => {}
        }
    }
    panic!("the events ended without a last one")
}

/// The reference on every rank.
pub fn plain(_: usize) -> CoreOptions {
    CoreOptions::default()
}

/// An engine over `ranks` ranks in this process; followers end when it is dropped.
///
/// # Panics
/// When it cannot be loaded.
pub fn engine(options: &Options, ranks: usize, core: impl Fn(usize) -> CoreOptions) -> Engine {
    let mut worlds = World::local(ranks).unwrap_or_else(|e| panic!("{e}"));
    for world in worlds.drain(1..) {
        let rank = world.rank();
        let (options, core) = (options.clone(), core(rank));
        thread::spawn(move || Rank::load(&options, core, world)?.follow());
    }
    let lead = Rank::load(options, core(0), worlds.remove(0)).unwrap_or_else(|e| panic!("{e}"));
    Engine::start(lead).unwrap_or_else(|e| panic!("{e}"))
}

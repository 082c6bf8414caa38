//! Ranks as threads and as processes, over real loopback sockets.

mod calls;
mod ends;
mod processes;
mod start;

use std::sync::mpsc;
use std::time::Duration;

use super::{End, RankError, World};

/// Every wait of a world that has to end, ends within this.
const SOON: Duration = Duration::from_secs(5);
/// For what takes long for other reasons; only a hang takes longer.
const HANG: Duration = Duration::from_secs(60);

/// Runs every rank on a thread of its own; results in rank order. Panics when one takes longer than `within`.
fn each_within<T: Send + 'static>(
    within: Duration,
    worlds: Vec<World>,
    run: impl Fn(World) -> T + Clone + Send + 'static,
) -> Vec<T> {
    let (send, receive) = mpsc::channel();
    let ranks = worlds.len();
    for world in worlds {
        let (send, run, rank) = (send.clone(), run.clone(), world.rank());
        std::thread::spawn(move || send.send((rank, run(world))));
    }
    drop(send);
    let mut results: Vec<Option<T>> = (0..ranks).map(|_| None).collect();
    for _ in 0..ranks {
        let (rank, result) = receive.recv_timeout(within).expect("a rank hangs or panicked");
        results[rank] = Some(result);
    }
    results.into_iter().map(Option::unwrap).collect()
}

fn each<T: Send + 'static>(ranks: usize, run: impl Fn(World) -> T + Clone + Send + 'static) -> Vec<T> {
    each_within(HANG, World::local(ranks).unwrap(), run)
}

/// The end that an error tells.
fn end_of<T: std::fmt::Debug>(result: Result<T, RankError>) -> End {
    match result {
        Err(RankError::Ended(end)) => end,
        other => panic!("expected the world's end, got {other:?}"),
    }
}

/// One all-gather of `len` bytes that carry the rank, checked.
fn exchange(world: &World, len: usize) -> Result<(), RankError> {
    let mine = vec![world.rank() as u8 + 1; len];
    let mut all = vec![0; len * world.ranks()];
    world.comm().gather(7, &mine, &mut all)?;
    for (rank, part) in all.chunks(len.max(1)).enumerate() {
        assert!(part.iter().all(|byte| *byte == rank as u8 + 1), "rank {rank}'s part of {len} bytes");
    }
    Ok(())
}

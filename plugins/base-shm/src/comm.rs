//! The exchange: everybody writes a piece, everybody reads all pieces, then the next.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use plugfold_abi::points::{Control, ControlObject};
use plugfold_abi::{Comm, OpError, Slice, SliceMut};

use crate::board::{Board, seen};

/// Looks at a counter before the processor is given to another thread.
const SPINS: u32 = 200;
/// Looks after which the thread sleeps between looks.
const YIELDS: u32 = 2000;
/// How long it sleeps.
const NAP: Duration = Duration::from_micros(50);
/// How often a sleeping wait asks whether a rank is gone.
const ASK: Duration = Duration::from_millis(20);

/// One rank's side.
pub(crate) struct Shared {
    board: Board,
    rank: usize,
    control: ControlObject,
    /// Pieces so far; also keeps two threads of this rank apart.
    pieces: Mutex<u64>,
}

impl Shared {
    pub(crate) fn new(board: Board, rank: usize, control: ControlObject) -> Self {
        Self { board, rank, control, pieces: Mutex::new(0) }
    }

    /// Waits until `ready`, or until the watch over the ranks says that it will never be.
    fn until(&self, ready: impl Fn() -> bool, what: &dyn Fn() -> String) -> Result<(), OpError> {
        let mut looks = 0;
        let mut asked = Instant::now();
        while !ready() {
            looks += 1;
            if looks < SPINS {
                std::hint::spin_loop();
            } else if looks < YIELDS {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
                if asked.elapsed() > ASK {
                    let ended = self.control.ended()?;
                    if !ended.is_empty() {
                        return Err(OpError::fatal(format!("{} while {}", ended, what())));
                    }
                    asked = Instant::now();
                }
            }
        }
        Ok(())
    }
}

impl Comm for Shared {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(self.rank as u32)
    }

    fn ranks(&self) -> Result<u32, OpError> {
        Ok(self.board.ranks() as u32)
    }

    fn all_gather(&self, mine: Slice<'_, u8>, all: SliceMut<'_, u8>) -> Result<(), OpError> {
        let (mine, all) = (mine.get_ref(), all.into_mut());
        let (ranks, len) = (self.board.ranks(), mine.len());
        if all.len() != ranks * len {
            let text = format!("{len} bytes from each of {ranks} ranks do not fit {} bytes", all.len());
            return Err(OpError::fatal(text));
        }
        let mut pieces = self.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        // An empty exchange is one piece, too: it keeps the ranks in step.
        let count = len.div_ceil(self.board.window()).max(1);
        for i in 0..count {
            let number = *pieces + 1;
            let span = (i * self.board.window()).min(len)..((i + 1) * self.board.window()).min(len);
            let others = || (0..ranks).filter(|r| *r != self.rank);
            let free = || others().all(|r| seen(self.board.read(r)) + 1 >= number);
            self.until(free, &|| format!("waiting until piece {} was read", number - 1))?;
            self.board.put(self.rank, &mine[span.clone()]);
            self.board.size(self.rank).store(len as u64, Ordering::Relaxed);
            self.board.written(self.rank).store(number, Ordering::Release);
            for r in others() {
                let there = || seen(self.board.written(r)) >= number;
                self.until(there, &|| format!("waiting for piece {number} of rank {r}"))?;
                let size = self.board.size(r).load(Ordering::Relaxed);
                if size != len as u64 {
                    let text = format!(
                        "the ranks are out of step: rank {} exchanges {len} bytes, rank {r} {size}",
                        self.rank
                    );
                    return Err(OpError::fatal(text));
                }
                self.board.get(r, &mut all[r * len..][span.clone()]);
            }
            all[self.rank * len..][span.clone()].copy_from_slice(&mine[span]);
            self.board.read(self.rank).store(number, Ordering::Release);
            *pieces = number;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::{CommObject, List, Text, TextBuf};
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;

    /// A control plane that says whether a rank is gone.
    struct Watch(Arc<AtomicBool>);
    impl Control for Watch {
        fn rank(&self) -> Result<u32, OpError> {
            Ok(0)
        }
        fn ranks(&self) -> Result<u32, OpError> {
            Ok(2)
        }
        fn gather(&self, _: Text<'_>, _: Slice<'_, u8>) -> Result<List<List<u8>>, OpError> {
            Ok(List::new())
        }
        fn patience_s(&self) -> Result<f64, OpError> {
            Ok(1.0)
        }
        fn ended(&self) -> Result<TextBuf, OpError> {
            Ok(if self.0.load(Ordering::Relaxed) { "rank 1 is gone".into() } else { TextBuf::new() })
        }
        fn host(&self) -> Result<TextBuf, OpError> {
            Ok("here".into())
        }
        fn streams(&self) -> Result<CommObject, OpError> {
            Err(OpError::new("not in this test"))
        }
    }

    fn group(ranks: usize, window: usize, gone: &Arc<AtomicBool>) -> Vec<Shared> {
        let (path, first) = Board::create(ranks, window).unwrap();
        let joined: Vec<Board> = (1..ranks).map(|_| Board::join(&path, ranks, window).unwrap()).collect();
        std::fs::remove_file(path).unwrap();
        let boards = std::iter::once(first).chain(joined).enumerate();
        boards.map(|(rank, b)| Shared::new(b, rank, ControlObject::new(Watch(gone.clone())))).collect()
    }

    #[test]
    fn every_rank_gets_all_parts_in_rank_order_whatever_their_size() {
        for ranks in [1, 2, 3] {
            let group = group(ranks, 64, &Arc::default());
            std::thread::scope(|scope| {
                for comm in &group {
                    scope.spawn(move || {
                        for (turn, len) in [5usize, 0, 64, 65, 1000, 1].into_iter().enumerate() {
                            let part = |r: usize| (0..len).map(move |i| (i * 7 + r * 31 + turn) as u8);
                            let mine: Vec<u8> = part(comm.rank).collect();
                            let mut all = vec![0; ranks * len];
                            comm.all_gather(Slice::from(&mine[..]), SliceMut::from(&mut all[..])).unwrap();
                            assert_eq!(all, (0..ranks).flat_map(part).collect::<Vec<u8>>());
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn ranks_out_of_step_are_told_and_a_dead_rank_ends_the_wait() {
        let gone = Arc::new(AtomicBool::new(false));
        let group = group(2, 64, &gone);
        std::thread::scope(|scope| {
            for (comm, len) in group.iter().zip([3usize, 4]) {
                scope.spawn(move || {
                    let mut all = vec![0; 2 * len];
                    let mine = vec![0; len];
                    let told = comm.all_gather(Slice::from(&mine[..]), SliceMut::from(&mut all[..]));
                    assert!(told.unwrap_err().to_string().contains("out of step"));
                });
            }
        });
        let alone = self::group(2, 64, &gone).swap_remove(0);
        gone.store(true, Ordering::Relaxed);
        let told = alone.all_gather(Slice::from(&[1u8][..]), SliceMut::from(&mut [0u8; 2][..])).unwrap_err();
        assert!(told.to_string().contains("rank 1 is gone while waiting for piece 1 of rank 1"), "{told}");
    }
}

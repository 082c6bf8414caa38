//! Collectives between threads of one process.

use std::sync::{Arc, Condvar, Mutex, PoisonError};

use plugfold_abi::{Comm, OpError, Slice, SliceMut};

use super::fate::lock;

/// One rank of a group that lives in one process: exchanges through shared memory, for tests and for ranks as threads.
/// A rank that is dropped ends the waits of the others.
pub struct SharedComm {
    rank: usize,
    group: Arc<Group>,
}

struct Group {
    board: Mutex<Board>,
    changed: Condvar,
}

struct Board {
    /// Each rank's part of the present exchange.
    parts: Vec<Option<Vec<u8>>>,
    /// How many ranks have read all parts.
    taken: usize,
    seq: u64,
    end: Option<String>,
}

impl SharedComm {
    /// All ranks of a new group, in rank order.
    pub fn group(ranks: usize) -> Vec<Self> {
        let board = Board { parts: vec![None; ranks], taken: 0, seq: 0, end: None };
        let group = Arc::new(Group { board: Mutex::new(board), changed: Condvar::new() });
        (0..ranks).map(|rank| Self { rank, group: Arc::clone(&group) }).collect()
    }

    fn until<'a>(
        &self,
        mut board: std::sync::MutexGuard<'a, Board>,
        ready: impl Fn(&Board) -> bool,
    ) -> Result<std::sync::MutexGuard<'a, Board>, OpError> {
        while !ready(&board) {
            if let Some(end) = &board.end {
                return Err(OpError::new(end.clone()));
            }
            board = self.group.changed.wait(board).unwrap_or_else(PoisonError::into_inner);
        }
        Ok(board)
    }

    fn end(&self, board: &mut Board, message: String) -> OpError {
        self.group.changed.notify_all();
        OpError::new(board.end.get_or_insert(message).clone())
    }
}

impl Comm for SharedComm {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(self.rank as u32)
    }

    fn ranks(&self) -> Result<u32, OpError> {
        Ok(lock(&self.group.board).parts.len() as u32)
    }

    fn all_gather(&self, mine: Slice<'_, u8>, all: SliceMut<'_, u8>) -> Result<(), OpError> {
        let (mine, all) = (mine.get_ref(), all.into_mut());
        let (rank, len) = (self.rank, mine.len());
        // A slower rank may still read the last exchange.
        let mut board = self.until(lock(&self.group.board), |board| board.parts[rank].is_none())?;
        let ranks = board.parts.len();
        if all.len() != ranks * len {
            let message = format!(
                "rank {rank} gathers {len} bytes from each of {ranks} ranks into {} bytes",
                all.len()
            );
            return Err(self.end(&mut board, message));
        }
        board.parts[rank] = Some(mine.to_vec());
        self.group.changed.notify_all();
        let mut board = self.until(board, |board| board.parts.iter().all(Option::is_some))?;
        for peer in 0..ranks {
            let part = board.parts[peer].as_deref().unwrap_or_default();
            if part.len() != len {
                let message = format!(
                    "the ranks are out of step: in exchange {} rank {rank} has {len} bytes, rank {peer} {}",
                    board.seq,
                    part.len()
                );
                return Err(self.end(&mut board, message));
            }
            all[peer * len..][..len].copy_from_slice(part);
        }
        board.taken += 1;
        if board.taken == ranks {
            board.parts.fill(None);
            board.taken = 0;
            board.seq += 1;
            self.group.changed.notify_all();
        }
        Ok(())
    }
}

impl Drop for SharedComm {
    fn drop(&mut self) {
        let mut board = lock(&self.group.board);
        let message = format!("rank {} of {} has left its group", self.rank, board.parts.len());
        self.end(&mut board, message);
    }
}

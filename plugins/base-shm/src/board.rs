//! The shared memory: per rank three counters in lines of their own and a window.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use memmap2::{MmapOptions, MmapRaw};
use plugfold_abi::OpError;

/// Bytes from one counter to the next, so that no two share a cache line (or the pair that is fetched together).
const LINE: usize = 128;
/// Counters of a rank: pieces written, pieces read, bytes of the present exchange.
const COUNTERS: usize = 3;

/// All ranks' windows.
pub(crate) struct Board {
    map: MmapRaw,
    ranks: usize,
    window: usize,
}

fn bytes(ranks: usize, window: usize) -> usize {
    ranks * (COUNTERS * LINE + window)
}

fn failed(path: &Path, error: &std::io::Error) -> OpError {
    OpError::new(format!("shared memory {}: {error}", path.display()))
}

impl Board {
    /// Makes the file, in memory where the system has such a folder.
    pub(crate) fn create(ranks: usize, window: usize) -> Result<(PathBuf, Self), OpError> {
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        let since = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        let path = dir.join(format!("plugfold-{}-{since:x}", std::process::id()));
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file = file.map_err(|e| failed(&path, &e))?;
        let made = file.set_len(bytes(ranks, window) as u64).map_err(|e| failed(&path, &e));
        let board = made.and_then(|()| Self::map(&file, &path, ranks, window));
        if board.is_err() {
            let _ = std::fs::remove_file(&path);
        }
        Ok((path, board?))
    }

    /// Maps what rank 0 made.
    pub(crate) fn join(path: &Path, ranks: usize, window: usize) -> Result<Self, OpError> {
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|e| failed(path, &e))?;
        Self::map(&file, path, ranks, window)
    }

    fn map(file: &File, path: &Path, ranks: usize, window: usize) -> Result<Self, OpError> {
        let (want, have) =
            (bytes(ranks, window), file.metadata().map_err(|e| failed(path, &e))?.len() as usize);
        if want != have {
            return Err(OpError::new(format!(
                "shared memory {} has {have} bytes, not {want}: the ranks' window_kib differ",
                path.display()
            )));
        }
        let map = MmapOptions::new().len(want).map_raw(file).map_err(|e| failed(path, &e))?;
        Ok(Self { map, ranks, window })
    }

    pub(crate) fn ranks(&self) -> usize {
        self.ranks
    }

    pub(crate) fn window(&self) -> usize {
        self.window
    }

    #[allow(clippy::cast_ptr_alignment)] // mappings begin on pages, counters on multiples of 128 bytes
    fn counter(&self, rank: usize, which: usize) -> &AtomicU64 {
        assert!(rank < self.ranks && which < COUNTERS, "a counter of the board");
        // SAFETY: inside the mapping by the assertion, aligned to a line, and only ever used as an atomic by any rank.
        unsafe { &*self.map.as_mut_ptr().add((rank * COUNTERS + which) * LINE).cast::<AtomicU64>() }
    }

    /// Pieces that a rank has written.
    pub(crate) fn written(&self, rank: usize) -> &AtomicU64 {
        self.counter(rank, 0)
    }
    /// Pieces of all others that a rank has read.
    pub(crate) fn read(&self, rank: usize) -> &AtomicU64 {
        self.counter(rank, 1)
    }
    /// Bytes of a rank's part of the present exchange.
    pub(crate) fn size(&self, rank: usize) -> &AtomicU64 {
        self.counter(rank, 2)
    }

    fn start(&self, rank: usize) -> *mut u8 {
        let offset = self.ranks * COUNTERS * LINE + rank * self.window;
        // SAFETY: windows lie inside the mapping, after the counters.
        unsafe { self.map.as_mut_ptr().add(offset) }
    }

    /// Puts a piece into this rank's own window, once all have read the piece before.
    pub(crate) fn put(&self, rank: usize, piece: &[u8]) {
        assert!(rank < self.ranks && piece.len() <= self.window, "a piece fits its window");
        // SAFETY: only this rank writes its window, and nobody reads it until `written` grows.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), self.start(rank), piece.len()) };
    }

    /// Takes a rank's present piece, after its `written` was seen with `Acquire`.
    pub(crate) fn get(&self, rank: usize, piece: &mut [u8]) {
        assert!(rank < self.ranks && piece.len() <= self.window, "a piece fits its window");
        // SAFETY: its writer waits for this rank's `read` before it writes again.
        unsafe {
            std::ptr::copy_nonoverlapping(self.start(rank).cast_const(), piece.as_mut_ptr(), piece.len());
        };
    }
}

/// A counter as others left it.
pub(crate) fn seen(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Acquire)
}

//! Reading a file of prepared weights: several threads, chunk by chunk, straight to where the bytes stay.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Advice, Mode, OFlags, fadvise, open};

use crate::folder::{CHUNK, Manifest, hash};

/// One chunk in so many is checked in mode `sample`.
const SAMPLED: usize = 16;

/// Which chunks are checked against their hashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verify {
    /// All.
    Full,
    /// Every 16th and the last.
    Sample,
    /// None.
    Off,
}

impl Verify {
    /// Reads the knob.
    pub fn of(text: &str) -> Option<Self> {
        match text {
            "full" => Some(Verify::Full),
            "sample" => Some(Verify::Sample),
            "off" => Some(Verify::Off),
            _ => None,
        }
    }

    fn takes(self, chunk: usize, chunks: usize) -> bool {
        match self {
            Verify::Full => true,
            Verify::Sample => chunk.is_multiple_of(SAMPLED) || chunk + 1 == chunks,
            Verify::Off => false,
        }
    }
}

/// How to read.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Threads.
    pub threads: usize,
    /// Past the page cache.
    pub direct: bool,
    /// What to check.
    pub verify: Verify,
}

/// A file that is read directly, or through the page cache with its pages dropped after each chunk.
struct Data {
    direct: Option<File>,
    buffered: File,
    /// Direct reads were refused.
    refused: AtomicBool,
}

impl Data {
    fn open(path: &Path, direct: bool) -> io::Result<Self> {
        let buffered = File::open(path)?;
        let past = if direct {
            open(path, OFlags::RDONLY | OFlags::DIRECT | OFlags::CLOEXEC, Mode::empty()).ok()
        } else {
            None
        };
        let refused = AtomicBool::new(direct && past.is_none());
        Ok(Self { direct: past.map(File::from), buffered, refused })
    }

    fn fill(&self, to: &mut [u8], at: u64) -> io::Result<()> {
        if let Some(direct) = self.direct.as_ref().filter(|_| !self.refused.load(Ordering::Relaxed)) {
            match direct.read_exact_at(to, at) {
                // What a filesystem says that takes the flag and not the read.
                Err(e) if e.raw_os_error() == Some(rustix::io::Errno::INVAL.raw_os_error()) => {
                    self.refused.store(true, Ordering::Relaxed);
                }
                done => return done,
            }
        }
        self.buffered.read_exact_at(to, at)?;
        // Pages that nobody reads again are memory that the weights need. Advice that is not taken costs nothing else.
        let _ = fadvise(&self.buffered, at, std::num::NonZero::new(to.len() as u64), Advice::DontNeed);
        Ok(())
    }
}

/// Reads the data of a folder into memory: whole pages, at least as many bytes as there are. Says whether direct reads
/// were asked for and refused.
///
/// # Errors
/// A file that cannot be read to its end, memory that is too small, a chunk with another hash.
pub fn read(path: &Path, manifest: &Manifest, how: How, memory: &mut [u8]) -> Result<bool, String> {
    let told = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let Some(memory) = usize::try_from(manifest.bytes).ok().and_then(|bytes| memory.get_mut(..bytes)) else {
        return Err(told(&format_args!("{} bytes do not fit into {}", manifest.bytes, memory.len())));
    };
    let data = Data::open(path, how.direct).map_err(|e| told(&e))?;
    let chunks = manifest.hashes.len();
    let next = Mutex::new(memory.chunks_mut(CHUNK as usize).zip(&manifest.hashes).enumerate());
    let failed = AtomicBool::new(false);
    let work = || -> Result<(), String> {
        loop {
            let taken = next.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some((i, (to, want))) = taken else { return Ok(()) };
            if failed.load(Ordering::Relaxed) {
                return Ok(());
            }
            let done = data.fill(to, i as u64 * CHUNK).map_err(|e| told(&format_args!("chunk {i}: {e}")));
            let done = done.and_then(|()| {
                if how.verify.takes(i, chunks) && hash(to) != *want {
                    return Err(told(&format_args!(
                        "chunk {i} of {chunks} has another hash: the folder is damaged"
                    )));
                }
                Ok(())
            });
            if done.is_err() {
                failed.store(true, Ordering::Relaxed);
                return done;
            }
        }
    };
    let threads = how.threads.clamp(1, chunks.max(1));
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let mine = work();
        let panicked = || Err("a reading thread panicked".to_owned());
        let all = others.into_iter().map(|t| t.join().unwrap_or_else(|_| panicked()));
        all.chain([mine]).collect::<Result<(), String>>()
    })?;
    Ok(data.refused.load(Ordering::Relaxed))
}

/// Reads a file as fast as it can be: direct reads of chunks by several threads into a buffer each, nothing else.
/// Gives the bytes.
///
/// # Errors
/// A file that cannot be read.
pub fn raw(path: &Path, threads: usize, buffers: &mut [u8]) -> io::Result<u64> {
    let data = Data::open(path, true)?;
    let length = data.buffered.metadata()?.len();
    let next = std::sync::atomic::AtomicU64::new(0);
    let work = |buffer: &mut [u8]| -> io::Result<()> {
        loop {
            let at = next.fetch_add(CHUNK, Ordering::Relaxed);
            if at >= length {
                return Ok(());
            }
            let bytes = (length - at).min(CHUNK) as usize;
            data.fill(&mut buffer[..bytes], at)?;
        }
    };
    std::thread::scope(|scope| {
        let all = buffers.chunks_exact_mut(CHUNK as usize).take(threads.max(1));
        let all: Vec<_> = all.map(|buffer| scope.spawn(|| work(buffer))).collect();
        let panicked = || Err(io::Error::other("a reading thread panicked"));
        all.into_iter().try_for_each(|t| t.join().unwrap_or_else(|_| panicked()))
    })?;
    Ok(length)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_is_every_sixteenth_chunk_and_the_last() {
        let taken =
            |verify: Verify, chunks| (0..chunks).filter(|i| verify.takes(*i, chunks)).collect::<Vec<_>>();
        assert_eq!(taken(Verify::Sample, 40), [0, 16, 32, 39]);
        assert_eq!(taken(Verify::Sample, 1), [0]);
        assert_eq!(taken(Verify::Full, 3), [0, 1, 2]);
        assert!(taken(Verify::Off, 3).is_empty());
        assert_eq!(Verify::of("some"), None);
    }
}

//! Writing a folder: beside its place, and renamed when it is whole.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use plugfold_abi::points::{PREPARED_PAGE, Piece};
use rustix::fs::{Advice, fadvise};
use sha2::{Digest, Sha256};

use crate::folder::{CHUNK, DATA, FORMAT, MANIFEST, Manifest, Place, hash, hex};

/// Bytes after which what was written goes to the disk and out of the page cache.
const FLUSH: u64 = 1 << 30;

/// A file that hashes what goes into it, chunk by chunk.
struct Hashed {
    file: File,
    at: u64,
    flushed: u64,
    hash: Sha256,
    hashes: Vec<String>,
}

impl Hashed {
    fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let room = (CHUNK - self.at % CHUNK).min(bytes.len() as u64) as usize;
            let (now, rest) = bytes.split_at(room);
            self.file.write_all(now)?;
            self.hash.update(now);
            self.at += room as u64;
            if self.at.is_multiple_of(CHUNK) {
                self.hashes.push(hex(&self.hash.finalize_reset()));
            }
            if self.at - self.flushed >= FLUSH {
                self.flush()?;
            }
            bytes = rest;
        }
        Ok(())
    }

    /// On machines whose device uses the same memory, the page cache takes it away from the weights.
    fn flush(&mut self) -> io::Result<()> {
        self.file.sync_data()?;
        let _ = fadvise(&self.file, 0, None, Advice::DontNeed);
        self.flushed = self.at;
        Ok(())
    }

    /// Zeros up to a place.
    fn pad(&mut self, to: u64) -> io::Result<()> {
        const ZEROS: [u8; PREPARED_PAGE] = [0; PREPARED_PAGE];
        while self.at < to {
            let count = (to - self.at).min(PREPARED_PAGE as u64) as usize;
            self.put(&ZEROS[..count])?;
        }
        Ok(())
    }
}

/// A folder under another name, which goes away unless it is finished.
struct Partial(PathBuf);

impl Drop for Partial {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove.
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Writes a folder; one of the same key that is there already is replaced.
///
/// # Errors
/// What the system refuses; nothing is left under the final name then.
pub fn write(place: &Place, index: &[u8], pieces: &[Piece<'_>]) -> io::Result<Manifest> {
    let parent = place.folder.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent)?;
    let name = place.folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let partial = Partial(parent.join(format!(".{name}.{}", std::process::id())));
    let _ = fs::remove_dir_all(&partial.0);
    fs::create_dir(&partial.0)?;
    let file = File::create_new(partial.0.join(DATA))?;
    let mut out = Hashed { file, at: 0, flushed: 0, hash: Sha256::new(), hashes: Vec::new() };
    for piece in pieces {
        if piece.offset < out.at || !piece.offset.is_multiple_of(PREPARED_PAGE as u64) {
            return Err(io::Error::other(format!("a piece at {} after {} bytes", piece.offset, out.at)));
        }
        out.pad(piece.offset)?;
        out.put(&piece.bytes)?;
    }
    out.pad(out.at.next_multiple_of(PREPARED_PAGE as u64))?;
    if !out.at.is_multiple_of(CHUNK) {
        out.hashes.push(hex(&out.hash.finalize_reset()));
    }
    out.flush()?;
    let manifest = Manifest {
        format: FORMAT,
        key: place.key.clone(),
        lines: place.lines.clone(),
        model: place.model.clone(),
        created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        bytes: out.at,
        chunk: CHUNK,
        hashes: std::mem::take(&mut out.hashes),
        index: hex(index),
        index_hash: hash(index),
    };
    let mut text = File::create_new(partial.0.join(MANIFEST))?;
    serde_json::to_writer(&mut text, &manifest)?;
    text.sync_data()?;
    if place.folder.exists() {
        fs::remove_dir_all(&place.folder)?;
    }
    fs::rename(&partial.0, &place.folder)?;
    File::open(parent)?.sync_all()?;
    Ok(manifest)
}

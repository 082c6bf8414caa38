//! The subcommands: `prepare`, `prepared status`, `prepared verify`, `prepared rate`.

use std::fmt::Write as _;
use std::time::Instant;

use plugfold_abi::points::Command;
use plugfold_abi::{OpError, Slice, TextBuf};

use crate::folder::{CHUNK, DATA, Root};
use crate::read::{How, Verify, raw, read};
use crate::store::Shared;

/// Most bytes of a file that `prepared rate` reads into memory.
const MOST: u64 = 8 << 30;

/// A subcommand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// Loads the model and writes the folders that are missing.
    Prepare,
    /// Lists the folders.
    Status,
    /// Checks every chunk of every folder.
    Verify,
    /// Compares how fast folders are read with how fast the disk is.
    Rate,
}

impl What {
    /// All of them.
    pub const ALL: [What; 4] = [What::Prepare, What::Status, What::Verify, What::Rate];

    const fn name(self) -> &'static str {
        match self {
            What::Prepare => "prepare",
            What::Status => "prepared status",
            What::Verify => "prepared verify",
            What::Rate => "prepared rate",
        }
    }
}

/// A subcommand with what it works on.
pub struct Tool {
    /// Which.
    pub what: What,
    /// Where the folders are; `None` while the plugin is off.
    pub root: Option<Root>,
    /// How they are read.
    pub how: How,
    /// What hooks share.
    pub shared: Shared,
}

impl Tool {
    fn root(&self) -> Result<&Root, OpError> {
        self.root.as_ref().ok_or_else(|| {
            OpError::invalid("0140.dir is off: name the root of the prepared folders, as --set 0140.dir=DIR")
        })
    }

    /// A line a folder; the second value says whether all are sound.
    fn each(
        &self,
        look: impl Fn(&std::path::Path, &crate::folder::Manifest) -> Result<String, String>,
    ) -> Result<(String, bool), OpError> {
        let root = self.root()?;
        let folders = root.folders().map_err(|e| OpError::new(format!("{}: {e}", root.0.display())))?;
        let (mut text, mut sound) = (String::new(), true);
        for (folder, manifest) in &folders {
            let told = manifest.as_ref().map_err(Clone::clone).and_then(|m| look(folder, m));
            sound &= told.is_ok();
            let told = told.unwrap_or_else(|why| format!("DAMAGED: {why}"));
            // Writing into a string cannot fail.
            let _ = writeln!(text, "{}: {told}", folder.display());
        }
        if folders.is_empty() {
            let _ = writeln!(text, "{}: no prepared folders", root.0.display());
        }
        Ok((text, sound))
    }

    fn verify(folder: &std::path::Path, manifest: &crate::folder::Manifest) -> Result<String, String> {
        // Chunk by chunk, so that the check of a folder takes no memory of its size.
        let data = std::fs::File::open(folder.join(DATA)).map_err(|e| e.to_string())?;
        let mut buffer = vec![0; CHUNK.min(manifest.bytes) as usize];
        for (i, want) in manifest.hashes.iter().enumerate() {
            let at = i as u64 * CHUNK;
            let part = &mut buffer[..(manifest.bytes - at).min(CHUNK) as usize];
            std::os::unix::fs::FileExt::read_exact_at(&data, part, at)
                .map_err(|e| format!("chunk {i}: {e}"))?;
            if crate::folder::hash(part) != *want {
                return Err(format!("chunk {i} of {} has another hash", manifest.hashes.len()));
            }
        }
        Ok(format!("{} chunks are sound", manifest.hashes.len()))
    }

    fn rate(&self, folder: &std::path::Path, manifest: &crate::folder::Manifest) -> Result<String, String> {
        if manifest.bytes > MOST {
            return Err(format!(
                "{} bytes are more than the {MOST} that are read into memory at once",
                manifest.bytes
            ));
        }
        let path = folder.join(DATA);
        let mut memory =
            Aligned::new((manifest.bytes as usize).next_multiple_of(plugfold_abi::points::PREPARED_PAGE));
        let mut buffers = Aligned::new(self.how.threads * CHUNK as usize);
        let gb = manifest.bytes as f64 / 1e9;
        let (mut disk, mut ours) = (Vec::new(), Vec::new());
        // In turn, so that both meet the same disk, and each first as often as second: what was just read may come faster
        // from caches behind the disk. The first turn touches the memory and does not count.
        for turn in 0..5 {
            let mut one = |plain: bool| -> Result<f64, String> {
                let started = Instant::now();
                if plain {
                    raw(&path, self.how.threads, buffers.bytes()).map_err(|e| e.to_string())?;
                } else {
                    read(&path, manifest, self.how, memory.bytes())?;
                }
                Ok(gb / started.elapsed().as_secs_f64())
            };
            let (first, second) = (one(turn % 2 == 0)?, one(turn % 2 == 1)?);
            if turn > 0 {
                let (plain, whole) = if turn % 2 == 0 { (first, second) } else { (second, first) };
                disk.push(plain);
                ours.push(whole);
            }
        }
        let median = |all: &mut Vec<f64>| {
            all.sort_by(f64::total_cmp);
            // Of an even number, the mean of the two in the middle.
            f64::midpoint(all[(all.len() - 1) / 2], all[all.len() / 2])
        };
        let (disk, ours) = (median(&mut disk), median(&mut ours));
        let How { threads, direct, verify } = self.how;
        Ok(format!(
            "{gb:.2} GB at {ours:.2} GB/s ({threads} threads, direct {direct}, verify {verify:?}); the disk alone gives {disk:.2} \
             GB/s: {:.0}%",
            100.0 * ours / disk
        ))
    }
}

/// Memory whose bytes begin at a whole page.
struct Aligned {
    buffer: Vec<u8>,
    start: usize,
    len: usize,
}

impl Aligned {
    fn new(len: usize) -> Self {
        const PAGE: usize = plugfold_abi::points::PREPARED_PAGE;
        let buffer = vec![0; len + PAGE];
        let start = (buffer.as_ptr() as usize).wrapping_neg() % PAGE;
        Self { buffer, start, len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        &mut self.buffer[self.start..self.start + self.len]
    }
}

impl Command for Tool {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(self.what.name().into())
    }

    fn begin(&self, arguments: Slice<'_, TextBuf>) -> Result<bool, OpError> {
        if let Some(extra) = arguments.first() {
            return Err(OpError::invalid(format!("{} takes no {extra:?}", self.what.name())));
        }
        self.root()?;
        if self.what == What::Prepare {
            self.shared.write();
        }
        Ok(self.what == What::Prepare)
    }

    fn run(&self, _: Slice<'_, TextBuf>) -> Result<TextBuf, OpError> {
        let (text, sound) = match self.what {
            What::Prepare => (self.shared.told().join("\n") + "\n", true),
            What::Status => self.each(|_, m| {
                let gb = m.bytes as f64 / 1e9;
                Ok(format!("{gb:.3} GB, key {}, written {} s after 1970", m.key, m.created))
            })?,
            What::Verify => self.each(Self::verify)?,
            What::Rate => self.each(|folder, manifest| self.rate(folder, manifest))?,
        };
        if sound {
            Ok(text.into())
        } else {
            Err(OpError::new(format!("not all folders are sound\n{}", text.trim_end())))
        }
    }
}

/// How `prepared rate` and starts read, out of settings.
///
/// # Errors
/// A setting that means nothing.
pub fn how(threads: i64, direct: bool, verify: &str) -> Result<How, OpError> {
    let verify = Verify::of(verify)
        .ok_or_else(|| OpError::invalid(format!("verify is {verify:?}: give sample, full or off")))?;
    let threads = usize::try_from(threads).ok().filter(|n| *n > 0);
    let threads = threads.ok_or_else(|| OpError::invalid("threads must be at least 1"))?;
    Ok(How { threads, direct, verify })
}

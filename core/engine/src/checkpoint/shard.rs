//! One memory-mapped safetensors file.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use super::error::CheckpointError;

/// Longest header of a file; the safetensors format sets the same limit.
const MAX_HEADER: u64 = 100_000_000;
/// Bytes of the length that stands before the header.
const PREFIX: usize = 8;

/// Names of tensors with type, shape and place, as a header has them.
pub(super) type Entries = Vec<(String, TensorInfo)>;

/// A mapped file whose header has been checked.
pub(super) struct Shard {
    /// Where it is.
    pub(super) path: PathBuf,
    map: Mmap,
    /// Offset of the first tensor's bytes.
    data: usize,
}

impl Shard {
    /// Length of the file.
    pub(super) fn length(&self) -> u64 {
        self.map.len() as u64
    }

    /// Maps a file and checks its header: every tensor's bytes lie inside the file, no two overlap, nothing is left
    /// over, and each length fits its shape and type.
    pub(super) fn open(path: &Path) -> Result<(Self, Entries), Vec<CheckpointError>> {
        let io = |source| vec![CheckpointError::Read { path: path.to_owned(), source }];
        let header = |reason: String| vec![CheckpointError::Header { path: path.to_owned(), reason }];
        let file = File::open(path).map_err(io)?;
        let length = file.metadata().map_err(io)?.len();
        if length < PREFIX as u64 {
            return Err(header(format!("has {length} bytes, too few for a safetensors file")));
        }
        // SAFETY: the map is only read, as bytes of any value. What must hold beyond that is that nobody shortens or
        // rewrites the file while it is mapped; like every reader of mapped weights, this one asks that of whoever
        // owns the folder. A violation ends the process (SIGBUS) or changes weights, it cannot break a Rust type.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;

        let mut prefix = [0; PREFIX];
        prefix.copy_from_slice(&map[..PREFIX]);
        let claimed = u64::from_le_bytes(prefix);
        if claimed > MAX_HEADER {
            return Err(header(format!(
                "claims a header of {claimed} bytes; at most {MAX_HEADER} are allowed"
            )));
        }
        let data = PREFIX + claimed as usize;
        let Some(text) = map.get(PREFIX..data) else {
            return Err(header(format!(
                "claims a header of {claimed} bytes, but the file ends after {length}: it is cut short"
            )));
        };
        let Header(mut tensors) = serde_json::from_slice(text)
            .map_err(|e| header(format!("the header is not what a safetensors file has: {e}")))?;
        tensors.sort_by_key(|(_, info)| info.data_offsets);
        let errors = faults(path, &tensors, map.len() - data);
        if !errors.is_empty() {
            return Err(errors);
        }
        // The library's own rules last: they also refuse gaps between tensors.
        let end = tensors.last().map_or(0, |(_, info)| info.data_offsets.1);
        Metadata::new(None, tensors.clone()).map_err(|e| header(format!("the header is malformed: {e}")))?;
        if end != map.len() - data {
            return Err(header(format!("has {} bytes after its last tensor", map.len() - data - end)));
        }
        Ok((Self { path: path.to_owned(), map, data }, tensors))
    }

    /// Bytes of a tensor, by the offsets of the checked header.
    pub(super) fn bytes(&self, offsets: (usize, usize)) -> &[u8] {
        &self.map[self.data + offsets.0..self.data + offsets.1]
    }

    /// Tells the system how the map will be read. Advice only: what it answers does not matter.
    pub(super) fn advise(&self, advice: memmap2::Advice) {
        if let Err(e) = self.map.advise(advice) {
            tracing::debug!("{}: madvise: {e}", self.path.display());
        }
    }
}

/// What is wrong with the entries of a header, sorted by offset, of a file with `held` bytes of data.
fn faults(path: &Path, tensors: &[(String, TensorInfo)], held: usize) -> Vec<CheckpointError> {
    let mut errors = Vec::new();
    let mut fault = |tensor: &str, reason: String| {
        errors.push(CheckpointError::Entry { path: path.to_owned(), tensor: tensor.to_owned(), reason });
    };
    let mut seen = HashSet::with_capacity(tensors.len());
    let mut before: Option<(&str, usize)> = None;
    for (name, info) in tensors {
        let (start, end) = info.data_offsets;
        if !seen.insert(name) {
            fault(name, "stands twice in the header".to_owned());
        }
        let bits = info.shape.iter().try_fold(info.dtype.bitsize(), |n, d| n.checked_mul(*d));
        if end < start {
            fault(name, format!("its bytes end at {end}, before they begin at {start}"));
        } else if end > held {
            fault(name, format!("wants bytes {start} to {end}, but the file holds {held}: it is cut short"));
        } else if bits.is_none_or(|bits| bits % 8 != 0 || bits / 8 != end - start) {
            let (shape, bytes) = (&info.shape, end - start);
            fault(name, format!("shape {shape:?} of {} does not fit its {bytes} bytes", info.dtype));
        }
        if let Some((other, limit)) = before
            && start < limit
        {
            fault(name, format!("its bytes overlap those of {other}"));
        }
        if before.is_none_or(|(_, limit)| end > limit) {
            before = Some((name, end));
        }
    }
    errors
}

/// Entries of a header in file order. Unlike a map it keeps names that stand twice.
struct Header(Entries);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneByOne;
        impl<'de> Visitor<'de> for OneByOne {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object with one entry a tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let info = map
                        .next_value::<TensorInfo>()
                        .map_err(|e| A::Error::custom(format!("tensor {name}: {e}")))?;
                    entries.push((name, info));
                }
                Ok(Header(entries))
            }
        }
        deserializer.deserialize_map(OneByOne)
    }
}

//! The weights: safetensors files, memory mapped, found by published name.
//!
//! Three steps, each of which tells everything that is wrong before the next begins. [`Checkpoint::open`] maps the
//! files and checks their headers against the files and the index. [`Checkpoint::check`] holds them against a
//! [`ModelConfig`](crate::config::ModelConfig) and gives [`Resolved`], which knows where each published tensor lies
//! even if the checkpoint spells it differently or stores it in EXL3. Its readers cut out rows and columns, turn stored types into
//! numbers, and refuse NaN and infinity by name.

mod error;
mod exl3;
mod identity;
mod inventory;
mod layout;
mod read;
mod recode;
mod resolve;
mod shard;
mod spelling;
#[cfg(test)]
mod tests;

use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;

pub use error::{CheckpointError, CheckpointErrors};
pub use exl3::Exl3Tensor;
pub use inventory::{Expected, Part, inventory};
pub use layout::{Layout, Naming, Target};
pub use resolve::Resolved;
pub use safetensors::Dtype;
use shard::{Entries, Shard};

#[cfg(target_endian = "big")]
compile_error!("safetensors files are little-endian, and their bytes are used in place");

/// Longest index file. The one of the 76,108 tensors of the 8-bit release has about 8 MB.
const MAX_INDEX: u64 = 1 << 28;
/// Most files of a checkpoint; each takes one memory map, of which a process has 65,530.
const MAX_SHARDS: usize = 16_384;
/// Names of the files that are looked for.
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// The mapped files of a checkpoint. Clones share them.
#[derive(Clone)]
pub struct Checkpoint {
    files: Arc<Files>,
}

struct Files {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Place>,
    warnings: Vec<String>,
}

/// Where a tensor lies.
struct Place {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    offsets: (usize, usize),
}

/// A tensor, or a contiguous part of one, as it lies in its file.
#[derive(Clone, Copy, Debug)]
pub struct TensorData<'a> {
    /// Stored type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: &'a [usize],
    /// Its bytes, little-endian, row-major, at any alignment.
    pub bytes: &'a [u8],
}

/// The part of `model.safetensors.index.json` that is read.
#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Maps the weights of the folder `dir`: the files that its `model.safetensors.index.json` names, or its
    /// `model.safetensors`.
    ///
    /// Nothing may shorten or rewrite the files while the checkpoint is open; the process would be ended by the
    /// system when it touches a page that is gone.
    ///
    /// # Errors
    /// [`CheckpointErrors`] with everything found: missing and unreadable files, malformed or lying headers, files
    /// cut short, tensors that overlap, that stand in two files, or that the index expects and the file lacks.
    pub fn open(dir: &Path) -> Result<Self, CheckpointErrors> {
        let mut errors = Vec::new();
        let files = open(dir, &mut errors);
        match files {
            Some(files) if errors.is_empty() => {
                for warning in &files.warnings {
                    tracing::warn!("{}: {warning}", dir.display());
                }
                Ok(Self { files: Arc::new(files) })
            }
            _ => Err(CheckpointErrors { dir: dir.to_owned(), errors }),
        }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.files.dir
    }

    /// Stored names in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.files.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors.
    pub fn bytes(&self) -> u64 {
        self.files.tensors.values().map(|place| (place.offsets.1 - place.offsets.0) as u64).sum()
    }

    /// The files of the weights: name and length in bytes.
    pub fn files(&self) -> impl Iterator<Item = (String, u64)> {
        self.files.shards.iter().map(|shard| {
            let name = shard.path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
            (name, shard.length())
        })
    }

    /// A tensor by the name it is stored under, without copying.
    pub fn tensor(&self, stored: &str) -> Option<TensorData<'_>> {
        let place = self.files.tensors.get(stored)?;
        Some(TensorData {
            dtype: place.dtype,
            shape: &place.shape,
            bytes: self.files.shards[place.shard].bytes(place.offsets),
        })
    }

    /// The file that holds a stored tensor.
    fn file_of(&self, stored: &str) -> PathBuf {
        match self.files.tensors.get(stored) {
            Some(place) => self.files.shards[place.shard].path.clone(),
            None => self.files.dir.clone(),
        }
    }
}

/// Opens everything that can be opened; `None`, or anything in `errors`, means that it cannot be used.
fn open(dir: &Path, errors: &mut Vec<CheckpointError>) -> Option<Files> {
    if let Err(source) = std::fs::read_dir(dir) {
        errors.push(CheckpointError::Read { path: dir.to_owned(), source });
        return None;
    }
    let index_path = dir.join(INDEX);
    let single = dir.join(SINGLE);
    let index = if index_path.exists() {
        match read_index(&index_path) {
            Ok(index) => Some(index),
            Err(error) => {
                errors.push(error);
                return None;
            }
        }
    } else if single.exists() {
        None
    } else {
        errors.push(CheckpointError::NoWeights { dir: dir.to_owned() });
        return None;
    };
    let names: BTreeSet<&str> = match &index {
        Some(index) => index.weight_map.values().map(String::as_str).collect(),
        None => BTreeSet::from([SINGLE]),
    };
    if single.exists() && !names.contains(SINGLE) {
        errors.push(CheckpointError::Ambiguous { dir: dir.to_owned() });
        return None;
    }

    let mut files =
        Files { dir: dir.to_owned(), shards: Vec::new(), tensors: BTreeMap::new(), warnings: Vec::new() };
    let mut broken: BTreeSet<&str> = BTreeSet::new();
    for name in names {
        let path = dir.join(name);
        let opened = match (&index, path.exists()) {
            (Some(index), false) => Err(vec![missing_shard(path, name, index)]),
            _ => Shard::open(&path),
        };
        match opened {
            Ok((shard, tensors)) => add(&mut files, shard, tensors, errors),
            Err(found) => {
                broken.insert(name);
                errors.extend(found);
            }
        }
    }
    if let Some(index) = &index {
        compare(&mut files, index, &broken, errors);
    }
    Some(files)
}

fn read_index(path: &Path) -> Result<Index, CheckpointError> {
    let io = |source| CheckpointError::Read { path: path.to_owned(), source };
    let wrong = |reason: String| CheckpointError::Index { path: path.to_owned(), reason };
    let file = File::open(path).map_err(io)?;
    let length = file.metadata().map_err(io)?.len();
    if length > MAX_INDEX {
        return Err(wrong(format!("has {length} bytes; an index has at most {MAX_INDEX}")));
    }
    let mut text = Vec::new();
    file.take(MAX_INDEX).read_to_end(&mut text).map_err(io)?;
    let index: Index = serde_json::from_slice(&text).map_err(|e| wrong(format!("is not an index: {e}")))?;
    if index.weight_map.is_empty() {
        return Err(wrong("names no tensors".to_owned()));
    }
    let mut names = BTreeSet::new();
    for (tensor, name) in &index.weight_map {
        // Only files of the folder itself: an index must not reach out of it.
        let plain = Path::new(name).file_name().is_some_and(|file| file == name.as_str());
        if !plain || name.contains(['\\', '\0']) {
            return Err(wrong(format!(
                "tensor {tensor}: {name:?} is not the name of a file in the same folder"
            )));
        }
        names.insert(name);
    }
    if names.len() > MAX_SHARDS {
        return Err(wrong(format!("names {} files; at most {MAX_SHARDS} are opened", names.len())));
    }
    Ok(index)
}

fn missing_shard(path: PathBuf, name: &str, index: &Index) -> CheckpointError {
    let mut inside = index.weight_map.iter().filter(|(_, file)| *file == name).map(|(tensor, _)| tensor);
    let example = inside.next().cloned().unwrap_or_default();
    CheckpointError::MissingShard { path, tensors: 1 + inside.count(), example }
}

fn add(files: &mut Files, shard: Shard, tensors: Entries, errors: &mut Vec<CheckpointError>) {
    let number = files.shards.len();
    for (name, info) in tensors {
        match files.tensors.entry(name) {
            Slot::Occupied(other) => errors.push(CheckpointError::Duplicate {
                tensor: other.key().clone(),
                first: files.shards[other.get().shard].path.clone(),
                second: shard.path.clone(),
            }),
            Slot::Vacant(slot) => {
                slot.insert(Place {
                    shard: number,
                    dtype: info.dtype,
                    shape: info.shape,
                    offsets: info.data_offsets,
                });
            }
        }
    }
    files.shards.push(shard);
}

/// Holds the index against what the files really have. Files in `broken` were reported already.
fn compare(files: &mut Files, index: &Index, broken: &BTreeSet<&str>, errors: &mut Vec<CheckpointError>) {
    for (tensor, name) in &index.weight_map {
        if broken.contains(name.as_str()) {
            continue;
        }
        let path = files.dir.join(name);
        let there = files.tensors.get(tensor).is_some_and(|place| files.shards[place.shard].path == path);
        if !there {
            errors.push(CheckpointError::NotInShard { path, tensor: tensor.clone() });
        }
    }
    let mut extra = files.tensors.keys().filter(|name| !index.weight_map.contains_key(*name));
    if let Some(example) = extra.next() {
        let count = 1 + extra.count();
        files.warnings.push(format!("{count} stored tensors are not in the index, such as {example}"));
    }
}

//! Writing the files of a checkpoint: tensors one after another, without holding them in memory.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{BufWriter, Read as _, Write};
use std::ops::Range;
use std::path::Path;

use anyhow::{Context as _, bail};
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::write_whole;

/// Name of the index of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";
/// Longest header that is read; the safetensors format sets the same limit.
const MAX_HEADER: u64 = 100_000_000;

/// A tensor that is to be written.
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
}

impl Entry {
    /// Its bytes.
    pub fn bytes(&self) -> u64 {
        (self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8) as u64
    }
}

/// Cuts a list of tensors into files of at most `limit` bytes, if no single tensor is larger.
pub fn cut(entries: &[Entry], limit: u64) -> Vec<Range<usize>> {
    let (mut files, mut start, mut size) = (Vec::new(), 0, 0);
    for (i, entry) in entries.iter().enumerate() {
        if i > start && size + entry.bytes() > limit {
            files.push(start..i);
            (start, size) = (i, 0);
        }
        size += entry.bytes();
    }
    files.push(start..entries.len());
    files
}

/// Name of a file of a checkpoint.
pub fn file_name(index: usize, files: usize) -> String {
    format!("model-{:05}-of-{files:05}.safetensors", index + 1)
}

/// Writes a safetensors file whole or not at all. `fill(i, out)` writes the bytes of tensor `i`.
pub fn write(
    path: &Path,
    entries: &[Entry],
    metadata: &Map<String, Value>,
    mut fill: impl FnMut(usize, &mut dyn Write) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), Value::Object(metadata.clone()));
    let mut at = 0;
    for entry in entries {
        let end = at + entry.bytes();
        header.insert(
            entry.name.clone(),
            json!({"dtype": entry.dtype.to_string(), "shape": entry.shape, "data_offsets": [at, end]}),
        );
        at = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    // Tensors begin at multiples of eight bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    write_whole(path, |partial| {
        let mut out = Counted { out: BufWriter::with_capacity(1 << 20, File::create(partial)?), bytes: 0 };
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        for (i, entry) in entries.iter().enumerate() {
            let start = out.bytes;
            fill(i, &mut out)?;
            if out.bytes - start != entry.bytes() {
                bail!("tensor `{}` has {} bytes, must have {}", entry.name, out.bytes - start, entry.bytes());
            }
        }
        Ok(out.out.flush()?)
    })
}

struct Counted<W> {
    out: W,
    bytes: u64,
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, data: &[u8]) -> std::io::Result<usize> {
        let written = self.out.write(data)?;
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}

/// Writes the index. `metadata` are its further fields, of which the total is replaced.
pub fn write_index(
    dir: &Path,
    entries: &[Entry],
    files: &[Range<usize>],
    mut metadata: Map<String, Value>,
) -> anyhow::Result<()> {
    let total: u64 = entries.iter().map(Entry::bytes).sum();
    metadata.insert("total_size".to_owned(), json!(total));
    let map: BTreeMap<&str, String> = files
        .iter()
        .enumerate()
        .flat_map(|(i, range)| {
            entries[range.clone()].iter().map(move |e| (e.name.as_str(), file_name(i, files.len())))
        })
        .collect();
    write_json(&dir.join(INDEX), &json!({"metadata": metadata, "weight_map": map}))
}

/// Writes JSON for people to read.
pub fn write_json(path: &Path, value: &Value) -> anyhow::Result<()> {
    write_whole(path, |partial| {
        let mut text = serde_json::to_vec_pretty(value)?;
        text.push(b'\n');
        Ok(fs::write(partial, text)?)
    })
}

/// `__metadata__` of a safetensors file.
pub fn metadata(path: &Path) -> anyhow::Result<Map<String, Value>> {
    let mut file = File::open(path)?;
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > MAX_HEADER {
        bail!("{} claims a header of {length} bytes; at most {MAX_HEADER} are allowed", path.display());
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).with_context(|| format!("{} is cut short", path.display()))?;
    let header: Map<String, Value> = serde_json::from_slice(&header)?;
    Ok(header.get("__metadata__").and_then(Value::as_object).cloned().unwrap_or_default())
}

/// Makes an empty folder for a checkpoint; one that holds a checkpoint is refused.
pub fn new_dir(dir: &Path) -> anyhow::Result<()> {
    if dir.join(INDEX).exists() || dir.join("model.safetensors").exists() {
        bail!("{} holds a checkpoint already; give another --out", dir.display());
    }
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))
}

/// Copies the files of a checkpoint's folder that hold no weights, apart from those that are written anew.
pub fn copy_others(from: &Path, to: &Path, own: &[&str]) -> anyhow::Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        let name = entry.file_name();
        let known = name.to_string_lossy();
        let weights = Path::new(&name).extension().is_some_and(|e| e == "safetensors");
        if entry.file_type()?.is_file() && !weights && !own.contains(&&*known) && !known.starts_with('.') {
            fs::copy(entry.path(), to.join(&name)).with_context(|| format!("cannot copy {known}"))?;
        }
    }
    Ok(())
}

/// A type as PyTorch spells it.
pub fn torch_name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "torch.float32",
        Dtype::BF16 => "torch.bfloat16",
        Dtype::F16 => "torch.float16",
        Dtype::I64 => "torch.int64",
        Dtype::I32 => "torch.int32",
        Dtype::I16 => "torch.int16",
        Dtype::I8 => "torch.int8",
        Dtype::U8 => "torch.uint8",
        Dtype::BOOL => "torch.bool",
        Dtype::F8_E4M3 => "torch.float8_e4m3fn",
        Dtype::F8_E5M2 => "torch.float8_e5m2",
        Dtype::F64 => "torch.float64",
        _ => "unknown",
    }
}

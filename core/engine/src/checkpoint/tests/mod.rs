//! Tests on the tiny checkpoint and on altered copies of it.

mod broken;
mod exl3;
mod model;
mod read;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::{Checkpoint, Dtype};
use crate::config::ModelConfig;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny");

/// A tensor in memory.
#[derive(Clone, PartialEq)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Tensor {
    fn new(dtype: Dtype, shape: &[usize], bytes: Vec<u8>) -> Self {
        assert_eq!(shape.iter().product::<usize>() * dtype.bitsize() / 8, bytes.len());
        Self { dtype, shape: shape.to_vec(), bytes }
    }
}

type Tensors = BTreeMap<String, Tensor>;

/// All tensors of the tiny checkpoint.
fn tiny() -> Tensors {
    let checkpoint = Checkpoint::open(Path::new(TINY)).unwrap();
    let copy = |name: &str| {
        let data = checkpoint.tensor(name).unwrap();
        Tensor { dtype: data.dtype, shape: data.shape.to_vec(), bytes: data.bytes.to_vec() }
    };
    checkpoint.names().map(|name| (name.to_owned(), copy(name))).collect()
}

fn config() -> ModelConfig {
    ModelConfig::from_dir(Path::new(TINY)).unwrap()
}

fn config_json() -> Value {
    serde_json::from_str(&std::fs::read_to_string(Path::new(TINY).join("config.json")).unwrap()).unwrap()
}

/// The bytes of a safetensors file with `pad` spaces behind its header, so that data may lie at any alignment.
fn file(tensors: &Tensors, pad: usize) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    let mut data = Vec::new();
    for (name, tensor) in tensors {
        let start = data.len();
        data.extend_from_slice(&tensor.bytes);
        let entry = json!({ "dtype": tensor.dtype.to_string(), "shape": tensor.shape, "data_offsets": [start, data.len()] });
        header.insert(name.clone(), entry);
    }
    assemble(&(Value::from(header).to_string() + &" ".repeat(pad)), &data)
}

/// A safetensors file of any header and any data.
fn assemble(header: &str, data: &[u8]) -> Vec<u8> {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

/// A folder with the tiny configuration and one file of weights.
fn single(bytes: &[u8]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(Path::new(TINY).join("config.json"), dir.path().join("config.json")).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    dir
}

/// A folder with the files of the tiny checkpoint, to be altered.
fn copy() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors.index.json", SHARD_1, SHARD_2] {
        let bytes = std::fs::read(Path::new(TINY).join(name)).unwrap();
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

const SHARD_1: &str = "model-00001-of-00002.safetensors";
const SHARD_2: &str = "model-00002-of-00002.safetensors";

/// Opens, checks and reads every tensor; the message of whatever goes wrong.
fn load(dir: &Path, config: &ModelConfig) -> Result<(), String> {
    let resolved =
        Checkpoint::open(dir).map_err(|e| e.to_string())?.check(config).map_err(|e| e.to_string())?;
    for tensor in super::inventory(config) {
        if resolved.contains(&tensor.name) {
            resolved.f32(&tensor.name).map_err(|e| e.to_string())?;
        }
    }
    Ok(())
}

/// A path inside a folder of the test.
fn inside(dir: &TempDir, name: &str) -> PathBuf {
    dir.path().join(name)
}

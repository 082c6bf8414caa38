//! Random tensors that are made as they are read, for models that are too large to be written.

use std::collections::HashMap;
use std::ops::Range;

use half::bf16;
use plugfold_engine::checkpoint::{CheckpointError, Dtype, Exl3Tensor};
use plugfold_engine::weights::Source;
use plugfold_kernels::cpu::exl3::{Dtype as Stored, RawTensor, StoredLayer, Tensors};
use rayon::prelude::*;

use super::{CHUNK, Fill, Tensor, numbers};

/// Bytes of random words that trellises are cut from, each from a place of its own.
const WORDS: usize = 1 << 29;

/// The tensors of a model.
pub struct Noise {
    tensors: HashMap<String, Tensor>,
    words: Vec<u8>,
    /// Contents of small tensors, by name.
    small: HashMap<String, Vec<u8>>,
}

/// As [`numbers`], by all threads.
fn made(dtype: Dtype, fill: Fill, seed: u64, count: usize) -> Vec<u8> {
    let starts: Vec<usize> = (0..count).step_by(CHUNK).collect();
    let chunks: Vec<Vec<u8>> =
        starts.par_iter().map(|s| numbers(dtype, fill, seed, *s, CHUNK.min(count - s))).collect();
    chunks.concat()
}

impl Noise {
    /// Tensors as they would be written.
    pub(super) fn new(list: Vec<Tensor>, seed: u64) -> Self {
        let largest = list.iter().filter(|t| t.fill == Fill::Words).map(|t| t.entry.bytes() as usize).max();
        let words = made(Dtype::I16, Fill::Words, seed, WORDS.max(2 * largest.unwrap_or(0)) / 2);
        let small = |t: &Tensor| matches!(t.fill, Fill::Scales(_) | Fill::Word(_));
        let contents = |t: &Tensor| {
            let count = t.entry.shape.iter().product();
            (t.entry.name.clone(), numbers(t.entry.dtype, t.fill, t.seed, 0, count))
        };
        let small = list.par_iter().filter(|t| small(t)).map(contents).collect();
        Self { tensors: list.into_iter().map(|t| (t.entry.name.clone(), t)).collect(), words, small }
    }

    /// Some rows and columns of a tensor that is numbers, as f32.
    fn read(
        &self,
        name: &str,
        rows: &Range<usize>,
        cols: &Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        let missing = || CheckpointError::Missing { tensor: name.to_owned() };
        let t = self.tensors.get(name).ok_or_else(missing)?;
        let width: usize = t.entry.shape[1.min(t.entry.shape.len())..].iter().product();
        let row = |row: usize| {
            let bytes = numbers(t.entry.dtype, t.fill, t.seed, row * width + cols.start, cols.len());
            match t.entry.dtype {
                Dtype::F32 => bytes.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>(),
                _ => bytes.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            }
        };
        let all: Vec<Vec<f32>> = rows.clone().into_par_iter().map(row).collect();
        Ok(all.concat())
    }
}

impl Tensors for Noise {
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let t = self.tensors.get(name)?;
        let (dtype, data) = if t.fill == Fill::Words {
            let bytes = t.entry.bytes() as usize;
            // A multiple of a row of states, so that tensors of one size differ.
            let at = (t.seed as usize % (self.words.len() - bytes + 1)) & !63;
            (Stored::I16, &self.words[at..at + bytes])
        } else {
            let dtype = if t.entry.dtype == Dtype::F16 { Stored::F16 } else { Stored::I32 };
            (dtype, &self.small.get(name)?[..])
        };
        Some(RawTensor { dtype, shape: t.entry.shape.clone(), data })
    }
}

/// The module of a published matrix.
fn module(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

impl Source for Noise {
    type Error = CheckpointError;

    fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.tensors.contains_key(&format!("{}.trellis", module(name)))
    }

    fn is_bf16(&self, name: &str) -> bool {
        self.tensors.get(name).is_some_and(|t| t.entry.dtype == Dtype::BF16)
    }

    fn read_f32(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        self.read(name, &rows, &cols)
    }

    fn read_bf16(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<bf16>, CheckpointError> {
        Ok(self.read(name, &rows, &cols)?.into_iter().map(bf16::from_f32).collect())
    }

    fn exl3(&self, name: &str) -> Result<Option<Exl3Tensor<'_>>, CheckpointError> {
        let module = module(name);
        if !self.tensors.contains_key(&format!("{module}.trellis")) {
            return Ok(None);
        }
        let layer = StoredLayer::open(self, module)?;
        Ok(Some(Exl3Tensor { module: module.to_owned(), layer, row: 0, allow_nan: false }))
    }
}

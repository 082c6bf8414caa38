//! Readers: rows and columns of a published tensor as numbers.
//!
//! A tensor is read as a matrix of its first dimension by all others flattened; a vector has one column. Stored
//! types are widened exactly: `bf16` to `f32`, and 8-bit blocks to `f32` as value × scale, rounded once.

use std::ops::Range;

use half::{bf16, f16};
use plugfold_kernels::cpu::exl3::Embedding;
use safetensors::Dtype;

use super::error::CheckpointError;
use super::exl3::Exl3Tensor;
use super::resolve::{Resolved, Scale, Source};
use super::{Checkpoint, TensorData};

impl Resolved {
    /// Loads NaN and infinite weights instead of refusing them.
    #[must_use]
    pub fn with_allow_nan(mut self, allow: bool) -> Self {
        self.allow_nan = allow;
        self
    }

    /// The files.
    pub fn checkpoint(&self) -> &Checkpoint {
        &self.checkpoint
    }

    /// The content id of the files, see [`Checkpoint::content_id`].
    ///
    /// # Errors
    /// [`CheckpointError::Read`] when `config.json` cannot be read.
    pub fn content_id(&self) -> Result<String, CheckpointError> {
        self.checkpoint.content_id()
    }

    /// Whether the model has a tensor of this published name.
    pub fn contains(&self, name: &str) -> bool {
        self.sources.contains_key(name)
    }

    /// Published shape.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`].
    pub fn shape(&self, name: &str) -> Result<&[usize], CheckpointError> {
        Ok(&self.source(name)?.shape)
    }

    /// Stored type.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`].
    pub fn dtype(&self, name: &str) -> Result<Dtype, CheckpointError> {
        Ok(self.source(name)?.dtype)
    }

    /// Stored bytes, without scales.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`].
    pub fn bytes(&self, name: &str) -> Result<usize, CheckpointError> {
        let source = self.source(name)?;
        Ok(match &source.exl3 {
            Some(exl3) => {
                exl3.tensors.iter().filter_map(|t| self.checkpoint.tensor(t)).map(|t| t.bytes.len()).sum()
            }
            None => elements(&source.shape) * width(source.dtype),
        })
    }

    /// A tensor as it is stored, without copying and without a look at its values. Of a coded one that is the trellis.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`].
    pub fn tensor(&self, name: &str) -> Result<TensorData<'_>, CheckpointError> {
        let source = self.source(name)?;
        if source.exl3.is_some() {
            let missing = || CheckpointError::Missing { tensor: source.tensor.clone() };
            return self.checkpoint.tensor(&source.tensor).ok_or_else(missing);
        }
        Ok(TensorData { dtype: source.dtype, shape: &source.shape, bytes: self.stored(source)? })
    }

    /// The EXL3 layer that a tensor is stored as, if it is one.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`]; the layer's tensors were checked before.
    pub fn exl3(&self, name: &str) -> Result<Option<Exl3Tensor<'_>>, CheckpointError> {
        match &self.source(name)?.exl3 {
            Some(exl3) => exl3.linear(&self.checkpoint, self.allow_nan),
            None => Ok(None),
        }
    }

    /// The table of coded rows that a tensor is stored as, if it is one.
    ///
    /// # Errors
    /// As [`Resolved::exl3`].
    pub fn exl3_rows(&self, name: &str) -> Result<Option<Embedding>, CheckpointError> {
        match &self.source(name)?.exl3 {
            Some(exl3) => exl3.table(&self.checkpoint),
            None => Ok(None),
        }
    }

    /// A whole tensor in `f32`, row-major.
    ///
    /// # Errors
    /// As [`Resolved::rows_f32`].
    pub fn f32(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        let [rows, cols] = matrix(&self.source(name)?.shape);
        self.rows_f32(name, 0..rows, 0..cols)
    }

    /// A whole tensor in `bf16`, row-major.
    ///
    /// # Errors
    /// As [`Resolved::rows_bf16`].
    pub fn bf16(&self, name: &str) -> Result<Vec<bf16>, CheckpointError> {
        let [rows, cols] = matrix(&self.source(name)?.shape);
        self.rows_bf16(name, 0..rows, 0..cols)
    }

    /// The part `rows` × `cols` of a tensor in `f32`, row-major.
    ///
    /// # Errors
    /// [`CheckpointError::Missing`], [`CheckpointError::Range`]; [`CheckpointError::NotFinite`] for NaN and infinity
    /// unless they are allowed.
    pub fn rows_f32(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        let part = self.part(name, rows, cols)?;
        if let Some(exl3) = &part.source.exl3 {
            return exl3.decode(&self.checkpoint, &part.rows, &part.cols, self.allow_nan);
        }
        let mut out = vec![0f32; part.rows.len() * part.cols.len()];
        for (row, line) in part.lines(&mut out) {
            part.row_f32(row, line);
            if !self.allow_nan
                && let Some(i) = line.iter().position(|v| !v.is_finite())
            {
                return Err(part.not_finite(row, i, line[i]));
            }
        }
        Ok(out)
    }

    /// The part `rows` × `cols` of a tensor in `bf16`, row-major. Coded weights and 8-bit blocks are multiplied out and
    /// rounded to the nearest `bf16`; a matrix stored in `f32` must already consist of `bf16` values.
    ///
    /// # Errors
    /// As [`Resolved::rows_f32`], and [`CheckpointError::Inexact`].
    pub fn rows_bf16(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<bf16>, CheckpointError> {
        let part = self.part(name, rows, cols)?;
        if let Some(exl3) = &part.source.exl3 {
            let wide = exl3.decode(&self.checkpoint, &part.rows, &part.cols, self.allow_nan)?;
            return Ok(wide.into_iter().map(bf16::from_f32).collect());
        }
        let mut out = vec![bf16::ZERO; part.rows.len() * part.cols.len()];
        let mut wide = vec![0f32; part.cols.len()];
        for (row, line) in part.lines(&mut out) {
            if part.source.dtype == Dtype::BF16 {
                bytemuck::cast_slice_mut(line).copy_from_slice(part.row(row));
            } else {
                part.row_f32(row, &mut wide);
                for (to, from) in line.iter_mut().zip(&wide) {
                    *to = bf16::from_f32(*from);
                }
                if [Dtype::F32, Dtype::F16].contains(&part.source.dtype) {
                    let lossy = line.iter().zip(&wide).position(|(b, w)| b.to_f32() != *w && w.is_finite());
                    if let Some(i) = lossy {
                        let (tensor, column) = (name.to_owned(), part.cols.start + i);
                        return Err(CheckpointError::Inexact { tensor, row, column, value: wide[i] });
                    }
                }
            }
            if !self.allow_nan
                && let Some(i) = line.iter().position(|v| !v.is_finite())
            {
                return Err(part.not_finite(row, i, line[i].to_f32()));
            }
        }
        Ok(out)
    }

    fn source(&self, name: &str) -> Result<&Source, CheckpointError> {
        self.sources.get(name).ok_or_else(|| CheckpointError::Missing { tensor: name.to_owned() })
    }

    /// Stored bytes of a published tensor.
    pub(super) fn stored(&self, source: &Source) -> Result<&[u8], CheckpointError> {
        let missing = || CheckpointError::Missing { tensor: source.tensor.clone() };
        let data = self.checkpoint.tensor(&source.tensor).ok_or_else(missing)?;
        let width = width(source.dtype);
        let start = source.start * width;
        data.bytes.get(start..start + elements(&source.shape) * width).ok_or_else(missing)
    }

    fn part<'a>(
        &'a self,
        name: &'a str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Part<'a>, CheckpointError> {
        let source = self.source(name)?;
        let shape = matrix(&source.shape);
        if rows.start > rows.end || rows.end > shape[0] || cols.start > cols.end || cols.end > shape[1] {
            return Err(CheckpointError::Range { tensor: name.to_owned(), rows, columns: cols, shape });
        }
        if source.exl3.is_some() {
            return Ok(Part { name, source, bytes: &[], width: shape[1], rows, cols, scale: None });
        }
        let scale = match &source.scale {
            None => None,
            Some(scale) => {
                let missing = || CheckpointError::Missing { tensor: scale.tensor.clone() };
                let data = self.checkpoint.tensor(&scale.tensor).ok_or_else(missing)?;
                Some((scale, data.bytes.get(scale.start * 4..).ok_or_else(missing)?))
            }
        };
        Ok(Part { name, source, bytes: self.stored(source)?, width: shape[1], rows, cols, scale })
    }
}

/// A part of a tensor that is being read.
struct Part<'a> {
    name: &'a str,
    source: &'a Source,
    bytes: &'a [u8],
    /// Columns of the whole tensor.
    width: usize,
    rows: Range<usize>,
    cols: Range<usize>,
    scale: Option<(&'a Scale, &'a [u8])>,
}

impl Part<'_> {
    /// The rows of the result with their row numbers.
    fn lines<'o, T>(&self, out: &'o mut [T]) -> impl Iterator<Item = (usize, &'o mut [T])> + use<'o, T> {
        self.rows.clone().zip(out.chunks_exact_mut(self.cols.len().max(1)))
    }

    /// Stored bytes of the wanted columns of a row.
    fn row(&self, row: usize) -> &[u8] {
        let size = width(self.source.dtype);
        let start = row * self.width;
        &self.bytes[(start + self.cols.start) * size..(start + self.cols.end) * size]
    }

    fn row_f32(&self, row: usize, out: &mut [f32]) {
        let bytes = self.row(row);
        match (self.source.dtype, &self.scale) {
            (Dtype::F32, _) => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
            (Dtype::F16, _) => {
                for (to, from) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *to = f16::from_le_bytes([from[0], from[1]]).to_f32();
                }
            }
            (Dtype::BF16, _) => {
                for (to, from) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                    *to = bf16::from_le_bytes([from[0], from[1]]).to_f32();
                }
            }
            (_, Some((scale, scales))) => {
                let line = (scale.row + row) / scale.block[0] * scale.stride;
                let mut at = self.cols.start;
                while at < self.cols.end {
                    let block = at / scale.block[1];
                    let end = self.cols.end.min((block + 1) * scale.block[1]);
                    let place = (line + block) * 4;
                    let mut factor = [0; 4];
                    factor.copy_from_slice(&scales[place..place + 4]);
                    let factor = f32::from_le_bytes(factor);
                    let (from, to) = (at - self.cols.start, end - self.cols.start);
                    for (to, code) in out[from..to].iter_mut().zip(&bytes[from..to]) {
                        *to = E4M3[*code as usize] * factor;
                    }
                    at = end;
                }
            }
            // `check` lets no other combination in.
            (_, None) => out.fill(f32::NAN),
        }
    }

    fn not_finite(&self, row: usize, column: usize, value: f32) -> CheckpointError {
        CheckpointError::NotFinite {
            tensor: self.name.to_owned(),
            row,
            column: self.cols.start + column,
            value,
        }
    }
}

/// Rows and columns of a tensor: its first dimension by all others.
fn matrix(shape: &[usize]) -> [usize; 2] {
    match shape {
        [] => [1, 1],
        [rows, rest @ ..] => [*rows, rest.iter().product()],
    }
}

fn elements(shape: &[usize]) -> usize {
    shape.iter().product()
}

/// Bytes of one value of a type that `check` lets in.
fn width(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// Values of the 256 codes of E4M3 without infinities: sign, four bits of exponent (bias 7), three of mantissa; all
/// ones is NaN.
pub(super) static E4M3: [f32; 256] = {
    let mut table = [0f32; 256];
    let mut code = 0;
    while code < 256 {
        let (exponent, mantissa) = ((code >> 3) & 15, code & 7);
        let magnitude = if exponent == 15 && mantissa == 7 {
            f32::NAN
        } else if exponent == 0 {
            // Subnormal: mantissa / 8 · 2^-6.
            mantissa as f32 / 512.0
        } else {
            (8 + mantissa) as f32 * (1u32 << exponent) as f32 / 1024.0
        };
        table[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    table
};

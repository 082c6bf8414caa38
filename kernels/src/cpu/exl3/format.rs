//! Reading layers from the tensors of a checkpoint.
//!
//! What is quantized, at which rate and with which codebook, follows from the tensors alone; the figures in
//! `quantization_config.json` are for display. Tensors of such files have no alignment, so everything is copied
//! by bytes, and only the bytes of the part that is asked for.

use std::ops::Range;

use half::{bf16, f16};

use super::error::Error;
use super::layer::Layer;
use super::stored::{Header, StoredLayer};

/// Element types that tensors of a layer may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dtype {
    /// Raw 16-bit units or packed signs.
    I16,
    /// Codebook markers.
    I32,
    /// Scales and biases.
    F16,
    /// Biases of some files.
    Bf16,
    /// Biases of some files.
    F32,
    /// Any other type: never right for a layer's tensors.
    Other,
}

impl Dtype {
    /// Bytes of an element; 0 for [`Dtype::Other`].
    pub const fn size(self) -> usize {
        match self {
            Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::I32 | Self::F32 => 4,
            Self::Other => 0,
        }
    }
}

/// A tensor as it lies in a file: little-endian bytes without alignment.
#[derive(Clone, Debug)]
pub struct RawTensor<'a> {
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: &'a [u8],
}

/// Where tensors come from: a checkpoint, one file, or a map in tests.
pub trait Tensors {
    /// The tensor of this full name.
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>>;
}

/// Whether `name` is an EXL3 linear layer: it has a trellis and scales or signs on both sides. A quantized
/// embedding table is none.
pub fn is_layer(tensors: &impl Tensors, name: &str) -> bool {
    let has = |suffix: &str| tensors.tensor(&format!("{name}.{suffix}")).is_some();
    has("trellis") && (has("suh") || has("su")) && (has("svh") || has("sv"))
}

/// Checks all tensors of layer `name` against each other.
///
/// # Errors
/// If one is missing or lies: about its rate, its shape, its codebook or its size.
pub fn read_header(tensors: &impl Tensors, name: &str) -> Result<Header, Error> {
    Ok(*StoredLayer::open(tensors, name)?.header())
}

/// Reads layer `name`.
///
/// # Errors
/// As [`read_header`].
pub fn read_layer(tensors: &impl Tensors, name: &str) -> Result<Layer, Error> {
    let stored = StoredLayer::open(tensors, name)?;
    let Header { k, n, .. } = *stored.header();
    stored.layer(0..k, 0..n)
}

/// Reads the part of layer `name` for input channels `k` and output channels `n`, copying no other bytes.
///
/// Partial products of a cut along `k` are to be summed; the bias stays with the part that has channel 0.
///
/// # Errors
/// As [`read_header`], and if a range is empty, reaches beyond the layer or is not on multiples of 128.
pub fn read_slice(
    tensors: &impl Tensors,
    name: &str,
    k: Range<usize>,
    n: Range<usize>,
) -> Result<Layer, Error> {
    StoredLayer::open(tensors, name)?.layer(k, n)
}

/// A tensor with its full name.
pub(super) struct Named<'a> {
    pub name: String,
    pub raw: RawTensor<'a>,
}

impl Named<'_> {
    /// What is wrong with it.
    pub fn error(&self, problem: &str) -> Error {
        Error::tensor(
            self.name.clone(),
            format!("{problem} (dtype {:?}, shape {:?})", self.raw.dtype, self.raw.shape),
        )
    }

    /// Checks dtype and that the bytes are what dtype and shape say.
    pub fn expect(&self, dtypes: &[Dtype]) -> Result<(), Error> {
        if !dtypes.contains(&self.raw.dtype) {
            return Err(self.error(&format!("dtype must be {dtypes:?}")));
        }
        let elements = self.raw.shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
        if elements.and_then(|n| n.checked_mul(self.raw.dtype.size())) != Some(self.raw.data.len()) {
            return Err(
                self.error(&format!("has {} bytes, which is not its shape's size", self.raw.data.len()))
            );
        }
        Ok(())
    }

    /// Checks the shape.
    pub fn expect_shape(&self, shape: &[usize]) -> Result<(), Error> {
        if self.raw.shape == shape {
            Ok(())
        } else {
            Err(self.error(&format!("the trellis asks for shape {shape:?}")))
        }
    }

    fn element<const N: usize>(&self, index: usize) -> [u8; N] {
        core::array::from_fn(|i| self.raw.data[index * N + i])
    }

    /// Values of a bias.
    pub fn read_floats(&self, range: &Range<usize>, out: &mut [f32]) {
        let read = |i| match self.raw.dtype {
            Dtype::F16 => f16::from_le_bytes(self.element(i)).to_f32(),
            Dtype::Bf16 => bf16::from_le_bytes(self.element(i)).to_f32(),
            _ => f32::from_le_bytes(self.element(i)),
        };
        range.clone().zip(out).for_each(|(i, out)| *out = read(i));
    }
}

/// One side's scales, or the packed signs of early files.
pub(super) struct Scales<'a> {
    pub tensor: Named<'a>,
    pub packed: bool,
}

impl Scales<'_> {
    /// Checks the number of channels.
    pub fn expect_len(&self, channels: usize) -> Result<(), Error> {
        self.tensor.expect_shape(&[if self.packed { channels / 16 } else { channels }])
    }

    /// Scales of some channels; signs become ±1.
    pub fn read(&self, range: &Range<usize>, out: &mut [f16]) {
        let read = |i: usize| {
            if self.packed {
                let unit = u16::from_le_bytes(self.tensor.element(i / 16));
                if unit >> (i % 16) & 1 == 1 { f16::NEG_ONE } else { f16::ONE }
            } else {
                f16::from_le_bytes(self.tensor.element(i))
            }
        };
        range.clone().zip(out).for_each(|(i, out)| *out = read(i));
    }
}

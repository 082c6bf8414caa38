//! Reading layers from the tensors of a checkpoint.
//!
//! What is quantized, at which rate and with which codebook, follows from the tensors alone; the figures in
//! `quantization_config.json` are for display. Tensors of such files have no alignment, so everything is copied
//! by bytes, and only the bytes of the part that is asked for.

use std::ops::Range;

use half::{bf16, f16};

use super::codebook::Codebook;
use super::error::Error;
use super::hadamard::BLOCK;
use super::layer::{Layer, Planes, check_cut};
use super::rate::Rate;

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

/// What the tensors of a layer say about it, before its weights are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Input channels, padding included.
    pub k: usize,
    /// Output channels, padding included.
    pub n: usize,
    /// Bits a weight.
    pub rate: Rate,
    /// Hash of the states.
    pub codebook: Codebook,
    /// Whether there is a bias.
    pub bias: bool,
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
    let source = Source { tensors, name };
    let trellis = source.required("trellis", "trellis")?;
    trellis.expect(&[Dtype::I16])?;
    let [k_tiles, n_tiles, units] = trellis.raw.shape[..] else {
        return Err(trellis.error("must have three dimensions (k/16, n/16, 16 * bits)"));
    };
    let Some(rate) = Rate::from_units(units) else {
        return Err(
            trellis.error("the last dimension must be 16 * bits, bits being 1 to 8 (or 1.5, 2.5, 3.5)")
        );
    };
    if k_tiles == 0 || n_tiles == 0 || k_tiles % (BLOCK / 16) != 0 || n_tiles % (BLOCK / 16) != 0 {
        return Err(trellis.error("k and n must be positive multiples of 128 (8 tiles)"));
    }
    let (k, n) = (16 * k_tiles, 16 * n_tiles);
    for (scales, signs, channels) in [("suh", "su", k), ("svh", "sv", n)] {
        source.scales(scales, signs)?.expect_len(channels)?;
    }
    let codebook = source.codebook()?;
    if !rate.is_whole() && codebook != Codebook::Mul1 {
        return Err(trellis
            .error(&format!("rate {rate} exists with codebook mul1 only, not with {}", codebook.name())));
    }
    let bias = source.optional("bias");
    if let Some(bias) = &bias {
        bias.expect(&[Dtype::F16, Dtype::Bf16, Dtype::F32])?;
        bias.expect_shape(&[n])?;
    }
    Ok(Header { k, n, rate, codebook, bias: bias.is_some() })
}

/// Reads layer `name`.
///
/// # Errors
/// As [`read_header`].
pub fn read_layer(tensors: &impl Tensors, name: &str) -> Result<Layer, Error> {
    let header = read_header(tensors, name)?;
    read_slice(tensors, name, 0..header.k, 0..header.n)
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
    let header = read_header(tensors, name)?;
    check_cut(name, "k", &k, header.k)?;
    check_cut(name, "n", &n, header.n)?;
    let source = Source { tensors, name };
    let trellis = source.required("trellis", "trellis")?;
    let tile = 2 * header.rate.units();
    let mut words = vec![0_u32; (k.len() / 16) * (n.len() / 16) * header.rate.words()];
    for (kt, words) in
        (k.start / 16..k.end / 16).zip(words.chunks_exact_mut(n.len() / 16 * header.rate.words()))
    {
        let bytes = &trellis.raw.data[(kt * (header.n / 16) + n.start / 16) * tile..][..n.len() / 16 * tile];
        for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
            *word = u32::from_le_bytes(*bytes);
        }
    }
    let suh = source.scales("suh", "su")?.read(&k);
    let svh = source.scales("svh", "sv")?.read(&n);
    let bias = source.optional("bias").filter(|_| k.start == 0).map(|b| b.read_floats(&n));
    let planes = Planes { rate: header.rate, codebook: header.codebook, trellis: words, suh, svh, bias };
    Layer::from_planes(name, planes)
}

/// The tensors of one layer.
struct Source<'a, T> {
    tensors: &'a T,
    name: &'a str,
}

impl<'a, T: Tensors> Source<'a, T> {
    fn optional(&self, suffix: &str) -> Option<Named<'a>> {
        let name = format!("{}.{suffix}", self.name);
        self.tensors.tensor(&name).map(|raw| Named { name, raw })
    }

    fn required(&self, suffix: &str, missing: &str) -> Result<Named<'a>, Error> {
        self.optional(suffix)
            .ok_or_else(|| Error::Missing { layer: self.name.to_owned(), missing: missing.to_owned() })
    }

    fn scales(&self, scales: &str, signs: &str) -> Result<Scales<'a>, Error> {
        if let Some(tensor) = self.optional(scales) {
            tensor.expect(&[Dtype::F16])?;
            return Ok(Scales { tensor, packed: false });
        }
        let tensor = self.required(signs, &format!("{scales} or {signs}"))?;
        tensor.expect(&[Dtype::I16])?;
        Ok(Scales { tensor, packed: true })
    }

    fn codebook(&self) -> Result<Codebook, Error> {
        let mut found = Codebook::ThreeInst;
        for codebook in Codebook::ALL {
            let Some((suffix, value)) = codebook.marker() else { continue };
            let Some(marker) = self.optional(suffix) else { continue };
            marker.expect(&[Dtype::I32])?;
            if !matches!(marker.raw.shape[..], [] | [1]) {
                return Err(marker.error("a codebook marker must be a scalar"));
            }
            let stored = marker.raw.data.first_chunk().map(|b| u32::from_le_bytes(*b));
            if stored != Some(value) {
                return Err(marker.error(&format!(
                    "holds {:#010x}, a file with this codebook has {value:#010x}",
                    stored.unwrap_or_default()
                )));
            }
            if found != Codebook::ThreeInst {
                return Err(marker.error(&format!(
                    "a layer has one codebook, but there is a marker of {} as well",
                    found.name()
                )));
            }
            found = codebook;
        }
        Ok(found)
    }
}

struct Named<'a> {
    name: String,
    raw: RawTensor<'a>,
}

impl Named<'_> {
    fn error(&self, problem: &str) -> Error {
        Error::tensor(
            self.name.clone(),
            format!("{problem} (dtype {:?}, shape {:?})", self.raw.dtype, self.raw.shape),
        )
    }

    /// Checks dtype and that the bytes are what dtype and shape say.
    fn expect(&self, dtypes: &[Dtype]) -> Result<(), Error> {
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

    fn expect_shape(&self, shape: &[usize]) -> Result<(), Error> {
        if self.raw.shape == shape {
            Ok(())
        } else {
            Err(self.error(&format!("the trellis asks for shape {shape:?}")))
        }
    }

    fn element<const N: usize>(&self, index: usize) -> [u8; N] {
        core::array::from_fn(|i| self.raw.data[index * N + i])
    }

    fn read_floats(&self, range: &Range<usize>) -> Vec<f32> {
        let read = |i| match self.raw.dtype {
            Dtype::F16 => f16::from_le_bytes(self.element(i)).to_f32(),
            Dtype::Bf16 => bf16::from_le_bytes(self.element(i)).to_f32(),
            _ => f32::from_le_bytes(self.element(i)),
        };
        range.clone().map(read).collect()
    }
}

/// One side's scales, or the packed signs of early files.
struct Scales<'a> {
    tensor: Named<'a>,
    packed: bool,
}

impl Scales<'_> {
    fn expect_len(&self, channels: usize) -> Result<(), Error> {
        self.tensor.expect_shape(&[if self.packed { channels / 16 } else { channels }])
    }

    fn read(&self, range: &Range<usize>) -> Vec<f16> {
        let read = |i: usize| {
            if self.packed {
                let unit = u16::from_le_bytes(self.tensor.element(i / 16));
                if unit >> (i % 16) & 1 == 1 { f16::NEG_ONE } else { f16::ONE }
            } else {
                f16::from_le_bytes(self.tensor.element(i))
            }
        };
        range.clone().map(read).collect()
    }
}

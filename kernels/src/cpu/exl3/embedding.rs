//! Quantized embedding tables: rows coded on their own, one ring for each 256 channels.

use half::f16;

use super::codebook::Codebook;
use super::error::Error;
use super::format::{Dtype, Tensors};
use super::hadamard::hadamard;
use super::rate::POSITIONS;

/// A quantized embedding table.
#[derive(Clone, Debug, PartialEq)]
pub struct Embedding {
    rows: usize,
    width: usize,
    bits: usize,
    /// Bytes of all rows: a row is a ring for each group, a ring is its scale and then `16 · bits` units of 16 bits.
    rings: Vec<u8>,
    /// `(groups, 256)`, each ±1.
    signs: Vec<f32>,
}

/// A quantized embedding table whose memory belongs to somebody else.
#[derive(Clone, Copy, Debug)]
pub struct EmbeddingView<'a> {
    width: usize,
    bits: usize,
    rings: &'a [u8],
    signs: &'a [f32],
}

/// Whether `name` is a quantized embedding table: unlike a linear layer it has signs.
pub fn is_embedding(tensors: &impl Tensors, name: &str) -> bool {
    let has = |suffix: &str| tensors.tensor(&format!("{name}.{suffix}")).is_some();
    has("signs") && (has("trellis") || has("shard_0.trellis"))
}

/// Bytes of a row of `groups` rings.
const fn row_bytes(groups: usize, bits: usize) -> usize {
    2 * groups * (1 + 16 * bits)
}

impl Embedding {
    /// Reads the table `name` with rows of `width` channels, which may be cut into shards.
    ///
    /// # Errors
    /// If a tensor is missing or its type, shape or size is not what the other one and `width` ask for.
    pub fn read(tensors: &impl Tensors, name: &str, width: usize) -> Result<Self, Error> {
        let get = |suffix: &str, dtype: Dtype| {
            let tensor = tensors
                .tensor(&format!("{name}.{suffix}"))
                .ok_or_else(|| Error::Missing { layer: name.to_owned(), missing: suffix.to_owned() })?;
            let [a, b] = tensor.shape[..] else {
                return Err(Error::tensor(format!("{name}.{suffix}"), "must have two dimensions"));
            };
            if tensor.dtype != dtype
                || a.checked_mul(b).and_then(|n| n.checked_mul(2)) != Some(tensor.data.len())
            {
                return Err(Error::tensor(
                    format!("{name}.{suffix}"),
                    format!("must be {dtype:?} and have the bytes of its shape ({a}, {b})"),
                ));
            }
            Ok((a, b, tensor.data))
        };
        let (groups, group, signs) = get("signs", Dtype::F16)?;
        if group != POSITIONS || groups != width.div_ceil(POSITIONS) || groups == 0 {
            let problem = format!("shape ({groups}, {group}) does not fit rows of {width} channels");
            return Err(Error::tensor(format!("{name}.signs"), problem));
        }
        let whole = tensors.tensor(&format!("{name}.trellis")).is_some();
        let mut table = Self {
            rows: 0,
            width,
            bits: 0,
            rings: Vec::new(),
            signs: signs.as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        };
        for shard in 0.. {
            let suffix = if whole { "trellis".to_owned() } else { format!("shard_{shard}.trellis") };
            if shard > 0 && (whole || tensors.tensor(&format!("{name}.{suffix}")).is_none()) {
                break;
            }
            let (rows, units, data) = get(&suffix, Dtype::I16)?;
            let bits = (units / groups).saturating_sub(1) / 16;
            let fits = (1..=8).contains(&bits) && 2 * units == row_bytes(groups, bits);
            if !fits || (shard > 0 && bits != table.bits) {
                let problem = format!(
                    "{units} units a row are not {groups} rings of 1 + 16 * bits, bits being 1 to 8, the same in \
                     all shards"
                );
                return Err(Error::tensor(format!("{name}.{suffix}"), problem));
            }
            (table.rows, table.bits) = (table.rows + rows, bits);
            table.rings.extend_from_slice(data);
        }
        Ok(table)
    }

    /// Rows of the table.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Channels of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bits a weight.
    pub fn bits(&self) -> usize {
        self.bits
    }

    /// The table without its memory.
    pub fn view(&self) -> EmbeddingView<'_> {
        EmbeddingView { width: self.width, bits: self.bits, rings: &self.rings, signs: &self.signs }
    }

    /// Bytes of all rings, and the signs.
    pub fn into_planes(self) -> (Vec<u8>, Vec<f32>) {
        (self.rings, self.signs)
    }

    /// Decodes a row into `out`.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not a row long.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        self.view().decode_row(row, out);
    }
}

impl<'a> EmbeddingView<'a> {
    /// A table of `rows` rows of `width` channels; `None` if the planes do not fit these.
    pub fn new(rows: usize, width: usize, rings: &'a [u8], signs: &'a [f32]) -> Option<Self> {
        let groups = width.div_ceil(POSITIONS);
        let bits = (1..=8).find(|&bits| row_bytes(groups, bits) * rows == rings.len())?;
        let fits = rows > 0 && groups > 0 && signs.len() == groups * POSITIONS;
        fits.then_some(Self { width, bits, rings, signs })
    }

    /// Decodes a row into `out`.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not a row long.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.width, "channels of a row");
        let table = Codebook::Mul1.table();
        let groups = self.signs.len() / POSITIONS;
        let row = &self.rings[row * row_bytes(groups, self.bits)..][..row_bytes(groups, self.bits)];
        let rings = row.as_chunks::<2>().0.chunks_exact(1 + 16 * self.bits);
        for ((ring, signs), out) in
            rings.zip(self.signs.as_chunks::<POSITIONS>().0).zip(out.chunks_mut(POSITIONS))
        {
            let unit = |i: usize| u16::from_le_bytes(ring[i]);
            let scale = f16::from_bits(unit(0)).to_f32();
            // Here the stream runs from the least significant bit of each unit up.
            let symbol = |i: usize| {
                (0..self.bits).fold(0_u32, |symbol, b| {
                    let bit = i * self.bits + b;
                    symbol | u32::from(unit(1 + bit / 16) >> (bit % 16) & 1) << b
                })
            };
            let symbols: [u32; POSITIONS] = core::array::from_fn(symbol);
            let mut values: [f32; POSITIONS] = core::array::from_fn(|i| {
                let state = (0..16_usize.div_ceil(self.bits)).fold(0, |state, back| {
                    state | symbols[(i + POSITIONS - back) % POSITIONS] << (back * self.bits)
                });
                table[usize::from(state as u16)] * scale
            });
            hadamard::<POSITIONS>(&mut values);
            for ((out, value), sign) in out.iter_mut().zip(values).zip(signs) {
                *out = value * sign;
            }
        }
    }
}

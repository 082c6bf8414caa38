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
    /// Units of all rows: a row is a ring for each group, a ring is its scale and then `16 · bits` units.
    units: Vec<u16>,
    /// `(groups, 256)`, each ±1.
    signs: Vec<f32>,
}

/// Whether `name` is a quantized embedding table: unlike a linear layer it has signs.
pub fn is_embedding(tensors: &impl Tensors, name: &str) -> bool {
    ["trellis", "signs"].iter().all(|suffix| tensors.tensor(&format!("{name}.{suffix}")).is_some())
}

impl Embedding {
    /// Reads the table `name` with rows of `width` channels.
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
            Ok((a, b, tensor.data.as_chunks::<2>().0))
        };
        let (groups, group, signs) = get("signs", Dtype::F16)?;
        if group != POSITIONS || groups != width.div_ceil(POSITIONS) || groups == 0 {
            let problem = format!("shape ({groups}, {group}) does not fit rows of {width} channels");
            return Err(Error::tensor(format!("{name}.signs"), problem));
        }
        let (rows, units, data) = get("trellis", Dtype::I16)?;
        let bits = (units / groups).saturating_sub(1) / 16;
        if !(1..=8).contains(&bits) || units != groups * (1 + 16 * bits) {
            let problem =
                format!("{units} units a row are not {groups} rings of 1 + 16 * bits, bits being 1 to 8");
            return Err(Error::tensor(format!("{name}.trellis"), problem));
        }
        Ok(Self {
            rows,
            width,
            bits,
            units: data.iter().map(|b| u16::from_le_bytes(*b)).collect(),
            signs: signs.iter().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        })
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

    /// Decodes a row into `out`.
    ///
    /// # Panics
    /// If there is no such row, or `out` is not a row long.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.width, "channels of a row");
        let table = Codebook::Mul1.table();
        let ring_units = 1 + 16 * self.bits;
        let groups = self.signs.len() / POSITIONS;
        let rings = self.units[row * groups * ring_units..].chunks_exact(ring_units);
        for ((ring, signs), out) in
            rings.zip(self.signs.as_chunks::<POSITIONS>().0).zip(out.chunks_mut(POSITIONS))
        {
            let scale = f16::from_bits(ring[0]).to_f32();
            // Here the stream runs from the least significant bit of each unit up.
            let symbol = |i: usize| {
                (0..self.bits).fold(0_u32, |symbol, b| {
                    let bit = i * self.bits + b;
                    symbol | u32::from(ring[1 + bit / 16] >> (bit % 16) & 1) << b
                })
            };
            let mut values: [f32; POSITIONS] = core::array::from_fn(|i| {
                let state = (0..16_usize.div_ceil(self.bits)).fold(0, |state, back| {
                    state | symbol((i + POSITIONS - back) % POSITIONS) << (back * self.bits)
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

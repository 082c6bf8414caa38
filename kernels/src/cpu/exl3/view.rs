//! A quantized linear layer whose planes belong to somebody else, and its decoded forms.

use half::f16;

use super::bits::{place, unpack_states};
use super::codebook::Codebook;
use super::error::Error;
use super::hadamard::{BLOCK, hadamard};
use super::rate::Rate;

/// A layer whose planes lie elsewhere, in a checkpoint's copy or a device's memory.
#[derive(Clone, Copy)]
pub struct LayerView<'a> {
    k: usize,
    n: usize,
    rate: Rate,
    codebook: Codebook,
    trellis: &'a [u32],
    suh: &'a [f16],
    svh: &'a [f16],
    bias: Option<&'a [f32]>,
}

impl<'a> LayerView<'a> {
    /// Puts a view together.
    ///
    /// # Errors
    /// As `Layer::from_planes`.
    pub fn new(
        name: &str,
        rate: Rate,
        codebook: Codebook,
        trellis: &'a [u32],
        suh: &'a [f16],
        svh: &'a [f16],
        bias: Option<&'a [f32]>,
    ) -> Result<Self, Error> {
        check_planes(name, rate, codebook, trellis.len(), suh.len(), svh.len(), bias.map(<[f32]>::len))?;
        Ok(Self::checked(rate, codebook, trellis, suh, svh, bias))
    }

    /// The same of planes that were checked before.
    pub(super) fn checked(
        rate: Rate,
        codebook: Codebook,
        trellis: &'a [u32],
        suh: &'a [f16],
        svh: &'a [f16],
        bias: Option<&'a [f32]>,
    ) -> Self {
        Self { k: suh.len(), n: svh.len(), rate, codebook, trellis, suh, svh, bias }
    }

    /// Input channels, padding included.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Output channels, padding included.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Bits a weight.
    pub fn rate(&self) -> Rate {
        self.rate
    }

    /// Hash of the states.
    pub fn codebook(&self) -> Codebook {
        self.codebook
    }

    /// Signs and scales of the input channels.
    pub fn suh(&self) -> &'a [f16] {
        self.suh
    }

    /// Signs and scales of the output channels.
    pub fn svh(&self) -> &'a [f16] {
        self.svh
    }

    /// Bias of the output channels.
    pub fn bias(&self) -> Option<&'a [f32]> {
        self.bias
    }

    /// Words of `count` tiles from tile `(kt, first)` on.
    #[inline(always)]
    pub(super) fn tiles(&self, kt: usize, first: usize, count: usize) -> &'a [u32] {
        let words = self.rate.words();
        &self.trellis[(kt * (self.n / 16) + first) * words..][..count * words]
    }

    /// The decoded trellis `Q`, `(k, n)` row-major: exact binary16 values.
    pub fn inner(&self) -> Vec<f16> {
        let table: Vec<f16> = self.codebook.table().iter().map(|&v| f16::from_f32(v)).collect();
        let mut inner = vec![f16::ZERO; self.k * self.n];
        for kt in 0..self.k / 16 {
            for nt in 0..self.n / 16 {
                let states = unpack_states(self.tiles(kt, nt, 1), self.rate);
                for (position, &state) in states.iter().enumerate() {
                    let (row, col) = place(position);
                    inner[(16 * kt + row) * self.n + 16 * nt + col] = table[usize::from(state)];
                }
            }
        }
        inner
    }

    /// The weight `W`, `(k, n)` row-major.
    pub fn weight(&self) -> Vec<f32> {
        let mut w: Vec<f32> = self.inner().into_iter().map(f16::to_f32).collect();
        let mut column = [0.0; BLOCK];
        for rows in w.chunks_exact_mut(BLOCK * self.n) {
            for j in 0..self.n {
                for (c, row) in column.iter_mut().zip(rows.chunks_exact(self.n)) {
                    *c = row[j];
                }
                hadamard::<BLOCK>(&mut column);
                for (c, row) in column.iter().zip(rows.chunks_exact_mut(self.n)) {
                    row[j] = *c;
                }
            }
        }
        for (row, suh) in w.chunks_exact_mut(self.n).zip(self.suh) {
            for x in row.iter_mut() {
                *x *= suh.to_f32();
            }
            hadamard::<BLOCK>(row);
            for (x, svh) in row.iter_mut().zip(self.svh) {
                *x *= svh.to_f32();
            }
        }
        w
    }
}

/// Refuses planes that do not fit each other.
pub(super) fn check_planes(
    name: &str,
    rate: Rate,
    codebook: Codebook,
    trellis: usize,
    k: usize,
    n: usize,
    bias: Option<usize>,
) -> Result<(), Error> {
    for (side, tensor, channels) in [("k", "suh", k), ("n", "svh", n)] {
        if channels == 0 || !channels.is_multiple_of(BLOCK) {
            return Err(Error::tensor(
                format!("{name}.{tensor}"),
                format!("{side} is {channels}, must be a positive multiple of {BLOCK}"),
            ));
        }
    }
    if !rate.is_whole() && codebook != Codebook::Mul1 {
        return Err(Error::tensor(
            format!("{name}.trellis"),
            format!("rate {rate} exists with codebook mul1 only, the layer has {}", codebook.name()),
        ));
    }
    let words = (k / 16) * (n / 16) * rate.words();
    if trellis != words {
        return Err(Error::tensor(
            format!("{name}.trellis"),
            format!("{trellis} words, must be {words} for {k} x {n} at {rate} bits"),
        ));
    }
    if let Some(bias) = bias
        && bias != n
    {
        return Err(Error::tensor(format!("{name}.bias"), format!("{bias} values, must be {n}")));
    }
    Ok(())
}

//! A quantized linear layer in memory: its planes, slices of it, and its decoded forms.

use std::fmt;
use std::ops::Range;

use half::f16;

use super::codebook::Codebook;
use super::error::Error;
use super::hadamard::BLOCK;
use super::rate::Rate;
use super::view::{LayerView, check_planes};

/// `W = diag(suh) · H · Q · H · diag(svh)`, of shape `(k, n)` = (input channels, output channels).
#[derive(Clone, PartialEq)]
pub struct Layer {
    k: usize,
    n: usize,
    rate: Rate,
    codebook: Codebook,
    /// `(k/16, n/16, words of a tile)`: the words as a checkpoint has them.
    trellis: Vec<u32>,
    suh: Vec<f16>,
    svh: Vec<f16>,
    bias: Option<Vec<f32>>,
}

impl fmt::Debug for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Layer")
            .field("k", &self.k)
            .field("n", &self.n)
            .field("rate", &self.rate)
            .field("codebook", &self.codebook)
            .field("bias", &self.bias.is_some())
            .finish_non_exhaustive()
    }
}

/// The parts of a [`Layer`], for building one and for moving one to a device.
#[derive(Clone, Debug)]
pub struct Planes {
    /// Bits a weight.
    pub rate: Rate,
    /// Hash of the states.
    pub codebook: Codebook,
    /// Little-endian words of all tiles, `(k/16, n/16, words of a tile)`.
    pub trellis: Vec<u32>,
    /// Signs and scales of the input channels, `(k)`.
    pub suh: Vec<f16>,
    /// Signs and scales of the output channels, `(n)`.
    pub svh: Vec<f16>,
    /// Bias of the output channels, `(n)`.
    pub bias: Option<Vec<f32>>,
}

impl Layer {
    /// Puts a layer together.
    ///
    /// # Errors
    /// If a side is empty or no multiple of 128, if the planes disagree, or if the codebook lacks the rate. `name`
    /// is used in messages only.
    pub fn from_planes(name: &str, planes: Planes) -> Result<Self, Error> {
        let Planes { rate, codebook, trellis, suh, svh, bias } = planes;
        let (k, n) = (suh.len(), svh.len());
        check_planes(name, rate, codebook, trellis.len(), k, n, bias.as_ref().map(Vec::len))?;
        Ok(Self { k, n, rate, codebook, trellis, suh, svh, bias })
    }

    /// Takes the layer apart.
    pub fn into_planes(self) -> Planes {
        let Self { rate, codebook, trellis, suh, svh, bias, .. } = self;
        Planes { rate, codebook, trellis, suh, svh, bias }
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

    /// The words of all tiles, `(k/16, n/16, words of a tile)`.
    pub fn trellis(&self) -> &[u32] {
        &self.trellis
    }

    /// Signs and scales of the input channels.
    pub fn suh(&self) -> &[f16] {
        &self.suh
    }

    /// Signs and scales of the output channels.
    pub fn svh(&self) -> &[f16] {
        &self.svh
    }

    /// Bias of the output channels.
    pub fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// The layer without its memory.
    pub fn view(&self) -> LayerView<'_> {
        let bias = self.bias.as_deref();
        LayerView::checked(self.rate, self.codebook, &self.trellis, &self.suh, &self.svh, bias)
    }

    /// The part of the layer for input channels `k` and output channels `n`.
    ///
    /// Of a cut along `k` the partial products are to be summed; the bias stays with the part that has channel 0.
    ///
    /// # Errors
    /// If a range is empty, reaches beyond the layer or does not lie on multiples of 128.
    pub fn slice(&self, name: &str, k: Range<usize>, n: Range<usize>) -> Result<Self, Error> {
        check_cut(name, "k", &k, self.k)?;
        check_cut(name, "n", &n, self.n)?;
        let view = self.view();
        let trellis = (k.start / 16..k.end / 16)
            .flat_map(|kt| view.tiles(kt, n.start / 16, n.len() / 16))
            .copied()
            .collect();
        Ok(Self {
            k: k.len(),
            n: n.len(),
            rate: self.rate,
            codebook: self.codebook,
            trellis,
            suh: self.suh[k.clone()].to_vec(),
            svh: self.svh[n.clone()].to_vec(),
            bias: self.bias.as_ref().filter(|_| k.start == 0).map(|b| b[n].to_vec()),
        })
    }

    /// The decoded trellis `Q`, `(k, n)` row-major: exact binary16 values.
    pub fn inner(&self) -> Vec<f16> {
        self.view().inner()
    }

    /// The weight `W`, `(k, n)` row-major.
    pub fn weight(&self) -> Vec<f32> {
        self.view().weight()
    }
}

/// Refuses a cut that is empty, too long or not on block borders.
pub(super) fn check_cut(name: &str, side: &str, range: &Range<usize>, channels: usize) -> Result<(), Error> {
    if range.is_empty()
        || range.end > channels
        || !range.start.is_multiple_of(BLOCK)
        || !range.end.is_multiple_of(BLOCK)
    {
        return Err(Error::Cut {
            layer: name.to_owned(),
            side: side.to_owned(),
            start: range.start,
            end: range.end,
            channels,
        });
    }
    Ok(())
}

//! A layer in the tensors of a checkpoint: found, checked, and read part by part.

use std::ops::Range;

use half::f16;

use super::codebook::Codebook;
use super::error::Error;
use super::format::{Dtype, Named, Scales, Tensors};
use super::hadamard::BLOCK;
use super::layer::{Layer, Planes, check_cut};
use super::rate::Rate;

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

/// A stored layer whose tensors fit each other.
pub struct StoredLayer<'a> {
    name: String,
    header: Header,
    trellis: Named<'a>,
    suh: Scales<'a>,
    svh: Scales<'a>,
    bias: Option<Named<'a>>,
}

impl<'a> StoredLayer<'a> {
    /// Finds layer `name` and checks all its tensors against each other. Reads nothing but the marker.
    ///
    /// # Errors
    /// If one is missing or lies: about its rate, its shape, its codebook or its size.
    pub fn open(tensors: &'a impl Tensors, name: &str) -> Result<Self, Error> {
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
        let suh = source.scales("suh", "su")?;
        suh.expect_len(k)?;
        let svh = source.scales("svh", "sv")?;
        svh.expect_len(n)?;
        let codebook = source.codebook()?;
        if !rate.is_whole() && codebook != Codebook::Mul1 {
            return Err(trellis.error(&format!(
                "rate {rate} exists with codebook mul1 only, not with {}",
                codebook.name()
            )));
        }
        let bias = source.optional("bias");
        if let Some(bias) = &bias {
            bias.expect(&[Dtype::F16, Dtype::Bf16, Dtype::F32])?;
            bias.expect_shape(&[n])?;
        }
        let header = Header { k, n, rate, codebook, bias: bias.is_some() };
        Ok(Self { name: name.to_owned(), header, trellis, suh, svh, bias })
    }

    /// What it says about itself.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Full names of its tensors.
    pub fn tensors(&self) -> Vec<String> {
        let marker = self.header.codebook.marker().map(|(suffix, _)| format!("{}.{suffix}", self.name));
        let names = [&self.trellis.name, &self.suh.tensor.name, &self.svh.tensor.name].map(String::clone);
        names.into_iter().chain(self.bias.as_ref().map(|b| b.name.clone())).chain(marker).collect()
    }

    /// Copies the words of the tiles for input channels `k` and output channels `n`, and no others.
    ///
    /// # Errors
    /// If a range is empty, reaches beyond the layer or is not on multiples of 128.
    ///
    /// # Panics
    /// If `words` has another length than the part.
    pub fn read_trellis(&self, k: Range<usize>, n: Range<usize>, words: &mut [u32]) -> Result<(), Error> {
        check_cut(&self.name, "k", &k, self.header.k)?;
        check_cut(&self.name, "n", &n, self.header.n)?;
        let (tile, rate) = (2 * self.header.rate.units(), self.header.rate);
        let row = n.len() / 16 * rate.words();
        assert_eq!(words.len(), k.len() / 16 * row, "words of a part");
        for (kt, words) in (k.start / 16..k.end / 16).zip(words.chunks_exact_mut(row)) {
            let start = (kt * (self.header.n / 16) + n.start / 16) * tile;
            let bytes = &self.trellis.raw.data[start..][..n.len() / 16 * tile];
            for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *word = u32::from_le_bytes(*bytes);
            }
        }
        Ok(())
    }

    /// Copies the scales of some input channels.
    ///
    /// # Errors
    /// If a range reaches beyond the layer or is not on multiples of 128; unless `allow_nan`, if a scale is not finite.
    pub fn read_suh(&self, k: &Range<usize>, allow_nan: bool, out: &mut [f16]) -> Result<(), Error> {
        check_cut(&self.name, "k", k, self.header.k)?;
        read_scales(&self.suh, k, allow_nan, out)
    }

    /// Copies the scales of some output channels.
    ///
    /// # Errors
    /// As [`StoredLayer::read_suh`].
    pub fn read_svh(&self, n: &Range<usize>, allow_nan: bool, out: &mut [f16]) -> Result<(), Error> {
        check_cut(&self.name, "n", n, self.header.n)?;
        read_scales(&self.svh, n, allow_nan, out)
    }

    /// Copies the bias of some output channels; zeros if there is none.
    ///
    /// # Errors
    /// As [`StoredLayer::read_suh`].
    pub fn read_bias(&self, n: &Range<usize>, allow_nan: bool, out: &mut [f32]) -> Result<(), Error> {
        check_cut(&self.name, "n", n, self.header.n)?;
        let Some(bias) = &self.bias else {
            out.fill(0.0);
            return Ok(());
        };
        bias.read_floats(n, out);
        match out.iter().position(|v| !allow_nan && !v.is_finite()) {
            Some(i) => Err(not_finite(bias, n.start + i, out[i])),
            None => Ok(()),
        }
    }

    /// The part for input channels `k` and output channels `n` as a layer of its own.
    ///
    /// # Errors
    /// If a range is empty, reaches beyond the layer or is not on multiples of 128.
    pub fn layer(&self, k: Range<usize>, n: Range<usize>) -> Result<Layer, Error> {
        check_cut(&self.name, "k", &k, self.header.k)?;
        check_cut(&self.name, "n", &n, self.header.n)?;
        let Header { rate, codebook, .. } = self.header;
        let mut planes = Planes {
            rate,
            codebook,
            trellis: vec![0; k.len() / 16 * (n.len() / 16) * rate.words()],
            suh: vec![f16::ZERO; k.len()],
            svh: vec![f16::ZERO; n.len()],
            bias: (self.header.bias && k.start == 0).then(|| vec![0.0; n.len()]),
        };
        self.suh.read(&k, &mut planes.suh);
        self.svh.read(&n, &mut planes.svh);
        if let (Some(bias), Some(stored)) = (&mut planes.bias, &self.bias) {
            stored.read_floats(&n, bias);
        }
        self.read_trellis(k, n, &mut planes.trellis)?;
        Layer::from_planes(&self.name, planes)
    }
}

fn read_scales(
    scales: &Scales<'_>,
    range: &Range<usize>,
    allow_nan: bool,
    out: &mut [f16],
) -> Result<(), Error> {
    scales.read(range, out);
    match out.iter().position(|v| !allow_nan && !v.is_finite()) {
        Some(i) => Err(not_finite(&scales.tensor, range.start + i, out[i].to_f32())),
        None => Ok(()),
    }
}

fn not_finite(tensor: &Named<'_>, channel: usize, value: f32) -> Error {
    Error::tensor(
        tensor.name.clone(),
        format!("is {value} at channel {channel}; --allow-nan loads it all the same"),
    )
}

/// The tensors of one layer.
struct Source<'a, 'n, T> {
    tensors: &'a T,
    name: &'n str,
}

impl<'a, T: Tensors> Source<'a, '_, T> {
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

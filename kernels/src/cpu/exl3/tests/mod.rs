//! Comparison with vectors made by the format's own implementation (`tests/fixtures/exl3`).

mod format;
mod products;
mod quantize;
mod segments;
mod vectors;

use std::path::PathBuf;

use half::{bf16, f16};
use safetensors::SafeTensors;

use super::{Codebook, Dtype, Layer, Planes, Rate, RawTensor, Tensors};

pub fn fixture(name: &str) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/exl3").join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

pub fn json(name: &str) -> serde_json::Value {
    serde_json::from_slice(&fixture(name)).unwrap()
}

/// The tensors of a safetensors file.
pub struct File<'a>(pub SafeTensors<'a>);

impl<'a> File<'a> {
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(SafeTensors::deserialize(bytes).unwrap())
    }

    /// A tensor of any float type as f32.
    pub fn floats(&self, name: &str) -> Vec<f32> {
        let tensor = self.tensor(name).unwrap_or_else(|| panic!("no tensor {name}"));
        let pairs = || tensor.data.as_chunks::<2>().0.iter();
        match tensor.dtype {
            Dtype::F16 => pairs().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::Bf16 => pairs().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
            Dtype::F32 => tensor.data.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            other => panic!("{name} has dtype {other:?}"),
        }
    }

    pub fn units(&self, name: &str) -> Vec<u16> {
        let tensor = self.tensor(name).unwrap_or_else(|| panic!("no tensor {name}"));
        tensor.data.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b)).collect()
    }

    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.tensor(name).map(|t| t.dtype)
    }
}

impl Tensors for File<'_> {
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let view = self.0.tensor(name).ok()?;
        let dtype = match view.dtype() {
            safetensors::Dtype::I16 => Dtype::I16,
            safetensors::Dtype::I32 => Dtype::I32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            safetensors::Dtype::F32 => Dtype::F32,
            _ => Dtype::Other,
        };
        Some(RawTensor { dtype, shape: view.shape().to_vec(), data: view.data() })
    }
}

/// Small deterministic numbers for tests.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// Uniform in [-1, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// About Gaussian, variance 1.
    pub fn gauss(&mut self) -> f32 {
        let (u, v) = (
            (self.bits() >> 11) as f64 / (1_u64 << 53) as f64,
            (self.bits() >> 11) as f64 / (1_u64 << 53) as f64,
        );
        ((-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos()) as f32
    }
}

/// A layer of random words: any bits are a valid trellis.
pub fn random_layer(k: usize, n: usize, rate: Rate, codebook: Codebook, seed: u64) -> Layer {
    let mut numbers = Numbers(seed);
    let planes = Planes {
        rate,
        codebook,
        trellis: (0..k * n / 256 * rate.words()).map(|_| numbers.bits() as u32).collect(),
        suh: (0..k).map(|_| f16::from_f32(numbers.uniform())).collect(),
        svh: (0..n).map(|_| f16::from_f32(numbers.uniform())).collect(),
        bias: Some((0..n).map(|_| numbers.uniform()).collect()),
    };
    Layer::from_planes("random", planes).unwrap()
}

/// Every codebook with every rate it has.
pub fn variants() -> Vec<(Codebook, Rate)> {
    Codebook::ALL
        .into_iter()
        .flat_map(|c| Rate::all().filter(move |r| r.is_whole() || c == Codebook::Mul1).map(move |r| (c, r)))
        .collect()
}

pub fn deviation(values: &[f32]) -> f32 {
    let n = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    (values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n).sqrt() as f32
}

pub fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

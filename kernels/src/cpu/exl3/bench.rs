//! How fast layers are multiplied and written on this machine, against what it could do.
//!
//! Two bounds hold for one row. Every packed byte has to come from memory, and every weight takes a number of
//! operations that the format fixes ([`operations`]). Both rates are measured from registers and from memory by the
//! same threads, between the runs that are judged, since other work on the machine changes all of them.

use std::hint::black_box;
use std::time::Instant;

use half::f16;
use rayon::prelude::*;

use super::codebook::Codebook;
use super::lanes::{Kernel, Path, dispatch};
use super::layer::{Layer, Planes};
use super::matmul::Options;
use super::quantize::TileEncoder;
use super::rate::{POSITIONS, Rate};

/// One measured product.
#[derive(Clone, Debug, PartialEq)]
pub struct Product {
    /// Hash of the states.
    pub codebook: Codebook,
    /// Bits a weight.
    pub bits: f32,
    /// Input channels.
    pub k: usize,
    /// Output channels.
    pub n: usize,
    /// Rows of the call.
    pub rows: usize,
    /// Fastest call, seconds.
    pub seconds: f64,
    /// Packed bytes of the layer.
    pub bytes: usize,
    /// Best measured bandwidth, bytes a second.
    pub bandwidth: f64,
    /// Operations a weight.
    pub operations: f64,
    /// Best measured rate of 32-bit vector-lane operations, a second.
    pub operation_rate: f64,
}

impl Product {
    /// Seconds that memory allows.
    pub fn memory_seconds(&self) -> f64 {
        self.bytes as f64 / self.bandwidth
    }

    /// Seconds that decoding and one multiply-add a weight and row allow.
    pub fn operation_seconds(&self) -> f64 {
        let weights = (self.k * self.n) as f64;
        weights * (self.operations + (self.rows - 1) as f64) / self.operation_rate
    }

    /// Part of the slower bound that was reached.
    pub fn fraction(&self) -> f64 {
        self.memory_seconds().max(self.operation_seconds()) / self.seconds
    }
}

/// Operations that one row takes for a weight: cutting out the state (2), its code value, the multiply-add (1).
///
/// A code value takes a product (an addition too for `3inst`), 7 operations that make two floats of its halves and
/// their sum, and 2 that round; with `mul1` a product, 7 that sum its bytes, 1 conversion, 2 for the affine map and 2
/// that round.
pub fn operations(codebook: Codebook) -> f64 {
    match codebook {
        Codebook::Mcg => 14.0,
        Codebook::ThreeInst => 15.0,
        Codebook::Mul1 => 16.0,
    }
}

/// Measures a layer of random words: the best of `repetitions` calls, and of as many measurements of the machine.
///
/// # Panics
/// If the codebook lacks the rate or a side is no multiple of 128.
pub fn product(
    codebook: Codebook,
    rate: Rate,
    k: usize,
    n: usize,
    rows: usize,
    repetitions: usize,
) -> Product {
    let planes = Planes {
        rate,
        codebook,
        trellis: (0..k / 16 * (n / 16) * rate.words())
            .map(|i| (i as u32).wrapping_mul(0x9E37_79B9))
            .collect(),
        suh: vec![f16::from_f32(0.01); k],
        svh: vec![f16::ONE; n],
        bias: None,
    };
    let layer = Layer::from_planes("random", planes).unwrap_or_else(|error| panic!("{error}"));
    let x: Vec<f32> = (0..rows * k).map(|i| (i % 17) as f32 - 8.0).collect();
    let mut y = vec![0.0; rows * n];
    let stream = vec![1_u64; 16 << 20];
    let mut best = Product {
        codebook,
        bits: rate.bits(),
        k,
        n,
        rows,
        seconds: f64::INFINITY,
        bytes: 4 * layer.trellis().len(),
        bandwidth: 0.0,
        operations: operations(codebook),
        operation_rate: 0.0,
    };
    for _ in 0..repetitions {
        // The stream is larger than the caches and drives the layer out of them.
        best.bandwidth = best.bandwidth.max(bandwidth(&stream));
        best.operation_rate = best.operation_rate.max(operation_rate());
        let start = Instant::now();
        layer.matmul(&x, rows, &mut y, Options::default());
        best.seconds = best.seconds.min(start.elapsed().as_secs_f64());
        black_box(&mut y);
    }
    best
}

/// Bytes a second that all threads read together.
pub fn bandwidth(stream: &[u64]) -> f64 {
    let start = Instant::now();
    let sum: u64 = stream
        .par_chunks(stream.len().div_ceil(rayon::current_num_threads()).max(1))
        .map(|chunk| {
            let mut sum = 0;
            dispatch(Path::Simd, Read { chunk, sum: &mut sum });
            sum
        })
        .reduce(|| 0, u64::wrapping_add);
    black_box(sum);
    8.0 * stream.len() as f64 / start.elapsed().as_secs_f64()
}

struct Read<'a> {
    chunk: &'a [u64],
    sum: &'a mut u64,
}

impl Kernel for Read<'_> {
    fn run_scalar(self) {
        self.run();
    }

    #[inline(always)]
    fn run(self) {
        let mut sums = [0_u64; 32];
        for part in self.chunk.as_chunks::<32>().0 {
            for (sum, value) in sums.iter_mut().zip(part) {
                *sum ^= value;
            }
        }
        *self.sum = sums.iter().fold(0, |a, b| a ^ b);
    }
}

/// Lane operations a second of all threads, from registers: integer product, shift, sum, two of logic, multiply-add.
pub fn operation_rate() -> f64 {
    const STEPS: usize = 2_000;
    let threads = rayon::current_num_threads();
    let start = Instant::now();
    let total: u32 = (0..threads)
        .into_par_iter()
        .map(|_| {
            let mut sum = 0;
            dispatch(Path::Simd, Mix { steps: STEPS, sum: &mut sum });
            sum
        })
        .reduce(|| 0, u32::wrapping_add);
    black_box(total);
    (threads * STEPS * NUMBERS * ROUNDS * 6) as f64 / start.elapsed().as_secs_f64()
}

/// Numbers that are worked on beside one another, in the first-level cache.
const NUMBERS: usize = 512;
/// Times that a number goes through the operations between load and store.
const ROUNDS: usize = 4;

struct Mix<'a> {
    steps: usize,
    sum: &'a mut u32,
}

impl Kernel for Mix<'_> {
    fn run_scalar(self) {
        self.run();
    }

    #[inline(always)]
    fn run(self) {
        let (factor, flip, mask, more) =
            black_box((0x9E37_79B9_u32, 0x3B60_3B60_u32, 0x8FFF_8FFF_u32, 0x1234_5678_u32));
        let (gain, offset) = black_box((0.5_f32, 0.25_f32));
        let mut words: [u32; NUMBERS] = core::array::from_fn(|i| i as u32);
        let mut floats = [1.0_f32; NUMBERS];
        for _ in 0..self.steps {
            for (word, float) in words.iter_mut().zip(&mut floats) {
                let (mut w, mut f) = (*word, *float);
                for _ in 0..ROUNDS {
                    w = (((w.wrapping_mul(factor) >> 3) & mask) ^ flip).wrapping_add(more);
                    f = f.mul_add(gain, offset);
                }
                (*word, *float) = (w, f);
            }
        }
        *self.sum = words.iter().fold(*self.sum, |sum, w| sum.wrapping_add(*w));
        *self.sum = floats.iter().fold(*self.sum, |sum, f| sum.wrapping_add(f.to_bits()));
    }
}

/// One measurement of the tile encoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Encoding {
    /// Hash of the states.
    pub codebook: Codebook,
    /// Bits a weight.
    pub bits: f32,
    /// Weights encoded.
    pub weights: usize,
    /// Threads.
    pub threads: usize,
    /// Seconds.
    pub seconds: f64,
    /// Mean squared error over the variance of the source.
    pub error: f64,
}

/// Encodes `tiles` tiles of Gaussian numbers, as many for every codebook and rate the same.
///
/// # Errors
/// If the codebook lacks the rate.
pub fn encoding(codebook: Codebook, rate: Rate, tiles: usize) -> Result<Encoding, super::Error> {
    let encoder = TileEncoder::new(codebook, rate)?;
    let rms = super::quantize::default_rms(codebook, rate);
    let source: Vec<[f32; POSITIONS]> = (0..tiles).map(gaussian_tile).collect();
    let targets: Vec<[f32; POSITIONS]> = source.iter().map(|t| t.map(|x| x * rms)).collect();
    let start = Instant::now();
    let states = encoder.encode(&targets);
    let seconds = start.elapsed().as_secs_f64();
    let (mut error, mut norm) = (0.0, 0.0);
    for (&state, &x) in states.iter().flatten().zip(source.iter().flatten()) {
        error += (f64::from(encoder.value(state) / rms) - f64::from(x)).powi(2);
        norm += f64::from(x).powi(2);
    }
    Ok(Encoding {
        codebook,
        bits: rate.bits(),
        weights: tiles * POSITIONS,
        threads: rayon::current_num_threads(),
        seconds,
        error: error / norm,
    })
}

/// Gaussian numbers of a tile, by the method of Box and Muller on a counter.
fn gaussian_tile(tile: usize) -> [f32; POSITIONS] {
    let uniform = |counter: u64| {
        let mut z = counter.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ z >> 31) >> 11) as f64 / (1_u64 << 53) as f64
    };
    core::array::from_fn(|i| {
        let counter = 2 * (tile * POSITIONS + i) as u64 + 1;
        ((-2.0 * (1.0 - uniform(counter)).ln()).sqrt() * (std::f64::consts::TAU * uniform(counter + 1)).cos())
            as f32
    })
}

//! How near the kernels come to what this machine can do.
//!
//! Memory bandwidth and multiply-add rate are measured between the repetitions of every kernel, because other work on
//! the machine changes all three; medians are compared.

mod cases;

use std::hint::black_box;
use std::time::Instant;

use half::bf16;
use rayon::prelude::*;

use super::par::threads;
use super::simd::kernel;

/// One measured kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct RooflineRow {
    /// Operation and sizes.
    pub name: String,
    /// Rows of the call.
    pub rows: usize,
    /// Median seconds a call.
    pub seconds: f64,
    /// Bytes that a call has to move between memory and the processor.
    pub bytes: f64,
    /// Floating-point operations of a call; a multiply-add counts as two.
    pub flops: f64,
    /// Median bandwidth measured beside it, bytes a second.
    pub bandwidth: f64,
    /// Median rate measured beside it, floating-point operations a second.
    pub rate: f64,
    /// What bounds it here: "memory" or "compute".
    pub bound: &'static str,
    /// Seconds that the bound allows.
    pub bound_seconds: f64,
    /// `bound_seconds / seconds`. Above 1 where the operands stay in a cache.
    pub fraction: f64,
    /// Repetitions.
    pub repetitions: usize,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Roofline {
    /// Threads of the pool.
    pub threads: usize,
    /// Median of all bandwidth measurements: all threads reading memory, bytes a second.
    pub bandwidth: f64,
    /// Median of all rate measurements: all threads, f32 multiply-adds from registers, floating-point operations a second.
    pub rate: f64,
    /// The kernels.
    pub rows: Vec<RooflineRow>,
}

/// Elements of the weight memory that all cases share: 640 MiB, far more than any last-level cache.
const WEIGHTS: usize = 320 << 20;
/// 64-bit words that one bandwidth measurement reads: 256 MiB. Long enough that, on a machine with other work, it is
/// interrupted as often as the kernels are.
const STREAM: usize = 32 << 20;
/// Steps of one rate measurement, for the same reason.
const STEPS: usize = 400_000;

kernel! {
    /// Reads four stretches at once, as the products read four panels.
    fn read_all[][](data: &'a [u64]) -> u64 {
        let quarter = data.len() / 4;
        let parts: [&[[u64; 8]]; 4] =
            std::array::from_fn(|p| data[p * quarter..(p + 1) * quarter].as_chunks().0);
        let mut lanes = [[0u64; 8]; 4];
        for i in 0..quarter / 8 {
            for p in 0..4 {
                for l in 0..8 {
                    lanes[p][l] ^= parts[p][i][l];
                }
            }
        }
        let mut all = 0;
        for l in lanes.as_flattened() {
            all ^= l;
        }
        all
    }
}

kernel! {
    fn multiply_add[const R: usize][R](steps: usize, factor: f32) -> f32 {
        let mut acc = [[1.0f32; 16]; R];
        for _ in 0..steps {
            for r in 0..R {
                for c in 0..16 {
                    acc[r][c] = acc[r][c].mul_add(factor, 0.5);
                }
            }
        }
        let mut sum = 0.0;
        for row in acc {
            for v in row {
                sum += v;
            }
        }
        sum
    }
}

fn seconds(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

/// Independent chains of multiply-adds in registers: how many are best depends on the instruction set.
#[derive(Clone, Copy)]
struct Chains {
    width: usize,
    run: fn(usize, f32) -> f32,
}

const CHAINS: [Chains; 3] = [
    Chains { width: 5, run: multiply_add::<5> },
    Chains { width: 6, run: multiply_add::<6> },
    Chains { width: 12, run: multiply_add::<12> },
];

/// Floating-point operations a second of all threads.
fn measure_rate(chains: Chains, steps: usize) -> f64 {
    let time = seconds(|| {
        let sum: f32 = (0..threads()).into_par_iter().map(|_| (chains.run)(steps, black_box(0.999))).sum();
        black_box(sum);
    });
    (threads() * steps * chains.width * 16 * 2) as f64 / time
}

/// The fastest shape, by the best of several short measurements each.
fn best_chains() -> Chains {
    let rate = |chains: Chains| (0..5).map(|_| measure_rate(chains, STEPS / 8)).fold(0.0, f64::max);
    CHAINS.into_iter().max_by(|a, b| rate(*a).total_cmp(&rate(*b))).unwrap_or(CHAINS[0])
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Memory that the cases share.
struct Bench {
    weights: Vec<bf16>,
    chains: Chains,
    bandwidths: Vec<f64>,
    rates: Vec<f64>,
}

impl Bench {
    fn new() -> Self {
        // Finite numbers of changing size; filled in parallel, so that every page is really there.
        let mut weights = vec![bf16::ZERO; WEIGHTS];
        weights.par_chunks_mut(1 << 16).enumerate().for_each(|(i, part)| {
            for (j, w) in part.iter_mut().enumerate() {
                *w = bf16::from_bits(0x3c00 + ((i * 37 + j * 11) & 0xff) as u16);
            }
        });
        Self { weights, chains: best_chains(), bandwidths: Vec::new(), rates: Vec::new() }
    }

    /// Bytes a second of all threads reading a part of the weight memory (another part each time).
    fn measure_bandwidth(&self, turn: usize) -> f64 {
        let words: &[u64] = bytemuck::cast_slice(&self.weights);
        let part = &words[turn % (words.len() / STREAM) * STREAM..][..STREAM];
        let time = seconds(|| {
            let all = part.par_chunks(1 << 17).map(read_all).reduce(|| 0, |a, b| a ^ b);
            black_box(all);
        });
        (STREAM * 8) as f64 / time
    }

    /// Measures `run(turn)`; turns count up, so that a case can take other weights each time.
    fn case(
        &mut self,
        name: &str,
        rows: usize,
        bytes: f64,
        flops: f64,
        mut run: impl FnMut(&[bf16], usize),
    ) -> RooflineRow {
        let once = seconds(|| run(&self.weights, 0));
        // Short calls are repeated inside a measurement; the whole stays near a second.
        let inner = (0.02 / once.max(1e-9)).ceil().clamp(1.0, 10_000.0) as usize;
        let repetitions = (1.5 / (once * inner as f64 + 0.05)).ceil().clamp(7.0, 25.0) as usize;
        let (mut times, mut bandwidths, mut rates) = (Vec::new(), Vec::new(), Vec::new());
        let mut turn = 1;
        for i in 0..repetitions {
            bandwidths.push(self.measure_bandwidth(i));
            let time = seconds(|| {
                for _ in 0..inner {
                    run(&self.weights, turn);
                    turn += 1;
                }
            });
            times.push(time / inner as f64);
            rates.push(measure_rate(self.chains, STEPS));
        }
        self.bandwidths.extend(&bandwidths);
        self.rates.extend(&rates);
        let (seconds, bandwidth, rate) = (median(&mut times), median(&mut bandwidths), median(&mut rates));
        let (memory, compute) = (bytes / bandwidth, flops / rate);
        let bound_seconds = memory.max(compute);
        RooflineRow {
            name: name.to_owned(),
            rows,
            seconds,
            bytes,
            flops,
            bandwidth,
            rate,
            bound: if memory >= compute { "memory" } else { "compute" },
            bound_seconds,
            fraction: bound_seconds / seconds,
            repetitions,
        }
    }
}

/// Measures this machine and every kernel, at the sizes of the published model; takes about a minute and 2 GiB.
/// `done` is told each row as it is ready.
pub fn roofline(mut done: impl FnMut(&RooflineRow)) -> Roofline {
    let mut bench = Bench::new();
    let mut rows = Vec::new();
    for case in cases::ALL {
        let row = case(&mut bench);
        done(&row);
        rows.push(row);
    }
    let Bench { mut bandwidths, mut rates, .. } = bench;
    Roofline { threads: threads(), bandwidth: median(&mut bandwidths), rate: median(&mut rates), rows }
}

//! From a matrix to tiles: signs, scales and transforms.

use half::f16;
use rayon::prelude::*;

use super::calibrated::encode_with_feedback;
use super::hessian::Hessian;
use super::viterbi::{TileEncoder, Tiles};
use crate::cpu::exl3::bits::{pack_states, place};
use crate::cpu::exl3::codebook::Codebook;
use crate::cpu::exl3::error::Error;
use crate::cpu::exl3::hadamard::{BLOCK, hadamard};
use crate::cpu::exl3::layer::{Layer, Planes};
use crate::cpu::exl3::rate::{POSITIONS, Rate};

/// How a matrix is quantized.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Hash of the states.
    pub codebook: Codebook,
    /// Bits a weight.
    pub rate: Rate,
    /// Seed of the input channels' signs. Layers that read the same activations should share it.
    pub input_seed: u64,
    /// Seed of the output channels' signs.
    pub output_seed: u64,
    /// Whether output channels get scales; without, they have signs alone.
    pub out_scales: bool,
}

/// How far a matrix is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Tiles encoded.
    pub done: usize,
    /// Tiles of the matrix.
    pub total: usize,
}

/// A quantized matrix.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The layer, padded to multiples of 128.
    pub layer: Layer,
    /// Squared error of the rotated weights over their squared norm. Close to the squared relative error of the
    /// weights, and what the format's table of errors is about.
    pub error: f64,
    /// With calibration, the squared error of the outputs on the calibration inputs over their squared norm.
    pub output_error: Option<f64>,
}

/// The root mean square that Gaussian targets should have in front of the encoder: the minimum of the measured
/// error for this codebook and rate.
pub fn default_rms(codebook: Codebook, rate: Rate) -> f32 {
    // From 1 bit in steps of half a bit; codebooks without half bits have interpolated figures there.
    let table: [f32; 15] = match codebook {
        Codebook::ThreeInst => {
            [1.42, 1.3, 1.23, 1.2, 1.18, 1.16, 1.14, 1.11, 1.08, 1.05, 1.01, 0.98, 0.945, 0.91, 0.88]
        }
        Codebook::Mcg => {
            [1.42, 1.3, 1.25, 1.2, 1.16, 1.15, 1.14, 1.11, 1.08, 1.05, 1.01, 0.98, 0.945, 0.91, 0.88]
        }
        Codebook::Mul1 => {
            [1.13, 1.02, 0.99, 0.95, 0.935, 0.935, 0.92, 0.9, 0.88, 0.865, 0.85, 0.82, 0.795, 0.775, 0.76]
        }
    };
    table[rate.halves() - 2]
}

/// A seed for the module called `name`, from the seed of the whole conversion.
pub fn seed_of(seed: u64, name: &str) -> u64 {
    // FNV-1a, so that the file names of a conversion fix its bytes on every machine.
    name.bytes()
        .fold(seed ^ 0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// Quantizes `weight`, `(out, in)` row-major as `nn.Linear` stores it, and packs `bias` with it.
///
/// Both sides are padded with zeros to multiples of 128. With a `hessian` of the layer's inputs, errors are fed back
/// so that the error of the outputs becomes small; without, tiles are encoded on their own. The result depends on
/// the operands alone, not on threads or instruction set. `progress` is called from worker threads.
///
/// # Errors
/// If the codebook lacks the rate, the operands disagree, or a weight is not finite. `name` is used in messages.
pub fn quantize(
    name: &str,
    weight: &[f32],
    inputs: usize,
    bias: Option<&[f32]>,
    hessian: Option<&Hessian>,
    settings: &Settings,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Quantized, Error> {
    let encoder = TileEncoder::new(settings.codebook, settings.rate)?;
    quantize_by(&encoder, name, weight, inputs, bias, hessian, settings, progress)
}

/// As [`quantize`], the tiles encoded by `tiles`.
///
/// # Errors
/// As [`quantize`], and what a device says.
///
/// # Panics
/// If `tiles` are of another codebook or rate than the settings.
pub fn quantize_by(
    tiles: &dyn Tiles,
    name: &str,
    weight: &[f32],
    inputs: usize,
    bias: Option<&[f32]>,
    hessian: Option<&Hessian>,
    settings: &Settings,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Quantized, Error> {
    assert_eq!(tiles.kind(), (settings.codebook, settings.rate), "the encoder of other settings");
    let refuse = |tensor: &str, problem: String| Err(Error::tensor(format!("{name}.{tensor}"), problem));
    if inputs == 0 || weight.is_empty() || !weight.len().is_multiple_of(inputs) {
        return refuse("weight", format!("{} values do not make rows of {inputs} inputs", weight.len()));
    }
    if let Some(at) = weight.iter().position(|w| !w.is_finite()) {
        return refuse(
            "weight",
            format!("value {at} is {}, only finite weights can be quantized", weight[at]),
        );
    }
    let outputs = weight.len() / inputs;
    if let Some(bias) = bias
        && bias.len() != outputs
    {
        return refuse("bias", format!("{} values, the weight has {outputs} outputs", bias.len()));
    }
    if let Some(h) = hessian
        && h.inputs() != inputs
    {
        return refuse("weight", format!("has {inputs} inputs, the calibration {}", h.inputs()));
    }
    let w = Rotation::new(weight, inputs, settings);
    let (states, output_error) = match hessian {
        Some(hessian) => {
            let metric = hessian.rotated(&w.su);
            let states = encode_with_feedback(tiles, &w.values, w.n, &metric, progress)?;
            let error = metric.relative_error(&w.values, &decode(settings.codebook, &states, w.n), w.n);
            (states, Some(error))
        }
        None => (encode_plain(tiles, &w, progress)?, None),
    };
    let error = squared_error(&w.values, &decode(settings.codebook, &states, w.n));
    let mut trellis = vec![0; states.len() * settings.rate.words()];
    for (states, words) in states.iter().zip(trellis.chunks_exact_mut(settings.rate.words())) {
        pack_states(states, settings.rate, words);
    }
    let planes = Planes {
        rate: settings.rate,
        codebook: settings.codebook,
        trellis,
        suh: w.su,
        svh: w.sv,
        bias: bias.map(|b| b.iter().copied().chain(std::iter::repeat(0.0)).take(w.n).collect()),
    };
    Ok(Quantized { layer: Layer::from_planes(name, planes)?, error, output_error })
}

/// Tiles that are encoded at a time, in whole rows of tiles: enough to fill a device several times over.
const AT_ONCE: usize = 4096;

/// Every tile on its own, some rows of tiles at a time.
fn encode_plain(
    tiles: &dyn Tiles,
    w: &Rotation,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Vec<[u16; POSITIONS]>, Error> {
    let total = w.values.len() / POSITIONS;
    let rows = AT_ONCE.div_ceil(w.n / 16);
    let mut states = Vec::with_capacity(total);
    for rows in w.values.chunks(rows * 16 * w.n) {
        let targets: Vec<_> = rows.chunks_exact(16 * w.n).flat_map(|row| row_of_tiles(row, w.n)).collect();
        states.extend(tiles.encode(&targets)?);
        progress(Progress { done: states.len(), total });
    }
    Ok(states)
}

/// The tiles of 16 rows of `n` values, in ring order.
pub(super) fn row_of_tiles(rows: &[f32], n: usize) -> Vec<[f32; POSITIONS]> {
    (0..n / 16)
        .map(|tile| {
            core::array::from_fn(|position| {
                let (row, column) = place(position);
                rows[row * n + 16 * tile + column]
            })
        })
        .collect()
}

/// Code values of tiles, `(k, n)` row-major.
fn decode(codebook: Codebook, states: &[[u16; POSITIONS]], n: usize) -> Vec<f32> {
    let codes = codebook.table();
    let mut values = vec![0.0; states.len() * POSITIONS];
    for (rows, states) in values.chunks_exact_mut(16 * n).zip(states.chunks_exact(n / 16)) {
        for (tile, states) in states.iter().enumerate() {
            for (position, &state) in states.iter().enumerate() {
                let (row, column) = place(position);
                rows[row * n + 16 * tile + column] = codes[usize::from(state)];
            }
        }
    }
    values
}

fn squared_error(targets: &[f32], decoded: &[f32]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (&t, &d) in targets.iter().zip(decoded) {
        error += (f64::from(d) - f64::from(t)).powi(2);
        norm += f64::from(t).powi(2);
    }
    if norm > 0.0 { error / norm } else { 0.0 }
}

/// A matrix in the basis of the tiles.
struct Rotation {
    n: usize,
    su: Vec<f16>,
    sv: Vec<f16>,
    /// `(k, n)`, close to Gaussian with the root mean square that suits the codebook.
    values: Vec<f32>,
}

impl Rotation {
    fn new(weight: &[f32], inputs: usize, settings: &Settings) -> Self {
        let outputs = weight.len() / inputs;
        let (k, n) = (inputs.next_multiple_of(BLOCK), outputs.next_multiple_of(BLOCK));
        let column: Vec<f64> = weight.par_chunks_exact(inputs).map(root_mean_square).collect();
        let used = column.iter().filter(|&&c| c > 0.0).count().max(1);
        let mean = column.iter().sum::<f64>() / used as f64;
        let signs = Signs(settings.output_seed);
        let sv: Vec<f16> = (0..n)
            .map(|j| match column.get(j) {
                Some(&c) if c > 0.0 => scale(if settings.out_scales { c / mean } else { 1.0 }, signs.of(j)),
                _ => f16::ZERO,
            })
            .collect();
        // Transposed, divided by the column scales, transformed along n.
        let mut values = vec![0.0; k * n];
        values.par_chunks_exact_mut(n).take(inputs).enumerate().for_each(|(i, row)| {
            for (j, (value, sv)) in row.iter_mut().zip(&sv).enumerate().take(outputs) {
                if sv.to_f32() != 0.0 {
                    *value = weight[j * inputs + i] / sv.to_f32();
                }
            }
            hadamard::<BLOCK>(row);
        });
        let rms = f64::from(default_rms(settings.codebook, settings.rate));
        let rows: Vec<f64> = values.par_chunks_exact(n).map(root_mean_square).collect();
        let signs = Signs(settings.input_seed);
        let su: Vec<f16> = (0..k)
            .map(|i| {
                // Rows without weights thin out their block, and its elements after the transform.
                let block = &rows[i / BLOCK * BLOCK..][..BLOCK];
                let filled = block.iter().filter(|&&r| r > 0.0).count() as f64 / BLOCK as f64;
                if rows[i] > 0.0 { scale(rows[i] / rms * filled.sqrt(), signs.of(i)) } else { f16::ZERO }
            })
            .collect();
        values.par_chunks_exact_mut(BLOCK * n).zip(su.par_chunks_exact(BLOCK)).for_each(|(rows, su)| {
            let mut column = [0.0; BLOCK];
            for j in 0..n {
                for ((c, row), su) in column.iter_mut().zip(rows.chunks_exact(n)).zip(su) {
                    *c = if su.to_f32() == 0.0 { 0.0 } else { row[j] / su.to_f32() };
                }
                hadamard::<BLOCK>(&mut column);
                for (c, row) in column.iter().zip(rows.chunks_exact_mut(n)) {
                    row[j] = *c;
                }
            }
        });
        Self { n, su, sv, values }
    }
}

/// A signed scale as it is stored: rounded before it is used, and not rounded to zero.
fn scale(magnitude: f64, negative: bool) -> f16 {
    let magnitude = f16::from_f64(magnitude).clamp(f16::MIN_POSITIVE_SUBNORMAL, f16::MAX);
    if negative { -magnitude } else { magnitude }
}

fn root_mean_square(values: &[f32]) -> f64 {
    (values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / values.len() as f64).sqrt()
}

/// Random signs of channels.
struct Signs(u64);

impl Signs {
    fn of(&self, channel: usize) -> bool {
        // SplitMix64 of the channel's place in the seed's sequence.
        let mut z = self.0.wrapping_add((channel as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ z >> 31) & 1 == 1
    }
}

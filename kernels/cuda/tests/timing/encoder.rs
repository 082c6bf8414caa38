//! The encoder of EXL3 on a GPU: its states against the CPU's, and its speed.

use std::sync::Arc;
use std::time::Instant;

use plugfold_cuda::{Gpu, TileQuantizer};
use plugfold_kernels::cpu::exl3::quantize::{TileEncoder, Tiles, default_rms};
use plugfold_kernels::cpu::exl3::{Codebook, POSITIONS, Rate};

/// Tiles that are timed: four million weights.
const TIMED: usize = 16_384;
/// Tiles that the CPU encodes, too.
const COMPARED: usize = 264;
const REPEATS: usize = 5;

/// Numbers that are close to Gaussian.
fn targets(tiles: usize, rms: f32) -> Vec<[f32; POSITIONS]> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut gauss = || (0..12).map(|_| uniform()).sum::<f32>() * rms;
    (0..tiles).map(|_| std::array::from_fn(|_| gauss())).collect()
}

/// Compares and times each rate, with each codebook at 4 bits. Prints a line of JSON each; whether all states are equal.
///
/// # Errors
/// What the device says.
pub fn run(gpu: &Arc<Gpu>) -> Result<bool, String> {
    let said = |e: plugfold_kernels::cpu::exl3::Error| e.to_string();
    let four = Rate::from_bits(4.0).ok_or("no rate")?;
    let kinds = Rate::all().map(|rate| (Codebook::Mul1, rate));
    let mut good = true;
    for (codebook, rate) in kinds.chain([(Codebook::Mcg, four), (Codebook::ThreeInst, four)]) {
        let device = TileQuantizer::new(gpu.clone(), codebook, rate, gpu.facts().multiprocessors as usize);
        let device = device.map_err(said)?;
        let targets = targets(TIMED, default_rms(codebook, rate));
        let states = device.encode(&targets).map_err(said)?;
        // What one block after another finds, and what the CPU finds.
        let want = TileEncoder::new(codebook, rate).map_err(said)?.encode(&targets[..COMPARED]);
        let equal = states[..COMPARED] == want[..];
        good &= equal;
        let mut times = Vec::new();
        for _ in 0..REPEATS {
            let start = Instant::now();
            device.encode(&targets).map_err(said)?;
            times.push(start.elapsed().as_secs_f64());
        }
        times.sort_unstable_by(f64::total_cmp);
        println!(
            "{{\"encoder\": \"{}\", \"bits\": {rate}, \"outcome\": \"{}\", \"weights_per_second\": {:.3e}}}",
            codebook.name(),
            if equal { "equal" } else { "other states than the CPU's" },
            (TIMED * POSITIONS) as f64 / times[REPEATS / 2]
        );
    }
    Ok(good)
}

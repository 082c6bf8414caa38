use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::cpu::exl3::quantize::*;
use crate::cpu::exl3::*;

fn settings(codebook: Codebook, bits: f32) -> Settings {
    let rate = Rate::from_bits(bits).unwrap();
    Settings { codebook, rate, input_seed: 1, output_seed: 2, out_scales: true }
}

fn run(w: &[f32], inputs: usize, hessian: Option<&Hessian>, settings: &Settings) -> Quantized {
    quantize("l", w, inputs, None, hessian, settings, &|_| ()).unwrap()
}

/// Squared error of the layer's weight against `(out, in)`, over the squared norm.
fn weight_error(layer: &Layer, w: &[f32], inputs: usize) -> f64 {
    let decoded = layer.weight();
    let (mut error, mut norm) = (0.0, 0.0);
    for (j, row) in w.chunks_exact(inputs).enumerate() {
        for (i, &w) in row.iter().enumerate() {
            error += f64::from(decoded[i * layer.n() + j] - w).powi(2);
            norm += f64::from(w).powi(2);
        }
    }
    error / norm
}

/// Heavy-tailed weights with uneven rows and columns.
fn uneven(outputs: usize, inputs: usize, seed: u64) -> Vec<f32> {
    let mut numbers = Numbers(seed);
    let rows: Vec<f32> = (0..outputs).map(|_| (0.7 * numbers.gauss()).exp()).collect();
    let columns: Vec<f32> = (0..inputs).map(|_| (0.7 * numbers.gauss()).exp()).collect();
    rows.iter()
        .flat_map(|r| columns.iter().map(move |c| r * c))
        .map(|s| 0.02 * s * numbers.gauss().powi(3))
        .collect()
}

#[test]
fn tile_encoder_is_as_good_as_the_original() {
    let (cases, bytes) = (json("encoder.json"), fixture("encoder.safetensors"));
    let file = File::new(&bytes);
    let targets = file.floats("targets");
    let tiles = targets.as_chunks::<POSITIONS>().0;
    for (name, case) in cases["cases"].as_object().unwrap() {
        let codebook = Codebook::from_name(case["codebook"].as_str().unwrap()).unwrap();
        let rate = Rate::from_bits(case["rate"].as_f64().unwrap() as f32).unwrap();
        let (rms, mse) = (case["rms"].as_f64().unwrap(), case["mse"].as_f64().unwrap());
        let encoder = TileEncoder::new(codebook, rate).unwrap();
        let error = |states: &[[u16; POSITIONS]]| {
            let pairs = states.iter().flatten().zip(tiles.iter().flatten());
            pairs.map(|(&s, &x)| (f64::from(encoder.value(s)) / rms - f64::from(x)).powi(2)).sum::<f64>()
                / targets.len() as f64
        };
        let theirs: Vec<[u16; POSITIONS]> = file.units(&format!("states.{name}")).as_chunks().0.to_vec();
        assert!((error(&theirs) / mse - 1.0).abs() < 1e-4, "{name}: the figures do not belong to the states");
        let scaled: Vec<[f32; POSITIONS]> = tiles.iter().map(|t| t.map(|x| x * rms as f32)).collect();
        let states = encoder.encode(&scaled);
        assert!(states.iter().all(|s| states_chain(s, rate)), "{name}");
        assert!(error(&states) <= 1.01 * mse, "{name}: {} of {mse}", error(&states));
    }
}

#[test]
fn matrices_reach_the_errors_of_the_table() {
    let mut numbers = Numbers(9);
    let gauss: Vec<f32> = (0..128 * 256).map(|_| 0.02 * numbers.gauss()).collect();
    // Figures of the format's description for whole matrices; matrices this small scatter by a percent.
    for (w, codebook, bits, table) in
        [(gauss, Codebook::Mul1, 4.0, 0.00445), (uneven(128, 256, 3), Codebook::Mcg, 4.0, 0.00454)]
    {
        let quantized = run(&w, 256, None, &settings(codebook, bits));
        assert!(quantized.error < 1.02 * table, "{} {bits}: {}", codebook.name(), quantized.error);
        let error = weight_error(&quantized.layer, &w, 256);
        assert!(error < 1.05 * table, "{} {bits}: {error} in the weights", codebook.name());
    }
}

#[test]
fn result_depends_on_the_seeds_but_not_on_threads() {
    let w = uneven(128, 256, 4);
    let base = settings(Codebook::Mcg, 3.0);
    let on = |threads, settings: &Settings| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| run(&w, 256, None, settings).layer)
    };
    let first = on(1, &base);
    assert!(first == on(3, &base));
    assert!(first != on(1, &Settings { input_seed: 5, ..base }));
    assert!(first != on(1, &Settings { output_seed: 5, ..base }));
    assert_ne!(seed_of(1, "a"), seed_of(1, "b"));
    assert_ne!(seed_of(1, "a"), seed_of(2, "a"));
}

struct Stored(Vec<StoredTensor>);
impl Tensors for Stored {
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let t = self.0.iter().find(|t| t.name == name)?;
        Some(RawTensor { dtype: t.dtype, shape: t.shape.clone(), data: &t.data })
    }
}

#[test]
fn stored_tensors_read_back_as_the_same_layer() {
    for (codebook, bits) in [(Codebook::ThreeInst, 2.0), (Codebook::Mcg, 5.0), (Codebook::Mul1, 3.5)] {
        let w = uneven(200, 130, 5);
        let bias: Vec<f32> = (0..200).map(|i| i as f32 / 8.0).collect();
        let settings = settings(codebook, bits);
        let layer = quantize("a.b", &w, 130, Some(&bias), None, &settings, &|_| ()).unwrap().layer;
        assert_eq!((layer.k(), layer.n()), (256, 256));
        let stored = tensors("a.b", &layer);
        let entry = storage(&layer, &stored);
        assert_eq!((entry.bits_per_weight, entry.quant_format), (bits, "exl3"));
        assert_eq!(entry.multiplier.map(|m| m.1), codebook.marker().map(|m| m.1));
        assert_eq!(entry.stored_tensors.len(), stored.len());
        assert!(read_layer(&Stored(stored), "a.b").unwrap() == layer);
    }
}

#[test]
fn zero_channels_stay_zero() {
    let (outputs, inputs) = (200, 130);
    let mut w = uneven(outputs, inputs, 6);
    w[7 * inputs..8 * inputs].fill(0.0);
    for row in w.chunks_exact_mut(inputs) {
        row[11] = 0.0;
    }
    let quantized = run(&w, inputs, None, &settings(Codebook::Mul1, 4.0));
    let decoded = quantized.layer.weight();
    assert!((0..inputs).all(|i| decoded[i * 256 + 7] == 0.0));
    assert!((0..outputs).all(|j| decoded[11 * 256 + j] == 0.0));
    assert!(weight_error(&quantized.layer, &w, inputs) < 0.0049);
    let nothing = run(&vec![0.0; 128 * 128], 128, None, &settings(Codebook::Mul1, 1.0));
    assert!(nothing.layer.weight().iter().all(|&w| w == 0.0));
}

#[test]
fn calibration_lowers_the_error_of_the_outputs() {
    let (outputs, inputs) = (128, 256);
    let w = uneven(outputs, inputs, 7);
    let mut numbers = Numbers(8);
    // Inputs in a space of few dimensions plus noise: strongly correlated.
    let basis: Vec<f32> = (0..12 * inputs).map(|_| numbers.gauss()).collect();
    let mut hessian = Hessian::new(inputs);
    for _ in 0..4 {
        let mut rows = vec![0.0; 128 * inputs];
        for row in rows.chunks_exact_mut(inputs) {
            for basis in basis.chunks_exact(inputs) {
                let amount = numbers.gauss();
                row.iter_mut().zip(basis).for_each(|(x, b)| *x += amount * b);
            }
            for x in row.iter_mut() {
                *x += 0.3 * numbers.gauss();
            }
        }
        hessian.add(&rows);
    }
    assert_eq!(hessian.rows(), 512);
    let settings = settings(Codebook::Mcg, 4.0);
    let calibrated = run(&w, inputs, Some(&hessian), &settings);
    let plain = run(&w, inputs, None, &settings);
    let output = calibrated.output_error.unwrap();
    assert!(calibrated.error > plain.error, "feedback trades weight error for output error");
    assert!(output < 0.6 * plain.error, "{output} of {}", plain.error);
}

#[test]
fn progress_reaches_the_end_and_bad_input_is_named() {
    let w = uneven(128, 128, 1);
    let base = settings(Codebook::Mcg, 1.0);
    let last = AtomicUsize::new(0);
    quantize("l", &w, 128, None, None, &base, &|p| {
        assert!(p.done > last.swap(p.done, Ordering::Relaxed) && p.total == 64);
    })
    .unwrap();
    assert_eq!(last.into_inner(), 64);
    let refused =
        |w: &[f32], inputs, bias: Option<&[f32]>, hessian: Option<&Hessian>, settings: &Settings| {
            quantize("l", w, inputs, bias, hessian, settings, &|_| ()).map(|_| ()).unwrap_err().to_string()
        };
    let mut broken = w.clone();
    broken[5] = f32::NAN;
    assert!(refused(&broken, 128, None, None, &base).contains("value 5"));
    assert!(refused(&w, 100, None, None, &base).contains("l.weight"));
    assert!(refused(&w, 128, Some(&[0.0; 3]), None, &base).contains("l.bias"));
    assert!(refused(&w, 128, None, Some(&Hessian::new(64)), &base).contains("calibration"));
    let half = Settings { rate: Rate::from_bits(2.5).unwrap(), ..base };
    assert!(refused(&w, 128, None, None, &half).contains("mul1"));
}

use half::f16;
use sha2::{Digest, Sha256};

use super::*;
use crate::cpu::exl3::*;

fn sha256(bytes: impl IntoIterator<Item = u16>) -> String {
    use std::fmt::Write;
    let bytes: Vec<u8> = bytes.into_iter().flat_map(u16::to_le_bytes).collect();
    Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
        write!(hex, "{byte:02x}").unwrap();
        hex
    })
}

/// Runs `check(name, case, tensors, layer)` for every stored layer.
fn each_layer(check: impl Fn(&str, &serde_json::Value, &File<'_>, &Layer)) {
    let (cases, bytes) = (json("layers.json"), fixture("layers.safetensors"));
    let file = File::new(&bytes);
    let cases = cases["cases"].as_object().unwrap();
    assert_eq!(cases.len(), 41);
    for (name, case) in cases {
        assert!(is_layer(&file, name), "{name}");
        let layer = read_layer(&file, name).unwrap_or_else(|e| panic!("{e}"));
        check(name, case, &file, &layer);
    }
}

#[test]
fn codebooks_have_the_published_hash() {
    let expected = json("codebooks.json");
    for codebook in Codebook::ALL {
        let case = &expected[codebook.name()];
        let halves = || codebook.table().iter().map(|&v| f16::from_f32(v).to_bits());
        assert_eq!(sha256(halves()), case["sha256_of_65536_little_endian_halfs"].as_str().unwrap());
        assert_eq!(halves().map(u64::from).sum::<u64>(), case["sum_of_bit_patterns"].as_u64().unwrap());
        for (state, bits) in case["spot"].as_object().unwrap() {
            let state: usize = state.parse().unwrap();
            let bits = u16::from_str_radix(&bits.as_str().unwrap()[2..], 16).unwrap();
            assert_eq!(halves().nth(state), Some(bits), "{} of {state}", codebook.name());
        }
    }
}

#[test]
fn headers_say_what_the_cases_are() {
    each_layer(|name, case, file, layer| {
        assert_eq!(layer.k() as u64, case["k"].as_u64().unwrap(), "{name}");
        assert_eq!(layer.n() as u64, case["n"].as_u64().unwrap(), "{name}");
        assert_eq!(f64::from(layer.rate().bits()), case["rate"].as_f64().unwrap(), "{name}");
        assert_eq!(layer.codebook().name(), case["codebook"].as_str().unwrap(), "{name}");
        assert_eq!(layer.bias().is_some(), file.dtype(&format!("{name}.bias")).is_some(), "{name}");
        let zeros = layer.svh().iter().filter(|s| s.to_f32() == 0.0).count();
        assert_eq!(zeros as u64, case["zero_columns"].as_u64().unwrap(), "{name}");
    });
}

#[test]
fn states_and_inner_weights_are_equal_bit_for_bit() {
    each_layer(|name, case, file, layer| {
        let mut all = Vec::new();
        let mut packed = Vec::new();
        for words in layer.trellis().chunks_exact(layer.rate().words()) {
            let states = unpack_states(words, layer.rate());
            assert!(states_chain(&states, layer.rate()), "{name}");
            let mut again = vec![0; words.len()];
            pack_states(&states, layer.rate(), &mut again);
            packed.extend(again);
            all.extend(states);
        }
        assert_eq!(packed, layer.trellis(), "{name}");
        if file.dtype(&format!("{name}.states")).is_some() {
            assert_eq!(all, file.units(&format!("{name}.states")), "{name}");
        }
        assert_eq!(sha256(all), case["states_sha256"].as_str().unwrap(), "{name}");
        let inner: Vec<u16> = layer.inner().into_iter().map(f16::to_bits).collect();
        if file.dtype(&format!("{name}.inner")).is_some() {
            assert_eq!(inner, file.units(&format!("{name}.inner")), "{name}");
        }
        assert_eq!(sha256(inner), case["inner_sha256"].as_str().unwrap(), "{name}");
    });
}

#[test]
fn weights_agree_within_the_stated_bounds() {
    let seen = std::cell::Cell::new(0);
    each_layer(|name, _, file, layer| {
        let key = format!("{name}.w");
        let limit = match file.dtype(&key) {
            Some(Dtype::F32) => 2e-6,
            Some(Dtype::F16) => 6e-4,
            _ => return,
        };
        let expected = file.floats(&key);
        let largest = expected.iter().fold(0.0, |m: f32, w| m.max(w.abs()));
        let error = largest_difference(&layer.weight(), &expected);
        assert!(error <= limit * largest, "{name}: {error} of {largest}");
        seen.set(seen.get() + 1);
    });
    assert_eq!(seen.get(), 14, "layers with stored weights");
}

#[test]
fn rotated_activations_agree_to_one_rounding() {
    let seen = std::cell::Cell::new(0);
    each_layer(|name, _, file, layer| {
        let key = format!("{name}.x_rotated");
        if file.dtype(&key).is_none() {
            return;
        }
        let (x, expected) = (file.floats(&format!("{name}.x")), file.units(&key));
        // The original rounds x ∘ suh to half before it transforms.
        let mut rotated: Vec<f32> = x
            .iter()
            .zip(layer.suh().iter().cycle())
            .map(|(x, s)| f16::from_f32(x * s.to_f32()).to_f32())
            .collect();
        hadamard::<BLOCK>(&mut rotated);
        let mut off = 0;
        for (got, want) in rotated.iter().zip(&expected) {
            let distance = (i32::from(f16::from_f32(*got).to_bits()) - i32::from(*want)).abs();
            assert!(distance <= 1, "{name}");
            off += usize::from(distance != 0);
        }
        assert!(off * 1000 <= expected.len(), "{name}: {off} of {} differ", expected.len());
        seen.set(seen.get() + 1);
    });
    assert!(seen.get() > 0);
}

#[test]
fn products_agree_within_the_stated_bounds() {
    let seen = std::cell::Cell::new(0);
    each_layer(|name, _, file, layer| {
        if file.dtype(&format!("{name}.y")).is_none() {
            return;
        }
        let (x, expected) = (file.floats(&format!("{name}.x")), file.floats(&format!("{name}.y")));
        let with_bias = format!("{name}.y_with_bias");
        let rows = x.len() / layer.k();
        let plain = Layer::from_planes(name, Planes { bias: None, ..layer.clone().into_planes() }).unwrap();
        let scale = deviation(&expected);
        for path in [Path::Simd, Path::Scalar] {
            for (activations, limit) in [(Activations::Single, 1e-5), (Activations::Half, 0.01)] {
                let options = Options { activations, path };
                let mut y = vec![0.0; expected.len()];
                plain.matmul(&x, rows, &mut y, options);
                let error = largest_difference(&y, &expected) / scale;
                assert!(error <= limit, "{name} {options:?}: {error} deviations");
                if file.dtype(&with_bias).is_some() {
                    let expected = file.floats(&with_bias);
                    layer.matmul(&x, rows, &mut y, options);
                    let error = largest_difference(&y, &expected) / scale;
                    assert!(error <= limit, "{name} with bias, {options:?}: {error} deviations");
                }
            }
        }
        seen.set(seen.get() + 1);
    });
    assert!(seen.get() >= 20, "{} layers have products", seen.get());
}

#[test]
fn unaligned_file_decodes_to_its_dense_form() {
    let (bytes, dense) =
        (fixture("mini-llama/model.safetensors"), fixture("mini-llama-dense-linears.safetensors"));
    let (file, dense) = (File::new(&bytes), File::new(&dense));
    let mut layers = 0;
    for weight in dense.0.names() {
        let name = weight.strip_suffix(".weight").unwrap();
        let layer = read_layer(&file, name).unwrap();
        let expected = dense.floats(weight);
        let w = layer.weight();
        // The dense file has (out, in); the head's padding columns are cut off there.
        let out = expected.len() / layer.k();
        let largest = expected.iter().fold(0.0, |m: f32, w| m.max(w.abs()));
        for (j, row) in expected.chunks_exact(layer.k()).enumerate() {
            for (i, want) in row.iter().enumerate() {
                assert!((w[i * layer.n() + j] - want).abs() <= 6e-4 * largest, "{name} ({i}, {j})");
            }
        }
        assert!(out <= layer.n());
        layers += 1;
    }
    assert_eq!(layers, 15);
}

#[test]
fn embedding_tables_agree_with_the_decoded_rows() {
    let (cases, bytes) = (json("embedding.json"), fixture("embedding.safetensors"));
    let file = File::new(&bytes);
    for (name, case) in cases["cases"].as_object().unwrap() {
        let hidden = case["hidden"].as_u64().unwrap() as usize;
        assert!(is_embedding(&file, name) && !is_layer(&file, name), "{name}");
        let table = Embedding::read(&file, name, hidden).unwrap();
        assert_eq!(table.bits() as u64, case["bits"].as_u64().unwrap(), "{name}");
        assert_eq!(table.rows() as u64, case["vocab"].as_u64().unwrap(), "{name}");
        let expected = file.floats(&format!("{name}.rows"));
        let largest = expected.iter().fold(0.0, |m: f32, w| m.max(w.abs()));
        let mut row = vec![0.0; hidden];
        for (r, expected) in expected.chunks_exact(hidden).enumerate() {
            table.decode_row(r, &mut row);
            assert!(largest_difference(&row, expected) <= 6e-4 * largest, "{name} row {r}");
        }
        assert!(Embedding::read(&file, name, hidden + 256).unwrap_err().to_string().contains("signs"));
    }
}

//! The tiny checkpoint with matrices in EXL3: any words are a valid trellis, so random ones will do.

use half::f16;
use plugfold_kernels::cpu::exl3::{Codebook, Rate, read_layer};

use super::super::{Resolved, inventory};
use super::*;
use crate::config::ModelConfig;

const LAYER: &str = "model.language_model.layers.";

struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 32
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }

    fn halves(&mut self, count: usize) -> Vec<u8> {
        let value = |n: u64| f16::from_f32((n % 201) as f32 / 100.0 - 1.0);
        (0..count).flat_map(|_| value(self.next()).to_le_bytes()).collect()
    }
}

/// Puts random coded tensors in the place of a module's weight.
fn code(tensors: &mut Tensors, module: &str, outputs: usize, inputs: usize, codebook: Codebook, bits: f32) {
    for suffix in ["weight", "mcg", "mul1"] {
        tensors.remove(&format!("{module}.{suffix}"));
    }
    let rate = Rate::from_bits(bits).unwrap();
    let (k, n) = (inputs.next_multiple_of(128), outputs.next_multiple_of(128));
    let mut numbers = Numbers(module.len() as u64);
    let mut put = |suffix: &str, dtype, shape: &[usize], bytes| {
        tensors.insert(format!("{module}.{suffix}"), Tensor::new(dtype, shape, bytes));
    };
    let shape = [k / 16, n / 16, rate.units()];
    put("trellis", Dtype::I16, &shape, numbers.bytes(2 * shape.iter().product::<usize>()));
    put("suh", Dtype::F16, &[k], numbers.halves(k));
    put("svh", Dtype::F16, &[n], numbers.halves(n));
    if let Some((suffix, value)) = codebook.marker() {
        put(suffix, Dtype::I32, &[], value.to_le_bytes().to_vec());
    }
}

fn parse(json: &Value) -> ModelConfig {
    ModelConfig::from_json(&json.to_string()).unwrap()
}

fn exl3_config() -> Value {
    let mut json = config_json();
    json["quantization_config"] = json!({ "quant_method": "exl3", "bits": 4.0, "codebook": "mcg" });
    json
}

/// The modules that converters code, with their shapes.
fn modules() -> Vec<(String, usize, usize)> {
    let coded = |name: &str| {
        name == "lm_head"
            || (name.contains(".layers.")
                && [
                    "q_proj",
                    "k_proj",
                    "v_proj",
                    "o_proj",
                    "q_a_proj",
                    "q_b_proj",
                    "kv_a_proj_with_mqa",
                    "wq_b",
                ]
                .iter()
                .chain(&["gate_proj", "up_proj", "down_proj", "eh_proj"])
                .any(|end| name.ends_with(&format!(".{end}"))))
    };
    inventory(&config())
        .into_iter()
        .filter(|e| e.name.ends_with(".weight") && !e.name.contains("visual"))
        .filter_map(|e| Some((e.name.strip_suffix(".weight")?.to_owned(), e.shape[0], *e.shape.get(1)?)))
        .filter(|(name, ..)| coded(name))
        .collect()
}

/// Every matrix that may be coded, each with another codebook and rate.
fn mixed() -> Tensors {
    let mut tensors = tiny();
    let variants: Vec<(Codebook, f32)> = Codebook::ALL
        .into_iter()
        .flat_map(|c| {
            Rate::all().filter(move |r| r.is_whole() || c == Codebook::Mul1).map(move |r| (c, r.bits()))
        })
        .collect();
    for (i, (module, outputs, inputs)) in modules().into_iter().enumerate() {
        let (codebook, bits) = variants[i % variants.len()];
        code(&mut tensors, &module, outputs, inputs, codebook, bits);
    }
    tensors
}

fn check(tensors: &Tensors, config: &Value) -> Result<Resolved, String> {
    let dir = single(&file(tensors, 3));
    Checkpoint::open(dir.path()).unwrap().check(&parse(config)).map_err(|e| e.to_string())
}

#[test]
fn every_variant_is_found_by_its_published_name() {
    let tensors = mixed();
    let resolved = check(&tensors, &exl3_config()).unwrap();
    assert!(resolved.unused.is_empty() && resolved.warnings.is_empty(), "{:?}", resolved.warnings);
    for (module, outputs, inputs) in modules() {
        let name = format!("{module}.weight");
        let tensor = resolved.exl3(&name).unwrap().unwrap();
        assert_eq!((tensor.row, resolved.shape(&name).unwrap()), (0, &[outputs, inputs][..]));
        assert!(resolved.bytes(&name).unwrap() > 0);
    }
    let plain = format!("{LAYER}0.self_attn.f_a_proj.weight");
    assert!(resolved.exl3(&plain).unwrap().is_none());
}

/// A reader that wants numbers gets the decoded weight, cut and transposed to `[out, in]`.
#[test]
fn numbers_are_the_decoded_weight() {
    let tensors = mixed();
    let resolved = check(&tensors, &exl3_config()).unwrap();
    let module = format!("{LAYER}3.mlp.experts.5.down_proj");
    let layer = read_layer(resolved.checkpoint(), &module).unwrap();
    let w = layer.weight();
    let (rows, cols) = (100..128, 7..64);
    let got = resolved.rows_f32(&format!("{module}.weight"), rows.clone(), cols.clone()).unwrap();
    let want: Vec<f32> =
        rows.flat_map(|r| cols.clone().map(move |c| (c, r))).map(|(c, r)| w[c * layer.n() + r]).collect();
    assert_eq!(got, want);
}

#[test]
fn fused_projections_other_names_and_packed_signs() {
    let mut tensors = tiny();
    let at = format!("{LAYER}0.self_attn");
    for part in ["q", "k", "v"] {
        tensors.remove(&format!("{at}.{part}_proj.weight"));
    }
    code(&mut tensors, &format!("{at}.qkv_proj"), 384, 128, Codebook::Mcg, 4.0);
    let convolutions: Vec<u8> = ["q", "k", "v"]
        .iter()
        .flat_map(|part| tensors.remove(&format!("{at}.{part}_conv1d.weight")).unwrap().bytes)
        .collect();
    let taps = convolutions.len() / 2 / 384;
    tensors.insert(format!("{at}.conv1d.weight"), Tensor::new(Dtype::BF16, &[384, 1, taps], convolutions));
    for (published, other) in [("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")] {
        let mlp = format!("{LAYER}2.mlp.experts.7");
        let weight = tensors.remove(&format!("{mlp}.{published}.weight")).unwrap();
        code(&mut tensors, &format!("{mlp}.{other}"), weight.shape[0], weight.shape[1], Codebook::Mul1, 2.5);
    }
    code(&mut tensors, "lm_head", 512, 128, Codebook::ThreeInst, 6.0);
    tensors.remove("lm_head.suh");
    tensors.remove("lm_head.svh");
    tensors.insert("lm_head.su".into(), Tensor::new(Dtype::I16, &[8], Numbers(1).bytes(16)));
    tensors.insert("lm_head.sv".into(), Tensor::new(Dtype::I16, &[32], Numbers(2).bytes(64)));
    // Plain tensors in the type that the converter's loader works in.
    let norm = "model.language_model.norm.weight";
    tensors.insert(norm.into(), Tensor::new(Dtype::F16, &[128], f16::ONE.to_le_bytes().repeat(128)));

    let resolved = check(&tensors, &exl3_config()).unwrap();
    assert!(resolved.unused.is_empty() && resolved.warnings.is_empty(), "{:?}", resolved.warnings);
    for (part, row) in [("q", 0), ("k", 128), ("v", 256)] {
        let tensor = resolved.exl3(&format!("{at}.{part}_proj.weight")).unwrap().unwrap();
        assert_eq!((tensor.row, &*tensor.module), (row, &*format!("{at}.qkv_proj")));
    }
    let gate = resolved.exl3(&format!("{LAYER}2.mlp.experts.7.gate_proj.weight")).unwrap().unwrap();
    assert_eq!(gate.module.rsplit('.').next(), Some("w1"));
    let head = resolved.exl3("lm_head.weight").unwrap().unwrap().layer.layer(0..128, 0..512).unwrap();
    assert!(head.svh().iter().all(|s| s.to_f32().abs() == 1.0));
    assert_eq!(resolved.f32(norm).unwrap(), vec![1.0; 128]);

    // In 16 bits some parameters lose accuracy: that is the file's, and it is told.
    let bias = format!("{at}.dt_bias");
    tensors.insert(bias.clone(), Tensor::new(Dtype::F16, &[128], f16::ONE.to_le_bytes().repeat(128)));
    let resolved = check(&tensors, &exl3_config()).unwrap();
    assert!(
        resolved.warnings[0].contains(&format!("stored in 16, such as {bias}")),
        "{:?}",
        resolved.warnings
    );
}

#[test]
fn a_head_of_its_own_is_used_although_the_flag_says_tied() {
    let mut json = exl3_config();
    json["tie_word_embeddings"] = json!(true);
    let mut tensors = tiny();
    code(&mut tensors, "lm_head", 512, 128, Codebook::Mcg, 6.0);
    let resolved = check(&tensors, &json).unwrap();
    assert!(resolved.exl3("lm_head.weight").unwrap().is_some() && resolved.unused.is_empty());
    // Without one, the head is the embedding.
    tensors.retain(|name, _| !name.starts_with("lm_head"));
    let resolved = check(&tensors, &json).unwrap();
    assert_eq!(resolved.dtype("lm_head.weight").unwrap(), Dtype::BF16);
}

#[test]
fn files_that_lie_are_refused_by_the_name_of_the_tensor() {
    let (up, head) = (format!("{LAYER}4.mlp.experts.9.up_proj"), "lm_head".to_owned());
    let refused = |change: &dyn Fn(&mut Tensors), words: &[&str]| {
        let mut tensors = mixed();
        // Of known form: 64 outputs from 128 inputs, coded as 128 x 128, and the head.
        code(&mut tensors, &up, 64, 128, Codebook::Mcg, 4.0);
        code(&mut tensors, &head, 512, 128, Codebook::Mul1, 6.0);
        change(&mut tensors);
        let text = check(&tensors, &exl3_config()).err().unwrap_or_else(|| panic!("{words:?} was let in"));
        assert!(words.iter().all(|w| text.contains(w)), "{words:?}: {text}");
    };
    let halves = |count: usize| Tensor::new(Dtype::F16, &[count], vec![0; 2 * count]);
    let marker = |value: u32| Tensor::new(Dtype::I32, &[], value.to_le_bytes().to_vec());
    let trellis =
        |shape: &[usize]| Tensor::new(Dtype::I16, shape, vec![0; 2 * shape.iter().product::<usize>()]);
    let up_trellis = format!("{up}.trellis");

    // Bits.
    refused(&|t| drop(t.insert(up_trellis.clone(), trellis(&[8, 8, 65]))), &[&up_trellis, "16 * bits"]);
    refused(&|t| drop(t.insert(up_trellis.clone(), trellis(&[8, 8, 144]))), &[&up_trellis, "16 * bits"]);
    refused(&|t| drop(t.insert(up_trellis.clone(), trellis(&[8, 8, 40]))), &[&up_trellis, "mul1 only"]);
    // Shapes.
    refused(&|t| drop(t.insert(up_trellis.clone(), trellis(&[8, 64]))), &[&up_trellis, "three dimensions"]);
    refused(
        &|t| drop(t.insert(up_trellis.clone(), trellis(&[8, 9, 64]))),
        &[&up_trellis, "multiples of 128"],
    );
    refused(&|t| drop(t.insert(format!("{up}.suh"), halves(256))), &[&up, "suh", "[128]"]);
    refused(&|t| drop(t.insert(format!("{up}.svh"), halves(64))), &[&up, "svh", "[128]"]);
    refused(
        &|t| code(t, &up, 64, 256, Codebook::Mcg, 4.0),
        &[&up_trellis, "codes 256 inputs and 128 outputs; the configuration says [64, 128]"],
    );
    refused(&|t| code(t, &head, 640, 128, Codebook::Mul1, 6.0), &["lm_head.trellis", "640 outputs"]);
    refused(
        &|t| drop(t.insert(up_trellis.clone(), Tensor::new(Dtype::BF16, &[8, 8, 64], vec![0; 8192]))),
        &[&up_trellis, "dtype"],
    );
    // Codebooks.
    refused(&|t| drop(t.insert(format!("{up}.mcg"), marker(1))), &[&up, "mcg", "0x00000001"]);
    refused(&|t| drop(t.insert(format!("{up}.mul1"), marker(0x83DC_D12D))), &[&up, "one codebook"]);
    // What is missing, and what is there twice.
    refused(&|t| drop(t.remove(&format!("{up}.svh"))), &[&up, "has no tensor", "svh or sv"]);
    refused(
        &|t| drop(t.insert("lm_head.weight".into(), tiny()["lm_head.weight"].clone())),
        &["lm_head.weight", "lm_head.trellis", "stored twice"],
    );
}

/// The digest may be stale; who reads the log hears it.
#[test]
fn a_digest_that_says_other_bits_is_told_and_not_followed() {
    let mut tensors = tiny();
    let module = format!("{LAYER}4.mlp.experts.9.up_proj");
    code(&mut tensors, &module, 64, 128, Codebook::Mcg, 4.0);
    let dir = single(&file(&tensors, 3));
    let check = |text: &str| {
        std::fs::write(dir.path().join("quantization_config.json"), text).unwrap();
        Checkpoint::open(dir.path()).unwrap().check(&parse(&exl3_config())).unwrap().warnings
    };
    let said = |bits: f32| {
        let mut storage = serde_json::Map::new();
        storage.insert(module.clone(), json!({"bits_per_weight": bits}));
        json!({"quant_method": "exl3", "tensor_storage": storage}).to_string()
    };
    assert_eq!(check(&said(4.0)), Vec::<String>::new());
    assert!(check(&said(3.5))[0].contains(&format!("such as {module} (3.5, its trellis has 4)")));
    assert!(check("{")[0].contains("quantization_config.json is not read"));
}

#[test]
fn scales_that_are_no_numbers_are_refused_when_they_are_read() {
    let mut tensors = mixed();
    let module = format!("{LAYER}4.mlp.experts.9.up_proj");
    code(&mut tensors, &module, 64, 128, Codebook::Mcg, 4.0);
    let scales = tensors.get_mut(&format!("{module}.svh")).unwrap();
    scales.bytes[20..22].copy_from_slice(&f16::NAN.to_le_bytes());
    let resolved = check(&tensors, &exl3_config()).unwrap();
    let read = |resolved: &Resolved| {
        let tensor = resolved.exl3(&format!("{module}.weight")).unwrap().unwrap();
        tensor.layer.read_svh(&(0..128), tensor.allow_nan, &mut [f16::ZERO; 128]).map_err(|e| e.to_string())
    };
    let error = read(&resolved).unwrap_err();
    assert!(error.contains(&format!("{module}.svh")) && error.contains("channel 10"), "{error}");
    assert!(resolved.f32(&format!("{module}.weight")).is_err());
    read(&resolved.with_allow_nan(true)).unwrap();
}

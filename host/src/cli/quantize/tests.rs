use std::collections::BTreeMap;
use std::fs;

use clap::Parser;
use plugfold_kernels::cpu::exl3::{RawTensor, Tensors, is_layer, read_layer};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::*;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    quantize: Quantize,
}

fn run(source: &Path, out: &Path, more: &[&str]) -> anyhow::Result<()> {
    let (source, out) = (source.to_str().unwrap(), out.to_str().unwrap());
    let line =
        ["quantize", "--model", source, "--out", out, "--bits", "2", "--head-bits", "3", "--codebook", "mcg"];
    Line::try_parse_from(line.iter().chain(more))?.quantize.run()
}

/// A checkpoint of a few matrices.
fn source(dir: &Path) {
    let values = |count: usize| -> Vec<u8> {
        (0..count)
            .flat_map(|i| bf16::from_f32(((i * 7919 + 5) % 997) as f32 / 500.0 - 1.0).to_le_bytes())
            .collect()
    };
    let layer = "model.language_model.layers.0";
    let tensors: Vec<(String, Vec<usize>, Vec<u8>)> = [
        ("lm_head.weight".to_owned(), vec![130, 128]),
        ("model.language_model.norm.weight".to_owned(), vec![128]),
        (format!("{layer}.self_attn.o_proj.weight"), vec![128, 64]),
        (format!("{layer}.self_attn.o_proj.bias"), vec![128]),
        (format!("{layer}.mlp.gate.weight"), vec![4, 128]),
        (format!("{layer}.mlp.experts.0.up_proj.weight"), vec![64, 128]),
    ]
    .into_iter()
    .map(|(name, shape)| {
        let count = shape.iter().product();
        (name, shape, values(count))
    })
    .collect();
    let views = tensors
        .iter()
        .map(|(name, shape, data)| (name, TensorView::new(Dtype::BF16, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
    fs::write(dir.join("config.json"), r#"{"model_type": "glm5_next", "quantization_config": {"x": 1}}"#)
        .unwrap();
    fs::write(dir.join("tokenizer.json"), "{}").unwrap();
}

fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap())
        .map(|e| (e.file_name().to_string_lossy().into_owned(), fs::read(e.path()).unwrap()))
        .collect()
}

struct File<'a>(SafeTensors<'a>);

impl Tensors for File<'_> {
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        use plugfold_kernels::cpu::exl3::Dtype as Stored;
        let view = self.0.tensor(name).ok()?;
        let dtype = match view.dtype() {
            Dtype::I16 => Stored::I16,
            Dtype::I32 => Stored::I32,
            Dtype::F16 => Stored::F16,
            _ => Stored::Other,
        };
        Some(RawTensor { dtype, shape: view.shape().to_vec(), data: view.data() })
    }
}

#[test]
fn checkpoint_is_written_whole_and_resumed_to_the_same_bytes() {
    let (from, first, second) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    source(from.path());
    run(from.path(), first.path(), &[]).unwrap();
    let written = contents(first.path());
    let names: Vec<&str> = written.keys().map(String::as_str).collect();
    assert_eq!(
        names,
        [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "quantization_config.json",
            "tokenizer.json",
        ]
    );
    let config: serde_json::Value = serde_json::from_slice(&written["config.json"]).unwrap();
    assert_eq!(config["quantization_config"]["quant_method"], "exl3");
    assert_eq!(config["quantization_config"]["original_quantization_config"]["x"], 1);
    let details: serde_json::Value = serde_json::from_slice(&written["quantization_config.json"]).unwrap();
    let head = &details["tensor_storage"]["lm_head"];
    assert_eq!((&head["bits_per_weight"], &head["mcg_multiplier"]), (&3.into(), &0xCBAC_1FED_u32.into()));
    assert_eq!(head["stored_tensors"]["lm_head.trellis"]["shape"], serde_json::json!([8, 16, 48]));

    let layer = File(SafeTensors::deserialize(&written["model-00002-of-00002.safetensors"]).unwrap());
    let o_proj = read_layer(&layer, "model.language_model.layers.0.self_attn.o_proj").unwrap();
    assert_eq!((o_proj.k(), o_proj.n(), o_proj.rate().bits()), (128, 128, 2.0));
    assert!(o_proj.bias().is_some());
    assert!(is_layer(&layer, "model.language_model.layers.0.mlp.experts.0.up_proj"));
    assert!(layer.tensor("model.language_model.layers.0.mlp.gate.weight").is_some());
    assert!(layer.tensor("model.language_model.layers.0.self_attn.o_proj.weight").is_none());

    // A run that was killed after one matrix and in the middle of another's file.
    let checkpoint = Checkpoint::open(from.path()).unwrap();
    let args = ["--bits", "2", "--head-bits", "3", "--codebook", "mcg"];
    let line = ["quantize", "--model", "m", "--out", "o"].iter().chain(&args);
    let quantize = Line::try_parse_from(line).unwrap().quantize;
    let output = Output::open(second.path(), from.path(), &quantize.options(&checkpoint)).unwrap();
    let plan = Plan::new(&checkpoint, &quantize.rates, quantize.codebook).unwrap();
    quantize.layer(&checkpoint, &output, &plan.files()[1].linears[0], &ProgressBar::hidden()).unwrap();
    fs::write(second.path().join(".model-00001-of-00002.safetensors.77"), "half a file").unwrap();
    assert!(
        run(from.path(), second.path(), &["--seed", "3"]).unwrap_err().to_string().contains("other options")
    );
    run(from.path(), second.path(), &[]).unwrap();
    let mut resumed = contents(second.path());
    resumed.remove(".model-00001-of-00002.safetensors.77");
    assert!(resumed == written);

    let again = run(from.path(), second.path(), &[]).unwrap_err().to_string();
    assert!(again.contains("holds a checkpoint already"), "{again}");
    let nested = tempfile::tempdir().unwrap();
    assert!(run(first.path(), nested.path(), &[]).unwrap_err().to_string().contains("quantized already"));
    assert!(
        run(from.path(), nested.path(), &["--expert-bits", "2.5"]).unwrap_err().to_string().contains("mul1")
    );
}

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
    let output = Output::open(second.path(), from.path(), &quantize.options(&checkpoint, None)).unwrap();
    let plan = Plan::new(&checkpoint, &quantize.rates, quantize.codebook).unwrap();
    quantize
        .layer(
            &checkpoint,
            &output,
            &plan.files()[1].linears[0],
            None,
            &Encoders::new(),
            &ProgressBar::hidden(),
        )
        .unwrap();
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

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo-model");

/// Four layers of the demo model's shape with random weights, its draft head and its tokenizer.
fn model() -> tempfile::TempDir {
    use crate::cli::make_synthetic::MakeSynthetic;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        make: MakeSynthetic,
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().to_str().unwrap();
    let line = ["make", "--like", DEMO, "--layers", "4", "--bits", "16", "--head-bits", "16", "--out", out];
    Line::try_parse_from(line).unwrap().make.run().unwrap();
    dir
}

fn text(tokens: &str) -> Calibration {
    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        calibration: Calibration,
    }
    let path = format!("{DEMO}/chat_template.jinja");
    let line = ["line", "--calibration", &path, "--calibration-tokens", tokens];
    Line::try_parse_from(line).unwrap().calibration
}

/// Every matrix finds the rows that it multiplies, whoever else reads them, and nothing else.
#[test]
fn a_text_leaves_the_rows_of_every_matrix() {
    let (model, kept) = (model(), tempfile::tempdir().unwrap());
    let source = Checkpoint::open(model.path()).unwrap();
    let line = ["quantize", "--model", "m", "--out", "o"];
    let quantize = Line::try_parse_from(line).unwrap().quantize;
    let plan = Plan::new(&source, &quantize.rates, quantize.codebook).unwrap();
    let linears: Vec<&Linear> = plan.files().iter().flat_map(|f| &f.linears).collect();
    // Not a whole number of chunks.
    let ids = text("300").ids(model.path()).unwrap().unwrap();
    let rows = Rows::gather(&kept.path().join("rows"), model.path(), &ids, &linears).unwrap();
    assert_eq!(rows.size(), (1, 300));
    let read = |name: &str| -> Vec<f32> {
        let linear = linears.iter().find(|l| l.name == name).unwrap();
        let file = rows.file(linear).unwrap_or_else(|| panic!("{name} has no rows"));
        let path = kept.path().join("rows").join(format!("{file}.f32"));
        let bytes = fs::read(path).unwrap_or_default();
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    for linear in &linears {
        let rows = read(&linear.name);
        let seen = rows.len() / linear.inputs;
        assert_eq!(rows.len(), seen * linear.inputs, "{}", linear.name);
        let draft = linear.name.contains("layers.4.");
        // Rows choose among the experts, and the indexer is asked only where there is more than it keeps.
        let some = linear.name.ends_with("indexer.wq_b")
            || linear.name.contains(".experts.") && linear.name.ends_with("down_proj");
        if some {
            assert!(seen < 300, "{}", linear.name);
        } else {
            assert_eq!(seen, if draft { 299 } else { 300 }, "{}", linear.name);
        }
    }
    let layer = "model.language_model.layers";
    assert!(read(&format!("{layer}.0.self_attn.q_proj")) == read(&format!("{layer}.0.self_attn.v_proj")));
    // The experts of a layer share its pairs of rows among them.
    for (at, tokens) in [(3, 300), (4, 299)] {
        let pairs: usize =
            (0..16).map(|e| read(&format!("{layer}.{at}.mlp.experts.{e}.down_proj")).len() / 128).sum();
        assert_eq!(pairs, 4 * tokens, "layer {at}");
    }
    // The rows of an expert's second matrix are what its first two make of rows that all experts read.
    let values = |name: String| floats(&source, &format!("{name}.weight")).unwrap();
    let expert = format!("{layer}.3.mlp.experts.5");
    let (gate, up) = (values(format!("{expert}.gate_proj")), values(format!("{expert}.up_proj")));
    let inputs = read(&format!("{expert}.up_proj"));
    let dot = |w: &[f32], x: &[f32]| w.iter().zip(x).map(|(w, x)| w * x).sum::<f32>();
    let made: Vec<Vec<f32>> = inputs
        .chunks_exact(256)
        .map(|x| {
            gate.chunks_exact(256)
                .zip(up.chunks_exact(256))
                .map(|(g, u)| {
                    let g = dot(g, x);
                    g / (1.0 + (-g).exp()) * dot(u, x)
                })
                .collect()
        })
        .collect();
    let routed = read(&format!("{expert}.down_proj"));
    assert!(!routed.is_empty());
    for row in routed.chunks_exact(128) {
        let near = |m: &Vec<f32>| m.iter().zip(row).all(|(a, b)| (a - b).abs() <= 1e-3 * (1.0 + b.abs()));
        assert!(made.iter().any(near), "a row that the expert did not make");
    }
    // What is there is not computed again; what is not whole is.
    let marker = kept.path().join("rows/whole.json");
    let before = read("lm_head");
    fs::remove_file(&marker).unwrap();
    let again = Rows::gather(&kept.path().join("rows"), model.path(), &ids, &linears).unwrap();
    assert!(again.size() == rows.size() && read("lm_head") == before && marker.exists());
}

#[test]
fn a_calibrated_run_is_resumed_to_the_same_bytes_and_serves_its_text_better() {
    let model = model();
    let path = format!("{DEMO}/chat_template.jinja");
    let start = |out: &Path, more: &[&str]| {
        let (model, out) = (model.path().to_str().unwrap(), out.to_str().unwrap());
        // The draft head's input projection alone.
        let line = ["quantize", "--model", model, "--out", out, "--bits", "16", "--head-bits", "16"];
        let rates = ["--draft-bits", "3", "--threads", "2"];
        Line::try_parse_from(line.iter().chain(&rates).chain(more))?.quantize.run()
    };
    let text = ["--calibration", &path, "--calibration-tokens", "700"];
    let (plain, first, second) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    start(plain.path(), &[]).unwrap();
    start(first.path(), &text).unwrap();
    let described = |dir: &Path| -> serde_json::Value {
        serde_json::from_slice(&fs::read(dir.join("quantization_config.json")).unwrap()).unwrap()
    };
    assert_eq!(described(plain.path())["calibration"]["rows"], 0);
    assert_eq!(described(first.path())["calibration"], serde_json::json!({"rows": 1, "cols": 700}));
    assert!(!first.path().join(".quantize").exists());

    // On the text's own rows the outputs are nearer to the source's, by far more than chance.
    let source = Checkpoint::open(model.path()).unwrap();
    let name = "model.language_model.layers.4.eh_proj";
    let want = floats(&source, &format!("{name}.weight")).unwrap();
    let kept = tempfile::tempdir().unwrap();
    let line = ["quantize", "--model", "m", "--out", "o"];
    let quantize = Line::try_parse_from(line).unwrap().quantize;
    let plan = Plan::new(&source, &quantize.rates, quantize.codebook).unwrap();
    let linears: Vec<&Linear> = plan.files().iter().flat_map(|f| &f.linears).collect();
    let ids = self::text("700").ids(model.path()).unwrap().unwrap();
    Rows::gather(&kept.path().join("rows"), model.path(), &ids, &linears).unwrap();
    let bytes = fs::read(kept.path().join(format!("rows/{name}.f32"))).unwrap();
    let rows: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let error = |dir: &Path| -> f64 {
        let layer = read_layer(&Checkpoint::open(dir).unwrap(), name).unwrap();
        let (w, n) = (layer.weight(), layer.n());
        let mut sum = 0.0;
        for x in rows.chunks_exact(512) {
            for (o, want) in want.chunks_exact(512).enumerate() {
                let off: f32 = x.iter().zip(want).enumerate().map(|(i, (x, v))| x * (w[i * n + o] - v)).sum();
                sum += f64::from(off).powi(2);
            }
        }
        sum
    };
    let (before, after) = (error(plain.path()), error(first.path()));
    assert!(after < 0.8 * before, "{after} of {before}");

    // A run that was killed while it wrote rows; another text is another run.
    let rows = second.path().join(".quantize/rows");
    fs::create_dir_all(&rows).unwrap();
    fs::write(rows.join(format!("{name}.f32")), "half").unwrap();
    start(second.path(), &text).unwrap();
    assert!(contents(second.path()) == contents(first.path()));
    let third = tempfile::tempdir().unwrap();
    let options = start(third.path(), &["--calibration", &path, "--calibration-tokens", "1"]);
    assert!(options.unwrap_err().to_string().contains("--calibration-tokens"));
    let missing = start(third.path(), &["--calibration", "nowhere.txt"]).unwrap_err().to_string();
    assert!(missing.contains("nowhere.txt"), "{missing}");
    fs::write(third.path().join("short.txt"), "a").unwrap();
    let short = third.path().join("short.txt");
    let told = start(third.path(), &["--calibration", short.to_str().unwrap()]).unwrap_err().to_string();
    assert!(told.contains("at least 2"), "{told}");
}

use clap::Parser;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;

use super::*;

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo-model");
const PUBLISHED: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../core/engine/src/config/testdata/published.json");

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    make: MakeSynthetic,
}

fn parse(like: &str, out: &Path, layers: &str, more: &[&str]) -> MakeSynthetic {
    let line = ["make", "--like", like, "--out", out.to_str().unwrap(), "--layers", layers];
    Line::try_parse_from(line.iter().chain(more)).unwrap().make
}

fn bytes(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    checkpoint.names().map(|n| (n.to_owned(), checkpoint.tensor(n).unwrap().bytes.to_vec())).collect()
}

/// Logits of a short prompt, which must be numbers of a sane size.
fn logits(dir: &Path) -> Vec<f32> {
    let options = Options { context: Some(64), ..Options::new(dir) };
    let mut rank = Rank::load(&options, CoreOptions::default(), World::single()).unwrap();
    rank.trace(&[5, 6, 7, 8], false).unwrap().logits
}

#[test]
fn a_random_checkpoint_is_served_and_the_same_for_the_same_options() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let more = ["--bits", "2", "--codebook", "mul1", "--attention-bits", "16"];
    parse(DEMO, dirs[0].path(), "5", &more).run().unwrap();
    parse(DEMO, dirs[1].path(), "5", &[&more[..], &["--file-size", "0.001"]].concat()).run().unwrap();
    parse(DEMO, dirs[2].path(), "5", &[&more[..], &["--seed", "1"]].concat()).run().unwrap();
    let first = bytes(dirs[0].path());
    assert!(first == bytes(dirs[1].path()) && first != bytes(dirs[2].path()));
    assert!(dirs[0].path().join("tokenizer.json").exists());
    let names: Vec<&str> = first.iter().map(|(name, _)| name.as_str()).collect();
    assert!(names.contains(&"model.language_model.layers.4.mlp.experts.15.up_proj.trellis"));
    assert!(names.contains(&"model.language_model.layers.0.self_attn.q_proj.weight"));
    assert!(names.iter().any(|n| n.contains("layers.5.eh_proj")), "the draft head follows the layers");
    assert!(!names.iter().any(|n| n.contains("layers.6.") || n.contains("visual")));

    let logits = logits(dirs[0].path());
    let size = (logits.iter().map(|v| v * v).sum::<f32>() / logits.len() as f32).sqrt();
    assert!((0.05..20.0).contains(&size), "logits of size {size}");

    let again = parse(DEMO, dirs[0].path(), "5", &more).run().unwrap_err().to_string();
    assert!(again.contains("holds a checkpoint already"), "{again}");
    let many = tempfile::tempdir().unwrap();
    let many = format!("{:#}", parse(DEMO, many.path(), "9", &more).run().unwrap_err());
    assert!(many.contains("give 1 to 8"), "{many}");
    let other = tempfile::tempdir().unwrap();
    let like = other.path().join("config.json");
    std::fs::write(&like, r#"{"model_type": "x"}"#).unwrap();
    let none = parse(like.to_str().unwrap(), &other.path().join("out"), "1", &more).run().unwrap_err();
    assert!(format!("{none:#}").contains("num_hidden_layers is missing"), "{none:#}");
}

/// The published model: sizes only, nothing is written.
#[test]
fn a_layer_of_the_published_width() {
    let make = parse(PUBLISHED, Path::new("unused"), "4", &["--no-draft-head"]);
    let mut json: Value = serde_json::from_slice(&std::fs::read(PUBLISHED).unwrap()).unwrap();
    make.model.shape(&mut json).unwrap();
    let config = ModelConfig::from_json(&json.to_string()).unwrap();
    assert_eq!((config.layers.len(), config.mtp_layers), (4, 0));
    let tensors = make.model.tensors(&config).unwrap();
    let of = |name: &str| tensors.iter().find(|t| t.entry.name.ends_with(name)).unwrap();
    assert_eq!(of("layers.3.mlp.experts.287.down_proj.trellis").entry.shape, [128, 256, 64]);
    assert_eq!(of("lm_head.trellis").entry.shape, [256, 9680, 96]);
    // Four bits of 288 experts of three matrices 2048 x 4096.
    let experts: u64 = tensors
        .iter()
        .filter(|t| t.entry.name.contains(".experts.") && t.entry.name.ends_with("trellis"))
        .map(|t| t.entry.bytes())
        .sum();
    assert_eq!(experts, 288 * 3 * 2048 * 4096 / 2);
    assert_eq!(of("layers.0.self_attn.A_log").entry.dtype, Dtype::F32);
}

#[test]
fn numbers_do_not_depend_on_chunks() {
    for (fill, dtype) in
        [(Fill::Words, Dtype::I16), (Fill::Spread(0.5), Dtype::BF16), (Fill::Scales(0.1), Dtype::F16)]
    {
        let whole = numbers(dtype, fill, 7, 0, 1000);
        let parts = [numbers(dtype, fill, 7, 0, 400), numbers(dtype, fill, 7, 400, 600)].concat();
        assert!(whole == parts, "{fill:?}");
    }
    let spread = numbers(Dtype::F32, Fill::Spread(0.5), 1, 0, 10_000);
    let values = spread.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
    let deviation = (values.map(|v| v * v).sum::<f32>() / 10_000.0).sqrt();
    assert!((deviation - 0.5).abs() < 0.01, "{deviation}");
}

use clap::Parser;
use plugfold_kernels::cpu::exl3::{Codebook, read_layer};

use super::*;
use crate::cli::make_synthetic::MakeSynthetic;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/tiny");

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    convert: Convert,
}

#[derive(Parser)]
struct Synthetic {
    #[command(flatten)]
    make: MakeSynthetic,
}

fn convert(from: &Path, to: &Path, naming: &str, more: &[&str]) -> anyhow::Result<()> {
    let (from, to) = (from.to_str().unwrap(), to.to_str().unwrap());
    let line = ["convert", "--model", from, "--out", to, "--to", naming];
    Line::try_parse_from(line.iter().chain(more))?.convert.run()
}

/// Every tensor with its bytes.
fn contents(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let all = checkpoint.names().map(|name| {
        let data = checkpoint.tensor(name).unwrap();
        (name.to_owned(), (data.dtype.to_string(), data.shape.to_vec(), data.bytes.to_vec()))
    });
    all.collect()
}

#[test]
fn there_and_back_again_is_the_same_checkpoint() {
    let tiny = Path::new(TINY);
    let (stacked, back) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    convert(tiny, stacked.path(), "transformers", &["--file-size", "0.002"]).unwrap();
    let names = contents(stacked.path());
    let layer = "model.language_model.layers.2";
    assert_eq!(names[&format!("{layer}.mlp.experts.gate_up_proj")].1, [16, 128, 128]);
    assert!(names.contains_key("model.language_model.layers.0.self_attn.conv1d.weight"));
    assert!(names.contains_key(&format!("{layer}.attn_hc.fn")));
    assert!(!names.keys().any(|name| name.contains("experts.0.")));
    let files = std::fs::read_dir(stacked.path()).unwrap().flatten();
    assert!(files.filter(|f| f.path().extension().is_some_and(|e| e == "safetensors")).count() > 3);

    convert(stacked.path(), back.path(), "published", &[]).unwrap();
    assert!(contents(back.path()) == contents(tiny));
    let again = convert(stacked.path(), back.path(), "published", &[]).unwrap_err().to_string();
    assert!(again.contains("holds a checkpoint already"), "{again}");
}

/// A coded checkpoint, fused and cut again: parts of one layer are cut out of its words, layers whose input scales
/// differ stay apart.
#[test]
fn coded_layers_are_cut_and_fused_without_decoding() {
    let (apart, fused, back) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let out = apart.path().to_str().unwrap();
    let line = [
        "make",
        "--like",
        TINY,
        "--layers",
        "4",
        "--bits",
        "3",
        "--codebook",
        "mul1",
        "--shared-scales",
        "--out",
        out,
    ];
    Synthetic::try_parse_from(line).unwrap().make.run().unwrap();
    convert(apart.path(), fused.path(), "exl3", &[]).unwrap();
    let (before, after) = (contents(apart.path()), contents(fused.path()));
    let attention = "model.language_model.layers.0.self_attn";
    assert!(!after.contains_key(&format!("{attention}.q_proj.trellis")));
    let whole =
        read_layer(&Checkpoint::open(fused.path()).unwrap(), &format!("{attention}.qkv_proj")).unwrap();
    assert_eq!((whole.k(), whole.n(), whole.codebook()), (128, 384, Codebook::Mul1));
    for (part, name) in ["q", "k", "v"].iter().enumerate() {
        let part = whole.slice("part", 0..128, part * 128..(part + 1) * 128).unwrap();
        let stored = Checkpoint::open(apart.path()).unwrap();
        assert!(part == read_layer(&stored, &format!("{attention}.{name}_proj")).unwrap());
    }
    let described = read_json(&fused.path().join("quantization_config.json")).unwrap();
    let entry = &described["tensor_storage"][format!("{attention}.qkv_proj")];
    assert_eq!((&entry["bits_per_weight"], &entry["mul1_multiplier"]), (&json!(3), &json!(0x83DC_D12D_u32)));

    convert(fused.path(), back.path(), "published", &[]).unwrap();
    assert!(contents(back.path()) == before);

    // Other scales for the inputs of k: the three cannot be one layer.
    let (other, kept) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let out = other.path().to_str().unwrap();
    let line = ["make", "--like", TINY, "--layers", "4", "--bits", "3", "--out", out];
    Synthetic::try_parse_from(line).unwrap().make.run().unwrap();
    convert(other.path(), kept.path(), "exl3", &[]).unwrap();
    assert!(contents(kept.path()).contains_key(&format!("{attention}.k_proj.trellis")));
    assert!(contents(kept.path()).contains_key(&format!("{attention}.conv1d.weight")));
}

#[test]
fn what_was_altered_on_the_way_is_found() {
    let tiny = Path::new(TINY);
    let out = tempfile::tempdir().unwrap();
    convert(tiny, out.path(), "transformers", &[]).unwrap();
    let config = ModelConfig::from_dir(tiny).unwrap();
    let source = Checkpoint::open(tiny).unwrap();
    let resolved = source.check(&config).unwrap();
    let layout = resolved.layout(&config, Naming::Transformers).unwrap();
    let mut hashes: Vec<[u8; 32]> =
        layout.targets.iter().map(|t| Sha256::digest(t.pieces.concat()).into()).collect();
    verify(out.path(), &config, &layout.targets, &hashes, 1).unwrap();
    hashes[7][0] ^= 1;
    let error = verify(out.path(), &config, &layout.targets, &hashes, 1).unwrap_err().to_string();
    assert!(error.contains(&layout.targets[7].name), "{error}");
}

/// The tiny checkpoint with every matrix that may be so in blocks of 8 bits, of `rows` x 40 numbers with one scale.
fn eight_bits(rows: usize) -> tempfile::TempDir {
    use plugfold_engine::checkpoint::inventory;
    use safetensors::Dtype;
    use safetensors::tensor::TensorView;

    let dir = tempfile::tempdir().unwrap();
    let mut config = read_json(&Path::new(TINY).join("config.json")).unwrap();
    config["quantization_config"] =
        json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, 40]});
    shards::write_json(&dir.path().join("config.json"), &config).unwrap();
    let config = ModelConfig::from_dir(dir.path()).unwrap();
    let source = Checkpoint::open(Path::new(TINY)).unwrap();
    let mut tensors: BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)> = BTreeMap::new();
    for name in source.names() {
        let data = source.tensor(name).unwrap();
        tensors.insert(name.into(), (data.dtype, data.shape.to_vec(), data.bytes.to_vec()));
    }
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    for tensor in inventory(&config).iter().filter(|t| t.dtypes.contains(&Dtype::F8_E4M3)) {
        let [height, width] = tensor.shape[..] else { panic!("{}", tensor.name) };
        // Without the lowest bit of the exponent no code is one of the two that are no numbers.
        let codes = (0..height * width).map(|_| (next() as u8) & 0xf7).collect();
        tensors.insert(tensor.name.clone(), (Dtype::F8_E4M3, tensor.shape.clone(), codes));
        let blocks = vec![height.div_ceil(rows), width.div_ceil(40)];
        let scales = (0..blocks[0] * blocks[1]).flat_map(|_| (next() as f32 / 3e7).to_le_bytes()).collect();
        tensors.insert(format!("{}_scale_inv", tensor.name), (Dtype::F32, blocks, scales));
    }
    let views = tensors.iter().map(|(n, (d, s, b))| (n, TensorView::new(*d, s.clone(), b).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.path().join("model.safetensors")).unwrap();
    dir
}

#[test]
fn blocks_of_8_bits_are_stacked_with_their_scales_and_cut_again() {
    let source = eight_bits(32);
    let (stacked, back) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    convert(source.path(), stacked.path(), "transformers", &[]).unwrap();
    let names = contents(stacked.path());
    let experts = "model.language_model.layers.2.mlp.experts";
    let (codes, scales) =
        (&names[&format!("{experts}.gate_up_proj")], &names[&format!("{experts}.gate_up_proj_scale_inv")]);
    assert_eq!((codes.0.as_str(), &codes.1[..]), ("F8_E4M3", &[16, 128, 128][..]));
    assert_eq!((scales.0.as_str(), &scales.1[..]), ("F32", &[16, 4, 4][..]));
    assert!(!names.keys().any(|name| name.contains("experts.0.")));

    // The same numbers under the new names, and the same bytes under the old ones.
    let config = ModelConfig::from_dir(source.path()).unwrap();
    let open = |dir: &Path| Checkpoint::open(dir).unwrap().check(&config).unwrap();
    let (before, after) = (open(source.path()), open(stacked.path()));
    for (expert, which) in [(0, "gate"), (5, "up"), (15, "down")] {
        let name = format!("{experts}.{expert}.{which}_proj.weight");
        let values = before.f32(&name).unwrap();
        assert!(values.iter().any(|v| *v != 0.0) && after.f32(&name).unwrap() == values, "{name}");
    }
    convert(stacked.path(), back.path(), "published", &[]).unwrap();
    assert!(contents(back.path()) == contents(source.path()));
}

#[test]
fn blocks_of_8_bits_that_cross_from_one_part_to_the_next_cannot_be_stacked() {
    // Up begins at row 64, in the middle of a block of 48 rows.
    let (source, out) = (eight_bits(48), tempfile::tempdir().unwrap());
    let error = convert(source.path(), out.path(), "transformers", &[]).unwrap_err().to_string();
    assert!(error.contains("experts.gate_up_proj") && error.contains("inside a block of 48 rows"), "{error}");
    assert_eq!(std::fs::read_dir(out.path()).unwrap().count(), 0, "nothing was written");
}

//! Reading values.

use half::bf16;
use serde_json::json;

use super::super::{CheckpointError, Resolved, inventory};
use super::*;

const Q: &str = "model.language_model.layers.0.self_attn.q_proj.weight";
const A_LOG: &str = "model.language_model.layers.0.self_attn.A_log";

fn resolve(tensors: &Tensors, config: &ModelConfig, pad: usize) -> Resolved {
    // The maps outlive the folder's names.
    let dir = single(&file(tensors, pad));
    Checkpoint::open(dir.path()).unwrap().check(config).ok().unwrap()
}

fn bf16s(bytes: &[u8]) -> Vec<bf16> {
    bytes.chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]])).collect()
}

/// Every alignment of the data gives the same values.
#[test]
fn slices_are_the_values_at_any_alignment() {
    let tensors = tiny();
    let header = file(&tensors, 0).len();
    for pad in 0..8 {
        let resolved = resolve(&tensors, &config(), pad);
        assert_eq!(file(&tensors, pad).len(), header + pad);
        let whole = bf16s(&tensors[Q].bytes);
        for (rows, cols) in
            [(0..128, 0..128), (3..7, 5..122), (127..128, 0..1), (5..5, 0..9), (0..128, 64..64)]
        {
            let expected: Vec<bf16> =
                rows.clone().flat_map(|r| whole[r * 128..][..128][cols.clone()].to_vec()).collect();
            let wide: Vec<f32> = expected.iter().map(|v| v.to_f32()).collect();
            assert_eq!(resolved.rows_bf16(Q, rows.clone(), cols.clone()).unwrap(), expected);
            assert_eq!(resolved.rows_f32(Q, rows, cols).unwrap(), wide);
        }
        let log: Vec<f32> =
            tensors[A_LOG].bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(resolved.f32(A_LOG).unwrap(), log);
        assert_eq!(resolved.rows_f32(A_LOG, 1..3, 0..1).unwrap(), log[1..3]);
    }
}

/// Dimensions behind the first are flattened.
#[test]
fn higher_dimensions_are_columns() {
    let resolved = resolve(&tiny(), &config(), 0);
    let patch = resolved.f32("model.visual.patch_embed.proj.weight").unwrap();
    assert_eq!(patch.len(), 64 * 1176);
    let part = resolved.rows_f32("model.visual.patch_embed.proj.weight", 2..3, 1000..1176).unwrap();
    assert_eq!(part, patch[2 * 1176 + 1000..3 * 1176]);
    let conv =
        resolved.rows_f32("model.language_model.layers.0.self_attn.k_conv1d.weight", 32..64, 0..4).unwrap();
    assert_eq!(conv.len(), 128);
}

#[test]
fn parts_outside_the_tensor_and_unknown_names_are_errors() {
    let resolved = resolve(&tiny(), &config(), 0);
    #[allow(clippy::reversed_empty_ranges)]
    for (rows, cols) in
        [(0..129, 0..1), (0..1, 0..129), (5..4, 0..1), (0..1, 9..8), (0..usize::MAX, 0..usize::MAX)]
    {
        let error = resolved.rows_f32(Q, rows.clone(), cols.clone()).unwrap_err();
        assert!(matches!(error, CheckpointError::Range { shape: [128, 128], .. }), "{error}");
        assert!(resolved.rows_bf16(Q, rows, cols).is_err());
    }
    assert!(matches!(resolved.f32("made.up"), Err(CheckpointError::Missing { .. })));
    assert!(resolved.tensor("made.up").is_err() && resolved.shape("made.up").is_err());
    assert_eq!((resolved.dtype(Q).unwrap(), resolved.bytes(Q).unwrap()), (Dtype::BF16, 128 * 128 * 2));
}

#[test]
fn nan_and_infinity_are_refused_by_name_and_place() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (f32::NEG_INFINITY, "-inf")] {
        let mut tensors = tiny();
        let at = 7 * 128 + 9;
        let bytes = &mut tensors.get_mut(Q).unwrap().bytes;
        bytes[2 * at..2 * at + 2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
        tensors.get_mut(A_LOG).unwrap().bytes[8..12].copy_from_slice(&value.to_le_bytes());
        let resolved = resolve(&tensors, &config(), 1);
        for error in [
            resolved.f32(Q).unwrap_err(),
            resolved.bf16(Q).unwrap_err(),
            resolved.rows_f32(Q, 7..8, 9..10).unwrap_err(),
        ] {
            assert!(
                error
                    .to_string()
                    .starts_with(&format!("tensor {Q} is {shown} at row 7, column 9; --allow-nan")),
                "{error}"
            );
        }
        let error = resolved.f32(A_LOG).unwrap_err().to_string();
        assert!(error.contains(&format!("A_log is {shown} at row 2, column 0")), "{error}");
        // Parts without it are fine, and so is everything when allowed.
        resolved.rows_f32(Q, 0..7, 0..128).unwrap();
        resolved.rows_bf16(Q, 7..8, 10..128).unwrap();
        let resolved = resolved.with_allow_nan(true);
        assert_eq!(resolved.f32(Q).unwrap()[at].to_bits() >> 16, u32::from(bf16::from_f32(value).to_bits()));
        assert!(!resolved.bf16(Q).unwrap()[at].is_finite());
    }
}

#[test]
fn weights_in_32_bits_are_not_shortened_in_silence() {
    let mut tensors = tiny();
    let mut values: Vec<f32> = bf16s(&tensors[Q].bytes).iter().map(|v| v.to_f32()).collect();
    let put = |tensors: &mut Tensors, values: &[f32]| {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        tensors.insert(Q.to_owned(), Tensor::new(Dtype::F32, &[128, 128], bytes));
    };
    put(&mut tensors, &values);
    let resolved = resolve(&tensors, &config(), 0);
    let short: Vec<f32> = resolved.bf16(Q).unwrap().iter().map(|v| v.to_f32()).collect();
    assert_eq!(short, values);
    values[128 + 2] = 1.000_1;
    put(&mut tensors, &values);
    let resolved = resolve(&tensors, &config(), 0);
    assert_eq!(resolved.f32(Q).unwrap(), values);
    let error = resolved.bf16(Q).unwrap_err().to_string();
    assert!(error.contains("is 1.0001 at row 1, column 2, which bfloat16 cannot hold"), "{error}");
    resolved.rows_bf16(Q, 2..128, 0..128).unwrap();
}

/// The value of an 8-bit code, by the definition of the format.
fn e4m3(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1.0 } else { -1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => sign * mantissa / 8.0 * 2f32.powi(-6),
        _ => sign * (1.0 + mantissa / 8.0) * 2f32.powi(exponent - 7),
    }
}

/// The tiny model with every matrix that the 8-bit release stores in blocks stored so, in blocks of 48 × 40, which
/// divide no size of it. Codes and scales are made up.
fn eight_bits() -> (Tensors, ModelConfig) {
    let mut json = config_json();
    json["quantization_config"] =
        json!({ "quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 40] });
    let config = ModelConfig::from_json(&json.to_string()).unwrap();
    let mut tensors = tiny();
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 16
    };
    for tensor in inventory(&config).iter().filter(|t| t.dtypes.contains(&Dtype::F8_E4M3)) {
        let [rows, cols] = tensor.shape[..] else { panic!("{}", tensor.name) };
        let codes =
            (0..rows * cols).map(|_| Some(next() as u8).filter(|c| c & 0x7f != 0x7f).unwrap_or(0)).collect();
        tensors.insert(tensor.name.clone(), Tensor::new(Dtype::F8_E4M3, &tensor.shape, codes));
        let blocks = [rows.div_ceil(48), cols.div_ceil(40)];
        let scales = (0..blocks[0] * blocks[1]).flat_map(|_| (next() as f32 / 3e7).to_le_bytes()).collect();
        tensors.insert(format!("{}_scale_inv", tensor.name), Tensor::new(Dtype::F32, &blocks, scales));
    }
    (tensors, config)
}

/// Value × scale of its block, element by element.
fn multiplied(codes: &Tensor, scales: &Tensor, row: usize, col: usize) -> f32 {
    let place = (row / 48 * scales.shape[1] + col / 40) * 4;
    let scale = f32::from_le_bytes(scales.bytes[place..place + 4].try_into().unwrap());
    e4m3(codes.bytes[row * codes.shape[1] + col]) * scale
}

#[test]
fn eight_bit_blocks_are_multiplied_out() {
    let (tensors, config) = eight_bits();
    let resolved = resolve(&tensors, &config, 3);
    assert!(resolved.unused.is_empty());
    let mut seen = 0;
    for tensor in inventory(&config).iter().filter(|t| t.dtypes.contains(&Dtype::F8_E4M3)) {
        let (codes, scales) = (&tensors[&tensor.name], &tensors[&format!("{}_scale_inv", tensor.name)]);
        let [rows, cols] = tensor.shape[..] else { panic!("{}", tensor.name) };
        let expected: Vec<f32> =
            (0..rows * cols).map(|i| multiplied(codes, scales, i / cols, i % cols)).collect();
        assert_eq!(resolved.f32(&tensor.name).unwrap(), expected, "{}", tensor.name);
        let short: Vec<bf16> = expected.iter().map(|v| bf16::from_f32(*v)).collect();
        assert_eq!(resolved.bf16(&tensor.name).unwrap(), short);
        // A part that begins and ends inside blocks.
        let part = resolved.rows_f32(&tensor.name, 17..rows - 3, 11..cols - 7).unwrap();
        let width = cols - 18;
        for (i, value) in part.iter().enumerate() {
            assert_eq!(*value, expected[(17 + i / width) * cols + 11 + i % width]);
        }
        seen += 1;
    }
    assert_eq!(seen, 3 * 2 + 7 * 3 * 17 + 4 * 4);
}

#[test]
fn eight_bit_blocks_of_stacked_experts_are_multiplied_out() {
    let (mut tensors, config) = eight_bits();
    let at = "model.language_model.layers.2.mlp.experts.";
    // One stack of gate and up rows with its own table of scales, whose blocks cross from gate to up.
    let stacked = [16, 128, 128];
    let codes: Vec<u8> =
        (0..16 * 128 * 128u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 & 0x77).collect();
    let scales: Vec<f32> = (0u16..16 * 3 * 4).map(|i| f32::from(i) / 64.0 + 0.5).collect();
    for e in 0..16 {
        for x in ["gate", "up"] {
            tensors.remove(&format!("{at}{e}.{x}_proj.weight"));
            tensors.remove(&format!("{at}{e}.{x}_proj.weight_scale_inv"));
        }
    }
    tensors.insert(format!("{at}gate_up_proj"), Tensor::new(Dtype::F8_E4M3, &stacked, codes.clone()));
    let bytes = scales.iter().flat_map(|v| v.to_le_bytes()).collect();
    tensors.insert(format!("{at}gate_up_proj_scale_inv"), Tensor::new(Dtype::F32, &[16, 3, 4], bytes));
    let resolved = resolve(&tensors, &config, 0);
    assert!(resolved.unused.is_empty());
    for e in [0, 5, 15] {
        for (x, first) in [("gate", 0), ("up", 64)] {
            let values = resolved.f32(&format!("{at}{e}.{x}_proj.weight")).unwrap();
            for (i, value) in values.iter().enumerate() {
                let (row, col) = (first + i / 128, i % 128);
                let scale = scales[e * 12 + row / 48 * 4 + col / 40];
                assert_eq!(*value, e4m3(codes[(e * 128 + row) * 128 + col]) * scale, "{e} {x} {row} {col}");
            }
        }
    }
}

#[test]
fn eight_bit_tensors_need_their_scales() {
    let (good, config8) = eight_bits();
    let name = "model.language_model.layers.2.self_attn.o_proj.weight";
    let scales = format!("{name}_scale_inv");
    let errors = |tensors: &Tensors, config: &ModelConfig| {
        let dir = single(&file(tensors, 0));
        Checkpoint::open(dir.path()).unwrap().check(config).err().unwrap().errors
    };
    let mut tensors = good.clone();
    tensors.remove(&scales);
    assert!(
        matches!(&errors(&tensors, &config8)[..], [CheckpointError::Missing { tensor }] if *tensor == scales)
    );
    tensors.insert(scales.clone(), Tensor::new(Dtype::F32, &[1, 1], vec![0; 4]));
    assert!(
        matches!(&errors(&tensors, &config8)[..], [CheckpointError::Shape { tensor, .. }] if *tensor == scales)
    );
    tensors.insert(scales.clone(), Tensor::new(Dtype::BF16, &[3, 4], vec![0; 24]));
    assert!(
        matches!(&errors(&tensors, &config8)[..], [CheckpointError::Type { tensor, .. }] if *tensor == scales)
    );
    // Without a format in the configuration nobody knows the size of the blocks.
    let found = errors(&good, &config());
    assert_eq!(found.len(), 3 * 2 + 7 * 3 * 17 + 4 * 4);
    assert!(found.iter().all(|e| matches!(e, CheckpointError::NoBlocks { .. })));
    // A table that only plain numbers are read for.
    let mut tensors = good.clone();
    tensors.insert("lm_head.weight".to_owned(), Tensor::new(Dtype::F8_E4M3, &[512, 128], vec![0; 512 * 128]));
    assert!(matches!(&errors(&tensors, &config8)[..], [CheckpointError::Type { .. }]));
    // A broken scale is found when it is used.
    let mut tensors = good;
    tensors.get_mut(&scales).unwrap().bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
    let resolved = resolve(&tensors, &config8, 0);
    assert!(matches!(resolved.f32(name), Err(CheckpointError::NotFinite { row: 0, column: 0, .. })));
    resolved.rows_f32(name, 48..128, 0..128).unwrap();
}

#[test]
fn known_eight_bit_values() {
    for (code, value) in [
        (0x00, 0.0),
        (0x38, 1.0),
        (0xc0, -2.0),
        (0x7e, 448.0),
        (0x01, 1.0 / 512.0),
        (0x08, 1.0 / 64.0),
        (0x3c, 1.5),
    ] {
        assert_eq!(super::super::read::E4M3[code], value);
        assert_eq!(e4m3(code as u8), value);
    }
    assert!(super::super::read::E4M3[0x7f].is_nan() && super::super::read::E4M3[0xff].is_nan());
}

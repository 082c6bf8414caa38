use std::path::Path;

use proptest::prelude::*;
use safetensors::SafeTensors;
use serde_json::Value;

use super::resize::resize;
use super::{ImageConfig, ImageError, Resampler};
use crate::config::{ConfigError, ModelConfig, VisionConfig};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/fixtures/tiny");
const PLENTY: usize = 1 << 24;

fn tower() -> VisionConfig {
    ModelConfig::from_dir(Path::new(TINY)).unwrap().vision.unwrap()
}

fn published() -> ImageConfig {
    ImageConfig::new(&tower())
}

/// `[channel, row, column]` of a golden as `[row, column, channel]`.
fn interleave(planes: &[u8]) -> Vec<u8> {
    let area = planes.len() / 3;
    (0..area).flat_map(|i| [planes[i], planes[area + i], planes[2 * area + i]]).collect()
}

#[test]
fn canvases_and_patches_are_the_goldens_bit_for_bit() {
    let bytes = std::fs::read(Path::new(TINY).join("goldens.safetensors")).unwrap();
    let goldens = SafeTensors::deserialize(&bytes).unwrap();
    let settings = ImageConfig::from_dir(Path::new(TINY), &tower()).unwrap();
    assert_eq!((settings.min_tokens, settings.max_tokens), (16, 40));
    for i in 0..3 {
        let rgb = goldens.tensor(&format!("image.{i}.rgb")).unwrap();
        let (height, width) = (rgb.shape()[0], rgb.shape()[1]);
        for (resampler, name) in [(Resampler::Fast, "fast"), (Resampler::Pil, "pil")] {
            let settings = ImageConfig { resampler, ..settings.clone() };
            let sizes = settings.smart_size(height, width, PLENTY).unwrap();
            let golden = goldens.tensor(&format!("image.{i}.canvas_{name}")).unwrap();
            assert_eq!(golden.shape(), [3, sizes.canvas.0, sizes.canvas.1]);
            let canvas = settings.paint(rgb.data(), (height, width), &sizes);
            assert!(canvas == interleave(golden.data()), "image {i}, {name}");
        }
        let patches = settings.patches(rgb.data(), height, width, PLENTY).unwrap();
        let grid: Vec<i32> = goldens
            .tensor(&format!("image.{i}.grid_thw"))
            .unwrap()
            .data()
            .chunks_exact(4)
            .map(|b| i32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        assert_eq!(
            [patches.grid.0, patches.grid.1, patches.grid.2],
            [grid[0], grid[1], grid[2]].map(|v| v as usize)
        );
        let golden: Vec<f32> = goldens
            .tensor(&format!("image.{i}.pixel_values"))
            .unwrap()
            .data()
            .chunks_exact(4)
            .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
            .collect();
        assert_eq!(patches.values.len(), golden.len());
        let differ = patches.values.iter().zip(&golden).position(|(a, b)| a.to_bits() != b.to_bits());
        assert_eq!(differ.map(|at| (at, patches.values[at], golden[at])), None, "image {i}");
    }
}

#[test]
fn the_table_of_sizes_holds() {
    let text = std::fs::read_to_string(Path::new(TINY).join("smart_resize.json")).unwrap();
    let table: Vec<Value> = serde_json::from_str(&text).unwrap();
    assert_eq!(table.len(), 32);
    for row in table {
        let number = |v: &Value| v.as_u64().unwrap() as usize;
        let list = |name: &str| -> Vec<usize> { row[name].as_array().unwrap().iter().map(number).collect() };
        let sizes =
            published().smart_size(number(&row["height"]), number(&row["width"]), usize::MAX).unwrap();
        assert_eq!(vec![sizes.canvas.0, sizes.canvas.1], list("canvas"), "{row}");
        assert_eq!(vec![sizes.content.0, sizes.content.1], list("content"), "{row}");
        assert_eq!(vec![sizes.grid.0, sizes.grid.1, sizes.grid.2], list("grid"), "{row}");
        assert_eq!(sizes.tokens, number(&row["tokens"]), "{row}");
    }
}

#[test]
fn hostile_images_are_refused_before_anything_is_allocated() {
    let settings = published();
    let empty = |height, width| ImageError::Empty { height, width };
    assert_eq!(settings.patches(&[], 0, 5, PLENTY), Err(empty(0, 5)));
    assert_eq!(settings.patches(&[], 5, 0, PLENTY), Err(empty(5, 0)));
    for (height, width) in [(usize::MAX, usize::MAX), (1, usize::MAX), (1 << 20, 1 << 20), (4097, 4096)] {
        let error = settings.patches(&[], height, width, PLENTY).unwrap_err();
        assert!(matches!(error, ImageError::TooLarge { .. }), "{error}");
    }
    let error = settings.patches(&[0; 11], 2, 2, PLENTY).unwrap_err();
    assert_eq!(error, ImageError::Length { height: 2, width: 2, expected: 12, found: 11 });
}

#[test]
fn settings_that_do_not_fit_are_refused_by_name() {
    for (text, field) in [
        (r#"{"image_processor": {"do_resize": false}}"#, "image_processor.do_resize"),
        (r#"{"image_processor": {"do_normalize": false}}"#, "image_processor.do_normalize"),
        (r#"{"image_processor": {"resample": 2}}"#, "image_processor.resample"),
        (r#"{"image_processor": {"rescale_factor": 1.0}}"#, "image_processor.rescale_factor"),
        (r#"{"image_processor": {"rescale_factor": 0.0}}"#, "image_processor.rescale_factor"),
        (r#"{"image_processor": {"patch_size": 16}}"#, "image_processor.patch_size"),
        (r#"{"merge_size": 4}"#, "merge_size"),
        (r#"{"temporal_patch_size": 0}"#, "temporal_patch_size"),
        (r#"{"patch_expand_factor": 0}"#, "patch_expand_factor"),
        (r#"{"max_image_tokens": 100000000}"#, "max_image_tokens"),
        (r#"{"min_image_tokens": 50, "max_image_tokens": 40}"#, "min_image_tokens"),
        (r#"{"image_mean": [0.5, 0.5]}"#, "image_mean"),
        (r#"{"image_std": [0.5, 0.0, 0.5]}"#, "image_std"),
        (r#"{"image_std": [0.5, 1e300, 0.5]}"#, "image_std"),
        (r#"{"image_processor": 3}"#, "image_processor"),
    ] {
        match ImageConfig::from_json(text, &tower()) {
            Err(ConfigError::Unsupported { problems, .. }) => {
                let fields: Vec<&str> = problems.iter().map(|p| p.field.as_str()).collect();
                assert_eq!(fields, [field], "{text}");
            }
            other => panic!("{text}: {other:?}"),
        }
    }
    let flat =
        ImageConfig::from_json(r#"{"min_image_tokens": 4, "image_mean": [0, 0.5, 1]}"#, &tower()).unwrap();
    assert_eq!((flat.min_tokens, flat.mean), (4, [0.0, 0.5, 1.0]));
    assert!(matches!(ImageConfig::from_json("[]", &tower()), Err(ConfigError::Json { .. })));
}

#[test]
fn without_a_settings_file_the_defaults_hold() {
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(ImageConfig::from_dir(dir.path(), &tower()).unwrap(), published());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_canvas_is_a_multiple_inside_the_budget(height in 1usize..6000, width in 1usize..6000) {
        let settings = published();
        let sizes = settings.smart_size(height, width, usize::MAX).unwrap();
        prop_assert!(sizes.canvas.0.is_multiple_of(28) && sizes.canvas.1.is_multiple_of(28));
        prop_assert!(sizes.tokens <= 8000);
        prop_assert!((1..=sizes.canvas.0).contains(&sizes.content.0));
        prop_assert!((1..=sizes.canvas.1).contains(&sizes.content.1));
        prop_assert_eq!(sizes.tokens * 784, sizes.canvas.0 * sizes.canvas.1);
    }

    /// A flat image stays flat at any size: the weights of every place sum to one within rounding, also at the edges.
    #[test]
    fn resizing_keeps_flat_colours(
        from in (1usize..80, 1usize..80),
        to in (1usize..80, 1usize..80),
        colour in any::<[u8; 3]>(),
        pil in any::<bool>(),
    ) {
        let resampler = if pil { Resampler::Pil } else { Resampler::Fast };
        let out = resize(&colour.repeat(from.0 * from.1), from, to, resampler);
        prop_assert_eq!(out, colour.repeat(to.0 * to.1));
    }
}

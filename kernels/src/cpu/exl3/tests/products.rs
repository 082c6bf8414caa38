use proptest::prelude::*;

use super::*;
use crate::cpu::exl3::*;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn random_rows(rows: usize, width: usize, seed: u64) -> Vec<f32> {
    let mut numbers = Numbers(seed);
    (0..rows * width).map(|_| numbers.gauss()).collect()
}

/// The product by its definition, in double precision.
fn reference(layer: &Layer, x: &[f32], rows: usize) -> Vec<f32> {
    let w = layer.weight();
    let mut y = Vec::with_capacity(rows * layer.n());
    for x in x.chunks_exact(x.len() / rows) {
        for j in 0..layer.n() {
            let sum: f64 =
                x.iter().enumerate().map(|(i, &x)| f64::from(x) * f64::from(w[i * layer.n() + j])).sum();
            y.push(sum as f32 + layer.bias().map_or(0.0, |b| b[j]));
        }
    }
    y
}

#[test]
fn every_rate_and_codebook_multiplies_right_on_both_paths() {
    for (codebook, rate) in variants() {
        let layer = random_layer(256, 128, rate, codebook, 7);
        for rows in [1, 3] {
            let x = random_rows(rows, 256, 8);
            let expected = reference(&layer, &x, rows);
            for (activations, limit) in [(Activations::Single, 1e-5), (Activations::Half, 3e-3)] {
                let mut results = [Path::Simd, Path::Scalar].map(|path| {
                    let mut y = vec![0.0; rows * 128];
                    layer.matmul(&x, rows, &mut y, Options { activations, path });
                    y
                });
                let error = largest_difference(&results[0], &expected) / deviation(&expected);
                assert!(error < limit, "{} {rate}, {rows} rows, {activations:?}: {error}", codebook.name());
                let [simd, scalar] = results.each_mut().map(|y| bits(y));
                assert!(
                    simd == scalar,
                    "{} {rate}, {rows} rows, {activations:?}: paths differ",
                    codebook.name()
                );
            }
        }
    }
}

/// The order of a sum, by its definition: chains of 1,024 inputs, added in rising order, and then the four lanes of a column.
#[test]
fn chains_are_added_in_rising_order() {
    let (k, rows) = (2 * 1024 + 384, 3);
    let layer = random_layer(k, 128, Rate::from_bits(4.0).unwrap(), Codebook::Mul1, 11);
    let inner = layer.inner();
    let x = random_rows(rows, k, 12);
    let mut expected = Vec::new();
    for x in x.chunks_exact(k) {
        let mut rotated: Vec<f32> = x.iter().zip(layer.suh()).map(|(x, s)| x * s.to_f32()).collect();
        hadamard::<BLOCK>(&mut rotated);
        let mut columns: Vec<f32> = (0..128)
            .map(|column| {
                // Lane i of the four has rows 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 of each tile.
                let lanes: [f32; 4] = core::array::from_fn(|i| {
                    let chain = |first: usize| {
                        let mut sum = 0.0_f32;
                        for tile in (first..(first + 1024).min(k)).step_by(16) {
                            for row in [0, 1, 8, 9].map(|r| tile + 2 * i + r) {
                                let x = f16::from_f32(rotated[row]).to_f32();
                                sum = inner[row * 128 + column].to_f32().mul_add(x, sum);
                            }
                        }
                        sum
                    };
                    (chain(0) + chain(1024)) + chain(2048)
                });
                (lanes[0] + lanes[1]) + (lanes[2] + lanes[3])
            })
            .collect();
        hadamard::<BLOCK>(&mut columns);
        expected.extend(columns.iter().zip(layer.svh()).map(|(y, s)| y * s.to_f32()));
    }
    if let Some(bias) = layer.bias() {
        expected.chunks_exact_mut(128).for_each(|y| y.iter_mut().zip(bias).for_each(|(y, b)| *y += b));
    }
    for path in [Path::Simd, Path::Scalar] {
        let options = Options { path, ..Options::default() };
        let mut y = vec![0.0; rows * 128];
        layer.matmul(&x, rows, &mut y, options);
        assert_eq!(bits(&y), bits(&expected), "{path:?}, {rows} rows");
        // A row alone takes another way.
        let mut alone = vec![0.0; 128];
        layer.matmul(&x[..k], 1, &mut alone, options);
        assert_eq!(bits(&alone), bits(&expected[..128]), "{path:?}, one row");
    }
}

#[test]
fn narrow_operands_are_padded_and_cut() {
    let layer = random_layer(256, 256, Rate::from_bits(3.0).unwrap(), Codebook::Mul1, 3);
    let x = random_rows(2, 200, 4);
    let padded: Vec<f32> = x.chunks_exact(200).flat_map(|r| r.iter().copied().chain([0.0; 56])).collect();
    let (mut narrow, mut full) = (vec![0.0; 2 * 170], vec![0.0; 2 * 256]);
    layer.matmul(&x, 2, &mut narrow, Options::default());
    layer.matmul(&padded, 2, &mut full, Options::default());
    for (narrow, full) in narrow.chunks_exact(170).zip(full.chunks_exact(256)) {
        assert_eq!(bits(narrow), bits(&full[..170]));
    }
}

#[test]
fn column_slices_give_the_same_bits_and_row_slices_sum_up() {
    let layer = random_layer(384, 384, Rate::from_bits(4.0).unwrap(), Codebook::Mcg, 5);
    let x = random_rows(2, 384, 6);
    let mut y = vec![0.0; 2 * 384];
    layer.matmul(&x, 2, &mut y, Options::default());
    let columns = layer.slice("l", 0..384, 128..384).unwrap();
    let mut part = vec![0.0; 2 * 256];
    columns.matmul(&x, 2, &mut part, Options::default());
    for (part, y) in part.chunks_exact(256).zip(y.chunks_exact(384)) {
        assert_eq!(bits(part), bits(&y[128..]));
    }
    let mut sum = vec![0.0; 2 * 384];
    for (first, end) in [(0, 128), (128, 384)] {
        let rows = layer.slice("l", first..end, 0..384).unwrap();
        let x: Vec<f32> = x.chunks_exact(384).flat_map(|x| &x[first..end]).copied().collect();
        let mut part = vec![0.0; 2 * 384];
        rows.matmul(&x, 2, &mut part, Options::default());
        for (sum, part) in sum.iter_mut().zip(part) {
            *sum += part;
        }
    }
    assert!(largest_difference(&sum, &y) < 1e-4 * deviation(&y));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The bits of a row are those of the row alone, wherever it stands and whatever stands beside it.
    #[test]
    fn rows_do_not_depend_on_each_other(
        variant in 0..variants().len(),
        others in 0_usize..70,
        position in 0_usize..70,
        single in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let (codebook, rate) = variants()[variant];
        let layer = random_layer(128, 256, rate, codebook, seed);
        let position = position.min(others);
        let activations = if single { Activations::Single } else { Activations::Half };
        let options = Options { activations, path: Path::Simd };
        let x = random_rows(others + 1, 128, seed ^ 1);
        let mut y = vec![0.0; (others + 1) * 256];
        layer.matmul(&x, others + 1, &mut y, options);
        let mut alone = vec![0.0; 256];
        layer.matmul(&x[position * 128..][..128], 1, &mut alone, options);
        prop_assert_eq!(bits(&y[position * 256..][..256]), bits(&alone));
    }

    /// Threads split the columns only.
    #[test]
    fn threads_do_not_change_bits(threads in 1_usize..6, rows in 1_usize..4, seed in any::<u64>()) {
        let layer = random_layer(128, 768, Rate::from_bits(4.0).unwrap(), Codebook::Mcg, seed);
        let x = random_rows(rows, 128, seed);
        let run = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut y = vec![0.0; rows * 768];
            pool.install(|| layer.matmul(&x, rows, &mut y, Options::default()));
            bits(&y)
        };
        prop_assert_eq!(run(1), run(threads));
    }
}

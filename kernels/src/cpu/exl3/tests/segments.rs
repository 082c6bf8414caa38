use plugfold_abi::Segment;
use proptest::prelude::*;

use super::*;
use crate::cpu::exl3::*;
use crate::cpu::math::dense::{Elements, PackedMatrix, matmul, pack_bf16, pack_f32};
use crate::cpu::rows::{Rows, RowsMut};

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn random_rows(rows: usize, width: usize, seed: u64) -> Vec<f32> {
    let mut numbers = Numbers(seed);
    (0..rows * width).map(|_| numbers.gauss()).collect()
}

fn cut(matrix: usize, output: usize, rows: Range, cols: Range) -> Cut {
    Cut { matrix, output, input: 0, rows, cols }
}

type Range = std::ops::Range<usize>;

/// What a segment is made of.
enum Piece<'a> {
    Layer(&'a Layer),
    /// The layer of the piece before, of which the scales of the input are shared.
    Again(&'a Layer),
    Bf16(&'a [bf16]),
    F32(&'a [f32]),
}

fn header(layer: &Layer) -> Header {
    let (rate, codebook) = (layer.rate(), layer.codebook());
    Header { k: layer.k(), n: layer.n(), rate, codebook, bias: layer.bias().is_some() }
}

/// A weight of pieces: the words of its two planes.
fn build(pieces: &[(Cut, Piece<'_>)]) -> (Vec<u32>, Lines) {
    let mut plan = Plan::default();
    let mut parts = Vec::new();
    for (cut, piece) in pieces {
        match piece {
            Piece::Layer(layer) => parts.push(plan.trellis(cut, &header(layer), false)),
            Piece::Again(layer) => parts.push(plan.trellis(cut, &header(layer), true)),
            Piece::Bf16(_) => {
                plan.panels(cut, true);
                parts.push((0..0, 0..0));
            }
            Piece::F32(_) => {
                plan.panels(cut, false);
                parts.push((0..0, 0..0));
            }
        }
    }
    let mut data = Lines::zeroed(plan.lines());
    for (((cut, piece), slots), (k, n)) in pieces.iter().zip(plan.slots(data.words_mut())).zip(parts) {
        let (height, width) = (cut.rows.len(), cut.cols.len());
        match (piece, slots) {
            (Piece::Layer(layer) | Piece::Again(layer), Slots::Trellis { trellis, suh, svh, bias }) => {
                let part = layer.slice("piece", k, n).unwrap();
                trellis.copy_from_slice(part.trellis());
                svh.copy_from_slice(part.svh());
                if let Some(suh) = suh {
                    suh.copy_from_slice(part.suh());
                }
                assert_eq!(bias.is_some(), layer.bias().is_some() && cut.cols.start == 0);
                if let (Some(bias), Some(from)) = (bias, part.bias()) {
                    bias.copy_from_slice(from);
                }
            }
            (Piece::Bf16(rows), Slots::Bf16(to)) => to.copy_from_slice(&pack_bf16(rows, height, width)),
            (Piece::F32(rows), Slots::F32(to)) => to.copy_from_slice(&pack_f32(rows, height, width)),
            (_, slots) => panic!("{slots:?}"),
        }
    }
    (plan.words(), data)
}

fn run(w: Segments<'_>, x: &[f32], k: usize, n: usize) -> Vec<f32> {
    let x = Rows::new(x, k);
    let mut out = vec![f32::NAN; x.rows() * n];
    w.matmul(x, None, RowsMut::new(&mut out, n)).unwrap();
    out
}

fn whole(layer: &Layer, x: &[f32], rows: usize) -> Vec<f32> {
    let mut y = vec![0.0; rows * layer.n()];
    layer.matmul(x, rows, &mut y, Options::default());
    y
}

/// Two parts of one layer, a part of another one with another rate and codebook, and two plain parts: each gives the
/// bits that it gives alone.
#[test]
fn a_fused_matrix_gives_the_bits_of_its_parts() {
    let (k, rows) = (256, 5);
    let first = random_layer(k, 384, Rate::from_bits(4.0).unwrap(), Codebook::Mcg, 1);
    let second = random_layer(k, 128, Rate::from_bits(2.5).unwrap(), Codebook::Mul1, 2);
    let single = random_rows(20, k, 3);
    let narrow: Vec<bf16> = random_rows(7, k, 4).into_iter().map(bf16::from_f32).collect();
    let pieces = [
        (cut(0, 0, 10..150, 0..k), Piece::Layer(&first)),
        (cut(0, 140, 150..384, 0..k), Piece::Again(&first)),
        (cut(0, 374, 0..20, 0..k), Piece::F32(&single)),
        (cut(0, 394, 3..100, 0..k), Piece::Layer(&second)),
        (cut(0, 491, 0..7, 0..k), Piece::Bf16(&narrow)),
    ];
    let n = 498;
    let (table, data) = build(&pieces);
    assert_eq!(data.words().as_ptr() as usize % Segment::LINE, 0);
    let x = random_rows(rows, k, 5);
    let got = run(Segments::new(n, k, &table, data.words()).unwrap(), &x, k, n);
    let (one, two) = (whole(&first, &x, rows), whole(&second, &x, rows));
    let plain = |data: Elements<'_>, n: usize| {
        let mut out = vec![0.0; rows * n];
        let w = PackedMatrix::new(n, k, data).unwrap();
        matmul(Rows::new(&x, k), w, None, RowsMut::new(&mut out, n));
        out
    };
    let single = plain(Elements::F32(&pack_f32(&single, 20, k)), 20);
    let narrow = plain(Elements::Bf16(&pack_bf16(&narrow, 7, k)), 7);
    for r in 0..rows {
        let want: Vec<f32> = one[r * 384 + 10..(r + 1) * 384]
            .iter()
            .chain(&single[r * 20..][..20])
            .chain(&two[r * 128 + 3..][..97])
            .chain(&narrow[r * 7..][..7])
            .copied()
            .collect();
        assert_eq!(bits(&got[r * n..][..n]), bits(&want), "row {r}");
    }
}

/// Shares of the inputs that end anywhere add up to the whole product; the bias is added once.
#[test]
fn shares_of_the_inputs_add_up() {
    let (k, n, rows) = (384, 256, 3);
    for (codebook, rate) in [(Codebook::Mcg, 4.0), (Codebook::Mul1, 3.5), (Codebook::ThreeInst, 8.0)] {
        let layer = random_layer(k, n, Rate::from_bits(rate).unwrap(), codebook, 9);
        let x = random_rows(rows, k, 10);
        let want = whole(&layer, &x, rows);
        for ends in [vec![0, 128, 384], vec![0, 100, 101, 250, 384], vec![0, 380, 384]] {
            let mut sum = vec![0.0; rows * n];
            for part in ends.windows(2) {
                let width = part[1] - part[0];
                let (table, data) = build(&[(cut(0, 0, 0..n, part[0]..part[1]), Piece::Layer(&layer))]);
                let x: Vec<f32> = x.chunks_exact(k).flat_map(|x| &x[part[0]..part[1]]).copied().collect();
                let y = run(Segments::new(n, width, &table, data.words()).unwrap(), &x, width, n);
                sum.iter_mut().zip(y).for_each(|(s, y)| *s += y);
            }
            // Each share rounds its rotated rows to half on its own.
            let error = largest_difference(&sum, &want) / deviation(&want);
            assert!(error < 3e-3, "{} {rate} in {ends:?}: {error}", codebook.name());
        }
    }
}

/// Slices of a wide layer along its inputs are added in order, whatever they are stored as.
#[test]
fn segments_of_the_same_outputs_are_added() {
    let (n, rows) = (130, 2);
    let layers =
        [128, 256].map(|k| random_layer(k, 256, Rate::from_bits(5.0).unwrap(), Codebook::Mcg, k as u64));
    let plain = random_rows(n, 40, 6);
    let at = |input: usize, cols: Range| Cut { matrix: 0, output: 0, input, rows: 0..n, cols };
    let k = 128 + 40 + 200;
    let (table, data) = build(&[
        (at(0, 0..128), Piece::Layer(&layers[0])),
        (at(128, 0..40), Piece::F32(&plain)),
        (at(168, 0..200), Piece::Layer(&layers[1])),
    ]);
    let x = random_rows(rows, k, 7);
    let got = run(Segments::new(n, k, &table, data.words()).unwrap(), &x, k, n);
    let columns =
        |range: Range| -> Vec<f32> { x.chunks_exact(k).flat_map(|x| x[range.clone()].to_vec()).collect() };
    let product = |layer: &Layer, x: &[f32]| {
        let mut y = vec![0.0; rows * n];
        layer.matmul(x, rows, &mut y, Options::default());
        y
    };
    let (first, third) = (product(&layers[0], &columns(0..128)), product(&layers[1], &columns(168..368)));
    let mut second = vec![0.0; rows * n];
    let w = pack_f32(&plain, n, 40);
    let w = PackedMatrix::new(n, 40, Elements::F32(&w)).unwrap();
    matmul(Rows::new(&columns(128..168), 40), w, None, RowsMut::new(&mut second, n));
    let want: Vec<f32> = first.iter().zip(&second).zip(&third).map(|((a, b), c)| (a + b) + c).collect();
    assert_eq!(bits(&got), bits(&want));
}

#[test]
fn experts_give_a_pair_the_bits_of_its_row_alone() {
    let (inputs, width, fan) = (250, 200, 3);
    let layers = |seed: u64| -> Vec<Layer> {
        let rate = |e: u64| Rate::from_bits(if e == 2 { 3.0 } else { 4.0 }).unwrap();
        (0..5).map(|e| random_layer(256, 256, rate(e), Codebook::Mcg, seed + e)).collect()
    };
    let (gate, up) = (layers(10), layers(20));
    let pieces: Vec<_> = (0..5)
        .flat_map(|e| {
            [(0, &gate[e]), (width, &up[e])]
                .map(|(at, layer)| (cut(e, at, 0..width, 0..inputs), Piece::Layer(layer)))
        })
        .collect();
    let (table, data) = build(&pieces);
    let w = Segments::new(2 * width, inputs, &table, data.words()).unwrap();
    let x = random_rows(4, inputs, 3);
    // Expert 3 has no row, expert 1 has most; pair 7 is not routed at all.
    let order = [0, 4, 1, 3, 6, 9, 10, 2, 5, 8, 11];
    let starts = [0, 2, 7, 9, 9, 11];
    let mut y = vec![-1.0; 12 * 2 * width];
    w.experts(Rows::new(&x, inputs), &order, &starts, fan, RowsMut::new(&mut y, 2 * width)).unwrap();
    for e in 0..5 {
        for &pair in &order[starts[e] as usize..starts[e + 1] as usize] {
            let pair = pair as usize;
            for (part, layer) in [&gate[e], &up[e]].into_iter().enumerate() {
                let mut alone = vec![0.0; width];
                layer.matmul(&x[pair / fan * inputs..][..inputs], 1, &mut alone, Options::default());
                let got = &y[(2 * pair + part) * width..][..width];
                assert_eq!(bits(got), bits(&alone), "pair {pair}, part {part}");
            }
        }
    }
    assert!(y[14 * width..16 * width].iter().all(|&v| v == -1.0));
}

#[test]
fn tables_that_do_not_describe_the_matrix_are_refused() {
    let layer = random_layer(128, 256, Rate::from_bits(4.0).unwrap(), Codebook::Mcg, 1);
    let pieces = [
        (cut(0, 0, 0..100, 0..128), Piece::Layer(&layer)),
        (cut(0, 100, 128..256, 0..128), Piece::Layer(&layer)),
    ];
    let (table, data) = build(&pieces);
    let refused = |n: usize, k: usize, change: &dyn Fn(&mut Vec<u32>), why: &str| {
        let mut table = table.clone();
        change(&mut table);
        let w = Segments::new(n, k, &table, data.words()).unwrap();
        let (x, mut out) = (vec![0.0; k], vec![0.0; n]);
        let error = w.matmul(Rows::new(&x, k), None, RowsMut::new(&mut out, n)).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    let same = |_: &mut Vec<u32>| {};
    refused(229, 128, &same, "do not cover [229, 128]");
    refused(228, 129, &same, "do not cover [228, 129]");
    refused(228, 128, &|t| t[1] = 1, "do not cover");
    refused(228, 128, &|t| t[16] = 1, "do not cover");
    refused(228, 128, &|t| t[6] = 200, "uses more than its stored");
    refused(228, 128, &|t| t[7] = 3, "kind 3");
    refused(228, 128, &|t| t[10] = 9, "no such rate or codebook");
    refused(228, 128, &|t| t[11] = 3, "no such rate or codebook");
    refused(228, 128, &|t| t[12] = 100_000, "trellis");
    refused(228, 128, &|t| t[15] = 100_000, "bias");
    assert!(Segments::new(1, 1, &table[1..], data.words()).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// The bits of a row are those of the row alone, in a matrix of mixed parts too.
    #[test]
    fn rows_do_not_depend_on_each_other(others in 0_usize..70, position in 0_usize..70, seed in any::<u64>()) {
        let (k, n) = (200, 150);
        let layer = random_layer(256, 256, Rate::from_bits(3.0).unwrap(), Codebook::Mul1, seed);
        let plain: Vec<bf16> = random_rows(30, k, seed ^ 2).into_iter().map(bf16::from_f32).collect();
        let (table, data) = build(&[
            (cut(0, 0, 60..180, 20..220), Piece::Layer(&layer)),
            (cut(0, 120, 0..30, 0..k), Piece::Bf16(&plain)),
        ]);
        let w = Segments::new(n, k, &table, data.words()).unwrap();
        let position = position.min(others);
        let x = random_rows(others + 1, k, seed ^ 1);
        let together = run(w, &x, k, n);
        let alone = run(w, &x[position * k..][..k], k, n);
        prop_assert_eq!(bits(&together[position * n..][..n]), bits(&alone));
    }
}

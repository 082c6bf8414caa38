//! What the vision tower has beside the operations of the text model.

use super::{Entry, Held, Matrix, Seq, Setup, one, random};

pub const CASES: &[Entry] =
    &[("vision.rotate", rotate), ("vision.attend", attend), ("vision.gather, vision.gelu", rest)];

fn rotate() -> Vec<Setup> {
    [(5, 3, 8), (2, 2, 64), (1, 1, 36)]
        .into_iter()
        .map(|(rows, heads, d)| Setup {
            inputs: vec![
                Matrix::f32(&random(1, rows * 3 * heads * d, 2.0), 3 * heads * d).gapped(1),
                Matrix::f32(&random(2, rows * d, 1.0), d),
            ],
            outputs: vec![Matrix::out(rows, heads * d).gapped(3), Matrix::out(rows, 2 * heads * d)],
            weights: vec![Held::plain(&random(3, d, 1.0)), Held::plain(&random(4, d, 1.0))],
            dims: vec![heads, d],
            params: vec![1e-5],
            seqs: one(rows),
            ..Setup::new("vision.rotate")
        })
        .collect()
}

/// Frames of several lengths: one row, a few, and more than a stretch of keys.
fn attend() -> Vec<Setup> {
    let many = [(vec![33, 70, 1], 2, 64), (vec![50], 1, 256), (vec![47, 18], 2, 72), (vec![20], 1, 320)];
    [(vec![4, 1, 16], 3, 8), (vec![100, 64], 2, 16), (vec![1], 1, 32), (vec![24], 1, 20)]
        .into_iter()
        .chain(many)
        .map(|(frames, heads, d)| {
            let rows: u32 = frames.iter().sum();
            let width = heads * d;
            Setup {
                inputs: vec![
                    Matrix::f32(&random(1, rows as usize * width, 3.0), width).gapped(1),
                    Matrix::f32(&random(2, rows as usize * 2 * width, 2.0), 2 * width).gapped(4),
                ],
                outputs: vec![Matrix::out(rows as usize, width)],
                dims: vec![heads, d],
                params: vec![0.37],
                seqs: frames
                    .iter()
                    .map(|n| Seq { slot: 7, parity: 0, start: 0, rows: *n, keep: *n })
                    .collect(),
                ..Setup::new("vision.attend")
            }
        })
        .collect()
}

fn rest() -> Vec<Setup> {
    let gather = |rows: usize, places: usize, width: usize| Setup {
        inputs: vec![Matrix::f32(&random(1, rows * places * width, 1.0), width).gapped(2)],
        outputs: vec![Matrix::out(rows, places * width).gapped(1)],
        dims: vec![width, places],
        seqs: one(rows),
        ..Setup::new("vision.gather")
    };
    let gelu = |rows: usize, n: usize, scale: f32| Setup {
        inputs: vec![Matrix::f32(&random(2, rows * n, scale), n).gapped(1)],
        outputs: vec![Matrix::out(rows, n)],
        weights: vec![Held::plain(&random(3, n, 3.0)), Held::plain(&random(4, n, 4.0))],
        dims: vec![n],
        params: vec![1e-5],
        seqs: one(rows),
        ..Setup::new("vision.gelu")
    };
    vec![gather(3, 4, 24), gather(1, 9, 300), gelu(3, 128, 1.0), gelu(2, 41, 1e3), gelu(1, 300, 1e-4)]
}

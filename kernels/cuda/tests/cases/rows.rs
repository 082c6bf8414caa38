//! Operations on rows by themselves.

use plugfold_abi::{FIRST_VIRTUAL_ID, Span};

use super::{Entry, Held, Matrix, Numbers, Setup, one, random};

pub const CASES: &[Entry] = &[
    ("norm", norm),
    ("final and tap", streams),
    ("activations", activations),
    ("residual, rows.pick, comm.sum", moves),
    ("embed", embed),
    ("mtp.in", mtp_in),
    ("hc.finish", hc_finish),
    ("hc.post", hc_post),
    ("moe.pick", pick),
    ("moe.group", group),
    ("moe.combine", combine),
    ("sample.candidates", candidates),
];

/// Numbers of several sizes, zeros of both signs among them.
fn mixed(seed: u64, n: usize) -> Vec<f32> {
    let mut numbers = Numbers(seed);
    (0..n)
        .map(|_| match numbers.below(20) {
            0 => 0.0,
            1 => -0.0,
            2 => numbers.uniform() * 1e-30,
            3 => numbers.uniform() * 1e4,
            _ => numbers.uniform() * 3.0,
        })
        .collect()
}

fn norm() -> Vec<Setup> {
    [(1, 128), (3, 70), (2, 5000), (5, 1), (2, 31)]
        .into_iter()
        .map(|(rows, k)| Setup {
            inputs: vec![Matrix::f32(&mixed(k as u64, rows * k), k).gapped(3)],
            outputs: vec![Matrix::out(rows, k).gapped(2)],
            weights: vec![Held::plain(&random(2, k, 1.0))],
            dims: vec![k],
            params: vec![1e-5],
            seqs: one(rows),
            ..Setup::new("norm")
        })
        .collect()
}

fn streams() -> Vec<Setup> {
    [(1, 4, 128), (3, 1, 40), (2, 3, 4200)]
        .into_iter()
        .flat_map(|(rows, n, d)| {
            let base = Setup {
                inputs: vec![Matrix::f32(&mixed(d as u64, rows * n * d), n * d)],
                outputs: vec![Matrix::out(rows, d).gapped(1)],
                dims: vec![n, d],
                params: vec![1e-5],
                seqs: one(rows),
                ..Setup::new("tap")
            };
            [base.clone(), Setup { op: "final", weights: vec![Held::plain(&random(2, d, 1.0))], ..base }]
        })
        .collect()
}

fn activations() -> Vec<Setup> {
    [("mlp.act", 3, 37, 2.0), ("moe.act", 5, 300, 10.0)]
        .into_iter()
        .map(|(op, rows, width, limit)| Setup {
            inputs: vec![Matrix::f32(
                &mixed(7, rows * 2 * width).iter().map(|v| v * 4.0).collect::<Vec<_>>(),
                2 * width,
            )],
            outputs: vec![Matrix::out(rows, width)],
            dims: vec![width],
            params: vec![limit],
            seqs: one(rows),
            ..Setup::new(op)
        })
        .collect()
}

fn moves() -> Vec<Setup> {
    let (rows, d) = (4, 300);
    let x = Matrix::f32(&mixed(1, rows * d), d);
    let residual = |parts: usize| Setup {
        inputs: vec![x.gapped(2), Matrix::f32(&mixed(2, rows * parts * d), parts * d)],
        outputs: vec![Matrix::out(rows, d)],
        dims: vec![d, parts],
        seqs: one(rows),
        ..Setup::new("residual")
    };
    let pick = Setup {
        inputs: vec![x.gapped(1)],
        outputs: vec![Matrix::out(3, d)],
        dims: vec![d],
        seqs: one(rows),
        out_rows: vec![0, 2, 3],
        ..Setup::new("rows.pick")
    };
    let sum = Setup {
        inputs: vec![x.clone()],
        outputs: vec![Matrix::out(rows, d).gapped(4)],
        dims: vec![d, 1],
        seqs: one(rows),
        ..Setup::new("comm.sum")
    };
    let part = Setup {
        inputs: vec![x.range(1, 2)],
        outputs: vec![Matrix::out(2, d)],
        rows: Span { start: 1, end: 3 },
        ..sum.clone()
    };
    vec![residual(1), residual(3), pick, sum, part]
}

fn tables(vocab: usize, d: usize) -> Vec<Held> {
    let numbers = random(5, vocab * d, 1.0);
    let mut all = vec![Held::rows_f32(&numbers, vocab, d), Held::rows_bf16(&numbers, vocab, d)];
    all.extend([1, 3, 4, 8].map(|bits| Held::rows_exl3(bits as u64, vocab, d, bits)));
    all
}

fn embed() -> Vec<Setup> {
    [(128, 4), (300, 2)]
        .into_iter()
        .flat_map(|(d, n)| {
            tables(11, d).into_iter().map(move |table| Setup {
                outputs: vec![Matrix::out(4, n * d)],
                weights: vec![table],
                dims: vec![n, d, 11],
                seqs: one(4),
                tokens: vec![3, 0, FIRST_VIRTUAL_ID + 1, 10],
                embeds: vec![None, None, Some(random(9, d, 1.0)), None],
                ..Setup::new("embed")
            })
        })
        .collect()
}

fn mtp_in() -> Vec<Setup> {
    let d = 300;
    let mut all = Vec::new();
    for table in tables(11, d) {
        for zero in [0, 1] {
            all.push(Setup {
                inputs: vec![Matrix::f32(&mixed(3, 3 * d), d)],
                outputs: vec![Matrix::out(3, 2 * d).gapped(1)],
                weights: vec![
                    table.clone(),
                    Held::plain(&random(6, d, 1.0)),
                    Held::plain(&random(7, d, 1.0)),
                ],
                dims: vec![d, 11, zero],
                params: vec![1e-5],
                seqs: one(3),
                tokens: vec![3, 0, 10],
                ..Setup::new("mtp.in")
            });
        }
    }
    all
}

fn hc_finish() -> Vec<Setup> {
    [(1, 4, 128, 20), (3, 4, 500, 1), (2, 8, 40, 3), (2, 1, 40, 2), (1, 6, 4200, 2), (2, 4, 4200, 1)]
        .into_iter()
        .map(|(rows, n, d, steps)| {
            let mixes = (2 + n) * n;
            let mut dots = random(3, rows * (mixes + 1), 2.0);
            dots.iter_mut().skip(mixes).step_by(mixes + 1).for_each(|v| *v = v.abs() * 100.0);
            Setup {
                inputs: vec![Matrix::f32(&dots, mixes + 1), Matrix::f32(&mixed(4, rows * n * d), n * d)],
                outputs: vec![Matrix::out(rows, d), Matrix::out(rows, n), Matrix::out(rows, n * n).gapped(1)],
                weights: vec![
                    Held::plain(&random(5, mixes, 1.0)),
                    Held::plain(&random(6, 3, 1.0)),
                    Held::plain(&random(7, d, 1.0)),
                ],
                dims: vec![n, d, steps],
                params: vec![1e-5, 1e-6],
                seqs: one(rows),
                ..Setup::new("hc.finish")
            }
        })
        .collect()
}

fn hc_post() -> Vec<Setup> {
    [(1, 4, 128, 1), (3, 4, 300, 2), (2, 8, 40, 3)]
        .into_iter()
        .map(|(rows, n, d, parts)| Setup {
            inputs: vec![
                Matrix::f32(&mixed(4, rows * n * d), n * d),
                Matrix::f32(&mixed(5, rows * parts * d), parts * d).gapped(1),
                Matrix::f32(&random(6, rows * n, 2.0), n),
                Matrix::f32(&random(7, rows * n * n, 1.0), n * n),
            ],
            outputs: vec![Matrix::out(rows, n * d)],
            dims: vec![n, d, parts],
            seqs: one(rows),
            ..Setup::new("hc.post")
        })
        .collect()
}

fn pick() -> Vec<Setup> {
    [
        (1, 16, 4, 1, 1, 1),
        (5, 288, 8, 1, 1, 1),
        (4, 24, 3, 4, 2, 0),
        (2, 8, 8, 8, 8, 1),
        (3, 40, 5, 8, 3, 1),
        (1, 70, 70, 1, 1, 1),
        (1, 600, 40, 300, 200, 1),
    ]
    .into_iter()
    .map(|(rows, e, k, groups, kept, normalized)| {
        // Few different values: ties.
        let mut logits = random(e as u64, rows * e, 2.0);
        for v in &mut logits {
            *v = (*v * 4.0).round() / 4.0;
        }
        Setup {
            inputs: vec![Matrix::f32(&logits, e)],
            outputs: vec![Matrix::out_i32(rows, k), Matrix::out(rows, k)],
            weights: vec![Held::plain(&vec![0.25; e])],
            dims: vec![e, k, groups, kept, normalized],
            params: vec![2.5],
            seqs: one(rows),
            ..Setup::new("moe.pick")
        }
    })
    .collect()
}

/// Different experts for each row.
pub fn ids(seed: u64, rows: usize, experts: usize, k: usize) -> Vec<i32> {
    let mut numbers = Numbers(seed);
    let mut all = Vec::new();
    for _ in 0..rows {
        let mut row: Vec<i32> = Vec::new();
        while row.len() < k {
            let id = numbers.below(experts) as i32;
            if !row.contains(&id) {
                row.push(id);
            }
        }
        all.extend(row);
    }
    all
}

fn group() -> Vec<Setup> {
    [(1, 16, 4), (1, 288, 8), (4, 31, 8), (11, 1100, 3), (1, 1100, 2), (7, 288, 8), (300, 16, 3), (1, 1, 1)]
        .into_iter()
        .map(|(rows, e, k)| Setup {
            inputs: vec![Matrix::i32(&ids(3, rows, e, k), k)],
            outputs: vec![Matrix::out_i32(rows * k, 1), Matrix::out_i32(e + 1, 1)],
            dims: vec![e, k],
            seqs: one(rows),
            ..Setup::new("moe.group")
        })
        .collect()
}

fn combine() -> Vec<Setup> {
    [(1, 8, 128), (3, 4, 333)]
        .into_iter()
        .map(|(rows, k, d)| Setup {
            inputs: vec![
                Matrix::f32(&mixed(1, rows * k * d), d),
                Matrix::f32(&random(2, rows * k, 1.0), k),
                Matrix::f32(&mixed(3, rows * d), d).gapped(2),
            ],
            outputs: vec![Matrix::out(rows, d)],
            dims: vec![k, d],
            seqs: one(rows),
            ..Setup::new("moe.combine")
        })
        .collect()
}

fn candidates() -> Vec<Setup> {
    [
        (1, 512, 1),
        (2, 512, 64),
        (1, 20_000, 16),
        (2, 17_000, 300),
        (1, 10, 16),
        (1, 8192, 8192),
        (1, 8200, 40),
        // More kept values than the merging block holds.
        (1, 20_000, 2000),
    ]
    .into_iter()
    .map(|(rows, n, c)| {
        let mut logits = random(n as u64, rows * n, 4.0);
        // Ties, no numbers, and both zeros.
        logits.iter_mut().step_by(3).for_each(|v| *v = v.round());
        logits[5] = f32::NAN;
        logits[7] = f32::NEG_INFINITY;
        best_of(rows, n, c, &logits)
    })
    .chain(uneven_candidates())
    .collect()
}

fn best_of(rows: usize, n: usize, c: usize, logits: &[f32]) -> Setup {
    Setup {
        inputs: vec![Matrix::f32(logits, n)],
        outputs: vec![Matrix::out(rows, c), Matrix::out_i32(rows, c)],
        dims: vec![n, c, 1000],
        seqs: one(rows),
        out_rows: (0..rows as u32).collect(),
        ..Setup::new("sample.candidates")
    }
}

/// Rows whose best lie together, or are few.
fn uneven_candidates() -> Vec<Setup> {
    let (n, c) = (40_000, 64);
    // A mask that leaves six, and one that leaves none.
    let mut masked = vec![f32::NEG_INFINITY; 2 * n];
    for i in [3, 4, 9000, 20_001, 39_998, 39_999] {
        masked[i] = (i % 7) as f32;
    }
    // More than are ever held, all larger than the rest; and none of them different.
    let mut together = random(11, n, 1.0);
    together[7000..9500].iter_mut().for_each(|v| *v += 10.0);
    let mut same = random(12, n, 1.0);
    same[7000..9500].fill(10.0);
    // The best at the end of a row of few stretches.
    let mut rising: Vec<f32> = (0..129).map(|i| i as f32).collect();
    rising.push(-1.0);
    vec![
        best_of(2, n, c, &masked),
        best_of(1, n, c, &together),
        best_of(1, n, c, &same),
        best_of(1, 130, 4, &rising),
        best_of(1, 130, 128, &rising),
    ]
}

//! Operations with caches.

use plugfold_abi::{Addressing, Phase, Span};

use super::{Entry, Family, Held, Matrix, Numbers, Seq, Setup, random};

pub const CASES: &[Entry] = &[
    ("kda.mix", mix),
    ("kda.commit", commit),
    ("mla.write", mla_write),
    ("mla.dense", mla_dense),
    ("mla.sparse", mla_sparse),
    ("idx.write", idx_write),
    ("idx.select", idx_select),
];

fn seq(slot: u32, parity: u32, start: u32, rows: u32, keep: u32) -> Seq {
    Seq { slot, parity, start, rows, keep }
}

/// Three sequences of several lengths, not in the order of their slots.
fn ragged() -> Vec<Seq> {
    vec![seq(2, 1, 5, 3, 1), seq(0, 0, 17, 1, 0), seq(1, 1, 0, 5, 5)]
}

fn rows(seqs: &[Seq]) -> usize {
    seqs.iter().map(|s| s.rows as usize).sum()
}

fn kda_families(h: usize, k: usize, t: usize, window: usize) -> Vec<Family> {
    let c = h * k;
    vec![
        Family::new(1, 3, 2, 1, c * k, Addressing::State),
        Family::new(2, 3, 2, 1, (t - 1) * 3 * c, Addressing::State),
        Family::new(3, 3, 1, window, 6 * c + h, Addressing::State),
    ]
}

fn mix() -> Vec<Setup> {
    let mut all = Vec::new();
    for (h, k, bounded, phase, seqs) in [
        (4, 32, true, Phase::Window, ragged()),
        (1, 128, true, Phase::Prefill, vec![seq(1, 0, 0, 40, 40)]),
        (2, 64, false, Phase::Window, ragged()),
        (2, 128, false, Phase::Window, ragged()),
        (1, 32, true, Phase::Prefill, vec![seq(0, 1, 0, 8, 8), seq(2, 0, 3, 9, 9)]),
        (3, 40, true, Phase::Window, ragged()),
        (1, 7, false, Phase::Prefill, ragged()),
    ] {
        let (c, r) = (h * k, rows(&seqs));
        all.push(Setup {
            phase,
            inputs: vec![
                Matrix::f32(&random(1, r * 3 * c, 1.0), 3 * c).gapped(2),
                Matrix::f32(&random(2, r * c, 2.0), c),
                Matrix::f32(&random(3, r * c, 2.0), c),
                Matrix::f32(&random(4, r * h, 2.0), h),
            ],
            outputs: vec![Matrix::out(r, c)],
            weights: vec![
                Held::plain(&random(5, 3 * c * 4, 1.0)),
                Held::plain(&random(6, c, 1.0)),
                Held::plain(&random(7, h, 1.0)),
                Held::plain(&random(8, k, 1.0)),
            ],
            caches: kda_families(h, k, 4, 8),
            dims: vec![h, k, 4, usize::from(bounded)],
            params: vec![1e-5, -5.0],
            seqs,
            ..Setup::new("kda.mix")
        });
    }
    all
}

fn commit() -> Vec<Setup> {
    [(4, 32), (1, 64), (2, 128), (3, 40), (1, 32)]
        .into_iter()
        .map(|(h, k)| Setup {
            caches: kda_families(h, k, 4, 8),
            dims: vec![h, k, 4],
            seqs: ragged(),
            ..Setup::new("kda.commit")
        })
        .collect()
}

fn kv(h: usize, d: usize, v: usize, rows: usize) -> Family {
    Family::new(9, 3, 1, rows, h * (d + v), Addressing::Linear)
}

fn mla_write() -> Vec<Setup> {
    let long = vec![seq(1, 0, 3, 40, 40), seq(0, 0, 0, 2, 2)];
    [(ragged(), 4, 32, 32, 64, true), (ragged(), 1, 5, 7, 30, false), (long, 2, 16, 8, 64, true)]
        .into_iter()
        .map(|(seqs, h, d, v, r, narrow)| Setup {
            inputs: vec![Matrix::f32(&random(1, rows(&seqs) * r, 1.0), r)],
            weights: vec![Held::panels(2, h * (d + v), r, 1, narrow)],
            caches: vec![kv(h, d, v, 48)],
            dims: vec![h, d, v, r],
            seqs,
            ..Setup::new("mla.write")
        })
        .collect()
}

fn mla_dense() -> Vec<Setup> {
    let single = vec![seq(1, 0, 100, 1, 1), seq(0, 0, 0, 1, 1), seq(2, 0, 63, 1, 1)];
    let mut all: Vec<Setup> = [
        (ragged(), 4, 32, 32),
        (ragged(), 1, 5, 70),
        (single, 2, 64, 300),
        (vec![seq(1, 0, 40, 21, 21), seq(0, 0, 3, 2, 2)], 2, 32, 40),
        // Many rows: not whole blocks of them, several sequences, first rows, keys that end anywhere; heads as wide as the published
        // ones, narrow ones, some that fill no stretch, some wider than these kernels take.
        (vec![seq(1, 0, 30, 35, 35), seq(0, 0, 60, 1, 1), seq(2, 0, 0, 17, 17)], 2, 256, 256),
        (vec![seq(2, 0, 0, 70, 70), seq(1, 0, 64, 40, 40)], 3, 64, 64),
        (vec![seq(0, 0, 15, 40, 40), seq(2, 0, 0, 3, 3)], 1, 101, 70),
        (vec![seq(0, 0, 0, 64, 64)], 1, 24, 255),
        (vec![seq(1, 0, 3, 20, 20)], 1, 5, 300),
        (vec![seq(1, 0, 31, 18, 18), seq(0, 0, 0, 9, 9)], 1, 290, 20),
    ]
    .into_iter()
    .map(|(seqs, h, d, v)| Setup {
        inputs: vec![Matrix::f32(&random(1, rows(&seqs) * h * d, 3.0), h * d).gapped(1)],
        outputs: vec![Matrix::out(rows(&seqs), h * v)],
        caches: vec![kv(h, d, v, 110)],
        dims: vec![h, d, v, 64],
        params: vec![0.37],
        seqs,
        ..Setup::new("mla.dense")
    })
    .collect();
    // Rows 2 to 7 of nine alone: they start inside a sequence.
    let mut part = all[0].clone();
    part.rows = Span { start: 2, end: 7 };
    part.inputs[0] = part.inputs[0].range(2, 5);
    part.outputs[0] = Matrix::out(5, 128);
    all.push(part);
    // What lies beyond a row's position is no number: nothing of it may reach the row.
    for i in [0, 3, 4, 5, 6, 8] {
        let mut after = all[i].clone();
        let (s, row) = (after.seqs[0], after.caches[0].row);
        let from = (s.slot as usize * 110 + (s.start + s.rows / 2) as usize) * row;
        after.caches[0].data[from..(s.slot as usize + 1) * 110 * row].fill(f32::NAN);
        all.push(after);
    }
    // Of 110 rows those from the middle of the first sequence to the middle of the second.
    let mut part = all[5].clone();
    part.rows = Span { start: 33, end: 104 };
    part.inputs[0] = part.inputs[0].range(33, 71);
    part.outputs[0] = Matrix::out(71, 192);
    all.push(part);
    all
}

fn mla_sparse() -> Vec<Setup> {
    let seqs = vec![seq(1, 0, 90, 3, 3), seq(0, 0, 30, 2, 2)];
    let (h, d, v, longest) = (2, 32, 40, 60);
    let mut numbers = Numbers(4);
    let (mut lists, mut counts) = (Vec::new(), Vec::new());
    for s in &seqs {
        for position in s.start..s.start + s.rows {
            let keys: Vec<i32> = (0..=position as i32)
                .filter(|p| *p == position as i32 || numbers.below(2) == 0)
                .take(longest)
                .collect();
            counts.push(keys.len() as i32);
            lists.extend(keys.iter().copied().chain(std::iter::repeat(-1)).take(longest));
        }
    }
    let r = rows(&seqs);
    vec![Setup {
        inputs: vec![
            Matrix::f32(&random(1, r * h * d, 3.0), h * d),
            Matrix::i32(&lists, longest),
            Matrix::i32(&counts, 1),
        ],
        outputs: vec![Matrix::out(r, h * v)],
        caches: vec![kv(h, d, v, 110)],
        dims: vec![h, d, v, 64, longest],
        params: vec![0.2],
        seqs,
        ..Setup::new("mla.sparse")
    }]
}

fn idx_write() -> Vec<Setup> {
    [(32, 4), (20, 3), (128, 16)]
        .into_iter()
        .map(|(d, pool)| {
            let mut seqs = ragged();
            seqs.push(seq(2, 0, 30, 20, 20));
            seqs.remove(0);
            let r = rows(&seqs);
            Setup {
                inputs: vec![
                    Matrix::f32(&random(1, r * d, 2.0), d).gapped(1),
                    Matrix::f32(&random(2, r * d, 2.0), d),
                ],
                weights: vec![
                    Held::plain(&random(3, d, 1.0)),
                    Held::plain(&random(4, d, 1.0)),
                    Held::plain(&random(5, pool * d, 1.0)),
                ],
                caches: vec![
                    Family::new(6, 3, 1, 60, 2 * d, Addressing::Linear),
                    Family::new(7, 3, 1, 60 / pool, d, Addressing::Linear),
                ],
                dims: vec![d, pool],
                params: vec![1e-6],
                seqs,
                ..Setup::new("idx.write")
            }
        })
        .collect()
}

fn idx_select() -> Vec<Setup> {
    let mut all = idx_short();
    // Few different scores: more pools than a block holds or places in one go, and several that each thread holds.
    for start in [33_000, 20_000, 5000, 3000] {
        all.push(idx_long(start, 48, 40));
    }
    // Mostly different ones; of 1,100 pools nearly all, and more than threads.
    for (start, top) in
        [(33_000, 48), (32_767, 512), (16_383, 512), (5000, 300), (3000, 512), (1100, 1050), (1030, 1000)]
    {
        all.push(idx_long(start, top, start));
    }
    all
}

/// Of pools of one token, whose keys come again after `period` of them.
fn idx_long(start: usize, top: usize, period: usize) -> Setup {
    let d = 4;
    let mut pools = Family::new(7, 1, 1, start + 1, d, Addressing::Linear);
    let keys: Vec<f32> = pools.data[..period * d].to_vec();
    pools.data.chunks_mut(period * d).for_each(|r| r.copy_from_slice(&keys[..r.len()]));
    Setup {
        inputs: vec![Matrix::f32(&random(1, d, 1.0), d), Matrix::f32(&[0.7], 1)],
        outputs: vec![Matrix::out_i32(1, top), Matrix::out_i32(1, 1)],
        caches: vec![pools],
        dims: vec![1, d, 1, top, top],
        seqs: vec![seq(0, 0, start as u32, 1, 1)],
        ..Setup::new("idx.select")
    }
}

fn idx_short() -> Vec<Setup> {
    [(16, 32, 4, 32), (18, 20, 3, 30), (32, 128, 4, 64), (32, 128, 1, 48), (50, 16, 4, 16), (5, 232, 2, 32)]
        .into_iter()
        .map(|(heads, d, pool, top)| {
            let seqs = vec![seq(1, 0, 390, 3, 3), seq(0, 0, 2, 4, 4), seq(2, 0, top as u32 - 2, 5, 5)];
            let r = rows(&seqs);
            let longest = top + pool - 1;
            // Few different keys: ties.
            let mut pools = Family::new(7, 3, 1, 400 / pool, d, Addressing::Linear);
            let row: Vec<f32> = pools.data[..d].to_vec();
            pools.data.chunks_mut(d).step_by(3).for_each(|r| r.copy_from_slice(&row));
            Setup {
                inputs: vec![
                    Matrix::f32(&random(1, r * heads * d, 1.0), heads * d),
                    Matrix::f32(&random(2, r * heads, 1.0), heads),
                ],
                outputs: vec![Matrix::out_i32(r, longest), Matrix::out_i32(r, 1)],
                caches: vec![pools],
                dims: vec![heads, d, pool, top, longest],
                seqs,
                ..Setup::new("idx.select")
            }
        })
        .collect()
}

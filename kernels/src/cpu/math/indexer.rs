//! The sparse indexer: keys of pools of tokens, scores of pools, and the tokens that a query may attend to.

use super::dense::PANEL;
use super::norm::layer;
use super::num::exp;
use super::sample::ordered;
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::scratch::{self, Scratch};
use crate::cpu::simd::kernel;

/// Sizes of an indexer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// HI.
    pub heads: usize,
    /// dI.
    pub width: usize,
    /// Tokens of a pool.
    pub pool: usize,
    /// Tokens that are kept, a multiple of `pool`.
    pub top: usize,
}

impl Shape {
    /// Most positions that a query can see: the chosen pools and an open pool's tokens.
    pub const fn most_keys(&self) -> usize {
        self.top + self.pool - 1
    }
}

/// Token rows `[normed key | gate]` of projections `key [R, dI]` and `gate [R, dI]`. The norm takes the mean away.
///
/// # Panics
/// When the shapes do not fit.
pub fn token_rows(key: Rows<'_>, gate: Rows<'_>, weight: &[f32], bias: &[f32], eps: f32, out: RowsMut<'_>) {
    assert_eq!(out.cols(), 2 * key.cols(), "indexer tokens: width of the rows");
    assert_eq!((gate.rows(), gate.cols()), (key.rows(), key.cols()), "indexer tokens: keys and gates");
    let (keys, mut gates) = out.split_columns_at(key.cols());
    layer(key, weight, bias, eps, keys);
    for r in 0..gate.rows() {
        gates.row_mut(r).copy_from_slice(gate.row(r));
    }
}

kernel! {
    fn pool[][](tokens: Rows<'a>, ape: &'a [f32], out: &'a mut [f32]) -> () {
        let width = out.len();
        let count = tokens.rows();
        let mut share = scratch::zeros::<f32>(count * width);
        let mut top = scratch::zeros::<f32>(width);
        top.fill(f32::NEG_INFINITY);
        for j in 0..count {
            let gate = &tokens.row(j)[width..];
            let row = &mut share[j * width..(j + 1) * width];
            for (((s, t), g), a) in row.iter_mut().zip(top.iter_mut()).zip(gate).zip(&ape[j * width..]) {
                *s = g + a;
                *t = if *s > *t { *s } else { *t };
            }
        }
        let mut total = scratch::zeros::<f32>(width);
        for row in share.chunks_exact_mut(width) {
            for ((s, t), sum) in row.iter_mut().zip(top.iter()).zip(total.iter_mut()) {
                *s = exp(*s - t);
                *sum += *s;
            }
        }
        out.fill(0.0);
        for (j, row) in share.chunks_exact(width).enumerate() {
            let key = tokens.row(j);
            for (((o, s), t), k) in out.iter_mut().zip(row).zip(total.iter()).zip(key) {
                *o = (s / t).mul_add(*k, *o);
            }
        }
    }
}

/// Key of a pool, from its token rows `[kp, 2*dI]` and the table of places `ape [kp, dI]`.
///
/// # Panics
/// When the shapes do not fit.
pub fn pool_key(tokens: Rows<'_>, ape: &[f32], out: &mut [f32]) {
    assert_eq!(tokens.cols(), 2 * out.len(), "pool key: width of the token rows");
    assert_eq!(ape.len(), tokens.rows() * out.len(), "pool key: table of places");
    pool(tokens, ape, out);
}

/// Pools of a register tile.
const TILE: usize = 6;
/// Pools of one task.
const CHUNK: usize = 1024;

/// A query row, its heads side by side: panels `[ceil(HI/16)][dI][16]` and the weights of the heads, padded with zeros.
struct Query {
    panels: Scratch<[f32; PANEL]>,
    weights: Scratch<[f32; PANEL]>,
}

impl Query {
    fn new(shape: Shape, q: &[f32], w: &[f32]) -> Self {
        let count = shape.heads.div_ceil(PANEL);
        let mut panels = scratch::zeros::<[f32; PANEL]>(count * shape.width);
        let mut weights = scratch::zeros::<[f32; PANEL]>(count);
        let root = 1.0 / (shape.heads as f32).sqrt();
        for (h, q) in q.chunks_exact(shape.width).enumerate() {
            weights[h / PANEL][h % PANEL] = w[h] * root;
            for (slot, q) in panels[h / PANEL * shape.width..].iter_mut().zip(q) {
                slot[h % PANEL] = *q;
            }
        }
        Self { panels, weights }
    }
}

#[inline(always)]
fn score_tile<const R: usize>(pools: [&[f32]; R], query: &Query, scale: f32) -> [f32; R] {
    let width = pools[0].len();
    let pools: [&[f32]; R] = std::array::from_fn(|r| &pools[r][..width]);
    let mut lanes = [[0.0f32; PANEL]; R];
    for (panel, weights) in query.panels.chunks_exact(width).zip(query.weights.iter()) {
        let mut acc = [[0.0f32; PANEL]; R];
        for d in 0..width {
            for r in 0..R {
                for c in 0..PANEL {
                    acc[r][c] = pools[r][d].mul_add(panel[d][c], acc[r][c]);
                }
            }
        }
        for r in 0..R {
            for c in 0..PANEL {
                let dot = acc[r][c] * scale;
                let dot = if dot > 0.0 { dot } else { 0.0 };
                lanes[r][c] = weights[c].mul_add(dot, lanes[r][c]);
            }
        }
    }
    let mut scores = [0.0; R];
    for r in 0..R {
        let mut half = PANEL / 2;
        while half > 0 {
            for c in 0..half {
                lanes[r][c] += lanes[r][c + half];
            }
            half /= 2;
        }
        scores[r] = lanes[r][0];
    }
    scores
}

kernel! {
    fn score_pools[][](query: &'a Query, pools: Rows<'a>, scale: f32, out: &'a mut [f32]) -> () {
        let mut at = 0;
        while at + TILE <= out.len() {
            let rows: [&[f32]; TILE] = std::array::from_fn(|r| pools.row(at + r));
            out[at..at + TILE].copy_from_slice(&score_tile(rows, query, scale));
            at += TILE;
        }
        while at < out.len() {
            out[at] = score_tile([pools.row(at)], query, scale)[0];
            at += 1;
        }
    }
}

/// Scores of the pools `[B, dI]` for one query row `q [HI*dI]` with head weights `w [HI]`:
/// `Σ_h w_h HI^(-1/2) relu(dI^(-1/2) q_h · K_b)`.
///
/// # Panics
/// When the shapes do not fit.
pub fn scores(shape: Shape, q: &[f32], w: &[f32], pools: Rows<'_>, out: &mut [f32]) {
    assert_eq!((q.len(), w.len()), (shape.heads * shape.width, shape.heads), "index scores: query");
    assert_eq!(pools.rows(), out.len(), "index scores: pools and output");
    assert!(out.is_empty() || pools.cols() == shape.width, "index scores: width of the pool keys");
    let query = Query::new(shape, q, w);
    let scale = 1.0 / (shape.width as f32).sqrt();
    let work = out.len() * q.len();
    par::each(out.chunks_mut(CHUNK), work, |i, out: &mut [f32]| {
        score_pools(&query, pools.range(i * CHUNK, out.len()), scale, out);
    });
}

/// The `count` best of `scores` by index, ascending; ties go to the lower index.
pub fn best_pools(scores: &[f32], count: usize) -> Vec<u32> {
    if count >= scores.len() {
        return (0..scores.len() as u32).collect();
    }
    if count == 0 {
        return Vec::new();
    }
    let mut keys: Vec<u64> =
        scores.iter().enumerate().map(|(i, s)| u64::from(!ordered(*s)) << 32 | i as u64).collect();
    keys.select_nth_unstable(count - 1);
    let mut ids: Vec<u32> = keys[..count].iter().map(|key| *key as u32).collect();
    ids.sort_unstable();
    ids
}

/// Positions that the query row at `position` sees, ascending, into `out` (filled up with -1); how many.
/// `pools` must hold at least the complete pools of the row.
///
/// # Panics
/// When the shapes do not fit or `out` is too short for the positions.
pub fn select(
    shape: Shape,
    position: usize,
    q: &[f32],
    w: &[f32],
    pools: Rows<'_>,
    out: &mut [i32],
) -> usize {
    let visible = position + 1;
    let full = visible / shape.pool;
    let budget = shape.top / shape.pool;
    let mut count = 0;
    let mut push = |id: usize| {
        out[count] = id as i32;
        count += 1;
    };
    if full <= budget {
        (0..visible).for_each(&mut push);
    } else {
        let mut values = scratch::zeros::<f32>(full);
        scores(shape, q, w, pools.range(0, full), &mut values);
        for pool in best_pools(&values, budget) {
            (0..shape.pool).for_each(|j| push(pool as usize * shape.pool + j));
        }
        (full * shape.pool..visible).for_each(&mut push);
    }
    out[count..].fill(-1);
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::testing::{bits, close, random};
    use crate::cpu::simd::both_paths;
    use proptest::prelude::*;

    const SHAPE: Shape = Shape { heads: 18, width: 20, pool: 4, top: 32 };

    fn score(shape: Shape, q: &[f32], w: &[f32], pools: &[f32]) -> Vec<f32> {
        let pools = Rows::new(pools, shape.width);
        let mut out = vec![f32::NAN; pools.rows()];
        scores(shape, q, w, pools, &mut out);
        out
    }

    #[test]
    fn scores_match_double_precision() {
        for shape in [SHAPE, Shape { heads: 32, width: 128, ..SHAPE }, Shape { heads: 1, width: 3, ..SHAPE }]
        {
            let (q, w) = (random(1, shape.heads * shape.width), random(2, shape.heads));
            let pools = random(3, 50 * shape.width);
            let want: Vec<f64> = pools
                .chunks_exact(shape.width)
                .map(|key| {
                    let heads = q.chunks_exact(shape.width).zip(&w);
                    heads
                        .map(|(q, w)| {
                            let dot: f64 =
                                q.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                            let root = (shape.width as f64).sqrt() * (shape.heads as f64).sqrt();
                            f64::from(*w) * dot.max(0.0) / root
                        })
                        .sum()
                })
                .collect();
            close(&score(shape, &q, &w, &pools), &want, 2e-6, "index scores");
        }
    }

    #[test]
    fn pool_keys_match_double_precision() {
        let (d, kp) = (21, 4);
        let (key, gate, ape) = (random(1, kp * d), random(2, kp * d), random(3, kp * d));
        let (w, b) = (random(4, d), random(5, d));
        let mut tokens = vec![0.0; kp * 2 * d];
        let view = RowsMut::new(&mut tokens, 2 * d);
        token_rows(Rows::new(&key, d), Rows::new(&gate, d), &w, &b, 1e-6, view);
        let mut got = vec![0.0; d];
        pool_key(Rows::new(&tokens, 2 * d), &ape, &mut got);
        let want: Vec<f64> = (0..d)
            .map(|c| {
                let e = |j: usize| (f64::from(gate[j * d + c]) + f64::from(ape[j * d + c])).exp();
                let total: f64 = (0..kp).map(e).sum();
                (0..kp).map(|j| e(j) / total * f64::from(tokens[j * 2 * d + c])).sum()
            })
            .collect();
        close(&got, &want, 1e-6, "pool key");
        let row = &tokens[..d];
        let mean: f32 = row.iter().zip(&w).zip(&b).map(|((v, w), b)| (v - b) / w).sum::<f32>() / d as f32;
        assert!(mean.abs() < 1e-4, "the layer norm takes the mean away: {mean}");
    }

    #[test]
    fn ties_keep_the_lower_pools() {
        assert_eq!(best_pools(&[0.0, 1.0, 0.0, -0.0, 1.0, 0.0], 4), [0, 1, 2, 4]);
        assert_eq!(best_pools(&[f32::NAN, -1.0, -2.0], 2), [1, 2]);
        assert_eq!(best_pools(&[3.0, 1.0], 5), [0, 1]);
        assert!(best_pools(&[1.0], 0).is_empty());
    }

    #[test]
    fn nothing_is_dropped_before_the_budget_and_the_tail_always_stays() {
        let pools = random(1, 20 * SHAPE.width);
        let (q, w) = (random(2, SHAPE.heads * SHAPE.width), random(3, SHAPE.heads));
        let mut out = vec![0; SHAPE.most_keys()];
        for position in 0..70 {
            let count = select(SHAPE, position, &q, &w, Rows::new(&pools, SHAPE.width), &mut out);
            let ids = &out[..count];
            assert!(ids.windows(2).all(|p| p[0] < p[1]) && out[count..].iter().all(|v| *v == -1));
            let n = position + 1;
            if n < SHAPE.top + SHAPE.pool {
                assert_eq!(count, n);
            } else {
                assert_eq!(count, SHAPE.top + n % SHAPE.pool);
                let tail: Vec<i32> = (n / 4 * 4..n).map(|t| t as i32).collect();
                assert_eq!(ids[SHAPE.top..], tail);
                // Each chosen pool scores at least as high as each dropped one.
                let values = score(SHAPE, &q, &w, &pools[..n / 4 * SHAPE.width]);
                let chosen = |p: usize| ids[..SHAPE.top].contains(&(p as i32 * 4));
                let lowest =
                    (0..n / 4).filter(|p| chosen(*p)).map(|p| values[p]).fold(f32::INFINITY, f32::min);
                assert!((0..n / 4).filter(|p| !chosen(*p)).all(|p| values[p] <= lowest));
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_score_depends_on_its_pool_only(count in 1usize..70, heads in 1usize..40, width in 1usize..70, seed in 0u64..999) {
            let shape = Shape { heads, width, ..SHAPE };
            let (q, w) = (random(seed, heads * width), random(seed + 1, heads));
            let pools = random(seed + 2, count * width);
            let (scalar, all) = both_paths(|| score(shape, &q, &w, &pools));
            prop_assert_eq!(bits(&scalar), bits(&all));
            for (i, key) in pools.chunks_exact(width).enumerate() {
                prop_assert_eq!(score(shape, &q, &w, key)[0].to_bits(), all[i].to_bits());
            }
        }
    }
}

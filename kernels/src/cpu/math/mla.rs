//! Latent attention in its per-head form: latents are expanded once to keys and values per head, then plain attention.

use super::num::{dot_inline, exp_scores_inline};
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::simd::kernel;

/// Sizes of a layer (of one rank). A cache row is, head by head, `key` channels of the key then `value` of the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// H.
    pub heads: usize,
    /// Channels of a key.
    pub key: usize,
    /// Channels of a value.
    pub value: usize,
}

impl Shape {
    /// Numbers of a cache row.
    pub const fn row_len(&self) -> usize {
        self.heads * (self.key + self.value)
    }
}

/// The positions that a query sees, ascending. The same positions give the same bits in either form.
#[derive(Clone, Copy, Debug)]
pub enum Keys<'a> {
    /// All positions below this.
    Below(usize),
    /// These, ascending.
    Listed(&'a [i32]),
}

impl Keys<'_> {
    #[inline(always)]
    fn len(&self) -> usize {
        match self {
            Keys::Below(n) => *n,
            Keys::Listed(ids) => ids.len(),
        }
    }
    #[inline(always)]
    fn at(&self, i: usize) -> usize {
        match self {
            Keys::Below(_) => i,
            Keys::Listed(ids) => ids[i] as usize,
        }
    }
}

/// Value channels that are summed at a time.
const VALUES: usize = 64;

kernel! {
    /// One query row and head. `out_c` is the chain of fused multiply-adds over the keys in order, over their sum.
    fn attend[][](
        q: &'a [f32], kv: Rows<'a>, column: usize, shape: Shape, keys: Keys<'a>, scale: f32,
        scores: &'a mut [f32], out: &'a mut [f32],
    ) -> () {
        let n = keys.len();
        let scores = &mut scores[..n];
        for (i, s) in scores.iter_mut().enumerate() {
            let key = &kv.row(keys.at(i))[column..column + shape.key];
            *s = dot_inline(q, key) * scale;
        }
        let inverse = 1.0 / exp_scores_inline(scores);
        let values = column + shape.key;
        let (blocks, rest) = out.as_chunks_mut::<VALUES>();
        let done = blocks.len() * VALUES;
        for (b, out) in blocks.iter_mut().enumerate() {
            let mut acc = [0.0f32; VALUES];
            for i in 0..n {
                let p = scores[i];
                let row = &kv.row(keys.at(i))[values + b * VALUES..];
                let Some(v) = row.first_chunk::<VALUES>() else { break };
                for c in 0..VALUES {
                    acc[c] = p.mul_add(v[c], acc[c]);
                }
            }
            for c in 0..VALUES {
                out[c] = acc[c] * inverse;
            }
        }
        rest.fill(0.0);
        for i in 0..n {
            let p = scores[i];
            let row = &kv.row(keys.at(i))[values + done..];
            for (o, v) in rest.iter_mut().zip(row) {
                *o = p.mul_add(*v, *o);
            }
        }
        for o in rest.iter_mut() {
            *o *= inverse;
        }
    }
}

/// Rows of one task.
const ROWS: usize = 16;

/// Attention of every query row `q [R, H*key]` over its keys in `kv [positions, H*(key+value)]` into `out [R, H*value]`.
/// Softmax in f32; `keys(r)` are the positions of row r.
///
/// # Panics
/// When the shapes do not fit, a listed position is not in `kv`, or a row has no key.
pub fn attention<'k>(
    q: Rows<'_>,
    kv: Rows<'_>,
    shape: Shape,
    keys: impl Fn(usize) -> Keys<'k> + Sync,
    scale: f32,
    out: RowsMut<'_>,
) {
    assert_eq!(
        (q.cols(), kv.cols(), out.cols()),
        (shape.heads * shape.key, shape.row_len(), shape.heads * shape.value),
        "attention: widths"
    );
    assert_eq!(q.rows(), out.rows(), "attention: rows of query and output");
    let mut work = 0;
    for r in 0..q.rows() {
        let keys = keys(r);
        assert!(keys.len() > 0, "attention: row {r} has no key");
        let last = match keys {
            Keys::Below(n) => n - 1,
            Keys::Listed(ids) => ids[ids.len() - 1] as usize,
        };
        assert!(last < kv.rows(), "attention: row {r} asks for position {last} of {}", kv.rows());
        work += keys.len() * shape.row_len();
    }
    let mut tasks = Vec::new();
    for (block, out) in out.row_pieces(ROWS).into_iter().enumerate() {
        for (head, out) in out.column_pieces(shape.value).into_iter().enumerate() {
            tasks.push((block, head, out));
        }
    }
    par::each(tasks, work, |_, (block, head, mut out)| {
        let first = block * ROWS;
        let most = (0..out.rows()).map(|r| keys(first + r).len()).max().unwrap_or(0);
        let mut scores = vec![0.0f32; most];
        for r in 0..out.rows() {
            let q = &q.row(first + r)[head * shape.key..(head + 1) * shape.key];
            let column = head * (shape.key + shape.value);
            attend(q, kv, column, shape, keys(first + r), scale, &mut scores, out.row_mut(r));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::testing::{bits, close, random};
    use crate::cpu::simd::both_paths;
    use proptest::prelude::*;

    fn run<'k>(
        q: &[f32],
        kv: &[f32],
        shape: Shape,
        keys: impl Fn(usize) -> Keys<'k> + Sync,
    ) -> Vec<f32> {
        let q = Rows::new(q, shape.heads * shape.key);
        let mut out = vec![f32::NAN; q.rows() * shape.heads * shape.value];
        let view = RowsMut::new(&mut out, shape.heads * shape.value);
        attention(q, Rows::new(kv, shape.row_len()), shape, keys, 0.37, view);
        out
    }

    fn reference(q: &[f32], kv: &[f32], s: Shape, keys: &[i32]) -> Vec<f64> {
        let mut out = Vec::new();
        for h in 0..s.heads {
            let row = |t: i32| &kv[t as usize * s.row_len() + h * (s.key + s.value)..][..s.key + s.value];
            let score = |t: i32| {
                let dot: f64 =
                    (0..s.key).map(|d| f64::from(q[h * s.key + d]) * f64::from(row(t)[d])).sum();
                (dot * 0.37).exp()
            };
            let total: f64 = keys.iter().map(|t| score(*t)).sum();
            for v in 0..s.value {
                let sum: f64 = keys.iter().map(|t| score(*t) * f64::from(row(*t)[s.key + v])).sum();
                out.push(sum / total);
            }
        }
        out
    }

    #[test]
    fn matches_double_precision() {
        for shape in [
            Shape { heads: 2, key: 32, value: 32 },
            Shape { heads: 1, key: 256, value: 256 },
            Shape { heads: 3, key: 5, value: 70 },
        ] {
            let n = 77;
            let q = random(1, shape.heads * shape.key);
            let kv = random(2, n * shape.row_len());
            let all: Vec<i32> = (0..n as i32).collect();
            close(&run(&q, &kv, shape, |_| Keys::Below(n)), &reference(&q, &kv, shape, &all), 2e-6, "dense");
            let some: Vec<i32> = all.iter().copied().filter(|i| i % 3 != 1).collect();
            let got = run(&q, &kv, shape, |_| Keys::Listed(&some));
            close(&got, &reference(&q, &kv, shape, &some), 2e-6, "sparse");
        }
    }

    #[test]
    fn one_key_gives_its_value() {
        let shape = Shape { heads: 1, key: 4, value: 3 };
        let kv = random(5, 2 * shape.row_len());
        let out = run(&random(6, 4), &kv, shape, |_| Keys::Listed(&[1]));
        assert_eq!(out, kv[shape.row_len() + 4..][..3]);
    }

    #[test]
    #[should_panic(expected = "asks for position 9 of 2")]
    fn a_position_outside_the_cache_is_refused() {
        let shape = Shape { heads: 1, key: 4, value: 3 };
        run(&random(6, 4), &random(5, 2 * shape.row_len()), shape, |_| Keys::Listed(&[0, 9]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn bits_depend_on_the_key_set_only(rows in 1usize..=64, start in 0usize..90, seed in 0u64..1000) {
            let shape = Shape { heads: 3, key: 33, value: 68 };
            let n = start + rows;
            let q = random(seed, rows * shape.heads * shape.key);
            let kv = random(seed + 1, n * shape.row_len());
            let ids: Vec<i32> = (0..n as i32).collect();
            let (scalar, dense) = both_paths(|| run(&q, &kv, shape, |r| Keys::Below(start + r + 1)));
            prop_assert_eq!(bits(&scalar), bits(&dense));
            let listed = run(&q, &kv, shape, |r| Keys::Listed(&ids[..=start + r]));
            prop_assert_eq!(bits(&listed), bits(&dense));
            for r in 0..rows {
                let q = &q[r * shape.heads * shape.key..][..shape.heads * shape.key];
                let alone = run(q, &kv, shape, |_| Keys::Below(start + r + 1));
                let width = shape.heads * shape.value;
                prop_assert_eq!(bits(&alone), bits(&dense[r * width..][..width]));
            }
        }
    }
}

//! Latent attention in its per-head form: latents are expanded once to keys and values per head, then plain attention.

use smallvec::SmallVec;

use super::num::{dot_inline, exp, max_inline, sum_inline};
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::scratch;
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

/// Where a head's channels lie in a cache row.
#[derive(Clone, Copy, Debug)]
struct Layout {
    heads: usize,
    key: usize,
    value: usize,
    /// From a head's key to the next head's; 0 where all heads read the same channels.
    step: usize,
    /// From a head's key to its value.
    gap: usize,
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

/// Rows that share a pass over the keys.
const ROWS: usize = 16;
/// Keys of a tile.
const TILE: usize = 16;
/// Keys that are added to the outputs at a time.
const KEYS: usize = 4;
/// Value channels that are summed at a time.
const VALUES: usize = 32;
/// Half of them: arrays of this length stay in vector registers.
const HALF: usize = VALUES / 2;

/// `out += Σ p_i v_i` over as many keys, each channel in key order.
#[inline(always)]
fn add_values<const K: usize>(p: [f32; K], v: [&[f32]; K], out: &mut [f32]) {
    let width = out.len();
    let v: [&[f32]; K] = std::array::from_fn(|i| &v[i][..width]);
    let (whole, rest) = out.as_chunks_mut::<HALF>();
    let mut at = 0;
    let (pairs, single) = whole.as_chunks_mut::<2>();
    for out in pairs {
        let mut acc = *out;
        for i in 0..K {
            if let [v] = v[i][at..at + VALUES].as_chunks::<HALF>().0.as_chunks::<2>().0 {
                for h in 0..2 {
                    for c in 0..HALF {
                        acc[h][c] = p[i].mul_add(v[h][c], acc[h][c]);
                    }
                }
            }
        }
        *out = acc;
        at += VALUES;
    }
    for o in single.as_flattened_mut().iter_mut().chain(rest) {
        for i in 0..K {
            *o = p[i].mul_add(v[i][at], *o);
        }
        at += 1;
    }
}

kernel! {
    /// Neighbouring heads of rows that see the first so many of the same keys. Keys are passed once, in tiles, all heads
    /// of a key together (they lie side by side in memory). Queries and outputs are `[head][row][channel]`: at their
    /// distance in the model's rows they would push each other out of the cache.
    ///
    /// Per row and head, tile by tile: scores; if the largest score so far grew, what was summed is scaled down; the
    /// numerators are added to their sum; each channel of the output is continued by a chain of fused multiply-adds over
    /// the tile's keys in order. At the end it is divided by the sum.
    fn attend[][](
        q: &'a [f32], kv: Rows<'a>, shape: Layout, keys: Keys<'a>, seen: &'a [usize], scale: f32, out: &'a mut [f32],
    ) -> () {
        let (step, gap, rows, n) = (shape.step, shape.gap, seen.len(), keys.len());
        let heads = shape.heads;
        let mut scores = scratch::zeros::<[f32; TILE]>(heads * rows);
        let mut tops = scratch::zeros::<f32>(heads * rows);
        tops.fill(f32::NEG_INFINITY);
        let mut sums = scratch::zeros::<f32>(heads * rows);
        out.fill(0.0);
        let mut first = 0;
        while first < n {
            let count = if n - first < TILE { n - first } else { TILE };
            // What lies beyond the last key is not used.
            let tile: [&[f32]; TILE] =
                std::array::from_fn(|j| kv.row(keys.at(if j < count { first + j } else { first })));
            for h in 0..heads {
                // A few keys for all rows, then the next few: as many as can be fetched at once and, at their distance in
                // memory, stay in the cache together.
                let mut j = 0;
                while j < count {
                    for r in 0..rows {
                        let at = h * rows + r;
                        let q = &q[at * shape.key..][..shape.key];
                        for j in j..j + KEYS {
                            if j < count && first + j < seen[r] {
                                let key = &tile[j][h * step..h * step + shape.key];
                                scores[at][j] = dot_inline(q, key) * scale;
                            }
                        }
                    }
                    j += KEYS;
                }
                for r in 0..rows {
                    if seen[r] <= first {
                        continue;
                    }
                    let at = h * rows + r;
                    let mine = if seen[r] - first < count { seen[r] - first } else { count };
                    let p = &mut scores[at][..mine];
                    let out = &mut out[at * shape.value..][..shape.value];
                    let best = max_inline(p);
                    let top = if best > tops[at] { best } else { tops[at] };
                    let shrink = exp(tops[at] - top);
                    for p in p.iter_mut() {
                        *p = exp(*p - top);
                    }
                    sums[at] = sums[at].mul_add(shrink, sum_inline(p));
                    tops[at] = top;
                    if shrink != 1.0 {
                        for o in out.iter_mut() {
                            *o *= shrink;
                        }
                    }
                }
                let mut i = 0;
                while i < count {
                    let values: [&[f32]; KEYS] =
                        std::array::from_fn(|j| &tile[i + j][h * step + gap..h * step + gap + shape.value]);
                    for r in 0..rows {
                        let left = if seen[r] > first + i { seen[r] - first - i } else { 0 };
                        let left = if left < count - i { left } else { count - i };
                        let at = h * rows + r;
                        let p = &scores[at][i..];
                        let out = &mut out[at * shape.value..][..shape.value];
                        if left >= KEYS {
                            add_values([p[0], p[1], p[2], p[3]], values, out);
                        } else {
                            for (p, v) in p[..left].iter().zip(values) {
                                add_values([*p], [v], out);
                            }
                        }
                    }
                    i += KEYS;
                }
            }
            first += count;
        }
        for (out, sum) in out.chunks_exact_mut(shape.value).zip(sums.iter()) {
            let inverse = 1.0 / sum;
            for o in out.iter_mut() {
                *o *= inverse;
            }
        }
    }
}

/// Blocks of a call of a decode step, and half its tasks.
const FEW: usize = 8;

/// Rows `first .. first + rows` of a call share their keys: those of the last of them.
struct Block {
    first: usize,
    rows: usize,
}

/// Rows that can share a pass: each sees the first so many positions; a row with a list is alone.
fn blocks<'k>(rows: usize, keys: &impl Fn(usize) -> Keys<'k>) -> SmallVec<[Block; FEW]> {
    let mut blocks: SmallVec<[Block; FEW]> = SmallVec::new();
    let mut open = false;
    for r in 0..rows {
        let shared = matches!(keys(r), Keys::Below(_));
        match blocks.last_mut() {
            Some(last) if open && shared && last.rows < ROWS => last.rows += 1,
            _ => blocks.push(Block { first: r, rows: 1 }),
        }
        open = shared;
    }
    blocks
}

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
    assert_eq!(kv.cols(), shape.row_len(), "attention: width of a cache row");
    let Shape { heads, key, value } = shape;
    let layout = Layout { heads, key, value, step: key + value, gap: key };
    attention_in(q, kv, layout, keys, scale, out);
}

/// As [`attention`], where a cache row is one latent that is the key and the value of every head:
/// `q [R, heads*width]` over `latents [positions, width]` into `out [R, heads*width]`.
///
/// # Panics
/// As [`attention`].
pub fn latent_attention<'k>(
    q: Rows<'_>,
    latents: Rows<'_>,
    heads: usize,
    keys: impl Fn(usize) -> Keys<'k> + Sync,
    scale: f32,
    out: RowsMut<'_>,
) {
    let width = latents.cols();
    attention_in(q, latents, Layout { heads, key: width, value: width, step: 0, gap: 0 }, keys, scale, out);
}

fn attention_in<'k>(
    q: Rows<'_>,
    kv: Rows<'_>,
    shape: Layout,
    keys: impl Fn(usize) -> Keys<'k> + Sync,
    scale: f32,
    out: RowsMut<'_>,
) {
    assert_eq!(
        (q.cols(), out.cols()),
        (shape.heads * shape.key, shape.heads * shape.value),
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
        work += keys.len() * shape.heads * (shape.key + shape.value);
    }
    let blocks = blocks(q.rows(), &keys);
    let mut tasks: SmallVec<[_; 2 * FEW]> = SmallVec::new();
    let mut rest = out;
    for block in &blocks {
        let (out, after) = rest.split_rows_at(block.rows);
        rest = after;
        // Several heads a task, as long as every thread has some and the block's queries stay in the cache.
        let most = if block.rows == 1 { 8 } else { 2 };
        let group = (shape.heads * blocks.len() / (4 * par::threads())).clamp(1, most);
        for (i, out) in out.column_pieces(group * shape.value).enumerate() {
            tasks.push((block, i * group, out));
        }
    }
    par::each(tasks, work, |_, (block, head, mut out)| {
        let seen: SmallVec<[usize; ROWS]> = (0..block.rows).map(|r| keys(block.first + r).len()).collect();
        let longest = seen.iter().copied().max().unwrap_or(0);
        let shared = match keys(block.first) {
            Keys::Below(_) => Keys::Below(longest),
            listed @ Keys::Listed(_) => listed,
        };
        let heads = out.cols() / shape.value;
        let mut packed = scratch::zeros::<f32>(heads * block.rows * shape.key);
        let mut queries = packed.chunks_exact_mut(shape.key);
        for h in head..head + heads {
            for (r, query) in (block.first..block.first + block.rows).zip(&mut queries) {
                query.copy_from_slice(&q.row(r)[h * shape.key..(h + 1) * shape.key]);
            }
        }
        let kv = if shape.step > 0 { kv.columns(head * shape.step, heads * shape.step) } else { kv };
        let mut sums = scratch::zeros::<f32>(heads * block.rows * shape.value);
        attend(&packed, kv, Layout { heads, ..shape }, shared, &seen, scale, &mut sums);
        for (at, sums) in sums.chunks_exact(shape.value).enumerate() {
            let (h, r) = (at / block.rows, at % block.rows);
            out.row_mut(r)[h * shape.value..(h + 1) * shape.value].copy_from_slice(sums);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::testing::{bits, close, random};
    use crate::cpu::simd::both_paths;
    use proptest::prelude::*;

    fn run<'k>(q: &[f32], kv: &[f32], shape: Shape, keys: impl Fn(usize) -> Keys<'k> + Sync) -> Vec<f32> {
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
                let dot: f64 = (0..s.key).map(|d| f64::from(q[h * s.key + d]) * f64::from(row(t)[d])).sum();
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

//! Hyper-connections: how a block reads the residual streams and writes them back.

use super::dense::{PackedMatrix, matmul};
use super::norm::rms_in_place_inline;
use super::num::{dot_inline, exp, sigmoid};
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::scratch;
use crate::cpu::simd::kernel;

/// Most streams.
pub const MAX_STREAMS: usize = 8;

/// Rows of the mixing matrix: N for pre, N for post, N * N for comb.
pub const fn mixes(streams: usize) -> usize {
    (2 + streams) * streams
}

kernel! {
    fn square_sums[][](x: Rows<'a>, out: RowsMut<'a>) -> () {
        let mut out = out;
        for r in 0..x.rows() {
            let row = x.row(r);
            out.row_mut(r)[0] = dot_inline(row, row);
        }
    }
}

/// `x [R, N*D]` to `out [R, (2+N)*N + 1]`: the products with `mix`, then the sum of squares of the row.
///
/// # Panics
/// When the shapes do not fit.
pub fn dots(x: Rows<'_>, mix: PackedMatrix<'_>, out: RowsMut<'_>) {
    assert_eq!(out.cols(), mix.n() + 1, "hc dots: width of the output");
    let (products, squares) = out.split_columns_at(mix.n());
    matmul(x, mix, None, products);
    square_sums(x, squares);
}

/// The fixed part of one hyper-connection.
#[derive(Clone, Copy, Debug)]
pub struct Mix<'a> {
    /// N.
    pub streams: usize,
    /// Normalization steps over the columns of comb.
    pub sinkhorn: usize,
    /// `[(2+N)*N]`.
    pub base: &'a [f32],
    /// One scalar each for pre, post and comb.
    pub scale: &'a [f32],
    /// Norm of the block's input, `[D]`.
    pub norm: &'a [f32],
    /// Of the norms.
    pub rms_eps: f32,
    /// Of pre and comb.
    pub hc_eps: f32,
}

/// Coefficients of one row: pre, post, comb (row i: stream i into stream j).
#[inline(always)]
fn coefficients(
    dots: &[f32],
    width: usize,
    mix: &Mix<'_>,
    pre: &mut [f32; MAX_STREAMS],
    post: &mut [f32],
    comb: &mut [f32],
) {
    let n = mix.streams;
    let count = mixes(n);
    let r = 1.0 / (dots[count] / width as f32 + mix.rms_eps).sqrt();
    let at = |i: usize, scale: f32| (dots[i] * r).mul_add(scale, mix.base[i]);
    for i in 0..n {
        pre[i] = sigmoid(at(i, mix.scale[0])) + mix.hc_eps;
        post[i] = 2.0 * sigmoid(at(n + i, mix.scale[1]));
    }
    for i in 0..n {
        let row = &mut comb[i * n..(i + 1) * n];
        let mut top = f32::NEG_INFINITY;
        for (j, c) in row.iter_mut().enumerate() {
            *c = at(2 * n + i * n + j, mix.scale[2]);
            top = if *c > top { *c } else { top };
        }
        let mut total = 0.0;
        for c in row.iter_mut() {
            *c = exp(*c - top);
            total += *c;
        }
        for c in row.iter_mut() {
            *c = *c / total + mix.hc_eps;
        }
    }
    for step in 0..mix.sinkhorn {
        if step > 0 {
            for row in comb.chunks_exact_mut(n) {
                let mut total = 0.0;
                for c in row.iter() {
                    total += c;
                }
                for c in row.iter_mut() {
                    *c /= total + mix.hc_eps;
                }
            }
        }
        for j in 0..n {
            let mut total = 0.0;
            for i in 0..n {
                total += comb[i * n + j];
            }
            for i in 0..n {
                comb[i * n + j] /= total + mix.hc_eps;
            }
        }
    }
}

kernel! {
    fn finish_rows[][](
        dots: Rows<'a>, x: Rows<'a>, mix: Mix<'a>, h: RowsMut<'a>, post: RowsMut<'a>, comb: RowsMut<'a>,
    ) -> () {
        let (mut h, mut post, mut comb) = (h, post, comb);
        for r in 0..x.rows() {
            let (x, h) = (x.row(r), h.row_mut(r));
            let mut pre = [0.0; MAX_STREAMS];
            coefficients(dots.row(r), x.len(), &mix, &mut pre, post.row_mut(r), comb.row_mut(r));
            let width = h.len();
            h.fill(0.0);
            for n in 0..mix.streams {
                let p = pre[n];
                for (h, x) in h.iter_mut().zip(&x[n * width..(n + 1) * width]) {
                    *h = p.mul_add(*x, *h);
                }
            }
            rms_in_place_inline(h, mix.norm, mix.rms_eps);
        }
    }
}

/// What a block reads: `dots` of [`dots`] and `x [R, N*D]` to the collapsed and normed `h [R, D]`, `post [R, N]` and
/// `comb [R, N*N]`.
///
/// # Panics
/// When the shapes do not fit or there are more than [`MAX_STREAMS`] streams.
pub fn finish(
    dots: Rows<'_>,
    x: Rows<'_>,
    mix: Mix<'_>,
    h: RowsMut<'_>,
    post: RowsMut<'_>,
    comb: RowsMut<'_>,
) {
    let n = mix.streams;
    assert!((1..=MAX_STREAMS).contains(&n), "hc finish: {n} streams, 1 to {MAX_STREAMS} supported");
    assert_eq!(dots.cols(), mixes(n) + 1, "hc finish: width of the dots");
    assert_eq!(x.cols(), n * h.cols(), "hc finish: width of x");
    assert_eq!((post.cols(), comb.cols()), (n, n * n), "hc finish: width of post and comb");
    assert_eq!((mix.base.len(), mix.scale.len()), (mixes(n), 3), "hc finish: base and scale");
    assert_eq!(mix.norm.len(), h.cols(), "hc finish: norm");
    let rows = x.rows();
    assert!(
        [dots.rows(), h.rows(), post.rows(), comb.rows()].iter().all(|r| *r == rows),
        "hc finish: rows of the operands"
    );
    let pieces = h.row_pieces(4).zip(post.row_pieces(4)).zip(comb.row_pieces(4));
    par::each(pieces, 2 * rows * x.cols() + 4000 * rows, |i, ((h, post), comb)| {
        let count = h.rows();
        finish_rows(dots.range(4 * i, count), x.range(4 * i, count), mix, h, post, comb);
    });
}

kernel! {
    fn post_rows[][](x: Rows<'a>, parts: Rows<'a>, post: Rows<'a>, comb: Rows<'a>, out: RowsMut<'a>) -> () {
        let mut out = out;
        let n = post.cols();
        let width = x.cols() / n;
        let mut y = scratch::zeros::<f32>(width);
        for r in 0..x.rows() {
            let (x, post, comb, out) = (x.row(r), post.row(r), comb.row(r), out.row_mut(r));
            let parts = parts.row(r);
            y.copy_from_slice(&parts[..width]);
            for part in parts[width..].chunks_exact(width) {
                for (y, p) in y.iter_mut().zip(part) {
                    *y += p;
                }
            }
            for (j, out) in out.chunks_exact_mut(width).enumerate() {
                let p = post[j];
                for (o, y) in out.iter_mut().zip(y.iter()) {
                    *o = p * y;
                }
                for i in 0..n {
                    let c = comb[i * n + j];
                    for (o, x) in out.iter_mut().zip(&x[i * width..(i + 1) * width]) {
                        *o = c.mul_add(*x, *o);
                    }
                }
            }
        }
    }
}

/// What a block writes: `out_j = post_j y + Σ_i comb_ij x_i`, with y the sum of `parts [R, P*D]` in order.
///
/// # Panics
/// When the shapes do not fit.
pub fn post(x: Rows<'_>, parts: Rows<'_>, post: Rows<'_>, comb: Rows<'_>, out: RowsMut<'_>) {
    let n = post.cols();
    assert!(n > 0 && comb.cols() == n * n && x.cols().is_multiple_of(n), "hc post: width of post and comb");
    let width = x.cols() / n;
    assert_eq!((x.rows(), x.cols()), (out.rows(), out.cols()), "hc post: input and output");
    assert!(
        parts.cols() >= width && parts.cols().is_multiple_of(width.max(1)),
        "hc post: width of the parts"
    );
    assert!(
        [parts.rows(), post.rows(), comb.rows()].iter().all(|r| *r == x.rows()),
        "hc post: rows of the operands"
    );
    let work = x.rows() * x.cols() * n;
    par::each(out.row_pieces(4), work, |i, out| {
        let (at, count) = (4 * i, out.rows());
        post_rows(
            x.range(at, count),
            parts.range(at, count),
            post.range(at, count),
            comb.range(at, count),
            out,
        );
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::dense::{Elements, pack_f32};
    use crate::cpu::math::testing::{bits, close, random};
    use crate::cpu::simd::both_paths;
    use proptest::prelude::*;

    struct Site {
        n: usize,
        d: usize,
        mix: Vec<f32>,
        base: Vec<f32>,
        scale: Vec<f32>,
        norm: Vec<f32>,
    }

    impl Site {
        fn new(n: usize, d: usize) -> Self {
            let base = random(2, mixes(n)).iter().map(|v| v * 2.0).collect();
            Self {
                n,
                d,
                mix: random(1, mixes(n) * n * d),
                base,
                scale: vec![0.3, 0.7, 1.1],
                norm: random(3, d),
            }
        }

        /// Rows of `[h | post | comb | x']`.
        fn run(&self, x: &[f32], y: &[f32], parts: usize) -> Vec<f32> {
            let (n, d) = (self.n, self.d);
            let packed = pack_f32(&self.mix, mixes(n), n * d);
            let packed = PackedMatrix::new(mixes(n), n * d, Elements::F32(&packed)).unwrap();
            let x = Rows::new(x, n * d);
            let mut products = vec![0.0; x.rows() * (mixes(n) + 1)];
            dots(x, packed, RowsMut::new(&mut products, mixes(n) + 1));
            let width = d + n + n * n + n * d;
            let mut out = vec![0.0; x.rows() * width];
            let (mut h, rest) = RowsMut::new(&mut out, width).split_columns_at(d);
            let (mut p, rest) = rest.split_columns_at(n);
            let (mut c, next) = rest.split_columns_at(n * n);
            let mix = Mix {
                streams: n,
                sinkhorn: 20,
                base: &self.base,
                scale: &self.scale,
                norm: &self.norm,
                rms_eps: 1e-5,
                hc_eps: 1e-6,
            };
            let products = Rows::new(&products, mixes(n) + 1);
            finish(products, x, mix, h.reborrow(), p.reborrow(), c.reborrow());
            post(x, Rows::new(y, parts * d), p.shared(), c.shared(), next);
            out
        }

        fn reference(&self, x: &[f32], y: &[f32]) -> Vec<f64> {
            let (n, d) = (self.n, self.d);
            let f = |v: f32| f64::from(v);
            let sig = |v: f64| 1.0 / (1.0 + (-v).exp());
            let ms = x.iter().map(|v| f(*v) * f(*v)).sum::<f64>() / (n * d) as f64;
            let r = 1.0 / (ms + 1e-5).sqrt();
            let m: Vec<f64> = self
                .mix
                .chunks_exact(n * d)
                .map(|w| w.iter().zip(x).map(|(w, x)| f(*w) * f(*x)).sum::<f64>() * r)
                .collect();
            let at = |i: usize, s: usize| m[i] * f(self.scale[s]) + f(self.base[i]);
            let pre: Vec<f64> = (0..n).map(|i| sig(at(i, 0)) + 1e-6).collect();
            let post: Vec<f64> = (0..n).map(|i| 2.0 * sig(at(n + i, 1))).collect();
            let mut c: Vec<Vec<f64>> = (0..n)
                .map(|i| {
                    let e: Vec<f64> = (0..n).map(|j| at(2 * n + i * n + j, 2).exp()).collect();
                    let total: f64 = e.iter().sum();
                    e.iter().map(|v| v / total + 1e-6).collect()
                })
                .collect();
            for step in 0..20 {
                if step > 0 {
                    for row in &mut c {
                        let total: f64 = row.iter().sum::<f64>() + 1e-6;
                        for v in row.iter_mut() {
                            *v /= total;
                        }
                    }
                }
                for j in 0..n {
                    let total: f64 = (0..n).map(|i| c[i][j]).sum::<f64>() + 1e-6;
                    (0..n).for_each(|i| c[i][j] /= total);
                }
            }
            let h: Vec<f64> = (0..d).map(|e| (0..n).map(|i| pre[i] * f(x[i * d + e])).sum()).collect();
            let r = 1.0 / (h.iter().map(|v| v * v).sum::<f64>() / d as f64 + 1e-5).sqrt();
            let mut out: Vec<f64> = h.iter().zip(&self.norm).map(|(h, w)| h * r * f(*w)).collect();
            out.extend(&post);
            out.extend(c.iter().flatten());
            for j in 0..n {
                for e in 0..d {
                    let sum: f64 = (0..n).map(|i| c[i][j] * f(x[i * d + e])).sum();
                    out.push(post[j] * y[e..].iter().step_by(d).map(|v| f(*v)).sum::<f64>() + sum);
                }
            }
            out
        }
    }

    #[test]
    fn matches_double_precision() {
        for (n, d, parts) in [(4, 33, 1), (4, 128, 2), (1, 16, 1), (2, 5, 3)] {
            let site = Site::new(n, d);
            let (x, y) = (random(7, n * d), random(8, parts * d));
            close(&site.run(&x, &y, parts), &site.reference(&x, &y), 3e-6, "hyper-connection");
        }
    }

    #[test]
    fn comb_ends_with_columns_of_sum_one() {
        let site = Site::new(4, 8);
        let out = site.run(&random(9, 32), &random(10, 8), 1);
        let comb = &out[8 + 4..8 + 4 + 16];
        for j in 0..4 {
            let total: f32 = (0..4).map(|i| comb[i * 4 + j]).sum();
            assert!((total - 1.0).abs() < 3e-6, "column {j}: {total}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn a_row_has_the_same_bits_in_any_company(rows in 1usize..=64, d in 1usize..60, seed in 0u64..1000) {
            let site = Site::new(4, d);
            let (x, y) = (random(seed, rows * 4 * d), random(seed + 1, rows * 2 * d));
            let (scalar, together) = both_paths(|| site.run(&x, &y, 2));
            prop_assert_eq!(bits(&scalar), bits(&together));
            let width = together.len() / rows;
            for r in 0..rows {
                let alone = site.run(&x[r * 4 * d..][..4 * d], &y[r * 2 * d..][..2 * d], 2);
                prop_assert_eq!(bits(&alone), bits(&together[r * width..][..width]));
            }
        }
    }
}

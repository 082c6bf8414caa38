//! RMS norm, layer norm, and means over streams.

use super::num::{dot_inline, sum_inline};
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::simd::kernel;

/// `out = x / sqrt(mean(x²) + eps)`, rounded, then times `weight`.
#[inline(always)]
pub(crate) fn rms_inline(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let r = 1.0 / (dot_inline(x, x) / x.len() as f32 + eps).sqrt();
    match weight {
        Some(weight) => {
            for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
                *o = v * r * w;
            }
        }
        None => {
            for (o, v) in out.iter_mut().zip(x) {
                *o = v * r;
            }
        }
    }
}

/// The same in place.
#[inline(always)]
pub(crate) fn rms_in_place_inline(x: &mut [f32], weight: &[f32], eps: f32) {
    let r = 1.0 / (dot_inline(x, x) / x.len() as f32 + eps).sqrt();
    for (v, w) in x.iter_mut().zip(weight) {
        *v = *v * r * w;
    }
}

kernel! {
    fn rms_rows[][](x: Rows<'a>, weight: Option<&'a [f32]>, eps: f32, out: RowsMut<'a>) -> () {
        let mut out = out;
        for r in 0..x.rows() {
            rms_inline(x.row(r), weight, eps, out.row_mut(r));
        }
    }
}

/// RMS norm of every row: `x / sqrt(mean(x²) + eps)`, rounded, then times the weight if there is one.
///
/// # Panics
/// When the shapes of `x`, `weight` and `out` differ.
pub fn rms(x: Rows<'_>, weight: Option<&[f32]>, eps: f32, out: RowsMut<'_>) {
    assert_eq!((x.rows(), x.cols()), (out.rows(), out.cols()), "rms: input and output");
    assert!(weight.is_none_or(|w| w.len() == x.cols()), "rms: weight and input");
    rms_rows(x, weight, eps, out);
}

kernel! {
    fn layer_rows[][](x: Rows<'a>, weight: &'a [f32], bias: &'a [f32], eps: f32, out: RowsMut<'a>) -> () {
        let mut out = out;
        let width = x.cols() as f32;
        for r in 0..x.rows() {
            let (row, out) = (x.row(r), out.row_mut(r));
            let mean = sum_inline(row) / width;
            for (o, v) in out.iter_mut().zip(row) {
                *o = v - mean;
            }
            let inverse = 1.0 / (dot_inline(out, out) / width + eps).sqrt();
            for ((o, w), b) in out.iter_mut().zip(weight).zip(bias) {
                *o = (*o * inverse).mul_add(*w, *b);
            }
        }
    }
}

/// Layer norm of every row: mean taken away, scaled to unit variance, times weight plus bias.
///
/// # Panics
/// When the shapes of `x`, `weight`, `bias` and `out` differ.
pub fn layer(x: Rows<'_>, weight: &[f32], bias: &[f32], eps: f32, out: RowsMut<'_>) {
    assert_eq!((x.rows(), x.cols()), (out.rows(), out.cols()), "layer norm: input and output");
    assert_eq!((weight.len(), bias.len()), (x.cols(), x.cols()), "layer norm: weight, bias and input");
    layer_rows(x, weight, bias, eps, out);
}

/// Mean over `streams` rows that lie one after another in `x`, added in stream order.
#[inline(always)]
fn mean_inline(x: &[f32], streams: usize, out: &mut [f32]) {
    let width = out.len();
    out.copy_from_slice(&x[..width]);
    for n in 1..streams {
        for (o, v) in out.iter_mut().zip(&x[n * width..]) {
            *o += v;
        }
    }
    let count = streams as f32;
    for o in out.iter_mut() {
        *o /= count;
    }
}

kernel! {
    fn mean_rows[][](x: Rows<'a>, streams: usize, out: RowsMut<'a>) -> () {
        let mut out = out;
        for r in 0..x.rows() {
            mean_inline(x.row(r), streams, out.row_mut(r));
        }
    }
}

/// Mean over the streams of `x [R, streams * D]` into `out [R, D]`.
///
/// # Panics
/// When the shapes do not fit.
pub fn stream_mean(x: Rows<'_>, streams: usize, out: RowsMut<'_>) {
    assert_eq!((x.rows(), x.cols()), (out.rows(), out.cols() * streams), "stream mean: input and output");
    mean_rows(x, streams, out);
}

kernel! {
    fn final_rows[][](x: Rows<'a>, streams: usize, weight: &'a [f32], eps: f32, out: RowsMut<'a>) -> () {
        let mut out = out;
        for r in 0..x.rows() {
            let out = out.row_mut(r);
            mean_inline(x.row(r), streams, out);
            rms_in_place_inline(out, weight, eps);
        }
    }
}

/// The row that the head reads: mean over the streams of `x [R, streams * D]`, then RMS norm.
///
/// # Panics
/// When the shapes do not fit.
pub fn final_norm(x: Rows<'_>, streams: usize, weight: &[f32], eps: f32, out: RowsMut<'_>) {
    assert_eq!((x.rows(), x.cols()), (out.rows(), out.cols() * streams), "final norm: input and output");
    assert_eq!(weight.len(), out.cols(), "final norm: weight and output");
    final_rows(x, streams, weight, eps, out);
}

kernel! {
    fn add_rows[][](x: Rows<'a>, parts: Rows<'a>, out: RowsMut<'a>) -> () {
        let mut out = out;
        for r in 0..x.rows() {
            let (x, parts, out) = (x.row(r), parts.row(r), out.row_mut(r));
            let width = x.len();
            out.copy_from_slice(&parts[..width]);
            for part in parts[width..].chunks_exact(width) {
                for (o, v) in out.iter_mut().zip(part) {
                    *o += v;
                }
            }
            for (o, v) in out.iter_mut().zip(x) {
                *o += v;
            }
        }
    }
}

/// `out = x + (parts added in order)`: `x [R, D]`, `parts [R, P*D]`.
///
/// # Panics
/// When the shapes do not fit.
pub fn residual(x: Rows<'_>, parts: Rows<'_>, out: RowsMut<'_>) {
    assert_eq!((x.rows(), x.cols()), (out.rows(), out.cols()), "residual: input and output");
    assert!(x.cols() > 0 && parts.rows() == x.rows(), "residual: rows and parts");
    assert!(
        parts.cols() >= x.cols() && parts.cols().is_multiple_of(x.cols()),
        "residual: width of the parts"
    );
    add_rows(x, parts, out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::testing::{bits, close, random};
    use crate::cpu::simd::both_paths;
    use proptest::prelude::*;

    fn rms_reference(x: &[f32], w: &[f32], eps: f64) -> Vec<f64> {
        let ss: f64 = x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        let r = 1.0 / (ss / x.len() as f64 + eps).sqrt();
        x.iter().zip(w).map(|(v, w)| f64::from(*v) * r * f64::from(*w)).collect()
    }

    fn all(x: &[f32], d: usize) -> Vec<f32> {
        let (w, b) = (random(90, d), random(91, d));
        let rows = x.len() / (4 * d);
        let mut out = vec![0.0; 4 * rows * d];
        let [normed, centered, mean, last] = {
            let mut pieces = RowsMut::new(&mut out, 4 * d).column_pieces(d);
            std::array::from_fn(|_| pieces.next().unwrap())
        };
        let view = Rows::new(x, 4 * d);
        rms(view.columns(0, d), Some(&w), 1e-5, normed);
        layer(view.columns(d, d), &w, &b, 1e-6, centered);
        stream_mean(view, 4, mean);
        final_norm(view, 4, &w, 1e-5, last);
        out
    }

    #[test]
    fn norms_match_double_precision() {
        for d in [1, 7, 32, 100] {
            let x = random(d as u64, 4 * d);
            let out = all(&x, d);
            let (w, b) = (random(90, d), random(91, d));
            close(&out[..d], &rms_reference(&x[..d], &w, 1e-5), 1e-6, "rms");
            let row: Vec<f64> = x[d..2 * d].iter().map(|v| f64::from(*v)).collect();
            let mean = row.iter().sum::<f64>() / d as f64;
            let var = row.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / d as f64;
            let want: Vec<f64> = (0..d)
                .map(|i| (row[i] - mean) / (var + 1e-6).sqrt() * f64::from(w[i]) + f64::from(b[i]))
                .collect();
            close(&out[d..2 * d], &want, 2e-6, "layer norm");
            let mean: Vec<f32> = (0..d).map(|i| (0..4).map(|n| x[n * d + i]).sum::<f32>() / 4.0).collect();
            assert_eq!(bits(&mean), bits(&out[2 * d..3 * d]));
            close(&out[3 * d..], &rms_reference(&mean, &w, 1e-5), 1e-6, "final norm");
        }
    }

    #[test]
    fn parts_are_added_in_order_before_the_row() {
        let (x, parts) = ([1.0f32], [1e8f32, -1e8, 1.0]);
        let mut out = [0.0];
        residual(Rows::new(&x, 1), Rows::new(&parts, 3), RowsMut::new(&mut out, 1));
        assert_eq!(out, [2.0]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn a_row_has_the_same_bits_in_any_company(rows in 1usize..=64, d in 1usize..90, seed in 0u64..1000) {
            let x = random(seed, rows * 4 * d);
            let (scalar, together) = both_paths(|| all(&x, d));
            prop_assert_eq!(bits(&scalar), bits(&together));
            for r in 0..rows {
                let span = r * 4 * d..(r + 1) * 4 * d;
                prop_assert_eq!(bits(&all(&x[span.clone()], d)), bits(&together[span]));
            }
        }
    }
}

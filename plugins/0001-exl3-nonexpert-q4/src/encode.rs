//! From 64 numbers to codes of 4 bits, a scale and an offset: the number is `scale * code + offset`.

use half::bf16;

/// Largest code.
const LARGEST: f32 = 15.0;
/// The least scale.
const LEAST: f32 = 1e-8;
/// Parts of the half width that are tried, in this order.
const FACTORS: [f32; 9] = [1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.82, 0.79, 0.76];

/// Which range of numbers the codes span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Range {
    /// From the least to the largest.
    Whole,
    /// The part of that with the least squared error.
    Best,
}

impl Range {
    /// Its mode, as in settings.
    pub const fn mode(self) -> &'static str {
        match self {
            Range::Whole => "q4",
            Range::Best => "q4mse",
        }
    }

    /// The range of a mode.
    pub fn of(mode: &str) -> Option<Self> {
        [Range::Whole, Range::Best].into_iter().find(|range| range.mode() == mode)
    }
}

/// Encodes a group of numbers that are bf16 already. Gives scale and offset.
pub fn group(range: Range, values: &[f32], codes: &mut [i8]) -> (bf16, bf16) {
    let (lo, hi) =
        values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(lo, hi), v| (lo.min(*v), hi.max(*v)));
    let whole = coefficients(lo, hi);
    let chosen = match range {
        Range::Whole => whole,
        Range::Best => {
            let (centre, half) = (f32::midpoint(lo, hi), (hi - lo) / 2.0);
            let mut best = (whole, error(values, whole));
            for factor in &FACTORS[1..] {
                let tried = coefficients(centre - half * factor, centre + half * factor);
                let error = error(values, tried);
                if error < best.1 {
                    best = (tried, error);
                }
            }
            best.0
        }
    };
    for (to, v) in codes.iter_mut().zip(values) {
        *to = code(*v, chosen) as i8;
    }
    chosen
}

fn coefficients(lo: f32, hi: f32) -> (bf16, bf16) {
    (bf16::from_f32(((hi - lo) / LARGEST).max(LEAST)), bf16::from_f32(lo))
}

fn code(v: f32, (scale, offset): (bf16, bf16)) -> f32 {
    ((v - offset.to_f32()) / scale.to_f32()).round_ties_even().clamp(0.0, LARGEST)
}

/// Squared error of a group, with the rounded coefficients that the product uses.
fn error(values: &[f32], coefficients: (bf16, bf16)) -> f64 {
    let (scale, offset) = (coefficients.0.to_f32(), coefficients.1.to_f32());
    let one = |v: &f32| f64::from(v - code(*v, coefficients).mul_add(scale, offset)).powi(2);
    values.iter().map(one).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_tests::model::ids;

    fn encoded(range: Range, values: &[f32]) -> (f64, Vec<i8>) {
        let mut codes = vec![0; values.len()];
        let (scale, offset) = group(range, values, &mut codes);
        let (scale, offset) = (f64::from(scale.to_f32()), f64::from(offset.to_f32()));
        let error = values
            .iter()
            .zip(&codes)
            .map(|(v, c)| (f64::from(*v) - (scale * f64::from(*c) + offset)).powi(2));
        (error.sum(), codes)
    }

    fn row(seed: u64) -> Vec<f32> {
        let numbers = ids(seed, 64 * 8, 1 << 16);
        let value = |(i, v): (usize, u32)| {
            let v = (v as f32 / 32768.0 - 1.0) * if i % 97 == 0 { 8.0 } else { 1.0 };
            bf16::from_f32(v).to_f32()
        };
        numbers.into_iter().enumerate().map(value).collect()
    }

    #[test]
    fn clipped_ranges_are_never_worse_and_better_where_some_columns_are_large() {
        let (mut whole, mut best, mut better) = (0.0, 0.0, 0);
        for seed in 1..40 {
            for values in row(seed).chunks(64) {
                let (w, b) = (encoded(Range::Whole, values).0, encoded(Range::Best, values).0);
                assert!(b <= w * (1.0 + 1e-4), "{b} of {w}");
                better += usize::from(b < w);
                (whole, best) = (whole + w, best + b);
            }
        }
        assert!(best < whole && better > 0, "{best} of {whole}");
    }

    #[test]
    fn codes_are_those_of_the_formula() {
        let values = row(3);
        let values = &values[..64];
        let (lo, hi) =
            (values.iter().copied().fold(9.0, f32::min), values.iter().copied().fold(-9.0, f32::max));
        let scale = bf16::from_f32((hi - lo) / 15.0).to_f32();
        let codes = encoded(Range::Whole, values).1;
        for (v, code) in values.iter().zip(codes) {
            let want = ((v - bf16::from_f32(lo).to_f32()) / scale).round_ties_even().clamp(0.0, 15.0);
            assert_eq!(f32::from(code), want, "{v}");
        }
    }

    #[test]
    fn equal_numbers_and_zeros_are_exact() {
        for v in [0.0, 1.5, -0.25] {
            for range in [Range::Whole, Range::Best] {
                assert_eq!(encoded(range, &[v; 64]), (0.0, vec![0; 64]));
            }
        }
    }
}

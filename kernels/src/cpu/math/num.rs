//! Elementary functions and sums with fixed arithmetic.
//!
//! The functions are branch-free, so that loops over them become vector code, and use only IEEE operations in a stated
//! order: a lane of a vector gives the bits of the scalar call.

use crate::cpu::simd::kernel;

/// Partial sums of a reduction. Element i goes to partial sum `i % LANES`; these are then added pairwise.
pub const LANES: usize = 32;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts; the first has few enough bits that its product with an exponent is exact.
const LN2_HI: f32 = 0.693_359_4;
const LN2_LO: f32 = -2.121_944_4e-4;
/// Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
const ROUND: f32 = 12_582_912.0;

/// e^x, within one unit in the last place.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Beyond these the result is infinite or zero anyway. Comparisons keep a NaN.
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -105.0 { -105.0 } else { x };
    let t = x.mul_add(LOG2_E, ROUND);
    let n = t - ROUND;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    // Taylor on |r| <= ln(2)/2: the first term left out is below 6e-9.
    let p = r.mul_add(1.0 / 5040.0, 1.0 / 720.0);
    let p = p.mul_add(r, 1.0 / 120.0);
    let p = p.mul_add(r, 1.0 / 24.0);
    let p = p.mul_add(r, 1.0 / 6.0);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;
    // 2^n in two factors, so that results down to the smallest subnormal round once.
    let i = t.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let half = i >> 1;
    let a = f32::from_bits((half.wrapping_add(127) << 23).cast_unsigned());
    let b = f32::from_bits((i.wrapping_sub(half).wrapping_add(127) << 23).cast_unsigned());
    p * a * b
}

/// Natural logarithm; minus infinity at 0, NaN below.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    // Subnormals are scaled into the normal range.
    let small = x < f32::MIN_POSITIVE;
    let v = if small { x * 8_388_608.0 } else { x };
    let shift = if small { -23.0 } else { 0.0 };
    // Mantissa in [sqrt(1/2), sqrt(2)).
    let bits = v.to_bits();
    let e = bits.wrapping_sub(0x3f35_04f3).cast_signed() >> 23;
    let m = f32::from_bits(bits.wrapping_sub((e << 23).cast_unsigned()));
    let e = e as f32 + shift;
    let f = m - 1.0;
    let s = f / (2.0 + f);
    let z = s * s;
    // ln(1 + f) = 2 atanh(s) = f - s (f - 2 z (1/3 + z/5 + ...)).
    let p = z.mul_add(2.0 / 11.0, 2.0 / 9.0);
    let p = p.mul_add(z, 2.0 / 7.0);
    let p = p.mul_add(z, 2.0 / 5.0);
    let p = p.mul_add(z, 2.0 / 3.0) * z;
    let y = f - (s * (f - p) - e * LN2_LO);
    let y = e.mul_add(LN2_HI, y);
    let y = if x == f32::INFINITY { x } else { y };
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    if x < 0.0 || x.is_nan() { f32::NAN } else { y }
}

/// The logistic function.
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x` times its logistic.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// ln(1 + e^x) without overflow and without loss for very negative x.
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    let e = exp(-x.abs());
    let u = 1.0 + e;
    // What rounding took from 1 + e comes back as a factor.
    let log = if u == 1.0 { e } else { ln(u) * (e / (u - 1.0)) };
    let top = if x > 0.0 { x } else { 0.0 };
    top + log
}

/// Beyond this erf is taken for 1, which it misses by 1.6e-12.
const ERF_END: f64 = 5.0;
/// erf(x) / x on [0, 5] as a polynomial in t = 2 (x / 5)^2 - 1, the highest power first: its interpolant at the Chebyshev points
/// (69 of them, in 60 digits; mpmath), cut after degree 28, where the rest is below 7e-14, and written in powers of t. The function falls
/// like e^(-12.5 t), so these do not grow: their sizes add up to 1.13, and Horner's rule loses no digits.
const ERF: [f64; 29] = [
    0.000_007_026_226_861_432_765,
    -0.000_017_289_445_011_580_293,
    -0.000_007_941_260_789_356_685,
    0.000_021_416_654_400_338_723,
    0.000_098_664_309_256_719_02,
    -0.000_215_056_750_136_781_6,
    0.000_171_012_530_067_963_16,
    -0.000_311_216_217_166_050_67,
    0.000_877_458_546_642_933_4,
    -0.001_576_423_016_659_138_5,
    0.002_442_362_885_627_378,
    -0.003_975_676_726_311_758,
    0.006_357_245_293_991_823,
    -0.009_525_574_544_516_179,
    0.013_593_904_442_559_217,
    -0.018_642_667_992_756_25,
    0.024_511_243_535_155_647,
    -0.030_909_821_120_748_04,
    0.037_518_107_210_262_22,
    -0.044_036_768_141_301_7,
    0.050_284_225_656_431_84,
    -0.056_288_807_025_895_64,
    0.062_332_471_515_823_62,
    -0.068_971_248_013_314,
    0.077_110_013_738_867_68,
    -0.088_321_278_587_670_61,
    0.106_051_238_596_836_72,
    -0.141_419_172_620_811_94,
    0.282_842_550_320_004_66,
];

/// The error function in double precision, within 2e-12: 28 multiply-adds, no division.
#[inline(always)]
pub fn erf(x: f64) -> f64 {
    let c = if x > ERF_END { ERF_END } else { x };
    let c = if c < -ERF_END { -ERF_END } else { c };
    let t = (c * c).mul_add(2.0 / (ERF_END * ERF_END), -1.0);
    let mut p = ERF[0];
    for a in &ERF[1..] {
        p = p.mul_add(t, *a);
    }
    let y = p * c;
    let y = if x >= ERF_END { 1.0 } else { y };
    if x <= -ERF_END { -1.0 } else { y }
}

/// Exact gelu: x Φ(x).
#[inline(always)]
pub fn gelu(x: f32) -> f32 {
    let x = f64::from(x);
    (0.5 * x * (1.0 + erf(x * std::f64::consts::FRAC_1_SQRT_2))) as f32
}

/// Half of the partial sums: arrays of this length stay in vector registers.
const HALF: usize = LANES / 2;

/// Adds the partial sums: upper halves onto lower halves.
#[inline(always)]
fn tree(low: &[f32; HALF], high: &[f32; HALF]) -> f32 {
    // Hides from the compiler where the sums come from: it would lay out the loops before for this tree, with narrow
    // vectors and shuffles.
    let (low, high) = std::hint::black_box((*low, *high));
    let mut a = [0.0f32; HALF];
    for l in 0..HALF {
        a[l] = low[l] + high[l];
    }
    let mut b = [0.0f32; 8];
    for l in 0..8 {
        b[l] = a[l] + a[l + 8];
    }
    let mut c = [0.0f32; 4];
    for l in 0..4 {
        c[l] = b[l] + b[l + 4];
    }
    (c[0] + c[2]) + (c[1] + c[3])
}

/// The last, partial stretch of a sum, filled up with `fill`.
#[inline(always)]
fn padded(rest: &[f32], fill: f32) -> [f32; LANES] {
    let mut whole = [fill; LANES];
    whole[..rest.len()].copy_from_slice(rest);
    whole
}

#[inline(always)]
fn halves(x: &[f32; LANES]) -> (&[f32; HALF], &[f32; HALF]) {
    let (parts, _) = x.as_chunks::<HALF>();
    (&parts[0], &parts[1])
}

#[inline(always)]
fn fma_half(acc: &mut [f32; HALF], x: &[f32; HALF], y: &[f32; HALF]) {
    for l in 0..HALF {
        acc[l] = x[l].mul_add(y[l], acc[l]);
    }
}

/// Σ a_i b_i, fused, in the fixed order of [`LANES`].
#[inline(always)]
pub(crate) fn dot_inline(a: &[f32], b: &[f32]) -> f32 {
    let (a_whole, a_rest) = a.as_chunks::<LANES>();
    let (b_whole, b_rest) = b.as_chunks::<LANES>();
    let (mut low, mut high) = ([0.0f32; HALF], [0.0f32; HALF]);
    for (x, y) in a_whole.iter().zip(b_whole) {
        let ((x0, x1), (y0, y1)) = (halves(x), halves(y));
        fma_half(&mut low, x0, y0);
        fma_half(&mut high, x1, y1);
    }
    if !a_rest.is_empty() {
        let (x, y) = (padded(a_rest, 0.0), padded(b_rest, 0.0));
        let ((x0, x1), (y0, y1)) = (halves(&x), halves(&y));
        fma_half(&mut low, x0, y0);
        fma_half(&mut high, x1, y1);
    }
    tree(&low, &high)
}

/// Σ a_i in the fixed order of [`LANES`].
#[inline(always)]
pub(crate) fn sum_inline(a: &[f32]) -> f32 {
    let (whole, rest) = a.as_chunks::<LANES>();
    let (mut low, mut high) = ([0.0f32; HALF], [0.0f32; HALF]);
    let last = padded(rest, 0.0);
    for x in whole.iter().chain(std::iter::once(&last)) {
        let (x0, x1) = halves(x);
        for l in 0..HALF {
            low[l] += x0[l];
        }
        for l in 0..HALF {
            high[l] += x1[l];
        }
    }
    tree(&low, &high)
}

/// The largest element, minus infinity if there is none. A NaN is passed over.
#[inline(always)]
pub(crate) fn max_inline(a: &[f32]) -> f32 {
    let (whole, rest) = a.as_chunks::<HALF>();
    let mut best = [f32::NEG_INFINITY; HALF];
    for x in whole {
        for l in 0..HALF {
            best[l] = if x[l] > best[l] { x[l] } else { best[l] };
        }
    }
    let mut top = f32::NEG_INFINITY;
    for &x in rest.iter().chain(&best) {
        top = if x > top { x } else { top };
    }
    top
}

kernel! {
    /// Σ a_i b_i over the shorter of both, fused, in the fixed order of [`LANES`].
    pub fn dot[][](a: &'a [f32], b: &'a [f32]) -> f32 {
        let n = if a.len() < b.len() { a.len() } else { b.len() };
        dot_inline(&a[..n], &b[..n])
    }
}

kernel! {
    /// Σ a_i in the fixed order of [`LANES`].
    pub fn sum[][](a: &'a [f32]) -> f32 {
        sum_inline(a)
    }
}

kernel! {
    /// Softmax in place, in f32.
    pub fn softmax[][](scores: &'a mut [f32]) -> () {
        let top = max_inline(scores);
        for s in scores.iter_mut() {
            *s = exp(*s - top);
        }
        let total = sum_inline(scores);
        for s in scores.iter_mut() {
            *s /= total;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::both_paths;
    use proptest::prelude::*;

    fn grid(from: f32, to: f32, n: usize) -> impl Iterator<Item = f32> {
        (0..=n).map(move |i| from + (to - from) * (i as f32 / n as f32))
    }

    fn ulps(got: f32, want: f64) -> f64 {
        let unit = f64::from((want as f32).abs().max(f32::MIN_POSITIVE));
        let step = f64::from(f32::from_bits(unit.to_bits_of_f32() + 1)) - unit;
        (f64::from(got) - want).abs() / step
    }

    trait F32Bits {
        fn to_bits_of_f32(self) -> u32;
    }
    impl F32Bits for f64 {
        fn to_bits_of_f32(self) -> u32 {
            (self as f32).to_bits()
        }
    }

    #[test]
    fn exp_is_within_one_unit() {
        for x in grid(-87.0, 88.5, 200_000) {
            let err = ulps(exp(x), f64::from(x).exp());
            assert!(err <= 1.0, "exp({x}) is {err} units off");
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
        // Subnormal results.
        for x in grid(-103.0, -87.5, 1000) {
            let want = f64::from(x).exp();
            assert!((f64::from(exp(x)) - want).abs() <= 1.5e-45, "exp({x})");
        }
    }

    #[test]
    fn ln_is_close_everywhere() {
        for x in grid(1e-3, 4.0, 100_000).chain((0..1000).map(|i| f32::from_bits(i * 2_139_095 + 1))) {
            let want = f64::from(x).ln();
            let err = (f64::from(ln(x)) - want).abs();
            assert!(
                err <= 1.2e-7 * want.abs() + 6e-8 * f64::from((x - 1.0).abs().min(1.0)),
                "ln({x}): {err}"
            );
        }
        assert_eq!(ln(1.0), 0.0);
        assert_eq!(ln(0.0), f32::NEG_INFINITY);
        assert!(ln(-1.0).is_nan() && ln(f32::NAN).is_nan());
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn logistic_family_is_close() {
        for x in grid(-80.0, 80.0, 100_000) {
            let d = f64::from(x);
            let s = 1.0 / (1.0 + (-d).exp());
            assert!(ulps(sigmoid(x), s) <= 3.0, "sigmoid({x})");
            assert!((f64::from(silu(x)) - d * s).abs() <= 4e-7 * (d * s).abs() + 1e-40, "silu({x})");
            let p = d.max(0.0) + (-d.abs()).exp().ln_1p();
            assert!((f64::from(softplus(x)) - p).abs() <= 4e-7 * p, "softplus({x})");
        }
        assert_eq!(sigmoid(-200.0), 0.0);
        assert_eq!(sigmoid(200.0), 1.0);
    }

    /// The error function in another way: its series below 2, the continued fraction of what is missing to 1 from there on.
    fn erf_slowly(x: f64) -> f64 {
        if x < 2.0 {
            let (mut term, mut sum) = (x, x);
            for n in 1..60 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            return sum * std::f64::consts::FRAC_2_SQRT_PI;
        }
        let below = (1..200).rev().fold(x, |below, k| x + f64::from(k) / 2.0 / below);
        1.0 - (-x * x).exp() / below * std::f64::consts::FRAC_2_SQRT_PI / 2.0
    }

    #[test]
    fn erf_is_within_2e_12() {
        // To 15 digits.
        for (x, want) in [
            (0.0, 0.0),
            (0.1, 0.112_462_916_018_285),
            (0.5, 0.520_499_877_813_047),
            (1.0, 0.842_700_792_949_715),
            (2.0, 0.995_322_265_018_953),
            (3.0, 0.999_977_909_503_001),
            (3.9, 0.999_999_965_207_751),
        ] {
            assert!((erf(x) - want).abs() < 2e-12, "erf({x}) = {}", erf(x));
            assert!((erf_slowly(x) - want).abs() < 2e-15, "the slow erf({x}) = {}", erf_slowly(x));
        }
        // Where the two ways of the slow one and where the polynomial and 1 meet, and a grid over both.
        let seam = |at: f64| [at - 1e-9, at.next_down(), at, at.next_up(), at + 1e-9];
        let grid = (0..=240_000).map(|i| 6.0 * f64::from(i) / 240_000.0);
        for x in grid.chain(seam(2.0)).chain(seam(5.0)).chain([1e-300, 1e-20, 1e-9, 50.0, f64::INFINITY]) {
            assert!((erf(x) - erf_slowly(x)).abs() < 2e-12, "erf({x}) = {}", erf(x));
            assert_eq!(erf(-x), -erf(x));
        }
        assert!(
            (erf(1e-9) / 1e-9 - std::f64::consts::FRAC_2_SQRT_PI).abs() < 3e-14,
            "small ones keep their digits"
        );
        assert_eq!((erf(5.0), erf(-5.0)), (1.0, -1.0));
        assert!(erf(f64::NAN).is_nan());
        assert!((gelu(1.0) - 0.841_344_7).abs() < 1e-7);
        assert_eq!(gelu(-20.0).abs(), 0.0);
    }

    proptest! {
        #[test]
        fn sums_do_not_depend_on_the_instruction_set(v in prop::collection::vec(-1e3f32..1e3, 0..200)) {
            let (a, b) = both_paths(|| {
                let mut s = v.clone();
                softmax(&mut s);
                let last = s.last().copied().unwrap_or(0.0);
                [dot(&v, &s).to_bits(), sum(&v).to_bits(), last.to_bits()]
            });
            prop_assert_eq!(a, b);
            let want: f64 = v.iter().map(|&x| f64::from(x)).sum();
            prop_assert!((f64::from(sum(&v)) - want).abs() <= 1e-6 * v.iter().map(|x| f64::from(x.abs())).sum::<f64>());
        }

        #[test]
        fn elementary_functions_do_not_depend_on_the_instruction_set(v in prop::collection::vec(-120f32..120.0, 64)) {
            kernel! {
                fn map[][](x: &'a mut [f32]) -> () {
                    for v in x.iter_mut() {
                        *v = exp(*v) + sigmoid(*v) + silu(*v) + softplus(*v) + ln(v.abs()) + gelu(*v);
                    }
                }
            }
            let (a, b) = both_paths(|| {
                let mut x = v.clone();
                map(&mut x);
                x.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            });
            prop_assert_eq!(a, b);
        }
    }
}

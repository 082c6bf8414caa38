//! Bicubic resizing in 8 bits, as the two backends of transformers do it.
//!
//! Separable: all rows horizontally, rounded to 8 bits, then all columns vertically. A pass that changes nothing is
//! left out. The kernel is Keys' cubic with a = −1/2, widened when shrinking, and its weights are integers.

use super::Resampler;

/// Most bits of a weight after the binary point.
const BITS: u32 = 22;
const CHANNELS: usize = 3;

/// One pass: for each output place the inputs that it mixes.
struct Pass {
    /// First input and range of weights, one for each output place.
    places: Vec<(usize, std::ops::Range<usize>)>,
    weights: Vec<i32>,
    /// Bits of the weights after the binary point.
    bits: u32,
}

/// Resizes `pixels`, `[height, width, 3]`, to another height and width. Both sizes are at least 1.
pub(super) fn resize(
    pixels: &[u8],
    from: (usize, usize),
    to: (usize, usize),
    resampler: Resampler,
) -> Vec<u8> {
    let (height, width) = from;
    let wide = if width == to.1 {
        pixels.to_vec()
    } else {
        let pass = Pass::new(width, to.1, resampler);
        let mut out = vec![0; height * to.1 * CHANNELS];
        for (line, out) in pixels.chunks_exact(width * CHANNELS).zip(out.chunks_exact_mut(to.1 * CHANNELS)) {
            pass.along(line, out);
        }
        out
    };
    if height == to.0 {
        return wide;
    }
    let pass = Pass::new(height, to.0, resampler);
    let mut out = vec![0; to.0 * to.1 * CHANNELS];
    pass.across(&wide, to.1 * CHANNELS, &mut out);
    out
}

impl Pass {
    fn new(size: usize, out: usize, resampler: Resampler) -> Self {
        let scale = size as f64 / out as f64;
        let wide = scale.max(1.0);
        let support = 2.0 * wide;
        let mut exact: Vec<f64> = Vec::new();
        let mut places = Vec::with_capacity(out);
        for i in 0..out {
            let center = (i as f64 + 0.5) * scale;
            let first = (center - support + 0.5).max(0.0) as usize;
            let last = ((center + support + 0.5) as usize).min(size);
            let start = exact.len();
            exact.extend((first..last).map(|j| cubic((j as f64 - center + 0.5) / wide)));
            let total: f64 = exact[start..].iter().sum();
            for weight in &mut exact[start..] {
                *weight /= total;
            }
            places.push((first, start..exact.len()));
        }
        let bits = match resampler {
            Resampler::Pil => BITS,
            Resampler::Fast => {
                // The weights must fit 16 bits, so the largest one decides.
                let top = exact.iter().copied().fold(0.0, f64::max);
                let fits = |bits: u32| 0.5 + top * f64::from(1u32 << bits) < 32_768.0;
                (0..BITS).take_while(|bits| fits(bits + 1)).count() as u32
            }
        };
        // `round` goes away from zero at a half.
        let weights = exact.iter().map(|w| (w * f64::from(1u32 << bits)).round() as i32).collect();
        Self { places, weights, bits }
    }

    /// Rounds a sum of weighted pixels. Such a sum fits: the magnitudes of the weights of one place add up to less
    /// than 1.6, and 1.6 · 255 · 2²² is below 2³¹.
    fn level(&self, sum: i32) -> u8 {
        ((sum + (1 << (self.bits - 1))) >> self.bits).clamp(0, 255) as u8
    }

    /// One line of pixels.
    fn along(&self, line: &[u8], out: &mut [u8]) {
        for ((first, range), out) in self.places.iter().zip(out.chunks_exact_mut(CHANNELS)) {
            let mut sums = [0i32; CHANNELS];
            let inputs = line[first * CHANNELS..].chunks_exact(CHANNELS);
            for (weight, pixel) in self.weights[range.clone()].iter().zip(inputs) {
                for (sum, value) in sums.iter_mut().zip(pixel) {
                    *sum += weight * i32::from(*value);
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = self.level(sum);
            }
        }
    }

    /// All columns of an image whose lines have `line` bytes.
    fn across(&self, image: &[u8], line: usize, out: &mut [u8]) {
        let mut sums = vec![0i32; line];
        for ((first, range), out) in self.places.iter().zip(out.chunks_exact_mut(line)) {
            sums.fill(0);
            for (weight, from) in
                self.weights[range.clone()].iter().zip(image[first * line..].chunks_exact(line))
            {
                for (sum, value) in sums.iter_mut().zip(from) {
                    *sum += weight * i32::from(*value);
                }
            }
            for (out, sum) in out.iter_mut().zip(&sums) {
                *out = self.level(*sum);
            }
        }
    }
}

/// Keys' cubic with a = −1/2.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

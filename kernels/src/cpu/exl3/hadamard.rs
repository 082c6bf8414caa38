//! The orthonormal Walsh-Hadamard transform on blocks of channels.

/// Channels in one transformed block of a linear layer.
pub const BLOCK: usize = 128;

/// Transforms each run of `N` consecutive values in place (natural order, factor `1/sqrt(N)`).
///
/// Butterflies run from index bit 0 upward, each (low + high, low - high), and the factor is applied last: the
/// order that the engine's number formats fix.
///
/// # Panics
/// If the length of `values` is no multiple of `N`, which must be a power of two.
pub fn hadamard<const N: usize>(values: &mut [f32]) {
    const { assert!(N.is_power_of_two()) };
    let (blocks, rest) = values.as_chunks_mut::<N>();
    assert!(rest.is_empty(), "a transform needs whole blocks of {N} channels");
    for block in blocks {
        hadamard_block(block);
    }
}

#[inline(always)]
pub(super) fn hadamard_block<const N: usize>(block: &mut [f32; N]) {
    let mut stride = 1;
    while stride < N {
        for pair in block.chunks_exact_mut(2 * stride) {
            let (low, high) = pair.split_at_mut(stride);
            for (a, b) in low.iter_mut().zip(high) {
                (*a, *b) = (*a + *b, *a - *b);
            }
        }
        stride *= 2;
    }
    let factor = (1.0 / (N as f64).sqrt()) as f32;
    for value in block {
        *value *= factor;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_the_definition_and_is_its_own_inverse() {
        let source: Vec<f32> = (0..BLOCK).map(|i| ((i * 37 + 11) % 64) as f32 - 31.5).collect();
        let mut values = source.clone();
        hadamard::<BLOCK>(&mut values);
        for (a, &got) in values.iter().enumerate() {
            let sum: f64 = source
                .iter()
                .enumerate()
                .map(|(b, &x)| if (a & b).count_ones() % 2 == 0 { f64::from(x) } else { -f64::from(x) })
                .sum();
            assert!((f64::from(got) - sum / 128f64.sqrt()).abs() < 1e-4);
        }
        hadamard::<BLOCK>(&mut values);
        for (got, want) in values.iter().zip(&source) {
            assert!((got - want).abs() < 1e-4);
        }
    }
}

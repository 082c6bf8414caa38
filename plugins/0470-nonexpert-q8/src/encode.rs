//! From a group of numbers to codes of 8 bits and a scale: the number is `scale * code`.

use half::bf16;

/// Largest code.
const LARGEST: f32 = 127.0;

/// Inputs of a group for a matrix of so many inputs.
///
/// # Errors
/// Inputs that are no multiple of 64.
pub fn group_of(inputs: u32) -> Result<usize, String> {
    [128, 64].into_iter().find(|group| inputs.is_multiple_of(*group as u32)).ok_or_else(|| {
        format!("{inputs} inputs are no multiple of 64, which groups of 8 bits need: keep this class in bf16 or q4")
    })
}

/// The least bf16 that is at least `largest / 127`; 1 for nothing but zeros.
fn scale(largest: f32) -> bf16 {
    if largest == 0.0 {
        return bf16::ONE;
    }
    let least = f64::from(largest) / f64::from(LARGEST);
    // Positive numbers are in order of their bits.
    let mut scale = bf16::from_f32(largest / LARGEST);
    while f64::from(scale) < least {
        scale = bf16::from_bits(scale.to_bits() + 1);
    }
    while scale.to_bits() > 1 && f64::from(bf16::from_bits(scale.to_bits() - 1)) >= least {
        scale = bf16::from_bits(scale.to_bits() - 1);
    }
    scale
}

/// Encodes a group of numbers. Gives the scale.
pub fn group(values: &[f32], codes: &mut [i8]) -> bf16 {
    let scale = scale(values.iter().fold(0.0, |most, v| v.abs().max(most)));
    let factor = scale.to_f32();
    for (code, v) in codes.iter_mut().zip(values) {
        *code = (v / factor).round_ties_even().clamp(-LARGEST, LARGEST) as i8;
    }
    scale
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_tests::model::ids;

    #[test]
    fn nothing_is_clipped_and_the_scale_is_the_least_that_does_so() {
        for seed in 1..200 {
            let size = [1e-30, 1e-6, 1.0, 3e4][seed as usize % 4];
            let values: Vec<f32> = ids(seed, 128, 1 << 16)
                .into_iter()
                .map(|v| bf16::from_f32((v as f32 / 32768.0 - 1.0) * size).to_f32())
                .collect();
            let mut codes = vec![0; 128];
            let scale = group(&values, &mut codes);
            let most = values.iter().fold(0.0f32, |most, v| v.abs().max(most));
            assert!(f64::from(most) <= f64::from(scale.to_f32()) * 127.0, "clipped: {most} by {scale}");
            let below = bf16::from_bits(scale.to_bits() - 1);
            assert!(f64::from(most) > f64::from(below.to_f32()) * 127.0, "{scale} is not the least");
            for (v, code) in values.iter().zip(&codes) {
                let error = (v - f32::from(*code) * scale.to_f32()).abs();
                assert!(error <= scale.to_f32() * 0.501, "{v}: {code} * {scale}");
            }
        }
    }

    #[test]
    fn zeros_have_scale_one_and_groups_follow_from_the_inputs() {
        let mut codes = vec![9; 64];
        assert_eq!(group(&[0.0; 64], &mut codes), bf16::ONE);
        assert_eq!(codes, [0; 64]);
        assert_eq!(group_of(4096), Ok(128));
        assert_eq!(group_of(192), Ok(64));
        for inputs in [100, 32, 65] {
            assert!(group_of(inputs).unwrap_err().contains("no multiple of 64"));
        }
    }
}

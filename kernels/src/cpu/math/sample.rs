//! Helpers of sampling that look at a whole row of logits.

use smallvec::{SmallVec, smallvec};

/// A 32-bit key that orders like the number; 0 and -0 are equal, NaN is below everything.
#[inline]
pub(crate) fn ordered(value: f32) -> u32 {
    if value.is_nan() {
        return 0;
    }
    // -0 + 0 = 0.
    let bits = (value + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

/// The `count` largest (or all) of `values` as (value, index), falling; equal values by rising index. NaN comes last.
pub fn top_candidates(values: &[f32], count: usize) -> SmallVec<[(f32, u32); 1]> {
    let count = count.min(values.len());
    if count == 0 {
        return SmallVec::new();
    }
    if count == 1 {
        let mut best = 0;
        for (i, v) in values.iter().enumerate() {
            // A NaN in front gives way to any number.
            if *v > values[best] || (values[best].is_nan() && !v.is_nan()) {
                best = i;
            }
        }
        return smallvec![(values[best], best as u32)];
    }
    let mut keys: Vec<u64> =
        values.iter().enumerate().map(|(i, v)| u64::from(!ordered(*v)) << 32 | i as u64).collect();
    if count < keys.len() {
        keys.select_nth_unstable(count - 1);
        keys.truncate(count);
    }
    keys.sort_unstable();
    keys.into_iter().map(|key| (values[key as u32 as usize], key as u32)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ties_go_to_the_lower_index() {
        let v = [1.0, 3.0, -0.0, 3.0, 0.0, f32::NAN, f32::NEG_INFINITY];
        let ids = |n| top_candidates(&v, n).iter().map(|c| c.1).collect::<Vec<_>>();
        assert_eq!(ids(1), [1]);
        assert_eq!(ids(5), [1, 3, 0, 2, 4]);
        assert_eq!(ids(20), [1, 3, 0, 2, 4, 6, 5]);
        assert!(top_candidates(&v, 0).is_empty() && top_candidates(&[], 3).is_empty());
        assert_eq!(top_candidates(&[f32::NAN, -1.0], 1)[0].1, 1);
    }

    proptest! {
        #[test]
        fn equals_a_stable_sort(v in prop::collection::vec(-4i8..4, 1..200), count in 0usize..210) {
            let v: Vec<f32> = v.into_iter().map(f32::from).collect();
            let mut want: Vec<(f32, u32)> = v.iter().enumerate().map(|(i, v)| (*v, i as u32)).collect();
            want.sort_by(|a, b| b.0.total_cmp(&a.0));
            want.truncate(count);
            prop_assert_eq!(top_candidates(&v, count).to_vec(), want);
        }
    }
}

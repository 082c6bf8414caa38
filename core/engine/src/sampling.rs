//! How the next token is drawn.
//!
//! At every position: keep the top-k logits (ties to the lower id), of those the smallest set whose probabilities at
//! the temperature reach top-p, without those below min-p times the best one's probability, and of those the one with the largest `logit / T + g`, where `g` is Gumbel noise keyed
//! by (seed, position, token id). So a draw depends on nothing but the row's logits and its key: not on drafts, batch
//! or ranks. Arithmetic is f64 on the host, the same on every rank.

use sha2::{Digest, Sha256};

use crate::service::Sampling;

/// Candidates that a row must bring so that its draw is exact; `None`: the whole vocabulary.
pub fn candidates_needed(sampling: &Sampling) -> Option<usize> {
    if sampling.temperature <= 0.0 || sampling.top_k == 1 {
        return Some(1);
    }
    (sampling.top_k > 0).then_some(sampling.top_k as usize)
}

/// The seed of a request that names none: the first 8 bytes of the SHA-256 of its prompt ids (little-endian u32s).
pub fn derived_seed(ids: &[u32]) -> u64 {
    let mut hash = Sha256::new();
    for id in ids {
        hash.update(id.to_le_bytes());
    }
    let digest = hash.finalize();
    digest.iter().take(8).rev().fold(0, |seed, b| seed << 8 | u64::from(*b))
}

fn splitmix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Gumbel noise of a token at a position: `-ln(-ln u)` with u in (0, 1) from 53 bits of a hash of the key.
pub fn gumbel(seed: u64, position: u64, token: u32) -> f64 {
    let key = splitmix(splitmix(splitmix(seed) ^ position) ^ u64::from(token));
    let u = ((key >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    -(-u.ln()).ln()
}

/// Puts candidates into the order of choice: falling value, ties to the lower id.
pub fn sort_candidates(candidates: &mut [(f32, u32)]) {
    candidates.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
}

/// The `count` best candidates of a row, in the order of choice.
pub fn best(candidates: &[(f32, u32)], count: usize) -> Vec<(f32, u32)> {
    let mut all: Vec<_> =
        candidates.iter().copied().filter(|c| !c.0.is_nan() && c.0 != f32::NEG_INFINITY).collect();
    sort_candidates(&mut all);
    all.truncate(count);
    all
}

/// Draws the token for `position` (the position that the token will have) from all ranks' candidates.
///
/// `candidates` must hold at least the row's [`candidates_needed`] best over the whole vocabulary; they are sorted here.
/// Returns `None` when there are none, or when none is a number (a broken row).
pub fn draw(
    candidates: &mut Vec<(f32, u32)>,
    sampling: &Sampling,
    seed: u64,
    position: usize,
) -> Option<u32> {
    candidates.retain(|c| !c.0.is_nan() && c.0 != f32::NEG_INFINITY);
    sort_candidates(candidates);
    let best = *candidates.first()?;
    if candidates_needed(sampling) == Some(1) {
        return Some(best.1);
    }
    if sampling.top_k > 0 {
        candidates.truncate(sampling.top_k as usize);
    }
    let scaled = |value: f32| (f64::from(value) - f64::from(best.0)) / sampling.temperature;
    if sampling.top_p < 1.0 {
        let total: f64 = candidates.iter().map(|c| scaled(c.0).exp()).sum();
        let mut mass = 0.0;
        let mut kept = 0;
        for c in candidates.iter() {
            kept += 1;
            mass += scaled(c.0).exp();
            if mass >= sampling.top_p * total {
                break;
            }
        }
        candidates.truncate(kept);
    }
    if sampling.min_p > 0.0 {
        // The best one stays whatever the limit is.
        let kept = candidates.iter().take_while(|c| scaled(c.0).exp() >= sampling.min_p).count();
        candidates.truncate(kept.max(1));
    }
    let score = |c: &(f32, u32)| scaled(c.0) + gumbel(seed, position as u64, c.1);
    candidates.iter().max_by(|a, b| score(a).total_cmp(&score(b)).then(b.1.cmp(&a.1))).map(|c| c.1)
}

/// How many rows of a window are kept: the pending token, then drafts as long as each equals the token drawn for its
/// position and that token ends nothing. `drawn[r]` is the token that follows window row r; `drafts[i]` is row i + 1.
pub fn accept(drawn: &[u32], drafts: &[u32], stops: &[u32]) -> usize {
    let mut keep = 1;
    for (draft, token) in drafts.iter().zip(drawn) {
        if draft != token || stops.contains(token) {
            break;
        }
        keep += 1;
    }
    keep
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, top_k: 20, top_p: 0.95, min_p: 0.0, seed: None };

    #[test]
    fn greedy_takes_the_largest_and_ties_go_to_the_lower_id() {
        let mut c = vec![(1.0, 9), (3.0, 7), (3.0, 2), (f32::NAN, 1)];
        assert_eq!(draw(&mut c, &Sampling::GREEDY, 1, 0), Some(2));
        assert_eq!(draw(&mut vec![], &PLAIN, 1, 0), None);
        assert_eq!(draw(&mut vec![(f32::NAN, 1)], &PLAIN, 1, 0), None);
    }

    #[test]
    fn a_tiny_top_p_is_greedy_and_a_huge_temperature_is_uniform() {
        let row: Vec<(f32, u32)> = (0..10).map(|i| (i as f32, i)).collect();
        let narrow = Sampling { top_p: 0.01, ..PLAIN };
        assert!((0..100).all(|p| draw(&mut row.clone(), &narrow, 5, p) == Some(9)));
        let hot = Sampling { temperature: 1e9, top_p: 1.0, ..PLAIN };
        let mut seen = [0; 10];
        for p in 0..10_000 {
            seen[draw(&mut row.clone(), &hot, 5, p).unwrap() as usize] += 1;
        }
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
    }

    #[test]
    fn min_p_keeps_what_is_near_the_best() {
        let row: Vec<(f32, u32)> = (0..10).map(|i| (i as f32, i)).collect();
        let seen = |min_p: f64| {
            let sampling = Sampling { temperature: 2.0, top_p: 1.0, min_p, ..PLAIN };
            let drawn = (0..5000).filter_map(|p| draw(&mut row.clone(), &sampling, 5, p));
            drawn.collect::<std::collections::BTreeSet<_>>()
        };
        // At temperature 2 the second has exp(-0.5) = 0.61 of the best one's probability, the third 0.37.
        assert_eq!(seen(0.5), [8, 9].into());
        assert_eq!(seen(0.3), [7, 8, 9].into());
        assert_eq!(seen(1.0), [9].into());
        assert_eq!(seen(0.0).len(), 10);
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let row = [(0.0, 0), (1.0, 1), (2.0, 2)];
        let p1 = Sampling { top_p: 1.0, ..PLAIN };
        let mut seen = [0.0; 3];
        for p in 0..20_000 {
            seen[draw(&mut row.to_vec(), &p1, 77, p).unwrap() as usize] += 1.0 / 20_000.0;
        }
        let total: f64 = (0..3).map(|i| f64::from(i).exp()).sum();
        for (i, s) in seen.iter().enumerate() {
            let want = (i as f64).exp() / total;
            assert!((s - want).abs() < 0.015, "token {i}: {s} against {want}");
        }
    }

    #[test]
    fn acceptance_stops_at_the_first_difference_and_at_a_stop_token() {
        assert_eq!(accept(&[5], &[], &[]), 1);
        assert_eq!(accept(&[5, 6, 7], &[5, 6], &[]), 3);
        assert_eq!(accept(&[5, 6, 7], &[5, 9], &[]), 2);
        assert_eq!(accept(&[5, 6, 7], &[4, 6], &[]), 1);
        assert_eq!(accept(&[5, 6, 7], &[5, 6], &[5]), 1);
    }

    #[test]
    fn the_derived_seed_is_pinned() {
        // A change here changes every sampled reply without a seed.
        assert_eq!(derived_seed(&[1, 2, 3]), derived_seed(&[1, 2, 3]));
        assert_ne!(derived_seed(&[1, 2, 3]), derived_seed(&[1, 2, 4]));
        assert_eq!(derived_seed(&[]), u64::from_le_bytes([0xe3, 0xb0, 0xc4, 0x42, 0x98, 0xfc, 0x1c, 0x14]));
    }

    proptest! {
        #[test]
        fn a_draw_does_not_depend_on_the_order_or_the_surplus_of_candidates(
            values in proptest::collection::vec(-9.0f32..9.0, 30..200),
            top_k in 1u32..25,
            seed: u64,
            position in 0usize..100_000,
        ) {
            let sampling = Sampling { temperature: 0.7, top_k, top_p: 0.9, min_p: 0.0, seed: None };
            let all: Vec<(f32, u32)> = values.iter().enumerate().map(|(i, v)| (*v, i as u32)).collect();
            let mut sorted = all.clone();
            sort_candidates(&mut sorted);
            sorted.truncate(top_k as usize);
            let mut reversed: Vec<_> = all.iter().rev().copied().collect();
            let want = draw(&mut all.clone(), &sampling, seed, position);
            prop_assert_eq!(draw(&mut sorted, &sampling, seed, position), want);
            prop_assert_eq!(draw(&mut reversed, &sampling, seed, position), want);
        }
    }
}

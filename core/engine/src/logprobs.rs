//! True log probabilities of drawn tokens: over the whole vocabulary, before temperature and filters.
//!
//! The sum over the vocabulary is made of whole numbers: each rank adds `exp(logit - peak)` of its share in steps of
//! 2^-60, and sums of whole numbers do not depend on their order. So the value is the same however the vocabulary is
//! split, and for a row alone as for one among others. Only requests that ask pay for it: one exchange more a round.

use crate::core::{Core, Forward};
use crate::exchange::ExchangeError;
use crate::program::Read;

/// Most alternatives a request may ask for at each position.
pub const MAX_TOP: u32 = 20;
/// One in the fixed-point sum.
const ONE: f64 = (1u64 << 60) as f64;
/// Bytes of one row of the exchange: the share's sum and the drawn token's logit (NaN where another rank has it).
const WIDTH: usize = 20;

/// The log probabilities at one position of a reply.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The drawn token's.
    pub token: f64,
    /// The most likely tokens, falling, ties to the lower id; as many as were asked for.
    pub top: Vec<(u32, f64)>,
}

/// A row of a forward whose log probabilities are wanted.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Ask {
    /// Which of the forward's wanted rows.
    pub row: usize,
    /// The token that was drawn from it.
    pub token: u32,
    /// Its best logits over the whole vocabulary, falling; at least one.
    pub best: Vec<(f32, u32)>,
    /// How many of them are told.
    pub top: usize,
}

/// `exp(value - peak)` summed over a share, in steps of 2^-60. What is not a number counts as nothing.
fn mass(share: &[f32], peak: f32) -> u128 {
    let term = |v: &f32| ((f64::from(*v) - f64::from(peak)).exp() * ONE).round() as u128;
    share.iter().map(term).sum()
}

/// The log probabilities of rows of the forward that ran last. Every rank asks for the same rows.
///
/// # Errors
/// The transport.
pub(crate) fn logprobs(
    core: &mut Core,
    forward: &Forward,
    asks: &[Ask],
) -> Result<Vec<TokenLogprobs>, ExchangeError> {
    if asks.is_empty() {
        return Ok(Vec::new());
    }
    let share = core.split().share(core.config().vocab_size);
    let logits = core.read(forward, Read::Logits).unwrap_or(&[]);
    let mut mine = Vec::with_capacity(asks.len() * WIDTH);
    for ask in asks {
        let row = logits.get(ask.row * share.len()..(ask.row + 1) * share.len()).unwrap_or(&[]);
        let own = (ask.token as usize).checked_sub(share.start).and_then(|i| row.get(i));
        mine.extend(mass(row, peak(ask)).to_le_bytes());
        mine.extend(own.copied().unwrap_or(f32::NAN).to_le_bytes());
    }
    let all = match core.comm().cloned() {
        None => mine,
        Some(comm) => {
            let mut all = vec![0; mine.len() * core.split().ranks];
            let _waits = core.exchanging().begin();
            comm.gather(&mine, &mut all)?;
            all
        }
    };
    let size = asks.len() * WIDTH;
    let told = |(i, ask): (usize, &Ask)| {
        let parts = || all.chunks(size).filter_map(|part| part.get(i * WIDTH..(i + 1) * WIDTH));
        let sum: u128 = parts().filter_map(|p| p.first_chunk()).map(|b| u128::from_le_bytes(*b)).sum();
        let value =
            parts().filter_map(|p| p.last_chunk()).map(|b| f32::from_le_bytes(*b)).find(|v| !v.is_nan());
        let total = (sum as f64 / ONE).ln();
        let of = |value: f32| f64::from(value) - f64::from(peak(ask)) - total;
        TokenLogprobs {
            token: value.map_or(f64::NEG_INFINITY, of),
            top: ask.best.iter().take(ask.top).map(|(value, id)| (*id, of(*value))).collect(),
        }
    };
    Ok(asks.iter().enumerate().map(told).collect())
}

fn peak(ask: &Ask) -> f32 {
    ask.best.first().map_or(0.0, |best| best.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_sum_does_not_depend_on_the_split(
            values in prop::collection::vec(-40.0f32..40.0, 2..400),
            cut in any::<prop::sample::Index>(),
        ) {
            let peak = values.iter().copied().fold(f32::MIN, f32::max);
            let (left, right) = values.split_at(cut.index(values.len()));
            let whole = mass(&values, peak);
            prop_assert_eq!(mass(left, peak) + mass(right, peak), whole);
            let plain: f64 = values.iter().map(|v| (f64::from(*v) - f64::from(peak)).exp()).sum();
            prop_assert!((whole as f64 / ONE / plain - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn what_is_not_a_number_counts_as_nothing() {
        assert_eq!(mass(&[f32::NAN, 3.0, f32::NEG_INFINITY], 3.0), 1 << 60);
    }
}

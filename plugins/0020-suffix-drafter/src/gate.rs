//! Whether a lookup pays, and how deep: kept tokens a millisecond against the rounds without.

use plugfold_base_auto_api::{Arm, Prices, Rounds};

/// Shortest match of each band.
const BANDS: [usize; 4] = [0, 8, 16, 32];
/// What a band is taken for before it was tried.
const PRIORS: [f64; 4] = [0.45, 0.7, 0.8, 0.9];
/// Rounds that a prior weighs.
const PRIOR_WEIGHT: f64 = 2.0;
/// What remains of a round's weight after the next.
const FADE: f64 = 0.85;
/// Rounds without lookup that count for the rate to beat.
const RECENT: usize = 8;
/// Bands that are tried now and then although they do not seem to pay, and after how many times that they did not.
const PROBED: usize = 2;
const SKIPS: u32 = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Band {
    kept: f64,
    tried: f64,
    skips: u32,
}

/// One sequence's experience with lookups.
#[derive(Clone, Debug)]
pub struct Gate {
    bands: [Band; 4],
    others: Rounds,
    /// The band of the round that runs.
    now: Option<usize>,
    /// Rows that each model drafter has not seen.
    owed: [u32; 2],
}

impl Default for Gate {
    fn default() -> Self {
        Self { bands: [Band::default(); 4], others: Rounds::of(RECENT), now: None, owed: [0; 2] }
    }
}

fn band(length: usize) -> usize {
    BANDS.iter().rposition(|least| length >= *least).unwrap_or(0)
}

impl Gate {
    fn share(&self, at: usize) -> f64 {
        let b = &self.bands[at];
        (b.kept + PRIOR_WEIGHT * PRIORS[at]) / (b.tried + PRIOR_WEIGHT)
    }

    /// The depth with the best rate, and that rate.
    fn best(share: f64, most: u32, prices: &Prices) -> (u32, f64) {
        let (mut best, mut depth) = (0.0, 0);
        let (mut chain, mut tokens) = (1.0, 1.0);
        for k in 1..=most {
            chain *= share;
            tokens += chain;
            let rate = tokens / (prices.window(k + 1) + prices.row() * tokens);
            if rate > best {
                (best, depth) = (rate, k);
            }
        }
        (depth, best)
    }

    /// How many of `most` drafts that a match of `length` tokens offers to verify; `None` where others do better.
    pub fn depth(&mut self, length: usize, most: u32, prices: &Prices) -> Option<u32> {
        let at = band(length);
        let (depth, rate) = Self::best(self.share(at), most, prices);
        let other = self.others.rate().unwrap_or_else(|| prices.first_rate());
        let b = &mut self.bands[at];
        if rate <= other {
            b.skips += 1;
            if at < PROBED || b.skips < SKIPS {
                return None;
            }
        }
        b.skips = 0;
        self.now = Some(at);
        Some(depth)
    }

    /// The round that runs drafts by lookup whatever it costs.
    pub fn forced(&mut self, length: usize) {
        self.now = Some(band(length));
    }

    /// No lookup in the round that runs.
    pub fn pass(&mut self) {
        self.now = None;
    }

    /// Takes a lookup round in.
    pub fn looked_up(&mut self, drafted: u32, kept: u32) {
        for owed in &mut self.owed {
            *owed = owed.saturating_add(kept + 1);
        }
        let Some(b) = self.now.take().and_then(|at| self.bands.get_mut(at)) else { return };
        b.kept = FADE * b.kept + f64::from(kept);
        b.tried = FADE * b.tried + f64::from(kept) + f64::from(u8::from(kept < drafted));
    }

    /// Takes any other round in; `arm`: the model drafter, if one drafted.
    pub fn other(&mut self, arm: Option<Arm>, drafted: u32, kept: u32, prices: &Prices) {
        self.now = None;
        let drafting = match arm {
            Some(Arm::Mtp) => prices.chain(drafted, self.owed[0]),
            Some(Arm::Block) => prices.block(self.owed[1]),
            None => 0.0,
        };
        for (i, owed) in self.owed.iter_mut().enumerate() {
            let seen = arm.is_some_and(|a| usize::from(a == Arm::Block) == i);
            *owed = if seen { kept + 1 } else { owed.saturating_add(kept + 1) };
        }
        self.others.add(kept + 1, prices.window(drafted + 1) + drafting);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prices() -> Prices {
        Prices { taps_row: 0.0, mtp_row: 0.0, ..Prices::fixed() }
    }

    #[test]
    fn sure_copies_are_as_deep_as_the_window() {
        let (depth, rate) = Gate::best(1.0, 7, &prices());
        assert_eq!(depth, 7);
        assert!((rate - 8.0 / 68.4).abs() < 1e-12, "{rate}");
        assert_eq!(Gate::default().depth(41, 7, &prices()), Some(7), "a repeat of 41 tokens");
        assert_eq!(Gate::default().depth(41, 3, &prices()), Some(3), "never more than there are");
    }

    #[test]
    fn the_gate_declines_what_was_not_kept() {
        let mut gate = Gate::default();
        for _ in 0..2 {
            gate.forced(41);
            gate.looked_up(7, 0);
        }
        for _ in 0..4 {
            gate.other(Some(Arm::Mtp), 3, 2, &prices());
        }
        assert_eq!(gate.depth(41, 7, &prices()), None);
    }

    #[test]
    fn a_long_match_is_probed_on_the_eighth_skip() {
        let mut gate = Gate::default();
        for _ in 0..8 {
            gate.other(Some(Arm::Block), 7, 7, &prices());
        }
        let asked: Vec<bool> = (0..17).map(|_| gate.depth(41, 7, &prices()).is_some()).collect();
        let probes: Vec<usize> = (0..17).filter(|i| asked[*i]).map(|i| i + 1).collect();
        assert_eq!(probes, [8, 16]);
        // A short match never is.
        assert!((0..40).all(|_| gate.depth(9, 7, &prices()).is_none()));
    }

    #[test]
    fn bands_learn_apart() {
        let mut gate = Gate::default();
        for _ in 0..6 {
            gate.forced(40);
            gate.looked_up(7, 7);
            gate.forced(5);
            gate.looked_up(7, 0);
        }
        assert!(gate.share(3) > 0.95 && gate.share(0) < 0.2);
        assert_eq!(gate.share(1), 0.7);
        assert_eq!([0, 7, 8, 15, 16, 31, 32, 64].map(band), [0, 0, 1, 1, 2, 2, 3, 3]);
    }

    #[test]
    fn rows_that_a_drafter_owes_raise_its_price() {
        let p = Prices { mtp_row: 2.0, ..Prices::fixed() };
        let mut fresh = Gate::default();
        fresh.other(Some(Arm::Mtp), 3, 2, &p);
        let mut late = Gate::default();
        late.forced(40);
        late.looked_up(7, 7);
        late.other(Some(Arm::Mtp), 3, 2, &p);
        assert!(late.others.rate() < fresh.others.rate());
    }
}

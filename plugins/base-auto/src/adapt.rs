//! What policies learn about a sequence: acceptance, the better drafter, the depth that pays. Functions of the rounds alone.

use plugfold_base_auto_api::{Arm, Explore, Prices, Rounds, best_depth};

/// Drafts of a running policy.
const RUNNING_MOST: u32 = 3;
/// What remains of a round's weight in the running acceptance after the next.
const FADE: f64 = 0.85;

/// Running acceptance and the number of drafts that it steers.
#[derive(Clone, Debug)]
pub struct Running {
    kept: f64,
    tried: f64,
    drafts: u32,
}

impl Default for Running {
    fn default() -> Self {
        Self { kept: 0.0, tried: 0.0, drafts: 2 }
    }
}

impl Running {
    /// Drafts of the coming round.
    pub fn drafts(&self) -> u32 {
        self.drafts
    }

    /// Takes a round in.
    pub fn learn(&mut self, drafted: u32, kept: u32, low: f64, high: f64) {
        if drafted == 0 {
            return;
        }
        self.kept = FADE * self.kept + f64::from(kept);
        self.tried = FADE * self.tried + f64::from(drafted);
        let share = self.kept / self.tried;
        if share > high {
            self.drafts = (self.drafts + 1).min(RUNNING_MOST);
        } else if share < low {
            self.drafts = (self.drafts - 1).max(1);
        }
    }
}

/// Rounds of a drafter that count for the choice between two.
const RECENT: usize = 16;

/// The choice between two drafters.
#[derive(Clone, Debug)]
pub struct Chooser {
    rounds: [Rounds; 2],
    seen: [u32; 2],
    preferred: usize,
    since_other: u32,
}

impl Default for Chooser {
    fn default() -> Self {
        let rounds = || Rounds::of(RECENT);
        Self { rounds: [rounds(), rounds()], seen: [0; 2], preferred: 0, since_other: 0 }
    }
}

const ARMS: [Arm; 2] = [Arm::Mtp, Arm::Block];

impl Chooser {
    /// Who drafts in the coming round, of two that can.
    pub fn arm(&self, explore: &Explore) -> Arm {
        let at = match self.seen.iter().position(|n| *n < explore.first) {
            Some(fresh) => fresh,
            None if self.since_other + 1 >= explore.every => 1 - self.preferred,
            None => self.preferred,
        };
        ARMS[at]
    }

    /// Takes a round of a drafter in: tokens that it committed, and what it cost.
    pub fn learn(&mut self, arm: Arm, tokens: u32, ms: f64, explore: &Explore) {
        let at = usize::from(arm == Arm::Block);
        self.rounds[at].add(tokens, ms);
        self.seen[at] = self.seen[at].saturating_add(1);
        self.since_other = if at == self.preferred { self.since_other.saturating_add(1) } else { 0 };
        let rate = |i: usize| self.rounds[i].rate().unwrap_or(0.0);
        let other = 1 - self.preferred;
        if self.seen.iter().all(|n| *n >= explore.first)
            && rate(other) > rate(self.preferred) * (1.0 + explore.margin)
        {
            self.preferred = other;
            self.since_other = 0;
        }
    }
}

/// Weight that a position's acceptance keeps from round to round.
const SLOW: f64 = 0.97;
/// What a position is taken for before it was tried: optimistic, so that it gets tried.
const PRIOR: (f64, f64) = (0.8, 2.0);
/// No draft is certain.
const SURE: f64 = 0.995;

/// Acceptance by place in the window, and the depth that promises most tokens net of their time.
#[derive(Clone, Debug)]
pub struct Depth {
    places: Vec<(f64, f64)>,
    rounds: Rounds,
}

impl Default for Depth {
    fn default() -> Self {
        Self { places: Vec::new(), rounds: Rounds::of(RECENT) }
    }
}

impl Depth {
    /// How likely the draft at a place (from 0) is kept, once all before it are.
    pub fn share(&self, place: usize) -> f64 {
        let (kept, tried) = self.places.get(place).copied().unwrap_or((0.0, 0.0));
        ((kept + PRIOR.0 * PRIOR.1) / (tried + PRIOR.1)).min(SURE)
    }

    /// Tokens a millisecond lately.
    pub fn rate(&self, prices: &Prices) -> f64 {
        self.rounds.rate().unwrap_or_else(|| prices.first_rate())
    }

    /// Drafts of the coming round, at least one where there is room, and the product of probabilities below which a
    /// further row is not worth its time.
    pub fn drafts(&self, most: u32, prices: &Prices, drafting: impl Fn(u32) -> f64) -> (u32, f64) {
        let rate = self.rate(prices);
        let share = |place: u32| self.share(place as usize);
        let chosen = best_depth(most, rate, share, |k| prices.window(k + 1) + drafting(k));
        let row = prices.window(chosen + 1) - prices.window(chosen);
        (chosen, (rate * row).clamp(0.0, 1.0))
    }

    /// Takes a round in. Places past the first draft that was not kept tell nothing.
    pub fn learn(&mut self, drafted: u32, kept: u32, ms: f64) {
        self.rounds.add(kept + 1, ms);
        let reached = drafted.min(kept + 1) as usize;
        if self.places.len() < reached {
            self.places.resize(reached, (0.0, 0.0));
        }
        for (i, (was_kept, tried)) in self.places.iter_mut().take(reached).enumerate() {
            *was_kept = SLOW * *was_kept + f64::from(u8::from(i < kept as usize));
            *tried = SLOW * *tried + 1.0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn running_acceptance_steers_between_one_and_three_drafts() {
        let mut r = Running::default();
        for _ in 0..5 {
            let n = r.drafts();
            r.learn(n, n, 0.6, 0.85);
        }
        assert_eq!(r.drafts(), 3, "everything is kept");
        for _ in 0..20 {
            let n = r.drafts();
            r.learn(n, 0, 0.6, 0.85);
        }
        assert_eq!(r.drafts(), 1, "nothing is");
        let before = r.drafts();
        r.learn(0, 0, 0.6, 0.85);
        assert_eq!(r.drafts(), before, "a round without drafts tells nothing");
    }

    #[test]
    fn the_better_drafter_is_preferred_and_the_other_tried_now_and_then() {
        let explore = Explore::USUAL;
        let mut c = Chooser::default();
        let mut arms = Vec::new();
        for _ in 0..40 {
            let arm = c.arm(&explore);
            arms.push(arm);
            let tokens = if arm == Arm::Block { 4 } else { 2 };
            c.learn(arm, tokens, 50.0, &explore);
        }
        assert_eq!(arms[..4], [Arm::Mtp, Arm::Mtp, Arm::Block, Arm::Block]);
        let mtp = arms[4..].iter().filter(|a| **a == Arm::Mtp).count();
        assert!((3..=6).contains(&mtp), "one round in eight: {arms:?}");
    }

    #[test]
    fn a_lead_within_the_margin_does_not_switch() {
        let explore = Explore { first: 1, every: 64, margin: 0.1 };
        let mut c = Chooser::default();
        c.learn(Arm::Mtp, 10, 100.0, &explore);
        c.learn(Arm::Block, 10, 95.0, &explore);
        assert_eq!(c.arm(&explore), Arm::Mtp);
        c.learn(Arm::Block, 10, 60.0, &explore);
        assert_eq!(c.arm(&explore), Arm::Block);
    }

    #[test]
    fn the_depth_is_the_best_of_all() {
        let prices = Prices::fixed();
        let mut d = Depth::default();
        for round in 0..60u32 {
            let (drafts, floor) = d.drafts(7, &prices, |k| prices.chain(k, 1));
            let surplus = |k: u32| {
                let mut chain = 1.0;
                let tokens: f64 = (0..k as usize)
                    .map(|i| {
                        chain *= d.share(i);
                        chain
                    })
                    .sum::<f64>()
                    + 1.0;
                tokens - d.rate(&prices) * (prices.window(k + 1) + prices.chain(k, 1))
            };
            assert!((1..=7).all(|k| surplus(k) <= surplus(drafts) + 1e-9), "round {round}: {drafts}");
            assert!((0.0..=1.0).contains(&floor));
            d.learn(drafts, (round * 7 % 5).min(drafts), prices.window(drafts + 1) + prices.chain(drafts, 1));
        }
        assert_eq!(d.drafts(0, &prices, |_| 0.0).0, 0, "no room, no drafts");
    }

    #[test]
    fn a_place_behind_a_rejected_draft_is_not_judged() {
        let mut d = Depth::default();
        d.learn(5, 1, 50.0);
        assert!(d.share(0) > 0.8 && d.share(1) < 0.8);
        assert_eq!(d.share(2), 0.8);
    }
}

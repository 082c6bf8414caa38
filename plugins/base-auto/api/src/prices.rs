//! What a round costs, in milliseconds of a model of the machine: no clock, so every rank decides alike.

use std::collections::VecDeque;

/// Prices of forwards and drafts.
#[derive(Clone, Debug, PartialEq)]
pub struct Prices {
    /// A window of 1, 2, 3, ... rows.
    pub windows: Vec<f64>,
    /// The first draft of the multi-token-prediction layer.
    pub mtp: f64,
    /// Each further one.
    pub mtp_step: f64,
    /// Each further row that the layer catches up on.
    pub mtp_row: f64,
    /// A pass of the block drafter.
    pub block: f64,
    /// Each row that the block drafter catches up on.
    pub taps_row: f64,
}

impl Prices {
    /// Prices that stand in until a plugin measures. The windows are published figures of a pair of DGX Spark (see NOTICE);
    /// decisions depend on ratios only.
    pub fn fixed() -> Self {
        Self {
            windows: vec![30.0, 40.0, 44.7, 49.5, 54.2, 58.9, 63.7, 68.4],
            mtp: 2.0,
            mtp_step: 1.7,
            mtp_row: 0.3,
            block: 3.9,
            taps_row: 0.3,
        }
    }

    /// A window of `rows`; past the table, along the slope of its upper half.
    pub fn window(&self, rows: u32) -> f64 {
        let last = self.windows.len().saturating_sub(1);
        let at = (rows.max(1) as usize - 1).min(last);
        let known = self.windows.get(at).copied().unwrap_or(1.0);
        let beyond = rows.saturating_sub(self.windows.len().max(1) as u32);
        let half = &self.windows[self.windows.len() / 2..];
        let step = match half {
            [first, .., end] => (end - first) / (half.len() - 1) as f64,
            _ => 0.0,
        };
        known + step * f64::from(beyond)
    }

    /// A chain of the multi-token-prediction layer after `backlog` rows that it has not seen.
    pub fn chain(&self, steps: u32, backlog: u32) -> f64 {
        if steps == 0 {
            return 0.0;
        }
        let catch_up = self.mtp_row * f64::from(backlog.saturating_sub(1));
        self.mtp + self.mtp_step * f64::from(steps - 1) + catch_up
    }

    /// A block after `backlog` rows that the drafter has not seen.
    pub fn block(&self, backlog: u32) -> f64 {
        self.block + self.taps_row * f64::from(backlog)
    }

    /// What a row costs the drafter that has to catch up on it later.
    pub fn row(&self) -> f64 {
        self.mtp_row.max(self.taps_row)
    }

    /// Tokens a millisecond before anything is known: a draft that is kept.
    pub fn first_rate(&self) -> f64 {
        2.0 / (self.window(2) + self.mtp)
    }
}

/// The depth, from 1 to `most`, that promises most tokens net of their time: `share` says how likely the draft at a place
/// (from 0) is kept once all before it are, `ms` what a round with so many drafts costs, `rate` how many tokens a
/// millisecond is worth. Ties go to the smaller; 0 where there is no room.
pub fn best_depth(most: u32, rate: f64, share: impl Fn(u32) -> f64, ms: impl Fn(u32) -> f64) -> u32 {
    let (mut best, mut chosen) = (f64::NEG_INFINITY, 0);
    let (mut chain, mut expected) = (1.0, 1.0);
    for k in 1..=most {
        chain *= share(k - 1);
        expected += chain;
        let surplus = expected - rate * ms(k);
        if surplus > best + 1e-12 {
            (best, chosen) = (surplus, k);
        }
    }
    chosen
}

/// Tokens and milliseconds of the last rounds.
#[derive(Clone, Debug)]
pub struct Rounds {
    last: VecDeque<(u32, f64)>,
    most: usize,
}

impl Rounds {
    /// Remembers so many rounds.
    pub fn of(most: usize) -> Self {
        Self { last: VecDeque::with_capacity(most), most }
    }

    /// A round that committed `tokens` in `ms`.
    pub fn add(&mut self, tokens: u32, ms: f64) {
        if self.last.len() == self.most {
            self.last.pop_front();
        }
        self.last.push_back((tokens, ms));
    }

    /// Tokens a millisecond; `None` before the first round.
    pub fn rate(&self) -> Option<f64> {
        let tokens: u32 = self.last.iter().map(|r| r.0).sum();
        let ms: f64 = self.last.iter().map(|r| r.1).sum();
        (ms > 0.0).then(|| f64::from(tokens) / ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_past_the_table_go_on_as_its_upper_half() {
        let p = Prices::fixed();
        assert_eq!(p.window(0), 30.0);
        assert_eq!(p.window(8), 68.4);
        assert!((p.window(10) - (68.4 + 2.0 * (68.4 - 54.2) / 3.0)).abs() < 1e-9);
        let flat = Prices { windows: vec![5.0], ..p };
        assert_eq!((flat.window(1), flat.window(9)), (5.0, 5.0));
    }

    #[test]
    fn chains_and_blocks_pay_for_what_they_have_not_seen() {
        let p = Prices::fixed();
        assert_eq!(p.chain(0, 9), 0.0);
        assert_eq!(p.chain(1, 1), 2.0);
        assert!((p.chain(3, 4) - (2.0 + 2.0 * 1.7 + 3.0 * 0.3)).abs() < 1e-9);
        assert!((p.block(2) - 4.5).abs() < 1e-9);
    }

    #[test]
    fn a_rate_is_of_the_last_rounds() {
        let mut rounds = Rounds::of(2);
        assert_eq!(rounds.rate(), None);
        for tokens in [100, 2, 4] {
            rounds.add(tokens, 3.0);
        }
        assert_eq!(rounds.rate(), Some(1.0));
    }
}

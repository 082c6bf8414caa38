//! How the model is divided between ranks.
//!
//! Heads, the inner widths of feed-forward blocks and the vocabulary are cut into consecutive shares whose sizes differ
//! by at most one; everything else is on every rank. A block's output on a rank is a partial sum over its share.

use std::ops::Range;

use crate::config::ModelConfig;

/// One rank's place among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Split {
    /// This rank.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
}

/// A rank count that the model cannot be divided by.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{ranks} ranks are too many for this model ({what}: {have}); use 1 to {most}")]
pub struct SplitError {
    /// What was asked for.
    pub ranks: usize,
    /// The scarcest thing to divide.
    pub what: &'static str,
    /// How many of it there are.
    pub have: usize,
    /// Most ranks that would work.
    pub most: usize,
}

impl Split {
    /// One rank that has everything.
    pub const WHOLE: Split = Split { rank: 0, ranks: 1 };

    /// Checks that every rank gets at least one of everything that is divided.
    ///
    /// # Errors
    /// Names what is too few and the rank counts that work.
    pub fn new(rank: usize, ranks: usize, config: &ModelConfig) -> Result<Self, SplitError> {
        let divided = [
            ("KDA heads", config.kda.heads),
            ("MLA heads", config.mla.heads),
            ("dense feed-forward width", config.dense_width),
            ("expert width", config.moe.width),
            ("shared expert width", config.moe.shared_width()),
            ("vocabulary", config.vocab_size),
        ];
        let scarce = divided.into_iter().min_by_key(|d| d.1).unwrap_or(("ranks", 1));
        if ranks == 0 || ranks > scarce.1 {
            return Err(SplitError { ranks, what: scarce.0, have: scarce.1, most: scarce.1 });
        }
        Ok(Self { rank, ranks })
    }

    /// This rank's share of `n` things.
    pub fn share(&self, n: usize) -> Range<usize> {
        self.share_of(self.rank, n)
    }

    /// Another rank's share of `n` things.
    pub fn share_of(&self, rank: usize, n: usize) -> Range<usize> {
        rank * n / self.ranks..(rank + 1) * n / self.ranks
    }

    /// The share in units of `width` columns each.
    pub fn columns(&self, n: usize, width: usize) -> Range<usize> {
        let share = self.share(n);
        share.start * width..share.end * width
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once() {
        for n in [1, 4, 5, 64, 77, 154_880] {
            for ranks in 1..=n.min(9) {
                let mut next = 0;
                for rank in 0..ranks {
                    let share = Split { rank, ranks }.share(n);
                    assert_eq!(share.start, next);
                    assert!(!share.is_empty());
                    next = share.end;
                }
                assert_eq!(next, n);
            }
        }
    }
}

//! How much of the time prompt pieces may take from requests that decode.

/// The account: pieces owe, decode rounds pay.
#[derive(Clone, Copy, Debug)]
pub struct Fair {
    share: f64,
    /// Seconds of decode rounds that are owed.
    debt: f64,
    /// The round that was planned last had a piece beside decoding requests.
    beside: bool,
}

impl Fair {
    /// Nothing owed. `share`: the largest part of the time that pieces may take, over 0 and at most 1.
    pub fn new(share: f64) -> Self {
        Self { share, debt: 0.0, beside: false }
    }

    /// Takes in what the last round took, and who is there now.
    pub fn settle(&mut self, piece_s: f64, decode_s: f64, prefilling: bool, decoding: bool) {
        if std::mem::take(&mut self.beside) {
            self.debt += piece_s * (1.0 - self.share) / self.share;
        }
        self.debt = (self.debt - decode_s).max(0.0);
        if !prefilling || !decoding {
            self.debt = 0.0;
        }
    }

    /// Whether a piece may run now.
    pub fn allows(&self) -> bool {
        self.debt <= 0.0
    }

    /// A piece is planned.
    pub fn planned(&mut self, decoding: bool) {
        self.beside = decoding;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs rounds with a clock of their own; gives seconds of pieces, of decode, and the longest run of pieces.
    fn play(share: f64, piece: f64, decode: f64, rounds: usize) -> (f64, f64, usize) {
        let mut fair = Fair::new(share);
        let (mut last, mut pieces, mut decodes, mut run, mut longest) = ((0.0, 0.0), 0.0, 0.0, 0, 0);
        for _ in 0..rounds {
            fair.settle(last.0, last.1, true, decode > 0.0);
            last = (0.0, decode);
            if fair.allows() {
                fair.planned(decode > 0.0);
                last.0 = piece;
            }
            pieces += last.0;
            decodes += last.1;
            run = if last.1 > 0.0 { 0 } else { run + 1 };
            longest = longest.max(run);
        }
        (pieces, decodes, longest)
    }

    #[test]
    fn pieces_take_at_most_their_share() {
        for share in [0.1, 0.3, 0.5, 0.9, 1.0] {
            for (piece, decode) in [(1.0, 0.05), (0.05, 1.0), (0.3, 0.3)] {
                let (pieces, decodes, _) = play(share, piece, decode, 5000);
                let took = pieces / (pieces + decodes);
                assert!(took <= share + 0.01, "{share}: {took} for pieces of {piece} beside {decode}");
                // Where pieces could use more than their share, they get it.
                let most = piece / (piece + decode);
                assert!(took >= share.min(most) - 0.05, "{share}: {took} of at most {most}");
            }
        }
    }

    #[test]
    fn with_nobody_decoding_pieces_run_back_to_back() {
        let (pieces, decodes, longest) = play(0.1, 1.0, 0.0, 50);
        assert_eq!((pieces, decodes, longest), (50.0, 0.0, 50));
    }

    #[test]
    fn debts_end_with_the_prompts() {
        let mut fair = Fair::new(0.01);
        fair.planned(true);
        fair.settle(10.0, 0.1, true, true);
        assert!(!fair.allows());
        fair.settle(0.0, 0.1, false, true);
        assert!(fair.allows(), "no prompt is left");
    }
}

//! The index of one text: where each n-gram ended before, and what followed the longest earlier occurrence of its end.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Longest gram that is looked up.
const LONGEST_GRAM: usize = 8;
/// Occurrences that are compared, newest first.
const CANDIDATES: usize = 64;
/// Tokens that are compared backwards.
const FAR: usize = 64;
/// No earlier occurrence.
const NONE: u32 = u32::MAX;

/// The keys are hashes already.
#[derive(Default)]
struct Taken(u64);

impl Hasher for Taken {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3));
    }
    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

/// An earlier occurrence of the text's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Tokens that agree.
    pub length: usize,
    /// Where the occurrence ends: what is there followed it.
    pub end: usize,
}

/// A text and the places of its n-grams.
#[derive(Default)]
pub struct Index {
    gram: usize,
    tokens: Vec<u32>,
    /// By gram: where it ended last.
    newest: HashMap<u64, u32, BuildHasherDefault<Taken>>,
    /// By end: where the same gram ended before.
    before: Vec<u32>,
}

fn hash(gram: &[u32]) -> u64 {
    let mixed = gram.iter().fold(0x9e37_79b9_7f4a_7c15_u64, |h, t| {
        (h ^ u64::from(*t)).wrapping_mul(0xff51_afd7_ed55_8ccd).rotate_left(29)
    });
    mixed ^ (mixed >> 32)
}

impl Index {
    /// An empty text, for matches of at least `shortest` tokens.
    pub fn new(shortest: usize) -> Self {
        Self { gram: Self::gram_of(shortest), ..Self::default() }
    }

    /// Tokens of the grams for matches of at least `shortest` tokens.
    pub fn gram_of(shortest: usize) -> usize {
        shortest.clamp(1, LONGEST_GRAM)
    }

    /// Tokens of its grams.
    pub fn gram(&self) -> usize {
        self.gram
    }

    /// The text.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Adds tokens. The gram at the end of the text is entered once a token follows it, so that an occurrence always goes
    /// on and the end never finds itself.
    pub fn extend(&mut self, tokens: &[u32]) {
        if self.before.is_empty() {
            self.before.push(NONE);
        }
        for token in tokens {
            let end = self.tokens.len();
            if end >= self.gram {
                let last = self.newest.insert(hash(&self.tokens[end - self.gram..]), end as u32);
                self.before[end] = last.unwrap_or(NONE);
            }
            self.tokens.push(*token);
            self.before.push(NONE);
        }
    }

    /// The longest earlier occurrence of the text's end, of equally long ones the last.
    pub fn find(&self) -> Option<Match> {
        let (n, total) = (self.gram, self.tokens.len());
        let last = self.tokens.get(total.checked_sub(n)?..)?;
        let mut at = self.newest.get(&hash(last)).copied().unwrap_or(NONE);
        let mut best: Option<Match> = None;
        let mut seen = 0;
        while at != NONE && seen < CANDIDATES {
            let end = at as usize;
            at = self.before[end];
            let same = self.tokens[..end].iter().rev().zip(self.tokens.iter().rev());
            let length = same.take(FAR).take_while(|(a, b)| a == b).count();
            if length < n {
                // Another gram of the same hash.
                continue;
            }
            seen += 1;
            if best.is_none_or(|b| length > b.length) {
                best = Some(Match { length, end });
            }
            if length == FAR {
                break;
            }
        }
        best
    }

    /// `count` tokens that followed an occurrence; past the text's end the copy goes on with itself.
    pub fn copy(&self, found: Match, count: usize) -> Vec<u32> {
        let mut out = Vec::with_capacity(count);
        for i in 0..count {
            let token = match self.tokens.get(found.end + i) {
                Some(token) => *token,
                None => out[i - (self.tokens.len() - found.end)],
            };
            out.push(token);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(gram: usize, tokens: &[u32]) -> Index {
        let mut index = Index::new(gram);
        index.extend(tokens);
        index
    }

    /// All earlier ends, newest first.
    fn brute(tokens: &[u32], gram: usize) -> Option<Match> {
        let length = |end: usize| {
            let same = tokens[..end].iter().rev().zip(tokens.iter().rev());
            same.take(FAR).take_while(|(a, b)| a == b).count()
        };
        let ends = (1..tokens.len()).rev().filter(|end| length(*end) >= gram).take(CANDIDATES);
        let mut best: Option<Match> = None;
        for end in ends {
            let length = length(end);
            if best.is_none_or(|b| length > b.length) {
                best = Some(Match { length, end });
            }
        }
        best
    }

    #[test]
    fn the_matcher_equals_a_brute_force_search() {
        let mut state = 0x1234_5678_9abc_def0_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 20) as u32
        };
        for gram in [1, 2, 3, 5] {
            let mut index = Index::new(gram);
            for round in 0..400 {
                let more: Vec<u32> = (0..=(next() % 4)).map(|_| next() % 4).collect();
                index.extend(&more);
                assert_eq!(index.find(), brute(index.tokens(), gram), "gram {gram}, round {round}");
            }
        }
    }

    #[test]
    fn a_match_that_overlaps_the_end_repeats_with_its_period() {
        let i = index(2, &[0, 1, 2, 3, 1, 2, 3, 1, 2]);
        let found = i.find().unwrap();
        assert_eq!(found, Match { length: 5, end: 6 });
        assert_eq!(i.copy(found, 7), [3, 1, 2, 3, 1, 2, 3]);
    }

    #[test]
    fn a_run_of_one_token_goes_on_as_that_token() {
        let i = index(3, &[7; 20]);
        let found = i.find().unwrap();
        assert_eq!(i.copy(found, 5), [7; 5]);
        assert!(found.end < 20, "a suffix never matches itself");
    }

    #[test]
    fn a_suffix_never_matches_itself() {
        for n in 1..12 {
            let tokens: Vec<u32> = (0..n).collect();
            assert_eq!(index(1, &tokens).find(), None);
        }
        assert_eq!(index(3, &[1, 2]).find(), None, "shorter than a gram");
        assert_eq!(index(3, &[]).find(), None);
    }

    #[test]
    fn the_longest_wins_then_the_most_recent() {
        //          0  1  2  3  4  5  6  7  8  9 10 11
        let text = [9, 1, 2, 5, 8, 1, 2, 6, 9, 1, 2];
        assert_eq!(index(2, &text).find().unwrap(), Match { length: 3, end: 3 }, "9 1 2 before 1 2");
        let text = [8, 1, 2, 5, 7, 1, 2, 6, 9, 1, 2];
        assert_eq!(index(2, &text).find().unwrap(), Match { length: 2, end: 7 }, "the later of two equals");
    }

    #[test]
    fn no_more_than_64_tokens_and_64_occurrences_are_compared() {
        let long: Vec<u32> = (0..100).chain(0..100).collect();
        assert_eq!(index(4, &long).find().unwrap(), Match { length: 64, end: 100 });
        // The longest occurrence lies behind 70 short ones.
        let mut text = vec![5, 6, 1, 2];
        (0..70).for_each(|i| text.extend([100 + i, 1, 2]));
        text.extend([5, 6, 1, 2]);
        assert_eq!(index(2, &text).find().unwrap().length, 2);
        assert_eq!(index(2, &text).find(), brute(&text, 2));
    }

    #[test]
    fn extending_in_portions_changes_nothing() {
        let text: Vec<u32> = (0..200).map(|i| i * i % 17).collect();
        let whole = index(3, &text);
        let mut parts = Index::new(3);
        text.chunks(7).for_each(|t| parts.extend(t));
        assert_eq!((whole.find(), whole.before), (parts.find(), parts.before));
    }
}

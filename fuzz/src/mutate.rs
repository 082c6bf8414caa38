//! Repeatable mutations of a corpus, for runs without a fuzzer.

/// Longest mutated input in bytes.
const LONGEST: usize = 2000;

/// A repeatable sequence of inputs made from a corpus.
pub struct Mutations<'a> {
    corpus: &'a [Vec<u8>],
    words: &'a [&'a str],
    state: u64,
}

impl<'a> Mutations<'a> {
    /// From a corpus that is not empty, and words to put in.
    pub fn new(corpus: &'a [Vec<u8>], words: &'a [&'a str], seed: u64) -> Self {
        Self { corpus, words, state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        (self.state % bound.max(1) as u64) as usize
    }

    fn step(&mut self, data: &mut Vec<u8>) {
        let at = self.below(data.len() + 1);
        match self.below(6) {
            0 => {
                let word = self.words[self.below(self.words.len())];
                data.splice(at..at, word.bytes());
            }
            1 => {
                let to = (at + 1 + self.below(8)).min(data.len());
                data.drain(at..to);
            }
            2 => {
                let to = (at + 1 + self.below(30)).min(data.len());
                let copy = data[at..to].to_vec();
                let place = self.below(data.len() + 1);
                data.splice(place..place, copy);
            }
            3 => {
                let other = &self.corpus[self.below(self.corpus.len())];
                let from = self.below(other.len() + 1);
                data.truncate(at);
                data.extend_from_slice(&other[from..]);
            }
            4 => {
                if let Some(byte) = data.get_mut(at) {
                    *byte ^= 1 << self.below(8);
                }
            }
            _ => {
                let byte = self.below(256) as u8;
                data.insert(at, byte);
            }
        }
    }
}

impl Iterator for Mutations<'_> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let mut data = self.corpus[self.below(self.corpus.len())].clone();
        for _ in 0..=self.below(6) {
            self.step(&mut data);
        }
        data.truncate(LONGEST);
        Some(data)
    }
}

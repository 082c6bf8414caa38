//! The last prompts with their tokens, most recently used first.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::cuts::Cut;

/// A prompt.
pub struct Entry {
    /// The character that stands in control tokens of clients; 0 for none.
    pub guard: u32,
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Its safe cuts, ascending.
    pub cuts: Vec<Cut>,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.text.len() + 4 * self.tokens.len() + 16 * self.cuts.len()
    }

    /// The last cut that a text shares with this one's, beyond `least` bytes. Compares every byte once at most.
    fn shared(&self, text: &str, least: usize) -> Option<Cut> {
        if text.starts_with(&self.text) {
            return self.cuts.last().copied().filter(|cut| cut.0 > least);
        }
        // Between cuts[low - 1], which is shared, and cuts[high], which is not.
        let (mut low, mut high, mut equal) = (0, self.cuts.len(), 0);
        while low < high {
            let middle = usize::midpoint(low, high);
            let end = self.cuts[middle].0;
            let same = text.len() >= end && text.as_bytes()[equal..end] == self.text.as_bytes()[equal..end];
            if same {
                (low, equal) = (middle + 1, end);
            } else {
                high = middle;
            }
        }
        low.checked_sub(1).map(|last| self.cuts[last]).filter(|cut| cut.0 > least)
    }
}

/// What a prompt has in common with the ones before it.
pub enum Found {
    /// Nothing that helps.
    Nothing,
    /// The whole of an entry's text.
    All(Arc<Entry>),
    /// An entry's text up to a cut.
    Until(Arc<Entry>, Cut),
}

/// The last prompts.
pub struct Cache {
    entries: VecDeque<Arc<Entry>>,
    most: usize,
    bytes: usize,
    most_bytes: usize,
}

impl Cache {
    /// A cache of so many prompts, and so many bytes of them.
    pub fn new(most: usize, most_bytes: usize) -> Self {
        Self { entries: VecDeque::new(), most, bytes: 0, most_bytes }
    }

    /// The longest beginning that a prompt shares with a kept one. That counts as its use.
    pub fn find(&mut self, text: &str, guard: u32) -> Found {
        let mut best: Option<(usize, Cut)> = None;
        for (place, entry) in self.entries.iter().enumerate().filter(|(_, e)| e.guard == guard) {
            if entry.text == text {
                best = Some((place, (text.len(), entry.tokens.len())));
                break;
            }
            let least = best.map_or(0, |(_, cut)| cut.0);
            best = entry.shared(text, least).map(|cut| (place, cut)).or(best);
        }
        let Some((place, cut)) = best else { return Found::Nothing };
        let Some(entry) = self.entries.remove(place) else { return Found::Nothing };
        self.entries.push_front(entry.clone());
        if entry.text.len() == text.len() && cut.0 == text.len() && entry.text == text {
            Found::All(entry)
        } else {
            Found::Until(entry, cut)
        }
    }

    /// Keeps a prompt; what is too much for the bounds goes, the least recently used first.
    pub fn keep(&mut self, entry: Entry) {
        if entry.bytes() > self.most_bytes {
            return;
        }
        self.entries.retain(|known| known.guard != entry.guard || known.text != entry.text);
        self.entries.push_front(Arc::new(entry));
        self.bytes = self.entries.iter().map(|e| e.bytes()).sum();
        while self.entries.len() > self.most || self.bytes > self.most_bytes {
            let Some(last) = self.entries.pop_back() else { break };
            self.bytes -= last.bytes();
        }
    }

    /// Puts tokens into an entry that are not its own; a planted fault.
    #[cfg(test)]
    pub fn corrupt(&mut self) {
        for entry in &mut self.entries {
            let mut tokens = entry.tokens.clone();
            if let Some(token) = tokens.get_mut(1) {
                *token += 1;
            }
            let (guard, text, cuts) = (entry.guard, entry.text.clone(), entry.cuts.clone());
            *entry = Arc::new(Entry { guard, text, tokens, cuts });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(text: &str, cuts: &[Cut]) -> Entry {
        Entry { guard: 0, text: text.into(), tokens: vec![0; text.len()], cuts: cuts.to_vec() }
    }

    fn found(cache: &mut Cache, text: &str, guard: u32) -> Option<(String, usize)> {
        match cache.find(text, guard) {
            Found::Nothing => None,
            Found::All(entry) => Some((entry.text.clone(), usize::MAX)),
            Found::Until(entry, cut) => Some((entry.text.clone(), cut.0)),
        }
    }

    #[test]
    fn the_longest_shared_beginning_is_found() {
        let mut cache = Cache::new(8, 1 << 20);
        cache.keep(entry("aa|bb|cc|", &[(3, 3), (6, 6), (9, 9)]));
        cache.keep(entry("aa|bX|", &[(3, 3), (6, 6)]));
        let is = |text: &str, cut: usize| Some((text.to_owned(), cut));
        assert_eq!(found(&mut cache, "aa|bb|cc|dd", 0), is("aa|bb|cc|", 9));
        assert_eq!(found(&mut cache, "aa|bb|cX|", 0), is("aa|bb|cc|", 6));
        assert_eq!(found(&mut cache, "aa|bX|", 0), is("aa|bX|", usize::MAX));
        assert_eq!(found(&mut cache, "aa|b", 0).map(|f| f.1), Some(3));
        assert_eq!(found(&mut cache, "aa", 0), None);
        assert_eq!(found(&mut cache, "é|", 0), None);
        assert_eq!(found(&mut cache, "aa|bX|", 7), None, "another guard is another text");
    }

    #[test]
    fn the_least_recently_used_goes_first() {
        let mut cache = Cache::new(2, 1 << 20);
        cache.keep(entry("a|", &[(2, 2)]));
        cache.keep(entry("b|", &[(2, 2)]));
        assert!(found(&mut cache, "a|x", 0).is_some());
        cache.keep(entry("c|", &[(2, 2)]));
        assert!(found(&mut cache, "b|x", 0).is_none());
        assert!(found(&mut cache, "a|x", 0).is_some() && found(&mut cache, "c|x", 0).is_some());
        cache.keep(entry("a|", &[(2, 2)]));
        assert_eq!(cache.entries.len(), 2, "one prompt is kept once");
    }

    #[test]
    fn bytes_are_bounded() {
        let one = entry("aaaa|", &[(5, 5)]).bytes();
        let mut cache = Cache::new(100, 2 * one);
        for text in ["aaaa|", "bbbb|", "cccc|"] {
            cache.keep(entry(text, &[(5, 5)]));
        }
        assert_eq!((cache.entries.len(), cache.bytes), (2, 2 * one));
        cache.keep(entry(&"x".repeat(2 * one), &[]));
        assert_eq!(cache.entries.len(), 2, "what is too large by itself drives nothing out");
    }
}

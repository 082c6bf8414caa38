//! Recordings by what they were made for, the one not used for longest first to go.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// What a recording was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// The program.
    pub program: u64,
    /// Where its buffers lie.
    pub memory: u64,
    /// What else is fixed in it of its round.
    pub round: u64,
}

/// Steps up to `end`: recorded, or to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    pub end: u32,
    pub recording: Option<u64>,
}

/// What is known of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// Nothing.
    New,
    /// It was asked for before.
    Seen,
    /// It could not be recorded.
    Never,
    /// It was recorded.
    Stretches(Arc<[Stretch]>),
}

/// Keys that were seen are forgotten when there are so many: then each runs as it is once more.
const SEEN: usize = 4096;

/// All recordings.
pub struct Kept {
    most: usize,
    clock: u64,
    recorded: HashMap<Key, (Arc<[Stretch]>, u64)>,
    seen: HashSet<Key>,
    never: HashSet<Key>,
}

impl Kept {
    /// At most so many keys are kept.
    pub fn new(most: usize) -> Self {
        Self { most, clock: 0, recorded: HashMap::new(), seen: HashSet::new(), never: HashSet::new() }
    }

    /// Looks a key up, which is seen from now on.
    pub fn find(&mut self, key: Key) -> Found {
        self.clock += 1;
        if let Some((stretches, used)) = self.recorded.get_mut(&key) {
            *used = self.clock;
            return Found::Stretches(stretches.clone());
        }
        if self.never.contains(&key) {
            return Found::Never;
        }
        if self.seen.len() >= SEEN {
            self.seen.clear();
        }
        if self.seen.insert(key) { Found::New } else { Found::Seen }
    }

    /// Keeps a recording; gives the numbers of those that have to go.
    pub fn keep(&mut self, key: Key, stretches: &[Stretch]) -> Vec<u64> {
        self.seen.remove(&key);
        self.recorded.insert(key, (stretches.into(), self.clock));
        let mut gone = Vec::new();
        while self.recorded.len() > self.most.max(1) {
            let oldest = self.recorded.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key);
            let Some((stretches, _)) = oldest.and_then(|key| self.recorded.remove(&key)) else { break };
            gone.extend(stretches.iter().filter_map(|s| s.recording));
        }
        gone
    }

    /// A key that cannot be recorded.
    pub fn never(&mut self, key: Key) {
        if self.never.len() >= SEEN {
            self.never.clear();
        }
        self.never.insert(key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(program: u64) -> Key {
        Key { program, memory: 1, round: 7 }
    }

    #[test]
    fn the_one_not_used_for_longest_goes_first() {
        let mut kept = Kept::new(2);
        let stretch = |n: u64| [Stretch { end: 3, recording: Some(n) }, Stretch { end: 4, recording: None }];
        for n in 1..=2 {
            assert_eq!((kept.find(key(n)), kept.find(key(n))), (Found::New, Found::Seen));
            assert_eq!(kept.keep(key(n), &stretch(n)), [0; 0]);
        }
        assert_eq!(kept.find(key(1)), Found::Stretches(stretch(1)[..].into()));
        kept.find(key(3));
        assert_eq!(kept.keep(key(3), &stretch(3)), [2]);
        // What moved is another key, and starts anew.
        assert_eq!(kept.find(Key { memory: 2, ..key(1) }), Found::New);
        kept.never(key(9));
        assert_eq!(kept.find(key(9)), Found::Never);
    }
}

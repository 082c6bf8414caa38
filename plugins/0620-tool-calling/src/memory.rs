//! The reasoning of replies that called tools, by their calls.

use std::collections::{BTreeMap, HashMap};

/// One reply's reasoning.
struct Entry {
    text: String,
    keys: Vec<String>,
    /// When it was used last.
    used: u64,
}

/// The reasoning of the last replies, the least recently used forgotten first.
pub struct Memory {
    most: usize,
    most_bytes: usize,
    bytes: usize,
    clock: u64,
    entries: HashMap<u64, Entry>,
    /// Entries by the time of their use.
    order: BTreeMap<u64, u64>,
    keys: HashMap<String, u64>,
}

impl Memory {
    /// A memory of so many replies, and so many bytes of them with their keys.
    pub fn new(most: usize, most_bytes: usize) -> Self {
        Self {
            most,
            most_bytes,
            bytes: 0,
            clock: 0,
            entries: HashMap::new(),
            order: BTreeMap::new(),
            keys: HashMap::new(),
        }
    }

    /// Keeps a reasoning under its keys; they leave what they stood for before.
    pub fn keep(&mut self, text: &str, keys: Vec<String>) {
        let bytes = size(text, &keys);
        if self.most == 0 || bytes > self.most_bytes || keys.is_empty() {
            return;
        }
        self.clock += 1;
        let number = self.clock;
        for key in &keys {
            self.keys.insert(key.clone(), number);
        }
        self.order.insert(number, number);
        self.entries.insert(number, Entry { text: text.to_owned(), keys, used: number });
        self.bytes += bytes;
        while self.entries.len() > self.most || self.bytes > self.most_bytes {
            let Some((_, oldest)) = self.order.pop_first() else { break };
            let Some(entry) = self.entries.remove(&oldest) else { continue };
            self.bytes -= size(&entry.text, &entry.keys);
            for key in entry.keys {
                if self.keys.get(&key) == Some(&oldest) {
                    self.keys.remove(&key);
                }
            }
        }
    }

    /// The reasoning under the first key that has one. That counts as its use.
    pub fn find<'k>(&mut self, keys: impl Iterator<Item = &'k str>) -> Option<String> {
        let number = keys.into_iter().find_map(|key| self.keys.get(key).copied())?;
        let entry = self.entries.get_mut(&number)?;
        self.clock += 1;
        self.order.remove(&entry.used);
        entry.used = self.clock;
        self.order.insert(self.clock, number);
        Some(entry.text.clone())
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

fn size(text: &str, keys: &[String]) -> usize {
    text.len() + keys.iter().map(String::len).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(names: &[&str]) -> Vec<String> {
        names.iter().map(|n| (*n).to_owned()).collect()
    }

    fn find(memory: &mut Memory, key: &str) -> Option<String> {
        memory.find([key].into_iter())
    }

    #[test]
    fn the_least_recently_used_is_forgotten_with_the_keys_it_still_has() {
        let mut memory = Memory::new(2, 1000);
        memory.keep("one", keys(&["a", "s"]));
        memory.keep("two", keys(&["b", "s"]));
        assert_eq!(find(&mut memory, "s").as_deref(), Some("two"), "a newer reply takes a key over");
        assert_eq!(find(&mut memory, "a").as_deref(), Some("one"));
        memory.keep("three", keys(&["c"]));
        assert_eq!(find(&mut memory, "b"), None, "two was used before one");
        assert_eq!(find(&mut memory, "s"), None);
        assert_eq!(find(&mut memory, "a").as_deref(), Some("one"));
        memory.keep("four", keys(&["s"]));
        memory.keep("five", keys(&["e"]));
        assert_eq!(
            find(&mut memory, "s").as_deref(),
            Some("four"),
            "not lost with the older entry of that key"
        );
        assert_eq!(memory.entries.len(), 2);
        assert_eq!(memory.find(["nobody", "e"].into_iter()).as_deref(), Some("five"));
    }

    #[test]
    fn bytes_and_zeros_bound_it() {
        let mut memory = Memory::new(100, 20);
        memory.keep(&"x".repeat(9), keys(&["a"]));
        memory.keep(&"y".repeat(9), keys(&["b"]));
        memory.keep(&"z".repeat(20), keys(&["c"]));
        assert!(find(&mut memory, "a").is_some() && find(&mut memory, "c").is_none());
        memory.keep(&"w".repeat(9), keys(&["d"]));
        assert!(find(&mut memory, "b").is_none() && memory.bytes == 20);
        for (most, bytes) in [(0, 1000), (10, 0)] {
            let mut memory = Memory::new(most, bytes);
            memory.keep("x", keys(&["a"]));
            assert!(memory.is_empty());
        }
    }
}

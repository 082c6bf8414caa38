//! What is stored, without the bytes: entries, shared pages, their order of use, and the budget. The same calls give the
//! same state, on every rank.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::keys::{Key, Kind, PAGE, chain};

/// Pages of a slab: memory is taken and given back by slab.
pub const SLAB: u32 = 16;

/// Ids with the digests of their full blocks.
#[derive(Clone, Debug)]
pub struct Ids {
    /// The ids.
    pub ids: Arc<[u32]>,
    /// One digest a full block.
    pub chain: Arc<[Key]>,
}

impl Ids {
    /// Computes the digests.
    pub fn new(ids: &[u32]) -> Self {
        Self { ids: ids.into(), chain: chain(ids).into() }
    }

    /// Whether all of these ids begin `other`.
    fn begins(&self, other: &Ids) -> bool {
        let (n, full) = (self.ids.len(), self.chain.len());
        n <= other.ids.len()
            && full.checked_sub(1).is_none_or(|last| self.chain[last] == other.chain[last])
            && self.ids[full * PAGE..] == other.ids[full * PAGE..n]
    }

    /// Tokens that both begin with.
    fn common(&self, other: &Ids) -> usize {
        let blocks: Vec<bool> = self.chain.iter().zip(&*other.chain).map(|(a, b)| a == b).collect();
        let same = blocks.partition_point(|same| *same) * PAGE;
        same + self.ids[same..].iter().zip(&other.ids[same..]).take_while(|(a, b)| a == b).count()
    }
}

/// A snapshot that may be stored.
#[derive(Clone, Debug)]
pub struct Save {
    /// Its name.
    pub key: Key,
    /// Its ids.
    pub ids: Ids,
    /// What decides its rows besides ids.
    pub kind: Kind,
    /// Whether it has what the draft layer needs.
    pub draft: bool,
    /// Keys of its shared pages.
    pub pages: Arc<[Key]>,
    /// Bytes that are its own: snapshot and tail.
    pub private: u64,
}

/// A stored snapshot.
#[derive(Clone, Debug)]
pub struct Entry {
    /// What was saved.
    pub save: Save,
    /// When it was used last.
    used: u64,
}

#[derive(Clone, Copy, Debug)]
struct Page {
    at: u32,
    uses: u32,
}

/// What becomes of a save.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// It becomes this entry, after those were evicted.
    Stored {
        /// Number of the new entry.
        id: u64,
        /// Numbers of the evicted ones.
        evicted: Vec<u64>,
    },
    /// This entry is the same; it counts as used.
    Duplicate(u64),
    /// It is not kept.
    Skipped(Skipped),
}

/// Why something is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skipped {
    /// Alone over the budget.
    TooLarge,
    /// What it shares pages with leaves no room.
    Pinned,
    /// Memory would run short.
    Memory,
}

/// What a save changed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The entry that the save is now.
    pub id: u64,
    /// Entries that are gone.
    pub evicted: Vec<u64>,
    /// Slabs that are gone.
    pub released: Vec<u32>,
    /// Pages to fill: which page of the sequence, and where it lies.
    pub fresh: Vec<(usize, u32)>,
}

/// Ranks whose indices are not the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diverged(pub String);

impl std::fmt::Display for Diverged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the index of sessions differs between ranks: {}", self.0)
    }
}

/// The index.
#[derive(Clone, Debug)]
pub struct Index {
    budget: u64,
    slab_bytes: u64,
    pages: HashMap<Key, Page>,
    /// Per slab, the pages in use.
    slabs: BTreeMap<u32, u16>,
    entries: BTreeMap<u64, Entry>,
    by_key: HashMap<Key, u64>,
    private: u64,
    next: u64,
    clock: u64,
}

impl Index {
    /// Nothing stored. `slab_bytes`: of [`SLAB`] pages.
    pub fn new(budget: u64, slab_bytes: u64) -> Self {
        Self {
            budget,
            slab_bytes,
            pages: HashMap::new(),
            slabs: BTreeMap::new(),
            entries: BTreeMap::new(),
            by_key: HashMap::new(),
            private: 0,
            next: 1,
            clock: 0,
        }
    }

    /// Bytes in use: whole slabs, snapshots and tails.
    pub fn used(&self) -> u64 {
        self.slabs.len() as u64 * self.slab_bytes + self.private
    }

    /// Bytes that may be used.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Entries and pages.
    pub fn counts(&self) -> (usize, usize) {
        (self.entries.len(), self.pages.len())
    }

    /// An entry.
    pub fn entry(&self, id: u64) -> Option<&Entry> {
        self.entries.get(&id)
    }

    /// All entries, by number.
    pub fn entries(&self) -> impl Iterator<Item = (u64, &Entry)> {
        self.entries.iter().map(|(id, e)| (*id, e))
    }

    /// Where a page lies, and how many entries hold it.
    pub fn page(&self, key: &Key) -> Option<(u32, u32)> {
        self.pages.get(key).map(|p| (p.at, p.uses))
    }

    /// Whether exactly these ids can be resumed.
    pub fn stored(&self, ids: &[u32], tag: u64, draft: bool) -> bool {
        let serves = |s: &Save| s.kind.tag == tag && (s.draft || !draft) && *s.ids.ids == *ids;
        self.entries.values().any(|e| serves(&e.save))
    }

    /// The longest entry that a prompt continues; of two equally long ones the one used last.
    pub fn find(&self, prompt: &Ids, tag: u64, draft: bool) -> Option<(u64, usize)> {
        let serves = |e: &&Entry| {
            e.save.kind.tag == tag && (e.save.draft || !draft) && e.save.ids.ids.len() < prompt.ids.len()
        };
        let found = self.entries.iter().filter(|(_, e)| serves(e) && e.save.ids.begins(prompt));
        let best = found.max_by_key(|(_, e)| (e.save.ids.ids.len(), e.used));
        best.map(|(id, e)| (*id, e.save.ids.ids.len()))
    }

    /// Tokens that a prompt has in common with the entry that it has most in common with.
    pub fn common_prefix(&self, prompt: &Ids) -> usize {
        self.entries.values().map(|e| e.save.ids.common(prompt)).max().unwrap_or(0)
    }

    /// An entry was used.
    pub fn touch(&mut self, id: u64) {
        self.clock += 1;
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.used = self.clock;
        }
    }

    /// What becomes of a save where `room` more bytes of memory may be taken. Changes nothing.
    pub fn decide(&self, save: &Save, room: u64) -> Decision {
        if let Some(id) = self.by_key.get(&save.key) {
            return Decision::Duplicate(*id);
        }
        let fresh = save.pages.iter().filter(|k| !self.pages.contains_key(*k)).count() as u64;
        let alone = fresh.div_ceil(u64::from(SLAB)) * self.slab_bytes + save.private;
        if alone > self.budget {
            return Decision::Skipped(Skipped::TooLarge);
        }
        let mut trial = self.clone();
        trial.pin(&save.pages);
        let mut evicted = Vec::new();
        let after = loop {
            let free: u64 = trial.slabs.values().map(|m| u64::from(m.count_zeros())).sum();
            let slabs = fresh.saturating_sub(free).div_ceil(u64::from(SLAB));
            let after = trial.used() + slabs * self.slab_bytes + save.private;
            if after <= self.budget {
                break after;
            }
            let oldest = trial.entries.iter().min_by_key(|(id, e)| (e.used, **id)).map(|(id, _)| *id);
            let Some(oldest) = oldest else { return Decision::Skipped(Skipped::Pinned) };
            trial.evict(oldest);
            evicted.push(oldest);
        };
        if after.saturating_sub(self.used()) > room {
            return Decision::Skipped(Skipped::Memory);
        }
        Decision::Stored { id: self.next, evicted }
    }

    /// Bytes that a decision takes here beyond those in use. Changes nothing.
    pub fn growth(&self, save: &Save, decision: &Decision) -> u64 {
        let mut trial = self.clone();
        // What does not fit is found where it is applied.
        if trial.apply(save, decision).is_err() {
            return 0;
        }
        trial.used().saturating_sub(self.used())
    }

    /// Does what was decided, here or on rank 0.
    ///
    /// # Errors
    /// A decision that does not fit what is stored here; then nothing was changed.
    pub fn apply(&mut self, save: &Save, decision: &Decision) -> Result<Changes, Diverged> {
        let known = self.by_key.get(&save.key).copied();
        match decision {
            Decision::Skipped(_) => Ok(Changes::default()),
            Decision::Duplicate(id) => {
                if known != Some(*id) {
                    return Err(Diverged(format!("a duplicate of entry {id}, which is {known:?} here")));
                }
                self.touch(*id);
                Ok(Changes { id: *id, ..Changes::default() })
            }
            Decision::Stored { id, evicted } => {
                if let Some(known) = known {
                    return Err(Diverged(format!("a new entry {id}, which is entry {known} here")));
                }
                if let Some(missing) = evicted.iter().find(|e| !self.entries.contains_key(e)) {
                    return Err(Diverged(format!("entry {missing} is to be evicted and is not here")));
                }
                if *id != self.next {
                    return Err(Diverged(format!("a new entry {id}, where {} is next here", self.next)));
                }
                Ok(self.store(save, evicted))
            }
        }
    }

    fn store(&mut self, save: &Save, evicted: &[u64]) -> Changes {
        let before: Vec<u32> = self.slabs.keys().copied().collect();
        self.pin(&save.pages);
        for id in evicted {
            self.evict(*id);
        }
        let mut fresh = Vec::new();
        for (p, key) in save.pages.iter().enumerate() {
            if !self.pages.contains_key(key) {
                let at = self.take_page();
                self.pages.insert(*key, Page { at, uses: 1 });
                fresh.push((p, at));
            }
        }
        let id = self.next;
        self.next += 1;
        self.clock += 1;
        self.private += save.private;
        self.by_key.insert(save.key, id);
        self.entries.insert(id, Entry { save: save.clone(), used: self.clock });
        let released = before.into_iter().filter(|s| !self.slabs.contains_key(s)).collect();
        Changes { id, evicted: evicted.to_vec(), released, fresh }
    }

    /// Holds the pages that are there.
    fn pin(&mut self, pages: &[Key]) {
        for key in pages {
            if let Some(page) = self.pages.get_mut(key) {
                page.uses += 1;
            }
        }
    }

    fn evict(&mut self, id: u64) {
        let Some(entry) = self.entries.remove(&id) else { return };
        self.by_key.remove(&entry.save.key);
        self.private -= entry.save.private;
        for key in entry.save.pages.iter() {
            let Some(page) = self.pages.get_mut(key) else { continue };
            page.uses -= 1;
            if page.uses > 0 {
                continue;
            }
            let (slab, bit) = (page.at / SLAB, 1 << (page.at % SLAB));
            self.pages.remove(key);
            if let Some(mask) = self.slabs.get_mut(&slab) {
                *mask &= !bit;
                if *mask == 0 {
                    self.slabs.remove(&slab);
                }
            }
        }
    }

    /// The lowest free page of the slabs that there are, else the first of the lowest slab that there is not.
    fn take_page(&mut self) -> u32 {
        let open = self.slabs.iter().find(|(_, mask)| **mask != u16::MAX).map(|(slab, _)| *slab);
        let slab = open.unwrap_or_else(|| {
            let taken = self.slabs.keys().zip(0..).take_while(|(have, want)| **have == *want).count();
            taken as u32
        });
        let mask = self.slabs.entry(slab).or_insert(0);
        let place = mask.trailing_ones();
        *mask |= 1 << place;
        slab * SLAB + place
    }

    /// A number over all that ranks must have alike.
    pub fn digest(&self) -> u64 {
        let mut hash = crc32fast::Hasher::new();
        for (id, e) in &self.entries {
            let s = &e.save;
            let flags = [u64::from(s.draft), s.pages.len() as u64];
            for n in [*id, s.kind.tag, s.ids.ids.len() as u64].into_iter().chain(flags) {
                hash.update(&n.to_le_bytes());
            }
        }
        hash.update(&(self.pages.len() as u64).to_le_bytes());
        for slab in self.slabs.keys() {
            hash.update(&slab.to_le_bytes());
        }
        hash.update(&self.private.to_le_bytes());
        hash.update(&self.next.to_le_bytes());
        u64::from(hash.finalize() & 0x7fff_ffff)
    }
}

#[cfg(test)]
mod tests;

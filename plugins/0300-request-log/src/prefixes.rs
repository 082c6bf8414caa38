//! Longest common prefixes of a prompt with those before it.

use std::collections::VecDeque;

/// Ids compared at a time.
const BLOCK: usize = 4096;

/// Lengths of shared prefixes; `None`: there was nothing to compare with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Shared {
    /// With any.
    pub any: Option<usize>,
    /// With one of the same conversation.
    pub same: Option<usize>,
    /// With one of another.
    pub other: Option<usize>,
}

struct Prompt {
    request: u64,
    ids: Vec<u32>,
}

/// Prompts of requests that run, and of the last that ended.
pub(crate) struct Prefixes {
    running: Vec<Prompt>,
    ended: VecDeque<Prompt>,
    most: usize,
}

fn common(a: &[u32], b: &[u32]) -> usize {
    let mut at = 0;
    let n = a.len().min(b.len());
    while at < n {
        let end = (at + BLOCK).min(n);
        if a[at..end] == b[at..end] {
            at = end;
        } else {
            return at + a[at..end].iter().zip(&b[at..end]).take_while(|(x, y)| x == y).count();
        }
    }
    n
}

impl Prefixes {
    pub(crate) fn new(most: usize) -> Self {
        Self { running: Vec::new(), ended: VecDeque::new(), most }
    }

    /// A request arrives.
    pub(crate) fn arrive(&mut self, request: u64, ids: &[u32]) {
        if self.most > 0 {
            self.running.push(Prompt { request, ids: ids.to_vec() });
        }
    }

    /// A request is over: compares it with those that ended, and with those that arrived earlier and still run. The first
    /// `conversation` of its ids are those of every turn of its conversation.
    pub(crate) fn end(&mut self, request: u64, ids: &[u32], conversation: usize) -> Shared {
        let mut shared = Shared::default();
        let mine = self.running.iter().position(|p| p.request == request);
        let before = self.ended.iter().filter(|p| p.request < request);
        // Requests are numbered as they arrive: later ones are not partners of this one.
        let beside = self.running.iter().filter(|p| p.request < request);
        for prompt in before.chain(beside) {
            let length = common(ids, &prompt.ids);
            let same = length >= conversation;
            let best = |slot: &mut Option<usize>| *slot = Some(slot.map_or(length, |l| l.max(length)));
            best(&mut shared.any);
            best(if same { &mut shared.same } else { &mut shared.other });
        }
        if let Some(mine) = mine {
            self.ended.push_back(self.running.remove(mine));
            while self.ended.len() > self.most {
                self.ended.pop_front();
            }
        }
        shared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earlier_of_two_is_a_partner_of_the_later_and_not_the_other_way_round() {
        let mut all = Prefixes::new(4);
        all.arrive(1, &[1, 2, 3, 4]);
        all.arrive(2, &[1, 2, 3, 9, 9]);
        assert_eq!(all.end(1, &[1, 2, 3, 4], 4), Shared::default());
        let shared = all.end(2, &[1, 2, 3, 9, 9], 4);
        assert_eq!(shared, Shared { any: Some(3), same: None, other: Some(3) });
        all.arrive(3, &[1, 2, 8]);
        all.arrive(4, &[1, 2, 8, 1]);
        // The later one ends first: the earlier one still runs and counts.
        assert_eq!(all.end(4, &[1, 2, 8, 1], 3), Shared { any: Some(3), same: Some(3), other: Some(2) });
        assert_eq!(all.end(3, &[1, 2, 8], 2), Shared { any: Some(2), same: Some(2), other: None });
    }

    #[test]
    fn only_as_many_as_asked_are_remembered_and_prefixes_cross_blocks() {
        let mut all = Prefixes::new(1);
        let long: Vec<u32> = (0..10_000).collect();
        for (n, ids) in [(1, vec![5, 5]), (2, long.clone())] {
            all.arrive(n, &ids);
            all.end(n, &ids, 2);
        }
        let mut other = long.clone();
        other[9_000] = 0;
        all.arrive(3, &other);
        assert_eq!(all.end(3, &other, 4096).same, Some(9_000));
        let mut off = Prefixes::new(0);
        off.arrive(1, &[1]);
        off.arrive(2, &[1]);
        assert_eq!(off.end(2, &[1], 0), Shared::default());
    }
}

use proptest::prelude::*;

use super::*;
use crate::keys::{Kind, of_text};

const SLAB_BYTES: u64 = 1600;

fn kind(tag: u64) -> Kind {
    Kind { formats: of_text("test"), tag, grid: 1, draft_rows: true }
}

fn save_of(ids: &[u32], tag: u64, private: u64) -> Save {
    let ids = Ids::new(ids);
    let pages = kind(tag).pages(&ids.ids, &ids.chain, ids.ids.len());
    Save {
        key: kind(tag).entry(&ids.ids, true),
        kind: kind(tag),
        draft: true,
        pages: pages.into(),
        private,
        ids,
    }
}

/// `n` ids of which the first `shared` are the same for every seed.
fn ids(seed: u32, shared: usize, n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| if (i as usize) < shared { i } else { i + seed * 10_000 }).collect()
}

fn put(index: &mut Index, save: &Save) -> Changes {
    let decision = index.decide(save, u64::MAX);
    index.apply(save, &decision).unwrap()
}

#[test]
fn common_pages_are_stored_once_and_live_as_long_as_one_entry_needs_them() {
    let mut index = Index::new(10 * SLAB_BYTES, SLAB_BYTES);
    let (a, b) = (save_of(&ids(1, 2 * 256 + 1, 900), 7, 10), save_of(&ids(2, 2 * 256 + 1, 900), 7, 10));
    let first = put(&mut index, &a);
    assert_eq!(first.fresh, [(0, 0), (1, 1), (2, 2)]);
    let second = put(&mut index, &b);
    assert_eq!(second.fresh, [(2, 3)], "only the page that differs");
    let uses = |index: &Index, save: &Save| {
        save.pages.iter().map(|k| index.page(k).map_or(0, |p| p.1)).collect::<Vec<_>>()
    };
    assert_eq!(uses(&index, &a), [2, 2, 1]);
    index.evict(first.id);
    assert_eq!((uses(&index, &a), uses(&index, &b)), (vec![1, 1, 0], vec![1, 1, 1]));
    assert_eq!(index.take_page(), 2, "the lowest free page");
    index.evict(second.id);
    assert_eq!(index.counts(), (0, 0));
}

#[test]
fn a_token_before_the_end_of_a_page_makes_it_another() {
    let mut index = Index::new(10 * SLAB_BYTES, SLAB_BYTES);
    put(&mut index, &save_of(&ids(1, 512, 900), 7, 10));
    let other = put(&mut index, &save_of(&ids(2, 512, 900), 7, 10));
    assert_eq!(other.fresh.len(), 2, "a page's last draft row reads the token after it");
}

#[test]
fn the_longest_strict_prefix_serves() {
    let mut index = Index::new(10 * SLAB_BYTES, SLAB_BYTES);
    let prompt = ids(1, 0, 1000);
    let short = put(&mut index, &save_of(&prompt[..300], 7, 10)).id;
    let long = put(&mut index, &save_of(&prompt[..700], 7, 10)).id;
    put(&mut index, &save_of(&ids(2, 699, 800), 7, 10));
    let find = |n: usize, tag, draft| index.find(&Ids::new(&prompt[..n]), tag, draft);
    assert_eq!(find(1000, 7, true), Some((long, 700)));
    assert_eq!(find(701, 7, true), Some((long, 700)));
    assert_eq!(find(700, 7, true), Some((short, 300)), "a strict prefix");
    assert_eq!(find(300, 7, true), None);
    assert_eq!(find(1000, 8, true), None, "another arithmetic");
    assert_eq!(index.common_prefix(&Ids::new(&prompt)), 700);
    assert_eq!(index.common_prefix(&Ids::new(&prompt[..650])), 650);
    assert_eq!(index.common_prefix(&Ids::new(&ids(3, 690, 900))), 690);
}

#[test]
fn arithmetics_and_draft_caches_never_mix() {
    let mut index = Index::new(10 * SLAB_BYTES, SLAB_BYTES);
    let prompt = ids(1, 0, 800);
    for tag in [1, 2, 3] {
        put(&mut index, &save_of(&prompt[..600], tag, 10));
    }
    assert_eq!(index.counts(), (3, 6), "pages of different arithmetics are different pages");
    let mut without = save_of(&prompt[..700], 1, 10);
    (without.draft, without.key) = (false, kind(1).entry(&prompt[..700], false));
    let id = put(&mut index, &without).id;
    let all = Ids::new(&prompt);
    assert_eq!(index.find(&all, 1, false), Some((id, 700)));
    assert_eq!(index.find(&all, 1, true).map(|f| f.1), Some(600), "drafts need their rows");
    assert_eq!(index.find(&all, 4, false), None);
}

#[test]
fn a_known_snapshot_is_used_again_and_a_too_large_one_is_skipped() {
    let mut index = Index::new(2 * SLAB_BYTES, SLAB_BYTES);
    let a = save_of(&ids(1, 0, 300), 7, 10);
    let id = put(&mut index, &a).id;
    let before = index.digest();
    assert_eq!(index.decide(&a, 0), Decision::Duplicate(id));
    put(&mut index, &a);
    assert_eq!(index.digest(), before);
    let large = save_of(&ids(2, 0, 300), 7, SLAB_BYTES + 1);
    assert_eq!(index.decide(&large, u64::MAX), Decision::Skipped(Skipped::TooLarge));
    let fits = save_of(&ids(2, 0, 300), 7, 100);
    assert_eq!(index.decide(&fits, 99), Decision::Skipped(Skipped::Memory));
    assert_eq!(index.decide(&fits, 100), Decision::Stored { id: id + 1, evicted: vec![] });
}

#[test]
fn what_a_decision_takes_is_told_before_it_is_done() {
    let mut index = Index::new(3 * SLAB_BYTES, SLAB_BYTES);
    let (a, b) = (save_of(&ids(1, 0, 300), 7, 10), save_of(&ids(2, 0, 300), 7, 25));
    for save in [&a, &b, &a, &save_of(&ids(3, 0, 300), 7, 2 * SLAB_BYTES - 20)] {
        let decision = index.decide(save, u64::MAX);
        let (before, told) = (index.used(), index.growth(save, &decision));
        index.apply(save, &decision).unwrap();
        assert_eq!(told, index.used().saturating_sub(before), "{decision:?}");
    }
    assert_eq!(
        index.growth(&b, &Decision::Stored { id: 99, evicted: vec![] }),
        0,
        "what cannot be done takes nothing"
    );
}

#[test]
fn the_entry_used_longest_ago_goes_first() {
    let mut index = Index::new(3 * 100, SLAB_BYTES);
    let all: Vec<Save> = (1..=4).map(|seed| save_of(&ids(seed, 0, 100), 7, 100)).collect();
    let made: Vec<u64> = all[..3].iter().map(|s| put(&mut index, s).id).collect();
    index.touch(made[0]);
    let changes = put(&mut index, &all[3]);
    assert_eq!(changes.evicted, [made[1]]);
    assert!(index.entry(made[0]).is_some());
}

/// Any save out of a small world of prompts that share beginnings.
fn saves() -> impl Strategy<Value = Vec<(u32, usize, usize, u64, u64)>> {
    let one = (0u32..6, 0usize..1200, 1usize..1600, 1u64..3, 1u64..2000);
    proptest::collection::vec(one, 300)
}

fn made((seed, shared, n, tag, private): (u32, usize, usize, u64, u64)) -> Save {
    save_of(&ids(seed, shared / 300 * 300, n / 50 * 50 + 1), tag, private)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 6, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn saves_replayed_from_decisions_end_in_the_same_index(all in saves(), flip in 0usize..300) {
        let (mut lead, mut follower) = (Index::new(9000, SLAB_BYTES), Index::new(9000, SLAB_BYTES));
        let mut diverged = None;
        for (i, given) in all.into_iter().enumerate() {
            let save = made(given);
            let decision = lead.decide(&save, u64::MAX);
            let changes = lead.apply(&save, &decision).unwrap();
            prop_assert!(lead.used() <= lead.budget(), "over the budget after save {}", i);
            if let Decision::Skipped(why) = decision {
                prop_assert_ne!(why, Skipped::Memory);
            }
            prop_assert_eq!(follower.apply(&save, &decision), Ok(changes));
            prop_assert_eq!(lead.digest(), follower.digest());
            if i == flip {
                let mut wrong = follower.clone();
                // A decision that is turned round is refused, or seen in the digest.
                let turned = match &decision {
                    Decision::Stored { id, .. } => Decision::Duplicate(*id),
                    Decision::Duplicate(_) | Decision::Skipped(_) => Decision::Stored { id: wrong.next, evicted: vec![9999] },
                };
                let mut fresh = made((5, 0, 77, 1, 1));
                fresh.key = of_text("nobody has it");
                diverged = Some(wrong.apply(&fresh, &turned).is_err());
            }
        }
        prop_assert_eq!(diverged, Some(true));
    }

    #[test]
    fn pages_are_those_of_the_entries(all in saves()) {
        let mut index = Index::new(12_000, SLAB_BYTES);
        for given in all {
            let save = made(given);
            let changes = put(&mut index, &save);
            for (p, at) in &changes.fresh {
                prop_assert_eq!(index.page(&save.pages[*p]).map(|f| f.0), Some(*at));
            }
            let mut uses: HashMap<Key, u32> = HashMap::new();
            for key in index.entries.values().flat_map(|e| e.save.pages.iter()) {
                *uses.entry(*key).or_default() += 1;
            }
            prop_assert_eq!(uses.len(), index.pages.len());
            let mut places = std::collections::BTreeSet::new();
            for (key, n) in uses {
                let (at, have) = index.page(&key).unwrap();
                prop_assert_eq!(have, n);
                prop_assert!(places.insert(at), "two pages in one place");
            }
            let masks: u32 = index.slabs.values().map(|m| m.count_ones()).sum();
            prop_assert_eq!(masks as usize, places.len());
            prop_assert!(index.slabs.values().all(|m| *m != 0), "an empty slab is given back");
        }
    }
}

#[test]
fn decisions_that_do_not_fit_are_refused() {
    let mut index = Index::new(10 * SLAB_BYTES, SLAB_BYTES);
    let (a, b) = (save_of(&ids(1, 0, 300), 7, 10), save_of(&ids(2, 0, 300), 7, 10));
    let id = put(&mut index, &a).id;
    let before = index.digest();
    let mut refused = |save: &Save, decision: Decision| index.apply(save, &decision).unwrap_err().to_string();
    assert!(refused(&a, Decision::Stored { id: id + 1, evicted: vec![] }).contains("is entry 1 here"));
    assert!(refused(&b, Decision::Duplicate(id)).contains("None here"));
    assert!(refused(&b, Decision::Stored { id: id + 1, evicted: vec![77] }).contains("entry 77"));
    assert!(refused(&b, Decision::Stored { id: id + 5, evicted: vec![] }).contains("2 is next here"));
    assert_eq!(index.digest(), before, "nothing was changed");
}

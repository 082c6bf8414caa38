use super::*;
use plugfold_abi::points::{Draw, Forwards, HeadOut, HeadRows};

/// A lookup never runs the model.
struct NoForwards;

impl Forwards for NoForwards {
    fn hidden_size(&self) -> Result<u32, OpError> {
        Err(OpError::new("lookups have no rows"))
    }
    fn head(&self, _: Slice<'_, HeadRows<'_>>) -> Result<List<HeadOut>, OpError> {
        Err(OpError::new("lookups run nothing"))
    }
}

/// Numbers of the knobs: lookup 0, `lookup_min` 1.
fn fresh() -> Lookup {
    let lookup = Lookup::default();
    lookup.configure(0, true, 1, 4);
    let names: Vec<TextBuf> = ["mtp", "lookup"].map(TextBuf::from).into();
    lookup.drafters(Slice::from(&names[..])).unwrap();
    lookup
}

fn knobs(on: bool, min: i64) -> [KnobValue; 2] {
    [KnobValue::Bool(on), KnobValue::Int(min)]
}

struct Asked<'a> {
    policy: &'a str,
    knobs: &'a [KnobValue],
    room: u32,
    stop_ids: &'a [u32],
}

impl Default for Asked<'_> {
    fn default() -> Self {
        Self { policy: "", knobs: &[], room: 7, stop_ids: &[] }
    }
}

/// What the earlier link chose.
const MTP: Choice = Choice { drafter: 0, budget: 3, rule: Rule { floor: 0.35, min_match: 0 } };

fn decide(lookup: &Lookup, slot: u32, ids: &[u32], asked: &Asked<'_>) -> Choice {
    let facts = SequenceFacts {
        slot,
        length: ids.len() as u32 - 1,
        room: asked.room,
        sampled: false,
        policy: Text::from(asked.policy),
        knobs: Slice::from(asked.knobs),
        ids: Slice::from(ids),
        shared: 1,
        stop_ids: Slice::from(asked.stop_ids),
    };
    let mut choices = List::from(vec![MTP]);
    lookup.decide(Slice::from(&[facts][..]), &mut choices).unwrap();
    choices[0]
}

fn propose(lookup: &Lookup, slot: u32, ids: &[u32], choice: &Choice) -> Vec<u32> {
    let ask = Ask {
        slot,
        length: ids.len() as u32 - 1,
        pending: ids[ids.len() - 1],
        budget: choice.budget,
        rule: choice.rule,
        draw: Draw::BEST,
        ids: Slice::from(ids),
    };
    let out = lookup.propose(Slice::from(&[ask][..]), &ForwardsObject::lend(&NoForwards)).unwrap();
    out[0].tokens.to_vec()
}

fn observe(lookup: &Lookup, slot: u32, drafter: u32, drafted: u32, kept: u32) {
    lookup.observe(&Observed { slot, drafter, drafted, kept, shared: 1 }).unwrap();
}

fn noise(seed: u64, at: usize) -> u64 {
    let mut h = seed ^ (at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^= h >> 29;
    h = h.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    h ^ (h >> 32)
}

/// A model that copies its prompt with mistakes: which token comes at a position is a function of the seed and the position,
/// as keyed sampling has it.
struct Copier {
    prompt: Vec<u32>,
    percent: u64,
    seed: u64,
}

impl Copier {
    fn token(&self, position: usize) -> u32 {
        let draw = noise(self.seed, position);
        if draw % 100 < self.percent {
            1000 + (draw >> 8) as u32 % 50
        } else {
            self.prompt[position % self.prompt.len()]
        }
    }

    fn serial(&self, n: usize) -> Vec<u32> {
        (self.prompt.len()..self.prompt.len() + n).map(|p| self.token(p)).collect()
    }

    /// A reply through the hooks: tokens, rounds with lookup, drafts, drafts kept.
    fn drafted(&self, lookup: &Lookup, slot: u32, n: usize, asked: &Asked<'_>) -> (Vec<u32>, [u32; 3]) {
        Drafter::begun(lookup, slot, Slice::from(&self.prompt[..]), 0).unwrap();
        let mut ids = self.prompt.clone();
        ids.push(self.token(ids.len()));
        let mut told = [0; 3];
        while ids.len() < self.prompt.len() + n {
            let left = (self.prompt.len() + n - ids.len()) as u32;
            let choice = decide(lookup, slot, &ids, &Asked { room: 7.min(left), ..*asked });
            let by_lookup = choice.drafter == 1;
            let mut drafts = if by_lookup { propose(lookup, slot, &ids, &choice) } else { Vec::new() };
            drafts.truncate(lookup.cut(slot, 0, Slice::from(&drafts[..])).unwrap() as usize);
            let mut kept = 0;
            for draft in &drafts {
                if *draft != self.token(ids.len()) {
                    break;
                }
                ids.push(*draft);
                kept += 1;
            }
            ids.push(self.token(ids.len()));
            let drafter = if drafts.is_empty() { NO_DRAFTER } else { 1 };
            observe(lookup, slot, drafter, drafts.len() as u32, kept);
            told[0] += u32::from(by_lookup);
            told[1] += drafts.len() as u32;
            told[2] += kept;
        }
        DraftPolicy::ended(lookup, slot).unwrap();
        ids.truncate(self.prompt.len() + n);
        (ids.split_off(self.prompt.len()), told)
    }
}

fn prompt(n: usize, seed: u64) -> Vec<u32> {
    (0..n).map(|i| noise(seed, i) as u32 % 900).collect()
}

#[test]
fn simulated_replies_equal_serial_ones_at_every_noise() {
    for percent in [0, 5, 50] {
        for seed in [1, 2] {
            let model = Copier { prompt: prompt(60, seed), percent, seed };
            for policy in ["", "auto", "o", "l7", "l3:8", "l7:1"] {
                let lookup = fresh();
                let (reply, told) = model.drafted(&lookup, 0, 150, &Asked { policy, ..Asked::default() });
                assert_eq!(reply, model.serial(150), "{policy} at {percent}%");
                // A match of one token may be a chance one; longer ones are the copy's own place.
                if percent == 0 && policy != "l7:1" {
                    assert!(told[0] > 10 && told[1] == told[2], "{policy}: {told:?}");
                }
            }
        }
    }
}

#[test]
fn novel_text_never_spends_a_lookup_round() {
    let lookup = fresh();
    // No token comes twice.
    let mut ids: Vec<u32> = (0..400).map(|i| i * 3).collect();
    for token in 5000..5100 {
        assert_eq!(decide(&lookup, 0, &ids, &Asked::default()), MTP);
        assert_eq!(decide(&lookup, 0, &ids, &Asked { policy: "l7", ..Asked::default() }), MTP);
        ids.push(token);
    }
    // Fifty tokens in any order: stretches that come again are short.
    let model = Copier { prompt: (2000..2400).collect(), percent: 100, seed: 7 };
    let (reply, told) = model.drafted(&lookup, 1, 300, &Asked::default());
    assert_eq!((reply, told), (model.serial(300), [0; 3]));
}

#[test]
fn below_the_shortest_match_there_is_no_draft() {
    // Ten tokens agree.
    let ids: Vec<u32> = (1..20).chain([99]).chain(2..12).collect();
    let take = |asked: &Asked<'_>| decide(&fresh(), 0, &ids, asked).drafter == 1;
    for (min, found) in [(1, true), (4, true), (10, true), (11, false), (64, false)] {
        assert_eq!(take(&Asked { knobs: &knobs(true, min), ..Asked::default() }), found, "lookup_min {min}");
    }
    assert!(!take(&Asked { knobs: &knobs(false, 1), ..Asked::default() }), "off");
    assert!(take(&Asked { policy: "l4:10", knobs: &knobs(false, 64), ..Asked::default() }), "forced");
    assert!(!take(&Asked { policy: "l4:11", ..Asked::default() }));
    let short: Vec<u32> = [1, 2, 3, 4, 5, 6, 99, 2, 3, 4].into();
    let forced = |policy| decide(&fresh(), 0, &short, &Asked { policy, ..Asked::default() }).drafter == 1;
    assert!(forced("l4") && !forced("l4:4"), "three is the usual shortest");
    for policy in ["0", "3", "a", "c3:0.1", "om"] {
        assert!(!take(&Asked { policy, knobs: &knobs(true, 1), ..Asked::default() }), "{policy}");
    }
}

#[test]
fn drafts_stop_before_a_stop_token_and_a_virtual_id_and_never_pass_the_room() {
    let text: Vec<u32> = (10..30).chain([FIRST_VIRTUAL_ID + 1]).chain(10..20).collect();
    let drafts = |stop: &[u32], room: u32, policy: &str, ids: &[u32]| {
        let lookup = fresh();
        let asked = Asked { policy, room, stop_ids: stop, ..Asked::default() };
        let choice = decide(&lookup, 0, ids, &asked);
        if choice.drafter == 1 { propose(&lookup, 0, ids, &choice) } else { Vec::new() }
    };
    assert_eq!(drafts(&[], 7, "l7", &text), [20, 21, 22, 23, 24, 25, 26]);
    for room in 0..=7 {
        assert_eq!(drafts(&[], room, "l7", &text).len(), room as usize);
        assert!(drafts(&[], room, "", &text).len() <= room as usize);
    }
    assert_eq!(drafts(&[22], 7, "l7", &text), [20, 21]);
    assert_eq!(drafts(&[20], 7, "l7", &text), [], "a normal round");
    let late: Vec<u32> = text.iter().copied().chain(20..28).collect();
    assert_eq!(drafts(&[], 7, "l7", &late), [28, 29]);
    // The cut holds for every drafter.
    let lookup = fresh();
    decide(&lookup, 0, &text, &Asked { stop_ids: &[5], ..Asked::default() });
    for (drafts, keep) in
        [(vec![1, 2, 5, 7], 2), (vec![1, FIRST_VIRTUAL_ID, 3], 1), (vec![1, 2], 2), (vec![], 0)]
    {
        assert_eq!(lookup.cut(0, 0, Slice::from(&drafts[..])).unwrap(), keep, "{drafts:?}");
    }
}

#[test]
fn a_forced_policy_leaves_rounds_without_a_match_to_the_layer() {
    let lookup = fresh();
    let novel: Vec<u32> = (0..50).collect();
    let asked = Asked { policy: "l7:3", ..Asked::default() };
    assert_eq!(decide(&lookup, 0, &novel, &asked), MTP);
    let again: Vec<u32> = novel.iter().copied().chain([10, 11, 12]).collect();
    let choice = decide(&lookup, 0, &again, &asked);
    assert_eq!((choice.drafter, choice.budget, choice.rule.min_match), (1, 7, 3));
}

#[test]
fn two_live_requests_never_share_history_and_the_next_turn_reuses_it() {
    let asked = Asked { policy: "l7", ..Asked::default() };
    let shared = prompt(100, 3);
    let lookup = fresh();
    let (mut a, mut b) = (shared.clone(), shared.clone());
    a.extend([1, 2, 3, 4]);
    b.extend([5, 6, 7, 8]);
    for (slot, ids) in [(0, &a), (1, &b)] {
        Drafter::begun(&lookup, slot, Slice::from(&shared[..]), 0).unwrap();
        decide(&lookup, slot, ids, &asked);
    }
    {
        let table = lookup.table();
        let text = |slot: u32| table.seats[&slot].index.as_ref().unwrap().tokens().to_vec();
        assert_eq!((text(0), text(1)), (a.clone(), b.clone()));
    }
    DraftPolicy::ended(&lookup, 0).unwrap();
    assert_eq!(lookup.table().kept.len(), 1);

    // The next turn of the first conversation: its prompt begins with the whole history.
    let turn: Vec<u32> = a.iter().copied().chain(prompt(30, 4)).chain(a[40..50].iter().copied()).collect();
    Drafter::begun(&lookup, 2, Slice::from(&turn[..]), 0).unwrap();
    let warm = decide(&lookup, 2, &turn, &asked);
    assert!(lookup.table().kept.is_empty(), "taken over, so nobody else can take it");
    let cold = fresh();
    assert_eq!(decide(&cold, 2, &turn, &asked), warm);
    assert_eq!(propose(&lookup, 2, &turn, &warm), propose(&cold, 2, &turn, &warm));
    assert_eq!(propose(&cold, 2, &turn, &warm), a[50..57]);

    // Another conversation, and another gram, begin anew.
    DraftPolicy::ended(&lookup, 2).unwrap();
    decide(&lookup, 3, &prompt(50, 9), &asked);
    decide(&lookup, 4, &turn, &Asked { policy: "l7:5", ..Asked::default() });
    assert_eq!(lookup.table().kept.len(), 1, "still there");
}

#[test]
fn kept_texts_are_bounded_by_the_slots() {
    let lookup = fresh();
    lookup.limits(3, 7);
    for i in 0..10 {
        decide(&lookup, 0, &prompt(20, i), &Asked::default());
        DraftPolicy::ended(&lookup, 0).unwrap();
    }
    assert_eq!(lookup.table().kept.len(), 3);
    assert!(lookup.table().seats.is_empty());
}

#[test]
fn another_rank_with_other_local_settings_runs_the_same_windows() {
    let model = Copier { prompt: prompt(50, 5), percent: 20, seed: 3 };
    let (here, there) = (fresh(), fresh());
    there.configure(0, false, 1, 64);
    for (slot, (on, min)) in [(true, 4), (true, 2), (false, 4), (true, 64)].into_iter().enumerate() {
        let values = knobs(on, min);
        let asked = Asked { knobs: &values, ..Asked::default() };
        let (a, b) =
            (model.drafted(&here, slot as u32, 120, &asked), model.drafted(&there, slot as u32, 120, &asked));
        assert_eq!(a, b, "lookup {on}, lookup_min {min}");
        assert_eq!(a.1[0] > 0, on && min < 64, "{:?}", a.1);
    }
}

#[test]
fn a_policy_that_is_none_is_an_error_of_its_request() {
    let lookup = fresh();
    let facts = SequenceFacts {
        slot: 0,
        length: 2,
        room: 7,
        sampled: false,
        policy: Text::from("l9"),
        knobs: Slice::default(),
        ids: Slice::from(&[1, 2, 3][..]),
        shared: 1,
        stop_ids: Slice::default(),
    };
    let mut choices = List::from(vec![MTP]);
    let told = lookup.decide(Slice::from(&[facts][..]), &mut choices).unwrap_err();
    assert!(told.message.contains("N is \"9\": give a whole number from 1 to 7"), "{told}");
    assert_eq!(choices[0], MTP);
}

#[test]
fn without_its_drafter_the_link_is_silent() {
    let lookup = fresh();
    let names: Vec<TextBuf> = ["mtp", ""].map(TextBuf::from).into();
    lookup.drafters(Slice::from(&names[..])).unwrap();
    let ids = [1, 2, 3, 4, 1, 2, 3, 4];
    assert_eq!(decide(&lookup, 0, &ids, &Asked { policy: "l7", ..Asked::default() }), MTP);
}

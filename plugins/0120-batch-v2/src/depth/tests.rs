use plugfold_abi::boundary::Offer;

use super::*;

/// Draft policies that say what is to be tried.
struct Told {
    shares: Vec<f64>,
    backlog: u32,
}

impl Policies for Told {
    fn in_force(&self, asked: Text<'_>) -> Result<TextBuf, OpError> {
        Ok(if asked.get_str().is_empty() { "auto".into() } else { asked.get_str().into() })
    }
    fn learnt(&self, _: u32, _: Text<'_>, drafts: u32) -> Result<Learnt, OpError> {
        let shares = self.shares.iter().copied().chain(std::iter::repeat(0.8)).take(drafts as usize);
        Ok(Learnt { shares: shares.collect(), backlog: self.backlog })
    }
}

fn depths(shares: &[f64]) -> Arc<Depths> {
    let depths = Arc::new(Depths::default());
    let told = Told { shares: shares.to_vec(), backlog: 1 };
    depths.connect(Offer::of(PoliciesObject::new(told)).share().get().unwrap());
    depths.drafters(Slice::from(&["lookup".into(), "mtp".into(), "".into()][..])).unwrap();
    depths
}

fn fact(slot: u32, policy: &str, shared: u32, room: u32) -> SequenceFacts<'_> {
    SequenceFacts {
        slot,
        length: 10,
        room,
        sampled: false,
        policy: Text::from(policy),
        knobs: Slice::default(),
        ids: Slice::default(),
        shared,
        stop_ids: Slice::default(),
    }
}

const NONE: Choice = Choice { drafter: NO_DRAFTER, budget: 0, rule: Rule { floor: 0.0, min_match: 0 } };

fn mtp(budget: u32) -> Choice {
    Choice { drafter: 1, budget, ..NONE }
}

fn decided(depths: &Depths, facts: &[SequenceFacts<'_>], given: &[Choice]) -> Vec<Choice> {
    let mut choices: List<Choice> = given.to_vec().into();
    depths.decide(Slice::from(facts), &mut choices).unwrap();
    choices.into()
}

/// Rounds of so many sequences, each committing `tokens` in a window of `rows`.
fn rounds(depths: &Arc<Depths>, n: usize, sequences: u32, tokens: u32, rows: u32) {
    let costs = Costs(depths.clone());
    let ids = vec![0; tokens as usize];
    for _ in 0..n {
        for slot in 0..sequences {
            let event = SequenceEvent::Committed { start: 0, tokens: Slice::from(&ids[..]) };
            costs.sequence(slot, &event).unwrap();
            let (drafted, kept) = (rows - 1, tokens - 1);
            depths.observe(&Observed { slot, drafter: 1, drafted, kept, shared: sequences }).unwrap();
        }
        let (decoded, window_rows) = (sequences, sequences * rows);
        costs.round(&RoundDone { round: 1, prefill_rows: 0, decoded, window_rows, kept: 0 }).unwrap();
    }
}

/// The best depth by trying all, as the entry words it: tokens of a chain net of what the round's rows and its drafts cost.
fn brute(shares: &[f64], others: u32, most: u32, rate: f64) -> u32 {
    let prices = Prices::fixed();
    let surplus = |k: u32| {
        let chains = (1..=k as usize).map(|n| shares[..n].iter().product::<f64>());
        1.0 + chains.sum::<f64>() - rate * (prices.window(others + k + 1) + prices.chain(k, 1))
    };
    (1..=most).max_by(|a, b| surplus(*a).total_cmp(&surplus(*b)).then(b.cmp(a))).unwrap()
}

#[test]
fn rows_are_priced_past_those_of_the_others_at_the_rate_of_all() {
    for shares in [[0.9; 7], [0.6; 7], [0.95, 0.9, 0.8, 0.5, 0.3, 0.2, 0.1]] {
        for (sequences, tokens, rows) in [(2, 2, 3), (4, 1, 2), (4, 4, 5), (3, 6, 8)] {
            let depths = depths(&shares);
            rounds(&depths, 20, sequences, tokens, rows);
            let prices = Prices::fixed();
            let ms = prices.window(sequences * rows) + f64::from(sequences) * prices.chain(rows - 1, 1);
            // Before any decision a drafter owes one row.
            let rate = f64::from(sequences * tokens) / ms;
            // Two sequences with drafts, one of them priced, and one that has asked for none.
            let facts = [fact(0, "om", 3, 7), fact(1, "3", 3, 7)];
            let found = decided(&depths, &facts, &[mtp(7), mtp(3)]);
            let others = 4 + 1;
            assert_eq!(found[0].budget, brute(&shares, others, 7, rate), "{shares:?} at {rate} tokens a ms");
            let k = found[0].budget;
            let row = prices.window(others + k + 1) - prices.window(others + k);
            assert!((f64::from(found[0].rule.floor) - (rate * row).clamp(0.0, 1.0)).abs() < 1e-6);
            assert_eq!(found[1], mtp(3), "a policy that prices nothing is left alone");
        }
    }
}

#[test]
fn a_crowded_round_makes_windows_shorter_where_time_is_worth_more() {
    let depths = depths(&[0.7; 7]);
    let alone_rate = decided(&depths, &[fact(0, "o", 2, 7), fact(1, "1", 2, 7)], &[mtp(7), mtp(1)])[0].budget;
    // Eight requests that commit seven tokens each in little more time than one.
    rounds(&depths, 16, 8, 7, 8);
    let crowded = decided(&depths, &[fact(0, "o", 8, 7), fact(1, "1", 8, 7)], &[mtp(7), mtp(1)])[0].budget;
    assert!(crowded < alone_rate, "{crowded} of {alone_rate}");
    assert!(crowded >= 1, "the opening draft is paid for");
}

#[test]
fn alone_and_without_policies_nothing_is_changed() {
    let depths = depths(&[0.1; 7]);
    assert_eq!(decided(&depths, &[fact(0, "o", 1, 7)], &[mtp(6)]), [mtp(6)], "alone base-auto's rule holds");
    assert_eq!(decided(&depths, &[fact(0, "o", 2, 7)], &[NONE]), [NONE], "nobody drafts");
    let lookup = Choice { drafter: 0, budget: 7, ..NONE };
    assert_eq!(decided(&depths, &[fact(0, "o", 2, 7)], &[lookup]), [lookup], "a drafter without a price");
    assert_eq!(decided(&depths, &[fact(0, "", 2, 7)], &[mtp(3)]), [mtp(3)], "auto");
    let capped = decided(&depths, &[fact(0, "om3", 2, 2)], &[mtp(2)]);
    assert!((1..=2).contains(&capped[0].budget), "never over the room: {capped:?}");
    let unconnected = Depths::default();
    unconnected.drafters(Slice::from(&["mtp".into()][..])).unwrap();
    let one = Choice { drafter: 0, budget: 5, ..NONE };
    assert_eq!(decided(&unconnected, &[fact(0, "o", 4, 7)], &[one]), [one]);
}

#[test]
fn two_ranks_that_see_the_same_decide_the_same() {
    let (a, b) = (depths(&[0.75; 7]), depths(&[0.75; 7]));
    for n in 1..20u32 {
        for d in [&a, &b] {
            rounds(d, 1, 1 + n % 4, 1 + n % 3, 2 + n % 6);
        }
        let facts = [fact(0, "o", 3, 1 + n % 7), fact(2, "om5", 3, 7), fact(3, "c3:0.35", 3, 7)];
        let given = [mtp(1 + n % 7), mtp(5), mtp(3)];
        assert_eq!(decided(&a, &facts, &given), decided(&b, &facts, &given), "round {n}");
    }
}

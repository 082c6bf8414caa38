use super::*;

const ALL: [&str; 3] = ["mtp", "dflash2", "lookup"];

fn made(own: &str, names: &[&str]) -> Policy {
    let link = Policy::default();
    link.configure(own, false);
    let names: Vec<TextBuf> = names.iter().map(|n| TextBuf::from(*n)).collect();
    link.drafters(Slice::from(&names[..])).unwrap();
    link
}

const NONE: Choice = Choice { drafter: NO_DRAFTER, budget: 0, rule: Rule { floor: 0.0, min_match: 0 } };

fn facts(slot: u32, policy: &str, sampled: bool, room: u32) -> SequenceFacts<'_> {
    SequenceFacts {
        slot,
        length: 10,
        room,
        sampled,
        policy: Text::from(policy),
        knobs: Slice::default(),
        ids: Slice::default(),
        shared: 1,
        stop_ids: Slice::default(),
    }
}

fn decide(link: &Policy, facts: SequenceFacts<'_>) -> (u32, u32, f32) {
    let mut choices = List::from(vec![NONE]);
    link.decide(Slice::from(&[facts][..]), &mut choices).unwrap();
    (choices[0].drafter, choices[0].budget, choices[0].rule.floor)
}

fn told(link: &Policy, slot: u32, drafter: u32, drafted: u32, kept: u32) {
    link.observe(&Observed { slot, drafter, drafted, kept, shared: 1 }).unwrap();
}

#[test]
fn each_form_asks_its_drafter() {
    let link = made("auto", &ALL);
    let cases = [
        ("auto", false, (0, 3, 0.35)),
        ("auto", true, (0, 2, 0.0)),
        ("", false, (0, 3, 0.35)),
        ("0", false, (NO_DRAFTER, 0, 0.0)),
        ("5", true, (0, 5, 0.0)),
        ("a", false, (0, 2, 0.0)),
        ("c4:0.5", true, (0, 4, 0.5)),
        ("f6", false, (1, 6, 0.0)),
        ("fc7:0.3", false, (1, 7, 0.3)),
        ("fa", true, (1, 2, 0.0)),
        ("l7", false, (0, 3, 0.35)),
    ];
    for (i, (policy, sampled, want)) in cases.into_iter().enumerate() {
        assert_eq!(decide(&link, facts(i as u32, policy, sampled, 7)), want, "{policy} sampled {sampled}");
    }
    for policy in ["o", "om", "om2", "of", "of7"] {
        let (drafter, budget, floor) = decide(&link, facts(99, policy, false, 7));
        assert_eq!(drafter, u32::from(policy.starts_with("of")), "{policy}");
        assert!((1..=7).contains(&budget) && floor > 0.0, "{policy}: {budget}, {floor}");
    }
}

#[test]
fn nothing_is_asked_beyond_the_room() {
    let link = made("auto", &ALL);
    for (i, policy) in ["auto", "7", "a", "c7:0.1", "f7", "o", "l7"].into_iter().enumerate() {
        for room in 0..8 {
            let (drafter, budget, _) = decide(&link, facts(i as u32, policy, false, room));
            assert!(budget <= room && (room > 0 || drafter == NO_DRAFTER), "{policy}, room {room}");
        }
    }
}

#[test]
fn the_automatic_policy_tries_both_drafters_and_keeps_the_better() {
    let link = made("auto", &ALL);
    link.begun(0, Slice::default()).unwrap();
    let mut asked = Vec::new();
    for _ in 0..30 {
        let (drafter, budget, _) = decide(&link, facts(0, "", false, 7));
        asked.push(drafter);
        told(&link, 0, drafter, budget, if drafter == 1 { budget } else { 0 });
    }
    assert_eq!(asked[..4], [0, 0, 1, 1]);
    assert!(asked[4..].iter().filter(|d| **d == 1).count() > 20, "{asked:?}");
    assert!(asked[4..].contains(&0), "the other is tried now and then");
    // A new sequence in the slot begins anew.
    link.ended(0).unwrap();
    link.begun(0, Slice::default()).unwrap();
    assert_eq!(decide(&link, facts(0, "", false, 7)).0, 0);
}

#[test]
fn sampled_requests_draft_one_to_three_by_acceptance() {
    let link = made("auto", &["", "mtp"]);
    let mut budgets = Vec::new();
    for round in 0..12 {
        let (drafter, budget, floor) = decide(&link, facts(3, "", true, 7));
        assert_eq!((drafter, floor), (1, 0.0));
        budgets.push(budget);
        told(&link, 3, 1, budget, if round < 6 { budget } else { 0 });
    }
    assert_eq!((budgets[5], budgets[11]), (3, 1), "{budgets:?}");
}

#[test]
fn a_drafter_that_had_nothing_counts_as_tried() {
    let link = made("auto", &ALL);
    for _ in 0..4 {
        decide(&link, facts(0, "", false, 7));
        told(&link, 0, NO_DRAFTER, 0, 0);
    }
    assert_eq!(decide(&link, facts(0, "", false, 7)).0, 0);
    let state = link.state();
    assert_eq!(state.lanes[&0].backlog, [3, 1], "rows since each drafter last looked");
}

#[test]
fn forms_without_their_drafter_are_refused_with_the_mend() {
    let link = made("auto", &["mtp"]);
    let accepts = |policy: &str| link.accepts(Text::from(policy));
    for good in ["auto", "0", "3", "a", "c3:0.35", "o", "om", "om3"] {
        assert_eq!(accepts(good), Ok(Maybe::RSome(good.into())), "{good}");
    }
    for (bad, said) in [
        (
            "f5",
            "draft policy \"f5\" needs the drafter `dflash2`, which this server does not have: list a plugin",
        ),
        ("fc7:0.3", "needs the drafter `dflash2`"),
        ("of", "needs the drafter `dflash2`"),
        ("l4", "needs the drafter `lookup`"),
        ("9", "draft policy \"9\": N is \"9\": give a whole number from 1 to 7"),
        ("zz", "is not a draft policy; valid are auto, "),
    ] {
        let told = accepts(bad).unwrap_err();
        assert_eq!(told.kind, plugfold_abi::ErrorKind::Invalid);
        assert!(told.message.contains(said), "{bad}: {told}");
    }
    let none = made("auto", &[]);
    assert!(none.accepts(Text::from("3")).unwrap_err().message.contains("needs the drafter `mtp`"));
    assert_eq!(none.accepts(Text::EMPTY), Ok(Maybe::RSome("auto".into())));
    assert_eq!(decide(&none, facts(0, "auto", false, 7)).0, NO_DRAFTER);
}

#[test]
fn deep_windows_have_room_for_more_drafts() {
    let link = made("c9:0.2", &ALL);
    assert!(link.room(7).unwrap_err().message.contains("N is \"9\""));
    link.room(15).unwrap();
    assert_eq!(decide(&link, facts(0, "", false, 15)), (0, 9, 0.2));
    assert_eq!(link.accepts(Text::from("15")), Ok(Maybe::RSome("15".into())));
}

#[test]
fn the_servers_own_policy_stands_where_a_request_asks_for_none() {
    let link = made("2", &ALL);
    assert_eq!(decide(&link, facts(0, "", false, 7)), (0, 2, 0.0));
    assert_eq!(decide(&link, facts(0, "4", false, 7)), (0, 4, 0.0));
    assert_eq!(link.in_force(Text::EMPTY).unwrap().as_str(), "2");
    assert_eq!(link.in_force(Text::from("l4")).unwrap().as_str(), "l4");
    link.configure("0", true);
    assert_eq!(decide(&link, facts(0, "4", false, 7)).0, NO_DRAFTER, "drafts are off");
    assert_eq!(link.in_force(Text::from("l4")).unwrap().as_str(), "0");
}

#[test]
fn two_ranks_that_see_the_same_rounds_decide_alike() {
    let (a, b) = (made("auto", &ALL), made("auto", &ALL));
    let policies = ["auto", "a", "o", "om", "of5", "fa", "l5"];
    for round in 0..300u32 {
        let slot = round % 7;
        let asked = facts(slot, policies[slot as usize], slot == 1, 1 + round % 7);
        let (x, y) = (decide(&a, asked), decide(&b, asked));
        assert_eq!(x, y, "round {round}");
        for link in [&a, &b] {
            told(link, slot, x.0, x.1, (round.wrapping_mul(2_654_435_761) >> 7) % (x.1 + 1));
        }
    }
}

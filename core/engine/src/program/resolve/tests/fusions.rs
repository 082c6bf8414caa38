//! Providers that cover several operations, beside others that replace one of them.

use plugfold_abi::{Bits, Claim, Granted, Phase};

use super::Does::{Pass, Reference, Scale};
use super::{Planted, answering, by, count, fusion, load, plain, planted, refusal, run, who};

const ROUTE: &[&str] = &["moe.logits", "moe.pick", "moe.group"];

fn route(bits: Bits) -> Planted {
    fusion(ROUTE, Pass, bits)
}

/// Alters what is picked so that the reply shows it.
fn altering() -> Planted {
    planted("moe.pick", Scale(3.0), Bits::own("altered"))
}

#[test]
fn a_fusion_runs_where_the_reference_would() {
    let fused = route(Bits::of("ref"));
    let ran = fused.ran.clone();
    let mut core = load(vec![("f", &[], fused)]);
    assert_eq!(run(&mut core), plain());
    // Once a sparse layer and forward: six layers, two forwards.
    assert_eq!(count(&ran), 12);
    for op in ROUTE {
        assert_eq!(who(&mut core, Phase::Window, op), by("f", "ref", true), "{op}");
    }
    assert_eq!(who(&mut core, Phase::Window, "moe.up"), by("ref", "ref", false));
    assert_eq!(core.tag(&[]).unwrap(), load(vec![]).tag(&[]).unwrap());
}

#[test]
fn a_fusion_with_bits_of_its_own_gives_them_to_all_that_it_covers() {
    let mut core =
        load(vec![("f", &[], fusion(&["moe.logits", "moe.pick"], Scale(2.0), Bits::own("route")))]);
    assert_ne!(run(&mut core), plain());
    for op in &ROUTE[..2] {
        assert_eq!(who(&mut core, Phase::Prefill, op), by("f", "route", true));
    }
    assert_eq!(who(&mut core, Phase::Prefill, "moe.group"), by("ref", "ref", false));
    assert_ne!(core.tag(&[]).unwrap().id, load(vec![]).tag(&[]).unwrap().id);
}

/// Nothing is swallowed: what visibly alters one operation is in effect beside every fusion that would cover it.
#[test]
fn a_replacement_is_always_in_effect_beside_a_fusion() {
    let altered = run(&mut load(vec![("alter", &[], altering())]));
    assert_ne!(altered, plain());
    let covers: [&[&str]; 4] = [ROUTE, &ROUTE[..2], &ROUTE[1..], &["moe.pick"]];
    for covers in covers {
        for bits in [Bits::of("ref"), Bits::own("fused"), Bits::of("altered")] {
            for (first, over) in [(true, &[][..]), (false, &[]), (false, &["ref"]), (false, &["other"])] {
                let fused = fusion(covers, Pass, bits.clone());
                let (ran, alter) = (fused.ran.clone(), altering());
                let altering = alter.ran.clone();
                let (fused, alter) = (("f", over, fused), ("alter", &[][..], alter));
                let mut core = load(if first { vec![fused, alter] } else { vec![alter, fused] });
                let what = format!("{covers:?} with {bits:?}, first: {first}, over {over:?}");
                assert_eq!(run(&mut core), altered, "{what}");
                assert_eq!((count(&ran), count(&altering) > 0), (0, true), "{what}");
                assert_eq!(
                    who(&mut core, Phase::Window, "moe.pick"),
                    by("alter", "altered", false),
                    "{what}"
                );
            }
        }
    }
}

#[test]
fn a_replacement_of_equal_bits_is_not_swallowed_either() {
    let wrapper = planted("moe.pick", Pass, Bits::of("ref"));
    let (fused, wraps) = (route(Bits::of("ref")), wrapper.ran.clone());
    let ran = fused.ran.clone();
    let mut core = load(vec![("w", &[], wrapper), ("f", &[], fused)]);
    assert_eq!(run(&mut core), plain());
    assert_eq!((count(&ran), count(&wraps)), (0, 12));
}

#[test]
fn a_fusion_covers_what_it_is_over_if_the_bits_are_the_same() {
    // Over a wrapper of equal bits: the fusion runs, and the wrapper lies beneath it.
    let wrapper = planted("moe.pick", Pass, Bits::of("ref"));
    let (fused, wraps) = (route(Bits::of("ref")), wrapper.ran.clone());
    let ran = fused.ran.clone();
    let mut core = load(vec![("w", &[], wrapper), ("f", &["w"], fused)]);
    assert_eq!(run(&mut core), plain());
    assert_eq!((count(&ran), count(&wraps)), (12, 12));

    // Over an arithmetic, with the promise of the reference's bits: those are not the ones in force.
    let altered = run(&mut load(vec![("alter", &[], altering())]));
    let fused = route(Bits::of("ref"));
    let ran = fused.ran.clone();
    let mut core = load(vec![("alter", &[], altering()), ("f", &["alter"], fused)]);
    assert_eq!(run(&mut core), altered);
    assert_eq!(count(&ran), 0);

    // Over an arithmetic, with one of its own: that is what `over` says.
    let fused = fusion(&["moe.logits", "moe.pick"], Scale(2.0), Bits::own("route"));
    let ran = fused.ran.clone();
    let mut core = load(vec![("alter", &[], altering()), ("f", &["alter"], fused)]);
    assert_ne!(run(&mut core), altered);
    assert_eq!(count(&ran), 12);
    assert_eq!(who(&mut core, Phase::Window, "moe.pick"), by("f", "route", true));
}

#[test]
fn a_replacement_in_one_phase_leaves_the_fusion_to_the_others() {
    let alter = || {
        answering("moe.pick", Scale(3.0), |q| {
            let granted = Granted::plain(Bits::own("altered"));
            Ok(if q.phase == Phase::Window { Claim::Yes(granted) } else { Claim::No })
        })
    };
    let want = run(&mut load(vec![("alter", &[], alter())]));
    let fused = route(Bits::of("ref"));
    let ran = fused.ran.clone();
    let mut core = load(vec![("alter", &[], alter()), ("f", &[], fused)]);
    assert_eq!(run(&mut core), want);
    assert_eq!(count(&ran), 6, "the prefill's");
    assert_eq!(who(&mut core, Phase::Window, "moe.pick"), by("alter", "altered", false));
    assert_eq!(who(&mut core, Phase::Prefill, "moe.pick"), by("f", "ref", true));
}

#[test]
fn the_later_fusion_has_the_first_choice() {
    let (long, short) = (route(Bits::of("ref")), fusion(&ROUTE[1..], Pass, Bits::of("ref")));
    let (ran_long, ran_short) = (long.ran.clone(), short.ran.clone());
    let mut core = load(vec![("long", &[], long), ("short", &[], short)]);
    assert_eq!(run(&mut core), plain());
    assert_eq!((count(&ran_long), count(&ran_short)), (0, 12));
    assert_eq!(who(&mut core, Phase::Window, "moe.logits"), by("ref", "ref", false));
}

#[test]
fn calls_of_one_operation_go_to_their_own_providers_beneath() {
    // Two products of one layer in a row; a provider of the same plugin claims the second alone.
    let role = |role: &'static str, does, covers: &'static [&'static str]| {
        let answer = move |q: &plugfold_abi::Query<'_>| {
            let granted = Granted::plain(Bits::of("ref"));
            Ok(if q.weight_roles[0].get_str() == role { Claim::Yes(granted) } else { Claim::No })
        };
        Planted { covers, ..answering("dense", does, answer) }
    };
    let second = role("kda.g_b", Reference, &[]);
    let fused = role("kda.f_b", Pass, &["dense", "dense"]);
    let (ran_second, ran) = (second.ran.clone(), fused.ran.clone());
    let mut core = load(vec![("f", &[], second), ("f", &[], fused)]);
    assert_eq!(run(&mut core), plain());
    // Five layers, two forwards.
    assert_eq!((count(&ran), count(&ran_second)), (10, 10));
}

/// Sends calls of an operation to a provider of another plugin.
fn sending(op: &'static str, to: &'static str, bits: fn() -> Bits) -> Planted {
    answering(op, Reference, move |_| Ok(Claim::As(to.into(), Granted::plain(bits()))))
}

#[test]
fn calls_that_are_sent_to_another_provider_are_not_swallowed_by_a_fusion() {
    // A fusion of the plugin to whose provider the calls are sent: who sent them is over neither.
    let named = || Planted { name: "kernel", ..planted("moe.pick", Reference, Bits::of("ref")) };
    for bits in [(|| Bits::of("ref")) as fn() -> Bits, || Bits::own("sent")] {
        for over in [&[][..], &["s"]] {
            for first in [false, true] {
                let (kernel, fused) = (named(), route(bits()));
                let (ran_kernel, ran) = (kernel.ran.clone(), fused.ran.clone());
                let sender = ("s", &[][..], sending("moe.pick", "f/kernel", bits));
                let (kernel, fused) = (("f", over, kernel), ("f", over, fused));
                let mut core =
                    load(if first { vec![kernel, fused, sender] } else { vec![kernel, sender, fused] });
                let what = format!("{:?}, over {over:?}, fusion first: {first}", bits());
                assert_eq!(run(&mut core), plain(), "{what}");
                assert_eq!(count(&ran) > 0, !over.is_empty(), "{what}");
                assert!(count(&ran_kernel) > 0, "{what}: the kernel runs, alone or beneath the fusion");
            }
        }
    }
}

#[test]
fn a_fusion_over_several_arithmetics_promises_each() {
    let other = || planted("moe.pick", Reference, Bits::own("other"));
    for (bits, fuses) in [("ref+other+ref", true), ("ref", false), ("other", false), ("ref+ref+other", false)]
    {
        let fused = route(Bits::of(bits));
        let ran = fused.ran.clone();
        let mut core = load(vec![("o", &[], other()), ("f", &["o"], fused)]);
        assert_eq!(run(&mut core), plain(), "{bits}");
        assert_eq!(count(&ran) > 0, fuses, "{bits}");
        // The names in force stay: nothing has changed for a tag.
        let fused = if fuses { by("f", "other", true) } else { by("o", "other", false) };
        assert_eq!(who(&mut core, Phase::Window, "moe.pick"), fused, "{bits}");
    }
    let text = refusal(vec![("f", &[], route(Bits::of("ref+ref")))]);
    for word in ["plugin f", "3 operations", "2 arithmetics", "one for each"] {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
}

#[test]
fn a_fusion_sees_all_that_it_would_cover_before_it_takes_it() {
    // In a layer of linear attention three products follow each other, of which the last two have one shape.
    let equal = |q: &[plugfold_abi::Query<'_>]| q[0].dims == q[1].dims;
    let pairs = || fusion(&["dense", "dense"], Pass, Bits::of("ref"));
    for (fused, which) in
        [(pairs(), [true, true, false]), (Planted { takes: Some(equal), ..pairs() }, [false, true, true])]
    {
        let mut core = load(vec![("f", &[], fused)]);
        assert_eq!(run(&mut core), plain());
        let steps = core.described(Phase::Window).unwrap().into_iter();
        let products = steps.filter(|s| s.op == "dense" && s.layer == 0).take(3);
        assert_eq!(products.map(|s| s.fused).collect::<Vec<_>>(), which);
    }
}

#[test]
fn covers_that_make_no_sense_are_refused() {
    let wrong = Planted { covers: ROUTE, ..planted("moe.pick", Pass, Bits::of("ref")) };
    let text = refusal(vec![("f", &[], wrong)]);
    for word in ["plugin f", "provider main", "moe.logits", "the first being moe.pick"] {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
    let text = refusal(vec![("f", &[], fusion(&["dense"; 9], Pass, Bits::of("ref")))]);
    assert!(text.contains("at most 8"), "{text}");
}

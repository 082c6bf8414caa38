//! First whose bits, then which kernels.

use plugfold_abi::{
    BelowObject, Bits, Call, Claim, Granted, OpError, Pass, PassContext, PassObject, Phase, Plan, Program,
    Provider, ProviderObject, Query, TextBuf,
};

use super::Does::{Pass as PassOn, Reference, Scale};
use super::{answering, by, core, count, hooks, load, plain, planted, refusal, run, who};
use crate::hooks::Hooks;

#[test]
fn the_later_arithmetic_decides_where_it_is_over_the_earlier() {
    let (a, b) =
        (planted("moe.pick", Scale(2.0), Bits::own("a")), planted("moe.pick", Scale(0.5), Bits::own("b")));
    let (ran_a, ran_b) = (a.ran.clone(), b.ran.clone());
    let mut both = load(vec![("a", &[], a), ("b", &["x", "a"], b)]);
    assert_eq!(who(&mut both, Phase::Window, "moe.pick"), by("b", "b", false));
    let bits = run(&mut both);
    assert_eq!(count(&ran_a), 0);
    assert!(count(&ran_b) > 0);
    let mut alone = load(vec![("b", &[], planted("moe.pick", Scale(0.5), Bits::own("b")))]);
    assert_eq!(bits, run(&mut alone), "what it is over leaves no trace");
    assert_ne!(bits, plain(), "it can be seen");
}

#[test]
fn two_arithmetics_of_which_neither_is_over_the_other_are_refused() {
    let pick = |bits| planted("moe.pick", Scale(2.0), Bits::own(bits));
    let text = refusal(vec![("a", &[], pick("a.1")), ("b", &[], pick("b.1"))]);
    for word in ["moe.pick", "plugins a and b", "a.1, b.1", "`over`"] {
        assert!(text.contains(word), "{word} is not in: {text}");
    }
    // It does not help that the earlier one is over the later one, nor that a third is over one of the two.
    refusal(vec![("a", &["b"], pick("a.1")), ("b", &[], pick("b.1"))]);
    refusal(vec![("a", &[], pick("a.1")), ("b", &[], pick("b.1")), ("c", &["b"], pick("c.1"))]);
    // Arithmetics of one name are one arithmetic; a chain of `over` is an order; calls that do not meet do not conflict.
    load(vec![("a", &[], pick("same")), ("b", &[], planted("moe.pick", PassOn, Bits::own("same")))]);
    load(vec![("a", &[], pick("a.1")), ("b", &["a"], pick("b.1")), ("c", &["b"], pick("c.1"))]);
    load(vec![("a", &[], pick("a.1")), ("b", &[], planted("norm", Reference, Bits::own("b.1")))]);
    let split = |phase| {
        answering("moe.pick", Reference, move |q| {
            let bits = Bits::own(if phase == Phase::Window { "w" } else { "p" });
            Ok(if q.phase == phase { Claim::Yes(Granted::plain(bits)) } else { Claim::No })
        })
    };
    load(vec![("a", &[], split(Phase::Window)), ("b", &[], split(Phase::Prefill))]);
}

#[test]
fn equal_bits_run_where_theirs_are_in_force_and_nowhere_else() {
    // Above the reference.
    let of_ref = planted("moe.pick", PassOn, Bits::of("ref"));
    let ran = of_ref.ran.clone();
    let mut core = load(vec![("c", &[], of_ref)]);
    assert_eq!(who(&mut core, Phase::Window, "moe.pick"), by("c", "ref", false));
    assert_eq!(run(&mut core), plain());
    assert!(count(&ran) > 0);
    let same_tag = core.tag(&[]).unwrap() == load(vec![]).tag(&[]).unwrap();
    assert!(same_tag, "equal bits change no tag");

    // Above another plugin's arithmetic, in either order of the list.
    let altered = run(&mut load(vec![("a", &[], planted("moe.pick", Scale(2.0), Bits::own("a")))]));
    for order in [["a", "c"], ["c", "a"]] {
        let list = order.map(|id| match id {
            "a" => (id, &[][..], planted("moe.pick", Scale(2.0), Bits::own("a"))),
            _ => (id, &[][..], planted("moe.pick", PassOn, Bits::of("a"))),
        });
        let rans = list.each_ref().map(|(_, _, p)| p.ran.clone());
        let mut core = load(list.into());
        assert_eq!(run(&mut core), altered, "{order:?}");
        // The later one is the outer one; what is beneath an arithmetic that runs by itself is not called.
        let ran = rans.each_ref().map(|r| count(r) > 0);
        assert_eq!(ran, if order == ["a", "c"] { [true, true] } else { [false, true] }, "{order:?}");
        assert_eq!(who(&mut core, Phase::Prefill, "moe.pick"), by(order[1], "a", false));
    }

    // Where nobody has those bits, or others are in force, it does not run.
    for beside in [None, Some("b")] {
        let of_a = planted("moe.pick", PassOn, Bits::of("a"));
        let of_ref = planted("moe.pick", PassOn, Bits::of("ref"));
        let rans = [of_a.ran.clone(), of_ref.ran.clone()];
        let mut list = vec![("c", &[][..], of_a)];
        if let Some(bits) = beside {
            list.push(("d", &[], of_ref));
            list.push(("b", &[], planted("moe.pick", Reference, Bits::own(bits))));
        }
        let mut core = load(list);
        run(&mut core);
        assert_eq!(rans.map(|r| count(&r)), [0, 0], "{beside:?}");
        let owner = beside.unwrap_or("ref");
        assert_eq!(who(&mut core, Phase::Window, "moe.pick"), by(owner, owner, false));
    }
}

#[test]
fn tags_follow_from_the_bits_of_prefill() {
    let own = |phase| {
        answering("moe.pick", Reference, move |q| {
            let granted = Granted::plain(Bits::own("mine"));
            Ok(if q.phase == phase { Claim::Yes(granted) } else { Claim::No })
        })
    };
    let plain = load(vec![]).tag(&[]).unwrap();
    assert!(plain.window, "the reference's windows compute what its prefill computes");
    let window = load(vec![("a", &[], own(Phase::Window))]).tag(&[]).unwrap();
    assert_eq!((window.id, window.window), (plain.id, false));
    let prefill = load(vec![("a", &[], own(Phase::Prefill))]).tag(&[]).unwrap();
    assert!(prefill.id != plain.id && !prefill.window);
    // An arithmetic that depends on the row count would give a state no name.
    let by_rows = answering("moe.pick", Reference, |q| {
        let bits = Bits::own("many");
        Ok(if q.rows > 4 { Claim::Yes(Granted::plain(bits)) } else { Claim::No })
    });
    let text = refusal(vec![("a", &[], by_rows)]);
    assert!(text.contains("depends on the row count") && text.contains("moe.pick=many"), "{text}");
}

#[test]
fn states_are_kept_where_every_arithmetic_allows() {
    // The two never stand in one program.
    let grid = |op, grid| {
        answering(op, Reference, move |_| {
            Ok(Claim::Yes(Granted { grid, ..Granted::plain(Bits::own("grid")) }))
        })
    };
    let mut core = load(vec![("a", &[], grid("mla.dense", 4)), ("b", &[], grid("mla.sparse", 6))]);
    assert_eq!(core.tag(&[]).unwrap().grid, 12);
    let mut core = load(vec![("a", &[], grid("moe.pick", 4)), ("b", &[], grid("norm", 6))]);
    assert_eq!(core.tag(&[]).unwrap().grid, 12);
    assert_eq!(load(vec![]).tag(&[]).unwrap().grid, 1);
}

#[test]
fn a_claim_may_send_its_calls_to_another_provider() {
    // "b" claims nothing by itself. It has the same name for another operation, which must not be mistaken for it.
    let elsewhere = || answering("moe.pick", Reference, |_| Ok(Claim::No));
    let sends = |to: &'static str| {
        answering("moe.pick", PassOn, move |_| {
            let mut granted = Granted::plain(Bits::of("ref"));
            granted.plan[0] = 7;
            Ok(Claim::As(to.into(), granted))
        })
    };
    let (a, b) = (sends("b/main"), elsewhere());
    let others =
        ["norm", "hc.dots", "mlp.act", "kda.mix"].map(|op| answering(op, Reference, |_| Ok(Claim::No)));
    let (ran_a, ran_b, plan) = (a.ran.clone(), b.ran.clone(), b.plan.clone());
    let mut list = vec![("a", &[][..], a), ("b", &[][..], b)];
    list.extend(others.into_iter().map(|other| ("b", &[][..], other)));
    let mut core = load(list);
    assert_eq!(who(&mut core, Phase::Window, "moe.pick"), by("b", "ref", false));
    assert_eq!(run(&mut core), plain());
    assert_eq!(count(&ran_a), 0);
    assert!(count(&ran_b) > 0);
    assert_eq!(count(&plan), 7, "the plan is the claim's");
    let text = refusal(vec![("a", &[], sends("c/main")), ("b", &[], elsewhere())]);
    assert!(text.contains("moe.pick") && text.contains("plugin a") && text.contains("c/main"), "{text}");
    let text = refusal(vec![("b", &[], elsewhere()), ("b", &[], elsewhere())]);
    assert!(text.contains("plugin b") && text.contains("moe.pick") && text.contains("main"), "{text}");
}

/// Does not say what it is for.
struct Nameless;

impl Provider for Nameless {
    fn op(&self) -> Result<TextBuf, OpError> {
        Err(OpError::new("forgot what it is for"))
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::No)
    }
    fn run(&self, _: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        Ok(())
    }
}

#[test]
fn a_provider_that_fails_or_panics_instead_of_answering_is_named() {
    let fails = answering("norm", Reference, |_| Err(OpError::new("has no answer")));
    let text = refusal(vec![("a", &[], fails)]);
    assert!(text.contains("norm") && text.contains("plugin a: has no answer"), "{text}");
    let panics = answering("norm", Reference, |q| panic!("asked for layer {}", q.layer));
    let text = refusal(vec![("a", &[], panics)]);
    assert!(text.contains("plugin a: panicked in provider.claim: asked for layer"), "{text}");

    let mut hooks = Hooks::default();
    hooks.add_object("a", ProviderObject::new(Nameless)).unwrap();
    let text = core(hooks).err().unwrap().to_string();
    assert_eq!(text, "plugin a: forgot what it is for");
}

/// Calls every norm by another name.
struct Rename;

impl Pass for Rename {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("rename".into())
    }
    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        let norms = program.steps.iter_mut().filter(|s| s.op.as_str() == "norm");
        norms.for_each(|s| s.op = "act".into());
        Ok(())
    }
}

#[test]
fn an_operation_that_a_plugin_defines_needs_somebody_who_runs_it() {
    let renamed = |list| {
        let mut hooks = hooks(list);
        hooks.add_object("a", PassObject::new(Rename)).unwrap();
        core(hooks)
    };
    let text = renamed(vec![]).err().unwrap().to_string();
    assert!(text.contains("no provider runs act (layer") && text.contains("plain.f32"), "{text}");
    // Anybody may claim it as if it were an operation of the table.
    let mut defined = renamed(vec![("a", &[], planted("act", PassOn, Bits::own("a.norm")))]).unwrap();
    assert_eq!(who(&mut defined, Phase::Window, "act"), by("a", "a.norm", false));
    assert!(who(&mut defined, Phase::Window, "norm").is_empty());
}

//! Providers of which a request's knob selects one.

use std::sync::Arc;

use plugfold_abi::{Bits, KnobValue, Phase};

use super::Does::{Pass, Scale};
use super::{Bitwise, Planted, by, core, count, fusion, go_on, hooks, plain, planted, run, who_with};
use crate::core::{Core, SeqRows, Want};
use crate::hooks::Hooks;
use crate::knobs::{Effect, Fold, KnobSpec, Knobs};

const NARROW: KnobValue = KnobValue::Int(8);
const WIDE: KnobValue = KnobValue::Int(16);
const OTHER: KnobValue = KnobValue::Int(9);

/// One knob, 8 where a request says nothing.
fn knob(fold: Fold, effect: Effect) -> Knobs {
    let spec = KnobSpec { name: "fam.width".into(), fold, effect };
    Knobs { specs: [spec].into(), defaults: [NARROW].into() }
}

fn member(value: &'static str, provider: Planted) -> Planted {
    Planted { name: if value == "8" { "narrow" } else { "wide" }, member: Some((0, value)), ..provider }
}

/// A family of two with equal bits.
fn family(knobs: Knobs) -> (Hooks, impl Fn() -> [bool; 2]) {
    let of_ref = || planted("moe.up", Pass, Bits::of("ref"));
    let (narrow, wide) = (member("8", of_ref()), member("16", of_ref()));
    let ran = [narrow.ran.clone(), wide.ran.clone()];
    let hooks = Hooks { knobs, ..hooks(vec![("fam", &[], narrow), ("fam", &[], wide)]) };
    (hooks, move || ran.each_ref().map(|r| count(r) > 0))
}

fn with(core: &mut Core, value: KnobValue) -> Bitwise {
    core.begin_with(0, Arc::from([value])).unwrap();
    go_on(core)
}

#[test]
fn the_value_of_a_request_selects_and_any_other_leaves_the_rest() {
    let (hooks, ran) = family(knob(Fold::Min, Effect::Speed));
    let mut core = core(hooks).unwrap();
    let want = plain();
    assert_eq!(run(&mut core), want);
    assert_eq!(ran(), [true, false], "the server's own value");
    assert_eq!(with(&mut core, WIDE), want);
    assert_eq!(ran(), [false, true]);
    assert_eq!(with(&mut core, OTHER), want);
    assert_eq!(ran(), [false, false]);
    assert_eq!(who_with(&mut core, Phase::Window, "moe.up", &[OTHER]), by("ref", "ref", false));
    let tags = [NARROW, WIDE, OTHER].map(|v| core.tag(&[v]).unwrap());
    assert_eq!([tags[0]; 2], [tags[1], tags[2]], "a knob of speed changes no tag");
}

#[test]
fn sequences_that_share_a_call_are_folded() {
    for (fold, want) in [(Fold::Min, [true, false]), (Fold::Max, [false, true]), (Fold::Own, [true, false])] {
        let (hooks, ran) = family(knob(fold, Effect::Speed));
        let mut core = core(hooks).unwrap();
        for (slot, value) in [(0, WIDE), (1, NARROW)] {
            core.begin_with(slot, Arc::from([value])).unwrap();
        }
        let rows = [0, 1].map(|slot| SeqRows { slot, tokens: &[5, 6], want: Want::Last, embeds: &[] });
        let forward = core.forward(Phase::Prefill, &rows, Some(1), false).unwrap();
        assert_eq!(forward.failure, None);
        assert_eq!(ran(), want, "{fold:?}");
    }
}

#[test]
fn a_knob_that_cannot_change_a_call_does_not_select() {
    for effect in [Effect::Schedule, Effect::Drafts, Effect::Host] {
        let (hooks, ran) = family(knob(Fold::Min, effect));
        let mut core = core(hooks).unwrap();
        with(&mut core, WIDE);
        assert_eq!(ran(), [true, false], "{effect:?}: the server's own value stands");
    }
}

#[test]
fn members_of_unequal_bits_have_tags_of_their_own() {
    let pick = |value, by, bits| member(value, planted("moe.pick", Scale(by), Bits::own(bits)));
    let list = vec![("fam", &[][..], pick("8", 0.5, "half")), ("fam", &[][..], pick("16", 2.0, "double"))];
    let hooks = Hooks { knobs: knob(Fold::Split, Effect::Bits), ..hooks(list) };
    let mut core = core(hooks).unwrap();
    let values = [NARROW, WIDE, OTHER];
    let tags = values.clone().map(|v| core.tag(&[v]).unwrap().id);
    assert!(tags[0] != tags[1] && tags[1] != tags[2] && tags[0] != tags[2], "{tags:?}");
    let bits = values.map(|v| with(&mut core, v));
    assert!(bits[0] != bits[1] && bits[1] != bits[2] && bits[0] != bits[2]);
    assert_eq!(bits[2], plain());

    // A snapshot of one is nothing to the other.
    core.begin_with(0, Arc::from([WIDE])).unwrap();
    go_on(&mut core);
    let snapshot = core.snapshot(0).unwrap();
    assert!(core.restore(&snapshot).unwrap());
    core.begin_with(0, Arc::from([NARROW])).unwrap();
    assert!(!core.restore(&snapshot).unwrap());
    core.begin_with(0, Arc::from([WIDE])).unwrap();
    assert!(core.restore(&snapshot).unwrap());
}

#[test]
fn a_fusion_may_be_a_member() {
    let fused = fusion(&["moe.up", "moe.act", "moe.down"], Pass, Bits::of("ref"));
    let fused = member("16", fused);
    let ran = fused.ran.clone();
    let hooks = Hooks { knobs: knob(Fold::Min, Effect::Speed), ..hooks(vec![("fam", &[], fused)]) };
    let mut core = core(hooks).unwrap();
    let want = plain();
    assert_eq!(run(&mut core), want);
    assert_eq!(count(&ran), 0);
    assert_eq!(with(&mut core, WIDE), want);
    assert!(count(&ran) > 0);
    assert_eq!(who_with(&mut core, Phase::Window, "moe.act", &[WIDE]), by("fam", "ref", true));
    assert_eq!(who_with(&mut core, Phase::Window, "moe.act", &[NARROW]), by("ref", "ref", false));
}

//! The order of the list cannot change bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use plugfold_abi::Bits;

use super::Does::{Pass, Reference, Rows, Twice};
use super::{Planted, fusion, load, plain, planted, run};

const IDS: [&str; 12] = [
    "norm-rows",
    "norm-new",
    "dense-new",
    "dense-twice",
    "pick-rows",
    "pick-new",
    "mix-twice",
    "act-rows",
    "route",
    "late-route",
    "hyper",
    "experts",
];

/// Plugins with the reference's bits that run it in ways of their own; some contend for the same calls.
fn plugin(id: &str) -> (&'static [&'static str], Planted) {
    let same = |op, does| planted(op, does, Bits::of("ref"));
    let fused = |covers| fusion(covers, Pass, Bits::of("ref"));
    match id {
        "norm-rows" => (&[], same("norm", Rows)),
        "norm-new" => (&[], same("norm", Reference)),
        "dense-new" => (&[], same("dense", Reference)),
        "dense-twice" => (&[], same("dense", Twice)),
        "pick-rows" => (&[], same("moe.pick", Rows)),
        "pick-new" => (&[], same("moe.pick", Reference)),
        "mix-twice" => (&[], same("kda.mix", Twice)),
        "act-rows" => (&[], same("moe.act", Rows)),
        "route" => (&["pick-rows", "pick-new"], fused(&["moe.logits", "moe.pick", "moe.group"])),
        "late-route" => (&["pick-new"], fused(&["moe.pick", "moe.group"])),
        "hyper" => (&[], fused(&["hc.dots", "hc.finish"])),
        _ => (&["act-rows"], fused(&["moe.up", "moe.act", "moe.down"])),
    }
}

/// Pseudo-random numbers below a limit.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

#[test]
fn a_hundred_random_orders_of_same_bits_plugins_give_the_same_bits() {
    let want = plain();
    let tag = load(vec![]).tag(&[]).unwrap();
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15);
    // In how many orders each plugin ran something.
    let mut ran = [0; IDS.len()];
    for round in 0..100 {
        let mut order: Vec<usize> = (0..IDS.len()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, dice.below(i + 1));
        }
        // Now and then some are off the list.
        order.truncate(IDS.len() - dice.below(4));
        let mut counters: Vec<(usize, Arc<AtomicU32>)> = Vec::new();
        let list = order.iter().map(|&i| {
            let (over, provider) = plugin(IDS[i]);
            counters.push((i, provider.ran.clone()));
            (IDS[i], over, provider)
        });
        let mut core = load(list.collect());
        let names: Vec<&str> = order.iter().map(|&i| IDS[i]).collect();
        assert!(run(&mut core) == want, "order {round}: {names:?}");
        assert_eq!(core.tag(&[]).unwrap(), tag, "order {round}: {names:?}");
        for (i, counter) in counters {
            ran[i] += usize::from(counter.load(Ordering::Relaxed) > 0);
        }
    }
    // None is there for nothing, and those that contend do lose at times.
    for (id, times) in IDS.iter().zip(ran) {
        assert!(times > 0, "{id} never ran");
    }
    assert!(ran.iter().any(|&times| times < 70), "nobody ever lost: {ran:?}");
}

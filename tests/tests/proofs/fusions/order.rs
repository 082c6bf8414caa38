//! Who runs what in every order of the list, and that it changes no bit.

use std::sync::Arc;

use super::{Bitwise, EVERYWHERE, Integer, Log, Model, Planted, Tiny, add, run, surplus::Surplus, who};

fn all(model: Model, ranks: usize, list: &[&str], planted: Planted) -> Vec<(Bitwise, [String; 5])> {
    const OPS: [&str; 5] = ["moe.logits", "moe.up", "moe.act", "moe.down", "moe.combine"];
    let logs: Vec<Log> = (0..ranks).map(|_| Log::default()).collect();
    let surplus = Arc::<Surplus>::default();
    let hooks = |rank: usize, hooks: &mut plugfold_engine::hooks::Hooks| {
        add(hooks, model, list, &logs[rank], &surplus, planted);
    };
    model.run(ranks, hooks, |core| {
        let given = run(core, &logs[core.split().rank]);
        (given, OPS.map(|op| who(core, op)))
    })
}

#[test]
fn fused_or_not_in_any_order_gives_the_same_bits() {
    for (model, ranks) in EVERYWHERE {
        let plain = all(model, ranks, &[], Planted::default());
        let lists: &[&[&str]] = &[
            &["0130"],
            &["0280"],
            &["0580"],
            &["0006"],
            &["0006", "0130"],
            &["0130", "0006"],
            &["0006", "0580"],
            &["0580", "0006"],
            &["0130", "0280", "0580"],
            &["0580", "0280", "0130"],
            &["0006", "0130", "0280", "0580"],
            &["0580", "0280", "0130", "0006"],
        ];
        for list in lists {
            for (rank, (plain, got)) in
                plain.iter().zip(all(model, ranks, list, Planted::default())).enumerate()
            {
                assert!(got.0 == plain.0, "{model:?}, rank {rank} of {ranks}: {list:?} changes bits");
            }
        }
    }
}

#[test]
fn a_fusion_runs_where_nothing_that_it_covers_is_replaced() {
    for model in [Integer, Tiny] {
        let beneath = if model == Integer { "integer" } else { "ref" };
        let who = |list: &[&str], planted| all(model, 1, list, planted).remove(0).1;
        let plain = Planted::default();
        // All of 0130 by itself, and above the loop, wherever it is listed.
        for list in [&["0130"][..], &["0006", "0130"], &["0130", "0006"]] {
            assert_eq!(who(list, plain), ["0130"; 5], "{model:?}: {list:?}");
        }
        // The experts' parts are 0580's: their fusion stays away, the other fusions run.
        for list in [["0130", "0580"], ["0580", "0130"]] {
            assert_eq!(who(&list, plain), ["0130", "0580", beneath, "0580", "0130"], "{model:?}: {list:?}");
        }
        // Over 0580 it takes the calls first.
        let over = Planted { over_loads: true, ..plain };
        for list in [["0130", "0580"], ["0580", "0130"]] {
            assert_eq!(who(&list, over), ["0130"; 5], "{model:?}: {list:?}");
        }
        // Two claims of the same bits: the one listed last is outer, whichever it is.
        assert_eq!(who(&["0006", "0580"], plain)[1], "0580", "{model:?}");
        assert_eq!(who(&["0580", "0006"], plain)[1], "0006", "{model:?}");
    }
}

#[test]
fn a_fusion_that_loses_a_part_of_a_sum_is_caught() {
    let plain = all(Integer, 1, &["0130"], Planted::default());
    let planted = Planted { forgets_a_slice: true, ..Planted::default() };
    let wrong = all(Integer, 1, &["0130"], planted);
    assert!(plain[0].0 != wrong[0].0, "a slice that is missing shows in the bits");
}

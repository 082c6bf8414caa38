//! The acceptance list of 0006: on stacks of experts, and on the tiny model.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::sync::Arc;

use plugfold_0006_exl3_expert_loop::{Half, Looped, ONE_TILE, SETTINGS};
use plugfold_abi::{KnobValue, List, Phase, ProviderObject, Shape};
use plugfold_engine::core::{Core, CoreOptions};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::knobs::{Effect, Fold, KnobSpec, Knobs};
use plugfold_engine::split::Split;
use plugfold_kernels::cpu::math::dense::{Elements, pack_f32};
use plugfold_kernels::cpu::math::moe::{Tiles, experts, experts_tiled};
use plugfold_kernels::cpu::rows::{Rows, RowsMut};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{ids, prefill};

/// Numbers in -1..1.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    ids(seed, n, 1 << 16).into_iter().map(|i| i as f32 / 32768.0 - 1.0).collect()
}

/// Rows of each expert, one slot a row: (input rows, pairs by expert, where each expert's begin).
fn members(counts: &[usize]) -> (usize, Vec<i32>, Vec<i32>) {
    let rows: usize = counts.iter().sum();
    // An expert's rows lie apart in the call: row r belongs to the expert whose turn it is.
    let mut left = counts.to_vec();
    let mut of = vec![Vec::new(); counts.len()];
    let mut expert = 0;
    for row in 0..rows as i32 {
        while left[expert % counts.len()] == 0 {
            expert += 1;
        }
        of[expert % counts.len()].push(row);
        left[expert % counts.len()] -= 1;
        expert += 1;
    }
    let starts = of.iter().scan(0, |at, o| Some(std::mem::replace(at, *at + o.len() as i32)));
    let starts = starts.chain([rows as i32]).collect();
    (rows, of.concat(), starts)
}

struct Stack {
    n: usize,
    k: usize,
    packed: Vec<f32>,
}

impl Stack {
    fn new(experts: usize, n: usize, k: usize) -> Self {
        let all = numbers(3, experts * n * k);
        Self { n, k, packed: all.chunks(n * k).flat_map(|w| pack_f32(w, n, k)).collect() }
    }

    /// Bits of all output rows; `None`: by the reference.
    fn run(&self, x: &[f32], (order, starts): (&[i32], &[i32]), tiles: Option<Tiles>) -> Vec<u32> {
        let mut out = vec![f32::NAN; order.len() * self.n];
        let (x, view) = (Rows::new(x, self.k), RowsMut::new(&mut out, self.n));
        let stack = Elements::F32(&self.packed);
        match tiles {
            Some(tiles) => experts_tiled(x, stack, self.n, (order, starts), 1, tiles, view).unwrap(),
            None => experts(x, stack, self.n, order, starts, 1, view).unwrap(),
        }
        out.iter().map(|v| v.to_bits()).collect()
    }
}

#[test]
fn all_settings_give_the_bits_of_the_reference_on_150_rows_and_each_row_alone() {
    // 80 members, exactly 32, and the rest; widths with and without a last panel that is not full.
    let (rows, order, starts) = members(&[80, 32, 21, 17]);
    for (n, k) in [(96, 300), (72, 64), (5, 17)] {
        let stack = Stack::new(4, n, k);
        let x = numbers(9, rows * k);
        let want = stack.run(&x, (&order, &starts), None);
        for tiles in SETTINGS {
            assert_eq!(stack.run(&x, (&order, &starts), Some(tiles)), want, "{tiles:?}, {n} x {k}");
        }
        for expert in 0..4 {
            for &row in &order[starts[expert] as usize..starts[expert + 1] as usize] {
                let alone: Vec<i32> = (0..=4).map(|e| i32::from(e > expert)).collect();
                let x = &x[row as usize * k..][..k];
                let one = stack.run(x, (&[0], &alone), None);
                assert_eq!(one[..], want[row as usize * n..][..n], "row {row} alone, {n} x {k}");
            }
        }
    }
}

#[test]
fn experts_of_0_1_16_17_32_and_33_members() {
    let (rows, order, starts) = members(&[0, 1, 16, 17, 32, 33, 0]);
    let stack = Stack::new(7, 40, 33);
    let x = numbers(5, rows * 33);
    let want = stack.run(&x, (&order, &starts), None);
    for tiles in SETTINGS {
        assert_eq!(stack.run(&x, (&order, &starts), Some(tiles)), want, "{tiles:?}");
    }
}

fn core(tiles: Option<Tiles>) -> Core {
    let mut hooks = Hooks::default();
    if let Some(tiles) = tiles {
        for half in [Half::Up, Half::Down] {
            let looped = Looped { half, tiles, knob: 0, on: true, note: None };
            hooks.add_object("0006", ProviderObject::new(looped)).unwrap();
        }
        let spec = KnobSpec { name: "0006.expert_loop".into(), fold: Fold::Split, effect: Effect::Speed };
        hooks.knobs = Knobs { specs: [spec].into(), defaults: [KnobValue::Bool(true)].into() };
    }
    let options =
        CoreOptions { context: Some(1024), window_rows: 8, hooks: Arc::new(hooks), ..CoreOptions::default() };
    Core::load(&tiny_dir(), &options, Split::WHOLE, None).unwrap()
}

#[test]
fn a_full_prefill_in_chunks_of_512_leaves_the_reference_s_state() {
    let prompt = ids(7, 700, 480);
    let mut plain = core(None);
    let logits = prefill(&mut plain, 0, &prompt, 512);
    let want = plain.image(0);
    for tiles in [SETTINGS[0], SETTINGS[3]] {
        let mut looped = core(Some(tiles));
        assert_eq!(prefill(&mut looped, 0, &prompt, 512), logits, "{tiles:?}");
        assert!(looped.image(0) == want, "{tiles:?}: another state");
        assert_eq!(
            looped.tag(&[KnobValue::Bool(true)]).unwrap(),
            plain.tag(&[]).unwrap(),
            "no tag of its own"
        );
    }
}

#[test]
fn it_runs_calls_of_more_than_16_rows_where_the_knob_is_on_and_no_others() {
    let mut core = core(Some(SETTINGS[0]));
    for (phase, rows, on, mine) in [
        (Phase::Prefill, ONE_TILE, true, false),
        (Phase::Prefill, ONE_TILE + 1, true, true),
        (Phase::Prefill, 512, true, true),
        (Phase::Prefill, 512, false, false),
        (Phase::Window, 8, true, false),
        (Phase::Window, 24, true, true),
    ] {
        let shape = Shape {
            kind: "forward".into(),
            phase,
            rows,
            seqs: 1,
            out_rows: 1,
            select: false,
            candidates: 0,
            words: List::new(),
            knobs: vec![KnobValue::Bool(on)].into(),
        };
        let steps = core.program(&shape).unwrap().describe();
        let experts: Vec<_> = steps.iter().filter(|s| s.op == "moe.up" || s.op == "moe.down").collect();
        assert!(!experts.is_empty());
        for step in experts {
            let owner = if mine { "0006" } else { "ref" };
            assert_eq!((&*step.owner, &*step.bits), (owner, "ref"), "{phase:?}, {rows} rows, knob {on}");
        }
    }
}

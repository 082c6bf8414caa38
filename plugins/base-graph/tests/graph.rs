//! Replayed forwards have the bits of the host, wherever their sequences have moved meanwhile.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::sync::Arc;

use plugfold_abi::Phase;
use plugfold_abi::points::Mode;
use plugfold_base_graph::hooks;
use plugfold_engine::core::{Core, CoreOptions, SeqRows, Want};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::split::Split;
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{emulated, ids, prefill};

const VOCAB: u32 = 480;

/// A core on the device with the executor, which keeps so many recordings; `None`: on the host, without it.
fn core(most: Option<usize>) -> Core {
    let mut options = CoreOptions { slots: 3, context: Some(256), ..CoreOptions::default() };
    if let Some(most) = most {
        let mut all = Hooks::default();
        for offer in hooks(true, 8, most, None) {
            all.add("base-graph", &[], offer).unwrap();
        }
        options.hooks = Arc::new(all);
        options.executor = Some("graph".into());
        options.device = Some(emulated(false));
    }
    Core::load(&tiny_dir(), &options, Split::WHOLE, None).unwrap()
}

/// One window: its slots, its rows, how many of them are kept.
type Window = (&'static [usize], usize, usize);

/// Runs windows after prompts of these lengths; all logits and states, and how each window ran.
fn windows(core: &mut Core, prompts: [usize; 3], list: &[Window]) -> (Vec<Vec<u32>>, Vec<Mode>) {
    let (mut all, mut modes) = (Vec::new(), Vec::new());
    for (slot, n) in prompts.into_iter().enumerate() {
        prefill(core, slot, &ids(slot as u64 + 1, n, VOCAB), 64);
    }
    for (number, (slots, rows, keep)) in list.iter().enumerate() {
        let tokens: Vec<Vec<u32>> =
            slots.iter().map(|slot| ids((number * 7 + slot) as u64, *rows, VOCAB)).collect();
        let seqs: Vec<SeqRows<'_>> = slots
            .iter()
            .zip(&tokens)
            .map(|(slot, tokens)| SeqRows { slot: *slot, tokens, want: Want::All, embeds: &[] })
            .collect();
        let f = core.forward(Phase::Window, &seqs, None, false).unwrap();
        assert_eq!(f.failure, None);
        all.push(core.output(&f, "logits").unwrap().iter().map(|v| v.to_bits()).collect());
        modes.push(f.mode);
        core.commit(&f, &vec![*keep; slots.len()]).unwrap();
        core.recycle(f);
    }
    for slot in 0..3 {
        all.extend(core.image(slot).into_iter().map(|(_, bits)| bits));
    }
    (all, modes)
}

#[test]
fn replay_equals_the_host_after_every_move_of_slot_parity_and_place() {
    // One key for every slot: the place, the parity and the positions come from the round table.
    let list: [Window; 13] = [
        (&[0], 1, 1),
        (&[0], 1, 1),
        (&[0], 1, 1),
        (&[1], 1, 1),
        (&[2], 1, 1),
        (&[1, 0], 2, 1),
        (&[0, 2], 2, 2),
        (&[2, 1], 2, 1),
        (&[1, 2], 2, 2),
        (&[2], 1, 1),
        (&[0, 1], 2, 1),
        (&[1], 1, 1),
        (&[0], 1, 1),
    ];
    let (want, _) = windows(&mut core(None), [40, 50, 45], &list);
    let (got, modes) = windows(&mut core(Some(64)), [40, 50, 45], &list);
    assert!(want == got, "a replayed forward differs; they ran as {modes:?}");
    let kinds = |mode| modes.iter().filter(|m| **m == mode).count();
    assert!(kinds(Mode::Replay) >= 7 && kinds(Mode::Capture) == 2, "{modes:?}");
}

#[test]
fn lengths_beyond_a_recording_s_reach_are_recorded_anew() {
    // From 62 positions on to 66: grids over positions are made for 64, then for 128.
    let list: [Window; 9] = [(&[0], 1, 1); 9];
    let (want, _) = windows(&mut core(None), [60, 5, 5], &list);
    let (got, modes) = windows(&mut core(Some(1)), [60, 5, 5], &list);
    assert!(want == got, "they ran as {modes:?}");
    assert!(modes.contains(&Mode::Replay), "{modes:?}");
    assert!(modes.iter().filter(|m| **m == Mode::Capture).count() == 2, "{modes:?}");
}

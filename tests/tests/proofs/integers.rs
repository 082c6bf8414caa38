//! The exact-integer model: sums in any order, on any number of ranks, in any company of rows, give the same bits.

use plugfold_abi::Phase;
use plugfold_engine::core::{Core, SeqRows, Want};
use plugfold_engine::split::Split;
use plugfold_tests::integer::{self, on_ranks};
use plugfold_tests::model::{extend, forward, ids, prefill};

/// Logits of a prompt's last row, of a window and of a serial step, and the whole state, as bits.
fn run(core: &mut Core) -> (Vec<u32>, Vec<(String, Vec<u32>)>) {
    let bits = |row: &[f32]| row.iter().map(|v| v.to_bits()).collect::<Vec<u32>>();
    let mut all = bits(&prefill(core, 0, &ids(1, 45, 480), 16));
    let f = forward(core, Phase::Window, 0, &ids(2, 5, 480), Want::All);
    all.extend(bits(core.output(&f, "logits").unwrap()));
    core.commit(&f, &[2]).unwrap();
    let f = forward(core, Phase::Window, 0, &[7], Want::All);
    all.extend(bits(core.output(&f, "logits").unwrap()));
    core.commit(&f, &[1]).unwrap();
    (all, core.image(0))
}

/// Logits of all ranks as one row: shares of the vocabulary follow each other.
fn whole(parts: &[Vec<u32>], rows: usize) -> Vec<u32> {
    let row = |r: usize| parts.iter().flat_map(move |p| p.chunks(p.len() / rows).nth(r).unwrap().to_vec());
    (0..rows).flat_map(row).collect()
}

#[test]
fn any_number_of_ranks_gives_the_same_bits() {
    let one = run(&mut integer::core(1, Split::WHOLE, None, |_| {}).unwrap());
    assert!(one.0.iter().any(|bits| *bits != one.0[0]), "logits differ from each other");
    for ranks in [2, 3] {
        let all = on_ranks(1, ranks, |_, _| {}, run);
        let parts: Vec<Vec<u32>> = all.iter().map(|(logits, _)| logits.clone()).collect();
        // One row of the prompt, five of the window, one step.
        assert_eq!(whole(&parts, 7), one.0, "{ranks} ranks");
    }
}

#[test]
fn chunks_windows_and_company_change_no_bit() {
    let mut core = integer::core(2, Split::WHOLE, None, |_| {}).unwrap();
    let prompt = ids(3, 40, 480);
    let want = prefill(&mut core, 0, &prompt, 40);
    let image = core.image(0);
    for chunk in [1, 7, 13] {
        assert_eq!(prefill(&mut core, 0, &prompt, chunk), want, "chunks of {chunk}");
        assert_eq!(core.image(0), image, "chunks of {chunk}");
    }
    // Serial steps and windows, alone and beside another sequence.
    prefill(&mut core, 0, &prompt[..30], 30);
    for token in &prompt[30..] {
        let f = forward(&mut core, Phase::Window, 0, &[*token], Want::Nothing);
        core.commit(&f, &[1]).unwrap();
    }
    assert_eq!(core.image(0), image, "serial");
    prefill(&mut core, 0, &prompt[..32], 32);
    prefill(&mut core, 1, &ids(9, 21, 480), 21);
    let other = ids(10, 8, 480);
    let rows = [
        SeqRows { slot: 1, tokens: &other, want: Want::All, embeds: &[] },
        SeqRows { slot: 0, tokens: &prompt[32..], want: Want::All, embeds: &[] },
    ];
    let f = core.forward(Phase::Window, &rows, None, false).unwrap();
    assert_eq!(f.failure, None);
    let last = core.output(&f, "logits").unwrap();
    assert_eq!(last[last.len() - 512..], want[..], "a window beside another");
    core.commit(&f, &[3, 8]).unwrap();
    assert_eq!(core.image(0), image);
}

#[test]
fn every_kept_part_of_a_window_equals_serial_steps() {
    let mut core = integer::core(1, Split::WHOLE, None, |_| {}).unwrap();
    let (prompt, window) = (ids(4, 18, 480), ids(5, 8, 480));
    for keep in 1..=8 {
        prefill(&mut core, 0, &prompt, 18);
        let f = forward(&mut core, Phase::Window, 0, &window, Want::All);
        core.commit(&f, &[keep]).unwrap();
        let kept = core.image(0);
        prefill(&mut core, 0, &prompt, 18);
        extend(&mut core, 0, &window[..keep], 1);
        assert_eq!(core.image(0), kept, "{keep} rows kept");
    }
}

#[test]
fn a_sum_that_is_not_exact_would_be_seen() {
    // What the model's proof rests on: the largest sums stay below 2^24, in debug builds checked at every fold.
    assert_eq!(integer::fold(5), -4.0);
    assert_eq!(integer::fold(-5), 4.0);
    for value in -100..100 {
        let folded = integer::fold(value);
        assert!((-4.0..=4.0).contains(&folded) && folded.fract() == 0.0);
        assert_eq!((value - folded as i64).rem_euclid(9), 0, "{value}");
    }
}

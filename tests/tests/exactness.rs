//! The promises on state: drafted == serial, batched == alone, resumed == fresh, chunk size changes nothing, a forward
//! commits nothing. Whole committed states are compared bit for bit, not only tokens.
#![allow(clippy::unwrap_used)]

use plugfold_abi::Phase;
use plugfold_engine::core::{Core, SeqRows, Want};
use plugfold_tests::model::{argmax, extend, forward, ids, prefill, tiny_core};

const VOCAB: u32 = 480;

type Image = Vec<(String, Vec<u32>)>;

fn same(what: &str, a: &Image, b: &Image) {
    assert_eq!(a.len(), b.len());
    for ((name, x), (_, y)) in a.iter().zip(b) {
        let first = x.iter().zip(y).position(|(p, q)| p != q);
        assert!(x.len() == y.len() && first.is_none(), "{what}: {name} differs first at element {first:?}");
    }
}

fn bits(v: &[f32]) -> Vec<u32> {
    v.iter().map(|x| x.to_bits()).collect()
}

/// Serial decode of given tokens.
fn serial(core: &mut Core, slot: usize, tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut rows = Vec::new();
    for token in tokens {
        let f = forward(core, Phase::Window, slot, &[*token], Want::Last);
        rows.push(bits(core.output(&f, "logits").unwrap()));
        core.commit(&f, &[1]).unwrap();
    }
    rows
}

#[test]
fn chunk_sizes_change_nothing() {
    // 35 and 36 are the edges of the dense limit, 4 of a pool, 64 of a chunk.
    for n in [1, 3, 4, 5, 35, 36, 37, 63, 64, 65, 150] {
        let prompt = ids(7, n, VOCAB);
        let mut core = tiny_core(1, 256);
        let want_logits = bits(&prefill(&mut core, 0, &prompt, n));
        let want = core.image(0);
        for chunk in [1, 2, 3, 7, 16, 64] {
            let got = prefill(&mut core, 0, &prompt, chunk);
            assert_eq!(bits(&got), want_logits, "{n} tokens in chunks of {chunk}");
            same(&format!("{n} tokens in chunks of {chunk}"), &core.image(0), &want);
        }
    }
}

#[test]
fn prefill_and_serial_decode_give_the_same_bits() {
    let prompt = ids(11, 90, VOCAB);
    let mut core = tiny_core(1, 256);
    prefill(&mut core, 0, &prompt, 64);
    let want = core.image(0);
    core.begin(0);
    serial(&mut core, 0, &prompt);
    same("serial against prefill", &core.image(0), &want);
}

#[test]
fn every_kept_part_of_a_window_equals_serial_steps() {
    for start in [2, 33, 34, 61] {
        let prompt = ids(3, start, VOCAB);
        let window = ids(5, 8, VOCAB);
        let mut core = tiny_core(1, 256);
        for keep in 1..=8 {
            prefill(&mut core, 0, &prompt, 64);
            let serial_rows = serial(&mut core, 0, &window[..keep]);
            let want = core.image(0);

            prefill(&mut core, 0, &prompt, 64);
            let f = forward(&mut core, Phase::Window, 0, &window, Want::All);
            let rows = bits(core.output(&f, "logits").unwrap());
            for (i, row) in serial_rows.iter().enumerate() {
                assert_eq!(&rows[i * 512..(i + 1) * 512], &row[..], "row {i} of a window at {start}");
            }
            core.commit(&f, &[keep]).unwrap();
            same(&format!("keep {keep} at {start}"), &core.image(0), &want);

            // And the sequence goes on as if the rejected rows had never been.
            let next = serial(&mut core, 0, &window[..3]);
            let after = core.image(0);
            prefill(&mut core, 0, &prompt, 64);
            serial(&mut core, 0, &window[..keep]);
            assert_eq!(serial(&mut core, 0, &window[..3]), next);
            same(&format!("after keep {keep} at {start}"), &core.image(0), &after);
        }
    }
}

#[test]
fn a_forward_commits_nothing() {
    let mut core = tiny_core(2, 256);
    prefill(&mut core, 0, &ids(1, 50, VOCAB), 64);
    prefill(&mut core, 1, &ids(2, 41, VOCAB), 64);
    let before = (core.image(0), core.image(1));
    for phase in [Phase::Window, Phase::Prefill] {
        let tokens = ids(9, 7, VOCAB);
        let rows = [
            SeqRows { slot: 1, tokens: &tokens, want: Want::All, embeds: &[] },
            SeqRows { slot: 0, tokens: &tokens[..3], want: Want::All, embeds: &[] },
        ];
        let f = core.forward(phase, &rows, Some(4), false).unwrap();
        assert_eq!(f.failure, None);
        same("slot 0", &core.image(0), &before.0);
        same("slot 1", &core.image(1), &before.1);
    }
}

#[test]
fn sequences_that_share_forwards_keep_the_bits_they_have_alone() {
    let prompts: Vec<Vec<u32>> = [(1, 30), (2, 36), (3, 5), (4, 77)].map(|(s, n)| ids(s, n, VOCAB)).into();
    let windows: Vec<Vec<u32>> = [(5, 8), (6, 1), (7, 3), (8, 5)].map(|(s, n)| ids(s, n, VOCAB)).into();
    let keeps = [5, 1, 3, 2];
    let mut alone = Vec::new();
    let mut core = tiny_core(1, 256);
    for i in 0..4 {
        prefill(&mut core, 0, &prompts[i], 64);
        let f = forward(&mut core, Phase::Window, 0, &windows[i], Want::All);
        let rows = bits(core.output(&f, "logits").unwrap());
        core.commit(&f, &[keeps[i]]).unwrap();
        alone.push((rows, core.image(0)));
    }
    // All four in one window, in any order and in other slots.
    for order in [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]] {
        let mut core = tiny_core(4, 256);
        // One ragged prefill of all four prompts, too.
        for slot in 0..4 {
            core.begin(slot);
        }
        let rows: Vec<SeqRows<'_>> = (0..4)
            .map(|slot| SeqRows { slot, tokens: &prompts[order[slot]], want: Want::Nothing, embeds: &[] })
            .collect();
        let f = core.forward(Phase::Prefill, &rows, None, false).unwrap();
        let lengths: Vec<usize> = rows.iter().map(|r| r.tokens.len()).collect();
        core.commit(&f, &lengths).unwrap();
        let rows: Vec<SeqRows<'_>> = (0..4)
            .map(|slot| SeqRows { slot, tokens: &windows[order[slot]], want: Want::All, embeds: &[] })
            .collect();
        let f = core.forward(Phase::Window, &rows, None, false).unwrap();
        let got = bits(core.output(&f, "logits").unwrap());
        core.commit(&f, &order.map(|i| keeps[i])).unwrap();
        let mut at = 0;
        for (slot, &i) in order.iter().enumerate() {
            let n = windows[i].len() * 512;
            assert_eq!(got[at..at + n], alone[i].0[..], "sequence {i} in slot {slot}");
            at += n;
            same(&format!("sequence {i} in slot {slot}"), &core.image(slot), &alone[i].1);
        }
    }
}

#[test]
fn resumed_equals_fresh_at_every_residue_of_a_pool() {
    let prompt = ids(21, 80, VOCAB);
    let mut core = tiny_core(1, 256);
    for cut in [1, 32, 33, 34, 35, 36, 40] {
        prefill(&mut core, 0, &prompt, 64);
        let want = core.image(0);
        prefill(&mut core, 0, &prompt[..cut], 64);
        let snapshot = core.snapshot(0).unwrap();
        // The sequence goes on elsewhere and is then taken back.
        extend(&mut core, 0, &ids(22, 30, VOCAB), 16);
        assert!(core.restore(&snapshot).unwrap(), "rows below {cut} were not overwritten");
        assert_eq!(core.slot(0).len(), cut);
        extend(&mut core, 0, &prompt[cut..], 64);
        same(&format!("resumed at {cut}"), &core.image(0), &want);
    }
}

#[test]
fn a_snapshot_whose_rows_were_overwritten_is_refused() {
    let prompt = ids(31, 50, VOCAB);
    let mut core = tiny_core(2, 256);
    prefill(&mut core, 0, &prompt, 64);
    let snapshot = core.snapshot(0).unwrap();
    // A new sequence that has written nothing yet leaves the rows alone.
    core.begin(0);
    assert!(core.restore(&snapshot).unwrap());
    // One that wrote other rows does not.
    prefill(&mut core, 0, &ids(32, 10, VOCAB), 64);
    let before = core.image(0);
    assert!(!core.restore(&snapshot).unwrap());
    same("a refused restore", &core.image(0), &before);
    // The same ids make it valid again: rows depend on the ids alone.
    prefill(&mut core, 0, &prompt, 16);
    extend(&mut core, 0, &[1, 2, 3], 64);
    assert!(core.restore(&snapshot).unwrap());
}

#[test]
fn greedy_replies_do_not_depend_on_how_they_were_computed() {
    let prompt = ids(41, 60, VOCAB);
    let mut core = tiny_core(1, 256);
    let mut row = prefill(&mut core, 0, &prompt, 64);
    let mut reply = Vec::new();
    for _ in 0..24 {
        let token = argmax(&row);
        reply.push(token);
        row = extend(&mut core, 0, &[token], 1);
    }
    // Windows with right and wrong drafts.
    let mut row = prefill(&mut core, 0, &prompt, 7);
    let mut got = Vec::new();
    while got.len() < 24 {
        let mut window = vec![argmax(&row)];
        got.push(window[0]);
        window.extend(reply[got.len().min(23)..].iter().take(5));
        if got.len() % 3 == 0 && window.len() > 2 {
            window[2] = (window[2] + 1) % VOCAB;
        }
        let f = forward(&mut core, Phase::Window, 0, &window, Want::All);
        let rows = core.output(&f, "logits").unwrap().to_vec();
        let drawn: Vec<u32> = rows.chunks(512).map(argmax).collect();
        let keep = plugfold_engine::sampling::accept(&drawn, &window[1..], &[]);
        got.extend(&window[1..keep]);
        row = rows[(keep - 1) * 512..keep * 512].to_vec();
        core.commit(&f, &[keep]).unwrap();
    }
    assert_eq!(got[..24], reply[..]);
}

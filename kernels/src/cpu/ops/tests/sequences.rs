//! Operations on sequences: one ragged call is the same as a call a sequence; states go from parity to parity.

use plugfold_abi::{Addressing, Phase};

use super::{Family, Matrix, Run, Seq, dense, plain};
use crate::cpu::math::testing::{bits, random};

const H: usize = 2;
const K: usize = 32;
const C: usize = H * K;

#[derive(Clone, PartialEq, Debug)]
struct Kda {
    state: Family,
    window: Family,
    replay: Family,
}

impl Kda {
    fn new() -> Self {
        let new = |buffers, rows, row| Family::new(3, buffers, rows, row, Addressing::State);
        Self { state: new(2, 1, H * K * K), window: new(2, 1, 3 * 3 * C), replay: new(1, 8, 6 * C + H) }
    }

    fn mix(&mut self, x: &[f32], seqs: &[Seq], phase: Phase) -> Vec<f32> {
        let width = 5 * C + H;
        let rows = x.len() / width;
        let part = |at: usize, cols: usize| {
            let values: Vec<f32> = x.chunks(width).flat_map(|r| r[at..at + cols].to_vec()).collect();
            Matrix::f32(&values, cols)
        };
        let mut run = Run::new("kda.mix");
        run.phase = phase;
        run.inputs = vec![part(0, 3 * C), part(3 * C, C), part(4 * C, C), part(5 * C, H)];
        run.outputs = vec![Matrix::out(rows, C)];
        run.weights =
            vec![plain(&random(1, 12 * C)), plain(&random(2, C)), plain(&random(3, H)), plain(&random(4, K))];
        run.caches = vec![&mut self.state, &mut self.window, &mut self.replay];
        run.dims = &[H as u32, K as u32, 4, 1];
        run.params = &[1e-5, -5.0];
        run.seqs = seqs;
        run.go().unwrap()[0].values()
    }

    fn commit(&mut self, seqs: &[Seq]) {
        let mut run = Run::new("kda.commit");
        run.caches = vec![&mut self.state, &mut self.window, &mut self.replay];
        run.dims = &[H as u32, K as u32, 4];
        run.seqs = seqs;
        run.go().unwrap();
    }

    fn of(&self, slot: usize, parity: usize) -> Vec<u32> {
        bits(&[self.state.part(slot, parity), self.window.part(slot, parity)].concat())
    }
}

fn seq(slot: u32, parity: u32, start: u32, rows: u32, keep: u32) -> Seq {
    Seq { slot, parity, start, rows, keep }
}

#[test]
fn a_ragged_window_and_its_commit_equal_serial_steps() {
    let width = 5 * C + H;
    let x = random(5, 7 * width);
    let (a, b) = x.split_at(4 * width);
    // Slot 2 (parity 1) takes 4 rows, slot 0 (parity 0) takes 3.
    let mut together = Kda::new();
    let history = random(6, 5 * width);
    together.mix(&history, &[seq(2, 0, 0, 5, 5)], Phase::Prefill);
    let start = together.clone();
    let seqs = [seq(2, 1, 5, 4, 2), seq(0, 0, 0, 3, 3)];
    let out = together.mix(&x, &seqs, Phase::Window);
    assert_eq!(together.of(2, 1), start.of(2, 1), "the committed buffer is only read");

    let mut alone = start.clone();
    let first = alone.mix(a, &[seqs[0]], Phase::Window);
    let second = alone.mix(b, &[seqs[1]], Phase::Window);
    assert_eq!(bits(&[first, second].concat()), bits(&out));
    assert_eq!(alone, together);

    // Keeping 2 of 4 rows is the same as having run 2 rows.
    together.commit(&seqs);
    assert_eq!(together.of(0, 1), alone.of(0, 1), "a sequence that keeps all rows is left alone");
    let mut serial = start.clone();
    serial.mix(&a[..2 * width], &[seq(2, 1, 5, 2, 2)], Phase::Window);
    assert_eq!(together.of(2, 0), serial.of(2, 0));

    // Keeping none brings the committed state over.
    together.commit(&[seq(2, 1, 5, 4, 0)]);
    assert_eq!(together.of(2, 0), start.of(2, 1));
    assert!(together.of(1, 0).iter().chain(&together.of(1, 1)).all(|v| *v == 0), "slot 1 is untouched");
}

#[test]
fn prefill_in_pieces_has_the_same_bits_and_no_records() {
    let width = 5 * C + H;
    let x = random(5, 9 * width);
    let mut whole = Kda::new();
    let out = whole.mix(&x, &[seq(1, 0, 0, 9, 9)], Phase::Prefill);
    assert!(whole.replay.data.iter().all(|v| *v == 0.0));
    let mut pieces = Kda::new();
    let first = pieces.mix(&x[..2 * width], &[seq(1, 0, 0, 2, 2)], Phase::Prefill);
    let second = pieces.mix(&x[2 * width..], &[seq(1, 1, 2, 7, 7)], Phase::Prefill);
    assert_eq!(bits(&[first, second].concat()), bits(&out));
    assert_eq!(pieces.of(1, 0), whole.of(1, 1));
}

const HEADS: usize = 3;
const D: usize = 10;
const V: usize = 6;
const R: usize = 12;
const POSITIONS: usize = 80;

fn kv() -> Family {
    Family::new(2, 1, POSITIONS, HEADS * (D + V), Addressing::Linear)
}

fn write(cache: &mut Family, latent: &[f32], seqs: &[Seq]) {
    let mut run = Run::new("mla.write");
    run.inputs = vec![Matrix::f32(latent, R)];
    run.weights = vec![dense(&random(1, HEADS * (D + V) * R), HEADS * (D + V), R)];
    run.caches = vec![cache];
    run.dims = &[HEADS as u32, D as u32, V as u32, R as u32];
    run.seqs = seqs;
    run.go().unwrap();
}

fn attend(cache: &mut Family, q: &[f32], lists: Option<(&[i32], &[i32])>, seqs: &[Seq]) -> Vec<f32> {
    let rows = q.len() / (HEADS * D);
    let mut run = Run::new(if lists.is_some() { "mla.sparse" } else { "mla.dense" });
    run.inputs = vec![Matrix::f32(q, HEADS * D)];
    let longest = lists.map_or(0, |l| l.0.len() / rows) as u32;
    if let Some((ids, counts)) = lists {
        run.inputs.extend([Matrix::i32(ids, ids.len() / rows), Matrix::i32(counts, 1)]);
    }
    run.outputs = vec![Matrix::out(rows, HEADS * V)];
    run.caches = vec![cache];
    let dims = [HEADS as u32, D as u32, V as u32, R as u32, longest];
    run.dims = &dims;
    run.params = &[0.3];
    run.seqs = seqs;
    run.go().unwrap()[0].values()
}

#[test]
fn cache_rows_and_attention_do_not_depend_on_how_rows_are_put_into_calls() {
    let (long, short) = (random(2, 40 * R), random(3, 3 * R));
    let mut together = kv();
    let seqs = [seq(1, 0, 0, 40, 0), seq(0, 0, 0, 3, 0)];
    write(&mut together, &[long.clone(), short.clone()].concat(), &seqs);
    let mut pieces = kv();
    write(&mut pieces, &long[..7 * R], &[seq(1, 0, 0, 7, 0)]);
    write(&mut pieces, &short, &[seqs[1]]);
    for t in 7..40 {
        write(&mut pieces, &long[t * R..(t + 1) * R], &[seq(1, 0, t as u32, 1, 0)]);
    }
    assert_eq!(bits(&pieces.data), bits(&together.data));

    let q = random(4, 5 * HEADS * D);
    let seqs = [seq(1, 0, 38, 2, 0), seq(0, 0, 0, 3, 0)];
    let dense = attend(&mut together, &q, None, &seqs);
    let longest = 41;
    let lists: Vec<i32> = [39, 40, 1, 2, 3]
        .iter()
        .flat_map(|n| (0..longest).map(move |i| if i < *n { i } else { -1 }))
        .collect();
    let sparse = attend(&mut together, &q, Some((&lists, &[39, 40, 1, 2, 3])), &seqs);
    assert_eq!(bits(&sparse), bits(&dense));
    let alone = attend(&mut together, &q[2 * HEADS * D..], None, &seqs[1..]);
    assert_eq!(bits(&alone), bits(&dense[2 * HEADS * V..]));
}

#[test]
fn the_indexer_sees_the_same_pools_whatever_the_pieces() {
    const DI: usize = 9;
    const HI: usize = 5;
    const KP: usize = 4;
    let (key, gate) = (random(1, 50 * DI), random(2, 50 * DI));
    let fill = |cuts: &[usize]| {
        let mut tokens = Family::new(2, 1, 50, 2 * DI, Addressing::Linear);
        let mut pools = Family::new(2, 1, 13, DI, Addressing::Linear);
        for cut in cuts.windows(2) {
            let mut run = Run::new("idx.write");
            run.inputs = vec![
                Matrix::f32(&key[cut[0] * DI..cut[1] * DI], DI),
                Matrix::f32(&gate[cut[0] * DI..cut[1] * DI], DI),
            ];
            run.weights = vec![plain(&random(3, DI)), plain(&random(4, DI)), plain(&random(5, KP * DI))];
            run.caches = vec![&mut tokens, &mut pools];
            run.dims = &[DI as u32, KP as u32];
            run.params = &[1e-6];
            let seqs = [seq(1, 0, cut[0] as u32, (cut[1] - cut[0]) as u32, 0)];
            run.seqs = &seqs;
            run.go().unwrap();
        }
        (tokens, pools)
    };
    let whole = fill(&[0, 50]);
    assert_eq!(fill(&[0, 1, 3, 4, 11, 12, 13, 50]), whole);
    assert!(whole.1.part(1, 0)[..12 * DI].iter().any(|v| *v != 0.0));
    assert!(whole.1.part(1, 0)[12 * DI..].iter().all(|v| *v == 0.0), "the open pool has no key yet");

    let mut pools = whole.1;
    let (q, w) = (random(6, 2 * HI * DI), random(7, 2 * HI));
    let mut select = |seqs: &[Seq], rows: std::ops::Range<usize>| {
        let mut run = Run::new("idx.select");
        let (q, w) = (&q[rows.start * HI * DI..rows.end * HI * DI], &w[rows.start * HI..rows.end * HI]);
        run.inputs = vec![Matrix::f32(q, HI * DI), Matrix::f32(w, HI)];
        run.outputs = vec![Matrix::out_i32(rows.len(), 19), Matrix::out_i32(rows.len(), 1)];
        run.caches = vec![&mut pools];
        run.dims = &[HI as u32, DI as u32, KP as u32, 16, 19];
        run.seqs = seqs;
        run.go().unwrap()
    };
    let both = select(&[seq(1, 0, 48, 2, 0)], 0..2);
    assert_eq!(both[1].ids(), [17, 18]);
    let (first, second) = both[0].ids().split_at(19);
    assert_eq!(first[16..], [48, -1, -1]);
    assert_eq!(second[16..], [48, 49, -1]);
    assert!(first[..17].windows(2).all(|p| p[0] < p[1]));
    assert_eq!(select(&[seq(1, 0, 49, 1, 0)], 1..2)[0].ids(), second);
}

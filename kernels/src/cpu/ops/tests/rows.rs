//! Operations on rows: operands go where the table says, strides are respected.

use std::sync::{Arc, Mutex};

use plugfold_abi::{
    Addressing, CacheKind, Claim, Comm, CommObject, DType, FIRST_VIRTUAL_ID, MAX_DIMS, MAX_INPUTS,
    MAX_OUTPUTS, OpError, Phase, Provider, Query, Slice, SliceMut, Text, formats,
};

use super::{Matrix, Run, Seq, dense, find, one, plain, stack, table};
use crate::cpu::math::testing::{bits, random};
use crate::cpu::ops::{reference, tower};

#[test]
fn the_whole_table_is_provided_once() {
    let all = reference().into_iter().chain(tower());
    let mut ops: Vec<String> = all.map(|p| p.op().unwrap().to_string()).collect();
    let text = include_str!("../../../../../core/abi/src/ops.rs");
    let mut want: Vec<String> = text
        .lines()
        .filter_map(|l| l.strip_prefix("//! | `"))
        .map(|l| l.split('`').next().unwrap().to_owned())
        .collect();
    assert!(want.len() > 25, "the table was found");
    ops.sort_unstable();
    want.sort_unstable();
    assert_eq!(ops, want);
}

#[test]
fn claims_depend_on_device_formats_and_addressing() {
    let query = |op: &'static str, device, weight, cache, addressing| Query {
        op: Text::from(op),
        program: Text::from("forward"),
        layer: 0,
        site: 0,
        phase: Phase::Window,
        device_class: Text::from(device),
        rows: 1,
        seqs: 1,
        dims: [1; MAX_DIMS],
        weight_roles: [Text::EMPTY; 4],
        weight_formats: [Text::from(weight), Text::EMPTY, Text::EMPTY, Text::EMPTY],
        caches: [
            CacheKind { format: Text::from(cache), addressing },
            CacheKind::NONE,
            CacheKind::NONE,
            CacheKind::NONE,
        ],
        input_types: [DType::F32; MAX_INPUTS],
        output_types: [DType::F32; MAX_OUTPUTS],
        words: Slice::default(),
        knobs: Slice::default(),
    };
    let yes = |q: Query<'_>| matches!(find(&q.op).claim(&q), Ok(Claim::Yes(_)));
    let panel = formats::PANEL16_BF16;
    assert!(yes(query("dense", "cpu", panel, "", Addressing::State)));
    assert!(!yes(query("dense", "sm_90", panel, "", Addressing::State)));
    assert!(yes(query("dense", "cpu", formats::EXL3_SEGMENTS, "", Addressing::State)));
    assert!(!yes(query("moe.logits", "cpu", formats::EXL3_SEGMENTS, "", Addressing::State)));
    assert!(!yes(query("dense", "cpu", "exl3.4", "", Addressing::State)));
    assert!(!yes(query("dense", "cpu", formats::ROWS_BF16, "", Addressing::State)));
    assert!(yes(query("mla.write", "cpu", panel, "f32", Addressing::Linear)));
    assert!(!yes(query("mla.write", "cpu", panel, "fp8", Addressing::Linear)));
    assert!(!yes(query("mla.write", "cpu", panel, "f32", Addressing::Paged)));
    // Each family of a call counts, not the first alone.
    let tokens = CacheKind { format: Text::from("f32"), addressing: Addressing::Linear };
    let vector = Text::from(formats::PLAIN_F32);
    let write = |pools| Query {
        weight_formats: [vector, vector, vector, Text::EMPTY],
        caches: [tokens, pools, CacheKind::NONE, CacheKind::NONE],
        ..query("idx.write", "cpu", "", "", Addressing::State)
    };
    assert!(yes(write(tokens)));
    assert!(!yes(write(CacheKind { format: Text::from("fp8"), ..tokens })));
    assert!(!yes(write(CacheKind { addressing: Addressing::Paged, ..tokens })));
}

#[test]
fn columns_of_wider_buffers_give_the_same_bits() {
    let (x, w) = (random(1, 3 * 20), random(2, 7 * 20));
    let run = |gap: usize| {
        let mut run = Run::new("dense");
        run.inputs = vec![Matrix::f32(&x, 20).gapped(gap)];
        run.outputs = vec![Matrix::out(3, 7).gapped(gap)];
        run.weights = vec![dense(&w, 7, 20), plain(&random(3, 7))];
        run.dims = &[7, 20];
        run.seqs = &const { [one(3)] };
        run.go().unwrap().remove(0)
    };
    let (tight, wide) = (run(0), run(5));
    assert_eq!(bits(&tight.values()), bits(&wide.values()));
    assert!(tight.values().iter().all(|v| v.is_finite()), "all was written");
    assert_eq!(wide, Matrix::f32(&wide.values(), 7).gapped(5), "what lies between the rows was left alone");
}

#[test]
fn embeddings_are_copied_into_every_stream_and_attachments_replace_them() {
    let words = random(1, 5 * 8);
    let image = random(2, 8);
    let mut run = Run::new("embed");
    run.outputs = vec![Matrix::out(3, 16)];
    run.weights = vec![table(&words, 5, 8)];
    run.dims = &[2, 8, 5];
    run.seqs = &const { [one(3)] };
    run.tokens = Some(vec![4, FIRST_VIRTUAL_ID + 9, 0]);
    run.embeds = vec![0, image.as_ptr() as usize, 0];
    let got = run.go().unwrap()[0].values();
    let want = [&words[32..], &words[32..], &image, &image, &words[..8], &words[..8]].concat();
    assert_eq!(got, want);
    run.embeds.clear();
    assert!(run.go().unwrap_err().message.contains("virtual id without an embedding"));
    run.tokens = Some(vec![4, 5, 0]);
    let message = run.go().unwrap_err().message;
    assert!(message.contains("token 5 of row 1") && message.contains("vocabulary has 5"), "{message}");
}

#[test]
fn the_draft_head_zeroes_the_embedding_at_position_0_only_if_asked() {
    let words = random(1, 5 * 8);
    let mut run = Run::new("mtp.in");
    run.inputs = vec![Matrix::f32(&random(2, 16), 8)];
    run.outputs = vec![Matrix::out(2, 16)];
    run.weights = vec![table(&words, 5, 8), plain(&random(3, 8)), plain(&random(4, 8))];
    run.params = &[1e-5];
    run.tokens = Some(vec![2, 3]);
    run.seqs = &const { [one(2)] };
    run.dims = &[8, 5, 1];
    let zeroed = run.go().unwrap()[0].values();
    run.dims = &[8, 5, 0];
    let kept = run.go().unwrap()[0].values();
    assert!(zeroed[..8].iter().all(|v| *v == 0.0) && kept[..8].iter().any(|v| *v != 0.0));
    assert_eq!(zeroed[8..], kept[8..]);
    run.dims = &[8, 5, 1];
    run.seqs = &const { [Seq { start: 7, ..one(2) }] };
    assert_eq!(run.go().unwrap()[0].values(), kept);
}

#[test]
fn wanted_rows_and_candidates() {
    let rows = random(1, 4 * 3);
    let mut run = Run::new("rows.pick");
    run.inputs = vec![Matrix::f32(&rows, 3)];
    run.outputs = vec![Matrix::out(2, 3)];
    run.dims = &[3];
    run.seqs = &const { [one(4)] };
    run.out_rows = vec![1, 3];
    assert_eq!(run.go().unwrap()[0].values(), [&rows[3..6], &rows[9..]].concat());
    run.out_rows = vec![1, 4];
    assert!(run.go().unwrap_err().message.contains("row 4 is wanted, the table has 4"));

    let mut run = Run::new("sample.candidates");
    run.inputs = vec![Matrix::f32(&[1.0, 2.0, 2.0], 3)];
    run.outputs = vec![Matrix::out(1, 5), Matrix::out_i32(1, 5)];
    run.dims = &[3, 5, 100];
    run.seqs = &const { [one(1)] };
    run.out_rows = vec![0];
    let out = run.go().unwrap();
    assert_eq!(out[1].ids(), [101, 102, 100, -1, -1]);
    assert_eq!(out[0].values(), [2.0, 2.0, 1.0, f32::NEG_INFINITY, f32::NEG_INFINITY]);
}

/// Two ranks of which this is the second; the other's rows are its own times ten.
struct Pair(Mutex<usize>);
impl Comm for Pair {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(1)
    }
    fn ranks(&self) -> Result<u32, OpError> {
        Ok(2)
    }
    fn all_gather(&self, mine: Slice<'_, u8>, all: SliceMut<'_, u8>) -> Result<(), OpError> {
        let (mine, all) = (mine.get_ref(), all.into_mut());
        *self.0.lock().unwrap() += 1;
        let mine: &[f32] = bytemuck::cast_slice(mine);
        let (other, own) = all.split_at_mut(all.len() / 2);
        bytemuck::cast_slice_mut::<u8, f32>(other).iter_mut().zip(mine).for_each(|(o, m)| *o = m * 10.0);
        own.copy_from_slice(bytemuck::cast_slice(mine));
        Ok(())
    }
}

#[test]
fn parts_lie_side_by_side_in_rank_order() {
    let pair = Arc::new(Pair(Mutex::new(0)));
    let comm = CommObject::new(pair.clone());
    let mut run = Run::new("comm.sum");
    run.inputs = vec![Matrix::f32(&[1.0, 2.0, 3.0, 4.0], 2)];
    run.outputs = vec![Matrix::out(2, 4)];
    run.dims = &[2, 2];
    run.seqs = &const { [one(2)] };
    run.comm = Some(&comm);
    assert_eq!(run.go().unwrap()[0].values(), [10.0, 20.0, 1.0, 2.0, 30.0, 40.0, 3.0, 4.0]);
    assert_eq!(*pair.0.lock().unwrap(), 1);
    run.comm = None;
    assert!(run.go().unwrap_err().message.contains("P is 2, but this engine has one rank"));
    run.comm = Some(&comm);
    run.dims = &[2, 3];
    run.outputs = vec![Matrix::out(2, 6)];
    assert!(run.go().unwrap_err().message.contains("P is 3, but there are 2 ranks"));
}

/// The experts of a row, through all seven operations; `[R, D]`.
fn experts(h: &[f32], shared: &[f32]) -> Vec<f32> {
    const E: usize = 6;
    const K: usize = 3;
    const I: usize = 10;
    const D: usize = 12;
    let rows = h.len() / D;
    let seqs = [one(rows as u32)];
    let call = |op: &str, inputs: &[&Matrix], outputs: &[Matrix], weights, dims: &[u32], params: &[f32]| {
        let mut run = Run::new(op);
        run.inputs = inputs.iter().map(|m| (*m).clone()).collect();
        run.outputs = outputs.to_vec();
        run.weights = weights;
        (run.dims, run.params, run.seqs) = (dims, params, &seqs);
        run.go().unwrap()
    };
    let sizes = [E as u32, K as u32, I as u32, D as u32];
    let h = Matrix::f32(h, D);
    let router = vec![dense(&random(1, E * D), E, D)];
    let logits = call("moe.logits", &[&h], &[Matrix::out(rows, E)], router, &[E as u32, D as u32], &[]);
    let outs = [Matrix::out_i32(rows, K), Matrix::out(rows, K)];
    let bias = vec![plain(&random(2, E))];
    let picked = call("moe.pick", &[&logits[0]], &outs, bias, &[E as u32, K as u32, 2, 1, 1], &[2.5]);
    let outs = [Matrix::out_i32(rows * K, 1), Matrix::out_i32(E + 1, 1)];
    let lists = call("moe.group", &[&picked[0]], &outs, vec![], &[E as u32, K as u32], &[]);
    let up = vec![stack(&random(3, E * 2 * I * D), 2 * I, D, E)];
    let z = call("moe.up", &[&h, &lists[0], &lists[1]], &[Matrix::out(rows * K, 2 * I)], up, &sizes, &[]);
    let a = call("moe.act", &[&z[0]], &[Matrix::out(rows * K, I)], vec![], &[I as u32], &[2.0]);
    let down = vec![stack(&random(4, E * I * D), D, I, E)];
    let y = call("moe.down", &[&a[0], &lists[0], &lists[1]], &[Matrix::out(rows * K, D)], down, &sizes, &[]);
    let shared = Matrix::f32(shared, D);
    let out = [Matrix::out(rows, D)];
    call("moe.combine", &[&y[0], &picked[1], &shared], &out, vec![], &[K as u32, D as u32], &[])[0].values()
}

#[test]
fn experts_of_a_row_do_not_depend_on_other_rows() {
    let (h, shared) = (random(7, 20 * 12), random(8, 20 * 12));
    let together = experts(&h, &shared);
    assert!(together.iter().all(|v| v.is_finite()));
    for r in 0..20 {
        let span = r * 12..(r + 1) * 12;
        assert_eq!(bits(&experts(&h[span.clone()], &shared[span.clone()])), bits(&together[span]));
    }
}

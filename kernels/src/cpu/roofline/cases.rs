//! The measured kernels, at the sizes of the published model.

use half::bf16;

use super::{Bench, RooflineRow, WEIGHTS};
use crate::cpu::math::dense::{Elements, PackedMatrix, matmul, packed_len};
use crate::cpu::math::{act, hc, indexer, kda, mla, moe, norm};
use crate::cpu::rows::{Rows, RowsMut};

type Case = fn(&mut Bench) -> RooflineRow;

/// All cases, in the order of a layer.
pub(super) const ALL: &[Case] = &[
    |b| dense(b, 1),
    |b| dense(b, 4),
    |b| dense(b, 64),
    |b| hc_dots(b, 1),
    |b| hc_dots(b, 64),
    |b| hc_finish(b, 64),
    |b| hc_post(b, 64),
    |b| kda_mix(b, 1),
    |b| kda_mix(b, 64),
    |b| attention(b, 1),
    |b| attention(b, 64),
    index_scores,
    |b| experts(b, 1),
    |b| experts(b, 64),
    |b| head(b, 1),
    |b| rms(b, 64),
    |b| swiglu(b, 64),
];

const D: usize = 4096;
const N: usize = 4;
const F32: f64 = 4.0;
const BF16: f64 = 2.0;

/// Numbers in [-1, 1) that repeat after a while.
fn numbers(len: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + 13) % 2003) as f32 / 1001.5 - 1.0).collect()
}

/// Matrix `turn` of those `[n, k]` that fit into the weight memory one after another.
fn matrix(weights: &[bf16], turn: usize, n: usize, k: usize) -> PackedMatrix<'_> {
    let len = packed_len(n, k);
    let at = turn % (WEIGHTS / len) * len;
    PackedMatrix::new(n, k, Elements::Bf16(&weights[at..at + len])).expect("cut to size")
}

fn product(bench: &mut Bench, name: &str, rows: usize, n: usize, k: usize) -> RooflineRow {
    let x = numbers(rows * k);
    let mut out = vec![0.0; rows * n];
    let bytes = BF16 * packed_len(n, k) as f64 + F32 * (rows * (n + k)) as f64;
    bench.case(name, rows, bytes, 2.0 * (rows * n * k) as f64, |weights, turn| {
        matmul(Rows::new(&x, k), matrix(weights, turn, n, k), None, RowsMut::new(&mut out, n));
    })
}

fn dense(bench: &mut Bench, rows: usize) -> RooflineRow {
    product(bench, "dense bf16 4096 -> 12288", rows, 12288, D)
}

fn head(bench: &mut Bench, rows: usize) -> RooflineRow {
    product(bench, "head, a quarter of the vocabulary", rows, 38720, D)
}

fn hc_dots(bench: &mut Bench, rows: usize) -> RooflineRow {
    let (n, k) = (hc::mixes(N), N * D);
    let x = numbers(rows * k);
    let mut out = vec![0.0; rows * (n + 1)];
    let bytes = BF16 * packed_len(n, k) as f64 + F32 * (rows * k) as f64;
    bench.case("hc.dots", rows, bytes, 2.0 * (rows * (n + 1) * k) as f64, |weights, turn| {
        hc::dots(Rows::new(&x, k), matrix(weights, turn, n, k), RowsMut::new(&mut out, n + 1));
    })
}

fn hc_finish(bench: &mut Bench, rows: usize) -> RooflineRow {
    let n = hc::mixes(N);
    let (x, dots, base, norm) = (numbers(rows * N * D), numbers(rows * (n + 1)), numbers(n), numbers(D));
    let dots: Vec<f32> = dots.iter().map(|v| v.abs()).collect();
    let (mut h, mut post, mut comb) = (vec![0.0; rows * D], vec![0.0; rows * N], vec![0.0; rows * N * N]);
    let bytes = F32 * (rows * (N + 1) * D) as f64;
    bench.case("hc.finish", rows, bytes, 2.0 * (rows * (N + 2) * D) as f64, |_, _| {
        let mix = hc::Mix {
            streams: N,
            sinkhorn: 20,
            base: &base,
            scale: &[0.1, 0.1, 0.1],
            norm: &norm,
            rms_eps: 1e-5,
            hc_eps: 1e-6,
        };
        let (h, post) = (RowsMut::new(&mut h, D), RowsMut::new(&mut post, N));
        hc::finish(
            Rows::new(&dots, n + 1),
            Rows::new(&x, N * D),
            mix,
            h,
            post,
            RowsMut::new(&mut comb, N * N),
        );
    })
}

fn hc_post(bench: &mut Bench, rows: usize) -> RooflineRow {
    let (x, y) = (numbers(rows * N * D), numbers(rows * D));
    let (post, comb) = (numbers(rows * N), numbers(rows * N * N));
    let mut out = vec![0.0; rows * N * D];
    let bytes = F32 * (rows * (2 * N + 1) * D) as f64;
    bench.case("hc.post", rows, bytes, 2.0 * (rows * N * (N + 1) * D) as f64, |_, _| {
        let (x, y) = (Rows::new(&x, N * D), Rows::new(&y, D));
        hc::post(x, y, Rows::new(&post, N), Rows::new(&comb, N * N), RowsMut::new(&mut out, N * D));
    })
}

fn kda_mix(bench: &mut Bench, rows: usize) -> RooflineRow {
    let shape = kda::Shape { heads: 64, width: 128, taps: 4 };
    let c = shape.channels();
    let (qkv, f, gate, b) = (numbers(rows * 3 * c), numbers(rows * c), numbers(rows * c), numbers(rows * 64));
    let (conv, bias, a_log, o_norm) = (numbers(3 * c * 4), numbers(c), numbers(64), numbers(128));
    let window = numbers(shape.window_len());
    let mut next_window = window.clone();
    // Enough states that one row's never stay in the cache.
    let mut states: Vec<Vec<f32>> = (0..24).map(|_| vec![0.0; shape.state_len()]).collect();
    let mut out = vec![0.0; rows * c];
    let bytes = F32 * (2 * shape.state_len() + rows * 6 * c) as f64;
    let flops = 7.0 * (rows * shape.state_len()) as f64;
    bench.case("kda.mix", rows, bytes, flops, |_, turn| {
        let inputs = kda::Inputs {
            qkv: Rows::new(&qkv, 3 * c),
            f: Rows::new(&f, c),
            gate: Rows::new(&gate, c),
            b: Rows::new(&b, 64),
        };
        let weights = kda::Weights {
            conv: &conv,
            dt_bias: &bias,
            a_log: &a_log,
            o_norm: &o_norm,
            rms_eps: 1e-5,
            lower_bound: Some(-5.0),
        };
        let pair = turn % (states.len() / 2) * 2;
        let (a, b) = states[pair..pair + 2].split_at_mut(1);
        let out = RowsMut::new(&mut out, c);
        kda::mix(shape, weights, inputs, &window, &a[0], &mut next_window, &mut b[0], None, out);
    })
}

fn attention(bench: &mut Bench, rows: usize) -> RooflineRow {
    const KEYS: usize = 2048;
    let shape = mla::Shape { heads: 64, key: 256, value: 256 };
    let q = numbers(rows * 64 * 256);
    let kv = numbers(KEYS * shape.row_len());
    let mut out = vec![0.0; rows * 64 * 256];
    let bytes = F32 * (KEYS * shape.row_len() + 2 * rows * 64 * 256) as f64;
    let flops = 2.0 * (rows * KEYS * shape.row_len()) as f64;
    bench.case("mla over 2048 keys", rows, bytes, flops, |_, _| {
        let (q, kv) = (Rows::new(&q, 64 * 256), Rows::new(&kv, shape.row_len()));
        let out = RowsMut::new(&mut out, 64 * 256);
        mla::attention(q, kv, shape, |_| mla::Keys::Below(KEYS), 0.0625, out);
    })
}

fn index_scores(bench: &mut Bench) -> RooflineRow {
    const POOLS: usize = 16384;
    let shape = indexer::Shape { heads: 32, width: 128, pool: 4, top: 2048 };
    let (q, w, pools) = (numbers(32 * 128), numbers(32), numbers(POOLS * 128));
    let mut out = vec![0; shape.most_keys()];
    let bytes = F32 * (POOLS * 128) as f64;
    bench.case("idx.select of 16384 pools", 1, bytes, 2.0 * (POOLS * 32 * 129) as f64, |_, _| {
        indexer::select(shape, POOLS * 4 - 1, &q, &w, Rows::new(&pools, 128), &mut out);
    })
}

/// Two products and the activation of 8 experts a row, of as many experts as fit into the weight memory.
fn experts(bench: &mut Bench, rows: usize) -> RooflineRow {
    const INNER: usize = 2048;
    const SLOTS: usize = 8;
    let (up, down) = (packed_len(2 * INNER, D), packed_len(D, INNER));
    let count = WEIGHTS / (up + down);
    let pairs = rows * SLOTS;
    let x = numbers(rows * D);
    let (mut z, mut a, mut y) =
        (vec![0.0; pairs * 2 * INNER], vec![0.0; pairs * INNER], vec![0.0; pairs * D]);
    let used = count.min(pairs);
    let bytes = BF16 * (used * (up + down)) as f64 + F32 * (pairs * (D + 6 * INNER)) as f64;
    let name = format!("8 experts a row of {count}");
    bench.case(&name, rows, bytes, 2.0 * (pairs * 3 * INNER * D) as f64, |weights, turn| {
        let ids: Vec<i32> = (0..pairs).map(|p| ((p + turn * SLOTS) % count) as i32).collect();
        let (mut order, mut starts) = (vec![0; pairs], vec![0; count + 1]);
        moe::group(Rows::new(&ids, SLOTS), &mut order, &mut starts);
        let (ups, downs) = weights[..count * (up + down)].split_at(count * up);
        let (ups, downs) = (Elements::Bf16(ups), Elements::Bf16(downs));
        let out = RowsMut::new(&mut z, 2 * INNER);
        moe::experts(Rows::new(&x, D), ups, 2 * INNER, &order, &starts, SLOTS, out).expect("cut to size");
        act::swiglu(Rows::new(&z, 2 * INNER), 10.0, RowsMut::new(&mut a, INNER));
        let out = RowsMut::new(&mut y, D);
        moe::experts(Rows::new(&a, INNER), downs, D, &order, &starts, 1, out).expect("cut to size");
    })
}

fn rms(bench: &mut Bench, rows: usize) -> RooflineRow {
    let (x, w) = (numbers(rows * D), numbers(D));
    let mut out = vec![0.0; rows * D];
    bench.case("norm", rows, 2.0 * F32 * (rows * D) as f64, 4.0 * (rows * D) as f64, |_, _| {
        norm::rms(Rows::new(&x, D), Some(&w), 1e-5, RowsMut::new(&mut out, D));
    })
}

fn swiglu(bench: &mut Bench, rows: usize) -> RooflineRow {
    const WIDTH: usize = 12288;
    let x = numbers(rows * 2 * WIDTH);
    let mut out = vec![0.0; rows * WIDTH];
    bench.case("mlp.act", rows, 3.0 * F32 * (rows * WIDTH) as f64, 30.0 * (rows * WIDTH) as f64, |_, _| {
        act::swiglu(Rows::new(&x, 2 * WIDTH), 10.0, RowsMut::new(&mut out, WIDTH));
    })
}

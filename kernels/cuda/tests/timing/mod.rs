//! Times operations at the sizes of the published model against what the memory or the arithmetic allows.

use std::sync::Arc;

use plugfold_abi::{Addressing, Phase};
use plugfold_cuda::{Arena, Gpu};

use crate::cases::products::{Sized, sized};
use crate::cases::{Family, Held, Kernels, Matrix, Seq, Setup, one, random};

/// An operation, the bytes it has to move and the multiply-adds it has to do.
struct Timed {
    name: String,
    setup: Setup,
    bytes: f64,
    fmas: f64,
}

/// Repetitions of a measurement, each of several calls.
const REPEATS: usize = 5;

/// Bytes a second of a copy from device memory to device memory, read and written.
fn bandwidth(gpu: &Gpu) -> Result<f64, String> {
    const BYTES: usize = 2 << 30;
    let said = |e: plugfold_cuda::CudaError| e.to_string();
    let arenas: Vec<Arena> =
        (0..2).map(|_| gpu.arena("a copy", BYTES)).collect::<Result<_, _>>().map_err(said)?;
    let mut best = f64::INFINITY;
    for _ in 0..4 {
        let start = gpu.event().map_err(said)?;
        gpu.copy(arenas[1].address(), arenas[0].address(), BYTES).map_err(said)?;
        best = best.min(gpu.event().map_err(said)?.seconds_since(&start).map_err(said)?);
    }
    Ok(2.0 * BYTES as f64 / best)
}

fn dense(rows: usize, n: usize, k: usize) -> Timed {
    let setup = Setup {
        inputs: vec![Matrix::f32(&random(1, rows * k, 1.0), k)],
        outputs: vec![Matrix::out(rows, n)],
        weights: vec![sized(Sized::Panels, n, k, 1)],
        dims: vec![n, k],
        seqs: one(rows),
        ..Setup::new("dense")
    };
    let name = format!("dense bf16 [{n}, {k}], {rows} rows");
    Timed { name, setup, bytes: (n * k * 2) as f64, fmas: (rows * n * k) as f64 }
}

fn coded(rows: usize, n: usize, k: usize) -> Timed {
    let mut timed = dense(rows, n, k);
    timed.name = format!("dense exl3 4 bits [{n}, {k}], {rows} rows");
    timed.setup.weights = vec![sized(Sized::Trellis, n, k, 1)];
    timed.bytes = (n * k / 2) as f64;
    timed
}

/// `moe.up` of 288 experts of which 8 a row are used (fewer are stored: enough that none is in the cache).
fn experts(rows: usize, kind: Sized) -> Timed {
    let (stored, slots, width, hidden) = (32, 8, 2048, 4096);
    let pairs = rows * slots;
    let order: Vec<i32> = (0..pairs as i32).collect();
    // Pairs are spread evenly: as many experts as there are pairs, up to all.
    let starts: Vec<i32> = (0..=stored).map(|e| (e * pairs / stored) as i32).collect();
    let used = stored.min(pairs);
    let setup = Setup {
        inputs: vec![
            Matrix::f32(&random(1, rows * hidden, 1.0), hidden),
            Matrix::i32(&order, 1),
            Matrix::i32(&starts, 1),
        ],
        outputs: vec![Matrix::out(pairs, 2 * width)],
        weights: vec![sized(kind, 2 * width, hidden, stored)],
        dims: vec![stored, slots, width, hidden],
        seqs: one(rows),
        ..Setup::new("moe.up")
    };
    let (format, bytes) = if kind == Sized::Panels { ("bf16", 2.0) } else { ("exl3 4 bits", 0.5) };
    Timed {
        name: format!("moe.up {format}, {rows} rows"),
        setup,
        bytes: (used * 2 * width * hidden) as f64 * bytes,
        fmas: (pairs * 2 * width * hidden) as f64,
    }
}

fn kda(rows: usize) -> Timed {
    let (h, k) = (64, 128);
    let c = h * k;
    let setup = Setup {
        phase: if rows > 16 { Phase::Prefill } else { Phase::Window },
        inputs: vec![
            Matrix::f32(&random(1, rows * 3 * c, 1.0), 3 * c),
            Matrix::f32(&random(2, rows * c, 2.0), c),
            Matrix::f32(&random(3, rows * c, 2.0), c),
            Matrix::f32(&random(4, rows * h, 2.0), h),
        ],
        outputs: vec![Matrix::out(rows, c)],
        weights: vec![
            Held::plain(&random(5, 3 * c * 4, 1.0)),
            Held::plain(&random(6, c, 1.0)),
            Held::plain(&random(7, h, 1.0)),
            Held::plain(&random(8, k, 1.0)),
        ],
        caches: vec![
            Family::new(1, 1, 2, 1, c * k, Addressing::State),
            Family::new(2, 1, 2, 1, 9 * c, Addressing::State),
            Family::new(3, 1, 1, 16, 6 * c + h, Addressing::State),
        ],
        dims: vec![h, k, 4, 1],
        params: vec![1e-5, -5.0],
        seqs: one(rows),
        ..Setup::new("kda.mix")
    };
    let bytes = (2 * c * k * 4 + rows * 6 * c * 4) as f64;
    Timed { name: format!("kda.mix, {rows} rows"), setup, bytes, fmas: (rows * 3 * c * k) as f64 }
}

fn attention(rows: usize, context: usize) -> Timed {
    let (h, d, v) = (64, 256, 256);
    let seqs = vec![Seq { slot: 0, parity: 0, start: context as u32, rows: rows as u32, keep: rows as u32 }];
    let setup = Setup {
        inputs: vec![Matrix::f32(&random(1, rows * h * d, 1.0), h * d)],
        outputs: vec![Matrix::out(rows, h * v)],
        caches: vec![Family::new(9, 1, 1, context + rows, h * (d + v), Addressing::Linear)],
        dims: vec![h, d, v, 512],
        params: vec![0.0625],
        seqs,
        ..Setup::new("mla.dense")
    };
    Timed {
        name: format!("mla.dense, {rows} rows at {context}"),
        setup,
        bytes: (context * h * (d + v) * 4) as f64,
        fmas: (rows * context * h * (d + v)) as f64,
    }
}

fn select(context: usize) -> Timed {
    let (heads, d, pool, top) = (32, 128, 4, 2048);
    let setup = Setup {
        inputs: vec![
            Matrix::f32(&random(1, heads * d, 1.0), heads * d),
            Matrix::f32(&random(2, heads, 1.0), heads),
        ],
        outputs: vec![Matrix::out_i32(1, top + pool - 1), Matrix::out_i32(1, 1)],
        caches: vec![Family::new(7, 1, 1, context / pool + 1, d, Addressing::Linear)],
        dims: vec![heads, d, pool, top, top + pool - 1],
        seqs: vec![Seq { slot: 0, parity: 0, start: context as u32, rows: 1, keep: 1 }],
        ..Setup::new("idx.select")
    };
    let (bytes, fmas) = ((context / pool * d * 4) as f64, (context / pool * d * heads) as f64);
    Timed { name: format!("idx.select at {context}"), setup, bytes, fmas }
}

fn hyper() -> Vec<Timed> {
    let (n, d) = (4, 4096);
    let mixes = (2 + n) * n;
    let x = Matrix::f32(&random(1, n * d, 1.0), n * d);
    let dots = Setup {
        inputs: vec![x.clone()],
        outputs: vec![Matrix::out(1, mixes + 1)],
        weights: vec![sized(Sized::Panels, mixes, n * d, 1)],
        dims: vec![n, d],
        seqs: one(1),
        ..Setup::new("hc.dots")
    };
    let finish = Setup {
        inputs: vec![Matrix::f32(&vec![1.0; mixes + 1], mixes + 1), x],
        outputs: vec![Matrix::out(1, d), Matrix::out(1, n), Matrix::out(1, n * n)],
        weights: vec![
            Held::plain(&random(5, mixes, 1.0)),
            Held::plain(&random(6, 3, 1.0)),
            Held::plain(&random(7, d, 1.0)),
        ],
        dims: vec![n, d, 20],
        params: vec![1e-5, 1e-6],
        seqs: one(1),
        ..Setup::new("hc.finish")
    };
    let bytes = (mixes * n * d * 2) as f64;
    vec![
        Timed { name: "hc.dots, 1 row".into(), setup: dots, bytes, fmas: (mixes * n * d) as f64 },
        Timed {
            name: "hc.finish, 1 row".into(),
            setup: finish,
            bytes: (n * d * 4) as f64,
            fmas: (n * d) as f64,
        },
    ]
}

fn sampling() -> Timed {
    let (n, c) = (154_880, 64);
    let setup = Setup {
        inputs: vec![Matrix::f32(&random(1, n, 4.0), n)],
        outputs: vec![Matrix::out(1, c), Matrix::out_i32(1, c)],
        dims: vec![n, c, 0],
        seqs: one(1),
        out_rows: vec![0],
        ..Setup::new("sample.candidates")
    };
    Timed { name: "sample.candidates, 64 of 154880".into(), setup, bytes: (n * 4) as f64, fmas: 0.0 }
}

fn all() -> Vec<Timed> {
    let mut all = Vec::new();
    for rows in [1, 4, 16, 512] {
        all.push(dense(rows, 24_576, 4096));
        all.push(coded(rows, 24_576, 4096));
    }
    all.extend([
        dense(1, 4096, 16_384),
        dense(1, 154_880, 4096),
        coded(1, 4096, 16_384),
        coded(1, 12_288, 4096),
    ]);
    for rows in [1, 8, 256] {
        all.extend([experts(rows, Sized::Panels), experts(rows, Sized::Trellis)]);
    }
    all.extend([kda(1), kda(8), kda(512), attention(1, 2048), attention(8, 2048), attention(256, 2048)]);
    all.push(select(65_536));
    all.extend(hyper());
    all.push(sampling());
    all
}

/// Times everything and prints a line of JSON each.
///
/// # Errors
/// What the device says.
pub fn run(gpu: &Arc<Gpu>) -> Result<(), String> {
    let said = |e: plugfold_cuda::CudaError| e.to_string();
    let bandwidth = bandwidth(gpu)?;
    // Two operations a multiply-add, 128 of them a cycle and multiprocessor, at the clock that the driver gives.
    let rate = f64::from(gpu.facts().multiprocessors) * 128.0 * gpu.clock().map_err(said)?;
    println!("{{\"copy\": {bandwidth:.3e}, \"multiply_adds\": {rate:.3e}}}");
    for timed in all() {
        let kernels = Kernels::new(gpu.clone());
        let (placed, provider) = kernels.place(&timed.setup);
        let run = || placed.run(provider).map_err(|e| e.to_string());
        run()?;
        gpu.synchronize().map_err(said)?;
        let start = gpu.event().map_err(said)?;
        run()?;
        let once = gpu.event().map_err(said)?.seconds_since(&start).map_err(said)?;
        let calls = (0.01 / once.max(1e-6)).clamp(1.0, 200.0) as usize;
        let mut times = Vec::new();
        for _ in 0..REPEATS {
            let start = gpu.event().map_err(said)?;
            for _ in 0..calls {
                run()?;
            }
            times.push(gpu.event().map_err(said)?.seconds_since(&start).map_err(said)? / calls as f64);
        }
        times.sort_unstable_by(f64::total_cmp);
        let seconds = times[REPEATS / 2];
        let (memory, compute) = (timed.bytes / bandwidth, timed.fmas / rate);
        let bound = if memory >= compute { "memory" } else { "multiply-adds" };
        println!(
            "{{\"operation\": \"{}\", \"microseconds\": {:.2}, \"bound\": \"{bound}\", \"fraction\": {:.3}, \"calls\": {}}}",
            timed.name,
            seconds * 1e6,
            memory.max(compute) / seconds,
            REPEATS * calls
        );
        drop(placed);
        gpu.forget();
    }
    Ok(())
}

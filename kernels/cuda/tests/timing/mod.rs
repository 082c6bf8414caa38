//! Times operations at the sizes of the published model against what the memory or the arithmetic allows.

pub mod encoder;

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

/// Calls of a measurement at most: so many launches fit the driver's queue.
const CALLS: f64 = 32.0;
/// Bytes of weights and caches that a measurement goes through before it meets the same again: more than the cache of any GPU.
const ROTATED: f64 = 150e6;
/// Bytes of the copy that keeps the GPU busy while calls are queued.
const BLOCKER: usize = 2 << 30;

/// Two stretches of memory, copied from one to the other.
struct Copies<'g> {
    gpu: &'g Gpu,
    arenas: [Arena; 2],
}

impl<'g> Copies<'g> {
    fn new(gpu: &'g Gpu) -> Result<Self, String> {
        let arena = || gpu.arena("a copy", BLOCKER).map_err(|e| e.to_string());
        Ok(Self { gpu, arenas: [arena()?, arena()?] })
    }
    fn start(&self) -> Result<(), String> {
        self.gpu.copy(self.arenas[1].address(), self.arenas[0].address(), BLOCKER).map_err(|e| e.to_string())
    }
    /// Bytes a second, read and written.
    fn bandwidth(&self) -> Result<f64, String> {
        let mut best = f64::INFINITY;
        for _ in 0..4 {
            best = best.min(seconds(self.gpu, || self.start())?);
        }
        Ok(2.0 * BLOCKER as f64 / best)
    }
}

/// Seconds between what `run` makes the GPU do first and last.
fn seconds(gpu: &Gpu, run: impl FnOnce() -> Result<(), String>) -> Result<f64, String> {
    let said = |e: plugfold_cuda::CudaError| e.to_string();
    let start = gpu.event().map_err(said)?;
    run()?;
    gpu.event().map_err(said)?.seconds_since(&start).map_err(said)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_unstable_by(f64::total_cmp);
    times[times.len() / 2]
}

/// What a call costs: on the GPU while launches wait for it, on the host, and when each call is launched as the GPU runs the
/// one before.
struct Times {
    queued: f64,
    host: f64,
    eager: f64,
    calls: usize,
}

fn times(gpu: &Gpu, copies: &Copies<'_>, run: impl Fn(usize) -> Result<(), String>) -> Result<Times, String> {
    run(0)?;
    let once = seconds(gpu, || run(0))?;
    let calls = (0.01 / once.max(1e-6)).clamp(1.0, CALLS) as usize;
    let all = || (0..calls).try_for_each(&run);
    let (mut queued, mut host, mut eager) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..REPEATS {
        // Two copies take a millisecond or two, in which the host launches all calls.
        copies.start()?;
        copies.start()?;
        let start = std::time::Instant::now();
        let mut launching = 0.0;
        let took = seconds(gpu, || {
            all()?;
            launching = start.elapsed().as_secs_f64();
            Ok(())
        })?;
        queued.push(took / calls as f64);
        host.push(launching / calls as f64);
        eager.push(seconds(gpu, all)? / calls as f64);
    }
    Ok(Times { queued: median(queued), host: median(host), eager: median(eager), calls: calls * REPEATS })
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
    all.extend([coded(1, 4096, 4096), coded(8, 4096, 16_384), coded(8, 24_576, 4096), kda(4), nothing()]);
    all.extend(hyper());
    all.push(sampling());
    all
}

/// About nothing: what a launch costs.
fn nothing() -> Timed {
    let setup = Setup {
        inputs: vec![Matrix::f32(&random(1, 32, 1.0), 32)],
        outputs: vec![Matrix::out(1, 32)],
        weights: vec![Held::plain(&random(2, 32, 1.0))],
        dims: vec![32],
        params: vec![1e-5],
        seqs: one(1),
        ..Setup::new("norm")
    };
    Timed { name: "norm of 32 numbers, 1 row".into(), setup, bytes: 256.0, fmas: 64.0 }
}

/// Times everything and prints a line of JSON each.
///
/// # Errors
/// What the device says.
pub fn run(gpu: &Arc<Gpu>) -> Result<(), String> {
    let said = |e: plugfold_cuda::CudaError| e.to_string();
    let copies = Copies::new(gpu)?;
    let bandwidth = copies.bandwidth()?;
    // Two operations a multiply-add, 128 of them a cycle and multiprocessor, at the clock that the driver gives.
    let rate = f64::from(gpu.facts().multiprocessors) * 128.0 * gpu.clock().map_err(said)?;
    println!("{{\"copy\": {bandwidth:.3e}, \"multiply_adds\": {rate:.3e}}}");
    for timed in all() {
        let kernels = Kernels::new(gpu.clone());
        // Several of the same, so that a call does not find in the cache what the one before it read.
        let count = (ROTATED / timed.bytes.max(1e7)).ceil() as usize;
        let placed: Vec<_> = (0..count).map(|_| kernels.place(&timed.setup)).collect();
        let run = |i: usize| {
            let (placed, provider) = &placed[i % count];
            placed.run(provider).map_err(|e| e.to_string())
        };
        for i in 0..count {
            // Tables of segments are read when they are first met.
            run(i)?;
        }
        let t = times(gpu, &copies, run)?;
        let (memory, compute) = (timed.bytes / bandwidth, timed.fmas / rate);
        let bound = if memory >= compute { "memory" } else { "multiply-adds" };
        println!(
            "{{\"operation\": \"{}\", \"microseconds\": {:.2}, \"bound\": \"{bound}\", \"fraction\": {:.3}, \"bound_microseconds\": {:.2}, \"host\": {:.2}, \"eager\": {:.2}, \"calls\": {}}}",
            timed.name,
            t.queued * 1e6,
            memory.max(compute) / t.queued,
            memory.max(compute) * 1e6,
            t.host * 1e6,
            t.eager * 1e6,
            t.calls
        );
        drop(placed);
        gpu.forget();
    }
    Ok(())
}

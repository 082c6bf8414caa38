//! Gated linear attention (KDA): short convolution, gates, and the recurrence token by token.
//!
//! Layout of the recurrent state `[H][K][K]` of one sequence: head by head; inside a head the value channels are cut
//! into blocks of [`VALUE_BLOCK`] (the last one narrower) and each block holds its columns for all key channels,
//! `[block][key channel][value channel of the block]`, so that a block fits in the first-level cache. [`state_index`]
//! finds an element.

use super::norm::rms_in_place_inline;
use super::num::{dot_inline, exp, sigmoid, silu, softplus};
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::scratch::{self, Scratch};
use crate::cpu::simd::kernel;

/// Value channels of a block of the state.
pub const VALUE_BLOCK: usize = 32;

/// Rows that are prepared before they enter the recurrence.
const CHUNK: usize = 32;

/// Added to the sum of squares of the l2 norms, whatever the eps of the RMS norms.
const L2_EPS: f32 = 1e-6;

/// Where element (key channel, value channel) of a head's state lies, for head width `k`.
pub fn state_index(k: usize, key: usize, value: usize) -> usize {
    let block = value / VALUE_BLOCK;
    let width = VALUE_BLOCK.min(k - block * VALUE_BLOCK);
    block * VALUE_BLOCK * k + key * width + value % VALUE_BLOCK
}

/// Sizes of a layer (of one rank).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// H.
    pub heads: usize,
    /// K, of keys and values.
    pub width: usize,
    /// T, of the convolution.
    pub taps: usize,
}

impl Shape {
    /// H * K.
    pub const fn channels(&self) -> usize {
        self.heads * self.width
    }
    /// Numbers of a recurrent state.
    pub const fn state_len(&self) -> usize {
        self.heads * self.width * self.width
    }
    /// Numbers of a row of projections `[q | k | v]`.
    pub const fn qkv_len(&self) -> usize {
        3 * self.channels()
    }
    /// Numbers of a convolution window: the last T-1 rows of projections, oldest first.
    pub const fn window_len(&self) -> usize {
        (self.taps - 1) * self.qkv_len()
    }
    /// Numbers of a replay record `[raw qkv | normed k | v | decay | beta]`.
    pub const fn replay_len(&self) -> usize {
        2 * self.qkv_len() + self.heads
    }
}

/// Weights of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Weights<'a> {
    /// `[3*H*K, T]`; tap T-1 is the current row's.
    pub conv: &'a [f32],
    /// `[H*K]`.
    pub dt_bias: &'a [f32],
    /// `[H]`.
    pub a_log: &'a [f32],
    /// `[K]`.
    pub o_norm: &'a [f32],
    /// Of the output norm.
    pub rms_eps: f32,
    /// Lower bound of the log decay; without one the decay is exp(-e^A softplus(f)).
    pub lower_bound: Option<f32>,
}

/// Projections of the rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    /// `[R, 3*H*K]`, before the convolution.
    pub qkv: Rows<'a>,
    /// `[R, H*K]`, before `dt_bias`.
    pub f: Rows<'a>,
    /// `[R, H*K]`, before the logistic.
    pub gate: Rows<'a>,
    /// `[R, H]`, before the logistic.
    pub b: Rows<'a>,
}

impl<'a> Inputs<'a> {
    /// Rows `start .. start + rows`.
    #[must_use]
    pub fn range(&self, start: usize, rows: usize) -> Inputs<'a> {
        Inputs {
            qkv: self.qkv.range(start, rows),
            f: self.f.range(start, rows),
            gate: self.gate.range(start, rows),
            b: self.b.range(start, rows),
        }
    }
}

/// What the recurrence of one head eats, for up to [`CHUNK`] rows of K each.
struct Prepared {
    q: Scratch<f32>,
    k: Scratch<f32>,
    v: Scratch<f32>,
    decay: Scratch<f32>,
    beta: Scratch<f32>,
    /// The recurrence's outputs.
    out: Scratch<f32>,
}

/// Where a head's part of the replay records goes.
struct Replay<'a> {
    k: RowsMut<'a>,
    v: RowsMut<'a>,
    decay: RowsMut<'a>,
    beta: RowsMut<'a>,
}

/// Convolution and silu of one channel group of one head: `out [rows, K]`.
#[inline(always)]
fn convolve(
    window: Rows<'_>,
    rows: Rows<'_>,
    first: usize,
    count: usize,
    column: usize,
    taps: &[f32],
    out: &mut [f32],
) {
    let width = out.len() / count;
    let history = window.rows();
    for (i, out) in out.chunks_exact_mut(width).enumerate() {
        out.fill(0.0);
        for (j, taps) in taps.chunks_exact(width).enumerate() {
            // Row `first + i - history + j` of the sequence, from before its rows where that is negative.
            let at = first + i + j;
            let src = if at < history { window.row(at) } else { rows.row(at - history) };
            for ((o, s), t) in out.iter_mut().zip(&src[column..column + width]).zip(taps) {
                *o = t.mul_add(*s, *o);
            }
        }
        for o in out.iter_mut() {
            *o = silu(*o);
        }
    }
}

kernel! {
    /// Rows `first .. first + count` of one head, up to the recurrence.
    fn prepare[][](
        shape: Shape, head: usize, w: Weights<'a>, window: Rows<'a>, x: Inputs<'a>,
        first: usize, count: usize, p: &'a mut Prepared,
    ) -> () {
        let (width, channels) = (shape.width, shape.channels());
        let len = count * width;
        let mut taps = scratch::zeros::<f32>(shape.taps * width);
        for (group, out) in [&mut p.q[..len], &mut p.k[..len], &mut p.v[..len]].into_iter().enumerate() {
            let column = group * channels + head * width;
            // Taps are stored channel by channel; here tap by tap.
            for c in 0..width {
                for j in 0..shape.taps {
                    taps[j * width + c] = w.conv[(column + c) * shape.taps + j];
                }
            }
            convolve(window, x.qkv, first, count, column, &taps, out);
        }
        let root = 1.0 / (width as f32).sqrt();
        for row in p.q[..len].chunks_exact_mut(width) {
            let inverse = 1.0 / (dot_inline(row, row) + L2_EPS).sqrt();
            for v in row.iter_mut() {
                *v = *v * inverse * root;
            }
        }
        for row in p.k[..len].chunks_exact_mut(width) {
            let inverse = 1.0 / (dot_inline(row, row) + L2_EPS).sqrt();
            for v in row.iter_mut() {
                *v *= inverse;
            }
        }
        let rate = exp(w.a_log[head]);
        let bias = &w.dt_bias[head * width..(head + 1) * width];
        for (i, out) in p.decay[..len].chunks_exact_mut(width).enumerate() {
            let f = &x.f.row(first + i)[head * width..(head + 1) * width];
            match w.lower_bound {
                Some(bound) => {
                    for ((o, f), b) in out.iter_mut().zip(f).zip(bias) {
                        *o = exp(bound * sigmoid(rate * (f + b)));
                    }
                }
                None => {
                    for ((o, f), b) in out.iter_mut().zip(f).zip(bias) {
                        *o = exp(-rate * softplus(f + b));
                    }
                }
            }
        }
        for (i, beta) in p.beta[..count].iter_mut().enumerate() {
            *beta = sigmoid(x.b.row(first + i)[head]);
        }
    }
}

/// Half a block: arrays of this length stay in vector registers.
const HALF: usize = VALUE_BLOCK / 2;

/// One row through one block of the state. The output is computed only where it is wanted.
#[inline(always)]
fn step(
    state: &mut [[[f32; HALF]; 2]],
    q: Option<&[f32]>,
    k: &[f32],
    v: &[[f32; HALF]; 2],
    decay: &[f32],
    beta: f32,
) -> [[f32; HALF]; 2] {
    let mut seen = [[0.0f32; HALF]; 2];
    // Rows and factors are copied to locals: then the compiler knows that a store to the state changes neither.
    for ((row, a), k) in state.iter_mut().zip(decay).zip(k) {
        let (mut m, a, k) = (*row, *a, *k);
        for h in 0..2 {
            for c in 0..HALF {
                m[h][c] *= a;
                seen[h][c] = k.mul_add(m[h][c], seen[h][c]);
            }
        }
        *row = m;
    }
    let mut e = [[0.0f32; HALF]; 2];
    for h in 0..2 {
        for c in 0..HALF {
            e[h][c] = beta * (v[h][c] - seen[h][c]);
        }
    }
    let mut out = [[0.0f32; HALF]; 2];
    if let Some(q) = q {
        for ((row, k), q) in state.iter_mut().zip(k).zip(q) {
            let (mut m, k, q) = (*row, *k, *q);
            for h in 0..2 {
                for c in 0..HALF {
                    m[h][c] = k.mul_add(e[h][c], m[h][c]);
                    out[h][c] = q.mul_add(m[h][c], out[h][c]);
                }
            }
            *row = m;
        }
    } else {
        for (row, k) in state.iter_mut().zip(k) {
            let (mut m, k) = (*row, *k);
            for h in 0..2 {
                for c in 0..HALF {
                    m[h][c] = k.mul_add(e[h][c], m[h][c]);
                }
            }
            *row = m;
        }
    }
    out
}

/// A stretch of value channels that does not fill a block: the same arithmetic, one channel at a time.
#[inline(always)]
fn narrow_step(
    state: &mut [f32],
    width: usize,
    q: Option<&[f32]>,
    k: &[f32],
    v: &[f32],
    decay: &[f32],
    beta: f32,
    out: &mut [f32],
) {
    for c in 0..width {
        let mut seen = 0.0f32;
        for d in 0..k.len() {
            let m = &mut state[d * width + c];
            *m *= decay[d];
            seen = k[d].mul_add(*m, seen);
        }
        let e = beta * (v[c] - seen);
        let mut sum = 0.0f32;
        for d in 0..k.len() {
            let m = &mut state[d * width + c];
            *m = k[d].mul_add(e, *m);
            if let Some(q) = q {
                sum = q[d].mul_add(*m, sum);
            }
        }
        out[c] = sum;
    }
}

kernel! {
    /// `count` rows through the state of one head.
    fn recur[][](
        state: &'a mut [f32], width: usize, count: usize, q: Option<&'a [f32]>, k: Rows<'a>, v: Rows<'a>,
        decay: Rows<'a>, beta: Rows<'a>, out: &'a mut [f32],
    ) -> () {
        let mut state = state;
        let mut column = 0;
        while column < width {
            let block = if width - column < VALUE_BLOCK { width - column } else { VALUE_BLOCK };
            let (part, rest) = state.split_at_mut(block * width);
            state = rest;
            for i in 0..count {
                let q = q.map(|q| &q[i * width..(i + 1) * width]);
                let (k, decay, beta) = (k.row(i), decay.row(i), beta.row(i)[0]);
                let v = &v.row(i)[column..column + block];
                // Without outputs there is no row to write to.
                let mut unused = [0.0f32; VALUE_BLOCK];
                let out = if q.is_some() { &mut out[i * width + column..][..block] } else { &mut unused[..block] };
                if let [v] = v.as_chunks::<HALF>().0.as_chunks::<2>().0 {
                    let whole = part.as_chunks_mut::<HALF>().0.as_chunks_mut::<2>().0;
                    out.copy_from_slice(step(whole, q, k, v, decay, beta).as_flattened());
                } else {
                    narrow_step(part, block, q, k, v, decay, beta, out);
                }
            }
            column += block;
        }
    }
}

kernel! {
    /// Output norm and gate: `out = rms(core) * weight * σ(gate)`.
    fn norm_and_gate[][](
        core: &'a mut [f32], weight: &'a [f32], eps: f32, gate: Rows<'a>, first: usize, head: usize, out: &'a mut RowsMut<'a>,
    ) -> () {
        let width = weight.len();
        for (i, core) in core.chunks_exact_mut(width).enumerate() {
            rms_in_place_inline(core, weight, eps);
            let gate = &gate.row(first + i)[head * width..(head + 1) * width];
            for ((o, c), g) in out.row_mut(first + i).iter_mut().zip(core.iter()).zip(gate) {
                *o = c * sigmoid(*g);
            }
        }
    }
}

/// The rows of one sequence: convolution, gates, recurrence, output norm and gate.
///
/// Reads the committed `window [T-1, 3*H*K]` and `state`, writes `out [R, H*K]`, the state and window after all rows to
/// `next_state` and `next_window`, and, if asked, a record a row to `replay` (`[raw qkv | normed k | v | decay | beta]`,
/// see [`Shape::replay_len`]), from which [`replay`] makes the state after any number of the rows.
///
/// # Panics
/// When the sizes of the operands do not fit `shape`.
pub fn mix(
    shape: Shape,
    w: Weights<'_>,
    x: Inputs<'_>,
    window: &[f32],
    state: &[f32],
    next_window: &mut [f32],
    next_state: &mut [f32],
    replay: Option<RowsMut<'_>>,
    out: RowsMut<'_>,
) {
    let (width, channels, rows) = (shape.width, shape.channels(), out.rows());
    assert_eq!(out.cols(), channels, "kda mix: width of the output");
    assert_eq!(
        [x.qkv.cols(), x.f.cols(), x.gate.cols(), x.b.cols()],
        [3 * channels, channels, channels, shape.heads],
        "kda mix: widths of the inputs"
    );
    assert!(
        [x.qkv.rows(), x.f.rows(), x.gate.rows(), x.b.rows()].iter().all(|r| *r == rows),
        "kda mix: rows of the inputs"
    );
    assert_eq!([window.len(), next_window.len()], [shape.window_len(); 2], "kda mix: window");
    assert_eq!([state.len(), next_state.len()], [shape.state_len(); 2], "kda mix: state");
    assert_eq!(
        [w.conv.len(), w.dt_bias.len(), w.a_log.len(), w.o_norm.len()],
        [3 * channels * shape.taps, channels, shape.heads, width],
        "kda mix: weights"
    );
    let history = Rows::new(window, shape.qkv_len());
    let mut records = replay.map(|records| {
        assert_eq!((records.rows(), records.cols()), (rows, shape.replay_len()), "kda mix: replay records");
        let (mut raw, rest) = records.split_columns_at(shape.qkv_len());
        for r in 0..rows {
            raw.row_mut(r).copy_from_slice(x.qkv.row(r));
        }
        let (k, rest) = rest.split_columns_at(channels);
        let (v, rest) = rest.split_columns_at(channels);
        let (decay, beta) = rest.split_columns_at(channels);
        let heads = k.column_pieces(width).zip(v.column_pieces(width));
        let heads = heads.zip(decay.column_pieces(width)).zip(beta.column_pieces(1));
        heads.map(|(((k, v), decay), beta)| Replay { k, v, decay, beta })
    });
    let heads = next_state.chunks_exact_mut((width * width).max(1)).zip(out.column_pieces(width));
    let items = heads.map(|(state, out)| (state, out, records.as_mut().and_then(Iterator::next)));
    par::each(items, (4 * rows + 2) * shape.state_len(), |head, (next, mut out, mut replay)| {
        let len = CHUNK.min(rows) * width;
        let new = || scratch::zeros::<f32>(len);
        let mut p = Prepared {
            q: new(),
            k: new(),
            v: new(),
            decay: new(),
            beta: scratch::zeros(CHUNK.min(rows)),
            out: new(),
        };
        next.copy_from_slice(&state[head * width * width..][..width * width]);
        for first in (0..rows).step_by(CHUNK) {
            let count = CHUNK.min(rows - first);
            prepare(shape, head, w, history, x, first, count, &mut p);
            let len = count * width;
            let (k, v) = (Rows::new(&p.k[..len], width), Rows::new(&p.v[..len], width));
            let (decay, beta) = (Rows::new(&p.decay[..len], width), Rows::new(&p.beta[..count], 1));
            recur(next, width, count, Some(&p.q[..len]), k, v, decay, beta, &mut p.out[..len]);
            if let Some(replay) = &mut replay {
                for i in 0..count {
                    replay.k.row_mut(first + i).copy_from_slice(k.row(i));
                    replay.v.row_mut(first + i).copy_from_slice(v.row(i));
                    replay.decay.row_mut(first + i).copy_from_slice(decay.row(i));
                    replay.beta.row_mut(first + i).copy_from_slice(beta.row(i));
                }
            }
            norm_and_gate(&mut p.out[..len], w.o_norm, w.rms_eps, x.gate, first, head, &mut out.reborrow());
        }
    });
    slide(history, x.qkv, next_window);
}

/// The last T-1 rows of `window` followed by `rows`.
fn slide(window: Rows<'_>, rows: Rows<'_>, next: &mut [f32]) {
    let history = window.rows();
    for (i, next) in next.chunks_exact_mut(rows.cols().max(1)).enumerate() {
        let at = rows.rows() + i;
        next.copy_from_slice(if at < history { window.row(at) } else { rows.row(at - history) });
    }
}

/// State and window after the rows of `records` (the first so many of a call of [`mix`]): bit for bit what `mix` leaves
/// after just those rows.
///
/// # Panics
/// When the sizes of the operands do not fit `shape`.
pub fn replay(
    shape: Shape,
    records: Rows<'_>,
    window: &[f32],
    state: &[f32],
    next_window: &mut [f32],
    next_state: &mut [f32],
) {
    let (width, channels, rows) = (shape.width, shape.channels(), records.rows());
    assert_eq!(records.cols(), shape.replay_len(), "kda replay: records");
    assert_eq!([window.len(), next_window.len()], [shape.window_len(); 2], "kda replay: window");
    assert_eq!([state.len(), next_state.len()], [shape.state_len(); 2], "kda replay: state");
    let items = next_state.chunks_exact_mut((width * width).max(1));
    par::each(items, (3 * rows + 2) * shape.state_len(), |head, next: &mut [f32]| {
        next.copy_from_slice(&state[head * width * width..][..width * width]);
        let part = |group: usize| records.columns((3 + group) * channels + head * width, width);
        let beta = records.columns(6 * channels + head, 1);
        recur(next, width, rows, None, part(0), part(1), part(2), beta, &mut []);
    });
    slide(Rows::new(window, shape.qkv_len()), records.columns(0, shape.qkv_len()), next_window);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::testing::{bits, close, random};
    use crate::cpu::simd::both_paths;
    use proptest::prelude::*;

    struct Layer {
        shape: Shape,
        conv: Vec<f32>,
        dt_bias: Vec<f32>,
        a_log: Vec<f32>,
        o_norm: Vec<f32>,
        bound: Option<f32>,
    }

    /// A sequence: window and state.
    #[derive(Clone, PartialEq, Debug)]
    struct Sequence {
        window: Vec<f32>,
        state: Vec<f32>,
    }

    impl Layer {
        fn new(heads: usize, width: usize, bound: Option<f32>) -> Self {
            let shape = Shape { heads, width, taps: 4 };
            let c = shape.channels();
            Self {
                shape,
                conv: random(1, 12 * c),
                dt_bias: random(2, c),
                a_log: random(3, heads),
                o_norm: random(4, width),
                bound,
            }
        }

        fn fresh(&self) -> Sequence {
            Sequence { window: vec![0.0; self.shape.window_len()], state: vec![0.0; self.shape.state_len()] }
        }

        fn input_len(&self) -> usize {
            5 * self.shape.channels() + self.shape.heads
        }

        /// Runs rows `[qkv | f | gate | b]` from `at`; outputs, what comes after, replay records.
        fn run(&self, x: &[f32], at: &Sequence) -> (Vec<f32>, Sequence, Vec<f32>) {
            let c = self.shape.channels();
            let x = Rows::new(x, self.input_len());
            let w = Weights {
                conv: &self.conv,
                dt_bias: &self.dt_bias,
                a_log: &self.a_log,
                o_norm: &self.o_norm,
                rms_eps: 1e-5,
                lower_bound: self.bound,
            };
            let inputs = Inputs {
                qkv: x.columns(0, 3 * c),
                f: x.columns(3 * c, c),
                gate: x.columns(4 * c, c),
                b: x.columns(5 * c, self.shape.heads),
            };
            let mut out = vec![f32::NAN; x.rows() * c];
            let mut records = vec![f32::NAN; x.rows() * self.shape.replay_len()];
            let mut next = self.fresh();
            mix(
                self.shape,
                w,
                inputs,
                &at.window,
                &at.state,
                &mut next.window,
                &mut next.state,
                Some(RowsMut::new(&mut records, self.shape.replay_len())),
                RowsMut::new(&mut out, c),
            );
            (out, next, records)
        }

        /// The formulas, in double precision, from a fresh sequence.
        fn reference(&self, x: &[f32]) -> (Vec<f64>, Vec<f64>) {
            let (h, k, c) = (self.shape.heads, self.shape.width, self.shape.channels());
            let sig = |v: f64| 1.0 / (1.0 + (-v).exp());
            let rows: Vec<&[f32]> = x.chunks_exact(self.input_len()).collect();
            let mut state = vec![0.0; self.shape.state_len()];
            let mut out = Vec::new();
            for s in 0..rows.len() {
                let conv = |ch: usize| {
                    let sum: f64 = (0..4)
                        .filter(|j| s + j >= 3)
                        .map(|j| f64::from(self.conv[ch * 4 + j]) * f64::from(rows[s + j - 3][ch]))
                        .sum();
                    sum * sig(sum)
                };
                for head in 0..h {
                    let part = |g: usize| (0..k).map(|d| conv(g * c + head * k + d)).collect::<Vec<f64>>();
                    let (mut q, mut key, v) = (part(0), part(1), part(2));
                    for (x, root) in [(&mut q, (k as f64).sqrt()), (&mut key, 1.0)] {
                        let n = (x.iter().map(|v| v * v).sum::<f64>() + 1e-6).sqrt() * root;
                        for v in x.iter_mut() {
                            *v /= n;
                        }
                    }
                    let beta = sig(f64::from(rows[s][5 * c + head]));
                    let rate = f64::from(self.a_log[head]).exp();
                    let m = &mut state[head * k * k..(head + 1) * k * k];
                    for d in 0..k {
                        let f =
                            f64::from(rows[s][3 * c + head * k + d]) + f64::from(self.dt_bias[head * k + d]);
                        let g = match self.bound {
                            Some(b) => f64::from(b) * sig(rate * f),
                            None => -rate * f.exp().ln_1p(),
                        };
                        m[d * k..(d + 1) * k].iter_mut().for_each(|m| *m *= g.exp());
                    }
                    let mut o = vec![0.0; k];
                    for e in 0..k {
                        let seen: f64 = (0..k).map(|d| m[d * k + e] * key[d]).sum();
                        for d in 0..k {
                            m[d * k + e] += key[d] * beta * (v[e] - seen);
                            o[e] += m[d * k + e] * q[d];
                        }
                    }
                    let r = 1.0 / (o.iter().map(|v| v * v).sum::<f64>() / k as f64 + 1e-5).sqrt();
                    for e in 0..k {
                        let gate = sig(f64::from(rows[s][4 * c + head * k + e]));
                        out.push(o[e] * r * f64::from(self.o_norm[e]) * gate);
                    }
                }
            }
            (out, state)
        }
    }

    #[test]
    fn matches_double_precision() {
        for (heads, width, bound) in [(2, 32, Some(-5.0)), (3, 40, None), (1, 7, Some(-5.0)), (2, 64, None)] {
            let layer = Layer::new(heads, width, bound);
            let x = random(9, 45 * layer.input_len());
            let (out, next, _) = layer.run(&x, &layer.fresh());
            let (want, state) = layer.reference(&x);
            close(&out, &want, 2e-5, "kda rows");
            for head in 0..heads {
                let got: Vec<f32> = (0..width * width)
                    .map(|i| next.state[head * width * width + state_index(width, i / width, i % width)])
                    .collect();
                close(&got, &state[head * width * width..][..width * width], 1e-5, "kda state");
            }
        }
    }

    #[test]
    fn an_all_zero_row_is_finite() {
        let layer = Layer::new(1, 32, Some(-5.0));
        let (out, next, _) = layer.run(&vec![0.0; layer.input_len()], &layer.fresh());
        assert!(out.iter().chain(&next.state).all(|v| *v == 0.0));
    }

    #[test]
    fn zero_rows_keep_the_state() {
        let layer = Layer::new(2, 32, None);
        let start = layer.run(&random(1, 5 * layer.input_len()), &layer.fresh()).1;
        assert_eq!(layer.run(&[], &start).1, start);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn any_cut_and_any_keep_give_the_same_bits(
            rows in 1usize..70, cut in 0usize..70, keep in 0usize..70, width in prop::sample::select(vec![8usize, 32, 36]),
            bounded in any::<bool>(), seed in 0u64..1000,
        ) {
            let (cut, keep) = (cut.min(rows), keep.min(rows));
            let layer = Layer::new(2, width, bounded.then_some(-5.0));
            let start = layer.run(&random(seed + 1, 3 * layer.input_len()), &layer.fresh()).1;
            let x = random(seed, rows * layer.input_len());
            let (scalar, whole) = both_paths(|| layer.run(&x, &start));
            prop_assert_eq!(bits(&scalar.0), bits(&whole.0));
            prop_assert_eq!(&scalar.1, &whole.1);
            // Two calls instead of one.
            let (a, b) = x.split_at(cut * layer.input_len());
            let first = layer.run(a, &start);
            let second = layer.run(b, &first.1);
            prop_assert_eq!(bits(&[first.0, second.0].concat()), bits(&whole.0));
            prop_assert_eq!(&second.1, &whole.1);
            // Replay of the first rows instead of running them.
            let mut next = layer.fresh();
            let len = layer.shape.replay_len();
            let records = Rows::new(&whole.2[..keep * len], len);
            replay(layer.shape, records, &start.window, &start.state, &mut next.window, &mut next.state);
            prop_assert_eq!(&next, &layer.run(&x[..keep * layer.input_len()], &start).1);
        }
    }
}

//! An exact-integer model: every sum is exact in f32, so its order cannot change a bit.
//!
//! Weights are -1, 0 and 1 by a hash of their place, embeddings small whole numbers; nothing is stored. What a model of
//! this architecture does beside sums has no exact integers in it (roots, exponentials, divisions), so [`hooks`] brings
//! providers that stand in for those operations with arithmetic on whole numbers:
//!
//! | operations | here |
//! | --- | --- |
//! | `dense`, `head`, `moe.logits`, `moe.up`, `moe.down`, `moe.combine`, `comm.sum`, `residual`, `hc.dots`, `mla.write`, `embed` | the reference: sums of products of small whole numbers |
//! | `moe.group`, `rows.pick`, `tap`, `sample.candidates` | the reference: no arithmetic, or exact division by a power of two |
//! | `hc.finish`, `hc.post`, `norm`, `final`, `mtp.in`, `moe.pick`, `moe.act`, `mlp.act`, `kda.mix`, `kda.commit`, `mla.dense`, `mla.sparse`, `idx.write` | arithmetic of its own (bits `integer`): sums in i64, then [`fold`]ed into -[`MOST`]`..=`[`MOST`] |
//! | `idx.select` | the reference over whole numbers: exact but for one scale by powers of two that all scores share |
//!
//! So whatever cuts, joins, moves or reorders sums (row splits, K slices, parts over ranks, fusions, sub-blocks, exchanges in
//! halves) must give the same logits and the same state, bit for bit, on any number of ranks. What this model cannot show is
//! the rounding of softmax, sigmoid and norms: there the tiny model has to be compared with itself.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use plugfold_abi::{
    Addressing, BelowObject, Bits, Call, Claim, CommObject, Granted, OpError, Phase, Plan, Provider,
    ProviderObject, Query, SlotState, TextBuf,
};
use plugfold_engine::checkpoint::CheckpointError;
use plugfold_engine::config::ModelConfig;
use plugfold_engine::core::{Core, CoreOptions};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::split::Split;
use plugfold_engine::weights::Source;
use plugfold_kernels::cpu::operands::{Operands, Sequence};
use plugfold_kernels::cpu::rows::Rows;

use crate::goldens::tiny_dir;
use crate::model::cores_on_ranks;

/// The owner of its providers.
pub const OWNER: &str = "integer";
/// Largest activation after a [`fold`].
pub const MOST: i64 = 4;

/// A whole number of any size, folded evenly into -[`MOST`]`..=`[`MOST`].
pub fn fold(value: i64) -> f32 {
    ((value + MOST).rem_euclid(2 * MOST + 1) - MOST) as f32
}

fn whole(value: f32) -> i64 {
    debug_assert!(value.fract() == 0.0 && value.abs() < 16_777_216.0, "{value} is no exact whole number");
    value as i64
}

fn mix(hash: u64, word: u64) -> u64 {
    (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// Weights by name and place.
pub struct Integers;

impl Integers {
    fn numbers(name: &str, rows: Range<usize>, cols: &Range<usize>) -> Vec<f32> {
        let of_name = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| mix(h, u64::from(b)));
        let embedding = name.ends_with("embed_tokens.weight");
        let mut all = Vec::with_capacity(rows.len() * cols.len());
        for row in rows {
            let of_row = mix(of_name, row as u64);
            all.extend(cols.clone().map(|col| match (embedding, mix(of_row, col as u64) >> 40) {
                (true, h) => (h % 5) as f32 - 2.0,
                // A quarter of the places holds 1 or -1, so that sums stay far below 2^24.
                (false, h) if h % 8 < 2 => (h % 8) as f32 * 2.0 - 1.0,
                _ => 0.0,
            }));
        }
        all
    }
}

impl Source for Integers {
    type Error = CheckpointError;
    fn has(&self, _: &str) -> bool {
        true
    }
    fn is_bf16(&self, _: &str) -> bool {
        true
    }
    fn read_f32(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        Ok(Self::numbers(name, rows, &cols))
    }
    fn read_bf16(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<bf16>, CheckpointError> {
        Ok(Self::numbers(name, rows, &cols).into_iter().map(bf16::from_f32).collect())
    }
}

/// The sizes of the tiny model.
///
/// # Panics
/// When its configuration cannot be read.
pub fn config() -> ModelConfig {
    ModelConfig::from_dir(&tiny_dir()).unwrap_or_else(|e| panic!("{e}"))
}

/// The providers of whole numbers, beneath what `more` adds.
///
/// # Panics
/// When a hook is not one of this build.
pub fn hooks(more: impl FnOnce(&mut Hooks)) -> Hooks {
    let mut hooks = Hooks::default();
    for (op, run) in table() {
        let added = hooks.add_object(OWNER, ProviderObject::new(Integer { op, run }));
        added.unwrap_or_else(|e| panic!("{e}"));
    }
    more(&mut hooks);
    hooks
}

/// One rank of the model.
///
/// # Errors
/// What a plugin among `more` is refused for.
pub fn core(
    slots: usize,
    ranks: Split,
    comm: Option<Arc<CommObject>>,
    more: impl FnOnce(&mut Hooks),
) -> Result<Core, String> {
    let hooks = Arc::new(hooks(more));
    let options = CoreOptions { slots, context: Some(256), hooks, ..CoreOptions::default() };
    load(&options, ranks, comm)
}

/// As [`core()`], with options of one's own; their hooks have to hold [`hooks`].
///
/// # Errors
/// As [`core()`].
pub fn load(options: &CoreOptions, ranks: Split, comm: Option<Arc<CommObject>>) -> Result<Core, String> {
    Core::from_source(config(), &Integers, true, "exact integers".into(), options, ranks, comm)
        .map_err(|e| e.to_string())
}

/// Runs something on every rank of the model, each in a thread; gives what each came to, in rank order. `more` adds a
/// rank's further hooks.
///
/// # Panics
/// When a rank cannot be loaded or panics.
pub fn on_ranks<T: Send>(
    slots: usize,
    ranks: usize,
    more: impl Fn(usize, &mut Hooks) + Sync,
    run: impl Fn(&mut Core) -> T + Sync,
) -> Vec<T> {
    let load = |split: Split, comm| core(slots, split, comm, |hooks| more(split.rank, hooks));
    cores_on_ranks(ranks, load, run)
}

type Run = fn(&Operands<'_>) -> Result<(), OpError>;

fn table() -> BTreeMap<&'static str, Run> {
    let all: [(&'static str, Run); 13] = [
        ("hc.finish", hc_finish),
        ("hc.post", hc_post),
        ("norm", norm),
        ("final", last),
        ("mtp.in", mtp_in),
        ("moe.pick", moe_pick),
        ("moe.act", act),
        ("mlp.act", act),
        ("kda.mix", kda_mix),
        ("kda.commit", kda_commit),
        ("mla.dense", mla_dense),
        ("mla.sparse", mla_sparse),
        ("idx.write", idx_write),
    ];
    all.into_iter().collect()
}

struct Integer {
    op: &'static str,
    run: Run,
}

impl Provider for Integer {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.op.into())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::own("integer"))))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        (self.run)(&Operands::new(self.op, call)?)
    }
}

fn sum(values: &[f32]) -> i64 {
    values.iter().map(|v| whole(*v)).sum()
}

/// Streams and dots to a block's input; what comes back goes to one stream more than it came from.
fn hc_finish(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, d, rows) = (o.size(0, "N")?, o.size(1, "D")?, o.rows());
    let dots = o.input::<f32>(0, "dots", rows, (2 + n) * n + 1)?;
    let x = o.input::<f32>(1, "x", rows, n * d)?;
    let mut h = o.output::<f32>(0, "h", rows, d)?;
    let mut post = o.output::<f32>(1, "post", rows, n)?;
    let mut comb = o.output::<f32>(2, "comb", rows, n * n)?;
    for r in 0..rows {
        let (x, dots) = (x.row(r), dots.row(r));
        for (i, h) in h.row_mut(r).iter_mut().enumerate() {
            let streams: i64 = (0..n).map(|s| (s as i64 + 1) * whole(x[s * d + i])).sum();
            *h = fold(streams + whole(dots[i % dots.len()]));
        }
        for (s, p) in post.row_mut(r).iter_mut().enumerate() {
            *p = fold(whole(dots[s]) + 1);
        }
        for (i, c) in comb.row_mut(r).iter_mut().enumerate() {
            *c = f32::from(u8::from(i / n == i % n || (i / n + 1) % n == i % n));
        }
    }
    Ok(())
}

fn hc_post(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, d, parts_n, rows) = (o.size(0, "N")?, o.size(1, "D")?, o.size(2, "P")?, o.rows());
    let x = o.input::<f32>(0, "x", rows, n * d)?;
    let parts = o.input::<f32>(1, "parts", rows, parts_n * d)?;
    let post = o.input::<f32>(2, "post", rows, n)?;
    let comb = o.input::<f32>(3, "comb", rows, n * n)?;
    let mut out = o.output::<f32>(0, "x'", rows, n * d)?;
    for r in 0..rows {
        let (x, parts, post, comb) = (x.row(r), parts.row(r), post.row(r), comb.row(r));
        for (j, out) in out.row_mut(r).chunks_mut(d).enumerate() {
            for (i, out) in out.iter_mut().enumerate() {
                let streams: i64 = (0..n).map(|s| whole(comb[s * n + j]) * whole(x[s * d + i])).sum();
                let block: i64 = (0..parts_n).map(|p| whole(parts[p * d + i])).sum();
                *out = fold(streams + whole(post[j]) * block);
            }
        }
    }
    Ok(())
}

fn norm(o: &Operands<'_>) -> Result<(), OpError> {
    let (k, rows) = (o.size(0, "k")?, o.rows());
    let x = o.input::<f32>(0, "rows", rows, k)?;
    let mut out = o.output::<f32>(0, "rows", rows, k)?;
    for r in 0..rows {
        let all = sum(x.row(r));
        for (out, v) in out.row_mut(r).iter_mut().zip(x.row(r)) {
            *out = fold(2 * whole(*v) + all);
        }
    }
    Ok(())
}

fn last(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, d, rows) = (o.size(0, "N")?, o.size(1, "D")?, o.rows());
    let x = o.input::<f32>(0, "x", rows, n * d)?;
    let mut out = o.output::<f32>(0, "rows", rows, d)?;
    for r in 0..rows {
        for (i, out) in out.row_mut(r).iter_mut().enumerate() {
            *out = fold((0..n).map(|s| (s as i64 + 1) * whole(x.row(r)[s * d + i])).sum());
        }
    }
    Ok(())
}

/// The token's own embedding is its id in digits: the table is the reference's business.
fn mtp_in(o: &Operands<'_>) -> Result<(), OpError> {
    let (d, rows) = (o.size(0, "D")?, o.rows());
    let hidden = o.input::<f32>(0, "hidden", rows, d)?;
    let mut out = o.output::<f32>(0, "rows", rows, 2 * d)?;
    for r in 0..rows {
        let at = o.first_row() + r;
        let token = i64::from(o.round().tokens[at]);
        let zero = o.dim(2) != 0 && o.round().positions[at] == 0;
        let (embedding, after) = out.row_mut(r).split_at_mut(d);
        for (i, e) in embedding.iter_mut().enumerate() {
            *e = if zero { 0.0 } else { fold(token * (i as i64 + 1)) };
        }
        for (out, v) in after.iter_mut().zip(hidden.row(r)) {
            *out = fold(whole(*v));
        }
    }
    Ok(())
}

/// Expert ids by falling logit, ties to the lower id; weights count down from the first.
fn moe_pick(o: &Operands<'_>) -> Result<(), OpError> {
    let (e, k, rows) = (o.size(0, "E")?, o.size(1, "k")?, o.rows());
    let logits = o.input::<f32>(0, "logits", rows, e)?;
    let mut ids = o.output::<i32>(0, "ids", rows, k)?;
    let mut weights = o.output::<f32>(1, "weights", rows, k)?;
    for r in 0..rows {
        let mut order: Vec<usize> = (0..e).collect();
        order.sort_by_key(|i| (-whole(logits.row(r)[*i]), *i));
        for (i, id) in ids.row_mut(r).iter_mut().enumerate() {
            *id = order[i] as i32;
        }
        for (i, w) in weights.row_mut(r).iter_mut().enumerate() {
            *w = (k - i) as f32;
        }
    }
    Ok(())
}

fn act(o: &Operands<'_>) -> Result<(), OpError> {
    let width = o.size(0, "I")?;
    let rows = o.call.inputs[0].rows as usize;
    let both = o.input::<f32>(0, "gate and up", rows, 2 * width)?;
    let mut out = o.output::<f32>(0, "rows", rows, width)?;
    for r in 0..rows {
        let (gate, up) = both.row(r).split_at(width);
        for (out, (g, u)) in out.row_mut(r).iter_mut().zip(gate.iter().zip(up)) {
            *out = fold(whole(*g) * whole(*u) + whole(*u));
        }
    }
    Ok(())
}

/// Sizes of linear attention on this rank.
#[derive(Clone, Copy)]
struct Kda {
    heads: usize,
    width: usize,
    taps: usize,
}

impl Kda {
    fn of(o: &Operands<'_>) -> Result<Self, OpError> {
        Ok(Self { heads: o.size(0, "H")?, width: o.size(1, "K")?, taps: o.size(2, "T")? })
    }
    fn channels(self) -> usize {
        self.heads * self.width
    }
    fn replay_len(self) -> usize {
        6 * self.channels() + self.heads
    }

    /// One token: shifts the window, updates the state, gives the row.
    fn step(self, qkv: &[f32], window: &mut [f32], state: &mut [f32], mut out: Option<&mut [f32]>) {
        let (c, w) = (self.channels(), self.width);
        let past = window.len() / (3 * c);
        let mixed: Vec<i64> = (0..3 * c)
            .map(|i| {
                whole(qkv[i]) + (0..past).map(|t| (t as i64 + 1) * whole(window[t * 3 * c + i])).sum::<i64>()
            })
            .map(|v| whole(fold(v)))
            .collect();
        if past > 0 {
            window.copy_within(3 * c.., 0);
            window[(past - 1) * 3 * c..].copy_from_slice(qkv);
        }
        for h in 0..self.heads {
            let part = |which: usize, i: usize| mixed[which * c + h * w + i];
            let state = &mut state[h * w * w..(h + 1) * w * w];
            for i in 0..w {
                for j in 0..w {
                    let s = &mut state[i * w + j];
                    *s = fold(whole(*s) + part(1, i) * part(2, j));
                }
            }
            if let Some(out) = out.as_deref_mut() {
                for j in 0..w {
                    let sum: i64 = (0..w).map(|i| part(0, i) * whole(state[i * w + j])).sum();
                    out[h * w + j] = fold(sum);
                }
            }
        }
    }
}

fn kda_mix(o: &Operands<'_>) -> Result<(), OpError> {
    let kda = Kda::of(o)?;
    let (rows, c) = (o.rows(), kda.channels());
    let qkv = o.input::<f32>(0, "qkv", rows, 3 * c)?;
    let gate = o.input::<f32>(2, "gate", rows, c)?;
    let state = o.state(0, "kda.state", kda.heads * kda.width * kda.width)?;
    let window = o.state(1, "kda.conv", (kda.taps - 1) * 3 * c)?;
    let replay = o.cache(2, "kda.replay", kda.replay_len(), Addressing::State)?;
    let mut out = o.output::<f32>(0, "rows", rows, c)?;
    for s in o.sequences()? {
        // SAFETY: the records of this call's sequences are this call's alone; the two buffers have different parities.
        let (from_state, from_window, state, window) = unsafe {
            (state.record(s.at)?, window.record(s.at)?, state.next_record(s.at)?, window.next_record(s.at)?)
        };
        state.copy_from_slice(from_state);
        window.copy_from_slice(from_window);
        for (i, r) in s.rows.clone().enumerate() {
            if o.call.phase == Phase::Window {
                let at = SlotState { slot: s.at.slot, parity: 0 };
                // SAFETY: as above; a slot occurs once in a call.
                let mut record = unsafe { replay.write(at, i, 1)? };
                record.row_mut(0)[..3 * c].copy_from_slice(qkv.row(r));
            }
            kda.step(qkv.row(r), window, state, Some(out.row_mut(r)));
            for (out, g) in out.row_mut(r).iter_mut().zip(gate.row(r)) {
                *out = fold(whole(*out) + whole(*g));
            }
        }
    }
    Ok(())
}

fn kda_commit(o: &Operands<'_>) -> Result<(), OpError> {
    let kda = Kda::of(o)?;
    let c = kda.channels();
    let state = o.state(0, "kda.state", kda.heads * kda.width * kda.width)?;
    let window = o.state(1, "kda.conv", (kda.taps - 1) * 3 * c)?;
    let replay = o.cache(2, "kda.replay", kda.replay_len(), Addressing::State)?;
    let round = o.round();
    for i in o.call.seqs.within(round.seqs()) {
        let (keep, all) = (round.seq_keep[i] as usize, round.seq_rows[i] as usize);
        if keep == all {
            continue;
        }
        let at = SlotState { slot: round.seq_slot[i], parity: round.seq_parity[i] };
        // SAFETY: as in `kda_mix`.
        let (from_state, from_window, state, window) = unsafe {
            (state.record(at)?, window.record(at)?, state.next_record(at)?, window.next_record(at)?)
        };
        state.copy_from_slice(from_state);
        window.copy_from_slice(from_window);
        for row in 0..keep {
            // SAFETY: as above.
            let record = unsafe { replay.read(SlotState { parity: 0, ..at }, row, 1)? };
            kda.step(&record.row(0)[..3 * c], window, state, None);
        }
    }
    Ok(())
}

/// Attention without a softmax: a key's folded score times its value, summed over the keys of a row.
fn attend(
    o: &Operands<'_>,
    keys: impl Fn(usize, usize) -> Result<Vec<usize>, OpError>,
) -> Result<(), OpError> {
    let (heads, d, v, rows) = (o.size(0, "H")?, o.size(1, "d")?, o.size(2, "v")?, o.rows());
    let q = o.input::<f32>(0, "q", rows, heads * d)?;
    let cache = o.cache(0, "mla.kv", heads * (d + v), Addressing::Linear)?;
    let mut out = o.output::<f32>(0, "rows", rows, heads * v)?;
    for s in o.sequences()? {
        let Sequence { at, start, .. } = s;
        // SAFETY: rows up to the call's own were written by earlier calls; nothing writes them during this one.
        let kept = unsafe { cache.read(at, 0, start + s.rows.len())? };
        for (i, r) in s.rows.clone().enumerate() {
            let keys = keys(r, start + i)?;
            for (h, out) in out.row_mut(r).chunks_mut(v).enumerate() {
                weigh(&q.row(r)[h * d..(h + 1) * d], &kept, &keys, h * (d + v), out);
            }
        }
    }
    Ok(())
}

fn weigh(q: &[f32], kept: &Rows<'_, f32>, keys: &[usize], at: usize, out: &mut [f32]) {
    let mut sums = vec![0i64; out.len()];
    for key in keys {
        let row = &kept.row(*key)[at..];
        let score: i64 = q.iter().zip(row).map(|(a, b)| whole(*a) * whole(*b)).sum();
        let weight = whole(fold(score));
        for (s, value) in sums.iter_mut().zip(&row[q.len()..]) {
            *s += weight * whole(*value);
        }
    }
    for (out, s) in out.iter_mut().zip(sums) {
        *out = fold(s);
    }
}

fn mla_dense(o: &Operands<'_>) -> Result<(), OpError> {
    attend(o, |_, position| Ok((0..=position).collect()))
}

fn mla_sparse(o: &Operands<'_>) -> Result<(), OpError> {
    let (rows, most) = (o.rows(), o.size(4, "L")?);
    let lists = o.input::<i32>(1, "lists", rows, most)?;
    let counts = o.input::<i32>(2, "counts", rows, 1)?;
    attend(o, |r, _| Ok(lists.row(r)[..counts.row(r)[0] as usize].iter().map(|k| *k as usize).collect()))
}

/// Token rows: folded key, then the gate; a finished pool: the folded sum of its keys.
fn idx_write(o: &Operands<'_>) -> Result<(), OpError> {
    let (d, pool, rows) = (o.size(0, "dI")?, o.size(1, "kp")?, o.rows());
    let key = o.input::<f32>(0, "key", rows, d)?;
    let gate = o.input::<f32>(1, "gate", rows, d)?;
    let tokens = o.cache(0, "idx.token", 2 * d, Addressing::Linear)?;
    let pools = o.cache(1, "idx.pool", d, Addressing::Linear)?;
    for s in o.sequences()? {
        for (i, r) in s.rows.clone().enumerate() {
            let position = s.start + i;
            {
                // SAFETY: the rows of this call's sequences are this call's alone.
                let mut row = unsafe { tokens.write(s.at, position, 1)? };
                let (k, g) = row.row_mut(0).split_at_mut(d);
                for (out, v) in k.iter_mut().zip(key.row(r)) {
                    *out = fold(whole(*v));
                }
                for (out, v) in g.iter_mut().zip(gate.row(r)) {
                    *out = fold(whole(*v));
                }
            }
            if (position + 1).is_multiple_of(pool) {
                // SAFETY: as above.
                let (of, mut out) = unsafe {
                    (tokens.read(s.at, position + 1 - pool, pool)?, pools.write(s.at, position / pool, 1)?)
                };
                for (j, out) in out.row_mut(0).iter_mut().enumerate() {
                    *out = fold((0..pool).map(|p| whole(of.row(p)[j])).sum());
                }
            }
        }
    }
    Ok(())
}

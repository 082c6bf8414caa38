//! The sparse indexer: `idx.write`, `idx.select`.

use plugfold_abi::{Addressing, OpError};

use super::operands::{Operands, Sequence};
use crate::graphs::reach;
use crate::kernel::{Arg, SHARED_MOST};
use crate::machine::Scratch;
use crate::segments::Tables;

/// Most tokens of a pool: `MAX_POOL` of the source.
const MAX_POOL: usize = 16;
/// Most pools whose scores a block makes, one a thread.
const POOLS: usize = 128;
/// Heads that it multiplies them with at a time.
const HEADS: usize = 32;
/// Numbers between rows in its shared memory: `ROW_GAP` of the source.
const ROW_GAP: usize = 4;
/// Pools of a group: `GROUP` of the source.
const GROUP: usize = 4;
/// Widest head of the indexer that fits the shared memory of a block of `idx_scores`, and sixteen of them that of `idx_write`.
const MAX_WIDTH: usize = 240;

pub(super) fn write(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (width, pool, rows) = (o.size(0, "dI")?, o.size(1, "kp")?, o.rows());
    if pool > MAX_POOL {
        return Err(o.error(&format!("pools of {pool} tokens, at most {MAX_POOL} are supported")));
    }
    if width > MAX_WIDTH {
        return Err(o.error(&format!("keys of {width} channels, at most {MAX_WIDTH} are supported")));
    }
    let key = o.input(0, "key", rows, width)?;
    let gate = o.input(1, "gate", rows, width)?;
    let weight = o.vector(0, "idx.k_norm", width)?;
    let bias = o.vector(1, "idx.k_bias", width)?;
    let ape = o.vector(2, "idx.ape", pool * width)?;
    let sequences = o.sequences()?;
    let end = |s: &Sequence| s.start + s.rows.len();
    let tokens = o.cache(0, "idx.token", 2 * width, Addressing::Linear, end, &sequences)?;
    let pools = o.cache(1, "idx.pool", width, Addressing::Linear, |s| end(s) / pool, &sequences)?;
    if rows == 0 {
        return Ok(());
    }
    let (round, first_row) = (Arg::Pointer(o.round()?), Arg::Word(o.first_row() as u32));
    let (tokens, pools) =
        (Arg::Struct("Cache", bytemuck::bytes_of(&tokens)), Arg::Struct("Cache", bytemuck::bytes_of(&pools)));
    let args = [
        round,
        first_row,
        Arg::Pointer(key.at),
        Arg::Word(key.stride),
        Arg::Pointer(gate.at),
        Arg::Word(gate.stride),
        Arg::Pointer(weight),
        Arg::Pointer(bias),
        Arg::Pointer(ape),
        Arg::Float(o.param(0)),
        Arg::Word(width as u32),
        Arg::Word(pool as u32),
        tokens,
        pools,
    ];
    o.launch("idx_write", [rows, 1, 1], 128, (pool * 2 * width * 4) as u32, &args)
}

pub(super) fn select(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (heads, width, pool) = (o.size(0, "HI")?, o.size(1, "dI")?, o.size(2, "kp")?);
    let (top, longest, rows) = (o.size(3, "top-k")?, o.size(4, "L")?, o.rows());
    let most = top + pool - 1;
    if !top.is_multiple_of(pool) || longest < most {
        return Err(
            o.error(&format!("{top} tokens in pools of {pool} may give lists of {most}, L is {longest}"))
        );
    }
    if width > MAX_WIDTH {
        return Err(o.error(&format!("index heads of {width} channels, at most {MAX_WIDTH} are supported")));
    }
    let q = o.input(0, "q", rows, heads * width)?;
    let w = o.input(1, "w", rows, heads)?;
    let lists = o.output_i32(0, "lists", rows, longest)?;
    let counts = o.output_i32(1, "counts", rows, 1)?;
    let sequences = o.sequences()?;
    let full = |s: &Sequence| (s.start + s.rows.len()) / pool;
    let pools = o.cache(0, "idx.pool", width, Addressing::Linear, full, &sequences)?;
    if rows == 0 {
        return Ok(());
    }
    // A row of scores for the longest sequence, rounded so that a recording serves for many lengths.
    let stride = reach(o.table()).div_ceil(pool).next_multiple_of(POOLS);
    let scratch = Scratch::pieces(&[rows * stride * 4, rows * stride / GROUP * 4]).take(o.machine)?;
    let (keys, tops) = (Arg::Pointer(scratch[0]), Arg::Pointer(scratch[1]));
    let (round, first_row) = (Arg::Pointer(o.round()?), Arg::Word(o.first_row() as u32));
    let (budget, pool) = (Arg::Word((top / pool) as u32), Arg::Word(pool as u32));
    let args = [
        round,
        first_row,
        Arg::Pointer(q.at),
        Arg::Word(q.stride),
        Arg::Pointer(w.at),
        Arg::Word(w.stride),
        Arg::Word(heads as u32),
        Arg::Word(width as u32),
        pool,
        budget,
        Arg::Float(1.0 / (heads as f32).sqrt()),
        Arg::Float(1.0 / (width as f32).sqrt()),
        Arg::Struct("Cache", bytemuck::bytes_of(&pools)),
        keys,
        tops,
        Arg::Long(stride as u64),
    ];
    let shared = |pools: usize| (pools + HEADS) * (width.next_multiple_of(16) + ROW_GAP) * size_of::<f32>();
    let threads =
        [POOLS, POOLS / 2].into_iter().find(|n| shared(*n) <= SHARED_MOST as usize).unwrap_or(POOLS / 4);
    o.launch("idx_scores", [rows, stride / threads, 1], threads as u32, shared(threads) as u32, &args)?;
    let args = [
        round,
        first_row,
        pool,
        budget,
        Arg::Word(longest as u32),
        keys,
        tops,
        Arg::Long(stride as u64),
        Arg::Pointer(lists.at),
        Arg::Word(lists.stride),
        Arg::Pointer(counts.at),
        Arg::Word(counts.stride),
    ];
    o.launch("idx_select", [rows, 1, 1], 512, 0, &args)
}

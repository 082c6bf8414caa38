//! The sparse indexer: `idx.write`, `idx.select`.

use plugfold_abi::{Addressing, OpError};
use smallvec::{SmallVec, smallvec};

use super::operands::{FEW, Operands};
use crate::cpu::math::indexer::{self, Shape};
use crate::cpu::par;
use crate::cpu::rows::Rows;

pub(super) fn write(o: &Operands<'_>) -> Result<(), OpError> {
    let (width, pool) = (o.size(0, "dI")?, o.size(1, "kp")?);
    let key = o.input::<f32>(0, "key", o.rows(), width)?;
    let gate = o.input::<f32>(1, "gate", o.rows(), width)?;
    let weight = o.vector(0, "idx.k_norm", width)?;
    let bias = o.vector(1, "idx.k_bias", width)?;
    let ape = o.vector(2, "idx.ape", pool * width)?;
    let tokens = o.cache(0, "idx.token", 2 * width, Addressing::Linear)?;
    let pools = o.cache(1, "idx.pool", width, Addressing::Linear)?;
    for s in o.sequences()? {
        let count = s.rows.len();
        let (key, gate) = (key.range(s.rows.start, count), gate.range(s.rows.start, count));
        // SAFETY: the rows of this call's sequences are this call's alone.
        indexer::token_rows(key, gate, weight, bias, o.param(0), unsafe {
            tokens.write(s.at, s.start, count)?
        });
        let (first, end) = (s.start / pool, (s.start + count) / pool);
        // SAFETY: as above.
        let mut keys = unsafe { pools.write(s.at, first, end - first)? };
        for b in first..end {
            // SAFETY: the token rows were written above or by earlier calls, and their writer is gone.
            let rows = unsafe { tokens.read(s.at, b * pool, pool)? };
            indexer::pool_key(rows, ape, keys.row_mut(b - first));
        }
    }
    Ok(())
}

pub(super) fn select(o: &Operands<'_>) -> Result<(), OpError> {
    let shape = Shape {
        heads: o.size(0, "HI")?,
        width: o.size(1, "dI")?,
        pool: o.size(2, "kp")?,
        top: o.size(3, "top-k")?,
    };
    let longest = o.size(4, "L")?;
    if !shape.top.is_multiple_of(shape.pool) || longest < shape.most_keys() {
        return Err(o.error(&format!(
            "{} tokens in pools of {} may give lists of {}, L is {longest}",
            shape.top,
            shape.pool,
            shape.most_keys()
        )));
    }
    let q = o.input::<f32>(0, "q", o.rows(), shape.heads * shape.width)?;
    let w = o.input::<f32>(1, "w", o.rows(), shape.heads)?;
    let cache = o.cache(0, "idx.pool", shape.width, Addressing::Linear)?;
    let lists = o.output::<i32>(0, "lists", o.rows(), longest)?;
    let counts = o.output::<i32>(1, "counts", o.rows(), 1)?;
    let mut rows: SmallVec<[Option<(usize, Rows<'_>)>; FEW]> = smallvec![None; o.rows()];
    let mut work = 0;
    for s in o.sequences()? {
        for (i, row) in s.rows.clone().enumerate() {
            let position = s.start + i;
            // SAFETY: pools up to the row's position were written by earlier calls; nothing writes them during this one.
            let pools = unsafe { cache.read(s.at, 0, (position + 1) / shape.pool)? };
            work += pools.rows() * shape.heads * shape.width;
            rows[row] = Some((position, pools));
        }
    }
    let items = lists.row_pieces(1).zip(counts.row_pieces(1));
    par::each(items, work, |r, (mut list, mut count)| {
        if let Some((position, pools)) = rows[r] {
            let found = indexer::select(shape, position, q.row(r), w.row(r), pools, list.row_mut(0));
            count.row_mut(0)[0] = found as i32;
        }
    });
    Ok(())
}

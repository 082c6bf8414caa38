//! Latent attention in per-head form: `mla.write`, `mla.dense`, `mla.sparse`.

use plugfold_abi::{Addressing, Call, OpError};
use smallvec::SmallVec;

use super::operands::{Cache, FEW, Operands, Sequences};
use crate::cpu::math::mla::{Keys, Shape, attention};
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::scratch;

/// From this many rows on a sequence's latents are expanded straight into its cache rows; the latents of shorter ones
/// are expanded together, so that the weight is read once for all of them.
const ALONE: usize = 32;

struct Layer<'c> {
    shape: Shape,
    rank: usize,
    cache: Cache<'c>,
}

fn layer<'c>(o: &Operands<'c>) -> Result<Layer<'c>, OpError> {
    let shape = Shape { heads: o.size(0, "H")?, key: o.size(1, "d")?, value: o.size(2, "v")? };
    let cache = o.cache(0, "mla.kv", shape.row_len(), Addressing::Linear)?;
    Ok(Layer { shape, rank: o.size(3, "r")?, cache })
}

pub(super) fn write(o: &Operands<'_>) -> Result<(), OpError> {
    let Layer { shape, rank, .. } = layer(o)?;
    let w = o.matrix(0, "mla.kv_b", shape.row_len(), rank)?;
    write_by(o, |x, out| w.multiply(o, x, None, out))
}

/// A call of `mla.write` in the reference's cache format, for weights in a format of a plugin: `matrix` finds the product
/// with `mla.kv_b`, given its outputs `H * (d + v)` and inputs r.
///
/// # Errors
/// Operands of another shape, or what `matrix` fails with.
pub fn write_latents<'c, M: Fn(Rows<'_>, RowsMut<'_>)>(
    call: &'c Call<'c>,
    matrix: impl FnOnce(&Operands<'c>, usize, usize) -> Result<M, OpError>,
) -> Result<(), OpError> {
    let o = Operands::new("mla.write", call)?;
    let Layer { shape, rank, .. } = layer(&o)?;
    let multiply = matrix(&o, shape.row_len(), rank)?;
    write_by(&o, |x, out| {
        multiply(x, out);
        Ok(())
    })
}

fn write_by(
    o: &Operands<'_>,
    multiply: impl Fn(Rows<'_>, RowsMut<'_>) -> Result<(), OpError>,
) -> Result<(), OpError> {
    let Layer { shape, rank, cache } = layer(o)?;
    let latent = o.input::<f32>(0, "latent", o.rows(), rank)?;
    let (alone, together): (Sequences, Sequences) =
        o.sequences()?.into_iter().partition(|s| s.rows.len() >= ALONE);
    for s in alone {
        // SAFETY: the rows of this call's sequences are this call's alone.
        let out = unsafe { cache.write(s.at, s.start, s.rows.len())? };
        multiply(latent.range(s.rows.start, s.rows.len()), out)?;
    }
    let rows = together.iter().map(|s| s.rows.len()).sum::<usize>();
    let mut gathered = scratch::zeros::<f32>(rows * rank);
    let all = together.iter().flat_map(|s| s.rows.clone());
    gathered.chunks_exact_mut(rank).zip(all).for_each(|(to, r)| to.copy_from_slice(latent.row(r)));
    let mut expanded = scratch::zeros::<f32>(rows * shape.row_len());
    multiply(Rows::new(&gathered, rank), RowsMut::new(&mut expanded, shape.row_len()))?;
    let mut src = expanded.chunks_exact(shape.row_len());
    for s in together {
        // SAFETY: as above.
        let mut out = unsafe { cache.write(s.at, s.start, s.rows.len())? };
        for (r, src) in (0..s.rows.len()).zip(&mut src) {
            out.row_mut(r).copy_from_slice(src);
        }
    }
    Ok(())
}

/// Runs attention sequence by sequence; `keys(row of the call, position)` are a row's keys.
fn attend<'c>(
    o: &Operands<'c>,
    keys: impl Fn(usize, usize) -> Result<Keys<'c>, OpError>,
) -> Result<(), OpError> {
    let Layer { shape, cache, .. } = layer(o)?;
    let q = o.input::<f32>(0, "q", o.rows(), shape.heads * shape.key)?;
    let mut rest = o.output::<f32>(0, "rows", o.rows(), shape.heads * shape.value)?;
    let mut done = 0;
    for s in o.sequences()? {
        let (_, after) = rest.split_rows_at(s.rows.start - done);
        let (out, after) = after.split_rows_at(s.rows.len());
        (rest, done) = (after, s.rows.end);
        // SAFETY: rows up to the call's own were written by earlier calls; nothing writes them during this one.
        let kv = unsafe { cache.read(s.at, 0, s.start + s.rows.len())? };
        let keys = s
            .rows
            .clone()
            .enumerate()
            .map(|(i, row)| keys(row, s.start + i))
            .collect::<Result<SmallVec<[_; FEW]>, _>>()?;
        attention(q.range(s.rows.start, s.rows.len()), kv, shape, |r| keys[r], o.param(0), out);
    }
    Ok(())
}

pub(super) fn dense(o: &Operands<'_>) -> Result<(), OpError> {
    attend(o, |_, position| Ok(Keys::Below(position + 1)))
}

/// The lists of keys of a call of `mla.sparse`.
pub struct Lists<'o, 'c> {
    operands: &'o Operands<'c>,
    keys: Rows<'c, i32>,
    counts: Rows<'c, i32>,
}

impl<'o, 'c> Lists<'o, 'c> {
    /// Inputs 1 and 2 of a call, whose lists hold at most `longest` keys.
    ///
    /// # Errors
    /// Inputs of another shape.
    pub fn new(operands: &'o Operands<'c>, longest: usize) -> Result<Self, OpError> {
        let keys = operands.input::<i32>(1, "lists", operands.rows(), longest)?;
        let counts = operands.input::<i32>(2, "counts", operands.rows(), 1)?;
        Ok(Self { operands, keys, counts })
    }

    /// The keys of a row of the call, which lies at `position`.
    ///
    /// # Errors
    /// A list that does not ascend, is empty, or goes past the row's position.
    pub fn keys(&self, row: usize, position: usize) -> Result<Keys<'c>, OpError> {
        let (count, longest) = (self.counts.row(row)[0], self.keys.cols());
        if count < 1 || count as usize > longest {
            return Err(self
                .operands
                .error(&format!("row {row} has {count} keys, must have 1 to {longest}")));
        }
        let list = &self.keys.row(row)[..count as usize];
        let ascending = list.windows(2).all(|w| w[0] < w[1]);
        let (first, last) = (list[0], list[list.len() - 1]);
        if !ascending || first < 0 || last as usize > position {
            return Err(self.operands.error(&format!(
                "the keys {first}..={last} of row {row} must ascend from 0 or more to at most its position {position}"
            )));
        }
        Ok(Keys::Listed(list))
    }
}

pub(super) fn sparse(o: &Operands<'_>) -> Result<(), OpError> {
    let lists = Lists::new(o, o.size(4, "L")?)?;
    attend(o, |row, position| lists.keys(row, position))
}

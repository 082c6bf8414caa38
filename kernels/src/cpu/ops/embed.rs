//! Token ids to rows: `embed`, `mtp.in`.

use plugfold_abi::{FIRST_VIRTUAL_ID, OpError};

use super::operands::Operands;
use super::weights::Table;
use crate::cpu::math::norm::rms;
use crate::cpu::rows::{Rows, RowsMut};

/// Writes the embedding of table row `row` to `out`: the vocabulary's, or the row that the table gives an address for.
fn lookup(
    o: &Operands<'_>,
    row: usize,
    table: Table<'_>,
    vocab: usize,
    out: &mut [f32],
) -> Result<(), OpError> {
    let round = o.round();
    let id = round.tokens[row];
    if !round.embeds.is_empty() {
        let Some(&address) = round.embeds.get(row) else {
            let text =
                format!("round table: embeds has {} entries for {} rows", round.embeds.len(), round.rows());
            return Err(o.error(&text));
        };
        if address != 0 {
            if !address.is_multiple_of(align_of::<f32>()) {
                return Err(o.error(&format!(
                    "embedding of row {row} lies at {address:#x}, must be a multiple of 4"
                )));
            }
            // SAFETY: the round table promises `hidden_size` numbers at this address for the length of the call; `out` is
            // that long.
            let src = unsafe { std::slice::from_raw_parts(address as *const f32, out.len()) };
            out.copy_from_slice(src);
            return Ok(());
        }
    }
    if id as usize >= vocab {
        let why = if id >= FIRST_VIRTUAL_ID { "a virtual id without an embedding" } else { "outside" };
        return Err(o.error(&format!("token {id} of row {row} is {why}; the vocabulary has {vocab}")));
    }
    table.look_up(id as usize, out);
    Ok(())
}

pub(super) fn embed(o: &Operands<'_>) -> Result<(), OpError> {
    let (streams, width, vocab) = (o.size(0, "N")?, o.size(1, "D")?, o.size(2, "V")?);
    let table = o.table(0, "embed", vocab, width)?;
    let mut out = o.output::<f32>(0, "x", o.rows(), streams * width)?;
    for r in 0..out.rows() {
        let (first, rest) = out.row_mut(r).split_at_mut(width);
        lookup(o, o.first_row() + r, table, vocab, first)?;
        rest.chunks_exact_mut(width).for_each(|stream| stream.copy_from_slice(first));
    }
    Ok(())
}

pub(super) fn mtp_in(o: &Operands<'_>) -> Result<(), OpError> {
    let (width, vocab, zero_first) = (o.size(0, "D")?, o.size(1, "V")?, o.dim(2) != 0);
    let hidden = o.input::<f32>(0, "hidden", o.rows(), width)?;
    let table = o.table(0, "embed", vocab, width)?;
    let enorm = o.vector(1, "mtp.enorm", width)?;
    let hnorm = o.vector(2, "mtp.hnorm", width)?;
    let eps = o.param(0);
    let (mut token, rest) = o.output::<f32>(0, "rows", o.rows(), 2 * width)?.split_columns_at(width);
    let mut row = vec![0.0; width];
    for r in 0..token.rows() {
        let at = o.first_row() + r;
        if zero_first && o.round().positions[at] == 0 {
            token.row_mut(r).fill(0.0);
        } else {
            lookup(o, at, table, vocab, &mut row)?;
            rms(Rows::new(&row, width), Some(enorm), eps, RowsMut::new(token.row_mut(r), width));
        }
    }
    rms(hidden, Some(hnorm), eps, rest);
    Ok(())
}

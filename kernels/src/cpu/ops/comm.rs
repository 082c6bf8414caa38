//! The one exchange of the reference: `comm.sum`.

use plugfold_abi::{Comm, OpError};

use super::operands::Operands;

/// All ranks' partial sums side by side, in rank order. They are added by whoever reads them, in that order.
pub(super) fn sum(o: &Operands<'_>) -> Result<(), OpError> {
    let (d, ranks) = (o.size(0, "D")?, o.size(1, "P")?);
    let rows = o.rows();
    let mine = o.input::<f32>(0, "partial", rows, d)?;
    let mut parts = o.output::<f32>(0, "parts", rows, ranks * d)?;
    let Some(comm) = o.call.comm else {
        if ranks != 1 {
            return Err(o.error(&format!("P is {ranks}, but this engine has one rank")));
        }
        for r in 0..rows {
            parts.row_mut(r).copy_from_slice(mine.row(r));
        }
        return Ok(());
    };
    let there = comm.ranks()? as usize;
    if there != ranks {
        return Err(o.error(&format!("P is {ranks}, but there are {there} ranks")));
    }
    let mut sent = Vec::with_capacity(rows * d);
    for r in 0..rows {
        sent.extend_from_slice(mine.row(r));
    }
    let mut all = vec![0.0f32; ranks * rows * d];
    comm.gather(bytemuck::cast_slice(&sent), bytemuck::cast_slice_mut(&mut all))?;
    for (rank, rows_of_rank) in all.chunks_exact((rows * d).max(1)).enumerate() {
        for (r, row) in rows_of_rank.chunks_exact(d).enumerate() {
            parts.row_mut(r)[rank * d..(rank + 1) * d].copy_from_slice(row);
        }
    }
    Ok(())
}

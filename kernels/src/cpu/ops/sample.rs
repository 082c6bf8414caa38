//! `sample.candidates`.

use plugfold_abi::OpError;

use super::operands::Operands;
use crate::cpu::math::sample::top_candidates;
use crate::cpu::par;

pub(super) fn candidates(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, count, first) = (o.size(0, "n")?, o.size(1, "C")?, o.dim(2));
    let wanted = o.round().out_rows.len();
    let logits = o.input::<f32>(0, "logits", wanted, n)?;
    let values = o.output::<f32>(0, "values", wanted, count)?;
    let ids = o.output::<i32>(1, "ids", wanted, count)?;
    let items = values.row_pieces(1).zip(ids.row_pieces(1));
    par::each(items, wanted * n, |r, (mut values, mut ids)| {
        let (values, ids) = (values.row_mut(0), ids.row_mut(0));
        values.fill(f32::NEG_INFINITY);
        ids.fill(-1);
        for (i, (value, id)) in top_candidates(logits.row(r), count).into_iter().enumerate() {
            values[i] = value;
            ids[i] = (first + id as usize) as i32;
        }
    });
    Ok(())
}

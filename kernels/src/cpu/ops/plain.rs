//! Operations on rows by themselves: `dense`, `norm`, `mlp.act`, `residual`, `tap`, `final`, `rows.pick`, `head`.

use plugfold_abi::OpError;

use super::operands::Operands;
use crate::cpu::math::{act::swiglu, norm};

pub(super) fn dense(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, k) = (o.size(0, "n")?, o.size(1, "k")?);
    let x = o.input(0, "rows", o.rows(), k)?;
    let w = o.matrix(0, "matrix", n, k)?;
    let bias = o.maybe_vector(1, "bias", n)?;
    w.multiply(o, x, bias, o.output(0, "rows", o.rows(), n)?)
}

pub(super) fn head(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, d) = (o.size(0, "n")?, o.size(1, "D")?);
    let wanted = o.round().out_rows.len();
    let x = o.input(0, "rows", wanted, d)?;
    let w = o.matrix(0, "head", n, d)?;
    w.multiply(o, x, None, o.output(0, "logits", wanted, n)?)
}

pub(super) fn norm(o: &Operands<'_>) -> Result<(), OpError> {
    let k = o.size(0, "k")?;
    let x = o.input(0, "rows", o.rows(), k)?;
    let weight = o.vector(0, "norm", k)?;
    norm::rms(x, Some(weight), o.param(0), o.output(0, "rows", o.rows(), k)?);
    Ok(())
}

pub(super) fn act(o: &Operands<'_>) -> Result<(), OpError> {
    let width = o.size(0, "I")?;
    let x = o.input(0, "gate and up", o.rows(), 2 * width)?;
    swiglu(x, o.param(0), o.output(0, "rows", o.rows(), width)?);
    Ok(())
}

pub(super) fn residual(o: &Operands<'_>) -> Result<(), OpError> {
    let (d, parts) = (o.size(0, "D")?, o.size(1, "P")?);
    let x = o.input(0, "x", o.rows(), d)?;
    let y = o.input(1, "parts", o.rows(), parts * d)?;
    norm::residual(x, y, o.output(0, "x", o.rows(), d)?);
    Ok(())
}

pub(super) fn tap(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, d) = (o.size(0, "N")?, o.size(1, "D")?);
    norm::stream_mean(o.input(0, "x", o.rows(), n * d)?, n, o.output(0, "mean", o.rows(), d)?);
    Ok(())
}

pub(super) fn last(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, d) = (o.size(0, "N")?, o.size(1, "D")?);
    let x = o.input(0, "x", o.rows(), n * d)?;
    let weight = o.vector(0, "norm", d)?;
    norm::final_norm(x, n, weight, o.param(0), o.output(0, "rows", o.rows(), d)?);
    Ok(())
}

pub(super) fn pick(o: &Operands<'_>) -> Result<(), OpError> {
    let d = o.size(0, "D")?;
    let wanted = o.round().out_rows;
    let rows = o.input::<f32>(0, "rows", o.round().rows(), d)?;
    let mut out = o.output::<f32>(0, "rows", wanted.len(), d)?;
    for (i, &row) in wanted.iter().enumerate() {
        if row as usize >= rows.rows() {
            return Err(o.error(&format!("row {row} is wanted, the table has {}", rows.rows())));
        }
        out.row_mut(i).copy_from_slice(rows.row(row as usize));
    }
    Ok(())
}

//! The vision tower beside its products, norms and activations: `vision.rotate`, `vision.attend`, `vision.gather`, `vision.gelu`.

use plugfold_abi::OpError;

use super::operands::Operands;
use crate::cpu::math::{mla, vision};

/// Heads and their width.
fn heads(o: &Operands<'_>) -> Result<(usize, usize), OpError> {
    match (o.size(0, "H")?, o.size(1, "d")?) {
        (_, d) if !d.is_multiple_of(4) => {
            Err(o.error(&format!("heads of {d} channels, must be a multiple of 4")))
        }
        sizes => Ok(sizes),
    }
}

pub(super) fn rotate(o: &Operands<'_>) -> Result<(), OpError> {
    let ((heads, d), rows) = (heads(o)?, o.rows());
    let qkv = o.input(0, "qkv", rows, 3 * heads * d)?;
    let angles = o.input(1, "angles", rows, d)?;
    let norms = [o.vector(0, "q_norm", d)?, o.vector(1, "k_norm", d)?];
    let q = o.output(0, "q", rows, heads * d)?;
    vision::rotated(qkv, angles, norms, o.param(0), q, o.output(1, "kv", rows, 2 * heads * d)?);
    Ok(())
}

pub(super) fn attend(o: &Operands<'_>) -> Result<(), OpError> {
    let ((heads, d), rows) = (heads(o)?, o.rows());
    let q = o.input(0, "q", rows, heads * d)?;
    let kv = o.input(1, "kv", rows, 2 * heads * d)?;
    let mut rest = o.output(0, "rows", rows, heads * d)?;
    let shape = mla::Shape { heads, key: d, value: d };
    let mut done = 0;
    for s in o.sequences()? {
        if !s.whole {
            return Err(o.error(&format!("the call has a part of frame {}, must have all of it", s.index)));
        }
        let (n, first) = (s.rows.len(), s.rows.start);
        let (_, after) = rest.split_rows_at(first - done);
        let (out, after) = after.split_rows_at(n);
        (rest, done) = (after, s.rows.end);
        let (q, kv) = (q.range(first, n), kv.range(first, n));
        mla::attention(q, kv, shape, |_| mla::Keys::Below(n), o.param(0), out);
    }
    Ok(())
}

pub(super) fn gather(o: &Operands<'_>) -> Result<(), OpError> {
    let (width, places, rows) = (o.size(0, "W")?, o.size(1, "P")?, o.rows());
    let x = o.input(0, "rows", rows * places, width)?;
    vision::gathered(x, places, o.output(0, "rows", rows, width * places)?);
    Ok(())
}

pub(super) fn gelu(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, rows) = (o.size(0, "n")?, o.rows());
    let x = o.input(0, "rows", rows, n)?;
    let (weight, bias) = (o.vector(0, "norm", n)?, o.vector(1, "norm bias", n)?);
    vision::activated_norm(x, weight, bias, o.param(0), o.output(0, "rows", rows, n)?);
    Ok(())
}

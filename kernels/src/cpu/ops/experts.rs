//! Mixture of experts: `moe.logits` to `moe.combine`.

use plugfold_abi::{Call, OpError};

use super::operands::Operands;
use crate::cpu::math::moe::Tiles;
use crate::cpu::math::{act::swiglu, dense::matmul, moe};
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::scratch::{self, Scratch};

pub(super) fn logits(o: &Operands<'_>) -> Result<(), OpError> {
    let (e, d) = (o.size(0, "E")?, o.size(1, "D")?);
    let x = o.input(0, "h", o.rows(), d)?;
    let w = o.panels(0, "moe.router", e, d)?;
    matmul(x, w, None, o.output(0, "logits", o.rows(), e)?);
    Ok(())
}

pub(super) fn pick(o: &Operands<'_>) -> Result<(), OpError> {
    let (e, k) = (o.size(0, "E")?, o.size(1, "k")?);
    let (groups, kept) = (o.size(2, "groups")?, o.size(3, "kept groups")?);
    if !e.is_multiple_of(groups) || kept > groups || k > kept * (e / groups) {
        return Err(o.error(&format!("{k} of {e} experts cannot be chosen from {kept} of {groups} groups")));
    }
    let router = moe::Router {
        bias: o.vector(0, "moe.bias", e)?,
        experts: k,
        groups,
        kept_groups: kept,
        normalized: o.dim(4) != 0,
        scale: o.param(0),
    };
    let logits = o.input(0, "logits", o.rows(), e)?;
    moe::pick(logits, router, o.output(0, "ids", o.rows(), k)?, o.output(1, "weights", o.rows(), k)?);
    Ok(())
}

pub(super) fn group(o: &Operands<'_>) -> Result<(), OpError> {
    let (e, k) = (o.size(0, "E")?, o.size(1, "k")?);
    let ids = o.input::<i32>(0, "ids", o.rows(), k)?;
    for r in 0..ids.rows() {
        if let Some(id) = ids.row(r).iter().find(|id| !(0..e as i32).contains(*id)) {
            return Err(o.error(&format!("row {r} asks for expert {id}, there are {e}")));
        }
    }
    let mut order = o.output::<i32>(0, "order", o.rows() * k, 1)?;
    let mut starts = o.output::<i32>(1, "starts", e + 1, 1)?;
    let (mut pairs, mut firsts) = (scratch::zeros::<i32>(o.rows() * k), scratch::zeros::<i32>(e + 1));
    moe::group(ids, &mut pairs, &mut firsts);
    store(&pairs, &mut order);
    store(&firsts, &mut starts);
    Ok(())
}

fn store(values: &[i32], out: &mut RowsMut<'_, i32>) {
    for (i, v) in values.iter().enumerate() {
        out.row_mut(i)[0] = *v;
    }
}

fn column(rows: Rows<'_, i32>) -> Scratch<i32> {
    let mut values = scratch::zeros(rows.rows());
    values.iter_mut().enumerate().for_each(|(r, value)| *value = rows.row(r)[0]);
    values
}

/// Lists of pairs by expert, as `moe.group` makes them: (order, starts).
fn lists(o: &Operands<'_>, experts: usize, pairs: usize) -> Result<(Scratch<i32>, Scratch<i32>), OpError> {
    let order = column(o.input::<i32>(1, "order", pairs, 1)?);
    let starts = column(o.input::<i32>(2, "starts", experts + 1, 1)?);
    if let Some(pair) = order.iter().find(|p| !(0..pairs as i32).contains(*p)) {
        return Err(o.error(&format!("input order holds pair {pair}, there are {pairs}")));
    }
    let rising = starts.windows(2).all(|w| w[0] <= w[1]);
    if !rising || starts[0] != 0 || starts[experts] as usize != pairs {
        return Err(o.error(&format!(
            "input starts runs from {} to {}, must rise from 0 to {pairs}",
            starts[0], starts[experts]
        )));
    }
    Ok((order, starts))
}

struct Sizes {
    experts: usize,
    slots: usize,
    width: usize,
    hidden: usize,
    pairs: usize,
}

fn sizes(o: &Operands<'_>) -> Result<Sizes, OpError> {
    let (experts, slots, width, hidden) =
        (o.size(0, "E")?, o.size(1, "k")?, o.size(2, "I")?, o.size(3, "D")?);
    Ok(Sizes { experts, slots, width, hidden, pairs: o.rows() * slots })
}

pub(super) fn up(o: &Operands<'_>) -> Result<(), OpError> {
    up_in(o, None)
}

/// Runs a call of `moe.up`, its work cut by `tiles`. The bits are the reference's.
///
/// # Errors
/// Operands that are not those of the operation.
pub fn up_tiled(call: &Call<'_>, tiles: Tiles) -> Result<(), OpError> {
    up_in(&Operands::new("moe.up", call)?, Some(tiles))
}

fn up_in(o: &Operands<'_>, tiles: Option<Tiles>) -> Result<(), OpError> {
    let s = sizes(o)?;
    let x = o.input(0, "h", o.rows(), s.hidden)?;
    let (order, starts) = lists(o, s.experts, s.pairs)?;
    let stack = o.stack(0, "experts.gate_up", 2 * s.width, s.hidden, s.experts)?;
    let out = o.output(0, "Z", s.pairs, 2 * s.width)?;
    stack.multiply(o, x, 2 * s.width, (&order, &starts), s.slots, tiles, out)
}

pub(super) fn act(o: &Operands<'_>) -> Result<(), OpError> {
    let width = o.size(0, "I")?;
    // The only sizes of this call are its own: as many pairs as come in go out.
    let pairs = o.call.inputs[0].rows as usize;
    let x = o.input(0, "Z", pairs, 2 * width)?;
    swiglu(x, o.param(0), o.output(0, "A", pairs, width)?);
    Ok(())
}

pub(super) fn down(o: &Operands<'_>) -> Result<(), OpError> {
    down_in(o, None)
}

/// Runs a call of `moe.down`, as [`up_tiled`] does one of `moe.up`.
///
/// # Errors
/// As [`up_tiled`].
pub fn down_tiled(call: &Call<'_>, tiles: Tiles) -> Result<(), OpError> {
    down_in(&Operands::new("moe.down", call)?, Some(tiles))
}

fn down_in(o: &Operands<'_>, tiles: Option<Tiles>) -> Result<(), OpError> {
    let s = sizes(o)?;
    let x = o.input(0, "A", s.pairs, s.width)?;
    let (order, starts) = lists(o, s.experts, s.pairs)?;
    let stack = o.stack(0, "experts.down", s.hidden, s.width, s.experts)?;
    let out = o.output(0, "Y", s.pairs, s.hidden)?;
    stack.multiply(o, x, s.hidden, (&order, &starts), 1, tiles, out)
}

pub(super) fn combine(o: &Operands<'_>) -> Result<(), OpError> {
    let (k, d) = (o.size(0, "k")?, o.size(1, "D")?);
    let y = o.input(0, "Y", o.rows() * k, d)?;
    let weights = o.input(1, "weights", o.rows(), k)?;
    let shared = o.input(2, "shared", o.rows(), d)?;
    moe::combine(y, weights, shared, o.output(0, "partial", o.rows(), d)?);
    Ok(())
}

//! Mixture of experts: `moe.logits` to `moe.combine`.

use plugfold_abi::OpError;

use super::operands::Operands;
use super::products::{Lists, Product};
use crate::kernel::Arg;
use crate::segments::Tables;

/// Most experts: what the shared memory of `moe_pick` has room for.
const MAX_EXPERTS: usize = 8192;
/// Shared memory of `moe_group`, in numbers.
const GROUP_ROOM: usize = 20_000;

/// Pairs that a warp of `moe_group` can hold, a lane each.
const FEW_PAIRS: usize = 32;

pub(super) fn logits(o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
    let (n, k, rows) = (o.size(0, "E")?, o.size(1, "D")?, o.rows());
    let x = o.input(0, "h", rows, k)?;
    let matrix = o.matrix(0, "moe.router", n, k, 1)?;
    let out = o.output(0, "logits", rows, n)?;
    Product::plain("moe.router", matrix, (n, k), x, out, rows).run(o, tables)
}

pub(super) fn pick(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (e, k, rows) = (o.size(0, "E")?, o.size(1, "k")?, o.rows());
    let (groups, kept) = (o.size(2, "groups")?, o.size(3, "kept groups")?);
    if !e.is_multiple_of(groups) || kept > groups || k > kept * (e / groups) {
        return Err(o.error(&format!("{k} of {e} experts cannot be chosen from {kept} of {groups} groups")));
    }
    if e > MAX_EXPERTS {
        return Err(o.error(&format!("{e} experts, at most {MAX_EXPERTS} are supported")));
    }
    let logits = o.input(0, "logits", rows, e)?;
    let bias = o.vector(0, "moe.bias", e)?;
    let ids = o.output_i32(0, "ids", rows, k)?;
    let weights = o.output(1, "weights", rows, k)?;
    let args = [
        Arg::Pointer(logits.at),
        Arg::Word(logits.stride),
        Arg::Pointer(bias),
        Arg::Word(e as u32),
        Arg::Word(k as u32),
        Arg::Word(groups as u32),
        Arg::Word(kept as u32),
        Arg::Word(u32::from(o.dim(4) != 0)),
        Arg::Float(o.param(0)),
        Arg::Pointer(ids.at),
        Arg::Word(ids.stride),
        Arg::Pointer(weights.at),
        Arg::Word(weights.stride),
    ];
    let threads = e.next_multiple_of(32).min(512) as u32;
    o.launch("moe_pick", [rows, 1, 1], threads, ((2 * e + groups.max(k)) * 4) as u32, &args)
}

pub(super) fn group(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (e, k, rows) = (o.size(0, "E")?, o.size(1, "k")?, o.rows());
    let ids = o.input_i32(0, "ids", rows, k)?;
    let order = o.output_i32(0, "order", rows * k, 1)?;
    let starts = o.output_i32(1, "starts", e + 1, 1)?;
    // The products read the lists without strides.
    for (name, list, len) in [("order", order, rows * k), ("starts", starts, e + 1)] {
        if len > 1 && list.stride != 1 {
            return Err(o.error(&format!("output {name} has a stride of {}, must be 1", list.stride)));
        }
    }
    if e + 32 > GROUP_ROOM {
        return Err(o.error(&format!("{e} experts, at most {} are supported", GROUP_ROOM - 32)));
    }
    // As many warps as have something to do and whose counts fit. Few pairs are not counted: a thread an expert.
    let few = rows * k <= FEW_PAIRS;
    let warps = if few {
        (e + 1).div_ceil(32).min(32)
    } else {
        (rows * k).div_ceil(32).clamp(1, 32).min(GROUP_ROOM / e - 1).max(1)
    };
    let shared = if few { 0 } else { ((warps + 1) * e * 4) as u32 };
    let args = [
        Arg::Pointer(ids.at),
        Arg::Word(ids.stride),
        Arg::Word(rows as u32),
        Arg::Word(k as u32),
        Arg::Word(e as u32),
        Arg::Pointer(order.at),
        Arg::Word(1),
        Arg::Pointer(starts.at),
        Arg::Word(1),
    ];
    o.launch("moe_group", [1, 1, 1], 32 * warps as u32, shared, &args)
}

/// A stack of experts over the lists of `moe.group`. `fan` output rows have one input row.
fn product(o: &Operands<'_>, tables: &Tables, name: &str, up: bool) -> Result<(), OpError> {
    let (count, slots, width, hidden) = (o.size(0, "E")?, o.size(1, "k")?, o.size(2, "I")?, o.size(3, "D")?);
    let pairs = o.rows() * slots;
    let (n, k, fan) = if up { (2 * width, hidden, slots) } else { (hidden, width, 1) };
    let x = o.input(0, if up { "h" } else { "A" }, pairs / fan, k)?;
    let order = o.input_i32(1, "order", pairs, 1)?;
    let starts = o.input_i32(2, "starts", count + 1, 1)?;
    for (name, list, len) in [("order", order, pairs), ("starts", starts, count + 1)] {
        if len > 1 && list.stride != 1 {
            return Err(o.error(&format!("input {name} has a stride of {}, must be 1", list.stride)));
        }
    }
    let matrix = o.matrix(0, name, n, k, count)?;
    let out = o.output(0, if up { "Z" } else { "Y" }, pairs, n)?;
    let lists = Some(Lists { order: order.at, starts: starts.at, experts: count, fan, slots });
    Product { count, lists, ..Product::plain(name, matrix, (n, k), x, out, pairs) }.run(o, tables)
}

pub(super) fn up(o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
    product(o, tables, "experts.gate_up", true)
}

pub(super) fn down(o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
    product(o, tables, "experts.down", false)
}

pub(super) fn combine(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (k, d, rows) = (o.size(0, "k")?, o.size(1, "D")?, o.rows());
    let y = o.input(0, "Y", rows * k, d)?;
    let weights = o.input(1, "weights", rows, k)?;
    let shared = o.input(2, "shared", rows, d)?;
    let out = o.output(0, "partial", rows, d)?;
    let args = [
        Arg::Pointer(y.at),
        Arg::Word(y.stride),
        Arg::Pointer(weights.at),
        Arg::Word(weights.stride),
        Arg::Pointer(shared.at),
        Arg::Word(shared.stride),
        Arg::Word(k as u32),
        Arg::Word(d as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("moe_combine", [rows, d.div_ceil(128), 1], 128, 0, &args)
}

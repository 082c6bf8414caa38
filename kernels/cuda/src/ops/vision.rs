//! The vision tower beside its products, norms, activations and attention: `vision.rotate`, `vision.gather`, `vision.gelu`.

use plugfold_abi::OpError;

use super::operands::Operands;
use crate::kernel::Arg;
use crate::segments::Tables;

pub(super) fn rotate(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (heads, d, rows) = (o.size(0, "H")?, o.size(1, "d")?, o.rows());
    if !d.is_multiple_of(4) {
        return Err(o.error(&format!("heads of {d} channels, must be a multiple of 4")));
    }
    let qkv = o.input(0, "qkv", rows, 3 * heads * d)?;
    let angles = o.input(1, "angles", rows, d)?;
    let q = o.output(0, "q", rows, heads * d)?;
    let kv = o.output(1, "kv", rows, 2 * heads * d)?;
    let args = [
        Arg::Pointer(qkv.at),
        Arg::Word(qkv.stride),
        Arg::Pointer(angles.at),
        Arg::Word(angles.stride),
        Arg::Pointer(o.vector(0, "q_norm", d)?),
        Arg::Pointer(o.vector(1, "k_norm", d)?),
        Arg::Float(o.param(0)),
        Arg::Word(heads as u32),
        Arg::Word(d as u32),
        Arg::Pointer(q.at),
        Arg::Word(q.stride),
        Arg::Pointer(kv.at),
        Arg::Word(kv.stride),
    ];
    o.launch("vision_rotate", [rows, (3 * heads).div_ceil(4), 1], 128, 0, &args)
}

pub(super) fn gather(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (width, places, rows) = (o.size(0, "W")?, o.size(1, "P")?, o.rows());
    let x = o.input(0, "rows", rows * places, width)?;
    let out = o.output(0, "rows", rows, width * places)?;
    let args = [
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Word(width as u32),
        Arg::Word(places as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("vision_gather", [rows, (width * places).div_ceil(256), 1], 256, 0, &args)
}

pub(super) fn gelu(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (n, rows) = (o.size(0, "n")?, o.rows());
    let x = o.input(0, "rows", rows, n)?;
    let (weight, bias) = (o.vector(0, "norm", n)?, o.vector(1, "norm bias", n)?);
    let out = o.output(0, "rows", rows, n)?;
    let args = [
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Pointer(weight),
        Arg::Pointer(bias),
        Arg::Float(o.param(0)),
        Arg::Word(n as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("vision_gelu", [rows, 1, 1], 256, 0, &args)
}

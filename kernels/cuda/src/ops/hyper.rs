//! Hyper-connections: `hc.dots`, `hc.finish`, `hc.post`.

use plugfold_abi::OpError;

use super::operands::Operands;
use super::products::Product;
use crate::kernel::Arg;
use crate::segments::Tables;

/// Most streams: `MAX_STREAMS` of the source.
const MAX_STREAMS: usize = 8;

fn streams(o: &Operands<'_>) -> Result<usize, OpError> {
    match o.size(0, "N")? {
        n if n > MAX_STREAMS => Err(o.error(&format!("{n} streams, at most {MAX_STREAMS} are supported"))),
        n => Ok(n),
    }
}

fn mixes(n: usize) -> usize {
    (2 + n) * n
}

pub(super) fn dots(o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
    let (n, d) = (streams(o)?, o.size(1, "D")?);
    let (rows, k) = (o.rows(), n * d);
    let x = o.input(0, "x", rows, k)?;
    let out = o.output(0, "dots", rows, mixes(n) + 1)?;
    let matrix = o.matrix(0, "hc.fn", mixes(n), k, 1)?;
    Product::plain("hc.fn", matrix, (mixes(n), k), x, out, rows).run_with_squares(o, tables)
}

pub(super) fn finish(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (n, d, steps) = (streams(o)?, o.size(1, "D")?, o.size(2, "sinkhorn iterations")?);
    let rows = o.rows();
    let dots = o.input(0, "dots", rows, mixes(n) + 1)?;
    let x = o.input(1, "x", rows, n * d)?;
    let h = o.output(0, "h", rows, d)?;
    let post = o.output(1, "post", rows, n)?;
    let comb = o.output(2, "comb", rows, n * n)?;
    let args = [
        Arg::Pointer(dots.at),
        Arg::Word(dots.stride),
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Pointer(o.vector(0, "hc.base", mixes(n))?),
        Arg::Pointer(o.vector(1, "hc.scale", 3)?),
        Arg::Pointer(o.vector(2, "norm", d)?),
        Arg::Float(o.param(0)),
        Arg::Float(o.param(1)),
        Arg::Word(n as u32),
        Arg::Word(d as u32),
        Arg::Word(steps as u32),
        Arg::Pointer(h.at),
        Arg::Word(h.stride),
        Arg::Pointer(post.at),
        Arg::Word(post.stride),
        Arg::Pointer(comb.at),
        Arg::Word(comb.stride),
    ];
    // A row has a block for what is read, and one for the coefficients of `hc.post`.
    o.launch("hc_finish", [rows, 2, 1], 512, 0, &args)
}

pub(super) fn post(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (n, d, parts) = (streams(o)?, o.size(1, "D")?, o.size(2, "P")?);
    let rows = o.rows();
    let x = o.input(0, "x", rows, n * d)?;
    let y = o.input(1, "parts", rows, parts * d)?;
    let post = o.input(2, "post", rows, n)?;
    let comb = o.input(3, "comb", rows, n * n)?;
    let out = o.output(0, "x'", rows, n * d)?;
    let args = [
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Pointer(y.at),
        Arg::Word(y.stride),
        Arg::Pointer(post.at),
        Arg::Word(post.stride),
        Arg::Pointer(comb.at),
        Arg::Word(comb.stride),
        Arg::Word(n as u32),
        Arg::Word(d as u32),
        Arg::Word(parts as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("hc_post", [rows, d.div_ceil(128), 1], 128, 0, &args)
}

//! Hyper-connections: `hc.dots`, `hc.finish`, `hc.post`.

use plugfold_abi::OpError;

use super::operands::Operands;
use crate::cpu::math::hc;

fn streams(o: &Operands<'_>) -> Result<usize, OpError> {
    let n = o.size(0, "N")?;
    if n > hc::MAX_STREAMS {
        return Err(o.error(&format!("{n} streams, at most {} are supported", hc::MAX_STREAMS)));
    }
    Ok(n)
}

pub(super) fn dots(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, d) = (streams(o)?, o.size(1, "D")?);
    let x = o.input(0, "x", o.rows(), n * d)?;
    let mix = o.panels(0, "hc.fn", hc::mixes(n), n * d)?;
    hc::dots(x, mix, o.output(0, "dots", o.rows(), hc::mixes(n) + 1)?);
    Ok(())
}

pub(super) fn finish(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, d) = (streams(o)?, o.size(1, "D")?);
    let rows = o.rows();
    let mix = hc::Mix {
        streams: n,
        sinkhorn: o.size(2, "sinkhorn iterations")?,
        base: o.vector(0, "hc.base", hc::mixes(n))?,
        scale: o.vector(1, "hc.scale", 3)?,
        norm: o.vector(2, "norm", d)?,
        rms_eps: o.param(0),
        hc_eps: o.param(1),
    };
    let dots = o.input(0, "dots", rows, hc::mixes(n) + 1)?;
    let x = o.input(1, "x", rows, n * d)?;
    let h = o.output(0, "h", rows, d)?;
    hc::finish(dots, x, mix, h, o.output(1, "post", rows, n)?, o.output(2, "comb", rows, n * n)?);
    Ok(())
}

pub(super) fn post(o: &Operands<'_>) -> Result<(), OpError> {
    let (n, d, parts) = (streams(o)?, o.size(1, "D")?, o.size(2, "P")?);
    let rows = o.rows();
    let x = o.input(0, "x", rows, n * d)?;
    let y = o.input(1, "parts", rows, parts * d)?;
    let post = o.input(2, "post", rows, n)?;
    let comb = o.input(3, "comb", rows, n * n)?;
    hc::post(x, y, post, comb, o.output(0, "x'", rows, n * d)?);
    Ok(())
}

//! The router in one go: logits, choice and lists of experts, row by row.

use plugfold_abi::{
    BelowObject, Bits, Call, Claim, Granted, List, OpError, Plan, Provider, Query, Slice, TextBuf,
};
use plugfold_kernels::cpu::math::dense::matmul;
use plugfold_kernels::cpu::math::moe::{self, Router};
use plugfold_kernels::cpu::operands::Operands;
use plugfold_kernels::cpu::rows::{Rows, RowsMut};

const OPS: [&str; 3] = ["moe.logits", "moe.pick", "moe.group"];

/// The fusion.
pub struct Route {
    /// Planted: on every row alike, so that only turning it off shows it.
    pub wrong: bool,
}

impl Provider for Route {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(OPS[0].into())
    }
    fn covers(&self) -> Result<List<TextBuf>, OpError> {
        Ok(OPS.iter().map(|op| TextBuf::from(*op)).collect())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::of("ref"))))
    }
    fn run(&self, _: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        Err(OpError::new("a fusion was asked to run one call"))
    }
    fn run_group(&self, calls: Slice<'_, Call<'_>>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        let [l, p, g] = calls.get_ref() else {
            return Err(OpError::new(format!("{} calls for three", calls.len())));
        };
        let (l, p, g) = (Operands::new(OPS[0], l)?, Operands::new(OPS[1], p)?, Operands::new(OPS[2], g)?);
        let (e, d, k, rows) = (l.size(0, "E")?, l.size(1, "D")?, p.size(1, "k")?, l.rows());
        let (x, w) = (l.input::<f32>(0, "h", rows, d)?, l.panels(0, "moe.router", e, d)?);
        let router = Router {
            bias: p.vector(0, "moe.bias", e)?,
            experts: k,
            groups: p.size(2, "groups")?,
            kept_groups: p.size(3, "kept groups")?,
            normalized: p.dim(4) != 0,
            scale: p.param(0),
        };
        let mut logits = l.output::<f32>(0, "logits", rows, e)?;
        let mut ids = p.output::<i32>(0, "ids", rows, k)?;
        let mut weights = p.output::<f32>(1, "weights", rows, k)?;
        for r in 0..rows {
            matmul(x.range(r, 1), w, None, RowsMut::new(logits.row_mut(r), e));
            let (ids, weights) = (RowsMut::new(ids.row_mut(r), k), RowsMut::new(weights.row_mut(r), k));
            moe::pick(Rows::new(logits.row(r), e), router, ids, weights);
        }
        if self.wrong {
            (0..rows).for_each(|r| weights.row_mut(r)[0] *= 1.5);
        }
        let (mut order, mut starts) = (vec![0; rows * k], vec![0; e + 1]);
        moe::group(ids.shared(), &mut order, &mut starts);
        let mut out = g.output::<i32>(0, "order", rows * k, 1)?;
        order.iter().enumerate().for_each(|(i, v)| out.row_mut(i)[0] = *v);
        let mut out = g.output::<i32>(1, "starts", e + 1, 1)?;
        starts.iter().enumerate().for_each(|(i, v)| out.row_mut(i)[0] = *v);
        Ok(())
    }
}

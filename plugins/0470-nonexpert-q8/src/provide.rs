//! Products with matrices in 8 bits: `dense`, `head`, and `mla.write`, which multiplies latents by `mla.kv_b`.

use plugfold_abi::{BelowObject, Bits, Call, Claim, Granted, OpError, Plan, Provider, Query, TextBuf};
use plugfold_kernels::cpu::groups::{multiply, takes};
use plugfold_kernels::cpu::operands::Width;

use crate::format;

/// Name of the arithmetic. Groups and slices of a matrix follow from its shape, so they need no name of their own.
pub const BITS: &str = "dense-q8";

/// The provider of the operation of this name.
pub struct Product(pub &'static str);

impl Provider for Product {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.0.into())
    }

    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        let found = [128, 64].into_iter().find(|group| takes(query, self.0, &[format(*group)]));
        let Some(group) = found else { return Ok(Claim::No) };
        let mut plan: Plan = [0; 64];
        plan[0] = group as u8;
        Ok(Claim::Yes(Granted { bits: Bits::own(BITS), plan, grid: 1 }))
    }

    fn run(&self, call: &Call<'_>, plan: &Plan, _: &BelowObject) -> Result<(), OpError> {
        multiply(self.0, call, format(plan[0].into()), Width::Eight)
    }
}

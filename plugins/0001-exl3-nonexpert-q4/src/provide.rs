//! Products with matrices in 4 bits: `dense`, `head`, and `mla.write`, which multiplies latents by `mla.kv_b`.

use plugfold_abi::{BelowObject, Bits, Call, Claim, Granted, OpError, Plan, Provider, Query, TextBuf};
use plugfold_kernels::cpu::groups::{multiply, takes};
use plugfold_kernels::cpu::operands::Width;

use crate::FORMAT;

/// Name of the arithmetic. Slices of a matrix follow from its shape, so they need no name of their own.
pub const BITS: &str = "dense-q4";

/// The provider of the operation of this name.
pub struct Product(pub &'static str);

impl Provider for Product {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.0.into())
    }

    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        let mine = takes(query, self.0, &[FORMAT]);
        Ok(if mine { Claim::Yes(Granted::plain(Bits::own(BITS))) } else { Claim::No })
    }

    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        multiply(self.0, call, FORMAT, Width::Four)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::{Addressing, CacheKind, Phase, Text, formats};
    use plugfold_kernels::cpu::groups::OPERATIONS;

    fn claims(op: &'static str, change: impl Fn(&mut Query<'static>)) -> bool {
        let mut query = Query::of(op, Phase::Window);
        query.device_class = Text::from("cpu");
        query.weight_formats[0] = Text::from(FORMAT);
        if op == "mla.write" {
            query.caches[0] = CacheKind { format: Text::from("f32"), addressing: Addressing::Linear };
        }
        change(&mut query);
        matches!(Product(op).claim(&query).unwrap(), Claim::Yes(g) if g.bits == Bits::own("dense-q4"))
    }

    #[test]
    fn only_its_own_format_is_claimed_in_every_phase() {
        for op in OPERATIONS {
            for phase in [Phase::Window, Phase::Draft, Phase::Prefill] {
                assert!(claims(op, |q| q.phase = phase), "{op}");
            }
            assert!(!claims(op, |q| q.weight_formats[0] = Text::from(formats::PANEL16_BF16)));
            assert!(!claims(op, |q| q.device_class = Text::from("sm_90")));
            assert!(!claims(op, |q| q.op = Text::from("moe.up")));
            assert!(!claims(op, |q| q.caches[0].format = Text::from("latent.f32")));
            let biased = claims(op, |q| q.weight_formats[1] = Text::from(formats::PLAIN_F32));
            assert_eq!(biased, op == "dense");
        }
    }
}

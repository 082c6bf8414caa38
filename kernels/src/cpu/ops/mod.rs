//! The reference provider of every operation of the table in [`plugfold_abi::ops`].
//!
//! Each operation is a row of a table here and one function in a file of its family; the function checks its operands
//! ([`operands`]) and calls the mathematics.

mod attention;
mod comm;
mod embed;
mod experts;
pub mod groups;
mod hyper;
mod index;
mod kda;
pub mod operands;
mod plain;
mod sample;
mod vision;
mod weights;

#[cfg(test)]
mod tests;

use plugfold_abi::{
    Addressing, BelowObject, Bits, CacheKind, Call, Claim, Granted, MAX_WEIGHTS, OpError, Plan, Provider,
    ProviderObject, Query, TextBuf, formats,
};

pub use attention::{Lists, write_latents};
pub use experts::{down_tiled, up_tiled};
use operands::Operands;

/// Name of the arithmetic of all reference operations. Which bits it means is said by [`VERSION`].
const BITS: &str = "ref";
/// Changes whenever a bit of any reference operation may: part of tags and digests.
pub const VERSION: &str = "cpu.2";

/// What a weight operand has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A vector or small matrix in f32.
    Plain,
    /// The same, or nothing.
    MaybePlain,
    /// Rows that are looked up.
    Rows,
    /// Panels of 16 outputs.
    Panels,
    /// The same, or segments of EXL3 and panels.
    Matrix,
}

impl Kind {
    fn takes(self, format: &str) -> bool {
        match self {
            Kind::Plain => format == formats::PLAIN_F32,
            Kind::MaybePlain => format.is_empty() || format == formats::PLAIN_F32,
            Kind::Rows => [formats::ROWS_BF16, formats::ROWS_F32, formats::EXL3_ROWS].contains(&format),
            Kind::Panels => [formats::PANEL16_BF16, formats::PANEL16_F32].contains(&format),
            Kind::Matrix => Kind::Panels.takes(format) || format == formats::EXL3_SEGMENTS,
        }
    }
}

/// One operation.
struct Reference {
    op: &'static str,
    weights: &'static [Kind],
    caches: Option<Addressing>,
    run: fn(&Operands<'_>) -> Result<(), OpError>,
}

impl Provider for Reference {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.op.into())
    }

    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        let weights = (0..MAX_WEIGHTS).all(|i| {
            let format = query.weight_formats[i].get_str();
            self.weights.get(i).map_or(format.is_empty(), |kind| kind.takes(format))
        });
        let caches = match self.caches {
            Some(addressing) => {
                let known = query.caches.iter().take_while(|c| !c.format.is_empty());
                let fits = |c: &CacheKind<'_>| {
                    c.format.get_str() == operands::CACHE_FORMAT && c.addressing == addressing
                };
                known.clone().count() > 0 && known.into_iter().all(fits)
            }
            None => query.caches[0].format.is_empty(),
        };
        let claims =
            query.op.get_str() == self.op && query.device_class.get_str() == "cpu" && weights && caches;
        Ok(if claims { Claim::Yes(Granted::plain(Bits::own(BITS))) } else { Claim::No })
    }

    fn run(&self, call: &Call<'_>, _plan: &Plan, _below: &BelowObject) -> Result<(), OpError> {
        (self.run)(&Operands::new(self.op, call)?)
    }
}

/// The reference provider of every operation.
pub fn reference() -> Vec<ProviderObject> {
    use Kind::{Matrix, MaybePlain, Panels, Plain, Rows};
    const STATE: Option<Addressing> = Some(Addressing::State);
    const LINEAR: Option<Addressing> = Some(Addressing::Linear);
    let table = [
        Reference { op: "embed", weights: &[Rows], caches: None, run: embed::embed },
        Reference { op: "hc.dots", weights: &[Panels], caches: None, run: hyper::dots },
        Reference { op: "hc.finish", weights: &[Plain, Plain, Plain], caches: None, run: hyper::finish },
        Reference { op: "hc.post", weights: &[], caches: None, run: hyper::post },
        Reference { op: "dense", weights: &[Matrix, MaybePlain], caches: None, run: plain::dense },
        Reference { op: "norm", weights: &[Plain], caches: None, run: plain::norm },
        Reference { op: "kda.mix", weights: &[Plain, Plain, Plain, Plain], caches: STATE, run: kda::mix },
        Reference { op: "kda.commit", weights: &[], caches: STATE, run: kda::commit },
        Reference { op: "mla.write", weights: &[Matrix], caches: LINEAR, run: attention::write },
        Reference { op: "mla.dense", weights: &[], caches: LINEAR, run: attention::dense },
        Reference { op: "mla.sparse", weights: &[], caches: LINEAR, run: attention::sparse },
        Reference { op: "idx.write", weights: &[Plain, Plain, Plain], caches: LINEAR, run: index::write },
        Reference { op: "idx.select", weights: &[], caches: LINEAR, run: index::select },
        Reference { op: "moe.logits", weights: &[Panels], caches: None, run: experts::logits },
        Reference { op: "moe.pick", weights: &[Plain], caches: None, run: experts::pick },
        Reference { op: "moe.group", weights: &[], caches: None, run: experts::group },
        Reference { op: "moe.up", weights: &[Matrix], caches: None, run: experts::up },
        Reference { op: "moe.act", weights: &[], caches: None, run: experts::act },
        Reference { op: "moe.down", weights: &[Matrix], caches: None, run: experts::down },
        Reference { op: "moe.combine", weights: &[], caches: None, run: experts::combine },
        Reference { op: "mlp.act", weights: &[], caches: None, run: plain::act },
        Reference { op: "comm.sum", weights: &[], caches: None, run: comm::sum },
        Reference { op: "residual", weights: &[], caches: None, run: plain::residual },
        Reference { op: "tap", weights: &[], caches: None, run: plain::tap },
        Reference { op: "final", weights: &[Plain], caches: None, run: plain::last },
        Reference { op: "rows.pick", weights: &[], caches: None, run: plain::pick },
        Reference { op: "mtp.in", weights: &[Rows, Plain, Plain], caches: None, run: embed::mtp_in },
        Reference { op: "head", weights: &[Matrix], caches: None, run: plain::head },
        Reference { op: "sample.candidates", weights: &[], caches: None, run: sample::candidates },
    ];
    table.into_iter().map(ProviderObject::new).collect()
}

/// The reference provider of every operation of the vision tower that a forward does not have.
pub fn tower() -> Vec<ProviderObject> {
    use Kind::Plain;
    let table = [
        Reference { op: "vision.rotate", weights: &[Plain, Plain], caches: None, run: vision::rotate },
        Reference { op: "vision.attend", weights: &[], caches: None, run: vision::attend },
        Reference { op: "vision.gather", weights: &[], caches: None, run: vision::gather },
        Reference { op: "vision.gelu", weights: &[Plain, Plain], caches: None, run: vision::gelu },
    ];
    table.into_iter().map(ProviderObject::new).collect()
}

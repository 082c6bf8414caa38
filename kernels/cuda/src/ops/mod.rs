//! A provider for every operation of the table in [`plugfold_abi::ops`], on the kernels.
//!
//! Each operation is a row of a table here and one function in a file of its family; the function checks its operands
//! ([`operands`]) and launches kernels. What the functions check, the kernels trust.

mod attention;
mod experts;
mod hyper;
mod index;
mod kda;
mod operands;
mod plain;
mod products;
mod vision;

use std::sync::Arc;

use plugfold_abi::{
    Addressing, BelowObject, Bits, CacheKind, Call, Claim, Granted, MAX_WEIGHTS, OpError, Plan, Provider,
    ProviderObject, Query, TextBuf, formats,
};

use crate::kernel::{Arg, Launch, kernel};
use crate::machine::Machine;
use crate::segments::Tables;
use operands::{CACHE_FORMAT, Operands};

/// The arithmetic is the reference's, and on a device nobody else brings it.
const BITS: &str = "ref";

impl Operands<'_> {
    /// Launches a kernel; a grid without blocks is none.
    fn launch(
        &self,
        name: &str,
        grid: [usize; 3],
        threads: u32,
        shared: u32,
        args: &[Arg<'_>],
    ) -> Result<(), OpError> {
        let launch = Launch { kernel: kernel(name)?, grid: grid.map(|v| v as u32), threads, shared, args };
        if launch.is_empty() {
            return Ok(());
        }
        launch.check()?;
        Ok(self.machine.launch(&launch)?)
    }
}

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
#[derive(Clone, Copy)]
struct Operation {
    op: &'static str,
    weights: &'static [Kind],
    caches: Option<Addressing>,
    run: fn(&Operands<'_>, &Tables) -> Result<(), OpError>,
}

/// Its provider on a machine.
struct OnMachine {
    operation: Operation,
    machine: Arc<dyn Machine>,
    tables: Arc<Tables>,
}

impl Provider for OnMachine {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.operation.op.into())
    }

    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("cuda".into())
    }

    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        let weights = (0..MAX_WEIGHTS).all(|i| {
            let format = query.weight_formats[i].get_str();
            self.operation.weights.get(i).map_or(format.is_empty(), |kind| kind.takes(format))
        });
        let caches = match self.operation.caches {
            Some(addressing) => {
                let fits =
                    |c: &CacheKind<'_>| c.format.get_str() == CACHE_FORMAT && c.addressing == addressing;
                let mut known = query.caches.iter().take_while(|c| !c.format.is_empty()).peekable();
                known.peek().is_some() && known.all(fits)
            }
            None => query.caches[0].format.is_empty(),
        };
        let mine =
            query.op.get_str() == self.operation.op && query.device_class.get_str() == self.machine.class();
        Ok(if mine && weights && caches { Claim::Yes(Granted::plain(Bits::own(BITS))) } else { Claim::No })
    }

    fn run(&self, call: &Call<'_>, _plan: &Plan, _below: &BelowObject) -> Result<(), OpError> {
        (self.operation.run)(&Operands::new(self.operation.op, call, &*self.machine)?, &self.tables)
    }
}

const OPERATIONS: &[Operation] = {
    use Kind::{Matrix, MaybePlain, Panels, Plain, Rows};
    const STATE: Option<Addressing> = Some(Addressing::State);
    const LINEAR: Option<Addressing> = Some(Addressing::Linear);
    &[
        Operation { op: "embed", weights: &[Rows], caches: None, run: plain::embed },
        Operation { op: "hc.dots", weights: &[Panels], caches: None, run: hyper::dots },
        Operation { op: "hc.finish", weights: &[Plain, Plain, Plain], caches: None, run: hyper::finish },
        Operation { op: "hc.post", weights: &[], caches: None, run: hyper::post },
        Operation { op: "dense", weights: &[Matrix, MaybePlain], caches: None, run: plain::dense },
        Operation { op: "norm", weights: &[Plain], caches: None, run: plain::norm },
        Operation { op: "kda.mix", weights: &[Plain, Plain, Plain, Plain], caches: STATE, run: kda::mix },
        Operation { op: "kda.commit", weights: &[], caches: STATE, run: kda::commit },
        Operation { op: "mla.write", weights: &[Matrix], caches: LINEAR, run: attention::write },
        Operation { op: "mla.dense", weights: &[], caches: LINEAR, run: attention::dense },
        Operation { op: "mla.sparse", weights: &[], caches: LINEAR, run: attention::sparse },
        Operation { op: "idx.write", weights: &[Plain, Plain, Plain], caches: LINEAR, run: index::write },
        Operation { op: "idx.select", weights: &[], caches: LINEAR, run: index::select },
        Operation { op: "moe.logits", weights: &[Panels], caches: None, run: experts::logits },
        Operation { op: "moe.pick", weights: &[Plain], caches: None, run: experts::pick },
        Operation { op: "moe.group", weights: &[], caches: None, run: experts::group },
        Operation { op: "moe.up", weights: &[Matrix], caches: None, run: experts::up },
        Operation { op: "moe.act", weights: &[], caches: None, run: plain::act },
        Operation { op: "moe.down", weights: &[Matrix], caches: None, run: experts::down },
        Operation { op: "moe.combine", weights: &[], caches: None, run: experts::combine },
        Operation { op: "mlp.act", weights: &[], caches: None, run: plain::act },
        Operation { op: "comm.sum", weights: &[], caches: None, run: plain::sum },
        Operation { op: "residual", weights: &[], caches: None, run: plain::residual },
        Operation { op: "tap", weights: &[], caches: None, run: plain::tap },
        Operation { op: "final", weights: &[Plain], caches: None, run: plain::last },
        Operation { op: "rows.pick", weights: &[], caches: None, run: plain::pick },
        Operation { op: "mtp.in", weights: &[Rows, Plain, Plain], caches: None, run: plain::mtp_in },
        Operation { op: "head", weights: &[Matrix], caches: None, run: plain::head },
        Operation { op: "sample.candidates", weights: &[], caches: None, run: plain::candidates },
        Operation { op: "vision.rotate", weights: &[Plain, Plain], caches: None, run: vision::rotate },
        Operation { op: "vision.attend", weights: &[], caches: None, run: attention::frames },
        Operation { op: "vision.gather", weights: &[], caches: None, run: vision::gather },
        Operation { op: "vision.gelu", weights: &[Plain, Plain], caches: None, run: vision::gelu },
    ]
};

/// A provider of every operation, on a machine whose memory the calls' views and addresses are of.
pub fn providers(machine: &Arc<dyn Machine>) -> Vec<ProviderObject> {
    let tables = Arc::new(Tables::default());
    let provider = |operation: &Operation| {
        ProviderObject::new(OnMachine {
            operation: *operation,
            machine: machine.clone(),
            tables: tables.clone(),
        })
    };
    OPERATIONS.iter().map(provider).collect()
}

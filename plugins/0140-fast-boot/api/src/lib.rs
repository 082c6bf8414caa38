//! What plugins may ask of whoever keeps prepared weights and cost tables.

use plugfold_abi::{List, Slice, TextBuf};

/// A table of costs.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq)]
pub struct CostTable {
    /// The numbers, the same on all ranks.
    pub values: List<f64>,
    /// Whether they were stored; otherwise they were measured now.
    pub cached: bool,
    /// Whether whoever calibrates should run its prompt once all the same, to warm the machine up.
    pub warm_up: bool,
}

plugfold_abi::interface! {
    /// Measures a table of costs.
    "measure-costs", 0: MeasureCosts, MeasureCostsObject, MeasureCostsTable {
        /// The numbers of this rank; those of rank 0 are everybody's.
        fn measure(&self) -> List<f64>;
    }
}

plugfold_abi::interface! {
    /// Prepared weights of this rank, and stored cost tables.
    "weight-cache", 0: WeightCache, WeightCacheObject, WeightCacheTable {
        /// Key of this rank's prepared weights in hexadecimal; empty before the weights are loaded and where none are kept.
        fn key(&self) -> TextBuf;
        /// The table of an identity: all lines that can change a timing. On all ranks in step, in `calibrate`. With `cached` a
        /// stored table is taken where there is one; otherwise `measure` runs on all ranks and rank 0's numbers are stored.
        fn costs(&self, identity: Slice<'_, TextBuf>, cached: bool, measure: &MeasureCostsObject) -> CostTable;
    }
}

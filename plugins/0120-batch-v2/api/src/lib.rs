//! What plugins may ask of the batch.

plugfold_abi::fixed_layouts!();

use plugfold_abi::List;

/// Who is in a slot.
#[repr(C)]
#[derive(plugfold_abi::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotUse {
    /// The slot.
    pub slot: u32,
    /// Number of the request; 0 when the slot is free.
    pub request: u64,
    /// Whether it decodes; otherwise its prompt is prefilled.
    pub decoding: bool,
    /// Prompt tokens that are still to be prefilled.
    pub left: u32,
}

plugfold_abi::interface! {
    /// The batch, on rank 0: only planning may ask. Elsewhere there are no slots to see.
    "batch", 0: BatchView, BatchViewObject, BatchViewTable {
        /// All slots, as of the plan that was made last.
        fn slots(&self) -> List<SlotUse>;
        /// Largest part of the time that prompt pieces may take while others decode.
        fn prefill_share(&self) -> f64;
    }
}

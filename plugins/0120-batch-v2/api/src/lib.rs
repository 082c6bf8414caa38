//! What plugins may ask of the batch, and what its schedulers have in common.

plugfold_abi::fixed_layouts!();

use plugfold_abi::points::{PlanFacts, StoreOffer};
use plugfold_abi::{List, Slice};

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

/// The slot for a request, among the free ones: the one that holds most of its prompt, or, where no slot does or a store has
/// more of it (which is copied anywhere), the one where nobody was for longest. Of equals the cheaper, then the lower one.
pub fn place(facts: &PlanFacts<'_>, offers: Slice<'_, StoreOffer>) -> Option<u32> {
    let free = |slot: u32| facts.slots.iter().any(|s| s.slot == slot && s.request == 0);
    let longest = offers.iter().map(|o| o.length).max();
    let kept = offers
        .iter()
        .filter(|o| Some(o.length) == longest && free(o.slot))
        .min_by(|a, b| a.price_ms.total_cmp(&b.price_ms).then(a.slot.cmp(&b.slot)));
    let oldest = facts.slots.iter().filter(|s| s.request == 0).min_by_key(|s| (s.admitted, s.slot));
    kept.map(|o| o.slot).or(oldest.map(|s| s.slot))
}

//! What plugins may ask of the drafter over the multi-token-prediction layer. Chains over many sequences, with
//! probabilities and a stopping rule, are the drafter's own interface.

plugfold_abi::fixed_layouts!();

plugfold_abi::interface! {
    /// The drafter `mtp`.
    "mtp", 0: Mtp, MtpObject, MtpTable {
        /// Rows of a slot that the layer has not seen: what the next chain catches up on first.
        fn backlog(&self, slot: u32) -> u32;
    }
}

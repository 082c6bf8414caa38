//! What plugins share with the draft policies: the grammar, the price of a round, the service.

plugfold_abi::fixed_layouts!();

mod grammar;
mod prices;

pub use grammar::{Arm, Explore, FORMS, Form, PolicyError};
pub use prices::{Prices, Rounds, best_depth};

use plugfold_abi::{List, Text, TextBuf};

/// What the policies have learnt of a sequence's drafts by one drafter.
#[repr(C)]
#[derive(plugfold_abi::StableAbi, Clone, Debug, Default, PartialEq)]
pub struct Learnt {
    /// How likely the draft at each place of a window is kept, once all before it are.
    pub shares: List<f64>,
    /// Rows that the drafter has not seen yet.
    pub backlog: u32,
}

plugfold_abi::interface! {
    /// The draft policies of the server, for plugins that change the decisions of some of them.
    "policies", 0: Policies, PoliciesObject, PoliciesTable {
        /// The policy in force for what a request asks for (empty: the server's own).
        fn in_force(&self, asked: Text<'_>) -> TextBuf;
        /// What is known of the sequence in a slot and a drafter, for windows of up to `drafts` drafts.
        fn learnt(&self, slot: u32, drafter: Text<'_>, drafts: u32) -> Learnt;
    }
}

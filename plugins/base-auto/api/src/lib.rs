//! What plugins share with the draft policies: the grammar, the price of a round, the service.

plugfold_abi::fixed_layouts!();

mod grammar;
mod prices;

pub use grammar::{Arm, Explore, FORMS, Form, PolicyError};
pub use prices::{Prices, Rounds};

use plugfold_abi::{Text, TextBuf};

plugfold_abi::interface! {
    /// The draft policies of the server, for plugins that change the decisions of some of them.
    "policies", 0: Policies, PoliciesObject, PoliciesTable {
        /// The policy in force for what a request asks for (empty: the server's own).
        fn in_force(&self, asked: Text<'_>) -> TextBuf;
    }
}

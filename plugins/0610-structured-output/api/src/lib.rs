//! What plugins may ask of structured output.

plugfold_abi::fixed_layouts!();

plugfold_abi::interface! {
    /// Replies and tool calls held to schemas.
    "grammar", 0: Grammar, GrammarObject, GrammarTable {
        /// From now on every tool that a request offers counts as strict. Fails while the feature is off.
        fn strict_tools(&self) -> ();
    }
}

//! Subcommands of the program that plugins bring.

use crate::{Slice, TextBuf};

crate::interface! {
    /// A subcommand.
    "command", 0: Command, CommandObject, CommandTable {
        /// Its name, of one word or two, as in the manifest.
        fn name(&self) -> TextBuf;
        /// Takes its arguments, once its plugin has its settings and before a model is loaded. Says whether the model is to be
        /// loaded before it runs; then it is called on every rank.
        fn begin(&self, arguments: Slice<'_, TextBuf>) -> bool = Ok(false);
        /// Runs, on rank 0. Gives what is printed; after an error the program ends with a failure.
        fn run(&self, arguments: Slice<'_, TextBuf>) -> TextBuf;
    }
}

//! Panics stop at the boundary.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use super::Fallible;
use crate::OpError;

/// Runs a hook; a panic becomes an error that names the hook.
pub fn guard<R>(interface: &str, method: &str, hook: impl FnOnce() -> Result<R, OpError>) -> Fallible<R> {
    match catch_unwind(AssertUnwindSafe(hook)) {
        Ok(result) => result.into(),
        Err(panic) => Fallible::RErr(OpError::panicked(interface, method, &text(panic))),
    }
}

/// What a panic said. The payload's own destructor may panic, too, and is kept from running.
fn text(panic: Box<dyn Any + Send>) -> String {
    let said = panic.downcast_ref::<String>().cloned();
    let said = said.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
    std::mem::forget(panic);
    said.unwrap_or_else(|| "without a message".into())
}

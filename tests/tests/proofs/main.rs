//! Proof that the hook points hold: thin plugins that use them together, faults at every hook, hooks that hang.
#![allow(clippy::unwrap_used)]

mod executor;
mod faults;
mod fusions;
mod grammar;
mod integers;
mod layout;
mod passes;
mod planning;
mod rounds;
mod stores;
mod watchdog;

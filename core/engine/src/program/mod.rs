//! Forwards as data: building, checking, placing and running them.

pub mod build;
mod check;
mod order;
mod place;
mod resolve;
mod run;
#[cfg(test)]
mod tests;

pub use check::{ProgramError, check};
pub use place::{Placement, check_placement, place};
pub(crate) use resolve::common_grid;
pub use resolve::{Described, HOST, REFERENCE, Read, Registry, ResolveError, Resolved, TwoArithmetics};
pub use run::{Arena, Failure, RunInputs, run};

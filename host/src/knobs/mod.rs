//! Knobs: where their values come from, and which they are.
//!
//! From weakest to strongest: the schema's default, the profile, `PLUGFOLD_*` and `GLM53_TF_*` variables, flags and `--set`;
//! for knobs of request scope the request's `tf_knobs`. The program's own settings are knobs as well, of the owners
//! `engine`, `server` and `limits`.
//!
//! [`Sources::read`] gathers what was said, before anything is known of plugins; it gives their list. With the manifests of
//! that list, [`Resolved::new`] turns it into values, each with its [`Origin`]. [`KnobTable`] numbers the request knobs and
//! resolves the knobs of a request.

mod builtin;
mod catalogue;
mod envfile;
mod import;
mod numbers;
mod profile;
mod resolve;
mod sources;
mod table;
#[cfg(test)]
mod tests;

pub use builtin::{SETTINGS_OWNERS, manifests as builtin_manifests};
pub use catalogue::{Catalogue, Known, catalogue};
pub use envfile::{EnvFile, EnvFileError};
pub use import::{Import, ImportError};
pub use numbers::Numbers;
pub use profile::find_profile;
pub use resolve::{Resolved, Value};
pub use sources::{Asked, Listed, Origin, Sources};
pub use table::{KnobError, KnobOwners, KnobTable, RequestKnob, own_text};

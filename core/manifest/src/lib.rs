//! Manifests of plugins (`plugin.toml`): what a plugin claims, needs, brings and can be set to.
//!
//! A manifest is read before anything of its plugin runs, so everything here works on text alone: [`Manifest::parse`] reads
//! one and says everything that is wrong with it, [`Loaded`] puts those of a start together (extensions of knobs, names
//! that two plugins bring), and [`KnobSchema`] turns what people write into values. Where values come from, and which
//! source wins, is the host's business.
//!
//! The vocabulary is that of the map of the catalogue (`docs/hooks.toml`); a list `claims = [...]` may be written as
//! `[[claim]]` tables.

mod check;
mod error;
mod expr;
mod knob;
mod loaded;
mod manifest;
mod nearest;
mod parts;
mod points;
mod range;
mod terms;
mod value;

pub use error::{ManifestError, ValueError};
pub use expr::{Expr, Names};
pub use knob::{KnobExtension, KnobSchema, KnobType};
pub use loaded::{Loaded, OwnedKnob, env_name};
pub use manifest::Manifest;
pub use nearest::{did_you_mean, nearest};
pub use parts::{
    BodyField, ByName, Claim, Cover, Definition, Family, Field, Header, LayoutEdit, Named, Offer, Part, Pass,
    Policy, Raise, Want,
};
pub use points::{Kind, LIMITS, POINTS, Point};
pub use range::Range;
pub use terms::{Bits, Class, Effect, Fold, Need, Phase, Place, Scope};
pub use value::Raw;

//! What the routes are for, in words: `/openapi.json`, `/docs` and `docs/API.md`, all written from the route table.

pub mod bodies;
pub mod limits;
mod openapi;
mod pages;
pub mod values;

pub use openapi::openapi;
pub use pages::{html, markdown};

/// The form of a field.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`.
    Flag,
    /// A string.
    Text,
    /// One of these strings.
    Names(&'static [&'static str]),
    /// An integer of a range.
    Integer(i64, i64),
    /// A number of a range.
    Number(f64, f64),
    /// An object.
    Object,
    /// A list.
    List(&'static Kind),
    /// One of several.
    Any(&'static [Kind]),
}

/// A field of a request.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its name.
    pub name: &'static str,
    /// Its form. Null counts as absent everywhere.
    pub kind: Kind,
    /// What holds when it is absent; empty: nothing.
    pub default: &'static str,
    /// What it does.
    pub note: &'static str,
}

/// The body of a request.
#[derive(Clone, Copy, Debug)]
pub struct Body {
    /// Its name in the schemas.
    pub name: &'static str,
    /// Fields that must be there.
    pub required: &'static [&'static str],
    /// Its fields, in groups that bodies share.
    pub fields: &'static [&'static [Field]],
}

impl Body {
    /// All fields.
    pub fn all(&self) -> impl Iterator<Item = &'static Field> {
        self.fields.iter().copied().flatten()
    }
}

/// What a route answers with when all is well.
#[derive(Clone, Copy, Debug)]
pub struct Answer {
    /// Its content type.
    pub kind: &'static str,
    /// What is in it.
    pub what: &'static str,
}

impl Kind {
    /// In words.
    pub fn words(&self) -> String {
        match self {
            Self::Flag => "boolean".into(),
            Self::Text => "string".into(),
            Self::Names(names) => names.iter().map(|n| format!("`{n:?}`")).collect::<Vec<_>>().join(", "),
            Self::Integer(i64::MIN, i64::MAX) => "integer".into(),
            Self::Integer(low, i64::MAX) => format!("integer from {low}"),
            Self::Integer(low, high) => format!("integer {low} to {high}"),
            Self::Number(low, high) if low.is_infinite() && high.is_infinite() => "number".into(),
            Self::Number(low, high) => format!("number {low} to {high}"),
            Self::Object => "object".into(),
            Self::List(kind) => format!("list of {}", kind.words()),
            Self::Any(kinds) => kinds.iter().map(Self::words).collect::<Vec<_>>().join(", or "),
        }
    }
}

//! The words that manifests are written with.

use serde::{Deserialize, Serialize};

use crate::nearest::did_you_mean;

/// An enum that is written as one of a few words, with errors that name the nearest.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident, $what:literal { $($(#[$vdoc:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "&'static str")]
        pub enum $name {
            $($(#[$vdoc])* $variant,)*
        }

        impl $name {
            /// All of them.
            pub const ALL: &'static [$name] = &[$($name::$variant,)*];

            /// As it is written.
            pub const fn word(self) -> &'static str {
                match self {
                    $($name::$variant => $word,)*
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.word())
            }
        }

        impl From<$name> for &'static str {
            fn from(value: $name) -> Self {
                value.word()
            }
        }

        impl TryFrom<String> for $name {
            type Error = String;
            fn try_from(text: String) -> Result<Self, String> {
                let found = Self::ALL.iter().find(|value| value.word() == text);
                found.copied().ok_or_else(|| {
                    let mend = did_you_mean(&text, Self::ALL.iter().map(|value| value.word()));
                    format!("`{text}` is no {}; {mend}", $what)
                })
            }
        }
    };
}

words! {
    /// Phase of a forward in which a claim holds.
    Phase, "phase" {
        /// Window: decode and verify.
        W = "W",
        /// Draft.
        D = "D",
        /// Prefill.
        P = "P",
    }
}

words! {
    /// What users may expect of a plugin, weakest first.
    Class, "class" {
        /// No token and no device work changes.
        HostOnly = "host-only",
        /// Proposals change, replies do not.
        DraftsOnly = "drafts-only",
        /// Proven equal.
        SameBits = "same-bits",
        /// Replies may differ.
        NewArithmetic = "new-arithmetic",
    }
}

words! {
    /// When a knob takes a value.
    Scope, "scope" {
        /// Read once at start.
        Load = "load",
        /// Default at start, a request may override it.
        Both = "both",
        /// In a request only.
        Request = "request",
    }
}

words! {
    /// What a knob can change, strongest first. What is not declared counts as [`Effect::Bits`].
    Effect, "effect" {
        /// Tokens.
        Bits = "bits",
        /// Collectives, chunks, rounds.
        Schedule = "schedule",
        /// Proposals.
        Drafts = "drafts",
        /// Time only.
        Speed = "speed",
        /// The host only.
        Host = "host",
    }
}

words! {
    /// On which ranks a knob acts.
    Place, "place (where)" {
        /// All.
        All = "all",
        /// Rank 0; the effect travels in the plan.
        Rank0 = "rank0",
    }
}

words! {
    /// How unequal values of requests meet in one call.
    Fold, "fold" {
        /// A decision of each sequence.
        Own = "own",
        /// On if on for all.
        All = "all",
        /// On if on for any.
        Any = "any",
        /// The least.
        Min = "min",
        /// The most.
        Max = "max",
        /// Unequal rows never share a call.
        Split = "split",
    }
}

words! {
    /// Whether a service must be there.
    Need, "need" {
        /// The start is refused without it.
        Required = "required",
        /// Works without.
        Optional = "optional",
    }
}

/// Whose bits a claim gives: `own(name)` or `of(name)`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Bits {
    /// An arithmetic of its own.
    Own(String),
    /// Proven equal to the named one; `ref` is the reference. A fusion may name one for each operation, joined by `+`.
    Of(String),
}

impl TryFrom<String> for Bits {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        let inner = |prefix: &str| {
            text.strip_prefix(prefix).and_then(|rest| rest.strip_suffix(')')).filter(|name| !name.is_empty())
        };
        if let Some(name) = inner("own(") {
            Ok(Bits::Own(name.to_owned()))
        } else if let Some(name) = inner("of(") {
            Ok(Bits::Of(name.to_owned()))
        } else {
            Err(format!("bits `{text}`: write own(name) or of(name)"))
        }
    }
}

impl From<Bits> for String {
    fn from(bits: Bits) -> Self {
        match bits {
            Bits::Own(name) => format!("own({name})"),
            Bits::Of(name) => format!("of({name})"),
        }
    }
}

impl std::fmt::Display for Bits {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Bits::Own(name) => write!(f, "own `{name}`"),
            Bits::Of(name) => write!(f, "of `{name}`"),
        }
    }
}

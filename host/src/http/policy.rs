//! Draft policies: the `@policy` suffix of a model name and the `tf_policy` field.
//!
//! A policy never changes a reply. Which there are is for the engine's plugins to say
//! ([`Service::policy`](plugfold_engine::service::Service::policy)).

/// A draft policy that was checked.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Policy {
    /// As the client wrote it; empty where it asks for none.
    pub asked: String,
    /// The one in force.
    pub spec: String,
    /// The client wants no drafts at all.
    pub off: bool,
}

impl Policy {
    /// Whether drafts, and with them stored states, may be used. The policy `0` asks for one token a round and no more: its
    /// requests resume and are kept as others are.
    pub fn drafts(&self) -> bool {
        !self.off
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_draft_false_turns_everything_off() {
        let policy = |asked: &str, off| Policy { asked: asked.into(), spec: asked.into(), off };
        for asked in ["auto", "", "0", "3"] {
            assert!(policy(asked, false).drafts() && !policy(asked, true).drafts(), "{asked}");
        }
    }
}

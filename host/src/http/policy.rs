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
    /// `draft: false` and `0` ask for one token a round.
    pub fn drafts(&self) -> bool {
        !self.off && self.asked != "0"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_client_may_ask_for_no_drafts_in_two_ways() {
        let policy = |asked: &str, off| Policy { asked: asked.into(), spec: asked.into(), off };
        assert!(policy("auto", false).drafts() && policy("", false).drafts());
        assert!(!policy("0", false).drafts() && !policy("3", true).drafts());
    }
}

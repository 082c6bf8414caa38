//! Draft policies: the `@policy` suffix of a model name and the `tf_policy` field.
//!
//! A policy never changes a reply. The bare engine has no drafter, so here a policy decides one thing: whether the
//! engine may draft at all. Its grammar is checked in full, so that a mistyped policy is an error on every server.

/// A draft policy that was checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// As the client wrote it.
    pub spec: String,
}

impl Default for Policy {
    fn default() -> Self {
        Self { spec: "auto".into() }
    }
}

impl Policy {
    /// Checks a policy; `None` when it is not one.
    pub fn parse(spec: &str) -> Option<Self> {
        is_policy(spec).then(|| Self { spec: spec.to_owned() })
    }

    /// `0` asks for one token a round.
    pub fn drafts(&self) -> bool {
        self.spec != "0"
    }
}

/// What a policy may look like, for error messages.
pub const FORMS: &str = "auto, auto:EXPLORE:EVERY:MARGIN, 0, N (1 to 7), a, a:LOW:HIGH, cN:P, the last four with f before \
                         them, lN, lN:M, o, om, of";

fn is_policy(spec: &str) -> bool {
    let (head, values) = match spec.split_once(':') {
        Some((head, rest)) => (head, rest.split(':').collect::<Vec<_>>()),
        None => (spec, Vec::new()),
    };
    let count = |text: &str| text.parse::<u32>().is_ok_and(|n| (1..=64).contains(&n));
    let share = |text: &str| text.parse::<f64>().is_ok_and(|p| (0.0..=1.0).contains(&p));
    let small = |text: &str| text.parse::<u32>().is_ok_and(|n| (1..=7).contains(&n));
    match head {
        "auto" => match values.as_slice() {
            [] => true,
            [explore, every, margin] => count(explore) && count(every) && share(margin),
            _ => false,
        },
        "0" | "o" | "om" | "of" => values.is_empty(),
        _ => {
            let (drafter, head) = match head.strip_prefix('f') {
                Some(rest) => (true, rest),
                None => (false, head),
            };
            if head == "a" {
                return match values.as_slice() {
                    [] => true,
                    [low, high] => share(low) && share(high),
                    _ => false,
                };
            }
            if let Some(rows) = head.strip_prefix('c') {
                return small(rows) && matches!(values.as_slice(), [p] if share(p));
            }
            if let Some(rows) = head.strip_prefix('l') {
                return !drafter
                    && small(rows)
                    && (values.is_empty() || matches!(values.as_slice(), [m] if count(m)));
            }
            if let Some(rows) = head.strip_prefix("om").or_else(|| head.strip_prefix("of")) {
                return !drafter && small(rows) && values.is_empty();
            }
            small(head) && values.is_empty()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_grammar() {
        for good in [
            "auto",
            "auto:2:8:0.03",
            "0",
            "1",
            "7",
            "a",
            "a:0.6:0.85",
            "c3:0.35",
            "f5",
            "fc7:0.3",
            "fa:0.1:0.2",
            "fa",
            "l4",
            "l4:8",
            "o",
            "om",
            "om3",
            "of7",
        ] {
            assert!(Policy::parse(good).is_some(), "{good}");
        }
        for bad in [
            "", "8", "-1", "autos", "auto:1", "a:1", "a:2:3", "c3", "c3:x", "c9:0.1", "fl4", "l", "q", "0:1",
            "f", "f0",
        ] {
            assert!(Policy::parse(bad).is_none(), "{bad}");
        }
        assert!(!Policy::parse("0").unwrap().drafts());
        assert!(Policy::default().drafts());
    }
}

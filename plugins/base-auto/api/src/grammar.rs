//! Draft policies as clients write them: `model@POLICY` or `tf_policy`. The only place that knows their forms.

use std::fmt;

/// What a policy may look like, for messages.
pub const FORMS: &[&str] = &[
    "auto",
    "auto:E:EVERY:MARGIN",
    "0",
    "N",
    "a",
    "a:LOW:HIGH",
    "cN:P",
    "fN",
    "fa",
    "fa:LOW:HIGH",
    "fcN:P",
    "lN",
    "lN:M",
    "o",
    "om",
    "omN",
    "of",
    "ofN",
];

/// Which of the model drafters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Arm {
    /// The checkpoint's multi-token-prediction layer.
    Mtp,
    /// A block drafter, a model of its own.
    Block,
}

impl Arm {
    /// The drafter's name.
    pub fn drafter(self) -> &'static str {
        match self {
            Arm::Mtp => "mtp",
            Arm::Block => "dflash2",
        }
    }
}

/// How the automatic policy tries the drafters.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Explore {
    /// Rounds of each drafter before any is preferred.
    pub first: u32,
    /// One round of the other drafter in so many.
    pub every: u32,
    /// By what share the other must be better to become the preferred one.
    pub margin: f64,
}

impl Explore {
    /// What `auto` alone means.
    pub const USUAL: Explore = Explore { first: 2, every: 8, margin: 0.03 };
}

/// A policy that was read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Form {
    /// `auto`: whichever drafter commits more tokens a millisecond.
    Auto(Explore),
    /// `0`: one token a round.
    Serial,
    /// `N`, `fN`: so many drafts a round.
    Fixed {
        /// Who drafts.
        arm: Arm,
        /// Drafts.
        drafts: u32,
    },
    /// `a`, `fa`: drafts steered by running acceptance.
    Running {
        /// Who drafts.
        arm: Arm,
        /// Below this share of kept drafts, one fewer.
        low: f64,
        /// Above it, one more.
        high: f64,
    },
    /// `cN:P`, `fcN:P`: drafts while the product of their probabilities stays at or above `floor`.
    Chain {
        /// Who drafts.
        arm: Arm,
        /// Most drafts.
        drafts: u32,
        /// The product's floor.
        floor: f64,
    },
    /// `lN`, `lN:M`: what followed an earlier occurrence of the last `min_match` tokens.
    Lookup {
        /// Most drafts.
        drafts: u32,
        /// Shortest match.
        min_match: u32,
    },
    /// `o`, `om`, `of`: the depth that promises most tokens net of their time.
    Cost {
        /// Who drafts; whichever is better where it says nothing.
        arm: Option<Arm>,
        /// Most drafts.
        drafts: u32,
    },
}

/// A text that is no policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyError(pub String);

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for PolicyError {}

/// Longest match and longest stretch of exploring that can be asked for.
const MOST_COUNT: u32 = 64;
/// Shortest match of `lN`.
const USUAL_MATCH: u32 = 3;

/// Reads one spec; its errors name the spec, the part, the limit.
struct Reader<'s> {
    spec: &'s str,
    most: u32,
}

impl Reader<'_> {
    fn wrong(&self, what: &str) -> PolicyError {
        PolicyError(format!("draft policy {:?}: {what}", self.spec))
    }

    fn count(&self, name: &str, text: &str, most: u32) -> Result<u32, PolicyError> {
        let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let found = text.parse::<u32>().ok().filter(|n| digits && (1..=most).contains(n));
        found.ok_or_else(|| self.wrong(&format!("{name} is {text:?}: give a whole number from 1 to {most}")))
    }

    fn drafts(&self, text: &str) -> Result<u32, PolicyError> {
        self.count("N", text, self.most)
    }

    fn share(&self, name: &str, text: &str) -> Result<f64, PolicyError> {
        let found = text.parse::<f64>().ok().filter(|p| (0.0..=1.0).contains(p));
        found.ok_or_else(|| self.wrong(&format!("{name} is {text:?}: give a number from 0 to 1")))
    }

    fn none(&self, form: Form, values: &[&str]) -> Result<Form, PolicyError> {
        if values.is_empty() { Ok(form) } else { Err(self.wrong("nothing may follow it")) }
    }

    fn auto(&self, values: &[&str]) -> Result<Form, PolicyError> {
        Ok(Form::Auto(match values {
            [] => Explore::USUAL,
            [first, every, margin] => Explore {
                first: self.count("E", first, MOST_COUNT)?,
                every: self.count("EVERY", every, MOST_COUNT)?,
                margin: self.share("MARGIN", margin)?,
            },
            _ => return Err(self.wrong("give auto alone, or all of auto:E:EVERY:MARGIN")),
        }))
    }

    fn running(&self, arm: Arm, values: &[&str]) -> Result<Form, PolicyError> {
        match values {
            [] => Ok(Form::Running { arm, low: 0.8, high: 0.9 }),
            [low, high] => {
                let (low, high) = (self.share("LOW", low)?, self.share("HIGH", high)?);
                if low > high {
                    return Err(self.wrong(&format!("LOW {low} is over HIGH {high}: swap them")));
                }
                Ok(Form::Running { arm, low, high })
            }
            _ => Err(self.wrong("give both LOW and HIGH, or neither")),
        }
    }

    fn chain(&self, arm: Arm, drafts: &str, values: &[&str]) -> Result<Form, PolicyError> {
        let drafts = self.drafts(drafts)?;
        let [floor] = values else {
            return Err(self.wrong("give the floor of the probabilities, as in c3:0.35"));
        };
        Ok(Form::Chain { arm, drafts, floor: self.share("P", floor)? })
    }

    fn lookup(&self, drafts: &str, values: &[&str]) -> Result<Form, PolicyError> {
        let drafts = self.drafts(drafts)?;
        let min_match = match values {
            [] => USUAL_MATCH,
            [m] => self.count("M", m, MOST_COUNT)?,
            _ => return Err(self.wrong("give lN or lN:M")),
        };
        Ok(Form::Lookup { drafts, min_match })
    }

    /// A form that either drafter may run.
    fn of(&self, arm: Arm, head: &str, values: &[&str]) -> Result<Form, PolicyError> {
        match head.strip_prefix('c') {
            _ if head == "a" => self.running(arm, values),
            Some(drafts) => self.chain(arm, drafts, values),
            None if head.starts_with(|c: char| c.is_ascii_digit()) => {
                let form = Form::Fixed { arm, drafts: self.drafts(head)? };
                self.none(form, values)
            }
            None => Err(PolicyError(format!(
                "{:?} is not a draft policy; valid are {}",
                self.spec,
                FORMS.join(", ")
            ))),
        }
    }

    fn read(&self) -> Result<Form, PolicyError> {
        let mut parts = self.spec.split(':');
        let head = parts.next().unwrap_or_default();
        let values: Vec<&str> = parts.collect();
        let cost = |arm, drafts| Form::Cost { arm, drafts };
        match head {
            "auto" => return self.auto(&values),
            "0" => return self.none(Form::Serial, &values),
            "o" => return self.none(cost(None, self.most), &values),
            "om" => return self.none(cost(Some(Arm::Mtp), self.most), &values),
            "of" => return self.none(cost(Some(Arm::Block), self.most), &values),
            _ => {}
        }
        if let Some(drafts) = head.strip_prefix("om") {
            return self.none(cost(Some(Arm::Mtp), self.drafts(drafts)?), &values);
        }
        if let Some(drafts) = head.strip_prefix("of") {
            return self.none(cost(Some(Arm::Block), self.drafts(drafts)?), &values);
        }
        if let Some(drafts) = head.strip_prefix('l') {
            return self.lookup(drafts, &values);
        }
        match head.strip_prefix('f') {
            Some(head) => self.of(Arm::Block, head, &values),
            None => self.of(Arm::Mtp, head, &values),
        }
    }
}

impl Form {
    /// Reads a policy of a server whose windows have room for `most` drafts.
    ///
    /// # Errors
    /// What is wrong with it, and what would be right.
    pub fn parse(spec: &str, most: u32) -> Result<Self, PolicyError> {
        Reader { spec, most }.read()
    }

    /// Names of the drafters without which the policy cannot be had.
    pub fn needs(&self) -> Option<&'static str> {
        match self {
            Form::Auto(_) | Form::Serial | Form::Cost { arm: None, .. } => None,
            Form::Fixed { arm, .. } | Form::Running { arm, .. } | Form::Chain { arm, .. } => {
                Some(arm.drafter())
            }
            Form::Cost { arm, .. } => arm.map(Arm::drafter),
            Form::Lookup { .. } => Some("lookup"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_read() {
        let arm = Arm::Mtp;
        let block = Arm::Block;
        let cases = [
            ("auto", Form::Auto(Explore { first: 2, every: 8, margin: 0.03 })),
            ("auto:3:9:0.1", Form::Auto(Explore { first: 3, every: 9, margin: 0.1 })),
            ("0", Form::Serial),
            ("1", Form::Fixed { arm, drafts: 1 }),
            ("7", Form::Fixed { arm, drafts: 7 }),
            ("f5", Form::Fixed { arm: block, drafts: 5 }),
            ("a", Form::Running { arm, low: 0.8, high: 0.9 }),
            ("a:0.6:0.85", Form::Running { arm, low: 0.6, high: 0.85 }),
            ("fa", Form::Running { arm: block, low: 0.8, high: 0.9 }),
            ("fa:0.1:0.2", Form::Running { arm: block, low: 0.1, high: 0.2 }),
            ("c3:0.35", Form::Chain { arm, drafts: 3, floor: 0.35 }),
            ("fc7:0.3", Form::Chain { arm: block, drafts: 7, floor: 0.3 }),
            ("l4", Form::Lookup { drafts: 4, min_match: 3 }),
            ("l4:8", Form::Lookup { drafts: 4, min_match: 8 }),
            ("o", Form::Cost { arm: None, drafts: 7 }),
            ("om", Form::Cost { arm: Some(arm), drafts: 7 }),
            ("om3", Form::Cost { arm: Some(arm), drafts: 3 }),
            ("of7", Form::Cost { arm: Some(block), drafts: 7 }),
        ];
        for (spec, form) in cases {
            assert_eq!(Form::parse(spec, 7), Ok(form), "{spec}");
        }
    }

    #[test]
    fn errors_name_the_part_and_the_limit() {
        let cases = [
            ("", "\"\" is not a draft policy; valid are auto, "),
            ("autos", "is not a draft policy"),
            ("q", "is not a draft policy"),
            ("f", "is not a draft policy"),
            ("fl4", "is not a draft policy"),
            ("-1", "is not a draft policy"),
            ("+3", "is not a draft policy"),
            ("8", "draft policy \"8\": N is \"8\": give a whole number from 1 to 7"),
            ("f0", "N is \"0\": give a whole number from 1 to 7"),
            ("3.0", "N is \"3.0\""),
            ("0:1", "nothing may follow it"),
            ("3:1", "nothing may follow it"),
            ("om3:1", "nothing may follow it"),
            ("auto:1", "give auto alone, or all of auto:E:EVERY:MARGIN"),
            ("auto:0:8:0.1", "E is \"0\""),
            ("auto:2:65:0.1", "EVERY is \"65\": give a whole number from 1 to 64"),
            ("auto:2:8:NaN", "MARGIN is \"NaN\": give a number from 0 to 1"),
            ("a:1", "give both LOW and HIGH, or neither"),
            ("a:2:3", "LOW is \"2\": give a number from 0 to 1"),
            ("a:0.9:0.8", "LOW 0.9 is over HIGH 0.8: swap them"),
            ("c3", "give the floor of the probabilities, as in c3:0.35"),
            ("c3:x", "P is \"x\""),
            ("c9:0.1", "N is \"9\""),
            ("c+3:0.1", "N is \"+3\""),
            ("l", "N is \"\""),
            ("l8", "N is \"8\""),
            ("l4:0", "M is \"0\": give a whole number from 1 to 64"),
            ("l4:65", "M is \"65\""),
            ("l4:1:2", "give lN or lN:M"),
            ("o3", "is not a draft policy"),
            ("om0", "N is \"0\""),
            ("of8", "N is \"8\""),
        ];
        for (spec, said) in cases {
            let told = Form::parse(spec, 7).unwrap_err().to_string();
            assert!(told.contains(said), "{spec}: {told}");
        }
        assert!(Form::parse("15", 15).is_ok(), "deep windows have room for more");
        assert!(Form::parse("l15:64", 15).is_ok());
    }

    #[test]
    fn a_form_names_the_drafter_it_cannot_do_without() {
        let needs = |spec| Form::parse(spec, 7).unwrap().needs();
        assert_eq!(["auto", "0", "o"].map(needs), [None; 3]);
        assert_eq!(["3", "a", "c3:0.1", "om"].map(needs), [Some("mtp"); 4]);
        assert_eq!(["f3", "fa", "fc3:0.1", "of2"].map(needs), [Some("dflash2"); 4]);
        assert_eq!(needs("l3"), Some("lookup"));
    }
}

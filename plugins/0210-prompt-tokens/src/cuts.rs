//! Where a text may be cut without changing its tokens: behind control tokens that no other can straddle.

use std::collections::HashSet;

use aho_corasick::{AhoCorasick, MatchKind};
use plugfold_abi::points::ControlToken;

/// The safe cuts of a tokenizer.
pub struct Cuts {
    finder: AhoCorasick,
    /// Ids of the finder's patterns.
    ids: Vec<u32>,
    safe: HashSet<u32>,
}

/// A cut: bytes of the text before it, and tokens.
pub type Cut = (usize, usize);

impl Cuts {
    /// The cuts that a list of control tokens allows.
    ///
    /// # Errors
    /// Why there are none.
    pub fn new(uncut: &str, controls: &[ControlToken]) -> Result<Self, String> {
        if !uncut.is_empty() {
            return Err(uncut.to_owned());
        }
        if let Some(wide) = controls.iter().find(|c| !c.verbatim) {
            return Err(format!("what stands around the token {:?} belongs to it", wide.text));
        }
        let safe: HashSet<u32> = controls
            .iter()
            .filter(|s| !controls.iter().any(|t| t.id != s.id && straddles(&t.text, &s.text)))
            .map(|s| s.id)
            .collect();
        if safe.is_empty() {
            return Err("no token of it ends a text that can be cut there".into());
        }
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(controls.iter().map(|c| c.text.as_bytes()))
            .map_err(|e| format!("its control tokens cannot be searched for: {e}"))?;
        Ok(Self { finder, ids: controls.iter().map(|c| c.id).collect(), safe })
    }

    /// The safe cuts of a text with these tokens, the first `text_start` bytes and `token_start` tokens of both left out;
    /// `None` when text and tokens do not pair.
    pub fn of(&self, text: &str, tokens: &[u32], (text_start, token_start): Cut) -> Option<Vec<Cut>> {
        let rest = text.get(text_start..)?;
        let found = self.finder.find_iter(rest).filter_map(|found| {
            let id = self.ids[found.pattern().as_usize()];
            self.safe.contains(&id).then_some((text_start + found.end(), id))
        });
        let ids = tokens.get(token_start..)?;
        let mut places = ids.iter().enumerate().filter(|(_, id)| self.safe.contains(id));
        let mut cuts = Vec::new();
        for (end, id) in found {
            let (at, token) = places.next()?;
            if *token != id {
                return None;
            }
            cuts.push((end, token_start + at + 1));
        }
        places.next().is_none().then_some(cuts)
    }
}

/// Whether `other` can begin inside of `token` and end behind it, or holds it with more behind.
fn straddles(other: &str, token: &str) -> bool {
    let begins = token.char_indices().map(|(at, _)| &token[at..]);
    let overlaps = begins.into_iter().any(|end| other.len() > end.len() && other.starts_with(end));
    let holds = other.match_indices(token).any(|(at, _)| at + token.len() < other.len());
    overlaps || holds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn controls(texts: &[&str]) -> Vec<ControlToken> {
        let control = |(id, text): (u32, &&str)| ControlToken {
            text: (**text).into(),
            id,
            special: true,
            verbatim: true,
        };
        (100..).zip(texts).map(control).collect()
    }

    fn safe(texts: &[&str]) -> Vec<bool> {
        match Cuts::new("", &controls(texts)) {
            Ok(cuts) => (100..).zip(texts).map(|(id, _)| cuts.safe.contains(&id)).collect(),
            Err(_) => vec![false; texts.len()],
        }
    }

    #[test]
    fn a_token_that_another_can_straddle_is_no_cut() {
        assert_eq!(safe(&["<a>", "<b>", "<c|>"]), [true, true, true]);
        assert_eq!(safe(&["<a>", "><b>"]), [false, true], "begins with the end of a role token");
        assert_eq!(safe(&["<a>", "<a>x"]), [false, true], "goes on behind it");
        assert_eq!(safe(&["<a>", "y<a>"]), [true, true], "ends with it");
        assert_eq!(safe(&["<a>", "y<a>z"]), [false, true]);
        assert_eq!(safe(&["ab", "ba"]), [false, false]);
    }

    #[test]
    fn tokenizers_that_look_around_have_no_cuts() {
        let told = |uncut: &str, controls: &[ControlToken]| Cuts::new(uncut, controls).err().unwrap();
        assert_eq!(told("it has a normalizer", &controls(&["<a>"])), "it has a normalizer");
        let mut wide = controls(&["<a>", "<b>"]);
        wide[1].verbatim = false;
        assert!(told("", &wide).contains("\"<b>\""));
        assert!(told("", &[]).contains("no token"));
    }

    #[test]
    fn cuts_pair_with_their_tokens_or_there_are_none() {
        let cuts = Cuts::new("", &controls(&["<a>", "<b>"])).unwrap();
        assert_eq!(cuts.of("x<a>yy<b>", &[1, 100, 2, 2, 101], (0, 0)), Some(vec![(4, 2), (9, 5)]));
        assert_eq!(cuts.of("x<a>yy<b>", &[1, 100, 2, 2, 101], (4, 2)), Some(vec![(9, 5)]));
        assert_eq!(cuts.of("", &[], (0, 0)), Some(vec![]));
        for tokens in [&[1, 100, 2][..], &[1, 101, 2, 100], &[100, 101, 101]] {
            assert_eq!(cuts.of("x<a>yy<b>", tokens, (0, 0)), None, "{tokens:?}");
        }
    }
}

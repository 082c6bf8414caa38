//! Stop strings.

use aho_corasick::{AhoCorasick, MatchKind};

/// Ends text at the first stop string that becomes complete.
///
/// Of several the one that ends first counts, of those that end at one place the longest, so that the result does not
/// depend on how the text was cut.
#[derive(Clone, Default)]
pub struct StopStrings {
    stops: Vec<String>,
    finder: Option<AhoCorasick>,
    /// The end of the text that may still grow into a stop string.
    held: String,
    /// The one that ended the text.
    matched: Option<usize>,
}

impl StopStrings {
    /// Empty strings are dropped. `None` when the strings together are too large to search for.
    pub fn new(stops: Vec<String>) -> Option<Self> {
        let stops: Vec<String> = stops.into_iter().filter(|s| !s.is_empty()).collect();
        let finder = if stops.is_empty() {
            None
        } else {
            Some(AhoCorasick::builder().match_kind(MatchKind::Standard).build(&stops).ok()?)
        };
        Some(Self { stops, finder, held: String::new(), matched: None })
    }

    /// Takes the next text; gives what is certain to stay, and whether a stop string is complete (the text before it is
    /// then the last).
    pub fn push(&mut self, text: &str) -> (String, bool) {
        let Some(finder) = &self.finder else {
            return (text.to_owned(), false);
        };
        let mut whole = std::mem::take(&mut self.held);
        whole.push_str(text);
        let mut first: Option<(usize, usize, usize)> = None;
        for found in finder.find_overlapping_iter(&whole) {
            let this = (found.end(), found.start(), found.pattern().as_usize());
            match first {
                Some((end, start, _)) if end == found.end() && start <= found.start() => {}
                Some((end, ..)) if end != found.end() => break,
                _ => first = Some(this),
            }
        }
        if let Some((_, start, stop)) = first {
            self.matched = Some(stop);
            whole.truncate(start);
            return (whole, true);
        }
        let keep = self.stops.iter().map(|stop| beginning(&whole, stop)).max().unwrap_or(0);
        self.held = whole.split_off(whole.len() - keep);
        (whole, false)
    }

    /// The stop string that ended the text.
    pub fn matched(&self) -> Option<&str> {
        self.matched.and_then(|stop| self.stops.get(stop)).map(String::as_str)
    }

    /// The text has ended: gives what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that is a proper beginning of `stop`.
fn beginning(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len() - 1);
    (1..=longest).rev().find(|len| text.as_bytes().ends_with(&stop.as_bytes()[..*len])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], texts: &[&str]) -> (String, bool) {
        let mut stops = StopStrings::new(stops.iter().map(|s| (*s).to_owned()).collect()).unwrap();
        let mut out = String::new();
        for text in texts {
            let (text, stopped) = stops.push(text);
            out.push_str(&text);
            if stopped {
                return (out, true);
            }
        }
        out.push_str(&stops.finish());
        (out, false)
    }

    #[test]
    fn near_misses_are_delivered() {
        let stops = ["</end>", "\n\nUser:"];
        assert_eq!(run(&stops, &["a</en b</end\nc\n\nUse"]), ("a</en b</end\nc\n\nUse".into(), false));
        assert_eq!(run(&stops, &["a<", "/e", "nd", ">tail"]), ("a".into(), true));
        assert_eq!(run(&stops, &["a\n", "\n", "\nUser:"]), ("a\n".into(), true));
    }

    #[test]
    fn the_first_to_end_wins_and_the_longest_of_those() {
        assert_eq!(run(&["abcd", "bc"], &["xabcd"]), ("xa".into(), true));
        assert_eq!(run(&["bcd", "abcd"], &["xabcd"]), ("x".into(), true));
        assert_eq!(run(&["", "y"], &["xyz"]), ("x".into(), true));
        assert_eq!(run(&[""], &["xyz"]), ("xyz".into(), false));
    }

    #[test]
    fn characters_are_never_cut() {
        // é and è share their first byte.
        assert_eq!(run(&["é"], &["è", "è"]), ("èè".into(), false));
        assert_eq!(run(&["aé"], &["aè"]), ("aè".into(), false));
    }

    proptest! {
        #[test]
        fn any_cut_gives_the_same(
            text in "[abc]{0,30}", stops in proptest::collection::vec("[abc]{1,4}", 1..4), cuts in any::<u32>()
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut pieces = Vec::new();
            let mut start = 0;
            for at in 0..text.len() {
                if cuts >> at & 1 == 1 {
                    pieces.push(&text[start..at]);
                    start = at;
                }
            }
            pieces.push(&text[start..]);
            prop_assert_eq!(run(&stops, &pieces), run(&stops, &[&text]));
        }
    }
}

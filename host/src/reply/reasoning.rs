//! Splits a reply at the end of its think block.

use super::{Piece, ReplyParser, add_content, add_reasoning, held_len};

const CLOSE: &str = "</think>";

/// Everything before the first `</think>` is reasoning, the rest, without its leading newlines, is the answer.
pub struct ReasoningSplit {
    thinking: bool,
    /// The answer has not begun: newlines are dropped.
    at_start: bool,
    held: String,
}

impl ReasoningSplit {
    /// `thinking`: the reply begins inside a think block. Otherwise all of it is the answer, as it is.
    pub fn new(thinking: bool) -> Self {
        Self { thinking, at_start: false, held: String::new() }
    }

    fn answer(&mut self, text: &str, out: &mut Vec<Piece>) {
        let text = if self.at_start { text.trim_start_matches('\n') } else { text };
        if !text.is_empty() {
            self.at_start = false;
            add_content(out, text);
        }
    }
}

impl ReplyParser for ReasoningSplit {
    fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        if !self.thinking {
            return self.answer(text, out);
        }
        self.held.push_str(text);
        let held = std::mem::take(&mut self.held);
        if let Some((reasoning, answer)) = held.split_once(CLOSE) {
            add_reasoning(out, reasoning);
            self.thinking = false;
            self.at_start = true;
            return self.answer(answer, out);
        }
        let (certain, held) = held.split_at(held.len() - held_len(&held, CLOSE, false));
        add_reasoning(out, certain);
        held.clone_into(&mut self.held);
    }

    fn finish(&mut self, out: &mut Vec<Piece>) {
        add_reasoning(out, &std::mem::take(&mut self.held));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(thinking: bool, texts: &[&str]) -> Vec<Piece> {
        let mut split = ReasoningSplit::new(thinking);
        let mut out = Vec::new();
        for text in texts {
            split.push(text, &mut out);
        }
        split.finish(&mut out);
        out
    }

    #[test]
    fn reasoning_then_answer() {
        let expected = [Piece::Reasoning("why\n".into()), Piece::Content("so\n".into())];
        assert_eq!(split(true, &["why\n</think>\n\nso\n"]), expected);
        assert_eq!(split(true, &["wh", "y\n</th", "ink", ">\n", "\nso\n"]), expected);
    }

    #[test]
    fn an_open_block_is_all_reasoning() {
        assert_eq!(split(true, &["why </thin"]), [Piece::Reasoning("why </thin".into())]);
        assert_eq!(split(true, &["a</think></think>b"])[1], Piece::Content("</think>b".into()));
    }

    #[test]
    fn without_thinking_nothing_is_split() {
        assert_eq!(split(false, &["\na</think>b"]), [Piece::Content("\na</think>b".into())]);
    }
}

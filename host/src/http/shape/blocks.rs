//! A reply as a sequence of blocks, as the Messages and Responses dialects have it: reasoning, text, calls.

use crate::reply::Piece;
use crate::reply::tools::ToolCall;

/// What a stream says next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A block of reasoning begins.
    OpenReasoning,
    /// More of it.
    Reasoning(String),
    /// It is complete: its whole text.
    CloseReasoning(String),
    /// A block of text begins.
    OpenText,
    /// More of it.
    Text(String),
    /// It is complete: its whole text.
    CloseText(String),
    /// A call, whole.
    Call(ToolCall),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    Nothing,
    Reasoning,
    Text,
}

/// Opens and closes blocks around pieces.
pub struct Blocks {
    open: Open,
    /// The open block's text so far.
    text: String,
    /// White space that may become the beginning of a text; between calls it is only layout.
    blank: String,
}

impl Default for Blocks {
    fn default() -> Self {
        Self { open: Open::Nothing, text: String::new(), blank: String::new() }
    }
}

impl Blocks {
    /// Takes pieces; calls go through as long as `take_call` agrees.
    pub fn push(&mut self, pieces: Vec<Piece>, mut take_call: impl FnMut() -> bool, out: &mut Vec<Step>) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => {
                    if self.open != Open::Reasoning {
                        self.close(out);
                        out.push(Step::OpenReasoning);
                        self.open = Open::Reasoning;
                    }
                    self.text.push_str(&text);
                    out.push(Step::Reasoning(text));
                }
                Piece::Content(text) => self.content(text, out),
                Piece::Call(call) => {
                    self.close(out);
                    if take_call() {
                        out.push(Step::Call(call));
                    }
                }
            }
        }
    }

    fn content(&mut self, text: String, out: &mut Vec<Step>) {
        if self.open != Open::Text {
            if text.trim().is_empty() {
                self.blank.push_str(&text);
                return;
            }
            let text = std::mem::take(&mut self.blank) + &text;
            self.close(out);
            out.push(Step::OpenText);
            self.open = Open::Text;
            self.text.push_str(&text);
            out.push(Step::Text(text));
            return;
        }
        self.text.push_str(&text);
        out.push(Step::Text(text));
    }

    /// Closes the open block.
    pub fn close(&mut self, out: &mut Vec<Step>) {
        let text = std::mem::take(&mut self.text);
        self.blank.clear();
        match std::mem::replace(&mut self.open, Open::Nothing) {
            Open::Nothing => {}
            Open::Reasoning => out.push(Step::CloseReasoning(text)),
            Open::Text => out.push(Step::CloseText(text)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_open_and_close_around_pieces() {
        let call = |name: &str| ToolCall { id: String::new(), name: name.into(), arguments: "{}".into() };
        let mut blocks = Blocks::default();
        let mut out = Vec::new();
        let pieces = vec![
            Piece::Reasoning("why".into()),
            Piece::Content("\n".into()),
            Piece::Content("so".into()),
            Piece::Call(call("a")),
            Piece::Content("\n".into()),
            Piece::Call(call("b")),
        ];
        blocks.push(pieces, || true, &mut out);
        blocks.push(vec![Piece::Content("end".into())], || true, &mut out);
        blocks.close(&mut out);
        assert_eq!(
            out,
            [
                Step::OpenReasoning,
                Step::Reasoning("why".into()),
                Step::CloseReasoning("why".into()),
                Step::OpenText,
                Step::Text("\nso".into()),
                Step::CloseText("\nso".into()),
                Step::Call(call("a")),
                Step::Call(call("b")),
                Step::OpenText,
                Step::Text("end".into()),
                Step::CloseText("end".into()),
            ]
        );
    }
}

//! What becomes of the bytes that a model writes: characters, reasoning, tool calls, visible text, stop strings.
//!
//! Every stage is incremental and gives the same pieces, joined, for any cutting of the same bytes. Text is held back
//! only while it could still turn into something else: an unfinished character, a tag, an open tool call, a stop string.

pub mod reasoning;
pub mod stop;
pub mod tools;

use plugfold_engine::hooks::HookError;

use crate::text::Utf8Stream;
use reasoning::ReasoningSplit;
use stop::StopStrings;
use tools::{ToolCall, ToolCallReader, ToolSpec};

/// A piece of a reply, in the order it was written.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// Text of the think block.
    Reasoning(String),
    /// Text of the visible answer.
    Content(String),
    /// A complete tool call.
    Call(ToolCall),
}

/// Reads structure out of reply text. One reply has one parser; parsers are stacked, each handing on what it leaves.
pub trait ReplyParser: Send {
    /// Takes the next text and appends what is certain now.
    fn push(&mut self, text: &str, out: &mut Vec<Piece>);
    /// The reply has ended: appends what was held back.
    fn finish(&mut self, out: &mut Vec<Piece>);
}

/// Links of plugins that pieces pass behind the parser and before stop strings.
pub trait PieceLinks: Send {
    /// Takes a piece and appends what may go out now. `true`: the reply ends behind that.
    ///
    /// # Errors
    /// A link that fails.
    fn pass(&mut self, piece: Piece, out: &mut Vec<Piece>) -> Result<bool, HookError>;
    /// The reply has ended: appends what was held back. `true`: a link ended it at last.
    ///
    /// # Errors
    /// A link that fails.
    fn finish(&mut self, out: &mut Vec<Piece>) -> Result<bool, HookError>;
}

/// Text as it is: raw completions.
pub struct Verbatim;

impl ReplyParser for Verbatim {
    fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        add_content(out, text);
    }

    fn finish(&mut self, _: &mut Vec<Piece>) {}
}

/// The parser of a chat reply: reasoning first, then an answer with tool calls.
pub struct ChatParser {
    reasoning: ReasoningSplit,
    tools: Option<ToolCallReader>,
}

impl ChatParser {
    /// `thinking`: the prompt ended in an open think block. Without tools, call markup is text.
    pub fn new(thinking: bool, tools: Vec<ToolSpec>) -> Self {
        let tools = (!tools.is_empty()).then(|| ToolCallReader::new(tools));
        Self { reasoning: ReasoningSplit::new(thinking), tools }
    }

    /// Keeps markup of calls, and all text behind it, to the end of the reply: plugins may read it otherwise.
    #[must_use]
    pub fn patient(mut self) -> Self {
        self.tools = self.tools.map(ToolCallReader::patient);
        self
    }

    fn answer(&mut self, pieces: Vec<Piece>, out: &mut Vec<Piece>) {
        for piece in pieces {
            match (piece, &mut self.tools) {
                (Piece::Content(text), Some(tools)) => tools.push(&text, out),
                (piece, _) => out.push(piece),
            }
        }
    }
}

impl ReplyParser for ChatParser {
    fn push(&mut self, text: &str, out: &mut Vec<Piece>) {
        let mut pieces = Vec::new();
        self.reasoning.push(text, &mut pieces);
        self.answer(pieces, out);
    }

    fn finish(&mut self, out: &mut Vec<Piece>) {
        let mut pieces = Vec::new();
        self.reasoning.finish(&mut pieces);
        self.answer(pieces, out);
        if let Some(tools) = &mut self.tools {
            tools.finish(out);
        }
    }
}

/// The whole way of one reply, from token bytes to pieces.
pub struct ReplyReader {
    utf8: Utf8Stream,
    parser: Box<dyn ReplyParser>,
    links: Option<Box<dyn PieceLinks>>,
    stops: StopStrings,
    stopped: bool,
    failure: Option<HookError>,
}

impl ReplyReader {
    /// Reads with a parser and ends at the first of the stop strings.
    pub fn new(parser: Box<dyn ReplyParser>, stops: StopStrings) -> Self {
        Self { utf8: Utf8Stream::default(), parser, links: None, stops, stopped: false, failure: None }
    }

    /// Lets pieces pass these links.
    #[must_use]
    pub fn with_links(mut self, links: Option<Box<dyn PieceLinks>>) -> Self {
        self.links = links;
        self
    }

    /// Takes the bytes of one token. `true`: a stop string is complete, or a link ends the reply or failed (see
    /// [`ReplyReader::failure`]); it takes nothing more.
    pub fn push(&mut self, bytes: &[u8], out: &mut Vec<Piece>) -> bool {
        if self.stopped {
            return true;
        }
        let mut text = String::new();
        self.utf8.push(bytes, &mut text);
        let mut pieces = Vec::new();
        if !text.is_empty() {
            self.parser.push(&text, &mut pieces);
        }
        self.visible(pieces, out)
    }

    /// The reply has ended. `true`: text that was held back until now completed a stop string.
    pub fn finish(&mut self, out: &mut Vec<Piece>) -> bool {
        if self.stopped {
            return true;
        }
        let mut text = String::new();
        self.utf8.finish(&mut text);
        let mut pieces = Vec::new();
        if !text.is_empty() {
            self.parser.push(&text, &mut pieces);
        }
        self.parser.finish(&mut pieces);
        if self.visible(pieces, out) {
            return true;
        }
        if let Some(links) = &mut self.links {
            let mut pieces = Vec::new();
            let done = links.finish(&mut pieces);
            if self.told(done, pieces, out) {
                return true;
            }
        }
        add_content(out, &self.stops.finish());
        false
    }

    /// What a link failed with; then the request has failed.
    pub fn failure(&self) -> Option<&HookError> {
        self.failure.as_ref()
    }

    /// The stop string that ended the reply.
    pub fn stop(&self) -> Option<&str> {
        self.stops.matched()
    }

    fn visible(&mut self, pieces: Vec<Piece>, out: &mut Vec<Piece>) -> bool {
        if self.links.is_none() {
            return self.searched(pieces, out);
        }
        for piece in pieces {
            let Some(links) = &mut self.links else { break };
            let mut passed = Vec::new();
            let done = links.pass(piece, &mut passed);
            if self.told(done, passed, out) {
                return true;
            }
        }
        false
    }

    /// Takes what links gave.
    fn told(&mut self, done: Result<bool, HookError>, passed: Vec<Piece>, out: &mut Vec<Piece>) -> bool {
        match done {
            Err(error) => {
                self.failure = Some(error);
                self.stopped = true;
            }
            Ok(ended) => {
                if !self.searched(passed, out) && ended {
                    add_content(out, &self.stops.finish());
                    self.stopped = true;
                }
            }
        }
        self.stopped
    }

    /// Searches visible text for stop strings.
    fn searched(&mut self, pieces: Vec<Piece>, out: &mut Vec<Piece>) -> bool {
        for piece in pieces {
            match piece {
                Piece::Content(text) => {
                    let (text, stopped) = self.stops.push(&text);
                    add_content(out, &text);
                    if stopped {
                        self.stopped = true;
                        return true;
                    }
                }
                Piece::Reasoning(text) => add_reasoning(out, &text),
                Piece::Call(call) => out.push(Piece::Call(call)),
            }
        }
        false
    }
}

/// Appends visible text, to the last piece where that is visible text too.
fn add_content(out: &mut Vec<Piece>, text: &str) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(Piece::Content(last)) => last.push_str(text),
        _ => out.push(Piece::Content(text.to_owned())),
    }
}

/// Appends reasoning, to the last piece where that is reasoning too.
fn add_reasoning(out: &mut Vec<Piece>, text: &str) {
    match out.last_mut() {
        _ if text.is_empty() => {}
        Some(Piece::Reasoning(last)) => last.push_str(text),
        _ => out.push(Piece::Reasoning(text.to_owned())),
    }
}

/// Length of the longest end of `text` that is a proper beginning of `tag`, which must be ASCII. `any_case` ignores case.
fn held_len(text: &str, tag: &str, any_case: bool) -> usize {
    let (text, tag) = (text.as_bytes(), tag.as_bytes());
    let longest = text.len().min(tag.len() - 1);
    (1..=longest)
        .rev()
        .find(|len| {
            let end = &text[text.len() - len..];
            if any_case { end.eq_ignore_ascii_case(&tag[..*len]) } else { end == &tag[..*len] }
        })
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn reader(thinking: bool, stops: &[&str]) -> ReplyReader {
        let tool = |name: &str| ToolSpec {
            name: name.into(),
            parameters: json!({"properties": {"s": {"type": "string"}, "n": {"type": "integer"}}}),
        };
        let parser = ChatParser::new(thinking, vec![tool("bash"), tool("look")]);
        let stops = StopStrings::new(stops.iter().map(|s| (*s).to_owned()).collect()).unwrap();
        ReplyReader::new(Box::new(parser), stops)
    }

    /// Pieces of a reply cut at the given places, joined; and the piece number at which it stopped.
    fn read(mut reader: ReplyReader, bytes: &[u8], cuts: &[usize]) -> Vec<Piece> {
        let mut out = Vec::new();
        let mut start = 0;
        for cut in cuts.iter().chain([&bytes.len()]) {
            if reader.push(&bytes[start..*cut], &mut out) {
                break;
            }
            start = *cut;
        }
        reader.finish(&mut out);
        let mut joined = Vec::new();
        for piece in out {
            match piece {
                Piece::Content(text) => add_content(&mut joined, &text),
                Piece::Reasoning(text) => add_reasoning(&mut joined, &text),
                call @ Piece::Call(_) => joined.push(call),
            }
        }
        joined
    }

    fn part() -> impl Strategy<Value = String> {
        prop_oneof![
            Just("</think>".to_owned()),
            Just("<think>".to_owned()),
            Just("\n".to_owned()),
            Just(
                "<tool_call>bash<arg_key>s</arg_key><arg_value>ls -la 客</arg_value></tool_call>".to_owned()
            ),
            Just(
                "<TOOL_CALL>\nlook\n<arg_key>n</arg_key>\n<arg_value>42</arg_value>\n</tool_call>".to_owned()
            ),
            Just("<tool_call>nobody</tool_call>".to_owned()),
            Just("<tool_call>look".to_owned()),
            Just("</tool_".to_owned()),
            Just("END".to_owned()),
            Just("EN".to_owned()),
            Just("<tool".to_owned()),
            Just("🌶️".to_owned()),
            "[a-z <E]{0,6}",
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2500))]
        /// Four random cuttings of each of 2,500 texts equal the uncut text.
        #[test]
        fn any_chunking_gives_the_same_pieces(
            parts in proptest::collection::vec(part(), 0..9),
            thinking in any::<bool>(),
            cuts in proptest::collection::vec(proptest::collection::vec(any::<prop::sample::Index>(), 0..30), 4),
        ) {
            let text = parts.concat();
            let whole = read(reader(thinking, &["END", "E D"]), text.as_bytes(), &[]);
            for cuts in cuts {
                let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(text.len() + 1)).collect();
                cuts.sort_unstable();
                prop_assert_eq!(&read(reader(thinking, &["END", "E D"]), text.as_bytes(), &cuts), &whole);
            }
            let every: Vec<usize> = (0..text.len()).collect();
            prop_assert_eq!(read(reader(thinking, &["END", "E D"]), text.as_bytes(), &every), whole);
        }
    }

    #[test]
    fn stop_strings_see_the_answer_only() {
        let text = "END</think>ok<tool_call>bash<arg_key>s</arg_key><arg_value>END</arg_value></tool_call>more END rest";
        let out = read(reader(true, &["END"]), text.as_bytes(), &[]);
        let (id, arguments) = (String::new(), r#"{"s":"END"}"#.to_owned());
        assert_eq!(
            out,
            [
                Piece::Reasoning("END".into()),
                Piece::Content("ok".into()),
                Piece::Call(ToolCall { id, name: "bash".into(), arguments }),
                Piece::Content("more ".into()),
            ]
        );
    }

    #[test]
    fn a_truncated_character_ends_in_one_replacement() {
        let bytes = &"a客".as_bytes()[..3];
        assert_eq!(read(reader(false, &[]), bytes, &[2]), [Piece::Content("a\u{fffd}".into())]);
    }
}

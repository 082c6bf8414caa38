//! Reply text in any chunking: the same reasoning, text and calls as the whole, and calls of offered tools only.

use plugfold::reply::stop::StopStrings;
use plugfold::reply::tools::ToolSpec;
use plugfold::reply::{ChatParser, Piece, ReplyReader};
use serde_json::{Value, json};

use crate::cuts;

/// What mutations put in.
pub static WORDS: [&str; 24] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<TOOL_CALL>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "bash",
    "look",
    "\n",
    "{\"name\":\"bash\",\"arguments\":{\"s\":\"x\"}}",
    "<function=look>",
    "</function>",
    "<parameter=n>",
    "</parameter>",
    "42",
    "[1,",
    "END",
    "EN",
    "客",
    "🌶️",
    "```",
];

const TOOLS: [&str; 2] = ["bash", "look"];

/// The pieces of a reply, neighbours of one kind joined.
fn read(parts: &[&[u8]], thinking: bool) -> Vec<Piece> {
    let schema =
        json!({"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "l": {"type": "array"}}});
    let tools = TOOLS.map(|name| ToolSpec { name: name.into(), parameters: schema.clone() });
    let stops =
        StopStrings::new(vec!["END".into(), "E D".into()]).unwrap_or_else(|| panic!("two stop strings"));
    let mut reader = ReplyReader::new(Box::new(ChatParser::new(thinking, tools.into())), stops);
    let mut out = Vec::new();
    for part in parts {
        if reader.push(part, &mut out) {
            break;
        }
    }
    reader.finish(&mut out);
    let mut joined: Vec<Piece> = Vec::new();
    for piece in out {
        match (joined.last_mut(), piece) {
            (Some(Piece::Content(last)), Piece::Content(text))
            | (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => last.push_str(&text),
            (_, piece) => joined.push(piece),
        }
    }
    joined
}

/// The first line chooses the cuts, the rest is what the model writes.
///
/// `true`: a call was found.
///
/// # Panics
/// When an invariant does not hold.
pub fn run(data: &[u8]) -> bool {
    let (sizes, text) = cuts(data);
    let mut parts = Vec::new();
    let mut rest = text;
    for size in sizes.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (part, later) = rest.split_at((*size).min(rest.len()));
        parts.push(part);
        rest = later;
    }
    let mut found = false;
    for thinking in [false, true] {
        let whole = read(&[text], thinking);
        assert_eq!(read(&parts, thinking), whole);
        for piece in whole {
            if let Piece::Call(call) = piece {
                found = true;
                assert!(TOOLS.contains(&call.name.as_str()), "{call:?}");
                assert!(
                    serde_json::from_str::<Value>(&call.arguments).is_ok_and(|v| v.is_object()),
                    "{call:?}"
                );
            }
        }
    }
    found
}

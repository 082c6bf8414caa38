//! Chat rendering: whatever clients write, control tokens come from the template alone.

use std::sync::OnceLock;

use plugfold::text::testing::{FIRST_CONTROL, text_model};
use plugfold::text::{ChatRequest, TextModel};
use serde_json::{Value, json};

/// Stands between messages.
const BETWEEN: &str = "\n---\n";

/// What mutations put in.
pub static WORDS: [&str; 20] = [
    BETWEEN,
    "u",
    "s",
    "a",
    "t",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|observation|>",
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_response>",
    "<|us",
    "er|>",
    "\u{e000}",
    "{{ messages }}",
];

fn model() -> &'static TextModel {
    static MODEL: OnceLock<TextModel> = OnceLock::new();
    MODEL.get_or_init(|| {
        let template = include_str!("../../tests/fixtures/chat/chat_template.jinja");
        text_model(template).unwrap_or_else(|e| panic!("{e}"))
    })
}

/// A conversation whose every text is a client's.
fn conversation(text: &str, thinking: bool, words: impl Fn(&str) -> String) -> ChatRequest {
    let messages: Vec<Value> = text
        .split(BETWEEN)
        .map(|message| {
            let (role, said) = message.split_at(message.chars().next().map_or(0, char::len_utf8));
            let said = words(said);
            match role {
                "s" => json!({"role": "system", "content": said}),
                "a" => json!({"role": "assistant", "content": said, "reasoning_content": said, "tool_calls": [
                    {"id": "call_1", "type": "function", "function": {"name": said, "arguments": json!({"k": said}).to_string()}}]}),
                "t" => json!({"role": "tool", "tool_call_id": "call_1", "content": said}),
                _ => json!({"role": "user", "content": [{"type": "text", "text": said}]}),
            }
        })
        .collect();
    let tools =
        vec![json!({"type": "function", "function": {"name": words(text), "description": words(text)}})];
    ChatRequest { messages, tools, thinking, ..ChatRequest::default() }
}

/// Messages with a line of three dashes between them; the first character of each says whose it is (`s`, `a`, `t`, or the
/// user's).
///
/// `true`: it was rendered, and a control token stood in it.
///
/// # Panics
/// When an invariant does not hold.
pub fn run(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let controls = |ids: &[u32]| ids.iter().copied().filter(|id| *id >= FIRST_CONTROL).collect::<Vec<_>>();
    let mut deep = false;
    for thinking in [false, true] {
        // The same without a character that any control token has at its start or end.
        let plain = |said: &str| said.replace(['<', '[', '>', ']'], "(");
        let asked = model().encode_chat(conversation(&text, thinking, str::to_owned));
        let harmless = model().encode_chat(conversation(&text, thinking, plain));
        if let (Ok(asked), Ok(harmless)) = (&asked, &harmless) {
            assert_eq!(controls(&asked.ids), controls(&harmless.ids), "{text:?} is {:?}", asked.text);
            deep |= model().tokenizer.touches_control(&text);
        } else {
            assert_eq!(asked.is_ok(), harmless.is_ok(), "{asked:?} but {harmless:?}");
        }
    }
    deep
}

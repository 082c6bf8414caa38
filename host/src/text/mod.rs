//! Everything between text and token ids: tokenizer, incremental decoding, chat template.
//!
//! The engine never sees text. What a client typed is data: it is encoded apart from the template's own text, so that
//! it can never turn into a control token (see [`chat`]).

pub mod chat;
pub mod detok;
pub mod template;
pub mod tokenizer;

use std::path::Path;

use plugfold_engine::service::EngineError;

pub use chat::{ChatPrompt, ChatRequest};
pub use detok::Utf8Stream;
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;

/// What can go wrong between text and ids.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// A file of the model folder cannot be used.
    #[error("{0}")]
    Load(String),
    /// The chat template refused the request by `raise_exception`.
    #[error("the chat template rejected the request: {0}")]
    Rejected(String),
    /// The chat template failed on the request.
    #[error("the chat template cannot render the request: {0}")]
    Template(String),
    /// The messages themselves are wrong.
    #[error("{0}")]
    Messages(String),
    /// The tokenizer failed.
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
    /// A plugin failed.
    #[error("{0}")]
    Hook(EngineError),
}

/// Tokenizer, chat template and the ids that have a meaning, of one checkpoint.
pub struct TextModel {
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// The checkpoint's chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// Ids that end a reply.
    pub stop_ids: Vec<u32>,
    /// Opens the reasoning of a reply.
    pub think_open: Option<u32>,
    /// Closes the reasoning of a reply.
    pub think_close: Option<u32>,
}

/// Tokens that end a reply: end of text, and the tokens that hand the turn to somebody else.
const STOPS: [&str; 3] = ["<|endoftext|>", "<|user|>", "<|observation|>"];

impl TextModel {
    /// Loads `tokenizer.json` and, if there is one, the chat template of a model folder.
    ///
    /// The template is `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`. `eos_ids` are the
    /// checkpoint's own; the tokens that hand the turn on are added by their text.
    ///
    /// # Errors
    /// When a file is missing or wrong; the message names it.
    pub fn load(dir: &Path, eos_ids: &[u32]) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::load(dir)?;
        let template = ChatTemplate::load(dir)?;
        Ok(Self::new(tokenizer, template, eos_ids))
    }

    /// Puts the parts together.
    pub fn new(tokenizer: Tokenizer, template: Option<ChatTemplate>, eos_ids: &[u32]) -> Self {
        let stop_ids = STOPS.iter().filter_map(|text| tokenizer.control_id(text)).collect();
        let think_open = tokenizer.control_id("<think>");
        let think_close = tokenizer.control_id("</think>");
        let mut model = Self { tokenizer, template, stop_ids, think_open, think_close };
        model.add_stop_ids(eos_ids);
        model
    }

    /// Further ids that end a reply: what the checkpoint's configuration names.
    pub fn add_stop_ids(&mut self, ids: &[u32]) {
        self.stop_ids.extend_from_slice(ids);
        self.stop_ids.sort_unstable();
        self.stop_ids.dedup();
    }

    /// Whether a prompt ends inside an open think block: the last of the two thinking tokens is the opening one.
    pub fn thinking_is_open(&self, ids: &[u32]) -> bool {
        let last =
            ids.iter().rev().find(|id| Some(**id) == self.think_open || Some(**id) == self.think_close);
        last.is_some() && last.copied() == self.think_open
    }
}

pub mod testing {
    //! A tokenizer and a chat template for tests and for the scripted server: one token a byte, a few merges, and the
    //! control tokens of the GLM chat format.

    use serde_json::{Value, json};

    use super::template::ChatTemplate;
    use super::tokenizer::{Tokenizer, byte_alphabet};
    use super::{TextError, TextModel};

    /// Control tokens in id order, from [`FIRST_CONTROL`] on; the ones marked `false` are markup that stays in decoded text.
    const CONTROLS: [(&str, bool); 22] = [
        ("<|endoftext|>", true),
        ("[gMASK]", true),
        ("<sop>", true),
        ("<|system|>", true),
        ("<|user|>", true),
        ("<|assistant|>", true),
        ("<|observation|>", true),
        ("<|begin_of_image|>", true),
        ("<|image|>", true),
        ("<|end_of_image|>", true),
        ("<think>", false),
        ("</think>", false),
        ("<tool_call>", false),
        ("</tool_call>", false),
        ("<arg_key>", false),
        ("</arg_key>", false),
        ("<arg_value>", false),
        ("</arg_value>", false),
        ("<tool_response>", false),
        ("</tool_response>", false),
        ("<tools>", false),
        ("</tools>", false),
    ];

    /// First id of the control tokens.
    pub const FIRST_CONTROL: u32 = 260;
    /// Ids of the test vocabulary.
    pub const VOCAB: usize = 282;

    /// The `tokenizer.json` of the test tokenizer: id b is byte b, 256 to 259 are merges.
    pub fn tokenizer_json() -> Value {
        let mut symbols = vec![' '; 256];
        for (symbol, byte) in byte_alphabet() {
            symbols[usize::from(byte)] = symbol;
        }
        let mut vocab = serde_json::Map::new();
        for (id, symbol) in symbols.iter().enumerate() {
            vocab.insert(symbol.to_string(), json!(id));
        }
        let merges = [("h", "e"), ("he", "l"), ("i", "n"), ("t", "he")];
        for (at, (a, b)) in merges.iter().enumerate() {
            vocab.insert(format!("{a}{b}"), json!(256 + at));
        }
        let added: Vec<Value> = CONTROLS
            .iter()
            .zip(FIRST_CONTROL..)
            .map(|((text, special), id)| {
                json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                       "normalized": false, "special": special})
            })
            .collect();
        json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                      "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                      "vocab": vocab,
                      "merges": merges.iter().map(|(a, b)| format!("{a} {b}")).collect::<Vec<_>>()}
        })
    }

    /// The test tokenizer.
    ///
    /// # Panics
    /// Never: its JSON is fixed.
    #[allow(clippy::expect_used)]
    pub fn tokenizer() -> Tokenizer {
        Tokenizer::from_json(tokenizer_json().to_string().as_bytes()).expect("the test tokenizer builds")
    }

    /// The test tokenizer with a chat template.
    ///
    /// # Errors
    /// When the template does not parse.
    pub fn text_model(template: &str) -> Result<TextModel, TextError> {
        Ok(TextModel::new(tokenizer(), Some(ChatTemplate::new(template, None)?), &[FIRST_CONTROL]))
    }
}

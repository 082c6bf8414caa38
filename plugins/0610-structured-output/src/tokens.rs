//! The vocabulary as the grammar sees it: the bytes of every token, read from the checkpoint's `tokenizer.json`.
//!
//! Added tokens have no bytes, so no grammar over text ever allows one. The markup of tool calls keeps a name of its own, by
//! which the grammar of tools, and nothing else, can ask for it.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// The tokens that a call is written with, in the order of [`Markup`].
const MARKUP: [&str; 6] =
    ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"];
/// Opens and closes the reasoning.
const THINK: [&str; 2] = ["<think>", "</think>"];

/// Ids of the markup of tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Markup {
    /// `<tool_call>`
    pub call: u32,
    /// `</tool_call>`
    pub call_end: u32,
    /// `<arg_key>`
    pub key: u32,
    /// `</arg_key>`
    pub key_end: u32,
    /// `<arg_value>`
    pub value: u32,
    /// `</arg_value>`
    pub value_end: u32,
}

/// The vocabulary of a checkpoint.
#[derive(Clone)]
pub struct Tokens {
    /// The tokens as a tree, with one token more that no model has: the library's own end of text.
    pub env: TokEnv,
    /// Tokens of the model's head.
    pub width: u32,
    /// The markup of tool calls, where the checkpoint has all of it.
    pub markup: Option<Markup>,
    /// The token that opens the reasoning.
    pub think: Option<u32>,
    /// The token that closes the reasoning.
    pub think_end: Option<u32>,
    /// Tells vocabularies apart.
    pub hash: u64,
}

impl Tokens {
    /// Reads the vocabulary of a model folder.
    ///
    /// # Errors
    /// A file that is missing or is not understood, by its name.
    pub fn of_folder(folder: &Path) -> Result<Self, String> {
        let read = |name: &str| -> Result<Value, String> {
            let path = folder.join(name);
            let text = std::fs::read_to_string(&path).map_err(|e| format!("{}: {e}", path.display()))?;
            serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
        };
        let config = read("config.json")?;
        let width = [&config["text_config"]["vocab_size"], &config["vocab_size"]];
        let width = width.iter().find_map(|v| v.as_u64()).and_then(|n| u32::try_from(n).ok());
        let width = width.ok_or("config.json has no vocab_size")?;
        Self::of_tokenizer(&read("tokenizer.json")?, width).map_err(|e| format!("tokenizer.json: {e}"))
    }

    /// Reads a tokenizer.
    ///
    /// # Errors
    /// A tokenizer whose tokens are no bytes, or that has more tokens than the model's head.
    pub fn of_tokenizer(tokenizer: &Value, width: u32) -> Result<Self, String> {
        let bytes = llguidance::token_bytes_from_tokenizer_json(tokenizer).map_err(|e| e.to_string())?;
        let mut added = Vec::new();
        for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let (Some(id), Some(content)) = (token["id"].as_u64(), token["content"].as_str()) else {
                return Err("an added token has no id or no content".into());
            };
            let id = u32::try_from(id).map_err(|_| format!("token {content:?} has the id {id}"))?;
            added.push((id, content.to_owned()));
        }
        Self::new(bytes, &added, width)
    }

    /// The vocabulary of tokens with these bytes, some of them added.
    ///
    /// # Errors
    /// More tokens than `width`.
    pub fn new(mut bytes: Vec<Vec<u8>>, added: &[(u32, String)], width: u32) -> Result<Self, String> {
        if bytes.len() > width as usize {
            return Err(format!("has {} tokens, but the model's head has {width}", bytes.len()));
        }
        bytes.resize(width as usize, Vec::new());
        // A token that begins with this byte would be taken for one with a name. No text has it: it is not in UTF-8.
        for token in &mut bytes {
            if token.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER) {
                token.clear();
            }
        }
        let find = |text: &str| added.iter().find(|(_, content)| content == text).map(|(id, _)| *id);
        for (id, content) in added {
            let Some(token) = bytes.get_mut(*id as usize) else {
                return Err(format!(
                    "token {content:?} has the id {id}, but the model's head has {width} tokens"
                ));
            };
            token.clear();
            if MARKUP.contains(&content.as_str()) {
                token.push(TokTrie::SPECIAL_TOKEN_MARKER);
                token.extend_from_slice(content.as_bytes());
            }
        }
        let markup = (|| {
            Some(Markup {
                call: find(MARKUP[0])?,
                call_end: find(MARKUP[1])?,
                key: find(MARKUP[2])?,
                key_end: find(MARKUP[3])?,
                value: find(MARKUP[4])?,
                value_end: find(MARKUP[5])?,
            })
        })();
        let hash = hash(&bytes);
        // The library wants an end of text of its own; ours are decided beside it.
        bytes.push(Vec::new());
        let trie = TokTrie::from(&TokRxInfo::new(width + 1, width), &bytes);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        Ok(Self { env, width, markup, think: find(THINK[0]), think_end: find(THINK[1]), hash })
    }

    /// Words of a mask over the whole vocabulary.
    pub fn words(&self) -> usize {
        (self.width as usize).div_ceil(32)
    }
}

/// FNV-1a over all tokens and their lengths: only compared between ranks of one start.
fn hash(bytes: &[Vec<u8>]) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, token| {
        let hash = (token.len() as u64).to_le_bytes().into_iter().fold(hash, step);
        token.iter().copied().fold(hash, step)
    })
}

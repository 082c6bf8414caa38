//! The checkpoint's tokenizer: text to ids and ids to bytes.
//!
//! Two encoders are kept. The *full* one finds control tokens (`<|user|>`, `<think>`, ...) in the text, as Hugging Face
//! does. The *plain* one knows no control token at all, so what a client typed can never become one.

use std::collections::HashMap;
use std::path::Path;

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;

use super::TextError;

/// A token that the tokenizer adds beside its vocabulary: role markers, thinking and tool-call markup.
#[derive(Clone, Debug)]
#[allow(clippy::struct_excessive_bools)] // the marks of `tokenizer.json`
pub struct ControlToken {
    /// Its text.
    pub text: String,
    /// Its id.
    pub id: u32,
    /// Marked special: left out of decoded text.
    pub special: bool,
    /// White space before it belongs to it.
    lstrip: bool,
    /// White space after it belongs to it.
    rstrip: bool,
    /// It is found as it is, whatever stands around it.
    pub verbatim: bool,
}

/// Markup that reply parsers read: kept in decoded text even where `tokenizer.json` marks it special.
const MARKUP: [&str; 12] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "</tools>",
];

/// Encodes text and decodes ids of one checkpoint.
pub struct Tokenizer {
    full: tokenizers::Tokenizer,
    plain: tokenizers::Tokenizer,
    controls: Vec<ControlToken>,
    by_text: HashMap<String, u32>,
    finder: AhoCorasick,
    bytes: TokenBytes,
    uncut: String,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model folder.
    ///
    /// # Errors
    /// When the file is missing, unreadable, or not a byte-level tokenizer.
    pub fn load(dir: &Path) -> Result<Self, TextError> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path)
            .map_err(|e| TextError::Load(format!("{}: cannot read the tokenizer: {e}", path.display())))?;
        Self::from_json(&bytes).map_err(|e| TextError::Load(format!("{}: {e}", path.display())))
    }

    /// Builds the encoders from the bytes of a `tokenizer.json`.
    ///
    /// # Errors
    /// When it does not parse or is not byte-level.
    pub fn from_json(json: &[u8]) -> Result<Self, TextError> {
        let load = |message: String| TextError::Load(message);
        let mut document: Value =
            serde_json::from_slice(json).map_err(|e| load(format!("not a tokenizer.json: {e}")))?;
        if !names_byte_level(&document["decoder"]) {
            return Err(load(
                "the decoder is not ByteLevel; only byte-level tokenizers are supported".into(),
            ));
        }
        let full: tokenizers::Tokenizer = serde_json::from_value(document.clone())
            .map_err(|e| load(format!("the tokenizer cannot be built: {e}")))?;
        let mut controls = Vec::new();
        for entry in document["added_tokens"].as_array().into_iter().flatten() {
            let (Some(text), Some(id)) = (entry["content"].as_str(), entry["id"].as_u64()) else {
                return Err(load("an entry of added_tokens has no content or id".into()));
            };
            if text.chars().nth(1).is_none() {
                return Err(load(format!("added token {id} ({text:?}) is shorter than two characters")));
            }
            let id = u32::try_from(id).map_err(|_| load(format!("added token id {id} is too large")))?;
            if full.token_to_id(text) != Some(id) {
                return Err(load(format!(
                    "added token {text:?} has id {id}, which leaves a gap after the vocabulary"
                )));
            }
            let flag = |name: &str| entry[name].as_bool().unwrap_or(false);
            controls.push(ControlToken {
                text: text.to_owned(),
                id,
                special: flag("special") && !MARKUP.contains(&text),
                lstrip: flag("lstrip"),
                rstrip: flag("rstrip"),
                verbatim: !["lstrip", "rstrip", "single_word", "normalized"].into_iter().any(flag),
            });
        }
        let uncut = uncut(&document);
        // Without its control tokens, in the added list and in the vocabulary, no text can encode to one.
        document["added_tokens"] = Value::Array(Vec::new());
        document["post_processor"] = Value::Null;
        if let Some(vocab) = document["model"]["vocab"].as_object_mut() {
            for control in &controls {
                vocab.shift_remove(&control.text);
            }
        }
        let plain: tokenizers::Tokenizer = serde_json::from_value(document)
            .map_err(|e| load(format!("the tokenizer without its control tokens cannot be built: {e}")))?;
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(controls.iter().map(|c| c.text.as_str()))
            .map_err(|e| load(format!("the control tokens cannot be searched for: {e}")))?;
        let bytes = TokenBytes::build(&full, &controls);
        let by_text = controls.iter().map(|c| (c.text.clone(), c.id)).collect();
        Ok(Self { full, plain, controls, by_text, finder, bytes, uncut })
    }

    /// The id of a control token, by its text.
    pub fn control_id(&self, text: &str) -> Option<u32> {
        self.by_text.get(text).copied()
    }

    /// The text of a control token, by its id.
    pub fn control_name(&self, id: u32) -> Option<&str> {
        self.controls.iter().find(|control| control.id == id).map(|control| control.text.as_str())
    }

    /// All control tokens.
    pub fn controls(&self) -> &[ControlToken] {
        &self.controls
    }

    /// Ids of text in which control tokens count: raw prompts, and templates without foreign text.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        encode_with(&self.full, text)
    }

    /// Ids of text in which nothing is a control token.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TextError> {
        encode_with(&self.plain, text)
    }

    /// Ids of rendered template text in which `guard` was put into every control token that came from a client.
    ///
    /// Control tokens without the guard are the template's and become ids; everything else is encoded plainly, with the
    /// guard taken out again.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn encode_guarded(&self, text: &str, guard: char) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        let mut start = 0;
        let mut strip_left = false;
        let piece = |segment: &str, strip_left: bool, strip_right: bool, ids: &mut Vec<u32>| {
            let mut clean: String = segment.chars().filter(|c| *c != guard).collect();
            if strip_right {
                clean.truncate(clean.trim_end().len());
            }
            let clean = if strip_left { clean.trim_start() } else { &clean };
            if !clean.is_empty() {
                ids.extend(encode_with(&self.plain, clean)?);
            }
            Ok::<(), TextError>(())
        };
        for found in self.finder.find_iter(text) {
            let control = &self.controls[found.pattern().as_usize()];
            piece(&text[start..found.start()], strip_left, control.lstrip, &mut ids)?;
            ids.push(control.id);
            start = found.end();
            strip_left = control.rstrip;
        }
        piece(&text[start..], strip_left, false, &mut ids)?;
        Ok(ids)
    }

    /// Whether a client's string holds the text of a control token, or a beginning or end of one at its border, which
    /// text of the template could complete.
    pub fn touches_control(&self, text: &str) -> bool {
        self.finder.is_match(text) || self.begins_with_an_end(text) || self.unfinished_end(text).is_some()
    }

    /// Puts `guard` into every control token of a client's string, so that none is left in it.
    pub fn guard(&self, text: &str, guard: char) -> String {
        let mut out = String::with_capacity(text.len() + 8);
        let mut start = 0;
        // Overlapping tokens: the search goes on one character after the start of each, not after its end.
        while let Some(found) = self.finder.find(aho_corasick::Input::new(text).range(start..)) {
            let first = found.start() + first_len(&text[found.start()..]);
            out.push_str(&text[start..first]);
            out.push(guard);
            start = first;
        }
        out.push_str(&text[start..]);
        let head = self.begins_with_an_end(&out);
        while let Some(at) = self.unfinished_end(&out) {
            out.insert(at + first_len(&out[at..]), guard);
        }
        if head {
            out.insert(0, guard);
        }
        out
    }

    /// Whether a string begins with a proper end of a control token.
    fn begins_with_an_end(&self, text: &str) -> bool {
        self.controls
            .iter()
            .any(|c| c.text.char_indices().skip(1).any(|(cut, _)| text.starts_with(&c.text[cut..])))
    }

    /// Where the longest proper beginning of a control token starts that ends a string.
    fn unfinished_end(&self, text: &str) -> Option<usize> {
        let beginnings =
            self.controls.iter().flat_map(|c| c.text.char_indices().skip(1).map(|(cut, _)| &c.text[..cut]));
        beginnings.filter(|b| text.ends_with(b)).map(|b| text.len() - b.len()).min()
    }

    /// Why the parts of a text that is cut behind control tokens may have other ids than the whole; empty when they have not.
    pub fn uncut(&self) -> &str {
        &self.uncut
    }

    /// The bytes a token stands for; empty for special tokens and for ids that have no token.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        self.bytes.get(id)
    }

    /// Decodes a whole list of ids; what is not UTF-8 becomes U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let mut bytes = Vec::new();
        for id in ids {
            bytes.extend_from_slice(self.token_bytes(*id));
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }
}

fn first_len(text: &str) -> usize {
    text.chars().next().map_or(0, char::len_utf8)
}

fn encode_with(tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, TextError> {
    let encoding = tokenizer.encode_fast(text, false).map_err(|e| TextError::Encode(e.to_string()))?;
    Ok(encoding.get_ids().to_vec())
}

/// What in a `tokenizer.json` looks at a text as a whole; empty for nothing.
fn uncut(document: &Value) -> String {
    if !document["normalizer"].is_null() {
        return format!("the tokenizer has a normalizer ({})", document["normalizer"]["type"]);
    }
    if begins_otherwise(&document["pre_tokenizer"]) {
        return "the tokenizer puts something before the first piece of a text".into();
    }
    String::new()
}

/// Whether a pre-tokenizer entry, or one inside it, treats the beginning of a text in its own way.
fn begins_otherwise(entry: &Value) -> bool {
    entry["add_prefix_space"] == true
        || entry["prepend_scheme"].as_str().is_some_and(|scheme| scheme != "never")
        || entry["pretokenizers"].as_array().is_some_and(|list| list.iter().any(begins_otherwise))
}

/// Whether a decoder entry of `tokenizer.json` is, or contains, the byte-level one.
fn names_byte_level(decoder: &Value) -> bool {
    decoder["type"] == "ByteLevel"
        || decoder["decoders"].as_array().is_some_and(|list| list.iter().any(names_byte_level))
}

/// The bytes of every id, back to back.
struct TokenBytes {
    data: Vec<u8>,
    /// Start of each id's bytes; one entry more than ids.
    starts: Vec<u32>,
}

impl TokenBytes {
    fn build(tokenizer: &tokenizers::Tokenizer, controls: &[ControlToken]) -> Self {
        let map = byte_alphabet();
        let control: HashMap<u32, &ControlToken> = controls.iter().map(|c| (c.id, c)).collect();
        let vocab = tokenizer.get_vocab(true);
        let mut tokens: Vec<(&str, u32)> = vocab.iter().map(|(t, id)| (t.as_str(), *id)).collect();
        tokens.sort_by_key(|(_, id)| *id);
        let mut data = Vec::new();
        let mut starts = vec![0];
        for (token, id) in tokens {
            while starts.len() <= id as usize {
                starts.push(data.len() as u32);
            }
            match control.get(&id) {
                Some(c) if c.special => {}
                Some(c) => data.extend_from_slice(c.text.as_bytes()),
                None => {
                    for c in token.chars() {
                        match map.get(&c) {
                            Some(byte) => data.push(*byte),
                            None => data.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                        }
                    }
                }
            }
            starts.push(data.len() as u32);
        }
        Self { data, starts }
    }

    fn get(&self, id: u32) -> &[u8] {
        let at = id as usize;
        match (self.starts.get(at), self.starts.get(at + 1)) {
            (Some(a), Some(b)) => &self.data[*a as usize..*b as usize],
            _ => &[],
        }
    }
}

/// The characters that byte-level tokenizers write bytes with: printable Latin-1 stands for itself, every other byte for
/// a character from U+0100 on, in order (GPT-2's table).
pub fn byte_alphabet() -> HashMap<char, u8> {
    let printable = |b: u8| (33..=126).contains(&b) || (161..=172).contains(&b) || b >= 174;
    let mut map = HashMap::with_capacity(256);
    let mut next = 0x100;
    for byte in 0..=255u8 {
        if printable(byte) {
            map.insert(char::from(byte), byte);
        } else if let Some(c) = char::from_u32(next) {
            map.insert(c, byte);
            next += 1;
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::testing::tokenizer;
    use proptest::prelude::*;

    #[test]
    fn control_tokens_are_found_by_text() {
        let t = tokenizer();
        let user = t.control_id("<|user|>").unwrap();
        assert_eq!(t.encode("<|user|>a").unwrap()[0], user);
        assert!(!t.encode_plain("<|user|>a").unwrap().contains(&user));
        assert_eq!(t.decode(&t.encode_plain("<|user|>a").unwrap()), "<|user|>a");
        assert_eq!(t.control_id("<|nobody|>"), None);
    }

    #[test]
    fn special_tokens_have_no_text_and_markup_has() {
        let t = tokenizer();
        let ids = t.encode("<|user|>hi<think></think><tool_call>").unwrap();
        assert_eq!(t.decode(&ids), "hi<think></think><tool_call>");
        assert_eq!(t.token_bytes(u32::MAX), b"");
    }

    #[test]
    fn borders_of_control_tokens_are_guarded() {
        let t = tokenizer();
        for text in ["<", "a<|us", "|>", "er|>x", "<|user|>", "<<|user|>|user|>"] {
            assert!(t.touches_control(text), "{text}");
            let guarded = t.guard(text, '\u{e000}');
            for (before, after) in [("", ""), ("<|us", "er|>"), ("<", ">"), ("<|user", "")] {
                let whole = format!("{before}{guarded}{after}");
                assert!(!t.finder.is_match(&whole), "{whole:?}");
            }
            assert_eq!(guarded.replace('\u{e000}', ""), text);
        }
        assert!(!t.touches_control("an ordinary sentence, 3 < 4"));
    }

    #[test]
    fn a_tokenizer_that_is_not_byte_level_is_refused() {
        let error = Tokenizer::from_json(br#"{"decoder":{"type":"Metaspace"}}"#).err().unwrap();
        assert!(error.to_string().contains("ByteLevel"), "{error}");
        assert!(Tokenizer::from_json(b"nonsense").is_err());
    }

    proptest! {
        #[test]
        fn plain_text_round_trips(text in "\\PC{0,60}") {
            let t = tokenizer();
            prop_assert_eq!(t.decode(&t.encode_plain(&text).unwrap()), text);
        }

        #[test]
        fn guarded_encoding_equals_full_encoding_of_harmless_text(
            parts in proptest::collection::vec("[a-z \n.é]{0,12}", 1..6)
        ) {
            let t = tokenizer();
            let text = parts.join("<|user|>");
            prop_assert_eq!(t.encode_guarded(&text, '\u{e000}').unwrap(), t.encode(&text).unwrap());
        }

        #[test]
        fn guarded_text_never_yields_a_control_id(
            parts in proptest::collection::vec(
                prop_oneof![
                    Just("<|user|>".to_owned()), Just("<|".to_owned()), Just("user".to_owned()),
                    Just("|>".to_owned()), Just("</think>".to_owned()), Just("<".to_owned()), "[a-z]{0,3}"
                ],
                0..10,
            )
        ) {
            let t = tokenizer();
            let text = parts.concat();
            let ids = t.encode_guarded(&t.guard(&text, '\u{e000}'), '\u{e000}').unwrap();
            prop_assert!(ids.iter().all(|id| t.controls().iter().all(|c| c.id != *id)));
            prop_assert_eq!(t.decode(&ids), text);
        }
    }
}

//! Between bytes and token ids, one byte a token: a script must come out as it is written, whatever a tokenizer would merge.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;

/// The ids of all bytes, and of the tokens that have names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    bytes: Vec<u32>,
    /// Longest names first.
    named: Vec<(String, u32)>,
    /// What each id reads as.
    text: HashMap<u32, Vec<u8>>,
}

#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

#[derive(Deserialize)]
struct Model {
    vocab: HashMap<String, u32>,
}

/// The letter that byte-level vocabularies write for a byte: itself where it can be printed, else the next one free from
/// U+0100 on.
fn letters() -> Vec<char> {
    let printed = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    let letter = |b: u8| {
        if printed(b) {
            return char::from(b);
        }
        next += 1;
        char::from_u32(next - 1).unwrap_or('\u{fffd}')
    };
    (0..=u8::MAX).map(letter).collect()
}

impl Default for Vocabulary {
    /// Ids are bytes.
    fn default() -> Self {
        let text = (0..=u8::MAX).map(|b| (u32::from(b), vec![b])).collect();
        Self { bytes: (0..256).collect(), named: Vec::new(), text }
    }
}

impl Vocabulary {
    /// Reads a byte-level `tokenizer.json`.
    ///
    /// # Errors
    /// A file that is none, or that has no token for some byte.
    pub fn read(path: &Path) -> Result<Self, String> {
        let at = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let text = std::fs::read_to_string(path).map_err(|e| at(&e))?;
        Self::parse(&text).map_err(|e| at(&e))
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file: File = serde_json::from_str(text).map_err(|e| e.to_string())?;
        let letters = letters();
        let mut bytes = Vec::with_capacity(256);
        for (byte, letter) in letters.iter().enumerate() {
            let id = file.model.vocab.get(letter.encode_utf8(&mut [0; 4]) as &str).copied();
            bytes.push(id.ok_or_else(|| {
                format!("no token is byte {byte:#04x} alone: scripts need a byte-level vocabulary, or ids")
            })?);
        }
        let byte_of: HashMap<char, u8> = letters.iter().zip(0..=u8::MAX).map(|(l, b)| (*l, b)).collect();
        // What is not written in those letters is no text of the model's.
        let read = |token: &str| token.chars().map(|c| byte_of.get(&c).copied()).collect::<Option<Vec<u8>>>();
        let mut text: HashMap<u32, Vec<u8>> =
            file.model.vocab.iter().filter_map(|(token, id)| Some((*id, read(token)?))).collect();
        let mut named: Vec<(String, u32)> = Vec::new();
        for added in file.added_tokens.into_iter().filter(|a| !a.content.is_empty()) {
            text.insert(added.id, added.content.clone().into_bytes());
            named.push((added.content, added.id));
        }
        named.sort_by(|a, b| b.0.len().cmp(&a.0.len()).then(a.0.cmp(&b.0)));
        Ok(Self { bytes, named, text })
    }

    /// Ids of a text: tokens with a name by their name, everything else byte by byte.
    pub fn ids(&self, text: &str) -> Vec<u32> {
        let mut out = Vec::with_capacity(text.len());
        let mut rest = text;
        while let Some(&byte) = rest.as_bytes().first() {
            if let Some((name, id)) = self.named.iter().find(|(name, _)| rest.starts_with(name.as_str())) {
                out.push(*id);
                rest = &rest[name.len()..];
                continue;
            }
            // A whole character at a time, so that the rest is text again.
            let length = rest.chars().next().map_or(1, char::len_utf8);
            out.extend(rest.as_bytes()[..length].iter().map(|b| self.bytes[*b as usize]));
            debug_assert!(length > 1 || byte < 0x80, "one byte is one character");
            rest = &rest[length..];
        }
        out
    }

    /// The id of a byte.
    pub fn byte(&self, byte: u8) -> u32 {
        self.bytes[byte as usize]
    }

    /// The id of a token with a name, or of a single byte.
    pub fn token(&self, text: &str) -> Option<u32> {
        match self.ids(text)[..] {
            [id] => Some(id),
            _ => None,
        }
    }

    /// What ids read as; those without a text are left out.
    pub fn bytes(&self, ids: &[u32]) -> Vec<u8> {
        ids.iter().filter_map(|id| self.text.get(id)).flatten().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokenizer(skip: Option<char>) -> String {
        let mut vocab: HashMap<String, u32> = letters()
            .into_iter()
            .zip(1000..)
            .filter(|(l, _)| Some(*l) != skip)
            .map(|(l, id)| (l.into(), id))
            .collect();
        vocab.insert("ab".into(), 7);
        let added = serde_json::json!([
            {"id": 1, "content": "<|end|>"}, {"id": 2, "content": "<|end|>s"}, {"id": 3, "content": "</think>"},
        ]);
        serde_json::json!({"added_tokens": added, "model": {"type": "BPE", "vocab": vocab}}).to_string()
    }

    #[test]
    fn letters_are_those_of_byte_level_vocabularies() {
        let l = letters();
        assert_eq!(
            (l[b'a' as usize], l[b' ' as usize], l[b'\n' as usize], l[0], l[0xad]),
            ('a', 'Ġ', 'Ċ', 'Ā', 'Ń')
        );
        let mut all = l.clone();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 256);
    }

    #[test]
    fn text_goes_byte_by_byte_and_names_as_tokens() {
        let v = Vocabulary::parse(&tokenizer(None)).unwrap();
        assert_eq!(v.ids("ab"), [1000 + 97, 1000 + 98], "never merged");
        assert_eq!(v.ids("é<|end|>"), [1000 + 0xc3, 1000 + 0xa9, 1]);
        assert_eq!(v.ids("<|end|>s</think>"), [2, 3], "the longest name");
        assert_eq!(
            (v.token("</think>"), v.token("a"), v.token("ab"), v.token("")),
            (Some(3), Some(1097), None, None)
        );
        for text in ["", "plain", "naïve 你好 🙂\n\t\0", "x</think>y<|end|>"] {
            assert_eq!(v.bytes(&v.ids(text)), text.as_bytes());
        }
        assert_eq!(
            v.bytes(&[7, 99_999]),
            b"ab",
            "a merged token reads as its bytes, an unknown one as nothing"
        );
    }

    #[test]
    fn without_a_tokenizer_ids_are_bytes() {
        let v = Vocabulary::default();
        assert_eq!(v.ids("é!"), [0xc3, 0xa9, 0x21]);
        assert_eq!(v.bytes(&[0x68, 0x69, 300]), b"hi");
    }

    #[test]
    fn a_vocabulary_without_some_byte_is_refused_by_it() {
        let told = Vocabulary::parse(&tokenizer(Some('Ġ'))).unwrap_err();
        assert!(told.contains("byte 0x20"), "{told}");
        assert!(Vocabulary::parse("{}").is_err());
        assert!(Vocabulary::read(Path::new("/nowhere.json")).unwrap_err().contains("/nowhere.json"));
    }
}

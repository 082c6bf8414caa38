//! Log probabilities in the two forms that `OpenAI` knows.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::http::pump::Told;
use crate::text::TextModel;

/// Writes log probabilities with the tokens' text.
pub struct Writer {
    text: Arc<TextModel>,
    /// Characters of the reply so far, for `text_offset`.
    offset: usize,
}

impl Writer {
    /// A writer for one reply.
    pub fn new(text: Arc<TextModel>) -> Self {
        Self { text, offset: 0 }
    }

    /// A token's text; what is no whole character is U+FFFD, and a control token has its name.
    fn name(&self, id: u32) -> String {
        match self.text.tokenizer.token_bytes(id) {
            [] => self.text.tokenizer.control_name(id).unwrap_or_default().to_owned(),
            bytes => String::from_utf8_lossy(bytes).into_owned(),
        }
    }

    fn entry(&self, id: u32, value: f64) -> Map<String, Value> {
        let mut entry = Map::new();
        entry.insert("token".into(), json!(self.name(id)));
        // JSON has no infinity.
        entry.insert("logprob".into(), json!(value.max(-9999.0)));
        entry.insert("bytes".into(), json!(self.text.tokenizer.token_bytes(id)));
        entry
    }

    fn entries<'a>(&self, told: impl Iterator<Item = &'a Told>) -> Vec<Value> {
        told.map(|t| {
            let mut entry = self.entry(t.id, t.logprobs.token);
            let top: Vec<Value> =
                t.logprobs.top.iter().map(|(id, value)| Value::Object(self.entry(*id, *value))).collect();
            entry.insert("top_logprobs".into(), Value::Array(top));
            Value::Object(entry)
        })
        .collect()
    }

    /// Chat: tokens of the answer under `content`, those of the reasoning under `reasoning`.
    pub fn chat(&self, told: &[Told]) -> Value {
        let mut block = Map::new();
        block.insert("content".into(), json!(self.entries(told.iter().filter(|t| !t.thinking))));
        let reasoning = self.entries(told.iter().filter(|t| t.thinking));
        if !reasoning.is_empty() {
            block.insert("reasoning".into(), json!(reasoning));
        }
        block.insert("refusal".into(), Value::Null);
        Value::Object(block)
    }

    /// The entries of answer tokens alone, for the Responses dialect.
    pub fn answer(&self, told: &[Told]) -> Vec<Value> {
        self.entries(told.iter().filter(|t| !t.thinking))
    }

    /// Completions: parallel lists.
    pub fn text(&mut self, told: &[Told]) -> Value {
        let names: Vec<String> = told.iter().map(|t| self.name(t.id)).collect();
        let mut offsets = Vec::with_capacity(told.len());
        for name in &names {
            offsets.push(self.offset);
            self.offset += name.chars().count();
        }
        let values: Vec<f64> = told.iter().map(|t| t.logprobs.token.max(-9999.0)).collect();
        let top: Vec<Value> = told
            .iter()
            .map(|t| {
                let mut map = Map::new();
                for (id, value) in &t.logprobs.top {
                    // Several ids may have one text: the likeliest counts.
                    map.entry(self.name(*id)).or_insert_with(|| json!(value.max(-9999.0)));
                }
                Value::Object(map)
            })
            .collect();
        json!({"tokens": names, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets})
    }
}

//! How often the draft head of a model guesses right on its own replies.

use std::path::Path;

use plugfold::text::TextModel;
use plugfold::text::chat::ChatRequest;
use plugfold_abi::Phase;
use plugfold_engine::core::{Core, CoreOptions, MtpRows, Want};
use plugfold_engine::split::Split;
use serde_json::Value;

use crate::model::{argmax, forward};

/// First drafts over some replies: the head's best token for a position, given the model's row and the token before.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Acceptance {
    /// Positions drafted.
    pub drafted: usize,
    /// Positions at which the draft is the token that the model then drew.
    pub accepted: usize,
}

impl Acceptance {
    /// The accepted share.
    pub fn rate(&self) -> f64 {
        self.accepted as f64 / self.drafted.max(1) as f64
    }
}

/// A model that answers and drafts.
pub struct Drafted {
    core: Core,
    text: TextModel,
    vocab: usize,
}

impl Drafted {
    /// Loads a model folder.
    ///
    /// # Panics
    /// When it cannot be loaded or has no draft head.
    pub fn load(dir: &Path, context: usize) -> Self {
        let options = CoreOptions { context: Some(context), ..CoreOptions::default() };
        let core = Core::load(dir, &options, Split::WHOLE, None).unwrap_or_else(|e| panic!("{e}"));
        assert!(core.has_mtp(), "the model has no draft head");
        let text = TextModel::load(dir, &core.config().eos_ids).unwrap_or_else(|e| panic!("{e}"));
        let vocab = core.config().vocab_size;
        Self { core, text, vocab }
    }

    /// Answers a chat request greedily, drafts every position of the reply, and counts.
    ///
    /// # Panics
    /// When the request is malformed or a forward fails.
    pub fn measure(&mut self, request: &Value, most: usize) -> Acceptance {
        let list = |v: &Value| v.as_array().cloned().unwrap_or_default();
        let variables = request["chat_template_kwargs"].as_object().cloned().unwrap_or_default();
        let chat = ChatRequest {
            messages: list(&request["messages"]),
            tools: list(&request["tools"]),
            thinking: variables.get("enable_thinking") != Some(&Value::Bool(false)),
            variables,
            places: None,
        };
        let prompt = self.text.encode_chat(chat).unwrap_or_else(|e| panic!("{e}")).ids;
        let core = &mut self.core;
        core.begin(0);
        let mut hidden = Vec::new();
        let mut row = Vec::new();
        for chunk in prompt.chunks(64) {
            let f = forward(core, Phase::Prefill, 0, chunk, Want::Last);
            hidden.extend_from_slice(core.output(&f, "rows").unwrap_or(&[]));
            row = core.output(&f, "logits").unwrap_or(&[]).to_vec();
            core.commit(&f, &[chunk.len()]).unwrap_or_else(|e| panic!("{e}"));
        }
        let mut ids = prompt.clone();
        while ids.len() < prompt.len() + most {
            let token = argmax(&row);
            ids.push(token);
            if self.text.stop_ids.contains(&token) {
                break;
            }
            let f = forward(core, Phase::Window, 0, &[token], Want::Last);
            hidden.extend_from_slice(core.output(&f, "rows").unwrap_or(&[]));
            row = core.output(&f, "logits").unwrap_or(&[]).to_vec();
            core.commit(&f, &[1]).unwrap_or_else(|e| panic!("{e}"));
        }
        // Row i pairs position i with token i + 1 and drafts token i + 2.
        let width = core.config().hidden_size;
        let rows = hidden.len() / width;
        let mut out = Acceptance::default();
        for start in (0..rows).step_by(64) {
            let end = (start + 64).min(rows);
            let next_ids = &ids[start + 1..=end.min(ids.len() - 1)];
            let part = &hidden[start * width..(start + next_ids.len()) * width];
            let at = [MtpRows { slot: 0, start, next_ids, hidden: part, want: Want::All, embeds: &[] }];
            let f = core.mtp(&at, true, None).unwrap_or_else(|e| panic!("{e}"));
            assert_eq!(f.failure, None);
            let logits = core.output(&f, "logits").unwrap_or(&[]);
            for (i, row) in logits.chunks(self.vocab).enumerate() {
                let position = start + i + 2;
                if position > prompt.len() && position < ids.len() {
                    out.drafted += 1;
                    out.accepted += usize::from(argmax(row) == ids[position]);
                }
            }
        }
        out
    }
}

/// The first requests of an evaluation file, one JSON object a line.
///
/// # Panics
/// When it cannot be read.
pub fn requests(file: &Path, most: usize) -> Vec<Value> {
    let text = std::fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let parse = |line: &str| serde_json::from_str::<Value>(line).unwrap_or_else(|e| panic!("{e}"));
    text.lines().take(most).map(|l| parse(l)["request"].clone()).collect()
}

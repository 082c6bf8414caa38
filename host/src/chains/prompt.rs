//! The prompt chain: variables, text, encoding, ids.

use plugfold_abi::points::{ControlToken, PromptLink as _, PromptLinkObject, TokenizerObject};
use plugfold_abi::{List, Maybe, OpError, Slice, Text, TextBuf};
use plugfold_engine::hooks::{HookError, Hooked};
use serde_json::{Map, Value};

use super::{Chains, Frozen, fault};
use crate::http::error::ApiError;
use crate::text::chat::Stages;
use crate::text::{TextError, Tokenizer};

/// The tokenizer as links see it.
struct Encoder<'t>(&'t Tokenizer);

impl plugfold_abi::points::Tokenizer for Encoder<'_> {
    fn encode(&self, text: Text<'_>, guard: u32) -> Result<List<u32>, OpError> {
        let text = text.get_str();
        let ids = match guard {
            0 => self.0.encode(text),
            scalar => {
                let guard = char::from_u32(scalar)
                    .ok_or_else(|| OpError::new(format!("the guard {scalar} is no character")))?;
                self.0.encode_guarded(text, guard)
            }
        };
        ids.map(List::from).map_err(|e| OpError::new(e.to_string()))
    }

    fn controls(&self) -> Result<List<ControlToken>, OpError> {
        let control = |control: &crate::text::tokenizer::ControlToken| ControlToken {
            text: control.text.as_str().into(),
            id: control.id,
            special: control.special,
            verbatim: control.verbatim,
        };
        Ok(self.0.controls().iter().map(control).collect())
    }

    fn uncut(&self) -> Result<TextBuf, OpError> {
        Ok(self.0.uncut().into())
    }
}

impl Chains {
    /// Lets prompt links know the tokenizer, before the server serves; gives the ids by which they end replies.
    ///
    /// # Errors
    /// A link that refuses the start.
    pub fn start(&self, tokenizer: &Tokenizer) -> Result<Vec<u32>, HookError> {
        let encoder = Encoder(tokenizer);
        let lent = TokenizerObject::lend(&encoder);
        let mut ends = Vec::new();
        for h in &self.prompts {
            let more = h.call(|l| l.start(&lent))?;
            let known = |id: &u32| tokenizer.controls().iter().any(|control| control.id == *id);
            if let Some(id) = more.iter().find(|id| !known(id)) {
                return Err(fault(h, format!("ends replies with {id}, which is no control token")));
            }
            ends.extend(more);
        }
        Ok(ends)
    }

    /// Tells prompt links all ids that end replies.
    ///
    /// # Errors
    /// A link that refuses the start.
    pub fn ends(&self, ids: &[u32]) -> Result<(), HookError> {
        self.prompts.iter().try_for_each(|h| h.call(|l| l.ends(Slice::from(ids))))
    }

    /// Variables of the template, after the request's own and before the server's defaults.
    ///
    /// # Errors
    /// A link that fails or makes something else of them than a JSON object.
    pub fn variables(
        &self,
        body: &Map<String, Value>,
        variables: &mut Map<String, Value>,
    ) -> Result<(), ApiError> {
        for h in &self.prompts {
            let before = serde_json::to_string(variables).unwrap_or_default();
            let mut text = TextBuf::from(before.as_str());
            Frozen(body).lend(|body| h.call(|l| l.variables(body, &mut text)))?;
            if text.as_str() == before {
                continue;
            }
            match serde_json::from_str(&text) {
                Ok(Value::Object(changed)) => *variables = changed,
                Ok(_) => return Err(fault(h, "makes template variables that are no JSON object").into()),
                Err(e) => {
                    return Err(fault(h, format!("makes template variables that are not JSON: {e}")).into());
                }
            }
        }
        Ok(())
    }

    /// What happens to the text of a prompt.
    pub fn stages<'c>(
        &'c self,
        body: &'c Map<String, Value>,
        tokenizer: &'c Tokenizer,
        most: usize,
    ) -> PromptStages<'c> {
        PromptStages { links: &self.prompts, body, encoder: Encoder(tokenizer), most }
    }

    /// The ids, once they are known. `rows` are the runs of image rows among them: first position, count, id.
    ///
    /// # Errors
    /// A link that fails, moves an image, or makes ids that are no prompt.
    pub fn ids(
        &self,
        body: &Map<String, Value>,
        ids: Vec<u32>,
        vocab: usize,
        rows: &[(usize, usize, u32)],
    ) -> Result<Vec<u32>, ApiError> {
        if self.prompts.is_empty() {
            return Ok(ids);
        }
        let mut list = List::from(ids);
        for h in &self.prompts {
            Frozen(body).lend(|body| h.call(|l| l.ids(body, &mut list)))?;
            if list.is_empty() {
                return Err(fault(h, "leaves a prompt without ids").into());
            }
            if let Some(id) = list.iter().find(|id| **id as usize >= vocab) {
                return Err(fault(h, format!("makes id {id}, outside the vocabulary of {vocab}")).into());
            }
            let stays = |(at, count, id): &(usize, usize, u32)| {
                list.get(*at..at + count).is_some_and(|r| r.iter().all(|i| i == id))
            };
            if !rows.iter().all(stays) {
                return Err(fault(h, "moves the rows of an image").into());
            }
        }
        Ok(list.into())
    }
}

/// The stages of the prompt chain that work on text.
pub struct PromptStages<'c> {
    links: &'c [Hooked<PromptLinkObject>],
    body: &'c Map<String, Value>,
    encoder: Encoder<'c>,
    /// Bytes that links may add to the text.
    most: usize,
}

impl Stages for PromptStages<'_> {
    fn text(&self, text: String) -> Result<String, TextError> {
        if self.links.is_empty() {
            return Ok(text);
        }
        let most = text.len().saturating_add(self.most);
        let mut text = TextBuf::from(text);
        for h in self.links {
            Frozen(self.body)
                .lend(|body| h.call(|l| l.text(body, &mut text)))
                .map_err(|e| TextError::Hook(e.into()))?;
            if text.len() > most {
                let what = format!("makes a prompt of {} bytes; the limit is {most}", text.len());
                return Err(TextError::Hook(fault(h, what).into()));
            }
        }
        Ok(text.into())
    }

    fn encode(&self, text: &str, guard: Option<char>) -> Result<Option<Vec<u32>>, TextError> {
        let guard = guard.map_or(0, u32::from);
        for h in self.links {
            let lent = TokenizerObject::lend(&self.encoder);
            let encoded = h.call(|l| l.encode(text.into(), guard, &lent));
            if let Maybe::RSome(ids) = encoded.map_err(|e| TextError::Hook(e.into()))? {
                return Ok(Some(ids.into()));
            }
        }
        Ok(None)
    }
}

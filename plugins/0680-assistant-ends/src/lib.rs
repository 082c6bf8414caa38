//! The token that opens an assistant's turn ends a reply: a model that begins a second answer by itself is cut off there.

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{PromptLink, PromptLinkObject, Tokenizer as _, TokenizerObject};
use plugfold_abi::{Knobs, List, OpError, TextBuf};

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");
/// The token, by its text: its id differs between checkpoints.
const TOKEN: &str = "<|assistant|>";

/// The plugin.
pub struct AssistantEnds;

impl Plugin for AssistantEnds {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let link = Ends::new(&setup.knobs)?;
        Ok(link.map_or_else(List::new, |link| List::from(vec![Offer::of(PromptLinkObject::new(link))])))
    }
}

/// The link that names the token.
pub struct Ends;

impl Ends {
    /// The link, unless it is off. An empty value means on.
    ///
    /// # Errors
    /// No such knob.
    pub fn new(knobs: &Knobs<'_>) -> Result<Option<Self>, OpError> {
        let value = &knobs.get("enabled")?.value;
        let on = value.as_bool() || value.as_text().is_some_and(|text| text.is_empty() || text == "empty");
        Ok(on.then_some(Self))
    }
}

impl PromptLink for Ends {
    fn start(&self, tokenizer: &TokenizerObject) -> Result<List<u32>, OpError> {
        let controls = tokenizer.controls()?;
        let found = controls.iter().filter(|control| control.text == TOKEN && control.special);
        Ok(found.map(|control| control.id).collect())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: AssistantEnds);

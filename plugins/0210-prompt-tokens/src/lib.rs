//! Prompts of a conversation are tokenized from where they differ on.
//!
//! A tokenizer finds its control tokens before it looks at anything else, so a text that is cut behind one has the tokens of
//! its parts, one after the other. The last prompts are kept with their tokens; of a new one only what comes after the last
//! control token that it shares with one of them is encoded.

mod cache;
mod cuts;

use std::sync::{Mutex, OnceLock, PoisonError};

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{
    Host, HostObject, Level, PromptLink, PromptLinkObject, Tokenizer, TokenizerObject,
};
use plugfold_abi::{Knobs, List, Maybe, OpError, Text, TextBuf};

use cache::{Cache, Entry, Found};
use cuts::Cuts;

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");
/// Bytes of text and tokens that are kept.
const BYTES: usize = 256 << 20;

/// The plugin.
pub struct PromptTokens;

impl Plugin for PromptTokens {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let link = Tokens::new(&setup.knobs, Some(setup.host()))?;
        Ok(link.map_or_else(List::new, |link| List::from(vec![Offer::of(PromptLinkObject::new(link))])))
    }
}

/// The link of the prompt chain.
pub struct Tokens {
    verify: bool,
    cuts: OnceLock<Option<Cuts>>,
    cache: Mutex<Cache>,
    host: Option<&'static HostObject>,
}

impl Tokens {
    /// The link that these knobs ask for; `None` while it is off.
    ///
    /// # Errors
    /// Knobs that are none.
    pub fn new(knobs: &Knobs<'_>, host: Option<&'static HostObject>) -> Result<Option<Self>, OpError> {
        let entries = knobs.int("entries")?;
        let entries = usize::try_from(entries).ok().filter(|n| *n > 0);
        let entries = entries.ok_or_else(|| OpError::invalid("entries must be at least 1"))?;
        let verify = match knobs.text("mode")? {
            "0" => return Ok(None),
            "1" => false,
            "verify" => true,
            other => return Err(OpError::invalid(format!("mode is {other:?}; it must be 1, 0 or verify"))),
        };
        let cache = Mutex::new(Cache::new(entries, BYTES));
        Ok(Some(Self { verify, cuts: OnceLock::new(), cache, host }))
    }

    fn cache(&self) -> std::sync::MutexGuard<'_, Cache> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self, level: Level, message: &str) -> Result<(), OpError> {
        self.host.map_or(Ok(()), |host| host.log(level, message.into()))
    }

    fn count(&self, name: &str, delta: usize) -> Result<(), OpError> {
        self.host.map_or(Ok(()), |host| host.count(name.into(), delta as f64))
    }

    fn full(&self, text: &str, guard: u32, with: &TokenizerObject) -> Result<Vec<u32>, OpError> {
        self.count("full_encodes", 1)?;
        self.count("encoded_bytes", text.len())?;
        Ok(with.encode(text.into(), guard)?.into())
    }

    /// The tokens of a text; what is known of its beginning is not encoded again.
    fn tokens(
        &self,
        cuts: &Cuts,
        text: &str,
        guard: u32,
        with: &TokenizerObject,
    ) -> Result<Vec<u32>, OpError> {
        let found = self.cache().find(text, guard);
        let (tokens, cut, mut known) = match &found {
            Found::Nothing => (self.full(text, guard, with)?, (0, 0), Vec::new()),
            Found::All(entry) => {
                self.hit(entry.tokens.len())?;
                let tokens = entry.tokens.clone();
                if !self.verify {
                    return Ok(tokens);
                }
                (tokens, (text.len(), entry.tokens.len()), entry.cuts.clone())
            }
            Found::Until(entry, cut) => {
                self.hit(cut.1)?;
                let rest = &text[cut.0..];
                self.count("encoded_bytes", rest.len())?;
                let mut tokens = entry.tokens[..cut.1].to_vec();
                tokens.extend(with.encode(rest.into(), guard)?);
                let known = entry.cuts.iter().copied().take_while(|c| c.0 <= cut.0).collect();
                (tokens, *cut, known)
            }
        };
        let sure = match &found {
            Found::All(_) | Found::Until(..) if self.verify => {
                self.checked(&tokens, text, cut.0, guard, with)?
            }
            _ => None,
        };
        // Where a use turned out wrong, its cuts are as well.
        let (from, tokens) = match sure {
            Some(full) => {
                known.clear();
                ((0, 0), full)
            }
            None => (cut, tokens),
        };
        if let Some(new) = cuts.of(text, &tokens, from) {
            known.extend(new);
            self.cache().keep(Entry { guard, text: text.to_owned(), tokens: tokens.clone(), cuts: known });
        }
        Ok(tokens)
    }

    fn hit(&self, tokens: usize) -> Result<(), OpError> {
        self.count("hits", 1)?;
        self.count("tokens_reused", tokens)
    }

    /// The tokens of a full encoding, where they are others than these; that is told.
    fn checked(
        &self,
        tokens: &[u32],
        text: &str,
        shared: usize,
        guard: u32,
        with: &TokenizerObject,
    ) -> Result<Option<Vec<u32>>, OpError> {
        let full = self.full(text, guard, with)?;
        if tokens == full {
            return Ok(None);
        }
        self.count("mismatches", 1)?;
        let first = tokens.iter().zip(&full).position(|(a, b)| a != b);
        let first = first.unwrap_or_else(|| tokens.len().min(full.len()));
        self.log(
            Level::Warn,
            &format!(
                "tokens that were used again are wrong: of {shared} shared bytes, {} tokens where a full encoding has {}, \
                 the first difference at token {first}",
                tokens.len(),
                full.len()
            ),
        )?;
        Ok(Some(full))
    }
}

impl PromptLink for Tokens {
    fn start(&self, tokenizer: &TokenizerObject) -> Result<List<u32>, OpError> {
        let cuts = match Cuts::new(&tokenizer.uncut()?, &tokenizer.controls()?) {
            Ok(cuts) => Some(cuts),
            Err(why) => {
                self.log(Level::Warn, &format!("prompts are tokenized whole: {why}"))?;
                None
            }
        };
        // A second start is the same tokenizer's.
        let _ = self.cuts.set(cuts);
        Ok(List::new())
    }

    fn encode(
        &self,
        text: Text<'_>,
        guard: u32,
        with: &TokenizerObject,
    ) -> Result<Maybe<List<u32>>, OpError> {
        match self.cuts.get() {
            Some(Some(cuts)) => Ok(Maybe::RSome(self.tokens(cuts, text.get_str(), guard, with)?.into())),
            _ => Ok(Maybe::RNone),
        }
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: PromptTokens);

#[cfg(test)]
mod tests;

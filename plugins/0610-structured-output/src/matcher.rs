//! Where a reply stands: before the answer, inside the grammar, or past its end. Every step can be taken back.

use std::sync::Arc;

use llguidance::Matcher;
use llguidance::api::StopReason;

/// What a token of the reply was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Was {
    /// Reasoning.
    Thought,
    /// The end of the reasoning.
    Closed,
    /// Part of what the grammar describes.
    Matched,
    /// The token that ended it.
    Ended,
    /// After the end.
    Free,
}

/// A grammar in the course of one reply.
pub struct Tracker {
    inner: Matcher,
    /// Ids that end a reply.
    ends: Arc<[u32]>,
    /// Closes the reasoning, where the prompt has left it open.
    think_end: Option<u32>,
    log: Vec<Was>,
    /// Tokens of the model's head.
    width: u32,
}

/// Where the reply stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stand {
    /// In the reasoning: anything goes.
    Thinking,
    /// Inside the grammar.
    Inside,
    /// The grammar has ended: anything goes.
    Over,
}

impl Tracker {
    /// A grammar before the first token of a reply. `think_end` is given while the prompt ends in open reasoning.
    pub fn new(inner: Matcher, ends: Arc<[u32]>, think_end: Option<u32>, width: u32) -> Self {
        Self { inner, ends, think_end, log: Vec::new(), width }
    }

    /// Where the reply stands.
    pub fn stand(&self) -> Stand {
        match self.log.last() {
            None if self.think_end.is_some() => Stand::Thinking,
            Some(Was::Thought) => Stand::Thinking,
            None | Some(Was::Closed | Was::Matched) => Stand::Inside,
            Some(Was::Ended | Was::Free) => Stand::Over,
        }
    }

    /// Where a reply stands after a token that it may have where it stands.
    pub fn after(&self, stand: Stand, token: u32) -> Stand {
        match stand {
            Stand::Thinking if self.closes(token) => Stand::Inside,
            Stand::Inside if self.ends(token) => Stand::Over,
            other => other,
        }
    }

    /// Tokens taken.
    pub fn len(&self) -> usize {
        self.log.len()
    }

    /// Whether no token was taken.
    pub fn is_empty(&self) -> bool {
        self.log.is_empty()
    }

    /// Whether a token ends the reply.
    pub fn ends(&self, token: u32) -> bool {
        self.ends.contains(&token)
    }

    /// Whether a token after the reasoning closes it.
    pub fn closes(&self, token: u32) -> bool {
        self.think_end == Some(token)
    }

    /// Takes a token; `false`, and nothing is taken, where the grammar does not allow it.
    ///
    /// # Errors
    /// A grammar that is too complex to go on, or a fault in the library.
    pub fn accept(&mut self, token: u32) -> Result<bool, String> {
        let was = match self.stand() {
            Stand::Thinking if self.closes(token) => Was::Closed,
            Stand::Thinking => Was::Thought,
            Stand::Over => Was::Free,
            Stand::Inside if self.ends(token) => {
                if !self.may_end()? {
                    return Ok(false);
                }
                Was::Ended
            }
            Stand::Inside => {
                if token >= self.width || self.stopped()? {
                    return Ok(false);
                }
                if self.inner.try_consume_tokens(&[token]).map_err(|e| brief(&e))? == 0 {
                    return Ok(false);
                }
                Was::Matched
            }
        };
        self.log.push(was);
        Ok(true)
    }

    /// Takes back the last tokens.
    ///
    /// # Errors
    /// More tokens than were taken; a fault in the library.
    pub fn rollback(&mut self, tokens: usize) -> Result<(), String> {
        let Some(keep) = self.log.len().checked_sub(tokens) else {
            return Err(format!("{tokens} tokens cannot be taken back: {} were taken", self.log.len()));
        };
        let matched = self.log[keep..].iter().filter(|was| **was == Was::Matched).count();
        self.inner.rollback(matched).map_err(|e| brief(&e))?;
        self.log.truncate(keep);
        Ok(())
    }

    /// Writes which tokens may come next, one bit each; only inside the grammar.
    ///
    /// # Errors
    /// No token may come; a grammar that is too complex to go on; a fault in the library.
    pub fn mask(&mut self, words: &mut [u32]) -> Result<(), String> {
        words.fill(0);
        if !self.stopped()? {
            let allowed = self.inner.compute_mask().map_err(|e| brief(&e))?;
            for (to, from) in words.iter_mut().zip(allowed.as_slice()) {
                *to = *from;
            }
            // The library's own end of text is one past the head's last token.
            if let Some(last) = words.get_mut(self.width as usize / 32) {
                *last &= (1u32 << (self.width % 32)) - 1;
            }
        }
        let ending = self.may_end()?;
        for id in self.ends.iter().filter(|id| **id < self.width) {
            let (word, bit) = (&mut words[*id as usize / 32], 1u32 << (id % 32));
            *word = if ending { *word | bit } else { *word & !bit };
        }
        if words.iter().all(|word| *word == 0) {
            return Err("the grammar allows no token here".into());
        }
        Ok(())
    }

    /// Whether nothing can follow but the end.
    fn stopped(&self) -> Result<bool, String> {
        if let Some(error) = self.inner.get_error() {
            return Err(first_line(&error));
        }
        Ok(self.inner.stop_reason() != StopReason::NotStopped)
    }

    fn may_end(&mut self) -> Result<bool, String> {
        Ok(self.stopped()? || self.inner.is_accepting().map_err(|e| brief(&e))?)
    }
}

/// A library's error on one line.
pub fn brief(error: &impl std::fmt::Display) -> String {
    first_line(&error.to_string())
}

/// The line that says what is wrong: excerpts of the grammar and traces follow it.
fn first_line(text: &str) -> String {
    if text.contains("oneOf constraints are not supported") {
        return "schemas of which a value may be valid under several cannot be enforced: make them exclude each other, or use \
                anyOf"
            .into();
    }
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('<'));
    let mut line = lines.next().unwrap_or("no reason given").to_owned();
    // Of a regular expression the reason comes last.
    if let Some(reason) = lines.find_map(|line| line.strip_prefix("error: ")) {
        line = format!("{} {reason}", line.trim_end());
    }
    match line.char_indices().nth(300) {
        Some((at, _)) => format!("{}...", &line[..at]),
        None => line,
    }
}

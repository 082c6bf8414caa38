//! The stream chain of one request.

use std::sync::Arc;

use plugfold_abi::points::{StreamLink as _, StreamLinkObject, StreamPiece};
use plugfold_engine::hooks::{HookError, Hooked};
use serde_json::{Map, Value};

use super::{Frozen, fault};
use crate::reply::{Piece, PieceLinks};

/// The stream links, as one request passes them.
pub struct StreamLinks {
    links: Arc<[Hooked<StreamLinkObject>]>,
    number: u64,
    /// Links that were told of the beginning.
    begun: usize,
    /// What each link holds back.
    held: Vec<String>,
    /// Largest piece, and most bytes that a link may hold back.
    most: usize,
}

/// Reasoning and text on their way through the links.
#[derive(Default)]
struct Both {
    reasoning: String,
    text: String,
}

impl StreamLinks {
    /// Tells the links of the beginning.
    ///
    /// # Errors
    /// A link that fails.
    pub(super) fn begin(
        links: Arc<[Hooked<StreamLinkObject>]>,
        number: u64,
        body: &Map<String, Value>,
        most: usize,
    ) -> Result<Self, HookError> {
        let held = vec![String::new(); links.len()];
        let mut this = Self { links, number, begun: 0, held, most };
        for place in 0..this.links.len() {
            let link = &this.links[place];
            Frozen(body).lend(|body| link.call(|l| l.begin(number, body)))?;
            this.begun += 1;
        }
        Ok(this)
    }

    /// Takes a piece through the links from `place` on. `true`: the reply ends behind what is in `out` then.
    fn onward(&mut self, place: usize, mut both: Both, out: &mut Vec<Piece>) -> Result<bool, HookError> {
        for at in place..self.links.len() {
            if both.text.is_empty() && both.reasoning.is_empty() {
                return Ok(false);
            }
            let link = &self.links[at];
            let mut text = std::mem::take(&mut self.held[at]);
            text.push_str(&both.text);
            let mut piece =
                StreamPiece { text: text.into(), reasoning: both.reasoning.into(), hold: 0, stop: false };
            link.call(|l| l.piece(self.number, &mut piece))?;
            let mut text: String = piece.text.into();
            both.reasoning = piece.reasoning.into();
            let hold = piece.hold as usize;
            if text.len().max(both.reasoning.len()) > self.most {
                let (made, most) = (text.len().max(both.reasoning.len()), self.most);
                return Err(fault(link, format!("makes a piece of {made} bytes; the limit is {most}")));
            }
            let Some(kept) = text.len().checked_sub(hold).filter(|kept| text.is_char_boundary(*kept)) else {
                let what = format!(
                    "holds {hold} bytes of a text of {}: more than there are, or a part of a character",
                    text.len()
                );
                return Err(fault(link, what));
            };
            let held = text.split_off(kept);
            both.text = text;
            if piece.stop {
                let stopped = self.onward(at + 1, both, out)?;
                return if stopped { Ok(true) } else { self.flush(at + 1, out).map(|_| true) };
            }
            self.held[at] = held;
        }
        if !both.reasoning.is_empty() {
            out.push(Piece::Reasoning(both.reasoning));
        }
        if !both.text.is_empty() {
            out.push(Piece::Content(both.text));
        }
        Ok(false)
    }

    /// Lets go what the links from `place` on hold back.
    fn flush(&mut self, place: usize, out: &mut Vec<Piece>) -> Result<bool, HookError> {
        for at in place..self.links.len() {
            let text = std::mem::take(&mut self.held[at]);
            if self.onward(at + 1, Both { text, ..Both::default() }, out)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl PieceLinks for StreamLinks {
    fn pass(&mut self, piece: Piece, out: &mut Vec<Piece>) -> Result<bool, HookError> {
        match piece {
            Piece::Content(text) => self.onward(0, Both { text, ..Both::default() }, out),
            Piece::Reasoning(reasoning) => self.onward(0, Both { reasoning, ..Both::default() }, out),
            call @ Piece::Call(_) => {
                if self.flush(0, out)? {
                    return Ok(true);
                }
                out.push(call);
                Ok(false)
            }
        }
    }

    fn finish(&mut self, out: &mut Vec<Piece>) -> Result<bool, HookError> {
        self.flush(0, out)
    }
}

impl Drop for StreamLinks {
    fn drop(&mut self) {
        for link in &self.links[..self.begun] {
            // The reply is over: there is nobody left to tell but the operator.
            if let Err(error) = link.call(|l| l.end(self.number)) {
                tracing::warn!("{error}");
            }
        }
    }
}

#[cfg(test)]
mod tests;

//! The reply chain: repair, parse, finish, once the model is done.

use std::sync::Arc;

use plugfold_abi::List;
use plugfold_abi::points::{Reply, ReplyLink as _, ReplyLinkObject, ToolCall as Told};
use plugfold_engine::hooks::{HookError, Hooked};
use serde_json::{Map, Value};

use super::{Frozen, fault};
use crate::http::shape::random_id;
use crate::reply::tools::ToolCall;
use crate::reply::{Piece, ReplyReader};

/// Bytes of the fields that a reply may get.
const FIELD_BYTES: usize = 64 << 10;
/// Calls that a reply may have.
const CALLS: usize = 4096;

/// The reply links, as one request passes them.
pub struct ReplyLinks {
    /// The links.
    pub links: Arc<[Hooked<ReplyLinkObject>]>,
    /// The body of the request.
    pub body: Arc<Map<String, Value>>,
    /// The client gets a stream.
    pub streamed: bool,
    /// The prompt ended inside of the reasoning.
    pub thinking: bool,
    /// Reads a text of the model as any reply of this request.
    pub reader: Box<dyn Fn() -> Result<ReplyReader, HookError> + Send>,
}

/// How the model's text ended.
#[derive(Clone, Copy, Debug)]
pub struct End<'r> {
    /// All of it, as bytes of its tokens.
    pub raw: &'r [u8],
    /// "token", "stop" or "length".
    pub ended: &'r str,
    /// The last token.
    pub last: Option<u32>,
}

/// What links made of a reply.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    /// What the client still has to get.
    pub pieces: Vec<Piece>,
    /// Why it ended, in `OpenAI`'s words.
    pub reason: &'static str,
    /// Further fields of the statistics.
    pub fields: Map<String, Value>,
}

/// Text, reasoning and calls of pieces.
#[derive(Clone, Debug, Default, PartialEq)]
struct Parts {
    text: String,
    reasoning: String,
    calls: Vec<ToolCall>,
}

impl Parts {
    fn of<'p>(pieces: impl Iterator<Item = &'p Piece>) -> Self {
        let mut parts = Self::default();
        for piece in pieces {
            match piece {
                Piece::Content(text) => parts.text.push_str(text),
                Piece::Reasoning(text) => parts.reasoning.push_str(text),
                Piece::Call(call) => parts.calls.push(call.clone()),
            }
        }
        parts
    }

    fn into_pieces(self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if !self.reasoning.is_empty() {
            pieces.push(Piece::Reasoning(self.reasoning));
        }
        if !self.text.is_empty() {
            pieces.push(Piece::Content(self.text));
        }
        pieces.extend(self.calls.into_iter().map(Piece::Call));
        pieces
    }
}

impl ReplyLinks {
    /// Takes a reply through the links. `sent` went out already, `rest` did not.
    ///
    /// # Errors
    /// A link that fails, or makes something of the reply that is none.
    pub fn finish(&self, sent: &[Piece], mut rest: Vec<Piece>, end: End<'_>) -> Result<Outcome, HookError> {
        for piece in &mut rest {
            if let Piece::Call(call) = piece {
                identify(call);
            }
        }
        let before = Parts::of(sent.iter().chain(&rest));
        let raw = String::from_utf8_lossy(end.raw).into_owned();
        let mut reply = Reply {
            raw: raw.as_str().into(),
            text: before.text.as_str().into(),
            reasoning: before.reasoning.as_str().into(),
            calls: told(&before.calls),
            finish: reason(end.ended, before.calls.is_empty()).into(),
            fields: "".into(),
            ended: end.ended.into(),
            last: end.last.into(),
            thinking: self.thinking,
            streamed: self.streamed,
        };
        Frozen(&self.body).lend(|body| {
            let each = |call: &mut dyn FnMut(&Hooked<ReplyLinkObject>) -> Result<(), HookError>| {
                self.links.iter().try_for_each(call)
            };
            each(&mut |h| h.call(|l| l.repair(body, &mut reply)))?;
            if reply.raw.as_str() != raw {
                let read = self.read(&reply.raw)?;
                reply.text = read.text.into();
                reply.reasoning = read.reasoning.into();
                reply.calls = told(&read.calls);
            }
            each(&mut |h| {
                h.call(|l| l.parse(body, &mut reply))?;
                calls(h, &reply).map(|_| ())
            })?;
            for call in reply.calls.iter_mut().filter(|call| call.id.is_empty()) {
                call.id = random_id("call_").into();
            }
            reply.finish = reason(end.ended, reply.calls.is_empty()).into();
            each(&mut |h| {
                h.call(|l| l.finish(body, &mut reply))?;
                fields(h, &reply)?;
                calls(h, &reply)?;
                known(&reply).map(|_| ()).ok_or_else(|| {
                    let finish = &reply.finish;
                    fault(
                        h,
                        format!(
                            "ends a reply with the reason {finish:?}; valid are stop, length, tool_calls"
                        ),
                    )
                })
            })
        })?;
        let last = &self.links[self.links.len() - 1];
        let after = Parts {
            calls: calls(last, &reply)?,
            text: reply.text.to_string(),
            reasoning: reply.reasoning.to_string(),
        };
        let fields = fields(last, &reply)?;
        let reason = known(&reply).unwrap_or("stop");
        let pieces = if after == before { rest } else { self.still(sent, after) };
        Ok(Outcome { pieces, reason, fields })
    }

    /// What the client does not have yet of a reply.
    fn still(&self, sent: &[Piece], mut after: Parts) -> Vec<Piece> {
        if self.streamed {
            let sent = Parts::of(sent.iter());
            let more = |all: String, sent: &str| all.strip_prefix(sent).unwrap_or_default().to_owned();
            after.text = more(after.text, &sent.text);
            after.reasoning = more(after.reasoning, &sent.reasoning);
            after.calls.drain(..sent.calls.len().min(after.calls.len()));
        }
        after.into_pieces()
    }

    /// Reads a mended text.
    fn read(&self, raw: &str) -> Result<Parts, HookError> {
        let mut reader = (self.reader)()?;
        let mut pieces = Vec::new();
        if !reader.push(raw.as_bytes(), &mut pieces) {
            reader.finish(&mut pieces);
        }
        if let Some(error) = reader.failure() {
            return Err(error.clone());
        }
        for piece in &mut pieces {
            if let Piece::Call(call) = piece {
                identify(call);
            }
        }
        Ok(Parts::of(pieces.iter()))
    }
}

fn identify(call: &mut ToolCall) {
    if call.id.is_empty() {
        call.id = random_id("call_");
    }
}

fn told(calls: &[ToolCall]) -> List<Told> {
    let told = |call: &ToolCall| Told {
        id: call.id.as_str().into(),
        name: call.name.as_str().into(),
        arguments: call.arguments.as_str().into(),
    };
    calls.iter().map(told).collect()
}

fn reason(ended: &str, without_calls: bool) -> &'static str {
    match ended {
        _ if !without_calls => "tool_calls",
        "length" => "length",
        _ => "stop",
    }
}

/// The reason of a reply, if it is one.
fn known(reply: &Reply) -> Option<&'static str> {
    let valid = ["stop", "length", "tool_calls"];
    let found = valid.into_iter().find(|reason| *reason == reply.finish.as_str());
    found.filter(|reason| *reason != "tool_calls" || !reply.calls.is_empty())
}

/// The calls of a reply, as the server has them.
fn calls(link: &Hooked<ReplyLinkObject>, reply: &Reply) -> Result<Vec<ToolCall>, HookError> {
    if reply.calls.len() > CALLS {
        return Err(fault(link, format!("makes {} calls; the limit is {CALLS}", reply.calls.len())));
    }
    let call = |call: &Told| {
        let name = call.name.as_str();
        let whole = serde_json::from_str::<Map<String, Value>>(&call.arguments);
        if name.is_empty() || whole.is_err() {
            return Err(fault(link, format!("makes a call of {name:?} whose arguments are no JSON object")));
        }
        let (id, arguments) = (call.id.to_string(), call.arguments.to_string());
        Ok(ToolCall { id, name: name.to_owned(), arguments })
    };
    reply.calls.iter().map(call).collect()
}

/// The further fields of a reply.
fn fields(link: &Hooked<ReplyLinkObject>, reply: &Reply) -> Result<Map<String, Value>, HookError> {
    let text = reply.fields.as_str();
    if text.is_empty() {
        return Ok(Map::new());
    }
    if text.len() > FIELD_BYTES {
        return Err(fault(link, format!("adds {} bytes of fields; the limit is {FIELD_BYTES}", text.len())));
    }
    serde_json::from_str(text).map_err(|e| fault(link, format!("adds fields that are no JSON object: {e}")))
}

#[cfg(test)]
mod tests;

//! The bridge from a request's engine events to its reply.
//!
//! One thread a running request receives the engine's events, decodes and parses, and hands finished updates to the
//! async side through a bounded channel. No async thread ever waits for the engine. When the reader is slow, text is
//! gathered into one waiting update; when it waits too long, the request is cancelled and the connection dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvError, RecvTimeoutError};
use std::time::{Duration, Instant, SystemTime};

use plugfold_engine::hooks::HookError;
use plugfold_engine::logprobs::TokenLogprobs;
use plugfold_engine::service::{EngineError, Event, Finish, Handle, RequestStats};
use serde_json::{Map, Value};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};
use tracing::Span;

use super::app::{App, Guard};
use super::limits::seconds;
use crate::chains::{End, ReplyLinks};
use crate::reply::{Piece, ReplyReader};
use crate::text::TextModel;
use crate::traces;

/// How often a congested pump looks whether the channel has room.
const CONGESTED: Duration = Duration::from_millis(5);
/// How long the engine may take to confirm a cancelled run before its statistics are given up.
const CONFIRM: Duration = Duration::from_secs(5);

/// What the reply side gets, in order; `End` or `Failed` is the last.
#[derive(Debug)]
pub enum Update {
    /// What one or more rounds added.
    Part(Part),
    /// The reply is complete.
    End(Box<Ending>),
    /// The request failed.
    Failed(EngineError),
}

/// What one or more rounds added to a reply.
#[derive(Clone, Debug, Default)]
pub struct Part {
    /// Its text and calls.
    pub pieces: Vec<Piece>,
    /// Its tokens with their log probabilities, when the request asks for them.
    pub told: Vec<Told>,
}

impl Part {
    fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.told.is_empty()
    }

    /// Takes in what came after it.
    pub fn append(&mut self, more: Part) {
        join(&mut self.pieces, more.pieces);
        self.told.extend(more.told);
    }

    /// Bytes it holds, roughly.
    fn bytes(&self) -> usize {
        let told = |t: &Told| 64 + 16 * t.logprobs.top.len();
        self.pieces.iter().map(size).sum::<usize>() + self.told.iter().map(told).sum::<usize>()
    }
}

/// A token with its log probabilities.
#[derive(Clone, Debug)]
pub struct Told {
    /// The token.
    pub id: u32,
    /// It belongs to the reasoning.
    pub thinking: bool,
    /// What was told of it.
    pub logprobs: TokenLogprobs,
}

/// How a reply ended.
#[derive(Clone, Debug)]
pub struct Ending {
    /// Why the engine ended it.
    pub finish: Finish,
    /// The stop string that matched.
    pub stop: Option<String>,
    /// The tokens that count: through the one that completed a stop string.
    pub ids: Vec<u32>,
    /// Those of them that belong to the reasoning.
    pub reasoning_tokens: usize,
    /// What it took.
    pub stats: RequestStats,
    /// The reason that plugins settled on, in `OpenAI`'s words.
    pub reason: Option<&'static str>,
    /// Fields that plugins add to the statistics.
    pub fields: Map<String, Value>,
}

/// The async end of a running request. Dropping it cancels the run.
pub struct Updates {
    receiver: mpsc::Receiver<Update>,
    cancel: Arc<AtomicBool>,
}

impl Updates {
    /// The next update.
    pub async fn next(&mut self) -> Option<Update> {
        self.receiver.recv().await
    }

    /// The next update, for a thread that may wait.
    pub fn wait(&mut self) -> Option<Update> {
        self.receiver.blocking_recv()
    }

    /// The next update, for hand-written streams.
    pub fn poll_next(&mut self, context: &mut std::task::Context<'_>) -> std::task::Poll<Option<Update>> {
        self.receiver.poll_recv(context)
    }
}

impl Drop for Updates {
    fn drop(&mut self) {
        self.cancel.store(true, Ordering::Release);
    }
}

/// What one pump works with.
pub struct Pump {
    handle: Handle,
    reader: ReplyReader,
    text: Arc<TextModel>,
    app: Arc<App>,
    prompt: usize,
    begun: Instant,
    submitted: SystemTime,
    /// The request's, in traces.
    span: Span,
    /// The end is in the metrics.
    counted: bool,
    guard: Guard,
    sender: mpsc::Sender<Update>,
    /// Tells the connection that its reader is too slow.
    drop_connection: Arc<Notify>,
    patience: Duration,
    /// Largest part that waits for a slow reader, in bytes.
    most_waiting: usize,
    waiting: Part,
    /// Log probabilities of the tokens that come next.
    told: Vec<TokenLogprobs>,
    waiting_since: Option<Instant>,
    ids: Vec<u32>,
    thinking: bool,
    reasoning_tokens: usize,
    /// Links that see the reply when it is complete, and what they will need.
    replies: Option<ReplyLinks>,
    /// All bytes of the model, while there are such links.
    raw: Vec<u8>,
    /// What went out, while there are such links.
    sent: Vec<Piece>,
    /// What waits for such links.
    rest: Vec<Piece>,
}

/// The reader is gone or too slow: there is nobody to tell.
struct Gone;

impl Pump {
    /// Starts the thread of one request. `thinking`: the prompt ended in an open think block.
    ///
    /// # Errors
    /// [`EngineError::Unavailable`] when the system gives no thread.
    pub fn start(
        app: &Arc<App>,
        handle: Handle,
        reader: ReplyReader,
        prompt: usize,
        thinking: bool,
        drop_connection: Arc<Notify>,
        replies: Option<ReplyLinks>,
        span: Span,
    ) -> Result<Updates, EngineError> {
        let limits = &app.settings.limits;
        let (sender, receiver) = mpsc::channel(limits.stream_events.max(1));
        let cancel = Arc::clone(&handle.cancel);
        let pump = Self {
            handle,
            reader,
            text: Arc::clone(&app.text),
            app: Arc::clone(app),
            prompt,
            begun: Instant::now(),
            submitted: SystemTime::now(),
            span,
            counted: false,
            guard: app.enter(prompt),
            sender,
            drop_connection,
            patience: seconds(limits.reader_s),
            most_waiting: limits.stream_bytes,
            waiting: Part::default(),
            told: Vec::new(),
            waiting_since: None,
            ids: Vec::new(),
            thinking,
            reasoning_tokens: 0,
            replies,
            raw: Vec::new(),
            sent: Vec::new(),
            rest: Vec::new(),
        };
        std::thread::Builder::new()
            .name("reply".into())
            .spawn(move || pump.run())
            .map_err(|e| EngineError::Unavailable(format!("no thread for the request: {e}; try again")))?;
        Ok(Updates { receiver, cancel })
    }

    fn run(mut self) {
        self.app.hooks.thread(super::server::ROLE);
        if self.events().is_err() {
            self.handle.cancel();
            if !self.counted {
                self.app.metrics.left();
                traces::failed(&self.span, &"the client has left");
            }
            if !self.sender.is_closed() {
                tracing::warn!(tokens = self.ids.len(), "a stream's reader is too slow: dropped");
                self.drop_connection.notify_one();
            }
        }
    }

    fn events(&mut self) -> Result<(), Gone> {
        loop {
            let event = if self.waiting.is_empty() {
                self.handle.events.recv().map_err(|RecvError| RecvTimeoutError::Disconnected)
            } else {
                self.handle.events.recv_timeout(CONGESTED)
            };
            match event {
                Ok(Event::Prefill { .. }) => self.guard.heard(0),
                Ok(Event::Logprobs(told)) => self.told = told,
                Ok(Event::Tokens(ids)) => {
                    self.guard.heard(ids.len());
                    let mut part = Part::default();
                    let stopped = self.tokens(&ids, &mut part);
                    if let Some(error) = self.reader.failure() {
                        let error = error.clone();
                        return self.fail(error);
                    }
                    if !stopped {
                        self.hand_on(part)?;
                        continue;
                    }
                    if self.replies.is_none() {
                        self.offer(std::mem::take(&mut part))?;
                    }
                    self.handle.complete();
                    let (finish, stats) = self.confirm();
                    return self.close(part, "stop", finish, stats);
                }
                Ok(Event::Done { finish, stats }) => {
                    let mut part = Part::default();
                    let stopped = self.reader.finish(&mut part.pieces);
                    if let Some(error) = self.reader.failure() {
                        let error = error.clone();
                        return self.fail(error);
                    }
                    if finish == Finish::Cancelled {
                        self.replies = None;
                    }
                    let ended = match finish {
                        _ if stopped => "stop",
                        Finish::Length => "length",
                        Finish::Stop | Finish::Cancelled => "token",
                    };
                    return self.close(part, ended, finish, stats);
                }
                Ok(Event::Error(error)) => return self.failed(error),
                Err(RecvTimeoutError::Timeout) => self.offer(Part::default())?,
                Err(RecvTimeoutError::Disconnected) => {
                    let error = EngineError::Failed("the engine dropped the request without a word".into());
                    return self.failed(error);
                }
            }
        }
    }

    /// Reads the tokens of one round. `true`: a stop string ended the reply.
    fn tokens(&mut self, ids: &[u32], part: &mut Part) -> bool {
        let mut told = std::mem::take(&mut self.told).into_iter();
        for id in ids {
            self.ids.push(*id);
            if let Some(logprobs) = told.next() {
                part.told.push(Told { id: *id, thinking: self.thinking, logprobs });
            }
            if self.thinking {
                self.reasoning_tokens += 1;
                self.thinking = Some(*id) != self.text.think_close;
            }
            let bytes = self.text.tokenizer.token_bytes(*id);
            if self.replies.is_some() {
                self.raw.extend_from_slice(bytes);
            }
            if self.reader.push(bytes, &mut part.pieces) {
                return true;
            }
        }
        false
    }

    /// Hands a part on, or keeps what reply links still may change.
    fn hand_on(&mut self, mut part: Part) -> Result<(), Gone> {
        match &self.replies {
            Some(links) if links.streamed => join(&mut self.sent, part.pieces.clone()),
            Some(_) => join(&mut self.rest, std::mem::take(&mut part.pieces)),
            None => {}
        }
        self.offer(part)
    }

    /// The model is done: reply links, the last part, the end.
    fn close(
        &mut self,
        mut part: Part,
        ended: &str,
        finish: Finish,
        stats: RequestStats,
    ) -> Result<(), Gone> {
        let mut told = (None, Map::new());
        if let Some(links) = self.replies.take() {
            let mut rest = std::mem::take(&mut self.rest);
            join(&mut rest, part.pieces);
            let end = End { raw: &self.raw, ended, last: self.ids.last().copied() };
            match links.finish(&self.sent, rest, end) {
                Ok(outcome) => {
                    part.pieces = outcome.pieces;
                    told = (Some(outcome.reason), outcome.fields);
                }
                Err(error) => return self.fail(error),
            }
        }
        self.offer(part)?;
        self.end(finish, stats, told)
    }

    /// A link failed, and with it this request.
    fn fail(&mut self, error: HookError) -> Result<(), Gone> {
        self.handle.cancel();
        tracing::warn!("a request failed: {error}");
        self.failed(error.into())
    }

    fn failed(&mut self, error: EngineError) -> Result<(), Gone> {
        traces::failed(&self.span, &error);
        self.last(Update::Failed(error))
    }

    /// Waits for the end of a run that was cancelled because a stop string matched.
    fn confirm(&mut self) -> (Finish, RequestStats) {
        let deadline = Instant::now() + CONFIRM;
        loop {
            match self.handle.events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(Event::Done { finish, stats }) => return (finish, stats),
                Ok(Event::Error(_)) | Err(_) => return (Finish::Stop, RequestStats::default()),
                Ok(_) => {}
            }
        }
    }

    /// Hands a part on, or gathers parts while the channel is full.
    fn offer(&mut self, part: Part) -> Result<(), Gone> {
        self.waiting.append(part);
        if self.waiting.is_empty() {
            return if self.sender.is_closed() { Err(Gone) } else { Ok(()) };
        }
        match self.sender.try_send(Update::Part(std::mem::take(&mut self.waiting))) {
            Ok(()) => {
                self.waiting_since = None;
                Ok(())
            }
            Err(TrySendError::Closed(_)) => Err(Gone),
            Err(TrySendError::Full(update)) => {
                if let Update::Part(part) = update {
                    self.waiting = part;
                }
                let since = *self.waiting_since.get_or_insert_with(Instant::now);
                if since.elapsed() > self.patience || self.waiting.bytes() > self.most_waiting {
                    Err(Gone)
                } else {
                    Ok(())
                }
            }
        }
    }

    fn end(
        &mut self,
        finish: Finish,
        stats: RequestStats,
        (reason, fields): (Option<&'static str>, Map<String, Value>),
    ) -> Result<(), Gone> {
        let ending = Ending {
            finish,
            stop: self.reader.stop().map(str::to_owned),
            ids: std::mem::take(&mut self.ids),
            reasoning_tokens: self.reasoning_tokens,
            stats,
            reason,
            fields,
        };
        self.counted = true;
        let how = self.app.metrics.ended(self.prompt, &ending, self.begun.elapsed().as_secs_f64());
        traces::ended(&self.span, self.submitted, self.prompt, ending.ids.len(), how, &ending.stats);
        self.last(Update::End(Box::new(ending)))
    }

    /// Sends what waits and the last update; the reader has all its patience for it.
    fn last(&mut self, update: Update) -> Result<(), Gone> {
        let deadline = Instant::now() + self.patience;
        let mut updates = Vec::new();
        if !self.waiting.is_empty() {
            updates.push(Update::Part(std::mem::take(&mut self.waiting)));
        }
        updates.push(update);
        for mut update in updates {
            loop {
                match self.sender.try_send(update) {
                    Ok(()) => break,
                    Err(TrySendError::Closed(_)) => return Err(Gone),
                    Err(TrySendError::Full(_)) if Instant::now() >= deadline => return Err(Gone),
                    Err(TrySendError::Full(back)) => update = back,
                }
                std::thread::sleep(CONGESTED);
            }
        }
        Ok(())
    }
}

/// Appends pieces, text to text.
fn join(pieces: &mut Vec<Piece>, more: Vec<Piece>) {
    for piece in more {
        match (pieces.last_mut(), piece) {
            (Some(Piece::Content(last)), Piece::Content(text))
            | (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => last.push_str(&text),
            (_, piece) => pieces.push(piece),
        }
    }
}

fn size(piece: &Piece) -> usize {
    match piece {
        Piece::Content(text) | Piece::Reasoning(text) => text.len(),
        Piece::Call(call) => call.name.len() + call.arguments.len(),
    }
}

//! The bridge from a request's engine events to its reply.
//!
//! One thread a running request receives the engine's events, decodes and parses, and hands finished updates to the
//! async side through a bounded channel. No async thread ever waits for the engine. When the reader is slow, text is
//! gathered into one waiting update; when it waits too long, the request is cancelled and the connection dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvError, RecvTimeoutError};
use std::time::{Duration, Instant};

use plugfold_engine::service::{EngineError, Event, Finish, Handle, RequestStats};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc};

use super::app::{App, Guard};
use super::limits::seconds;
use crate::reply::{Piece, ReplyReader};
use crate::text::TextModel;

/// How often a congested pump looks whether the channel has room.
const CONGESTED: Duration = Duration::from_millis(5);
/// How long the engine may take to confirm a cancelled run before its statistics are given up.
const CONFIRM: Duration = Duration::from_secs(5);
/// Largest text that waits for a slow reader, in bytes.
const WAITING_BYTES: usize = 1 << 20;

/// What the reply side gets, in order; `End` or `Failed` is the last.
#[derive(Debug)]
pub enum Update {
    /// What one or more rounds added.
    Pieces(Vec<Piece>),
    /// The reply is complete.
    End(Ending),
    /// The request failed.
    Failed(EngineError),
}

/// How a reply ended.
#[derive(Clone, Debug)]
pub struct Ending {
    /// Why the engine ended it.
    pub finish: Finish,
    /// A stop string matched.
    pub stopped: bool,
    /// The tokens that count: through the one that completed a stop string.
    pub ids: Vec<u32>,
    /// Those of them that belong to the reasoning.
    pub reasoning_tokens: usize,
    /// What it took.
    pub stats: RequestStats,
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
    guard: Guard,
    sender: mpsc::Sender<Update>,
    /// Tells the connection that its reader is too slow.
    drop_connection: Arc<Notify>,
    patience: Duration,
    waiting: Vec<Piece>,
    waiting_since: Option<Instant>,
    ids: Vec<u32>,
    thinking: bool,
    reasoning_tokens: usize,
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
    ) -> Result<Updates, EngineError> {
        let limits = &app.settings.limits;
        let (sender, receiver) = mpsc::channel(limits.stream_events.max(1));
        let cancel = Arc::clone(&handle.cancel);
        let pump = Self {
            handle,
            reader,
            text: Arc::clone(&app.text),
            guard: app.enter(prompt),
            sender,
            drop_connection,
            patience: seconds(limits.reader_s),
            waiting: Vec::new(),
            waiting_since: None,
            ids: Vec::new(),
            thinking,
            reasoning_tokens: 0,
        };
        std::thread::Builder::new()
            .name("reply".into())
            .spawn(move || pump.run())
            .map_err(|e| EngineError::Unavailable(format!("no thread for the request: {e}; try again")))?;
        Ok(Updates { receiver, cancel })
    }

    fn run(mut self) {
        if self.events().is_err() {
            self.handle.cancel();
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
                Ok(Event::Prefill { .. } | Event::Logprobs(_)) => self.guard.heard(0),
                Ok(Event::Tokens(ids)) => {
                    self.guard.heard(ids.len());
                    let mut pieces = Vec::new();
                    let stopped = self.tokens(&ids, &mut pieces);
                    self.offer(pieces)?;
                    if stopped {
                        self.handle.cancel();
                        let (finish, stats) = self.confirm();
                        return self.end(finish, stats, true);
                    }
                }
                Ok(Event::Done { finish, stats }) => {
                    let mut pieces = Vec::new();
                    let stopped = self.reader.finish(&mut pieces);
                    self.offer(pieces)?;
                    return self.end(finish, stats, stopped);
                }
                Ok(Event::Error(error)) => return self.last(Update::Failed(error)),
                Err(RecvTimeoutError::Timeout) => self.offer(Vec::new())?,
                Err(RecvTimeoutError::Disconnected) => {
                    let error = EngineError::Failed("the engine dropped the request without a word".into());
                    return self.last(Update::Failed(error));
                }
            }
        }
    }

    /// Reads the tokens of one round. `true`: a stop string ended the reply.
    fn tokens(&mut self, ids: &[u32], pieces: &mut Vec<Piece>) -> bool {
        for id in ids {
            self.ids.push(*id);
            if self.thinking {
                self.reasoning_tokens += 1;
                self.thinking = Some(*id) != self.text.think_close;
            }
            if self.reader.push(self.text.tokenizer.token_bytes(*id), pieces) {
                return true;
            }
        }
        false
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

    /// Hands pieces on, or gathers them while the channel is full.
    fn offer(&mut self, pieces: Vec<Piece>) -> Result<(), Gone> {
        for piece in pieces {
            match (self.waiting.last_mut(), piece) {
                (Some(Piece::Content(last)), Piece::Content(text))
                | (Some(Piece::Reasoning(last)), Piece::Reasoning(text)) => last.push_str(&text),
                (_, piece) => self.waiting.push(piece),
            }
        }
        if self.waiting.is_empty() {
            return if self.sender.is_closed() { Err(Gone) } else { Ok(()) };
        }
        match self.sender.try_send(Update::Pieces(std::mem::take(&mut self.waiting))) {
            Ok(()) => {
                self.waiting_since = None;
                Ok(())
            }
            Err(TrySendError::Closed(_)) => Err(Gone),
            Err(TrySendError::Full(update)) => {
                if let Update::Pieces(pieces) = update {
                    self.waiting = pieces;
                }
                let since = *self.waiting_since.get_or_insert_with(Instant::now);
                let bytes: usize = self.waiting.iter().map(size).sum();
                if since.elapsed() > self.patience || bytes > WAITING_BYTES { Err(Gone) } else { Ok(()) }
            }
        }
    }

    fn end(&mut self, finish: Finish, stats: RequestStats, stopped: bool) -> Result<(), Gone> {
        let ending = Ending {
            finish,
            stopped,
            ids: std::mem::take(&mut self.ids),
            reasoning_tokens: self.reasoning_tokens,
            stats,
        };
        self.last(Update::End(ending))
    }

    /// Sends what waits and the last update; the reader has all its patience for it.
    fn last(&mut self, update: Update) -> Result<(), Gone> {
        let deadline = Instant::now() + self.patience;
        let mut updates = Vec::new();
        if !self.waiting.is_empty() {
            updates.push(Update::Pieces(std::mem::take(&mut self.waiting)));
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

fn size(piece: &Piece) -> usize {
    match piece {
        Piece::Content(text) | Piece::Reasoning(text) => text.len(),
        Piece::Call(call) => call.name.len() + call.arguments.len(),
    }
}

//! What one rank knows of the others' lives, and the one way in which a world ends.
//!
//! A world ends once. The first cause wins, the others are told over the heartbeat connections, and every socket that a
//! call could wait at is shut down, so no wait needs a timeout of its own.

use std::fmt;
use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::{At, End, EndKind, Fault, Faults, RankError};

/// How long a rank that saw a socket close waits for the watch to say why, before it draws its own conclusion.
const VERDICT: Duration = Duration::from_secs(1);
/// Longest reason that is passed on, in bytes.
const REASON_LIMIT: usize = 4096;

/// Locks; what the guarded values need to hold, holds between any two statements here, so a panic elsewhere is no harm.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line on a heartbeat connection.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Note {
    /// The sender lives. `doing` is empty while it computes, and names the call in which it waits.
    Beat { moved: u64, doing: String },
    /// This rank leaves in good order.
    Bye { rank: usize },
    /// The world has ended.
    End(End),
}

/// The call a rank is in.
#[derive(Clone, Debug)]
pub(super) enum Doing {
    Broadcast,
    Receive,
    Agree(String),
    Exchange { seq: u64, tag: u32, bytes: usize },
}

impl fmt::Display for Doing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Broadcast => f.write_str("a broadcast"),
            Self::Receive => f.write_str("waiting for a message of rank 0"),
            Self::Agree(label) => write!(f, "agreement `{label}`"),
            Self::Exchange { seq, tag, bytes } => write!(f, "exchange {seq} (tag {tag}, {bytes} bytes)"),
        }
    }
}

type Hook = Box<dyn FnOnce(&End) + Send>;

struct State {
    end: Option<End>,
    parted: Vec<bool>,
    hooks: Vec<Hook>,
}

/// Shared by the calls and the watch threads of one rank.
pub(super) struct Fate {
    pub rank: usize,
    /// Every rank in words.
    pub who: Vec<String>,
    state: Mutex<State>,
    changed: Condvar,
    /// Heartbeat connections: to every follower on rank 0, to rank 0 on a follower.
    watchers: Vec<Mutex<TcpStream>>,
    /// Sockets that calls wait at.
    streams: Vec<TcpStream>,
    doing: Mutex<Option<Doing>>,
    /// Counts everything that gets on.
    pub moved: AtomicU64,
}

impl Fate {
    pub(super) fn new(
        rank: usize,
        who: Vec<String>,
        watchers: Vec<TcpStream>,
        streams: Vec<TcpStream>,
    ) -> Self {
        let state = State { end: None, parted: vec![false; who.len()], hooks: Vec::new() };
        Self {
            rank,
            who,
            state: Mutex::new(state),
            changed: Condvar::new(),
            watchers: watchers.into_iter().map(Mutex::new).collect(),
            streams,
            doing: Mutex::new(None),
            moved: AtomicU64::new(0),
        }
    }

    /// The end, or the leaving of a rank without which no further call can succeed.
    pub(super) fn ended(&self) -> Option<End> {
        self.seen(&lock(&self.state))
    }

    fn seen(&self, state: &State) -> Option<End> {
        state.end.clone().or_else(|| state.parted.iter().position(|gone| *gone).map(|rank| self.left(rank)))
    }

    pub(super) fn over(&self) -> bool {
        lock(&self.state).end.is_some()
    }

    fn make(&self, rank: usize, kind: EndKind, reason: impl Into<String>) -> End {
        let mut reason = reason.into();
        if reason.len() > REASON_LIMIT {
            let cut = (0..=REASON_LIMIT).rev().find(|&at| reason.is_char_boundary(at)).unwrap_or(0);
            reason.truncate(cut);
        }
        let who = self.who.get(rank).cloned().unwrap_or_else(|| format!("rank {rank}"));
        End { rank, who, kind, reason }
    }

    fn left(&self, rank: usize) -> End {
        let reason = if rank == self.rank { "" } else { "; this engine cannot go on without it" };
        self.make(rank, EndKind::Left, reason)
    }

    /// Ends the world unless it has ended; gives the end that holds.
    pub(super) fn end(&self, end: End) -> End {
        let mut state = lock(&self.state);
        if let Some(first) = &state.end {
            return first.clone();
        }
        // The others hear the cause before they can see any socket of this rank close.
        self.tell(&Note::End(end.clone()));
        state.end = Some(end.clone());
        self.shut();
        self.changed.notify_all();
        let hooks = std::mem::take(&mut state.hooks);
        drop(state);
        for hook in hooks {
            hook(&end);
        }
        end
    }

    /// Ends the world by `rank`'s doing; gives the error for the call that found it.
    pub(super) fn blame(&self, rank: usize, kind: EndKind, reason: impl Into<String>) -> RankError {
        RankError::Ended(self.end(self.make(rank, kind, reason)))
    }

    /// This rank leaves in good order.
    pub(super) fn leave(&self) {
        let mut state = lock(&self.state);
        if state.end.is_none() {
            self.tell(&Note::Bye { rank: self.rank });
            state.end = Some(self.left(self.rank));
            self.shut();
            self.changed.notify_all();
        }
    }

    /// This rank disappears without a word, as a killed process does.
    pub(super) fn vanish(&self, reason: &str) -> End {
        let mut state = lock(&self.state);
        let end = self.make(self.rank, EndKind::Died, reason);
        self.shut();
        for watcher in &self.watchers {
            let _ = lock(watcher).shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
        state.end.get_or_insert(end).clone()
    }

    /// Notes that a rank has left in good order; true the first time.
    pub(super) fn parted(&self, rank: usize) -> bool {
        let mut state = lock(&self.state);
        let Some(gone) = state.parted.get_mut(rank) else { return false };
        let first = !std::mem::replace(gone, true);
        self.changed.notify_all();
        let hooks = if first { std::mem::take(&mut state.hooks) } else { Vec::new() };
        drop(state);
        let end = self.left(rank);
        for hook in hooks {
            hook(&end);
        }
        first
    }

    pub(super) fn has_parted(&self, rank: usize) -> bool {
        lock(&self.state).parted.get(rank).copied().unwrap_or(false)
    }

    /// A call cannot go on with `peer`: waits for the watch to say why, then ends the world.
    pub(super) fn lost(&self, peer: usize, seen: &str) -> RankError {
        let deadline = Instant::now() + VERDICT;
        let mut state = lock(&self.state);
        let gone = loop {
            if let Some(end) = &state.end {
                return RankError::Ended(end.clone());
            }
            if let Some(gone) = [peer, 0].into_iter().find(|&rank| state.parted[rank]) {
                break Some(gone);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        drop(state);
        let end = match gone {
            Some(rank) => self.left(rank),
            None => self.make(peer, EndKind::Died, seen),
        };
        RankError::Ended(self.end(end))
    }

    /// Runs `hook` when the world ends, at once if it has.
    pub(super) fn on_end(&self, hook: Hook) {
        let mut state = lock(&self.state);
        match self.seen(&state) {
            Some(end) => {
                drop(state);
                hook(&end);
            }
            None => state.hooks.push(hook),
        }
    }

    /// Before a call: the world goes on, and the fault that a test wants of it, if any.
    pub(super) fn begin(&self, faults: &Faults, at: At) -> Result<Option<Fault>, RankError> {
        if let Some(end) = lock(&self.state).end.clone() {
            return Err(RankError::Ended(end));
        }
        match faults.take(at) {
            Some(Fault::Delay(time)) => {
                std::thread::sleep(time);
                Ok(None)
            }
            Some(Fault::Die) => Err(RankError::Ended(self.vanish("a test asked it to die"))),
            fault => Ok(fault),
        }
    }

    /// Says in what call this rank waits until the guard is dropped.
    pub(super) fn enter(&self, doing: Doing) -> Waiting<'_> {
        self.moved.fetch_add(1, Ordering::Relaxed);
        *lock(&self.doing) = Some(doing);
        Waiting(self)
    }

    /// What a heartbeat tells of this rank.
    pub(super) fn pulse(&self) -> (u64, String) {
        let doing = lock(&self.doing).as_ref().map(ToString::to_string).unwrap_or_default();
        (self.moved.load(Ordering::Relaxed), doing)
    }

    /// Sends a note on every heartbeat connection. Who cannot be told is found by the watch.
    pub(super) fn tell(&self, note: &Note) {
        (0..self.watchers.len()).for_each(|link| self.tell_one(link, note));
    }

    pub(super) fn tell_one(&self, link: usize, note: &Note) {
        if let Ok(mut line) = serde_json::to_vec(note) {
            line.push(b'\n');
            let _ = lock(&self.watchers[link]).write_all(&line);
        }
    }

    fn shut(&self) {
        for stream in &self.streams {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Closes what is open. The watch threads see it and end.
    pub(super) fn close(&self) {
        let mut state = lock(&self.state);
        if state.end.is_none() {
            state.end = Some(self.make(self.rank, EndKind::Died, "its world was dropped without a goodbye"));
        }
        self.shut();
        for watcher in &self.watchers {
            let _ = lock(watcher).shutdown(Shutdown::Write);
        }
    }
}

/// While it lives, this rank waits.
pub(super) struct Waiting<'a>(&'a Fate);

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        *lock(&self.0.doing) = None;
    }
}

//! What arrives for the engine thread, and how it waits for it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use plugfold_abi::OpError;
use plugfold_abi::points::{Bell, BellObject, PlanWait, PlanWaitObject};

use super::Message;
use crate::hooks::{Calls, HookError, Hooked};

/// How long the engine sleeps when requests wait and none may run.
const HELD: Duration = Duration::from_millis(2);

/// Messages that were received and not looked at.
pub(super) struct Inbox {
    receiver: Receiver<Message>,
    seen: VecDeque<Message>,
    /// Nobody can send any more.
    closed: bool,
    wait: Option<Hooked<PlanWaitObject>>,
}

impl Inbox {
    pub(super) fn new(receiver: Receiver<Message>, wait: Option<Hooked<PlanWaitObject>>) -> Self {
        Self { receiver, seen: VecDeque::new(), closed: false, wait }
    }

    /// Everything that is there.
    fn poll(&mut self) {
        self.seen.extend(self.receiver.try_iter());
    }

    /// Sleeps until more than `known` messages are there, at most so long.
    fn sleep(&mut self, known: usize, most: Option<Duration>) {
        self.poll();
        if self.seen.len() > known || self.closed {
            return;
        }
        let first = match most {
            None => self.receiver.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(most) => self.receiver.recv_timeout(most),
        };
        match first {
            Ok(message) => self.seen.push_back(message),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => self.closed = true,
        }
        self.poll();
    }

    /// Waits while there is nothing else to do. `false`: nothing can come any more.
    ///
    /// # Errors
    /// The way to wait that was chosen.
    pub(super) fn idle(&mut self) -> Result<bool, HookError> {
        match self.wait.clone() {
            None => self.sleep(0, None),
            Some(h) => {
                self.poll();
                while self.seen.is_empty() && !self.closed {
                    ring(self, &h, 0, PlanWait::idle)?;
                    self.poll();
                }
            }
        }
        Ok(!self.seen.is_empty())
    }

    /// Waits for more, before a plan with requests that have no slot.
    ///
    /// # Errors
    /// As [`Inbox::idle`].
    pub(super) fn gather(&mut self, waiting: usize, running: usize) -> Result<(), HookError> {
        let Some(h) = self.wait.clone() else { return Ok(()) };
        self.poll();
        ring(self, &h, waiting, |w, bell| w.gather(running as u32, bell))
    }

    /// Sleeps shortly, while requests are held back.
    pub(super) fn held(&mut self) {
        self.sleep(0, Some(HELD));
    }

    /// The next message.
    pub(super) fn next(&mut self) -> Option<Message> {
        if self.seen.is_empty() {
            self.poll();
        }
        self.seen.pop_front()
    }

    /// How many requests have arrived.
    fn jobs(&self) -> usize {
        self.seen.iter().filter(|m| matches!(m, Message::Job(_))).count()
    }
}

/// Lends the inbox to a way to wait.
fn ring(
    inbox: &mut Inbox,
    h: &Hooked<PlanWaitObject>,
    waiting: usize,
    call: impl FnOnce(&PlanWaitObject, &BellObject) -> Result<(), OpError>,
) -> Result<(), HookError> {
    let told = AtomicUsize::new(0);
    let bell = InboxBell { inbox: Mutex::new(inbox), waiting, told, calls: h.calls.clone() };
    h.call(|w| call(w, &BellObject::lend(&bell)))
}

struct InboxBell<'a> {
    inbox: Mutex<&'a mut Inbox>,
    waiting: usize,
    /// Messages of which it was told.
    told: AtomicUsize,
    calls: Arc<Calls>,
}

impl<'a> InboxBell<'a> {
    fn inbox(&self) -> MutexGuard<'_, &'a mut Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A number of seconds as a duration; nothing where there is no end to it.
fn within(seconds: f64) -> Option<Duration> {
    Duration::try_from_secs_f64(seconds.max(0.0)).ok()
}

impl Bell for InboxBell<'_> {
    fn sleep(&self, seconds: f64) -> Result<bool, OpError> {
        let mut inbox = self.inbox();
        let told = self.told.load(Ordering::Relaxed);
        self.calls.sleep(|| inbox.sleep(told, within(seconds)));
        self.told.store(inbox.seen.len(), Ordering::Relaxed);
        Ok(inbox.seen.len() > told || inbox.closed)
    }

    fn arrived(&self) -> Result<u32, OpError> {
        let mut inbox = self.inbox();
        inbox.poll();
        Ok((self.waiting + inbox.jobs()) as u32)
    }
}

//! Who waits for a request's events, so that they can be told of the end by whoever sees it.

use std::collections::HashMap;
use std::sync::mpsc::{SendError, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::service::{EngineError, Event};

/// The senders of all requests that are not over.
#[derive(Default)]
pub(super) struct Listeners(Mutex<HashMap<u64, Sender<Event>>>);

impl Listeners {
    fn all(&self) -> MutexGuard<'_, HashMap<u64, Sender<Event>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters a request; it leaves when the listener is dropped.
    pub(super) fn enter(self: &Arc<Self>, number: u64, events: Sender<Event>) -> Listener {
        self.all().insert(number, events.clone());
        Listener { number, events, all: self.clone() }
    }

    /// Ends every request with one error.
    pub(super) fn end(&self, error: &EngineError) {
        for (_, events) in self.all().drain() {
            // A client that has left is told by nobody.
            let _ = events.send(Event::Error(error.clone()));
        }
    }
}

/// The engine's end of one request's events.
pub(super) struct Listener {
    number: u64,
    events: Sender<Event>,
    all: Arc<Listeners>,
}

impl Listener {
    /// Sends an event; an error: nobody listens any more.
    pub(super) fn send(&self, event: Event) -> Result<(), Box<SendError<Event>>> {
        self.events.send(event).map_err(Box::new)
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.all.all().remove(&self.number);
    }
}

//! Where a prefill spends its time: every operation is timed while a request asks for it, and a table is printed when the
//! prompt is in.

mod names;
mod report;

use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{
    Host, HostObject, Level, Observer, ObserverObject, OpDone, SequenceEvent, interest,
};
use plugfold_abi::{KnobId, KnobValue, List, OpError, Phase, Slice, Text, TextBuf, value_of};

use report::Session;

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin.
pub struct PrefillProfile;

impl Plugin for PrefillProfile {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let host = setup.host();
        let prints = if host.rank()? == 0 { Some(host) } else { None };
        let profile = Profile { id: setup.knobs.id("profile")?, prints, open: Mutex::default() };
        Ok(List::from(vec![Offer::of(ObserverObject::new(profile))]))
    }
}

struct Profile {
    id: KnobId,
    /// The host, on the rank that prints.
    prints: Option<&'static HostObject>,
    /// One session a slot whose request asked for it.
    open: Mutex<Vec<Option<Session>>>,
}

impl Profile {
    fn open(&self) -> MutexGuard<'_, Vec<Option<Session>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn asked(&self, knobs: Slice<'_, KnobValue>) -> bool {
        value_of(knobs, self.id).is_some_and(KnobValue::as_bool)
    }
}

impl Observer for Profile {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::OPERATION | interest::SEQUENCE)
    }

    fn times(&self, knobs: Slice<'_, KnobValue>) -> Result<bool, OpError> {
        Ok(self.asked(knobs))
    }

    fn operation(&self, done: &OpDone<'_>) -> Result<(), OpError> {
        // The draft layer's catch-up belongs to a prefill; windows and drafts do not.
        if done.phase == Phase::Window {
            return Ok(());
        }
        // Forwards run one after another, and a prompt's chunks run alone: what runs belongs to the prompt that is open.
        if let Some(session) = self.open().iter_mut().flatten().next() {
            session.add(done);
        }
        Ok(())
    }

    fn sequence(&self, slot: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        let slot = slot as usize;
        match event {
            SequenceEvent::Begun { ids, resumed, knobs, .. } if self.asked(*knobs) => {
                let mut open = self.open();
                if open.len() <= slot {
                    open.resize_with(slot + 1, || None);
                }
                open[slot] = Some(Session::new(ids.len() as u32, *resumed));
            }
            SequenceEvent::Absorbed { start, tokens, prompt } => {
                let mut open = self.open();
                let Some(session) = open.get_mut(slot).and_then(Option::as_mut) else { return Ok(()) };
                session.chunk(*tokens);
                if start + tokens == *prompt {
                    let done = open[slot].take();
                    drop(open);
                    if let (Some(host), Some(done)) = (self.prints, done) {
                        host.log(Level::Info, Text::from(done.table().as_str()))?;
                        let line = format!("PREFILL_PROFILE {}", done.json());
                        host.log(Level::Info, Text::from(line.as_str()))?;
                    }
                }
            }
            // A prefill that failed or was cancelled leaves no report and no session.
            SequenceEvent::Ended { .. } => {
                if let Some(session) = self.open().get_mut(slot) {
                    *session = None;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: PrefillProfile);

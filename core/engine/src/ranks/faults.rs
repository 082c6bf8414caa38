//! Faults that a test asks a rank to commit.

use std::sync::Mutex;
use std::time::Duration;

use super::fate::lock;

/// The call that a fault strikes, counted from 0 on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// The n-th all-gather.
    Exchange(u64),
    /// The n-th broadcast, receive or agreement.
    Control(u64),
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// This rank's frames of the call are not sent; the rank believes they were.
    Drop,
    /// The rank computes for so long first.
    Delay(Duration),
    /// One bit of the payload flips on the way.
    Corrupt,
    /// The rank's connections close without a word.
    Die,
}

/// The faults of one rank; empty outside tests.
#[derive(Debug, Default)]
pub struct Faults(Mutex<Vec<(At, Fault)>>);

impl Faults {
    /// Adds a fault that strikes once.
    pub fn add(&self, at: At, fault: Fault) {
        lock(&self.0).push((at, fault));
    }

    pub(super) fn take(&self, at: At) -> Option<Fault> {
        let mut faults = lock(&self.0);
        let index = faults.iter().position(|(place, _)| *place == at)?;
        Some(faults.swap_remove(index).1)
    }
}

/// The payload with one bit flipped.
pub(super) fn bend(payload: &[u8]) -> Vec<u8> {
    let mut bent = payload.to_vec();
    if let Some(byte) = bent.last_mut() {
        *byte ^= 0x10;
    }
    bent
}

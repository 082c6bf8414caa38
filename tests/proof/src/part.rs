//! What it is told: lengths and ids of sequences, kept beside their states, and threads by their role.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{Host as _, HostObject, Observer, SequenceEvent, StatePart, interest};
use plugfold_abi::{List, OpError, Slice, Text, TextBuf};

/// A sequence, as far as it has been told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Committed tokens.
    pub length: u32,
    /// Hash of the tokens of its prompt that were absorbed, and of those that followed.
    pub hash: u64,
}

impl Record {
    fn extend(&mut self, tokens: impl IntoIterator<Item = u32>) {
        for token in tokens {
            self.length += 1;
            self.hash = (self.hash ^ u64::from(token)).wrapping_mul(0x0000_0100_0000_01b3);
        }
    }
    /// Of these ids from nothing.
    pub fn of(ids: &[u32]) -> Self {
        let mut record = Self::default();
        record.extend(ids.iter().copied());
        record
    }
    fn bytes(self) -> Vec<u8> {
        [&self.length.to_le_bytes()[..], &self.hash.to_le_bytes()].concat()
    }
    fn read(bytes: &[u8]) -> Option<Self> {
        let (length, hash) = bytes.split_first_chunk::<4>()?;
        Some(Self { length: u32::from_le_bytes(*length), hash: u64::from_le_bytes(hash.try_into().ok()?) })
    }
}

/// The part, which is the observer as well.
pub struct Told {
    host: &'static HostObject,
    forgets: bool,
    records: Mutex<HashMap<u32, Record>>,
    prompts: Mutex<HashMap<u32, Vec<u32>>>,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Told {
    /// `forgets`: planted, it loads its records and does not take them.
    pub fn new(host: &'static HostObject, forgets: bool) -> Self {
        Self { host, forgets, records: Mutex::default(), prompts: Mutex::default() }
    }

    /// What it knows of a slot.
    pub fn record(&self, slot: u32) -> Record {
        lock(&self.records).get(&slot).copied().unwrap_or_default()
    }

    fn count(&self, name: &str) -> Result<(), OpError> {
        self.host.count(Text::from(name), 1.0)
    }
}

impl StatePart for Told {
    fn id(&self) -> Result<TextBuf, OpError> {
        Ok("proof".into())
    }
    fn version(&self) -> Result<u32, OpError> {
        Ok(1)
    }
    fn needed(&self) -> Result<bool, OpError> {
        Ok(true)
    }
    fn begin(&self, slot: u32) -> Result<(), OpError> {
        lock(&self.records).insert(slot, Record::default());
        Ok(())
    }
    fn save(&self, slot: u32, out: &mut List<u8>) -> Result<(), OpError> {
        out.extend(self.record(slot).bytes());
        Ok(())
    }
    fn load(&self, slot: u32, record: Slice<'_, u8>) -> Result<(), OpError> {
        let read = Record::read(&record).ok_or_else(|| OpError::new("a record that cannot be read"))?;
        if !self.forgets {
            lock(&self.records).insert(slot, read);
        }
        self.count("proof_records_loaded")
    }
}

impl Observer for Told {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::SEQUENCE | interest::THREAD)
    }
    fn sequence(&self, slot: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        match event {
            SequenceEvent::Begun { ids, resumed, .. } => {
                // What was resumed has to be what the record says, or the state is another sequence's.
                let record = Record::of(&ids[..*resumed as usize]);
                if record != self.record(slot) {
                    self.count("proof_mismatches")?;
                }
                lock(&self.prompts).insert(slot, ids.to_vec());
            }
            SequenceEvent::Absorbed { start, tokens, .. } => {
                let prompts = lock(&self.prompts);
                let all = prompts.get(&slot).map_or(&[][..], Vec::as_slice);
                let new = all.get(*start as usize..(*start + *tokens) as usize).unwrap_or(&[]);
                lock(&self.records).entry(slot).or_default().extend(new.iter().copied());
            }
            SequenceEvent::Committed { tokens, .. } => {
                lock(&self.records).entry(slot).or_default().extend(tokens.iter().copied());
            }
            SequenceEvent::Saved { .. } | SequenceEvent::Ended { .. } => {}
        }
        Ok(())
    }
    fn thread(&self, role: Text<'_>) -> Result<(), OpError> {
        self.count(&format!("proof_threads_{}", role.get_str()))
    }
}

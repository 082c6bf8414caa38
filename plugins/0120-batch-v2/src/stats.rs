//! What a reply tells of the rounds it shared.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{Ended, Observer, RoundDone, SequenceEvent, interest};
use plugfold_abi::{OpError, TextBuf};

#[derive(Clone, Copy, Debug, Default)]
struct Record {
    /// Rounds of its own, the prompt's not counted.
    rounds: u64,
    /// Tokens that they kept.
    kept: u64,
    /// Rows of the smallest of them, all sequences together.
    min_rows: Option<u32>,
}

#[derive(Default)]
struct State {
    /// The request in each slot.
    slots: HashMap<u32, u64>,
    /// Requests that committed in the round that runs.
    in_round: Vec<u64>,
    records: HashMap<u64, Record>,
}

/// Counts, where requests end: on rank 0.
pub struct Stats {
    lead: bool,
    state: Mutex<State>,
}

impl Stats {
    /// Nothing counted. `lead`: on rank 0; elsewhere it watches nothing.
    pub fn new(lead: bool) -> Self {
        Self { lead, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A short name of a reply: equal replies have equal ones.
fn hash(reply: &[u32]) -> u64 {
    let bytes = reply.iter().flat_map(|id| id.to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01b3))
}

impl Observer for Stats {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(if self.lead { interest::ROUND | interest::SEQUENCE | interest::REQUEST } else { 0 })
    }

    fn sequence(&self, slot: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        let mut state = self.state();
        match event {
            SequenceEvent::Begun { request, .. } => {
                state.slots.insert(slot, *request);
                // One that stepped aside begins again.
                state.records.insert(*request, Record::default());
            }
            SequenceEvent::Committed { tokens, .. } => {
                let Some(request) = state.slots.get(&slot).copied() else { return Ok(()) };
                state.in_round.push(request);
                if let Some(record) = state.records.get_mut(&request) {
                    record.rounds += 1;
                    record.kept += tokens.len() as u64;
                }
            }
            SequenceEvent::Absorbed { .. } | SequenceEvent::Saved { .. } | SequenceEvent::Ended { .. } => {}
        }
        Ok(())
    }

    fn round(&self, done: &RoundDone) -> Result<(), OpError> {
        let mut state = self.state();
        for request in std::mem::take(&mut state.in_round) {
            if let Some(record) = state.records.get_mut(&request) {
                let least = record.min_rows.map_or(done.window_rows, |m| m.min(done.window_rows));
                record.min_rows = Some(least);
            }
        }
        Ok(())
    }

    fn request(&self, ended: &Ended<'_>) -> Result<TextBuf, OpError> {
        let record = self.state().records.remove(&ended.request).unwrap_or_default();
        let each = record.kept as f64 / record.rounds.max(1) as f64;
        let text = format!(
            "{{\"batch\":{{\"min_rows\":{},\"tokens_per_round\":{each:.3},\"reply_hash\":\"{:016x}\",\"cancelled\":{}}}}}",
            record.min_rows.unwrap_or(0),
            hash(&ended.reply),
            ended.reason.get_str() == "cancelled"
        );
        Ok(text.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::{Slice, Text};

    #[test]
    fn rounds_are_counted_for_who_was_in_them() {
        let stats = Stats::new(true);
        let begun = |slot, request| {
            let (ids, knobs) = (Slice::default(), Slice::default());
            stats
                .sequence(
                    slot,
                    &SequenceEvent::Begun { request, ids, resumed: 0, knobs, attachments: Slice::default() },
                )
                .unwrap();
        };
        let round = |slots: &[u32], window_rows| {
            for slot in slots {
                let tokens = Slice::from(&[1, 2][..]);
                stats.sequence(*slot, &SequenceEvent::Committed { start: 0, tokens }).unwrap();
            }
            let decoded = slots.len() as u32;
            stats.round(&RoundDone { round: 1, prefill_rows: 0, decoded, window_rows, kept: 0 }).unwrap();
        };
        begun(0, 7);
        begun(1, 8);
        round(&[0, 1], 6);
        round(&[0], 3);
        round(&[1], 5);
        let ended = |request, reply: &[u32]| {
            let (reason, facts) = (Text::from("stop"), Text::EMPTY);
            let told = Ended { request, reason, facts, ids: Slice::default(), reply: Slice::from(reply) };
            stats.request(&told).unwrap().to_string()
        };
        let seven = ended(7, &[1, 2]);
        assert!(seven.starts_with(r#"{"batch":{"min_rows":3,"tokens_per_round":2.000,"#), "{seven}");
        assert!(ended(8, &[1, 3]).contains("\"min_rows\":5"));
        assert!(stats.state().records.is_empty(), "nothing is kept of requests that are over");
        assert_ne!(hash(&[1, 2]), hash(&[2, 1]));
    }
}

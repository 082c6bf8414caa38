//! Who enters, where, and what runs in a round.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_0120_batch_v2_api::{BatchView, SlotUse, place};
use plugfold_abi::points::{
    Host, HostObject, Level, Limits, LimitsLink, PieceChoice, PlanFacts, Planner, RequestFacts, SlotFacts,
    SlotMemory, StoreOffer, Verdict,
};
use plugfold_abi::{List, OpError, Slice, Text};

use crate::fair::Fair;

/// The settings.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Prompt tokens of a piece.
    pub piece: u32,
    /// Largest part of the time that pieces may take while others decode.
    pub share: f64,
    /// Bytes that must stay free when slots are made.
    pub reserve: u64,
    /// Bytes that must be free for a request to enter beside others.
    pub admit: u64,
}

/// The link of `limits`.
pub struct Slots {
    /// The settings.
    pub settings: Settings,
    /// Where it says how many slots fit.
    pub host: Option<&'static HostObject>,
}

impl LimitsLink for Slots {
    fn raise(&self, limits: &mut Limits) -> Result<(), OpError> {
        limits.piece = limits.piece.max(self.settings.piece);
        Ok(())
    }

    fn fit(&self, memory: &SlotMemory) -> Result<u32, OpError> {
        let room = memory.free_bytes.saturating_sub(self.settings.reserve);
        let most = room.checked_div(memory.slot_bytes).unwrap_or(u64::MAX);
        // The first slot is the engine's own: without one there is nothing to serve with.
        let fit = most.clamp(1, u64::from(memory.slots.max(1))) as u32;
        if let Some(host) = self.host {
            let (level, why) =
                if fit < memory.slots { (Level::Warn, "fit") } else { (Level::Info, "are made") };
            let text = format!(
                "{fit} of {} slots {why}: {} bytes each, {} bytes free, of which {} stay free (`reserve_gib`)",
                memory.slots, memory.slot_bytes, memory.free_bytes, self.settings.reserve
            );
            host.log(level, Text::from(text.as_str()))?;
        }
        Ok(fit)
    }
}

struct State {
    fair: Fair,
    /// Multiples at which each running prompt may be cut.
    grids: HashMap<u64, u32>,
    /// Requests that wait for memory, so that each is counted once.
    deferred: HashSet<u64>,
    /// The slots as of the last plan.
    slots: Vec<SlotUse>,
}

/// The planning policies.
pub struct Batch {
    settings: Settings,
    host: Option<&'static HostObject>,
    state: Mutex<State>,
}

fn running<'f>(facts: &'f PlanFacts<'_>) -> impl Iterator<Item = &'f SlotFacts> {
    facts.slots.iter().filter(|s| s.request != 0)
}

impl Batch {
    /// Policies with these settings.
    pub fn new(settings: Settings, host: Option<&'static HostObject>) -> Self {
        let state = State {
            fair: Fair::new(settings.share),
            grids: HashMap::new(),
            deferred: HashSet::new(),
            slots: Vec::new(),
        };
        Self { settings, host, state: Mutex::new(state) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether memory keeps a request from entering beside others.
    fn short(&self, facts: &PlanFacts<'_>) -> bool {
        facts.free_bytes < self.settings.admit
    }

    /// Tokens of a piece of a prompt whose states may be kept at multiples of `grid`.
    fn piece(&self, grid: u32) -> u32 {
        let whole = self.settings.piece / grid.max(1) * grid.max(1);
        whole.max(grid)
    }
}

impl Planner for Batch {
    fn order(&self, facts: &PlanFacts<'_>, queue: &mut List<u64>) -> Result<(), OpError> {
        let background: HashSet<u64> =
            facts.waiting.iter().filter(|r| r.background).map(|r| r.request).collect();
        if !background.is_empty() {
            let mut all: Vec<u64> = queue.to_vec();
            all.sort_by_key(|number| background.contains(number));
            *queue = all.into();
        }
        Ok(())
    }

    fn step_aside(&self, facts: &PlanFacts<'_>, slots: &mut List<u32>) -> Result<(), OpError> {
        let waiting = facts.waiting.iter().filter(|r| !r.background).count();
        let free = facts.slots.iter().filter(|s| s.request == 0).count();
        let need = waiting.saturating_sub(free + slots.len());
        // Where memory is short, the one that waits enters an empty engine only.
        let short = self.short(facts) && running(facts).count() > 1;
        if need == 0 || short {
            return Ok(());
        }
        let mut yielding: Vec<&SlotFacts> =
            running(facts).filter(|s| s.background && !slots.contains(&s.slot)).collect();
        yielding.sort_by_key(|s| std::cmp::Reverse((s.admitted, s.request)));
        slots.extend(yielding.into_iter().take(need).map(|s| s.slot));
        Ok(())
    }

    fn place(
        &self,
        facts: &PlanFacts<'_>,
        request: &RequestFacts<'_>,
        offers: Slice<'_, StoreOffer>,
        verdict: &mut Verdict,
    ) -> Result<(), OpError> {
        if !matches!(verdict, Verdict::Admit(_)) {
            return Ok(());
        }
        if let Some(slot) = place(facts, offers) {
            *verdict = Verdict::Admit(slot);
            self.state().grids.insert(request.request, request.grid);
        }
        Ok(())
    }

    fn admit(
        &self,
        facts: &PlanFacts<'_>,
        request: &RequestFacts<'_>,
        verdict: &mut Verdict,
    ) -> Result<(), OpError> {
        if !matches!(verdict, Verdict::Admit(_)) {
            return Ok(());
        }
        if self.short(facts) && running(facts).next().is_some() {
            *verdict = Verdict::Block;
            let mut state = self.state();
            state.deferred.retain(|number| facts.waiting.iter().any(|r| r.request == *number));
            if state.deferred.insert(request.request)
                && let Some(host) = self.host
            {
                host.count(Text::from("deferred"), 1.0)?;
            }
        }
        Ok(())
    }

    fn pieces(&self, facts: &PlanFacts<'_>, pieces: &mut List<PieceChoice>) -> Result<(), OpError> {
        let mut state = self.state();
        state.slots.clear();
        state.slots.extend(facts.slots.iter().map(|s| SlotUse {
            slot: s.slot,
            request: s.request,
            decoding: s.decoding,
            left: s.prompt.saturating_sub(s.absorbed),
        }));
        let decoding = running(facts).any(|s| s.decoding);
        let prefilling = || running(facts).filter(|s| !s.decoding);
        state.grids.retain(|number, _| prefilling().any(|s| s.request == *number));
        let first = prefilling().min_by_key(|s| (s.prompt.saturating_sub(s.absorbed), s.admitted, s.slot));
        state.fair.settle(facts.last_piece_s, facts.last_decode_s, first.is_some(), decoding);
        pieces.clear();
        let Some(first) = first.filter(|_| !decoding || state.fair.allows()) else { return Ok(()) };
        let grid = state.grids.get(&first.request).copied().unwrap_or(1);
        pieces.push(PieceChoice { slot: first.slot, tokens: self.piece(grid) });
        state.fair.planned(decoding);
        Ok(())
    }
}

impl BatchView for Batch {
    fn slots(&self) -> Result<List<SlotUse>, OpError> {
        Ok(self.state().slots.clone().into())
    }

    fn prefill_share(&self) -> Result<f64, OpError> {
        Ok(self.settings.share)
    }
}

#[cfg(test)]
mod tests;

//! Depths that look at the whole round. While requests share rounds, the policies that choose a depth by its price (`o`,
//! `om`, `of`) price a row as what it adds to the rows of all, and time by what all commit in it. Alone, base-auto's own
//! rule holds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use plugfold_abi::boundary::Borrowed;
use plugfold_abi::points::{
    Choice, DraftPolicy, NO_DRAFTER, Observed, Observer, RoundDone, Rule, SequenceEvent, SequenceFacts,
    interest,
};
use plugfold_abi::{List, OpError, Slice, Text, TextBuf};
use plugfold_base_auto_api::{Arm, Form, Learnt, Policies, PoliciesObject, Prices, Rounds, best_depth};

/// Rounds that count for the rate.
const RECENT: usize = 16;

/// The link of the `draft` policy, after base-auto's.
pub struct Depths {
    policies: OnceLock<Borrowed<'static, PoliciesObject>>,
    state: Mutex<State>,
}

struct State {
    prices: Prices,
    names: Vec<String>,
    /// Tokens of all requests, and what their rounds cost.
    rounds: Rounds,
    /// Tokens that the round that runs has committed so far, and the milliseconds of its drafts.
    tokens: u32,
    drafting_ms: f64,
    /// Rows that each slot's drafter had to catch up on when it was asked.
    owed: BTreeMap<u32, u32>,
}

impl Default for Depths {
    fn default() -> Self {
        let state = State {
            prices: Prices::fixed(),
            names: Vec::new(),
            rounds: Rounds::of(RECENT),
            tokens: 0,
            drafting_ms: 0.0,
            owed: BTreeMap::new(),
        };
        Self { policies: OnceLock::new(), state: Mutex::new(state) }
    }
}

/// Whose drafter a name is.
fn arm(name: &str) -> Option<Arm> {
    [Arm::Mtp, Arm::Block].into_iter().find(|arm| arm.drafter() == name)
}

fn drafting(prices: &Prices, arm: Arm, drafts: u32, owed: u32) -> f64 {
    match arm {
        Arm::Mtp => prices.chain(drafts, owed),
        Arm::Block => prices.block(owed),
    }
}

impl State {
    fn arm(&self, drafter: u32) -> Option<Arm> {
        self.names.get(drafter as usize).and_then(|name| arm(name))
    }

    /// The choice for one sequence beside `others` rows of the rest of the round.
    fn depth(&self, others: u32, most: u32, arm: Arm, learnt: &Learnt) -> (u32, f64) {
        let rate = self.rounds.rate().unwrap_or_else(|| self.prices.first_rate());
        let share = |place: u32| learnt.shares.get(place as usize).copied().unwrap_or(0.0);
        let ms = |k: u32| self.prices.window(others + k + 1) + drafting(&self.prices, arm, k, learnt.backlog);
        let k = best_depth(most, rate, share, ms);
        let row = self.prices.window(others + k + 1) - self.prices.window(others + k);
        (k, (rate * row).clamp(0.0, 1.0))
    }
}

impl Depths {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the draft policies. Without them no request has a policy that prices depths.
    pub fn connect(&self, policies: Borrowed<'static, PoliciesObject>) {
        // A second start of one object keeps the first.
        let _ = self.policies.set(policies);
    }

    /// Most drafts of a sequence whose policy prices depths.
    fn priced(policies: &PoliciesObject, facts: &SequenceFacts<'_>) -> Result<Option<u32>, OpError> {
        let text = policies.in_force(facts.policy)?;
        // A form that cannot be read was refused with its request.
        Ok(match Form::parse(text.as_str(), u32::MAX) {
            Ok(Form::Cost { drafts, .. }) => Some(drafts.min(facts.room)),
            _ => None,
        })
    }
}

impl DraftPolicy for Depths {
    fn drafters(&self, names: Slice<'_, TextBuf>) -> Result<(), OpError> {
        self.state().names = names.iter().map(ToString::to_string).collect();
        Ok(())
    }

    fn decide(&self, facts: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> Result<(), OpError> {
        let Some(policies) = self.policies.get() else { return Ok(()) };
        let mut state = self.state();
        state.owed.clear();
        let shared = facts.first().map_or(0, |f| f.shared);
        // Those that ask for no drafts have a row each.
        let silent = shared.saturating_sub(facts.len() as u32);
        let window = |c: &Choice| if c.drafter == NO_DRAFTER { 1 } else { 1 + c.budget };
        for (i, fact) in facts.iter().enumerate() {
            let choice = choices[i];
            let Some(arm) = state.arm(choice.drafter) else { continue };
            let most = if shared > 1 { Self::priced(policies, fact)? } else { None };
            let learnt = policies.learnt(fact.slot, Text::from(arm.drafter()), most.unwrap_or(0))?;
            state.owed.insert(fact.slot, learnt.backlog);
            let Some(most) = most.filter(|most| *most > 0) else { continue };
            let rest = choices.iter().enumerate().filter(|(j, _)| *j != i);
            let others = silent + rest.map(|(_, c)| window(c)).sum::<u32>();
            let (budget, floor) = state.depth(others, most, arm, &learnt);
            choices[i] = Choice { budget, rule: Rule { floor: floor as f32, ..choice.rule }, ..choice };
        }
        Ok(())
    }

    fn observe(&self, observed: &Observed) -> Result<(), OpError> {
        let mut state = self.state();
        let owed = state.owed.get(&observed.slot).copied().unwrap_or(1);
        if let Some(arm) = state.arm(observed.drafter).filter(|_| observed.drafted > 0) {
            state.drafting_ms += drafting(&state.prices, arm, observed.drafted, owed);
        }
        Ok(())
    }
}

/// What the rounds committed and cost, on every rank.
pub struct Costs(pub Arc<Depths>);

impl Observer for Costs {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::ROUND | interest::SEQUENCE)
    }

    fn sequence(&self, _: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        if let SequenceEvent::Committed { tokens, .. } = event {
            self.0.state().tokens += tokens.len() as u32;
        }
        Ok(())
    }

    fn round(&self, done: &RoundDone) -> Result<(), OpError> {
        let mut state = self.0.state();
        let (tokens, drafts) = (std::mem::take(&mut state.tokens), std::mem::take(&mut state.drafting_ms));
        if done.decoded > 0 {
            let ms = state.prices.window(done.window_rows) + drafts;
            state.rounds.add(tokens, ms);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

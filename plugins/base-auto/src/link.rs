//! The link of the `draft` policy, first of its chain.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use plugfold_abi::points::{Choice, DraftPolicy, NO_DRAFTER, Observed, Rule, SequenceFacts};
use plugfold_abi::{KnobValue, List, Maybe, OpError, Slice, Text, TextBuf};
use plugfold_base_auto_api::{Arm, Explore, FORMS, Form, Learnt, Policies, Prices};

use crate::USUAL_DRAFTS;
use crate::adapt::{Chooser, Depth, Running};

/// Drafts and floor of the automatic policy, by drafter.
const AUTO: [(u32, f64); 2] = [(3, 0.35), (7, 0.3)];
/// Thresholds of the automatic policy where tokens are sampled.
const SAMPLED: (f64, f64) = (0.6, 0.85);

/// The link, and the service for other plugins.
#[derive(Default)]
pub struct Policy(Mutex<State>);

struct State {
    own: String,
    off: bool,
    most: u32,
    /// Indices of the drafters, in the order of [`Arm`].
    arms: [u32; 2],
    lookup: u32,
    prices: Prices,
    lanes: BTreeMap<u32, Lane>,
}

impl Default for State {
    fn default() -> Self {
        Self {
            own: "auto".into(),
            off: false,
            most: USUAL_DRAFTS,
            arms: [NO_DRAFTER; 2],
            lookup: NO_DRAFTER,
            prices: Prices::fixed(),
            lanes: BTreeMap::new(),
        }
    }
}

/// What is known of a sequence.
#[derive(Default)]
struct Lane {
    /// The policy as it was asked for, and as it was read.
    asked: Option<(String, Form)>,
    sampled: bool,
    /// Who was asked in the round that runs.
    last: Option<Arm>,
    running: [Running; 2],
    depth: [Depth; 2],
    chooser: Chooser,
    /// Rows that each drafter has not seen yet.
    backlog: [u32; 2],
}

/// What a form wants of one drafter.
struct Wish {
    arm: Arm,
    drafts: u32,
    floor: f64,
}

fn place(arm: Arm) -> usize {
    usize::from(arm == Arm::Block)
}

impl State {
    fn parse(&self, asked: &str) -> Result<Form, OpError> {
        let text = if asked.is_empty() { self.own.as_str() } else { asked };
        Form::parse(text, self.most).map_err(|e| OpError::invalid(e.to_string()))
    }

    fn in_force(&self, asked: &str) -> TextBuf {
        match asked {
            _ if self.off => "0".into(),
            "" => self.own.as_str().into(),
            other => other.into(),
        }
    }

    fn has(&self, arm: Arm) -> bool {
        self.arms[place(arm)] != NO_DRAFTER
    }

    fn drafting(&self, arm: Arm, drafts: u32, backlog: u32) -> f64 {
        match arm {
            Arm::Mtp => self.prices.chain(drafts, backlog),
            Arm::Block => self.prices.block(backlog),
        }
    }

    /// The drafter of a policy that leaves the choice open.
    fn open(&self, lane: &Lane, explore: &Explore, sampled: bool) -> Option<Arm> {
        match (self.has(Arm::Mtp), self.has(Arm::Block)) {
            // Sampled requests draft with the layer alone.
            (true, true) if !sampled => Some(lane.chooser.arm(explore)),
            (true, _) => Some(Arm::Mtp),
            (false, true) => Some(Arm::Block),
            (false, false) => None,
        }
    }

    fn auto(&self, lane: &Lane, explore: &Explore, sampled: bool) -> Option<Wish> {
        let arm = self.open(lane, explore, sampled)?;
        let (drafts, floor) = AUTO[place(arm)];
        if sampled {
            return Some(Wish { arm, drafts: lane.running[place(arm)].drafts(), floor: 0.0 });
        }
        Some(Wish { arm, drafts, floor })
    }

    fn wish(&self, lane: &Lane, form: &Form, facts: &SequenceFacts<'_>) -> Option<Wish> {
        match *form {
            Form::Serial => None,
            Form::Auto(explore) => self.auto(lane, &explore, facts.sampled),
            // Rounds without a match are the automatic policy's.
            Form::Lookup { .. } => self.auto(lane, &Explore::USUAL, facts.sampled),
            Form::Fixed { arm, drafts } => Some(Wish { arm, drafts, floor: 0.0 }),
            Form::Chain { arm, drafts, floor } => Some(Wish { arm, drafts, floor }),
            Form::Running { arm, .. } => {
                Some(Wish { arm, drafts: lane.running[place(arm)].drafts(), floor: 0.0 })
            }
            Form::Cost { arm, drafts } => {
                let arm = match arm {
                    Some(arm) => arm,
                    None => self.open(lane, &Explore::USUAL, false)?,
                };
                let price = |k| self.drafting(arm, k, lane.backlog[place(arm)]);
                let most = drafts.min(facts.room);
                let (drafts, floor) = lane.depth[place(arm)].drafts(most, &self.prices, price);
                Some(Wish { arm, drafts, floor })
            }
        }
    }

    fn choose(&self, lane: &mut Lane, facts: &SequenceFacts<'_>) -> Result<Option<Choice>, OpError> {
        let policy = facts.policy.get_str();
        let form = match &lane.asked {
            Some((asked, form)) if asked == policy => *form,
            _ => {
                let form = self.parse(policy)?;
                lane.asked = Some((policy.to_owned(), form));
                form
            }
        };
        lane.sampled = facts.sampled;
        lane.last = None;
        let Some(wish) = self.wish(lane, &form, facts).filter(|w| self.has(w.arm)) else { return Ok(None) };
        let budget = wish.drafts.min(facts.room);
        if budget == 0 {
            return Ok(None);
        }
        lane.last = Some(wish.arm);
        let rule = Rule { floor: wish.floor as f32, min_match: 0 };
        Ok(Some(Choice { drafter: self.arms[place(wish.arm)], budget, rule }))
    }

    fn learn(&self, lane: &mut Lane, o: &Observed) {
        let kept = o.kept.min(o.drafted);
        let arm =
            [Arm::Mtp, Arm::Block].into_iter().find(|a| self.has(*a) && self.arms[place(*a)] == o.drafter);
        // A drafter that was asked and had nothing has spent its time all the same.
        let arm = arm.or(lane.last.filter(|_| o.drafter == NO_DRAFTER));
        let seen = arm.map(place);
        let before = lane.backlog;
        for (i, owed) in lane.backlog.iter_mut().enumerate() {
            *owed = if seen == Some(i) { kept + 1 } else { owed.saturating_add(kept + 1) };
        }
        let Some(arm) = arm else { return };
        let drafting = self.drafting(arm, o.drafted.max(1), before[place(arm)]);
        let ms = self.prices.window(o.drafted + 1) + drafting;
        let form = lane.asked.as_ref().map(|(_, form)| *form);
        let explore = if let Some(Form::Auto(explore)) = form { explore } else { Explore::USUAL };
        let (low, high) = match form {
            Some(Form::Running { low, high, .. }) => (low, high),
            _ => SAMPLED,
        };
        lane.running[place(arm)].learn(o.drafted, kept, low, high);
        lane.depth[place(arm)].learn(o.drafted, kept, ms);
        lane.chooser.learn(arm, kept + 1, ms, &explore);
    }
}

impl Policy {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the server's own policy; `off`: nothing is drafted at all.
    pub fn configure(&self, own: &str, off: bool) {
        let mut state = self.state();
        own.clone_into(&mut state.own);
        state.off = off;
    }

    /// Takes the room for drafts in a window, and checks the server's own policy.
    ///
    /// # Errors
    /// A policy that is none, or that asks for more drafts than there is room for.
    pub fn room(&self, drafts: u32) -> Result<(), OpError> {
        let mut state = self.state();
        state.most = drafts.max(1);
        state.parse("").map(|_| ())
    }

    pub(crate) fn settings(&self) -> (String, bool) {
        let state = self.state();
        (state.own.clone(), state.off)
    }
}

impl Policies for Policy {
    fn in_force(&self, asked: Text<'_>) -> Result<TextBuf, OpError> {
        Ok(self.state().in_force(asked.get_str()))
    }

    fn learnt(&self, slot: u32, drafter: Text<'_>, drafts: u32) -> Result<Learnt, OpError> {
        let state = self.state();
        let arm = [Arm::Mtp, Arm::Block].into_iter().find(|arm| arm.drafter() == drafter.get_str());
        let (Some(lane), Some(arm)) = (state.lanes.get(&slot), arm) else { return Ok(Learnt::default()) };
        let share = |at: u32| lane.depth[place(arm)].share(at as usize);
        Ok(Learnt { shares: (0..drafts).map(share).collect(), backlog: lane.backlog[place(arm)] })
    }
}

impl DraftPolicy for Policy {
    fn drafters(&self, names: Slice<'_, TextBuf>) -> Result<(), OpError> {
        let at = |name: &str| names.iter().position(|n| n.as_str() == name).map_or(NO_DRAFTER, |i| i as u32);
        let mut state = self.state();
        state.arms = [Arm::Mtp, Arm::Block].map(|arm| at(arm.drafter()));
        state.lookup = at("lookup");
        Ok(())
    }

    fn forms(&self) -> Result<List<TextBuf>, OpError> {
        Ok(FORMS.iter().map(|f| TextBuf::from(*f)).collect())
    }

    fn accepts(&self, policy: Text<'_>) -> Result<Maybe<TextBuf>, OpError> {
        let state = self.state();
        let form = state.parse(policy.get_str())?;
        let missing = match form.needs() {
            Some("lookup") if state.lookup == NO_DRAFTER => "list a plugin that looks drafts up (0020)",
            Some("mtp") if !state.has(Arm::Mtp) => {
                "list plugin base-mtp, and serve a checkpoint with a multi-token-prediction layer"
            }
            Some("dflash2") if !state.has(Arm::Block) => "list a plugin that drafts blocks (base-dflash2)",
            _ => return Ok(Maybe::RSome(state.in_force(policy.get_str()))),
        };
        Err(OpError::invalid(format!(
            "draft policy {:?} needs the drafter `{}`, which this server does not have: {missing}, or ask for `auto`",
            policy.get_str(),
            form.needs().unwrap_or_default()
        )))
    }

    fn decide(&self, facts: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> Result<(), OpError> {
        let mut state = self.state();
        if state.off {
            return Ok(());
        }
        let mut lanes = std::mem::take(&mut state.lanes);
        let mut decide = || {
            for (facts, choice) in facts.iter().zip(choices.iter_mut()) {
                let lane = lanes.entry(facts.slot).or_default();
                if let Some(chosen) = state.choose(lane, facts)? {
                    *choice = chosen;
                }
            }
            Ok(())
        };
        let done = decide();
        state.lanes = lanes;
        done
    }

    fn observe(&self, observed: &Observed) -> Result<(), OpError> {
        let mut state = self.state();
        let Some(mut lane) = state.lanes.remove(&observed.slot) else { return Ok(()) };
        state.learn(&mut lane, observed);
        state.lanes.insert(observed.slot, lane);
        Ok(())
    }

    fn begun(&self, slot: u32, _: Slice<'_, KnobValue>) -> Result<(), OpError> {
        self.state().lanes.insert(slot, Lane::default());
        Ok(())
    }

    fn ended(&self, slot: u32) -> Result<(), OpError> {
        self.state().lanes.remove(&slot);
        Ok(())
    }
}

#[cfg(test)]
mod tests;

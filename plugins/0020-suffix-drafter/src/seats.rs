//! The drafter, the gate before it and the cut behind it, over one table of sequences.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use plugfold_abi::boundary::Borrowed;
use plugfold_abi::points::{
    Ask, Choice, DraftCut, DraftPolicy, Drafter, ForwardsObject, NO_DRAFTER, Observed, Proposal, Rule,
    SequenceFacts,
};
use plugfold_abi::{FIRST_VIRTUAL_ID, KnobId, KnobValue, List, OpError, Slice, Text, TextBuf, value_of};
use plugfold_base_auto_api::{Arm, Form, Policies, PoliciesObject, Prices};

use crate::gate::Gate;
use crate::index::Index;

/// Shortest match where a caller names none.
const USUAL_MATCH: usize = 4;
/// Drafts that a window has room for where nobody raised its rows.
const USUAL_DRAFTS: u32 = 7;

/// When a sequence looks drafts up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Use {
    Never,
    /// Whenever there is a match.
    Forced {
        drafts: u32,
        min: usize,
    },
    /// Where it pays.
    Gated,
}

/// One running sequence.
#[derive(Default)]
struct Seat {
    /// The policy as it was asked for, and what follows from it.
    asked: Option<(String, Use)>,
    index: Option<Index>,
    gate: Gate,
    stop_ids: Vec<u32>,
}

/// Settings and all sequences.
struct Table {
    knobs: Option<(KnobId, KnobId)>,
    on: bool,
    min: u32,
    most: u32,
    prices: Prices,
    /// Index of this drafter, and of the model drafters.
    own: u32,
    arms: [u32; 2],
    seats: BTreeMap<u32, Seat>,
    /// Texts that ended, oldest first: a next turn goes on with one of them.
    kept: Vec<Index>,
    kept_most: usize,
}

impl Default for Table {
    fn default() -> Self {
        Self {
            knobs: None,
            on: true,
            min: USUAL_MATCH as u32,
            most: USUAL_DRAFTS,
            prices: Prices::fixed(),
            own: NO_DRAFTER,
            arms: [NO_DRAFTER; 2],
            seats: BTreeMap::new(),
            kept: Vec::new(),
            kept_most: 1,
        }
    }
}

/// An index with a text's history: the sequence's own, the one that an earlier turn left, or a new one.
fn synced<'s>(seat: &'s mut Option<Index>, kept: &mut Vec<Index>, ids: &[u32], min: usize) -> &'s mut Index {
    let gram = Index::gram_of(min);
    // The last token tells an index of this text from one of another; all of it is compared when it is taken over.
    let own = |i: &Index| {
        let n = i.tokens().len();
        i.gram() == gram && n <= ids.len() && (n == 0 || ids[n - 1] == i.tokens()[n - 1])
    };
    let index = if let Some(index) = seat.take().filter(own) {
        index
    } else {
        let fits = |i: &Index| i.gram() == gram && ids.starts_with(i.tokens());
        let best = (0..kept.len()).filter(|at| fits(&kept[*at])).max_by_key(|at| kept[*at].tokens().len());
        best.map_or_else(|| Index::new(min), |at| kept.remove(at))
    };
    let index = seat.insert(index);
    let known = index.tokens().len();
    index.extend(&ids[known..]);
    index
}

/// Drafts before the first that ends a reply or stands for a row of an image.
fn useful(drafts: &[u32], stop_ids: &[u32]) -> usize {
    drafts.iter().take_while(|id| **id < FIRST_VIRTUAL_ID && !stop_ids.contains(id)).count()
}

impl Table {
    fn own_settings(&self, values: Slice<'_, KnobValue>) -> (bool, usize) {
        let of = |id: Option<KnobId>| id.and_then(|id| value_of(values, id));
        let on = of(self.knobs.map(|k| k.0)).map_or(self.on, KnobValue::as_bool);
        let min = of(self.knobs.map(|k| k.1)).and_then(KnobValue::as_int);
        let min = min.and_then(|m| usize::try_from(m).ok()).unwrap_or(self.min as usize);
        (on, min.max(1))
    }

    fn choose(&mut self, seat: &mut Seat, facts: &SequenceFacts<'_>, how: Use) -> Option<Choice> {
        seat.gate.pass();
        seat.stop_ids.clear();
        seat.stop_ids.extend_from_slice(&facts.stop_ids);
        let (on, own_min) = self.own_settings(facts.knobs);
        let (most, min) = match how {
            Use::Forced { drafts, min } => (drafts, min),
            Use::Gated if on => (self.most, own_min),
            _ => return None,
        };
        let most = most.min(facts.room);
        if self.own == NO_DRAFTER || most == 0 {
            return None;
        }
        let index = synced(&mut seat.index, &mut self.kept, &facts.ids, min);
        let found = index.find().filter(|m| m.length >= min)?;
        let drafts = useful(&index.copy(found, most as usize), &seat.stop_ids) as u32;
        if drafts == 0 {
            return None;
        }
        let budget = if how == Use::Gated {
            seat.gate.depth(found.length, drafts, &self.prices)?
        } else {
            seat.gate.forced(found.length);
            drafts
        };
        let rule = Rule { floor: 0.0, min_match: min as u32 };
        Some(Choice { drafter: self.own, budget, rule })
    }
}

/// The hooks of this plugin.
#[derive(Default)]
pub struct Lookup {
    table: Mutex<Table>,
    policies: OnceLock<Borrowed<'static, PoliciesObject>>,
}

impl Lookup {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the numbers of the request knobs and the values at load.
    pub fn configure(&self, lookup: KnobId, on: bool, lookup_min: KnobId, min: u32) {
        let mut table = self.table();
        table.knobs = Some((lookup, lookup_min));
        (table.on, table.min) = (on, min);
    }

    /// Takes the draft policies.
    pub fn connect(&self, policies: Borrowed<'static, PoliciesObject>) {
        // A second connection would be of the same plugin.
        let _ = self.policies.set(policies);
    }

    /// Takes sizes: sequences at once, drafts in a window.
    pub fn limits(&self, slots: u32, drafts: u32) {
        let mut table = self.table();
        table.kept_most = slots.max(1) as usize;
        table.most = drafts.max(1);
    }

    /// How a policy looks drafts up.
    fn how(&self, asked: &str, most: u32) -> Result<Use, OpError> {
        let text = match self.policies.get() {
            Some(policies) => policies.in_force(Text::from(asked))?,
            None if asked.is_empty() => "auto".into(),
            None => asked.into(),
        };
        let form = Form::parse(&text, most).map_err(|e| OpError::invalid(e.to_string()))?;
        Ok(match form {
            Form::Auto(_) | Form::Cost { arm: None, .. } => Use::Gated,
            Form::Lookup { drafts, min_match } => Use::Forced { drafts, min: min_match as usize },
            _ => Use::Never,
        })
    }
}

impl DraftPolicy for Lookup {
    fn drafters(&self, names: Slice<'_, TextBuf>) -> Result<(), OpError> {
        let at = |name: &str| names.iter().position(|n| n.as_str() == name).map_or(NO_DRAFTER, |i| i as u32);
        let mut table = self.table();
        table.own = at("lookup");
        table.arms = [Arm::Mtp, Arm::Block].map(|arm| at(arm.drafter()));
        Ok(())
    }

    fn decide(&self, facts: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> Result<(), OpError> {
        for (facts, choice) in facts.iter().zip(choices.iter_mut()) {
            let policy = facts.policy.get_str();
            let mut table = self.table();
            let mut seat = table.seats.remove(&facts.slot).unwrap_or_default();
            let known = seat.asked.as_ref().filter(|(asked, _)| asked == policy).map(|(_, how)| *how);
            let how = known.map_or_else(|| self.how(policy, table.most), Ok);
            let chosen = how.map(|how| {
                seat.asked = Some((policy.to_owned(), how));
                table.choose(&mut seat, facts, how)
            });
            table.seats.insert(facts.slot, seat);
            if let Some(chosen) = chosen? {
                *choice = chosen;
            }
        }
        Ok(())
    }

    fn observe(&self, o: &Observed) -> Result<(), OpError> {
        let mut guard = self.table();
        let table = &mut *guard;
        let Some(seat) = table.seats.get_mut(&o.slot) else { return Ok(()) };
        let kept = o.kept.min(o.drafted);
        if o.drafter == table.own && o.drafter != NO_DRAFTER {
            seat.gate.looked_up(o.drafted, kept);
        } else {
            let is = |at: usize| table.arms[at] == o.drafter && o.drafter != NO_DRAFTER;
            let arm = [Arm::Mtp, Arm::Block].into_iter().enumerate().find(|(at, _)| is(*at)).map(|(_, a)| a);
            seat.gate.other(arm, o.drafted, kept, &table.prices);
        }
        Ok(())
    }

    fn ended(&self, slot: u32) -> Result<(), OpError> {
        let mut guard = self.table();
        let table = &mut *guard;
        let index = table.seats.remove(&slot).and_then(|s| s.index);
        if let Some(index) = index.filter(|i| !i.tokens().is_empty()) {
            if table.kept.len() >= table.kept_most {
                table.kept.remove(0);
            }
            table.kept.push(index);
        }
        Ok(())
    }
}

impl Drafter for Lookup {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("lookup".into())
    }

    fn begun(&self, slot: u32, _: Slice<'_, u32>, _: u32) -> Result<(), OpError> {
        self.table().seats.insert(slot, Seat::default());
        Ok(())
    }

    fn propose(&self, asks: Slice<'_, Ask<'_>>, _: &ForwardsObject) -> Result<List<Proposal>, OpError> {
        let mut guard = self.table();
        let table = &mut *guard;
        let mut out = List::with_capacity(asks.len());
        for ask in asks.iter() {
            let min = if ask.rule.min_match == 0 { USUAL_MATCH } else { ask.rule.min_match as usize };
            let seat = table.seats.entry(ask.slot).or_default();
            let index = synced(&mut seat.index, &mut table.kept, &ask.ids, min);
            let found = index.find().filter(|m| m.length >= min);
            let mut tokens = found.map_or_else(Vec::new, |m| index.copy(m, ask.budget as usize));
            tokens.truncate(useful(&tokens, &seat.stop_ids));
            out.push(Proposal { tokens: tokens.into(), probabilities: List::new() });
        }
        Ok(out)
    }
}

impl DraftCut for Lookup {
    fn cut(&self, slot: u32, _: u32, drafts: Slice<'_, u32>) -> Result<u32, OpError> {
        let table = self.table();
        let stop_ids = table.seats.get(&slot).map_or(&[][..], |s| &s.stop_ids);
        Ok(useful(&drafts, stop_ids) as u32)
    }
}

#[cfg(test)]
mod tests;

//! Drafters, the policy that chooses among them, and the cut before verification.

use std::sync::Arc;

use plugfold_abi::points::{
    Absorbed, Ask, Choice, DraftCut, DraftPolicy, Drafter, DrafterObject, Draw, ForwardsObject, NO_DRAFTER,
    Observed, Proposal, Rule, SequenceFacts, Wants,
};
use plugfold_abi::{List, OpError, Slice, Text, TextBuf};
use smallvec::SmallVec;

use super::forwards::ForwardsOf;
use super::steps::{Pace, Steps};
use super::{FEW, RoundError, Running};
use crate::core::Core;
use crate::hooks::{HookError, Hooked, Hooks};
use crate::knobs::Values;
use crate::ranks::World;

/// A hook that failed; `elsewhere`: because another rank had.
pub(super) struct Miss {
    pub error: HookError,
    pub elsewhere: bool,
}

impl From<HookError> for Miss {
    fn from(error: HookError) -> Self {
        Self { error, elsewhere: false }
    }
}

/// A hook call that all ranks make or none: gives what it gave, or who failed.
fn together<T>(
    h: &Hooked<DrafterObject>,
    core: &mut Core,
    pace: &Pace<'_>,
    running: &[Option<Running>],
    wants: Wants,
    call: impl FnOnce(&DrafterObject, &ForwardsObject) -> Result<T, OpError>,
) -> Result<Result<T, Miss>, RoundError> {
    let forwards = ForwardsOf::new(core, pace, wants.mtp_layer, running, &h.calls);
    let lent = ForwardsObject::lend(&forwards);
    let ran = h.call(|d| call(d, &lent));
    if !wants.mtp_layer {
        // It ran no forward, so nobody waits for this rank.
        return Ok(ran.map_err(Miss::from));
    }
    let left = pace.leave(ran.is_err())?;
    Ok(match (ran, left) {
        (Ok(value), None) => Ok(value),
        (Ok(_), Some(_)) => {
            let error = h.named(&OpError::new("the call failed on another rank"));
            Err(Miss { error, elsewhere: true })
        }
        (Err(error), left) => Err(Miss { error, elsewhere: left == Some(true) }),
    })
}

/// One sequence that may get drafts.
pub(super) struct Candidate<'a> {
    pub slot: usize,
    pub length: usize,
    pub room: usize,
    pub pending: u32,
    pub draw: Draw,
    pub policy: &'a str,
    pub knobs: &'a Values,
    pub ids: &'a [u32],
    pub stop_ids: &'a [u32],
}

impl<'a> Candidate<'a> {
    fn facts(&'a self, shared: usize) -> SequenceFacts<'a> {
        SequenceFacts {
            slot: self.slot as u32,
            length: self.length as u32,
            room: self.room as u32,
            sampled: self.draw.temperature > 0.0,
            policy: Text::from(self.policy),
            knobs: Slice::from(&self.knobs[..]),
            ids: Slice::from(self.ids),
            shared: shared as u32,
            stop_ids: Slice::from(self.stop_ids),
        }
    }
}

/// Drafts of one sequence.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Drafts {
    pub tokens: Vec<u32>,
    pub drafter: Option<usize>,
}

/// The drafters and policies of one rank.
pub(super) struct Drafting {
    hooks: Arc<Hooks>,
    names: Vec<String>,
    wants: Vec<Wants>,
    /// Drafters for which the checkpoint has what they want.
    usable: Vec<bool>,
    /// Choices of the last round, kept for their memory.
    choices: List<Choice>,
}

/// What became of each sequence that asked.
pub(super) type Proposed = SmallVec<[Result<Drafts, Miss>; FEW]>;

impl Drafting {
    pub(super) fn new(hooks: &Arc<Hooks>, mtp: bool, slots: usize) -> Result<Self, HookError> {
        debug_assert!(slots > 0, "an engine has slots");
        let (mut names, mut wants) = (Vec::new(), Vec::new());
        for h in &hooks.drafters {
            let name = h.call(Drafter::name)?.to_string();
            if names.contains(&name) {
                let text =
                    format!("a drafter called `{name}` is loaded already: take one of the two off the list");
                return Err(h.named(&OpError::new(text)));
            }
            names.push(name);
            wants.push(h.call(Drafter::wants)?);
        }
        let usable: Vec<bool> = wants.iter().map(|w| mtp || !w.mtp_layer).collect();
        // A name that a policy must not choose is told as empty.
        let told = names.iter().zip(&usable).map(|(n, u)| TextBuf::from(if *u { n.as_str() } else { "" }));
        let told: Vec<TextBuf> = told.collect();
        for h in &hooks.policies {
            h.call(|p| p.drafters(Slice::from(&told[..])))?;
        }
        Ok(Self { hooks: hooks.clone(), names, wants, usable, choices: List::new() })
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Whether some drafter runs forwards, which all ranks run together.
    pub(super) fn shared(&self) -> bool {
        self.wants.iter().zip(&self.usable).any(|(w, u)| *u && w.mtp_layer)
    }

    fn usable(&self) -> impl Iterator<Item = &Hooked<DrafterObject>> {
        self.hooks.drafters.iter().zip(&self.usable).filter(|(_, u)| **u).map(|(h, _)| h)
    }

    /// Whether some drafter reads the model's final rows.
    pub(super) fn wants_hidden(&self) -> bool {
        self.wants.iter().zip(&self.usable).any(|(w, u)| *u && w.hidden)
    }

    /// Whether some drafter reads rows of the multi-token-prediction layer.
    pub(super) fn wants_layer(&self) -> bool {
        self.wants.iter().zip(&self.usable).any(|(w, u)| *u && w.mtp_layer)
    }

    /// Whether anybody could ever draft.
    pub(super) fn is_idle(&self) -> bool {
        !self.usable.contains(&true) || self.hooks.policies.is_empty()
    }

    pub(super) fn begun(
        &self,
        slot: usize,
        ids: Slice<'_, u32>,
        resumed: usize,
        knobs: &Values,
    ) -> Result<(), HookError> {
        for h in self.usable() {
            h.call(|d| d.begun(slot as u32, ids, resumed as u32))?;
        }
        self.hooks.policies.iter().try_for_each(|h| h.call(|p| p.begun(slot as u32, Slice::from(&knobs[..]))))
    }

    pub(super) fn ended(&self, slot: usize) -> Result<(), HookError> {
        for h in self.usable() {
            h.call(|d| d.ended(slot as u32))?;
        }
        self.hooks.policies.iter().try_for_each(|h| h.call(|p| p.ended(slot as u32)))
    }

    /// Tokens became part of a sequence. Every drafter is told, even where one fails: the ranks stay in step.
    pub(super) fn absorb(
        &self,
        core: &mut Core,
        (world, steps, running): (&World, &Steps, &[Option<Running>]),
        slot: usize,
        start: usize,
        tokens: &[u32],
        hidden: &[f32],
    ) -> Result<Vec<Miss>, RoundError> {
        let mut missed = Vec::new();
        for ((h, wants), _) in
            self.hooks.drafters.iter().zip(&self.wants).zip(&self.usable).filter(|(_, u)| **u)
        {
            let absorbed = Absorbed {
                slot: slot as u32,
                start: start as u32,
                tokens: Slice::from(tokens),
                hidden: Slice::from(if wants.hidden { hidden } else { &[] }),
            };
            let pace = Pace::new(world, steps);
            let told = together(h, core, &pace, running, *wants, |d, f| d.absorb(&absorbed, f))?;
            missed.extend(told.err());
        }
        Ok(missed)
    }

    /// The policy's choices, one a sequence.
    fn choose(
        &self,
        candidates: &[Candidate<'_>],
        shared: usize,
        choices: &mut List<Choice>,
    ) -> Result<(), HookError> {
        let facts: SmallVec<[SequenceFacts<'_>; FEW]> = candidates.iter().map(|c| c.facts(shared)).collect();
        let none = Choice { drafter: NO_DRAFTER, budget: 0, rule: Rule { floor: 0.0, min_match: 0 } };
        choices.clear();
        choices.extend(candidates.iter().map(|_| none));
        for h in &self.hooks.policies {
            h.call(|p| p.decide(Slice::from(&facts[..]), choices))?;
            if choices.len() != candidates.len() {
                let text =
                    format!("its policy gave {} choices for {} sequences", choices.len(), candidates.len());
                return Err(h.named(&OpError::new(text)));
            }
        }
        Ok(())
    }

    /// Drafts for the sequences, one entry each, never more than the room. A drafter that fails, fails all that it was
    /// asked for at once.
    pub(super) fn propose(
        &mut self,
        core: &mut Core,
        around: (&World, &Steps, &[Option<Running>]),
        candidates: &[Candidate<'_>],
        shared: usize,
    ) -> Result<Proposed, RoundError> {
        if self.is_idle() || candidates.is_empty() {
            return Ok(candidates.iter().map(|_| Ok(Drafts::default())).collect());
        }
        let mut choices = std::mem::take(&mut self.choices);
        let lost = self.choose(candidates, shared, &mut choices).err();
        let out = self.ask_all(core, around, candidates, &choices, lost);
        self.choices = choices;
        out
    }

    fn ask_all(
        &self,
        core: &mut Core,
        (world, steps, running): (&World, &Steps, &[Option<Running>]),
        candidates: &[Candidate<'_>],
        choices: &[Choice],
        lost: Option<HookError>,
    ) -> Result<Proposed, RoundError> {
        let mut out: Proposed = candidates.iter().map(|_| Ok(Drafts::default())).collect();
        let vocab = core.config().vocab_size as u32;
        for (index, h) in self.hooks.drafters.iter().enumerate() {
            let pace = Pace::new(world, steps);
            let wants = self.wants[index];
            if lost.is_some() {
                // The other ranks may have chosen this drafter: they must not wait for its forwards.
                if wants.mtp_layer && self.usable[index] {
                    pace.leave(true)?;
                }
                continue;
            }
            let chosen: SmallVec<[usize; FEW]> = (0..candidates.len())
                .filter(|&i| choices[i].drafter as usize == index && self.usable[index])
                .filter(|&i| choices[i].budget > 0 && candidates[i].room > 0)
                .collect();
            if chosen.is_empty() {
                continue;
            }
            let ask = |&i: &usize| Ask {
                slot: candidates[i].slot as u32,
                length: candidates[i].length as u32,
                pending: candidates[i].pending,
                budget: choices[i].budget.min(candidates[i].room as u32),
                rule: choices[i].rule,
                draw: candidates[i].draw,
                ids: Slice::from(candidates[i].ids),
            };
            let asks: SmallVec<[Ask<'_>; FEW]> = chosen.iter().map(ask).collect();
            let count = asks.len();
            let proposals = together(h, core, &pace, running, wants, |d, forwards| {
                let given = d.propose(Slice::from(&asks[..]), forwards)?;
                if given.len() == count {
                    return Ok(given);
                }
                let (name, n) = (&self.names[index], given.len());
                Err(OpError::new(format!("drafter {name} gave {n} proposals for {count} sequences")))
            })?;
            match proposals {
                Ok(proposals) => {
                    for ((&i, ask), proposal) in chosen.iter().zip(&asks).zip(&proposals) {
                        let cut = self.cut(ask, proposal, vocab);
                        let drafts = |tokens: Vec<u32>| Drafts {
                            drafter: (!tokens.is_empty()).then_some(index),
                            tokens,
                        };
                        out[i] = cut.map(drafts).map_err(Miss::from);
                    }
                }
                Err(miss) => {
                    for &i in &chosen {
                        out[i] = Err(Miss { error: miss.error.clone(), elsewhere: miss.elsewhere });
                    }
                }
            }
        }
        if let Some(error) = lost {
            out = candidates.iter().map(|_| Err(Miss::from(error.clone()))).collect();
        }
        Ok(out)
    }

    fn cut(&self, ask: &Ask<'_>, proposal: &Proposal, vocab: u32) -> Result<Vec<u32>, HookError> {
        let known = proposal.tokens.iter().copied().take(ask.budget as usize);
        let mut tokens: Vec<u32> = known.take_while(|&id| id < vocab).collect();
        for h in &self.hooks.cuts {
            let keep = h.call(|c| c.cut(ask.slot, ask.pending, Slice::from(&tokens[..])))?;
            tokens.truncate(keep as usize);
        }
        Ok(tokens)
    }

    pub(super) fn observe(&self, observed: &Observed) -> Result<(), HookError> {
        self.hooks.policies.iter().try_for_each(|h| h.call(|p| p.observe(observed)))
    }
}

//! Drafts from a recorded reply, with a mistake now and then: a drafter for gates, whatever a profile brings.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use plugfold_abi::points::{
    Ask, Choice, DraftPolicy, DraftPolicyObject, Drafter, DrafterObject, ForwardsObject, Proposal, Rule,
    SequenceFacts,
};
use plugfold_abi::{List, OpError, Slice, TextBuf};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::Options;
use plugfold_engine::ranks::World;

use super::OWNER;
use crate::exact::Setup;

const NAME: &str = "recorded";

type Replies = Mutex<HashMap<Vec<u32>, Vec<u32>>>;

/// Replies by prompt. All ranks of a lab are threads here, and all of them record the same.
fn replies() -> &'static Replies {
    static ALL: OnceLock<Replies> = OnceLock::new();
    ALL.get_or_init(Replies::default)
}

/// Remembers a reply.
pub(in crate::exact) fn record(prompt: &[u32], reply: &[u32]) {
    replies().lock().unwrap_or_else(PoisonError::into_inner).insert(prompt.to_vec(), reply.to_vec());
}

struct Recorded;

fn guess(ask: &Ask<'_>) -> Proposal {
    let ids = ask.ids.get_ref();
    let known = replies().lock().unwrap_or_else(PoisonError::into_inner);
    let found = (1..ids.len()).rev().find_map(|n| known.get(&ids[..n]).map(|reply| (n, reply)));
    let Some((prompt, reply)) = found else { return Proposal::default() };
    let given = ids.len() - prompt;
    let mut tokens: Vec<u32> = reply.iter().skip(given).take(ask.budget as usize).copied().collect();
    // Wrong at the end, wrong in the middle, right.
    let wrong = match given % 3 {
        0 => tokens.len().checked_sub(1),
        1 => Some(1),
        _ => None,
    };
    if let Some(token) = wrong.and_then(|at| tokens.get_mut(at)) {
        *token ^= 1;
    }
    Proposal { tokens: tokens.into(), probabilities: List::new() }
}

impl Drafter for Recorded {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NAME.into())
    }
    fn propose(&self, asks: Slice<'_, Ask<'_>>, _: &ForwardsObject) -> Result<List<Proposal>, OpError> {
        Ok(asks.iter().map(guess).collect())
    }
}

/// Gives every sequence to the recorded drafts, whatever was chosen before.
struct Always(Mutex<u32>);

impl DraftPolicy for Always {
    fn drafters(&self, names: Slice<'_, TextBuf>) -> Result<(), OpError> {
        let at = names.iter().position(|n| n.as_str() == NAME).unwrap_or(0);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = at as u32;
        Ok(())
    }
    fn decide(&self, facts: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> Result<(), OpError> {
        let drafter = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (fact, choice) in facts.iter().zip(choices) {
            *choice = Choice { drafter, budget: fact.room, rule: Rule { floor: 0.0, min_match: 0 } };
        }
        Ok(())
    }
}

fn add(hooks: &mut Hooks) -> Result<(), String> {
    hooks.add_object(OWNER, DrafterObject::new(Recorded)).map_err(|e| e.to_string())?;
    hooks.add_object(OWNER, DraftPolicyObject::new(Always(Mutex::new(0)))).map_err(|e| e.to_string())
}

/// The same setup with recorded drafts.
pub(in crate::exact) fn with_recorded(setup: &Setup) -> Setup {
    let inner = setup.load.clone();
    let load = Arc::new(move |world: &World, options: &Options| {
        let mut company = inner(world, options)?;
        add(&mut company.hooks)?;
        Ok(company)
    });
    Setup { load, ..setup.clone() }
}

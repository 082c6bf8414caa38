//! Drafters for tests: a function of the ids, and the policy that always asks it.

use std::sync::Arc;

use plugfold_abi::points::{
    Ask, Choice, DraftPolicy, DraftPolicyObject, Drafter, DrafterObject, ForwardsObject, Proposal, Rule,
    SequenceFacts,
};
use plugfold_abi::{List, OpError, Slice, TextBuf};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::hooks::Hooks;

/// Guesses from nothing but the ids.
pub trait Guess: Send + Sync + 'static {
    /// Up to `budget` tokens that may follow `ids` (prompt, reply so far, and the pending token last).
    fn guess(&self, ids: &[u32], budget: usize) -> Vec<u32>;
}

struct Guesses<G>(G);

impl<G: Guess> Drafter for Guesses<G> {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("guess".into())
    }
    fn propose(&self, asks: Slice<'_, Ask<'_>>, _: &ForwardsObject) -> Result<List<Proposal>, OpError> {
        let one = |ask: &Ask<'_>| Proposal {
            tokens: self.0.guess(&ask.ids, ask.budget as usize).into(),
            probabilities: List::new(),
        };
        Ok(asks.iter().map(one).collect())
    }
}

/// Always asks the first drafter for as much as there is room.
pub struct Always;

impl DraftPolicy for Always {
    fn decide(&self, facts: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> Result<(), OpError> {
        for (fact, choice) in facts.iter().zip(choices) {
            *choice = Choice { drafter: 0, budget: fact.room, rule: Rule { floor: 0.0, min_match: 0 } };
        }
        Ok(())
    }
}

/// The hooks of a drafter that is always asked.
///
/// # Panics
/// Never: the interfaces are this build's own.
pub fn guessing_hooks(guess: impl Guess) -> Hooks {
    let mut hooks = Hooks::default();
    let drafter = hooks.add_object("guess", DrafterObject::new(Guesses(guess)));
    drafter
        .and_then(|()| hooks.add_object("always", DraftPolicyObject::new(Always)))
        .unwrap_or_else(|e| panic!("{e}"));
    hooks
}

/// Core options with a drafter that is always asked.
pub fn guessing(guess: impl Guess) -> CoreOptions {
    CoreOptions { hooks: Arc::new(guessing_hooks(guess)), ..CoreOptions::default() }
}

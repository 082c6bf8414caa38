//! A round on one rank: the same on every rank, from the plan and what was exchanged alone.

mod agree;
mod course;
mod drafting;
mod forwards;
mod keep;
mod prefill;
mod steps;
mod window;

use std::sync::Arc;

use plugfold_abi::points::{
    Observer, ObserverObject, RoundDriverObject, Section, SequenceEvent, Store, interest,
};
use plugfold_abi::{ErrorKind, OpError, Slice};

use crate::core::{CommitError, Core, LoadError, SequencesOf};
use crate::exchange::ExchangeError;
use crate::hooks::{HookError, Hooked, Hooks};
use crate::knobs::Values;
use crate::logprobs::TokenLogprobs;
use crate::plan::{Admission, Plan, Resume};
use crate::program::ResolveError;
use crate::ranks::{RankError, World};
use crate::sampling::draw;

use course::Course;
use drafting::{Drafting, Miss};
pub use keep::Kept;
use steps::{Fault, Steps};

/// Sequences of a round for which nothing is allocated.
const FEW: usize = 8;

/// What happened to a slot in a round.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// The sequence has its slot, with so many tokens of its prompt resumed.
    Begun(usize),
    /// Prompt rows were absorbed; so many are in.
    Absorbed(usize),
    /// New tokens. `drafted` of the window's rows were drafts.
    Tokens {
        /// The tokens, in order.
        tokens: Vec<u32>,
        /// Theirs, when the sequence asks for them.
        logprobs: Vec<TokenLogprobs>,
        /// Drafts that were verified.
        drafted: usize,
        /// Who drafted them: index of the drafter.
        drafter: Option<usize>,
        /// Sequences that shared the forward.
        shared: usize,
        /// Whether the reply is complete.
        end: Option<End>,
    },
    /// The sequence failed and its slot is free.
    Failed(String),
}

/// Why a reply is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// A stop id.
    Stop,
    /// The budget.
    Length,
}

/// The ranks are out of step or one is gone: nothing can go on.
#[derive(Debug, thiserror::Error)]
pub enum RoundError {
    /// An exchange failed.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
    /// A control message failed.
    #[error(transparent)]
    Rank(#[from] RankError),
    /// A program does not resolve: a plugin is missing for a shape that start-up did not see.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The commit program does not resolve, or failed in a way that ends the engine.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// A snapshot or a tag.
    #[error(transparent)]
    State(#[from] LoadError),
    /// A plugin's hook that all ranks must run alike.
    #[error(transparent)]
    Hook(#[from] HookError),
    /// An exchange inside the forward failed.
    #[error("{0}")]
    Forward(String),
}

/// A running sequence, as every rank knows it.
struct Running {
    admission: Admission,
    knobs: Values,
    /// The last token drawn, not yet run through the model.
    pending: Option<u32>,
    generated: usize,
    /// The reasoning has ended.
    closed: bool,
}

impl Running {
    /// The tokens that follow a window's rows, the first at `position`; `None` when a row holds no number.
    fn draw(&self, rows: &mut [Vec<(f32, u32)>], position: usize) -> Option<Vec<u32>> {
        let (sampling, seed) = (self.admission.sampling(), self.admission.seed);
        let mut closed = self.closed;
        let mut tokens = Vec::with_capacity(rows.len());
        for (i, row) in rows.iter_mut().enumerate() {
            let mut token = draw(row, &sampling, seed, position + i)?;
            if let Some(budget) = self.admission.thinking {
                // By the place in the reply alone, so that drafts and rounds change nothing.
                if !closed && self.generated + i >= budget.tokens {
                    token = budget.close;
                }
                closed |= token == budget.close;
            }
            tokens.push(token);
        }
        Some(tokens)
    }

    /// Whether its states may be kept and resumed: drafts are on, and nothing but ids decides its rows.
    fn resumable(&self) -> bool {
        self.admission.draft && self.admission.attachments.is_empty()
    }
}

/// What a round gave.
#[derive(Debug, Default)]
pub struct Report {
    /// What happened to slots: admissions, pieces in plan order, then decoding slots.
    pub outcomes: Vec<(usize, Outcome)>,
    /// Seconds of the prompt pieces.
    pub piece_s: f64,
    /// Seconds of the windows, drafts included.
    pub decode_s: f64,
}

/// All sequences of one rank.
pub struct Rounds {
    running: Vec<Option<Running>>,
    kept: Vec<Vec<Kept>>,
    /// Each slot's committed ids and the pending token, where drafts were asked for: what drafters and policies read.
    texts: Vec<Vec<u32>>,
    /// This rank's words of riders.
    words: Vec<u32>,
    drafting: Drafting,
    hooks: Arc<Hooks>,
    /// Who takes the parts of a round; `None`: they run one after another.
    driver: Option<Hooked<RoundDriverObject>>,
    observers: Vec<(Hooked<ObserverObject>, u32)>,
    /// Failures of hooks on this rank since the ranks last agreed.
    faults: Vec<Fault>,
    steps: Steps,
    chunk: usize,
    chunk_most: usize,
}

impl Rounds {
    /// No sequences yet. `chunk`: rows of a prefill chunk where no plugin says otherwise; `most`: of the largest.
    ///
    /// # Errors
    /// A plugin that cannot say what it is.
    pub fn new(core: &Core, chunk: usize, most: usize) -> Result<Self, HookError> {
        Self::with_hooks(core, core.hooks(), chunk, most)
    }

    /// As [`Rounds::new`], for hooks that are not in force yet.
    ///
    /// # Errors
    /// As [`Rounds::new`].
    pub fn with_hooks(core: &Core, hooks: &Arc<Hooks>, chunk: usize, most: usize) -> Result<Self, HookError> {
        let hooks = hooks.clone();
        let slots = core.capacity().slots;
        let mut observers = Vec::new();
        for h in &hooks.observers {
            observers.push((h.clone(), h.call(Observer::interests)?));
        }
        let drafting = Drafting::new(&hooks, core.has_mtp(), slots)?;
        Ok(Self {
            running: (0..slots).map(|_| None).collect(),
            kept: vec![Vec::new(); slots],
            texts: vec![Vec::new(); slots],
            words: Vec::new(),
            steps: Steps::new(drafting.shared()),
            drafting,
            hooks,
            driver: None,
            observers,
            faults: Vec::new(),
            chunk,
            chunk_most: most.max(chunk),
        })
    }

    /// Has rounds run by a driver.
    #[must_use]
    pub fn driven_by(mut self, driver: Option<&Hooked<RoundDriverObject>>) -> Self {
        self.driver = driver.cloned();
        self
    }

    /// Names of the drafters, by index.
    pub fn drafters(&self) -> &[String] {
        self.drafting.names()
    }

    /// Whether a drafter is in use that reads rows of the multi-token-prediction layer.
    pub fn reads_draft_layer(&self) -> bool {
        !self.drafting.is_idle() && self.drafting.wants_layer()
    }

    /// Runs a plan.
    ///
    /// # Errors
    /// Only what ends the engine; a failed sequence is an outcome.
    pub fn run(&mut self, core: &mut Core, world: &World, plan: Plan) -> Result<Report, RoundError> {
        for (index, bytes) in &plan.sections {
            let Some(h) = self.hooks.sections.get(*index) else {
                return Err(RoundError::Forward(format!(
                    "a plan with section {index}, which no plugin here reads"
                )));
            };
            h.call(|s| s.read(plan.round, Slice::from(&bytes[..])))?;
        }
        let mut course = Course::of(plan);
        if let Some(driver) = self.driver.clone() {
            course.drive(&driver, self, core, world)?;
        }
        course.finish(self, core, world)
    }

    /// Gives a sequence its slot and resumes what its plan says. What one rank cannot resume, none does.
    fn admit(&mut self, core: &mut Core, world: &World, admission: Admission) -> Result<Outcome, RoundError> {
        let slot = admission.slot;
        let knobs: Values = if admission.knobs.is_empty() {
            core.hooks().knobs.defaults.clone()
        } else {
            admission.knobs.clone().into()
        };
        let begun = core.begin_with(slot, knobs.clone());
        self.note(slot, begun);
        let resumed = self.resume(core, world, &admission)?;
        // What lies past the resume point is about to be overwritten, and rows of a store replace all there were.
        let stored = matches!(admission.resume, Resume::Store { .. });
        self.kept[slot].retain(|k| !stored && k.snapshot.ids.len() <= resumed);
        let ids = Slice::from(&admission.ids[..]);
        for h in &self.hooks.stores {
            let told = h.call(|s| s.overwritten(slot as u32, resumed as u32));
            if let Err(error) = told {
                self.faults.push(Fault { slot, message: error.to_string(), elsewhere: false });
            }
        }
        if admission.draft {
            let told = self.drafting.begun(slot, ids, resumed, &knobs);
            self.note(slot, told);
        }
        let event = SequenceEvent::Begun {
            request: admission.request,
            ids,
            resumed: resumed as u32,
            knobs: Slice::from(&knobs[..]),
            attachments: Slice::from(&admission.blobs[..]),
        };
        self.observe(interest::SEQUENCE, |o| o.sequence(slot as u32, &event));
        self.texts[slot].clear();
        self.running[slot] = Some(Running { admission, knobs, pending: None, generated: 0, closed: false });
        Ok(match self.agree(core, world, "admission")?.into_iter().find(|(s, _)| *s == slot) {
            Some((_, message)) => Outcome::Failed(message),
            None => Outcome::Begun(resumed),
        })
    }

    fn resume(&mut self, core: &mut Core, world: &World, admission: &Admission) -> Result<usize, RoundError> {
        let slot = admission.slot;
        let done = match &admission.resume {
            Resume::Fresh => return Ok(0),
            Resume::Slot(length) => {
                let found =
                    self.kept[slot].iter().find(|k| k.resumes(&admission.ids) == Some(*length)).cloned();
                match found {
                    Some(kept) => core.restore(&kept.snapshot).unwrap_or_else(|error| {
                        tracing::warn!("{error}: prefilling from the first token");
                        false
                    }),
                    None => false,
                }
            }
            Resume::Store { store, ticket, digest, .. } => {
                let Some(h) = self.hooks.stores.get(*store) else {
                    return Err(RoundError::Forward(format!(
                        "a plan with store {store}, which is not loaded here"
                    )));
                };
                let ran = h.call(Store::digest).and_then(|mine| {
                    if mine != *digest {
                        return Err(h.named(&OpError::fatal(format!(
                            "its index differs between ranks: {mine:016x} here, {digest:016x} on rank 0"
                        ))));
                    }
                    let sequences = SequencesOf::new(core);
                    let lent = plugfold_abi::points::SequencesObject::lend(&sequences);
                    h.call(|s| s.resume(*ticket, slot as u32, &lent))
                });
                if let Err(error) = &ran
                    && error.error.kind == ErrorKind::Fatal
                {
                    return Err(RoundError::Hook(error.clone()));
                }
                ran.unwrap_or_else(|error| {
                    tracing::warn!("{error}: prefilling from the first token");
                    false
                })
            }
        };
        let all = if world.ranks() > 1 { world.agree_all("resume", done)? } else { done };
        if all {
            return Ok(core.slot(slot).len());
        }
        core.begin_with(slot, core.slot(slot).knobs.clone())?;
        Ok(0)
    }

    /// Frees a slot. What the slot keeps stays until another sequence overwrites it.
    fn end(&mut self, core: &Core, slot: usize) {
        let Some(running) = self.running[slot].take() else { return };
        if running.admission.draft
            && let Err(error) = self.drafting.ended(slot)
        {
            // Nobody is left to fail: the slot's next sequence has no part in it.
            tracing::warn!("{error}");
        }
        let event = SequenceEvent::Ended { length: core.slot(slot).len() as u32 };
        self.observe(interest::SEQUENCE, |o| o.sequence(slot as u32, &event));
    }

    fn watched(&self, what: u32) -> bool {
        self.observers.iter().any(|(_, wants)| wants & what != 0)
    }

    /// Tells observers; what they fail with is logged and changes nothing.
    fn observe(&self, what: u32, tell: impl Fn(&ObserverObject) -> Result<(), OpError>) {
        for (h, _) in self.observers.iter().filter(|(_, wants)| wants & what != 0) {
            if let Err(error) = h.call(&tell) {
                tracing::warn!("{error}");
            }
        }
    }

    /// Remembers a hook that failed for a slot, until the ranks agree on it.
    fn note(&mut self, slot: usize, told: Result<(), impl ToString>) {
        if let Err(error) = told {
            self.faults.push(Fault { slot, message: error.to_string(), elsewhere: false });
        }
    }

    fn missed(&mut self, slot: usize, miss: &Miss) {
        self.faults.push(Fault { slot, message: miss.error.to_string(), elsewhere: miss.elsewhere });
    }

    /// Tells drafters of tokens that became part of a sequence. An agreement must follow before the ranks exchange
    /// anything else.
    fn absorbed(
        &mut self,
        core: &mut Core,
        world: &World,
        slot: usize,
        start: usize,
        tokens: &[u32],
        rows: &[f32],
    ) -> Result<(), RoundError> {
        let around = (world, &self.steps, &self.running[..]);
        let missed = self.drafting.absorb(core, around, slot, start, tokens, rows)?;
        for miss in &missed {
            self.missed(slot, miss);
        }
        Ok(())
    }
}

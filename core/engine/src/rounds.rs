//! A round on one rank: the same on every rank, from the plan and what was exchanged alone.

use plugfold_abi::Phase;

use crate::core::{CommitError, Core, Forward, SeqRows, Want};
use crate::drafts::Drafter;
use crate::exchange::{ExchangeError, exchange};
use crate::plan::{Admission, Piece, Plan};
use crate::program::ResolveError;
use crate::ranks::{RankError, World};
use crate::sampling::{accept, candidates_needed, draw};

/// What happened to a slot in a round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Prompt rows were absorbed; so many are in.
    Absorbed(usize),
    /// New tokens. `drafted` of the window's rows were drafts.
    Tokens {
        /// The tokens, in order.
        tokens: Vec<u32>,
        /// Drafts that were verified.
        drafted: usize,
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
    /// A commit failed half way.
    #[error(transparent)]
    Commit(#[from] CommitError),
    /// An exchange inside the forward failed.
    #[error("{0}")]
    Forward(String),
}

/// A running sequence, as every rank knows it.
struct Running {
    admission: Admission,
    /// The last token drawn, not yet run through the model.
    pending: Option<u32>,
    generated: usize,
}

/// All sequences of one rank.
pub struct Rounds {
    running: Vec<Option<Running>>,
    drafter: Option<Box<dyn Drafter>>,
}

/// One sequence's part of a forward that is about to run.
struct Lane {
    slot: usize,
    tokens: Vec<u32>,
    want: Want,
}

impl Rounds {
    /// No sequences yet.
    pub fn new(slots: usize) -> Self {
        Self { running: (0..slots).map(|_| None).collect(), drafter: None }
    }

    /// Sets the drafter, the same on every rank.
    pub fn set_drafter(&mut self, drafter: Option<Box<dyn Drafter>>) {
        self.drafter = drafter;
    }

    /// Runs a plan. Outcomes are in plan order: pieces, then decoding slots.
    ///
    /// # Errors
    /// Only what ends the engine; a failed sequence is an outcome.
    pub fn run(
        &mut self,
        core: &mut Core,
        world: &World,
        plan: Plan,
    ) -> Result<Vec<(usize, Outcome)>, RoundError> {
        for slot in plan.cancels {
            self.end(slot);
        }
        for admission in plan.admissions {
            core.begin(admission.slot);
            let slot = admission.slot;
            self.running[slot] = Some(Running { admission, pending: None, generated: 0 });
        }
        let mut out = Vec::new();
        for piece in plan.pieces {
            out.push((piece.slot, self.prefill(core, world, piece)?));
        }
        let lanes = self.lanes(core, &plan.decode);
        if !lanes.is_empty() {
            self.window(core, world, &lanes, &mut out)?;
        }
        Ok(out)
    }

    fn end(&mut self, slot: usize) {
        self.running[slot] = None;
        if let Some(drafter) = &mut self.drafter {
            drafter.forget(slot, 0);
        }
    }

    fn prefill(&mut self, core: &mut Core, world: &World, piece: Piece) -> Result<Outcome, RoundError> {
        let Some(running) = &self.running[piece.slot] else {
            return Ok(Outcome::Failed("no such sequence".into()));
        };
        let start = core.slot(piece.slot).len();
        let ids = &running.admission.ids;
        let end = (start + piece.tokens).min(ids.len());
        let last = end == ids.len();
        let hidden = core.config().hidden_size;
        let embeds = embeds(&running.admission, start, end, hidden);
        let rows = [SeqRows {
            slot: piece.slot,
            tokens: &ids[start..end],
            want: if last { Want::Last } else { Want::Nothing },
            embeds: &embeds,
        }];
        let candidates = candidates(core, std::iter::once(&running.admission));
        let forward = core.forward(Phase::Prefill, &rows, last.then_some(candidates), false)?;
        let mut found = match settle(core, world, &forward)? {
            Ok(found) => found,
            Err(message) => {
                self.end(piece.slot);
                return Ok(Outcome::Failed(message));
            }
        };
        core.commit(&forward, &[end - start])?;
        if !last {
            return Ok(Outcome::Absorbed(end));
        }
        Ok(self.take(piece.slot, end, &mut found, &[], 1).1)
    }

    /// The windows of the decoding slots: the pending token and its drafts.
    fn lanes(&mut self, core: &Core, slots: &[usize]) -> Vec<Lane> {
        let window = core.capacity().window_rows;
        let mut lanes = Vec::new();
        for &slot in slots {
            let Some(running) = &self.running[slot] else { continue };
            let Some(pending) = running.pending else { continue };
            let mut tokens = vec![pending];
            // Drafts beyond the budget or the slot's end could never be emitted.
            let left = running.admission.max_tokens - running.generated;
            let room = core.capacity().tokens - core.slot(slot).len();
            let budget = (window - 1).min(left.saturating_sub(1)).min(room.saturating_sub(1));
            if let Some(drafter) = self.drafter.as_mut().filter(|_| running.admission.draft && budget > 0) {
                let mut ids = core.slot(slot).ids.clone();
                ids.push(pending);
                let vocab = core.config().vocab_size as u32;
                let drafts = drafter.propose(slot, &ids, budget);
                tokens.extend(drafts.into_iter().take(budget).take_while(|&id| id < vocab));
            }
            lanes.push(Lane { slot, tokens, want: Want::All });
        }
        lanes
    }

    fn window(
        &mut self,
        core: &mut Core,
        world: &World,
        lanes: &[Lane],
        out: &mut Vec<(usize, Outcome)>,
    ) -> Result<(), RoundError> {
        let rows: Vec<SeqRows<'_>> = lanes
            .iter()
            .map(|l| SeqRows { slot: l.slot, tokens: &l.tokens, want: l.want, embeds: &[] })
            .collect();
        let admissions = lanes.iter().filter_map(|l| self.running[l.slot].as_ref()).map(|r| &r.admission);
        let candidates = candidates(core, admissions);
        let forward = core.forward(Phase::Window, &rows, Some(candidates), false)?;
        let mut found = match settle(core, world, &forward)? {
            Ok(found) => found,
            // Nothing was committed: alone, the sequences that are not at fault go on.
            Err(_) if lanes.len() > 1 => {
                return lanes.iter().try_for_each(|l| self.window(core, world, std::slice::from_ref(l), out));
            }
            Err(message) => {
                self.end(lanes[0].slot);
                out.push((lanes[0].slot, Outcome::Failed(message)));
                return Ok(());
            }
        };
        let mut keeps = Vec::with_capacity(lanes.len());
        let mut first = 0;
        for lane in lanes {
            let start = core.slot(lane.slot).len();
            let rows = &mut found[first..first + lane.tokens.len()];
            first += lane.tokens.len();
            let (keep, outcome) = self.take(lane.slot, start + 1, rows, &lane.tokens[1..], lanes.len());
            keeps.push(keep);
            out.push((lane.slot, outcome));
        }
        core.commit(&forward, &keeps)?;
        if let Some(drafter) = &mut self.drafter {
            for lane in lanes {
                drafter.forget(lane.slot, core.slot(lane.slot).len());
            }
        }
        Ok(())
    }

    /// Draws a sequence's tokens from its rows, the first for `position`; says how many rows to keep.
    fn take(
        &mut self,
        slot: usize,
        position: usize,
        rows: &mut [Vec<(f32, u32)>],
        drafts: &[u32],
        shared: usize,
    ) -> (usize, Outcome) {
        let Some(running) = &mut self.running[slot] else {
            return (1, Outcome::Failed("no such sequence".into()));
        };
        let admission = &running.admission;
        let (sampling, seed) = (admission.sampling(), admission.seed);
        let drawn: Option<Vec<u32>> =
            rows.iter_mut().enumerate().map(|(i, row)| draw(row, &sampling, seed, position + i)).collect();
        let Some(drawn) = drawn else {
            self.end(slot);
            let message = format!(
                "no logit of the row before position {position} is a number: look for broken weights"
            );
            return (1, Outcome::Failed(message));
        };
        let keep = accept(&drawn, drafts, &admission.stop_ids);
        let mut tokens = drawn[..keep].to_vec();
        tokens.truncate(admission.max_tokens - running.generated);
        running.generated += tokens.len();
        running.pending = tokens.last().copied();
        let stopped = tokens.last().is_some_and(|t| admission.stop_ids.contains(t));
        let end = if stopped {
            Some(End::Stop)
        } else {
            (running.generated >= admission.max_tokens).then_some(End::Length)
        };
        if end.is_some() {
            self.end(slot);
        }
        (keep, Outcome::Tokens { tokens, drafted: drafts.len(), shared, end })
    }
}

/// Candidates that the most demanding of the sequences needs.
fn candidates<'a>(core: &Core, admissions: impl Iterator<Item = &'a Admission>) -> usize {
    let vocab = core.config().vocab_size;
    let need = admissions.map(|a| candidates_needed(&a.sampling()).unwrap_or(vocab)).max();
    need.unwrap_or(1).min(vocab)
}

/// Per row of a piece, the image row that replaces its embedding.
fn embeds(admission: &Admission, start: usize, end: usize, hidden: usize) -> Vec<Option<&[f32]>> {
    if admission.attachments.is_empty() {
        return Vec::new();
    }
    let row = |position: usize| {
        admission.attachments.iter().find_map(|(at, rows)| {
            let i = position.checked_sub(*at)?;
            rows.get(i * hidden..(i + 1) * hidden)
        })
    };
    (start..end).map(row).collect()
}

/// Exchanges a forward's outcome: each wanted row's candidates, or the message that all ranks end its sequences with.
#[allow(clippy::type_complexity)]
fn settle(
    core: &mut Core,
    world: &World,
    forward: &Forward,
) -> Result<Result<Vec<Vec<(f32, u32)>>, String>, RoundError> {
    if let Some(failure) = forward.failure.as_ref().filter(|f| f.exchange) {
        return Err(RoundError::Forward(failure.to_string()));
    }
    let exchanged = exchange(core, forward)?;
    let Some(&first) = exchanged.failed.first() else { return Ok(Ok(exchanged.rows)) };
    let mine = forward.failure.as_ref().map_or_else(String::new, ToString::to_string);
    if world.ranks() == 1 {
        return Ok(Err(mine));
    }
    let said = world.share("failure of a forward", first, mine.as_bytes())?;
    Ok(Err(format!("rank {first}: {}", String::from_utf8_lossy(&said))))
}

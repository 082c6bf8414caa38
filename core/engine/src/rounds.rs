//! A round on one rank: the same on every rank, from the plan and what was exchanged alone.

use plugfold_abi::Phase;

use crate::core::{CommitError, Core, Forward, SeqRows, Want};
use crate::drafts::Drafter;
use crate::exchange::{ExchangeError, exchange};
use crate::logprobs::{Ask, TokenLogprobs, logprobs};
use crate::plan::{Admission, Piece, Plan};
use crate::program::ResolveError;
use crate::ranks::{RankError, World};
use crate::sampling::{accept, best, candidates_needed, draw};

/// What happened to a slot in a round.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
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
            self.running[slot] = Some(Running { admission, pending: None, generated: 0, closed: false });
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
        if !last {
            core.commit(&forward, &[end - start])?;
            return Ok(Outcome::Absorbed(end));
        }
        let mut taken = vec![self.take(piece.slot, end, &mut found, 0, &[], 1)];
        tell(core, &forward, &mut taken)?;
        core.commit(&forward, &[end - start])?;
        Ok(taken.remove(0).outcome)
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
        let mut taken = Vec::with_capacity(lanes.len());
        let mut first = 0;
        for lane in lanes {
            let start = core.slot(lane.slot).len();
            let (rows, at) = (&mut found[first..first + lane.tokens.len()], first);
            first += lane.tokens.len();
            taken.push(self.take(lane.slot, start + 1, rows, at, &lane.tokens[1..], lanes.len()));
        }
        tell(core, &forward, &mut taken)?;
        let keeps: Vec<usize> = taken.iter().map(|t| t.keep).collect();
        core.commit(&forward, &keeps)?;
        out.extend(lanes.iter().zip(taken).map(|(lane, t)| (lane.slot, t.outcome)));
        if let Some(drafter) = &mut self.drafter {
            for lane in lanes {
                drafter.forget(lane.slot, core.slot(lane.slot).len());
            }
        }
        Ok(())
    }

    /// Draws a sequence's tokens from its rows, the first for `position`. `first` is its first wanted row's place.
    fn take(
        &mut self,
        slot: usize,
        position: usize,
        rows: &mut [Vec<(f32, u32)>],
        first: usize,
        drafts: &[u32],
        shared: usize,
    ) -> Taken {
        let Some(running) = &mut self.running[slot] else {
            return Taken::failed("no such sequence".into());
        };
        let admission = &running.admission;
        // Drawing cuts the rows down to what may be drawn.
        let told: Vec<_> = match admission.logprobs {
            Some(top) => rows.iter().map(|row| best(row, top.max(1) as usize)).collect(),
            None => Vec::new(),
        };
        let Some(drawn) = running.draw(rows, position) else {
            self.end(slot);
            let message = format!(
                "no logit of the row before position {position} is a number: look for broken weights"
            );
            return Taken::failed(message);
        };
        let keep = accept(&drawn, drafts, &admission.stop_ids);
        let mut tokens = drawn[..keep].to_vec();
        tokens.truncate(admission.max_tokens - running.generated);
        running.generated += tokens.len();
        running.pending = tokens.last().copied();
        running.closed |= admission.thinking.is_some_and(|budget| tokens.contains(&budget.close));
        let top = admission.logprobs.unwrap_or(0) as usize;
        let asks = told.into_iter().zip(&tokens).enumerate();
        let asks = asks.map(|(i, (best, token))| Ask { row: first + i, token: *token, best, top }).collect();
        let stopped = tokens.last().is_some_and(|t| admission.stop_ids.contains(t));
        let end = if stopped {
            Some(End::Stop)
        } else {
            (running.generated >= admission.max_tokens).then_some(End::Length)
        };
        if end.is_some() {
            self.end(slot);
        }
        let outcome = Outcome::Tokens { tokens, logprobs: Vec::new(), drafted: drafts.len(), shared, end };
        Taken { keep, outcome, asks }
    }
}

/// What a sequence takes from a forward.
struct Taken {
    /// Rows to keep.
    keep: usize,
    outcome: Outcome,
    /// Rows whose log probabilities are wanted, one a token.
    asks: Vec<Ask>,
}

impl Taken {
    fn failed(message: String) -> Self {
        Self { keep: 1, outcome: Outcome::Failed(message), asks: Vec::new() }
    }
}

/// Adds the log probabilities that are asked for, while the forward's logits are there.
fn tell(core: &mut Core, forward: &Forward, taken: &mut [Taken]) -> Result<(), ExchangeError> {
    let asks: Vec<Ask> = taken.iter().flat_map(|t| t.asks.iter().cloned()).collect();
    let mut told = logprobs(core, forward, &asks)?.into_iter();
    for t in taken {
        if let Outcome::Tokens { logprobs, .. } = &mut t.outcome {
            logprobs.extend(told.by_ref().take(t.asks.len()));
        }
    }
    Ok(())
}

/// Candidates that the most demanding of the sequences needs.
fn candidates<'a>(core: &Core, admissions: impl Iterator<Item = &'a Admission>) -> usize {
    let vocab = core.config().vocab_size;
    let need = |a: &Admission| {
        let drawn = candidates_needed(&a.sampling()).unwrap_or(vocab);
        drawn.max(a.logprobs.unwrap_or(0) as usize)
    };
    let need = admissions.map(need).max();
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

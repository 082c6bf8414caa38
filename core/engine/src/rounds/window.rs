//! One window over all decoding sequences: drafts, the forward, draws, acceptance, commit.

use plugfold_abi::points::{NO_DRAFTER, Observed, Observer, Rider, SaveKind, SequenceEvent, interest};
use plugfold_abi::{Phase, Slice, SliceMut};
use smallvec::SmallVec;

use super::drafting::{Candidate, Drafts};
use super::steps::Drawn;
use super::{End, FEW, Outcome, RoundError, Rounds};
use crate::core::{CommitError, Core, Forward, SeqRows, Want};
use crate::exchange::{ExchangeError, Exchanged, exchange};
use crate::logprobs::{Ask, logprobs};
use crate::plan::Admission;
use crate::ranks::World;
use crate::sampling::{accept, best, candidates_needed};

/// One sequence's part of a forward that is about to run.
struct Lane {
    slot: usize,
    tokens: SmallVec<[u32; 16]>,
    drafter: Option<usize>,
}

/// The lanes of a round; few enough not to need memory of their own.
type Lanes = SmallVec<[Lane; FEW]>;

/// The windows as all ranks must have them.
fn drawn(lanes: &[Lane]) -> SmallVec<[Drawn; FEW]> {
    let hash = |tokens: &[u32]| {
        let mixed = |h: u64, t: &u32| (h ^ u64::from(*t)).wrapping_mul(0x0000_0100_0000_01b3);
        tokens.iter().fold(0xcbf2_9ce4_8422_2325, mixed)
    };
    lanes.iter().map(|l| Drawn { slot: l.slot, drafter: l.drafter, tokens: hash(&l.tokens) }).collect()
}

/// What a sequence takes from a forward.
pub(super) struct Taken {
    /// Rows to keep.
    keep: usize,
    pub(super) outcome: Outcome,
    /// Rows whose log probabilities are wanted, one a token.
    asks: Vec<Ask>,
}

impl Taken {
    fn failed(message: String) -> Self {
        Self { keep: 1, outcome: Outcome::Failed(message), asks: Vec::new() }
    }
    /// Whether the sequence is over.
    pub(super) fn ends(&self) -> bool {
        matches!(self.outcome, Outcome::Failed(_) | Outcome::Tokens { end: Some(_), .. })
    }
}

impl Rounds {
    /// Runs the decoding slots; gives rows and sequences of the windows.
    pub(super) fn decode(
        &mut self,
        core: &mut Core,
        world: &World,
        slots: &[usize],
        out: &mut Vec<(usize, Outcome)>,
    ) -> Result<(usize, usize), RoundError> {
        let mut lanes = self.lanes(core, world, slots)?;
        if lanes.is_empty() {
            return Ok((0, 0));
        }
        let mut failed = self.failures(world, "drafts", &drawn(&lanes))?;
        if failed.len() > 1 {
            // One call drafts for many: alone, the sequences that are not at fault go on.
            failed = self.draft_alone(core, world, &mut lanes, failed)?;
        }
        self.fail(core, &failed);
        lanes.retain(|l| failed.iter().all(|(slot, _)| *slot != l.slot));
        out.extend(failed.into_iter().map(|(slot, message)| (slot, Outcome::Failed(message))));
        let counts = (lanes.iter().map(|l| l.tokens.len()).sum(), lanes.len());
        // Sequences whose knobs may not meet never share a call.
        let hooks = self.hooks.clone();
        while !lanes.is_empty() {
            let first = self.knobs_of(lanes[0].slot);
            let (group, rest): (Lanes, Lanes) =
                lanes.into_iter().partition(|l| hooks.knobs.meet(&first, &self.knobs_of(l.slot)));
            self.window(core, world, &group, out)?;
            lanes = rest;
        }
        Ok(counts)
    }

    /// Drafts once more for each of the sequences that failed together; gives those that fail alone.
    fn draft_alone(
        &mut self,
        core: &mut Core,
        world: &World,
        lanes: &mut [Lane],
        failed: Vec<(usize, String)>,
    ) -> Result<Vec<(usize, String)>, RoundError> {
        let mut at_fault = Vec::new();
        for (slot, _) in failed {
            let again = self.lanes(core, world, &[slot])?;
            let found = self.failures(world, "drafts of one", &drawn(&again))?;
            at_fault.extend(found);
            for (lane, again) in lanes.iter_mut().filter(|l| l.slot == slot).zip(again) {
                *lane = again;
            }
        }
        Ok(at_fault)
    }

    fn knobs_of(&self, slot: usize) -> crate::knobs::Values {
        self.running[slot].as_ref().map_or_else(|| self.hooks.knobs.defaults.clone(), |r| r.knobs.clone())
    }

    /// The windows of the decoding slots: the pending token and its drafts.
    fn lanes(&mut self, core: &mut Core, world: &World, slots: &[usize]) -> Result<Lanes, RoundError> {
        let window = core.capacity().window_rows;
        let idle = self.drafting.is_idle();
        let mut lanes = Lanes::new();
        let mut asking: SmallVec<[Candidate<'_>; FEW]> = SmallVec::new();
        for &slot in slots.iter().filter(|_| !idle) {
            let pending = self.running[slot].as_ref().and_then(|r| r.pending);
            let (text, ids) = (&mut self.texts[slot], &core.slot(slot).ids);
            // A sequence only grows, so what was its text before is the beginning of what it is now.
            text.truncate(ids.len());
            text.extend_from_slice(&ids[text.len()..]);
            text.extend(pending);
        }
        for &slot in slots {
            let Some(running) = &self.running[slot] else { continue };
            let Some(pending) = running.pending else { continue };
            lanes.push(Lane { slot, tokens: SmallVec::from_slice(&[pending]), drafter: None });
            // Drafts beyond the budget or the slot's end could never be emitted.
            let left = running.admission.max_tokens - running.generated;
            let length = core.slot(slot).len();
            let room = (window - 1).min(left.saturating_sub(1));
            let room = room.min((core.capacity().tokens - length).saturating_sub(1));
            if !idle && running.admission.draft {
                asking.push(Candidate {
                    slot,
                    length,
                    room,
                    pending,
                    draw: running.admission.how(),
                    policy: &running.admission.policy,
                    knobs: &running.knobs,
                    ids: &self.texts[slot],
                    stop_ids: &running.admission.stop_ids,
                });
            }
        }
        let around = (world, &self.steps, &self.running[..]);
        let proposed = self.drafting.propose(core, around, &asking, lanes.len())?;
        let slots: SmallVec<[usize; FEW]> = asking.iter().map(|c| c.slot).collect();
        drop(asking);
        for (slot, drafts) in slots.into_iter().zip(proposed) {
            match drafts {
                Ok(Drafts { tokens, drafter }) => {
                    if let Some(lane) = lanes.iter_mut().find(|l| l.slot == slot) {
                        lane.tokens.extend(tokens);
                        lane.drafter = drafter;
                    }
                }
                Err(miss) => self.missed(slot, &miss),
            }
        }
        Ok(lanes)
    }

    fn window(
        &mut self,
        core: &mut Core,
        world: &World,
        lanes: &[Lane],
        out: &mut Vec<(usize, Outcome)>,
    ) -> Result<(), RoundError> {
        let row = |l| -> SeqRows<'_> {
            let Lane { slot, tokens, .. }: &Lane = l;
            SeqRows { slot: *slot, tokens, want: Want::All, embeds: &[] }
        };
        let rows: SmallVec<[SeqRows<'_>; FEW]> = lanes.iter().map(row).collect();
        let admissions = lanes.iter().filter_map(|l| self.running[l.slot].as_ref()).map(|r| &r.admission);
        let candidates = candidates(core, admissions);
        let forward = core.forward(Phase::Window, &rows, Some(candidates), false)?;
        self.riders_out()?;
        let mut found = match settle(core, world, &forward, &self.words)? {
            Ok(exchanged) => {
                self.riders_in(&exchanged.riders, world.ranks())?;
                exchanged.rows
            }
            // Nothing was committed: alone, the sequences that are not at fault go on.
            Err(_) if lanes.len() > 1 => {
                return lanes.iter().try_for_each(|l| self.window(core, world, std::slice::from_ref(l), out));
            }
            Err(message) => {
                self.end(core, lanes[0].slot);
                out.push((lanes[0].slot, Outcome::Failed(message)));
                return Ok(());
            }
        };
        let starts: SmallVec<[usize; FEW]> = lanes.iter().map(|l| core.slot(l.slot).len()).collect();
        let drafting = |l: &Lane| self.running[l.slot].as_ref().is_some_and(|r| r.admission.draft);
        let drafts: SmallVec<[bool; FEW]> = lanes.iter().map(drafting).collect();
        let mut taken: SmallVec<[Taken; FEW]> = SmallVec::new();
        let mut first = 0;
        for (lane, start) in lanes.iter().zip(&starts) {
            let (rows, at) = (&mut found[first..first + lane.tokens.len()], first);
            first += lane.tokens.len();
            let mut took = self.take(core, lane.slot, start + 1, rows, at, &lane.tokens[1..], lanes.len());
            if let Outcome::Tokens { drafter, .. } = &mut took.outcome {
                *drafter = lane.drafter;
            }
            taken.push(took);
        }
        tell(core, &forward, &mut taken)?;
        let hidden = self.hidden(core, &forward, drafts.contains(&true));
        let keeps: SmallVec<[usize; FEW]> = taken.iter().map(|t| t.keep).collect();
        let kept = core.commit(&forward, &keeps);
        core.recycle(forward);
        match kept {
            // The other ranks may have kept theirs. Windows are cut only where drafters are, so all agree below, on every rank
            // before anything else is exchanged: the sequences of this commit end alike.
            Err(CommitError::Run(failure)) if !failure.exchange => {
                for lane in lanes {
                    self.note(lane.slot, Err::<(), _>(&failure));
                }
            }
            other => other?,
        }
        self.committed(core, world, lanes, &starts, &keeps, &drafts, &hidden)?;
        // Before anything else is exchanged: a rank whose drafter failed waits here for the others.
        let failed = self.agree(core, world, "a window")?;
        for (lane, t) in lanes.iter().zip(&taken) {
            if t.ends() {
                if matches!(t.outcome, Outcome::Tokens { .. }) {
                    self.keep(core, world, lane.slot, SaveKind::Reply)?;
                }
                self.end(core, lane.slot);
            }
        }
        out.extend(lanes.iter().zip(taken).map(|(lane, t)| (lane.slot, t.outcome)));
        out.extend(failed.into_iter().map(|(slot, message)| (slot, Outcome::Failed(message))));
        Ok(())
    }

    /// Tells drafters, policies and observers what a window kept.
    fn committed(
        &mut self,
        core: &mut Core,
        world: &World,
        lanes: &[Lane],
        starts: &[usize],
        keeps: &[usize],
        drafts: &[bool],
        hidden: &[f32],
    ) -> Result<(), RoundError> {
        let width = core.config().hidden_size;
        let mut first = 0;
        for (i, lane) in lanes.iter().enumerate() {
            let tokens = &lane.tokens[..keeps[i]];
            let rows = hidden.get(first * width..(first + keeps[i]) * width).unwrap_or(&[]);
            first += lane.tokens.len();
            if drafts[i] && !self.drafting.is_idle() {
                self.absorbed(core, world, lane.slot, starts[i], tokens, rows)?;
                let told = self.drafting.observe(&Observed {
                    slot: lane.slot as u32,
                    drafter: lane.drafter.map_or(NO_DRAFTER, |d| d as u32),
                    drafted: lane.tokens.len() as u32 - 1,
                    kept: keeps[i] as u32 - 1,
                    shared: lanes.len() as u32,
                });
                self.note(lane.slot, told);
            }
            let event = SequenceEvent::Committed { start: starts[i] as u32, tokens: Slice::from(tokens) };
            self.observe(interest::SEQUENCE, |o| o.sequence(lane.slot as u32, &event));
        }
        Ok(())
    }

    /// Fills in this rank's words.
    fn riders_out(&mut self) -> Result<(), RoundError> {
        self.words.clear();
        for h in &self.hooks.riders {
            let at = self.words.len();
            self.words.resize(at + h.call(Rider::words)? as usize, 0);
            h.call(|r| r.write(SliceMut::from(&mut self.words[at..])))?;
        }
        Ok(())
    }

    /// Tells riders all ranks' words; one rank's are its own.
    fn riders_in(&self, all: &[u32], ranks: usize) -> Result<(), RoundError> {
        let all = if ranks == 1 { &self.words } else { all };
        let each = all.len() / ranks.max(1);
        let mut at = 0;
        for h in &self.hooks.riders {
            let n = h.call(Rider::words)? as usize;
            if ranks == 1 {
                h.call(|r| r.read(Slice::from(&all[at..at + n])))?;
            } else {
                let words =
                    all.chunks(each.max(1)).take(ranks).flat_map(|rank| rank[at..at + n].iter().copied());
                let mine: SmallVec<[u32; 32]> = words.collect();
                h.call(|r| r.read(Slice::from(&mine[..])))?;
            }
            at += n;
        }
        Ok(())
    }

    /// Draws a sequence's tokens from its rows, the first for `position`. `first` is its first wanted row's place.
    pub(super) fn take(
        &mut self,
        core: &Core,
        slot: usize,
        position: usize,
        rows: &mut [Vec<(f32, u32)>],
        first: usize,
        drafts: &[u32],
        shared: usize,
    ) -> Taken {
        debug_assert!(slot < core.capacity().slots, "a slot of this core");
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
        let (logprobs, drafted) = (Vec::new(), drafts.len());
        let outcome = Outcome::Tokens { tokens, logprobs, drafted, drafter: None, shared, end };
        Taken { keep, outcome, asks }
    }
}

/// Adds the log probabilities that are asked for, while the forward's logits are there.
pub(super) fn tell(core: &mut Core, forward: &Forward, taken: &mut [Taken]) -> Result<(), ExchangeError> {
    if taken.iter().all(|t| t.asks.is_empty()) {
        return Ok(());
    }
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
pub(super) fn candidates<'a>(core: &Core, admissions: impl Iterator<Item = &'a Admission>) -> usize {
    let vocab = core.config().vocab_size;
    let need = |a: &Admission| {
        let drawn = candidates_needed(&a.sampling()).unwrap_or(vocab);
        drawn.max(a.logprobs.unwrap_or(0) as usize)
    };
    let need = admissions.map(need).max();
    need.unwrap_or(1).min(vocab)
}

/// Exchanges a forward's outcome: what all ranks know, or the message that all ranks end its sequences with.
pub(super) fn settle(
    core: &mut Core,
    world: &World,
    forward: &Forward,
    riders: &[u32],
) -> Result<Result<Exchanged, String>, RoundError> {
    if let Some(failure) = forward.failure.as_ref().filter(|f| f.exchange) {
        return Err(RoundError::Forward(failure.to_string()));
    }
    let exchanged = exchange(core, forward, riders)?;
    let Some(&first) = exchanged.failed.first() else { return Ok(Ok(exchanged)) };
    let mine = forward.failure.as_ref().map_or_else(String::new, ToString::to_string);
    if world.ranks() == 1 {
        return Ok(Err(mine));
    }
    let said = world.share("failure of a forward", first, mine.as_bytes())?;
    Ok(Err(format!("rank {first}: {}", String::from_utf8_lossy(&said))))
}

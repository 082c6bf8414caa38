//! The course of a round: its parts, as the round driver in force takes them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use plugfold_abi::OpError;
use plugfold_abi::points::{
    Observer, RoundDriver, RoundDriverObject, RoundFacts, RoundParts, RoundPartsObject, interest,
};

use super::{Outcome, Report, RoundError, Rounds};
use crate::core::Core;
use crate::hooks::{Calls, Hooked};
use crate::plan::{Admission, Piece, Plan};
use crate::ranks::World;

/// A round, as far as it has run.
pub(super) struct Course {
    round: u64,
    cancels: Vec<usize>,
    admissions: Vec<Admission>,
    pieces: Vec<Piece>,
    decode: Vec<usize>,
    /// Windows that ran.
    windows: usize,
    rows: usize,
    window_rows: usize,
    decoded: usize,
    out: Report,
}

impl Course {
    pub(super) fn of(plan: Plan) -> Self {
        Self {
            round: plan.round,
            cancels: plan.cancels,
            admissions: plan.admissions,
            pieces: plan.pieces,
            decode: plan.decode,
            windows: 0,
            rows: 0,
            window_rows: 0,
            decoded: 0,
            out: Report::default(),
        }
    }

    fn facts(&self) -> RoundFacts {
        RoundFacts {
            round: self.round,
            admissions: self.admissions.len() as u32,
            pieces: self.pieces.len() as u32,
            decoding: self.decode.len() as u32,
        }
    }

    fn admit(&mut self, rounds: &mut Rounds, core: &mut Core, world: &World) -> Result<(), RoundError> {
        for slot in std::mem::take(&mut self.cancels) {
            rounds.end(core, slot);
        }
        for admission in std::mem::take(&mut self.admissions) {
            let slot = admission.slot;
            let outcome = rounds.admit(core, world, admission)?;
            self.out.outcomes.push((slot, outcome));
        }
        Ok(())
    }

    fn prefill(&mut self, rounds: &mut Rounds, core: &mut Core, world: &World) -> Result<(), RoundError> {
        self.admit(rounds, core, world)?;
        if self.pieces.is_empty() {
            return Ok(());
        }
        let started = Instant::now();
        for piece in std::mem::take(&mut self.pieces) {
            let before = core.slot(piece.slot).len();
            let outcome = rounds.prefill(core, world, piece)?;
            self.rows += core.slot(piece.slot).len().saturating_sub(before);
            self.out.outcomes.push((piece.slot, outcome));
        }
        self.out.piece_s = if self.rows > 0 { started.elapsed().as_secs_f64() } else { 0.0 };
        Ok(())
    }

    /// Gives how many sequences are left.
    fn window(&mut self, rounds: &mut Rounds, core: &mut Core, world: &World) -> Result<usize, RoundError> {
        self.prefill(rounds, core, world)?;
        self.windows += 1;
        let started = Instant::now();
        let (rows, decoded) = rounds.decode(core, world, &self.decode, &mut self.out.outcomes)?;
        if decoded > 0 {
            self.out.decode_s += started.elapsed().as_secs_f64();
        }
        self.window_rows += rows;
        self.decoded = self.decoded.max(decoded);
        Ok(self.decode.iter().filter(|slot| rounds.running[**slot].is_some()).count())
    }

    /// Takes the parts that are left, and tells of the round.
    pub(super) fn finish(
        mut self,
        rounds: &mut Rounds,
        core: &mut Core,
        world: &World,
    ) -> Result<Report, RoundError> {
        if self.windows == 0 {
            self.window(rounds, core, world)?;
        }
        if rounds.watched(interest::ROUND) {
            let done = plugfold_abi::points::RoundDone {
                round: self.round,
                prefill_rows: self.rows as u32,
                decoded: self.decoded as u32,
                window_rows: self.window_rows as u32,
                kept: kept_tokens(&self.out.outcomes),
            };
            rounds.observe(interest::ROUND, |o| o.round(&done));
        }
        Ok(self.out)
    }

    /// Lets a driver take parts.
    pub(super) fn drive(
        &mut self,
        driver: &Hooked<RoundDriverObject>,
        rounds: &mut Rounds,
        core: &mut Core,
        world: &World,
    ) -> Result<(), RoundError> {
        let facts = self.facts();
        let turn = Mutex::new(Turn { course: self, rounds, core, world, error: None });
        let parts = Parts { turn, calls: &driver.calls };
        let ran = driver.call(|d| d.round(&facts, &RoundPartsObject::lend(&parts)));
        let turn = parts.turn.into_inner().unwrap_or_else(PoisonError::into_inner);
        match turn.error {
            Some(error) => Err(error),
            None => Ok(ran?),
        }
    }
}

struct Turn<'a> {
    course: &'a mut Course,
    rounds: &'a mut Rounds,
    core: &'a mut Core,
    world: &'a World,
    /// What ended the engine inside of a part.
    error: Option<RoundError>,
}

/// What a driver takes the parts of.
struct Parts<'a> {
    turn: Mutex<Turn<'a>>,
    /// The driver's: while a part runs, it is not the one that hangs.
    calls: &'a Calls,
}

impl<'a> Parts<'a> {
    fn take<T>(
        &self,
        part: impl FnOnce(&mut Course, &mut Rounds, &mut Core, &World) -> Result<T, RoundError>,
    ) -> Result<T, OpError> {
        let busy = || OpError::new("a part of a round was asked for while one runs");
        let mut turn: MutexGuard<'_, Turn<'a>> = self.turn.try_lock().map_err(|_| busy())?;
        if turn.error.is_some() {
            return Err(OpError::fatal("a part of this round has ended the engine"));
        }
        let Turn { course, rounds, core, world, error } = &mut *turn;
        self.calls.sleep(|| part(course, rounds, core, world)).map_err(|e| {
            let told = OpError::fatal(e.to_string());
            *error = Some(e);
            told
        })
    }
}

impl RoundParts for Parts<'_> {
    fn admit(&self) -> Result<(), OpError> {
        self.take(Course::admit)
    }
    fn prefill(&self) -> Result<(), OpError> {
        self.take(Course::prefill)
    }
    fn window(&self) -> Result<u32, OpError> {
        self.take(Course::window).map(|left| left as u32)
    }
}

fn kept_tokens(outcomes: &[(usize, Outcome)]) -> u32 {
    let of = |o: &Outcome| if let Outcome::Tokens { tokens, .. } = o { tokens.len() } else { 0 };
    outcomes.iter().map(|(_, o)| of(o) as u32).sum()
}

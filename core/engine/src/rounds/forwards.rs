//! Forwards that drafters may run.

use std::sync::{Mutex, PoisonError};

use plugfold_abi::points::{Forwards, HeadOut, HeadRows};
use plugfold_abi::{List, OpError, Slice};

use super::steps::Pace;
use crate::core::{Core, MtpRows, Want};
use crate::exchange::exchange;
use crate::sampling::sort_candidates;

fn mtp<'a>(r: &HeadRows<'a>) -> MtpRows<'a> {
    MtpRows {
        slot: r.slot as usize,
        start: r.start as usize,
        next_ids: r.next_ids.get_ref(),
        hidden: r.hidden.get_ref(),
        want: if r.pick { Want::Last } else { Want::Nothing },
    }
}

/// Candidates over which the probability of a pick is taken.
const CANDIDATES: usize = 64;

/// What decides which collectives a call runs.
fn hash(rows: &[HeadRows<'_>]) -> u64 {
    let words = rows.iter().flat_map(|r| {
        let head = [r.slot, r.start, r.next_ids.len() as u32, u32::from(r.pick)];
        head.into_iter().chain(r.next_ids.get_ref().iter().copied())
    });
    words.fold(0xcbf2_9ce4_8422_2325, |h, w| (h ^ u64::from(w)).wrapping_mul(0x0000_0100_0000_01b3))
}

/// A core, for the time of a drafter's call.
pub(super) struct ForwardsOf<'a> {
    core: Mutex<&'a mut Core>,
    pace: &'a Pace<'a>,
    /// Whether the drafter said that it uses the layer: the ranks meet only for those.
    allowed: bool,
}

impl<'a> ForwardsOf<'a> {
    pub(super) fn new(core: &'a mut Core, pace: &'a Pace<'a>, allowed: bool) -> Self {
        Self { core: Mutex::new(core), pace, allowed }
    }
}

impl Forwards for ForwardsOf<'_> {
    fn hidden_size(&self) -> Result<u32, OpError> {
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(core.config().hidden_size as u32)
    }

    fn head(&self, rows: Slice<'_, HeadRows<'_>>) -> Result<List<HeadOut>, OpError> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        let (width, capacity) = (core.config().hidden_size, core.capacity());
        for r in rows.iter() {
            let end = r.start as usize + r.next_ids.len();
            let fits = r.hidden.len() == r.next_ids.len() * width
                && end <= capacity.tokens
                && (r.slot as usize) < capacity.slots
                && !r.next_ids.is_empty();
            if !fits {
                return Err(OpError::new(format!(
                    "draft rows {} to {end} of slot {}: {} hidden numbers for {} rows of {width}; slots {}, context {}",
                    r.start,
                    r.slot,
                    r.hidden.len(),
                    r.next_ids.len(),
                    capacity.slots,
                    capacity.tokens
                )));
            }
        }
        if !core.has_mtp() {
            return Err(OpError::new("the checkpoint has no multi-token-prediction layer"));
        }
        if !self.allowed {
            return Err(OpError::new(
                "a drafter that uses the multi-token-prediction layer has to want `mtp_layer`",
            ));
        }
        self.pace.enter(hash(&rows))?;
        let list: Vec<MtpRows<'_>> = rows.get_ref().iter().map(mtp).collect();
        let picks = rows.iter().filter(|r| r.pick).count();
        let wanted = (picks > 0).then_some(CANDIDATES.min(core.config().vocab_size));
        let failed = |e: &dyn std::fmt::Display| OpError::new(e.to_string());
        let forward = core.mtp(&list, true, wanted).map_err(|e| failed(&e))?;
        if let Some(failure) = forward.failure.as_ref().filter(|f| f.exchange) {
            return Err(OpError::fatal(failure.to_string()));
        }
        let exchanged = exchange(&mut core, &forward, &[]).map_err(|e| OpError::fatal(e.to_string()))?;
        if let Some(rank) = exchanged.failed.first() {
            let Some(mine) = &forward.failure else {
                self.pace.failed_elsewhere();
                return Err(OpError::new(format!("the draft layer failed on rank {rank}")));
            };
            return Err(OpError::new(format!("the draft layer failed: {mine}")));
        }
        let hidden = core.output(&forward, "rows").unwrap_or(&[]);
        let (mut out, mut first, mut found) = (List::with_capacity(picks), 0, exchanged.rows.into_iter());
        for r in rows.iter() {
            first += r.next_ids.len();
            if !r.pick {
                continue;
            }
            let mut candidates = found.next().unwrap_or_default();
            candidates.retain(|c| !c.0.is_nan());
            sort_candidates(&mut candidates);
            let best = candidates.first().copied().unwrap_or((0.0, 0));
            let mass: f64 = candidates.iter().map(|c| (f64::from(c.0) - f64::from(best.0)).exp()).sum();
            let row = hidden.get((first - 1) * width..first * width).unwrap_or(&[]);
            out.push(HeadOut {
                token: best.1,
                probability: (1.0 / mass.max(1.0)) as f32,
                hidden: row.to_vec().into(),
            });
        }
        Ok(out)
    }
}

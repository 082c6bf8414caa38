//! Forwards that drafters may run.

use std::sync::{Mutex, PoisonError};

use plugfold_abi::points::{Draw, Forwards, HeadOut, HeadRows};
use plugfold_abi::{List, OpError, Slice};

use super::Running;
use super::prefill::embeds;
use super::steps::Pace;
use crate::core::{Core, MtpRows, Want};
use crate::exchange::exchange;
use crate::hooks::Calls;
use crate::program::Read;
use crate::sampling::draw;
use crate::service::Sampling;

/// Candidates from which a pick is drawn: fewer than a draw of the model's may need, but drafts only propose.
const CANDIDATES: usize = 64;

/// Draws from candidates as the engine draws at this position: the token and its probability among those that stay.
fn pick(mut candidates: Vec<(f32, u32)>, how: &Draw, position: usize) -> (u32, f32) {
    let Draw { temperature, top_k, top_p, min_p, seed } = *how;
    let sampling = Sampling { temperature, top_k, top_p, min_p, seed: None };
    let Some(token) = draw(&mut candidates, &sampling, seed, position) else { return (0, 0.0) };
    // The logits themselves where the most likely token is taken.
    let divisor = if temperature > 0.0 { temperature } else { 1.0 };
    let best = f64::from(candidates.first().map_or(0.0, |c| c.0));
    let weight = |value: f32| ((f64::from(value) - best) / divisor).exp();
    let mass: f64 = candidates.iter().map(|c| weight(c.0)).sum();
    let own = candidates.iter().find(|c| c.1 == token).map_or(0.0, |c| weight(c.0));
    (token, (own / mass.max(f64::MIN_POSITIVE)) as f32)
}

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
    /// The sequences, whose images stand in for embeddings.
    running: &'a [Option<Running>],
    /// The drafter's: while a forward runs, it is not the one that hangs.
    calls: &'a Calls,
}

impl<'a> ForwardsOf<'a> {
    pub(super) fn new(
        core: &'a mut Core,
        pace: &'a Pace<'a>,
        allowed: bool,
        running: &'a [Option<Running>],
        calls: &'a Calls,
    ) -> Self {
        Self { core: Mutex::new(core), pace, allowed, running, calls }
    }

    /// Per row, what stands in for the embedding of the token that follows it.
    fn embeds(&self, r: &HeadRows<'_>, hidden: usize) -> Vec<Option<&'a [f32]>> {
        let running = self.running.get(r.slot as usize).and_then(Option::as_ref);
        let position = r.position as usize;
        running.map_or_else(Vec::new, |run| {
            embeds(&run.admission, position, position + r.next_ids.len(), hidden)
        })
    }
}

impl Forwards for ForwardsOf<'_> {
    fn hidden_size(&self) -> Result<u32, OpError> {
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(core.config().hidden_size as u32)
    }

    fn head(&self, rows: Slice<'_, HeadRows<'_>>) -> Result<List<HeadOut>, OpError> {
        self.calls.sleep(|| self.run_head(&rows))
    }
}

impl ForwardsOf<'_> {
    fn run_head(&self, rows: &[HeadRows<'_>]) -> Result<List<HeadOut>, OpError> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        let (width, capacity) = (core.config().hidden_size, core.capacity());
        for r in rows {
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
        self.pace.enter(hash(rows))?;
        let replaced: Vec<_> = rows.iter().map(|r| self.embeds(r, width)).collect();
        let list: Vec<MtpRows<'_>> = rows
            .iter()
            .zip(&replaced)
            .map(|(r, embeds)| MtpRows {
                slot: r.slot as usize,
                start: r.start as usize,
                next_ids: r.next_ids.get_ref(),
                hidden: r.hidden.get_ref(),
                want: if r.pick { Want::Last } else { Want::Nothing },
                embeds,
            })
            .collect();
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
        let hidden = core.read(&forward, Read::Rows).unwrap_or(&[]);
        let (mut out, mut first, mut found) = (List::with_capacity(picks), 0, exchanged.rows.into_iter());
        for r in rows {
            first += r.next_ids.len();
            if !r.pick {
                continue;
            }
            let position = r.position as usize + r.next_ids.len();
            let (token, probability) = pick(found.next().unwrap_or_default(), &r.draw, position);
            let row = hidden.get((first - 1) * width..first * width).unwrap_or(&[]);
            out.push(HeadOut { token, probability, hidden: row.to_vec().into() });
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Vec<(f32, u32)> {
        vec![(0.0, 3), (2.0, 7), (1.0, 5), (f32::NAN, 1)]
    }

    #[test]
    fn a_pick_is_the_most_likely_token_or_the_engines_own_draw() {
        let total = 1.0 + (-1.0f64).exp() + (-2.0f64).exp();
        let (token, p) = pick(row(), &Draw::BEST, 9);
        assert!(token == 7 && (f64::from(p) - 1.0 / total).abs() < 1e-6, "{token}: {p}");
        assert_eq!(pick(Vec::new(), &Draw::BEST, 9), (0, 0.0));
        let hot = Draw { temperature: 2.0, top_k: 2, top_p: 1.0, min_p: 0.0, seed: 4 };
        let sampling = Sampling { temperature: 2.0, top_k: 2, top_p: 1.0, min_p: 0.0, seed: None };
        let mut seen = std::collections::BTreeSet::new();
        for position in 0..200 {
            let (token, p) = pick(row(), &hot, position);
            assert_eq!(
                draw(&mut row(), &sampling, 4, position),
                Some(token),
                "the very token that the model would draw"
            );
            let weight = if token == 7 { 1.0 } else { (-0.5f64).exp() };
            assert!((f64::from(p) - weight / (1.0 + (-0.5f64).exp())).abs() < 1e-6);
            seen.insert(token);
        }
        assert_eq!(seen, [5, 7].into());
    }
}

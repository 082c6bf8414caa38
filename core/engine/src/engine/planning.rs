//! Planning on rank 0: the bare policy (first come, first served; one prompt piece a round; what decodes, decodes), as the
//! planners change it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use plugfold_abi::points::{
    Mark, Observer, PieceChoice, PlanFacts, Planner, RequestFacts, Section, SlotFacts, Store, StoreOffer,
    Verdict, interest,
};
use plugfold_abi::{List, OpError, Slice};
use smallvec::SmallVec;

use super::{Active, Job, Loop};
use crate::hooks::{HookError, Hooks};
use crate::memory::free_bytes;
use crate::plan::{Admission, PROMPT, Piece, Plan, Resume};
use crate::sampling::derived_seed;
use crate::service::{EngineError, Event, Finish, RequestStats};

/// Index of what slots keep, among stores: before all plugins'.
const OWN: u32 = u32::MAX;

/// A request as planners see it.
fn request_facts(job: &Job) -> RequestFacts<'_> {
    let r = &job.request;
    RequestFacts {
        request: job.number,
        ids: Slice::from(&r.ids[..]),
        max_tokens: r.max_tokens as u32,
        background: r.background,
        draft: r.draft,
        draft_layer: job.draft_layer,
        waited_s: job.submitted.elapsed().as_secs_f64(),
        knobs: Slice::from(&job.knobs[..]),
        tag: job.tag.map_or(0, |t| t.id),
        grid: job.tag.map_or(1, |t| t.grid),
    }
}

/// Where the prefill leaves snapshots: inside the part that is computed, on the grid of its states. And whether one before its
/// end stands for the prompt.
fn marks(hooks: &Hooks, job: &Job, resumed: u32) -> (Vec<usize>, Vec<String>, bool) {
    let mut marks: List<Mark> = List::new();
    let request = request_facts(job);
    for h in &hooks.planners {
        if let Err(error) = h.call(|p| p.marks(&request, resumed, &mut marks)) {
            tracing::warn!("{error}: no marks");
        }
    }
    let inside =
        |m: &u32| *m > resumed && (*m as usize) < job.request.ids.len() && m.is_multiple_of(request.grid);
    // Of two at one position the first in list order says why.
    let mut at: Vec<&Mark> = marks.iter().filter(|m| inside(&m.at)).collect();
    at.sort_by_key(|m| m.at);
    at.dedup_by_key(|m| m.at);
    let early = marks.iter().any(|m| m.reason == PROMPT && (m.at as usize) < job.request.ids.len());
    let (at, reasons) = at.into_iter().map(|m| (m.at as usize, m.reason.to_string())).unzip();
    (at, reasons, early)
}

impl Loop {
    fn slot_facts(&self) -> SmallVec<[SlotFacts; 8]> {
        let facts = |(slot, active): (usize, &Option<Active>)| SlotFacts {
            slot: slot as u32,
            request: active.as_ref().map_or(0, |a| a.job.number),
            prompt: active.as_ref().map_or(0, |a| a.job.request.ids.len() as u32),
            absorbed: active.as_ref().map_or(0, |a| a.absorbed as u32),
            decoding: active.as_ref().is_some_and(|a| a.first.is_some()),
            background: active.as_ref().is_some_and(|a| a.job.request.background),
            admitted: self.admitted[slot],
        };
        self.active.iter().enumerate().map(facts).collect()
    }

    /// Lets planners look at everything.
    fn with_facts<T>(
        &self,
        look: impl FnOnce(&PlanFacts<'_>) -> Result<T, HookError>,
    ) -> Result<T, HookError> {
        let slots = self.slot_facts();
        let waiting: SmallVec<[RequestFacts<'_>; 4]> = self.waiting.iter().map(request_facts).collect();
        look(&PlanFacts {
            now_s: self.born.elapsed().as_secs_f64(),
            round: self.round,
            last_piece_s: self.last.piece_s,
            last_decode_s: self.last.decode_s,
            slots: Slice::from(&slots[..]),
            waiting: Slice::from(&waiting[..]),
            free_bytes: self.free_bytes,
        })
    }

    /// The plan of the coming round.
    ///
    /// # Errors
    /// A planner that fails at what concerns all requests.
    pub(super) fn plan(&mut self) -> Result<Plan, HookError> {
        self.round += 1;
        let hooks = self.rank.core.hooks().clone();
        if !hooks.planners.is_empty() && !self.waiting.is_empty() {
            // Asking costs a system call; it matters to who may enter only.
            self.free_bytes = free_bytes();
        }
        let mut plan = Plan { round: self.round, ..Plan::default() };
        for slot in 0..self.active.len() {
            let gone = |a: &Active| a.job.cancel.load(Ordering::Acquire);
            if self.active[slot].as_ref().is_some_and(gone) {
                plan.cancels.push(slot);
                self.finish(slot, Finish::Cancelled);
            }
        }
        self.drop_cancelled();
        self.step_aside(&hooks, &mut plan)?;
        self.admit_all(&hooks, &mut plan)?;
        self.pieces(&hooks, &mut plan)?;
        for (index, h) in hooks.sections.iter().enumerate() {
            let bytes = h.call(|s| s.write(self.round))?;
            if !bytes.is_empty() {
                plan.sections.push((index, bytes.into()));
            }
        }
        let counts = (plan.admissions.len() as u32, plan.pieces.len() as u32, plan.decode.len() as u32);
        let round = self.round;
        self.observe(interest::PLAN, |o| o.planned(round, counts.0, counts.1, counts.2));
        self.gauges();
        Ok(plan)
    }

    /// Requests whose client left before they got a slot.
    fn drop_cancelled(&mut self) {
        let (gone, kept): (VecDeque<Job>, VecDeque<Job>) =
            self.waiting.drain(..).partition(|j| j.cancel.load(Ordering::Acquire));
        self.waiting = kept;
        self.gauges();
        for job in gone {
            self.stats().requests += 1;
            let queued_s = job.submitted.elapsed().as_secs_f64();
            let mut stats = RequestStats { queued_s, preempted: job.preempted, ..RequestStats::default() };
            self.told(&job, "cancelled", &[], &mut stats);
            let _ = job.events.send(Event::Done { finish: Finish::Cancelled, stats });
        }
    }

    /// Requests that leave their slots for others: they wait again, first in line.
    fn step_aside(&mut self, hooks: &Hooks, plan: &mut Plan) -> Result<(), HookError> {
        if hooks.planners.is_empty() || self.waiting.is_empty() {
            return Ok(());
        }
        let mut slots = List::new();
        self.with_facts(|facts| {
            hooks.planners.iter().try_for_each(|h| h.call(|p| p.step_aside(facts, &mut slots)))
        })?;
        for &slot in &slots {
            let Some(active) = self.active.get_mut(slot as usize).and_then(Option::take) else { continue };
            plan.cancels.push(slot as usize);
            let mut job = active.job;
            job.sent = job.sent.max(active.reply.len());
            job.preempted += 1;
            self.stats().preempted += 1;
            self.waiting.push_front(job);
        }
        Ok(())
    }

    fn admit_all(&mut self, hooks: &Arc<Hooks>, plan: &mut Plan) -> Result<(), HookError> {
        let mut queue: List<u64> = self.waiting.iter().map(|j| j.number).collect();
        if !hooks.planners.is_empty() && !queue.is_empty() {
            self.with_facts(|facts| {
                hooks.planners.iter().try_for_each(|h| h.call(|p| p.order(facts, &mut queue)))
            })?;
        }
        for &number in &queue {
            if self.active.iter().all(Option::is_some) {
                break;
            }
            let Some(place) = self.waiting.iter().position(|j| j.number == number) else { continue };
            match self.judge(hooks, place) {
                Ok((Verdict::Admit(slot), offers)) => {
                    let slot = slot as usize;
                    if self.active.get(slot).is_none_or(Option::is_some) {
                        let text = format!("planners gave slot {slot}, which is not free");
                        return Err(HookError { owner: "planning".into(), error: OpError::fatal(text) });
                    }
                    let Some(job) = self.waiting.remove(place) else { continue };
                    plan.admissions.push(self.admit(hooks, slot, job, &offers));
                }
                Ok((Verdict::Hold, _)) => {}
                Ok((Verdict::Block, _)) => break,
                Ok((Verdict::Refuse(message), _)) => {
                    let Some(job) = self.waiting.remove(place) else { continue };
                    self.refuse(&job, EngineError::Invalid(message.into()));
                }
                Err(error) => {
                    let Some(job) = self.waiting.remove(place) else { continue };
                    self.refuse(&job, EngineError::Failed(error.to_string()));
                }
            }
        }
        Ok(())
    }

    /// What planners say about the request at a place of the queue, and what could be resumed for it.
    fn judge(&self, hooks: &Hooks, place: usize) -> Result<(Verdict, Vec<StoreOffer>), HookError> {
        let job = &self.waiting[place];
        let offers = self.offers(hooks, job);
        let free = || (0..self.active.len()).filter(|s| self.active[*s].is_none());
        let best = offers
            .iter()
            .filter(|o| o.store == OWN)
            .max_by(|a, b| a.length.cmp(&b.length).then(b.slot.cmp(&a.slot)));
        let slot = best.map(|o| o.slot).or_else(|| free().next().map(|s| s as u32));
        let mut verdict = slot.map_or(Verdict::Block, Verdict::Admit);
        if !hooks.planners.is_empty() {
            self.with_facts(|facts| {
                let request = request_facts(job);
                for h in &hooks.planners {
                    h.call(|p| p.place(facts, &request, Slice::from(&offers[..]), &mut verdict))?;
                }
                hooks.planners.iter().try_for_each(|h| h.call(|p| p.admit(facts, &request, &mut verdict)))
            })?;
        }
        Ok((verdict, offers))
    }

    /// What free slots and stores could resume.
    fn offers(&self, hooks: &Hooks, job: &Job) -> Vec<StoreOffer> {
        let r = &job.request;
        if !r.draft || !r.attachments.is_empty() {
            return Vec::new();
        }
        let tag = job.tag.map_or(0, |t| t.id);
        let mut offers = Vec::new();
        for slot in (0..self.active.len()).filter(|s| self.active[*s].is_none()) {
            let kept = self.rank.rounds.kept(&self.rank.core, slot);
            let lengths = kept.filter(|k| k.snapshot.tag == tag).filter_map(|k| k.resumes(&r.ids));
            if let Some(length) = lengths.max() {
                let slot = slot as u32;
                offers.push(StoreOffer { store: OWN, ticket: 0, length: length as u32, price_ms: 0.0, slot });
            }
        }
        let request = request_facts(job);
        for (index, h) in hooks.stores.iter().enumerate() {
            match h.call(|s| s.offer(&request)) {
                Ok(found) => {
                    let strict = found.iter().filter(|o| (o.length as usize) < r.ids.len());
                    offers.extend(strict.map(|o| StoreOffer { store: index as u32, ..*o }));
                }
                // A store that fails costs a prefill.
                Err(error) => tracing::warn!("{error}: prefilling from the first token"),
            }
        }
        offers
    }

    fn admit(&mut self, hooks: &Hooks, slot: usize, job: Job, offers: &[StoreOffer]) -> Admission {
        let fits = |o: &&StoreOffer| o.store != OWN || o.slot as usize == slot;
        // The longest; what the slot keeps before what has to be copied.
        let best = offers.iter().filter(fits).max_by(|a, b| {
            a.length.cmp(&b.length).then((a.store == OWN).cmp(&(b.store == OWN))).then(b.store.cmp(&a.store))
        });
        let (resume, resumed) = match best {
            None => (Resume::Fresh, 0),
            Some(o) if o.store == OWN => (Resume::Slot(o.length as usize), o.length),
            Some(o) => {
                let store = o.store as usize;
                let digest = hooks.stores[store].call(Store::digest).unwrap_or_default();
                let length = o.length as usize;
                (Resume::Store { store, ticket: o.ticket, length, digest }, o.length)
            }
        };
        let r = &job.request;
        let (marks, reasons, early) = marks(hooks, &job, resumed);
        let seed = r.sampling.seed.unwrap_or_else(|| derived_seed(&r.ids));
        let admission = Admission {
            slot,
            ids: r.ids.clone(),
            temperature: r.sampling.temperature,
            top_k: r.sampling.top_k,
            top_p: r.sampling.top_p,
            min_p: r.sampling.min_p,
            seed,
            max_tokens: r.max_tokens,
            stop_ids: r.stop_ids.clone(),
            draft: r.draft,
            logprobs: r.logprobs,
            thinking: r.thinking,
            attachments: Admission::pack(&r.attachments),
            request: job.number,
            knobs: job.knobs.to_vec(),
            policy: r.policy.clone(),
            blobs: r.blobs.clone(),
            resume,
            marks,
            reasons,
            early,
        };
        let queued_s = job.submitted.elapsed().as_secs_f64();
        let stats = RequestStats { queued_s, slot, seed, ..RequestStats::default() };
        self.admitted[slot] = self.round;
        self.active[slot] = Some(Active {
            job,
            started: Instant::now(),
            first: None,
            absorbed: resumed as usize,
            admitted: self.round,
            reply: Vec::new(),
            stats,
        });
        admission
    }

    fn pieces(&self, hooks: &Hooks, plan: &mut Plan) -> Result<(), HookError> {
        let prefilling = |a: &Option<Active>| a.as_ref().is_some_and(|a| a.first.is_none());
        let tokens = self.rank.limits.piece;
        let oldest = (0..self.active.len())
            .filter(|&s| prefilling(&self.active[s]))
            .min_by_key(|&s| self.active[s].as_ref().map(|a| (a.admitted, a.job.number)));
        let mut pieces: List<PieceChoice> = List::new();
        pieces.extend(oldest.map(|slot| PieceChoice { slot: slot as u32, tokens }));
        let decoding = |s: &usize| self.active[*s].is_some() && !prefilling(&self.active[*s]);
        let mut decode: List<u32> = (0..self.active.len()).filter(decoding).map(|s| s as u32).collect();
        if !hooks.planners.is_empty() && self.active.iter().any(Option::is_some) {
            self.with_facts(|facts| {
                for h in &hooks.planners {
                    h.call(|p| p.pieces(facts, &mut pieces))?;
                    h.call(|p| p.decode(facts, &mut decode))?;
                }
                Ok(())
            })?;
        }
        let of_prefill =
            |p: &&PieceChoice| self.active.get(p.slot as usize).is_some_and(prefilling) && p.tokens > 0;
        plan.pieces = pieces
            .iter()
            .filter(of_prefill)
            .map(|p| Piece { slot: p.slot as usize, tokens: p.tokens as usize })
            .collect();
        plan.decode =
            decode.iter().map(|s| *s as usize).filter(|s| *s < self.active.len() && decoding(s)).collect();
        plan.decode.sort_unstable();
        plan.decode.dedup();
        Ok(())
    }
}

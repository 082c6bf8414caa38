//! What a round gave, handed to the requests it belongs to.

use std::sync::atomic::Ordering;
use std::time::Instant;

use plugfold_abi::points::{Ended, Observer, Store, interest};
use plugfold_abi::{Slice, Text};
use serde_json::{Map, Value, json};

use super::{Job, Loop};
use crate::rounds::{End, Outcome};
use crate::service::{EngineError, Event, Finish, RequestStats};

/// Rounds whose keeps are reported one by one.
const KEEPS: usize = 4096;

impl Loop {
    pub(super) fn apply(&mut self, slot: usize, outcome: Outcome) {
        let Some(active) = &mut self.active[slot] else { return };
        match outcome {
            Outcome::Begun(resumed) => {
                active.stats.cached_tokens = resumed;
                active.absorbed = resumed;
            }
            Outcome::Absorbed(done) => {
                active.absorbed = done;
                active.stats.pieces += 1;
                let total = active.job.request.ids.len();
                let _ = active.job.events.send(Event::Prefill { done, total });
            }
            Outcome::Tokens { tokens, logprobs, drafted, drafter, shared, end } => {
                let total = active.job.request.ids.len();
                active.absorbed = total;
                let kept = tokens.len().saturating_sub(1);
                if active.first.is_none() {
                    active.first = Some(Instant::now());
                    active.stats.pieces += 1;
                    active.stats.prefill_s = active.started.elapsed().as_secs_f64();
                    let _ = active.job.events.send(Event::Prefill { done: total, total });
                } else {
                    let stats = &mut active.stats;
                    stats.rounds += 1;
                    stats.drafted += drafted;
                    stats.accepted += kept;
                    stats.batched_rounds += usize::from(shared > 1);
                    if stats.keeps.len() < KEEPS {
                        stats.keeps.push(tokens.len() as u16);
                    }
                    if let Some(name) = drafter.and_then(|d| self.shared.info.drafters.get(d)) {
                        match stats.drafters.iter_mut().find(|(n, _)| n == name) {
                            Some((_, rounds)) => *rounds += 1,
                            None => stats.drafters.push((name.clone(), 1)),
                        }
                    }
                }
                // What was handed out before it stepped aside is not handed out again.
                let known = active.job.sent.saturating_sub(active.reply.len()).min(tokens.len());
                active.reply.extend_from_slice(&tokens);
                if !logprobs.is_empty() && known < logprobs.len() {
                    let _ = active.job.events.send(Event::Logprobs(logprobs[known..].to_vec()));
                }
                let fresh = tokens[known..].to_vec();
                let count = fresh.len() as u64;
                if !fresh.is_empty() && active.job.events.send(Event::Tokens(fresh)).is_err() {
                    active.job.cancel.store(true, Ordering::Release);
                }
                let mut stats = self.stats();
                stats.completion_tokens += count;
                stats.drafted += drafted as u64;
                stats.accepted += kept as u64;
                drop(stats);
                match end {
                    Some(End::Stop) => self.finish(slot, Finish::Stop),
                    Some(End::Length) => self.finish(slot, Finish::Length),
                    None => {}
                }
            }
            Outcome::Failed(message) => {
                if let Some(mut active) = self.active[slot].take() {
                    {
                        let mut stats = self.stats();
                        stats.requests += 1;
                        stats.errors += 1;
                    }
                    self.gauges();
                    let mut stats = std::mem::take(&mut active.stats);
                    self.told(&active.job, "error", &active.reply, &mut stats);
                    let _ = active.job.events.send(Event::Error(EngineError::Failed(message)));
                }
            }
        }
    }

    pub(super) fn finish(&mut self, slot: usize, finish: Finish) {
        let Some(mut active) = self.active[slot].take() else { return };
        if let Some(first) = active.first {
            active.stats.decode_s = first.elapsed().as_secs_f64();
        }
        active.stats.preempted = active.job.preempted;
        {
            let mut stats = self.stats();
            stats.requests += 1;
            stats.prompt_tokens += active.job.request.ids.len() as u64;
            stats.cached_tokens += active.stats.cached_tokens as u64;
            stats.prefill_s += active.stats.prefill_s;
            stats.decode_s += active.stats.decode_s;
        }
        // Before the last event, so that whoever has it sees the slot free.
        self.gauges();
        let reason = match finish {
            Finish::Stop => "stop",
            Finish::Length => "length",
            // The front end found a stop string: that is how observers count it.
            Finish::Cancelled if active.job.satisfied.load(Ordering::Acquire) => "stop",
            Finish::Cancelled => "cancelled",
        };
        let mut stats = std::mem::take(&mut active.stats);
        self.told(&active.job, reason, &active.reply, &mut stats);
        let _ = active.job.events.send(Event::Done { finish, stats });
    }

    /// Tells observers that a request is over, and takes in the fields that they add to its statistics.
    pub(super) fn told(&self, job: &Job, reason: &str, reply: &[u32], stats: &mut RequestStats) {
        let hooks = self.rank.core.hooks().clone();
        let listening =
            hooks.observers.iter().filter(|h| h.hook.interests().is_ok_and(|i| i & interest::REQUEST != 0));
        let mut facts: Option<String> = None;
        for h in listening {
            let facts = facts.get_or_insert_with(|| facts_of(job, stats));
            let ended = Ended {
                request: job.number,
                reason: Text::from(reason),
                facts: Text::from(facts.as_str()),
                ids: Slice::from(&job.request.ids[..]),
                reply: Slice::from(reply),
            };
            match h.call(|o| o.request(&ended)) {
                Ok(text) if text.is_empty() => {}
                Ok(text) => match serde_json::from_str::<Map<String, Value>>(&text) {
                    Ok(fields) => stats.fields.extend(fields),
                    Err(e) => {
                        tracing::warn!("plugin {}: fields of a request are no JSON object: {e}", h.owner);
                    }
                },
                Err(error) => tracing::warn!("{error}"),
            }
        }
    }

    /// Publishes what stores say of themselves.
    pub(super) fn figures(&self) {
        let hooks = self.rank.core.hooks();
        if hooks.stores.is_empty() {
            return;
        }
        let mut all = Vec::new();
        for h in &hooks.stores {
            let figures = h.call(Store::figures).unwrap_or_default();
            if figures.is_empty() {
                continue;
            }
            let name = h.call(Store::name).map_or_else(|e| e.to_string(), |n| n.to_string());
            all.extend(figures.iter().map(|f| (name.clone(), f.name.to_string(), f.value)));
        }
        self.stats().stores = all;
    }
}

/// Facts of a request as observers get them: the front end's, and what the engine measured.
fn facts_of(job: &Job, stats: &RequestStats) -> String {
    let front = serde_json::from_str::<Map<String, Value>>(&job.request.facts).unwrap_or_default();
    let mut all = Map::new();
    all.insert("front".into(), Value::Object(front));
    all.insert(
        "engine".into(),
        json!({
            "queued_s": stats.queued_s,
            "prefill_s": stats.prefill_s,
            "decode_s": stats.decode_s,
            "cached_tokens": stats.cached_tokens,
            "rounds": stats.rounds,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
            "batched_rounds": stats.batched_rounds,
            "slot": stats.slot,
            "seed": stats.seed,
            "pieces": stats.pieces,
            "preempted": stats.preempted,
            "keeps": stats.keeps,
            "drafters": stats.drafters,
            "temperature": job.request.sampling.temperature,
            "max_tokens": job.request.max_tokens,
            "draft": job.request.draft,
            "policy": job.request.policy,
            "background": job.request.background,
        }),
    );
    Value::Object(all).to_string()
}

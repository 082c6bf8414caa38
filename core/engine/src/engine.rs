//! The engine of rank 0: takes requests, plans rounds, hands out tokens.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::logprobs::MAX_TOP;
use crate::plan::{Admission, Order, Piece, Plan};
use crate::rank::Rank;
use crate::rounds::{End, Outcome};
use crate::sampling::derived_seed;
use crate::service::{
    EngineError, EngineStats, Event, Finish, Handle, ModelInfo, Request, RequestStats, Service,
};

/// Requests that may wait for a slot.
pub const MAX_WAITING: usize = 1024;

enum Message {
    Job(Box<Job>),
    Stop,
}

struct Job {
    request: Request,
    events: Sender<Event>,
    cancel: Arc<AtomicBool>,
    submitted: Instant,
}

/// A request in a slot.
struct Active {
    job: Job,
    started: Instant,
    first: Option<Instant>,
    absorbed: usize,
    stats: RequestStats,
}

struct Shared {
    info: ModelInfo,
    stats: Mutex<EngineStats>,
}

fn lock(stats: &Mutex<EngineStats>) -> MutexGuard<'_, EngineStats> {
    stats.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running engine. Dropping it ends its thread and says goodbye to the other ranks.
pub struct Engine {
    shared: Arc<Shared>,
    queue: Mutex<Sender<Message>>,
    thread: Option<JoinHandle<()>>,
}

impl Engine {
    /// Starts serving with rank 0.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub fn start(rank: Rank) -> std::io::Result<Self> {
        let config = rank.core.config();
        let info = ModelInfo {
            architecture: config.model_type.clone(),
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            context: rank.core.capacity().tokens,
            eos_ids: config.eos_ids.clone(),
            slots: rank.core.capacity().slots,
            ranks: rank.world.ranks(),
        };
        let shared = Arc::new(Shared { info, stats: Mutex::new(EngineStats::default()) });
        let (sender, receiver) = channel();
        let (seen, alarm) = (shared.clone(), sender.clone());
        // A rank that dies while the engine is idle must be told to the front end, too.
        rank.world.on_end(move |end| {
            lock(&seen.stats).fatal.get_or_insert_with(|| end.to_string());
            let _ = alarm.send(Message::Stop);
        });
        let inside = shared.clone();
        let thread = std::thread::Builder::new()
            .name("plugfold-engine".into())
            .spawn(move || Loop::new(rank, inside, receiver).run())?;
        Ok(Self { shared, queue: Mutex::new(sender), thread: Some(thread) })
    }
}

impl Service for Engine {
    fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    fn submit(&self, request: Request) -> Result<Handle, EngineError> {
        check(&request, &self.shared.info)?;
        {
            let mut stats = lock(&self.shared.stats);
            if let Some(reason) = &stats.fatal {
                return Err(EngineError::Unavailable(format!("the engine has stopped: {reason}")));
            }
            if stats.waiting >= MAX_WAITING {
                return Err(EngineError::Unavailable(format!(
                    "{MAX_WAITING} requests are waiting already; try again shortly"
                )));
            }
            stats.waiting += 1;
        }
        let (events, receiver) = channel();
        let cancel = Arc::new(AtomicBool::new(false));
        let job = Job { request, events, cancel: cancel.clone(), submitted: Instant::now() };
        let sent =
            self.queue.lock().unwrap_or_else(PoisonError::into_inner).send(Message::Job(Box::new(job)));
        if sent.is_err() {
            return Err(EngineError::Unavailable("the engine has stopped".into()));
        }
        Ok(Handle { events: receiver, cancel })
    }

    fn stats(&self) -> EngineStats {
        lock(&self.shared.stats).clone()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.queue.lock().unwrap_or_else(PoisonError::into_inner).send(Message::Stop);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Refuses what could never run.
fn check(request: &Request, info: &ModelInfo) -> Result<(), EngineError> {
    let invalid = |m: String| Err(EngineError::Invalid(m));
    let (vocab, prompt) = (info.vocab_size, request.ids.len());
    if prompt == 0 {
        return invalid("the prompt is empty: give at least one token".into());
    }
    if request.max_tokens == 0 {
        return invalid("max_tokens is 0: ask for at least one token".into());
    }
    if prompt.saturating_add(request.max_tokens) > info.context {
        let need = prompt.saturating_add(request.max_tokens);
        return invalid(format!(
            "{prompt} prompt tokens and {} to generate are {need}, over the context of {}",
            request.max_tokens, info.context
        ));
    }
    let replaced = |i: usize| {
        request.attachments.iter().any(|a| i >= a.at && (i - a.at) < a.rows.len() / info.hidden_size.max(1))
    };
    let bad = request.ids.iter().enumerate().find(|(i, id)| **id as usize >= vocab && !replaced(*i));
    if let Some((i, id)) = bad {
        return invalid(format!("token id {id} at position {i} is outside the vocabulary of {vocab} ids"));
    }
    if request.logprobs.is_some_and(|top| top > MAX_TOP) {
        return invalid(format!("log probabilities of more than {MAX_TOP} alternatives were asked for"));
    }
    if let Some(close) = request.thinking.map(|t| t.close).filter(|id| *id as usize >= vocab) {
        return invalid(format!(
            "token id {close}, to end the reasoning, is outside the vocabulary of {vocab} ids"
        ));
    }
    let fits = |a: &crate::service::Attachment| {
        a.rows.len().is_multiple_of(info.hidden_size) && a.at + a.rows.len() / info.hidden_size <= prompt
    };
    if !request.attachments.iter().all(fits) {
        return invalid(format!("an attachment does not lie inside the prompt of {prompt} tokens"));
    }
    Ok(())
}

/// The thread that owns rank 0.
struct Loop {
    rank: Rank,
    shared: Arc<Shared>,
    receiver: Receiver<Message>,
    waiting: VecDeque<Job>,
    active: Vec<Option<Active>>,
    stop: bool,
}

impl Loop {
    fn new(rank: Rank, shared: Arc<Shared>, receiver: Receiver<Message>) -> Self {
        let active = (0..rank.core.capacity().slots).map(|_| None).collect();
        Self { rank, shared, receiver, waiting: VecDeque::new(), active, stop: false }
    }

    fn stats(&self) -> MutexGuard<'_, EngineStats> {
        lock(&self.shared.stats)
    }

    fn run(mut self) {
        while !self.stop {
            self.receive();
            if self.stop {
                break;
            }
            let plan = self.plan();
            if plan == Plan::default() {
                continue;
            }
            if let Err(reason) = self.round(plan) {
                self.stats().fatal.get_or_insert(reason);
                break;
            }
        }
        self.shut();
    }

    /// Takes in what has arrived; sleeps when there is nothing else to do.
    fn receive(&mut self) {
        let idle = self.waiting.is_empty() && self.active.iter().all(Option::is_none);
        let first = if idle { self.receiver.recv().ok() } else { None };
        if idle && first.is_none() {
            self.stop = true;
        }
        for message in first.into_iter().chain(self.receiver.try_iter()) {
            match message {
                Message::Job(job) => self.waiting.push_back(*job),
                Message::Stop => self.stop = true,
            }
        }
    }

    /// The bare policy: first come, first served; one prompt piece a round; everything that decodes, decodes.
    fn plan(&mut self) -> Plan {
        let mut plan = Plan::default();
        for slot in 0..self.active.len() {
            let gone = |a: &Active| a.job.cancel.load(Ordering::Acquire);
            if self.active[slot].as_ref().is_some_and(gone) {
                plan.cancels.push(slot);
                self.finish(slot, Finish::Cancelled);
            }
        }
        self.drop_cancelled();
        for slot in 0..self.active.len() {
            if self.active[slot].is_none()
                && let Some(job) = self.waiting.pop_front()
            {
                plan.admissions.push(self.admit(slot, job));
            }
        }
        let prefilling = |a: &Option<Active>| a.as_ref().is_some_and(|a| a.first.is_none());
        let oldest = (0..self.active.len())
            .filter(|&s| prefilling(&self.active[s]))
            .min_by_key(|&s| self.active[s].as_ref().map(|a| a.started));
        if let Some(slot) = oldest {
            plan.pieces.push(Piece { slot, tokens: self.rank.options().prefill_rows });
        }
        plan.decode = (0..self.active.len())
            .filter(|&s| self.active[s].is_some() && !prefilling(&self.active[s]))
            .collect();
        self.gauges();
        plan
    }

    /// Requests whose client left before they got a slot.
    fn drop_cancelled(&mut self) {
        let (gone, kept): (VecDeque<Job>, VecDeque<Job>) =
            self.waiting.drain(..).partition(|j| j.cancel.load(Ordering::Acquire));
        self.waiting = kept;
        self.gauges();
        for job in gone {
            self.stats().requests += 1;
            let stats =
                RequestStats { queued_s: job.submitted.elapsed().as_secs_f64(), ..RequestStats::default() };
            let _ = job.events.send(Event::Done { finish: Finish::Cancelled, stats });
        }
    }

    fn admit(&mut self, slot: usize, job: Job) -> Admission {
        let r = &job.request;
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
        };
        let queued_s = job.submitted.elapsed().as_secs_f64();
        let stats = RequestStats { queued_s, slot, seed, ..RequestStats::default() };
        self.active[slot] = Some(Active { job, started: Instant::now(), first: None, absorbed: 0, stats });
        admission
    }

    fn gauges(&self) {
        let prefilling = self.active.iter().flatten().filter(|a| a.first.is_none()).count();
        let mut stats = self.stats();
        stats.prefilling = prefilling;
        stats.decoding = self.active.iter().flatten().count() - prefilling;
        stats.waiting = self.waiting.len();
    }

    /// Runs a plan on all ranks. An error ends the engine.
    fn round(&mut self, plan: Plan) -> Result<(), String> {
        let decodes = !plan.decode.is_empty();
        let order = Order::Round(plan);
        self.rank.order(&order).map_err(|e| e.to_string())?;
        let Order::Round(plan) = order else { return Ok(()) };
        let outcomes = match self.rank.round(plan) {
            Ok(outcomes) => outcomes,
            Err(error) => return Err(self.rank.give_up(error).to_string()),
        };
        self.stats().rounds += u64::from(decodes);
        for (slot, outcome) in outcomes {
            self.apply(slot, outcome);
        }
        self.gauges();
        Ok(())
    }

    fn apply(&mut self, slot: usize, outcome: Outcome) {
        let Some(active) = &mut self.active[slot] else { return };
        match outcome {
            Outcome::Absorbed(done) => {
                active.absorbed = done;
                let total = active.job.request.ids.len();
                let _ = active.job.events.send(Event::Prefill { done, total });
            }
            Outcome::Tokens { tokens, logprobs, drafted, shared, end } => {
                if active.first.is_none() {
                    active.first = Some(Instant::now());
                    active.stats.prefill_s = active.started.elapsed().as_secs_f64();
                    let total = active.job.request.ids.len();
                    let _ = active.job.events.send(Event::Prefill { done: total, total });
                } else {
                    active.stats.rounds += 1;
                    active.stats.drafted += drafted;
                    active.stats.accepted += tokens.len().saturating_sub(1);
                    active.stats.batched_rounds += usize::from(shared > 1);
                }
                if !logprobs.is_empty() {
                    let _ = active.job.events.send(Event::Logprobs(logprobs));
                }
                let (count, accepted) = (tokens.len() as u64, tokens.len().saturating_sub(1) as u64);
                if active.job.events.send(Event::Tokens(tokens)).is_err() {
                    active.job.cancel.store(true, Ordering::Release);
                }
                let mut stats = self.stats();
                stats.completion_tokens += count;
                stats.drafted += drafted as u64;
                stats.accepted += accepted;
                drop(stats);
                match end {
                    Some(End::Stop) => self.finish(slot, Finish::Stop),
                    Some(End::Length) => self.finish(slot, Finish::Length),
                    None => {}
                }
            }
            Outcome::Failed(message) => {
                if let Some(active) = self.active[slot].take() {
                    {
                        let mut stats = self.stats();
                        stats.requests += 1;
                        stats.errors += 1;
                    }
                    self.gauges();
                    let _ = active.job.events.send(Event::Error(EngineError::Failed(message)));
                }
            }
        }
    }

    fn finish(&mut self, slot: usize, finish: Finish) {
        let Some(mut active) = self.active[slot].take() else { return };
        if let Some(first) = active.first {
            active.stats.decode_s = first.elapsed().as_secs_f64();
        }
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
        let _ = active.job.events.send(Event::Done { finish, stats: active.stats });
    }

    /// Tells everybody who waits that it is over.
    fn shut(mut self) {
        let reason = self.stats().fatal.clone();
        let text = reason.clone().unwrap_or_else(|| "the engine is shutting down".into());
        if reason.is_none() {
            self.rank.world.goodbye();
        }
        let late = self.receiver.try_iter().filter_map(|m| match m {
            Message::Job(job) => Some(*job),
            Message::Stop => None,
        });
        let late: Vec<Job> = late.collect();
        let running = self.active.iter_mut().filter_map(|a| a.take().map(|a| a.job));
        for job in running.chain(self.waiting.drain(..)).chain(late) {
            let _ = job.events.send(Event::Error(EngineError::Unavailable(text.clone())));
        }
        let mut stats = self.stats();
        (stats.decoding, stats.prefilling, stats.waiting) = (0, 0, 0);
    }
}

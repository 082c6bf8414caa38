//! The engine of rank 0: takes requests, plans rounds, hands out tokens.

mod planning;
mod report;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use plugfold_abi::Slice;
use plugfold_abi::points::{Observer, interest};

use crate::core::Tag;
use crate::hooks::Hooks;
use crate::knobs::Values;
use crate::logprobs::MAX_TOP;
use crate::plan::{Order, Plan};
use crate::rank::Rank;
use crate::rounds::Report;
use crate::service::{EngineError, EngineStats, Event, Handle, ModelInfo, Request, RequestStats, Service};

/// Requests that may wait for a slot.
pub const MAX_WAITING: usize = 1024;

enum Message {
    Job(Box<Job>),
    Stop,
}

struct Job {
    /// Unique while the engine runs; 0 is nobody.
    number: u64,
    request: Request,
    events: Sender<Event>,
    cancel: Arc<AtomicBool>,
    submitted: Instant,
    knobs: Values,
    /// Known once the engine thread has seen it.
    tag: Option<Tag>,
    /// Whether it may get drafts of the multi-token-prediction layer.
    draft_layer: bool,
    /// Tokens that were handed out before it stepped aside.
    sent: usize,
    preempted: usize,
}

/// A request in a slot.
struct Active {
    job: Job,
    started: Instant,
    first: Option<Instant>,
    absorbed: usize,
    admitted: u64,
    /// Generated ids, those before it stepped aside as well.
    reply: Vec<u32>,
    stats: RequestStats,
}

struct Shared {
    info: ModelInfo,
    stats: Mutex<EngineStats>,
    defaults: Values,
    /// Requests that were submitted so far.
    numbers: AtomicU64,
}

fn lock(stats: &Mutex<EngineStats>) -> MutexGuard<'_, EngineStats> {
    stats.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running engine. Dropping it ends its thread and says goodbye to the other ranks.
pub struct Engine {
    shared: Arc<Shared>,
    hooks: Arc<Hooks>,
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
            drafters: rank.rounds.drafters().to_vec(),
        };
        let defaults = rank.core.hooks().knobs.defaults.clone();
        let shared =
            Arc::new(Shared { info, stats: Mutex::default(), defaults, numbers: AtomicU64::default() });
        let (sender, receiver) = channel();
        let (seen, alarm) = (shared.clone(), sender.clone());
        // A rank that dies while the engine is idle must be told to the front end, too.
        rank.world.on_end(move |end| {
            lock(&seen.stats).fatal.get_or_insert_with(|| end.to_string());
            let _ = alarm.send(Message::Stop);
        });
        let (inside, hooks) = (shared.clone(), rank.core.hooks().clone());
        let thread = std::thread::Builder::new()
            .name("plugfold-engine".into())
            .spawn(move || Loop::new(rank, inside, receiver).run())?;
        Ok(Self { shared, hooks, queue: Mutex::new(sender), thread: Some(thread) })
    }
}

impl Service for Engine {
    fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    fn submit(&self, request: Request) -> Result<Handle, EngineError> {
        check(&request, &self.shared.info, self.shared.defaults.len())?;
        self.hooks.policy(&request.policy)?;
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
        let job = Job {
            number: self.shared.numbers.fetch_add(1, Ordering::Relaxed) + 1,
            knobs: request.knobs.clone().unwrap_or_else(|| self.shared.defaults.clone()),
            request,
            events,
            cancel: cancel.clone(),
            submitted: Instant::now(),
            tag: None,
            draft_layer: false,
            sent: 0,
            preempted: 0,
        };
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

    fn policy(&self, asked: &str) -> Result<String, EngineError> {
        self.hooks.policy(asked)
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
fn check(request: &Request, info: &ModelInfo, knobs: usize) -> Result<(), EngineError> {
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
    if let Some(given) = request.knobs.as_ref().map(|k| k.len()).filter(|n| *n != knobs) {
        return invalid(format!("{given} request knobs where this engine has {knobs}"));
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
    /// Round in which each slot's last request was admitted.
    admitted: Vec<u64>,
    born: Instant,
    round: u64,
    last: Report,
    /// Bytes that could still be taken, as of the last plan with requests that wait.
    free_bytes: u64,
    stop: bool,
}

/// How long the engine sleeps when requests wait and none may run.
const HELD: Duration = Duration::from_millis(2);

impl Loop {
    fn new(rank: Rank, shared: Arc<Shared>, receiver: Receiver<Message>) -> Self {
        let slots = rank.core.capacity().slots;
        Self {
            rank,
            shared,
            receiver,
            waiting: VecDeque::new(),
            active: (0..slots).map(|_| None).collect(),
            admitted: vec![0; slots],
            born: Instant::now(),
            round: 0,
            last: Report::default(),
            free_bytes: u64::MAX,
            stop: false,
        }
    }

    fn stats(&self) -> MutexGuard<'_, EngineStats> {
        lock(&self.shared.stats)
    }

    fn run(mut self) {
        let mut held = false;
        while !self.stop {
            self.receive(held);
            if self.stop {
                break;
            }
            let ran = match self.plan() {
                Ok(plan) if plan.is_idle() => {
                    held = true;
                    // A round that was not run took no time: planners count each round's once.
                    self.last = Report::default();
                    continue;
                }
                Ok(plan) => self.round(plan),
                Err(error) => Err(error.to_string()),
            };
            held = false;
            if let Err(reason) = ran {
                self.stats().fatal.get_or_insert(reason);
                break;
            }
        }
        self.shut();
    }

    /// Takes in what has arrived; sleeps when there is nothing else to do, shortly when requests are held back.
    fn receive(&mut self, held: bool) {
        let idle = self.waiting.is_empty() && self.active.iter().all(Option::is_none);
        let first = match (idle, held) {
            (true, _) => self.receiver.recv().ok(),
            (false, true) => self.receiver.recv_timeout(HELD).ok(),
            (false, false) => None,
        };
        if idle && first.is_none() {
            self.stop = true;
        }
        let arrived: Vec<Message> = first.into_iter().chain(self.receiver.try_iter()).collect();
        for message in arrived {
            match message {
                Message::Job(job) => self.arrive(*job),
                Message::Stop => self.stop = true,
            }
        }
    }

    /// Queues a request, once the arithmetic of its knobs is known.
    fn arrive(&mut self, mut job: Job) {
        for h in &self.rank.core.hooks().observers {
            if h.hook.interests().is_ok_and(|i| i & interest::REQUEST != 0)
                && let Err(error) = h.call(|o| o.arrived(job.number, Slice::from(&job.request.ids[..])))
            {
                tracing::warn!("{error}");
            }
        }
        match self.rank.core.tag(&job.knobs) {
            Ok(tag) => {
                job.tag = Some(tag);
                job.draft_layer = job.request.draft && self.rank.rounds.reads_draft_layer();
                self.waiting.push_back(job);
            }
            Err(error) => self.refuse(&job, EngineError::Failed(error.to_string())),
        }
    }

    /// Ends a request that never had a slot.
    fn refuse(&mut self, job: &Job, error: EngineError) {
        {
            let mut stats = self.stats();
            stats.requests += 1;
            stats.errors += 1;
        }
        self.gauges();
        self.told(job, "error", &[], &mut RequestStats::default());
        let _ = job.events.send(Event::Error(error));
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
        let report = match self.rank.round(plan) {
            Ok(report) => report,
            Err(error) => return Err(self.rank.give_up(error).to_string()),
        };
        self.stats().rounds += u64::from(decodes);
        // Before the events, so that whoever has a reply sees what was stored of it.
        self.figures();
        for (slot, outcome) in &report.outcomes {
            self.apply(*slot, outcome.clone());
        }
        self.last = report;
        self.gauges();
        Ok(())
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

//! The engine of rank 0: takes requests, plans rounds, hands out tokens.

mod inbox;
mod listeners;
mod planning;
mod report;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use plugfold_abi::points::{Observer, ObserverObject, PlanWait, interest};
use plugfold_abi::{OpError, Slice};

use crate::core::Tag;
use crate::hooks::{Hooked, Hooks, chosen};
use crate::knobs::Values;
use crate::logprobs::MAX_TOP;
use crate::plan::{Order, Plan};
use crate::rank::Rank;
use crate::rounds::Report;
use crate::service::{EngineError, EngineStats, Event, Handle, ModelInfo, Request, RequestStats, Service};
use crate::watchdog::{Hung, Watchdog};
use inbox::Inbox;
use listeners::{Listener, Listeners};

/// Requests that may wait for a slot.
pub const MAX_WAITING: usize = 1024;

enum Message {
    Job(Box<Job>),
    Stop,
    /// As [`Message::Stop`], without a goodbye to the other ranks: the rank is wanted back.
    Release,
}

struct Job {
    /// Unique while the engine runs; 0 is nobody.
    number: u64,
    request: Request,
    events: Listener,
    cancel: Arc<AtomicBool>,
    satisfied: Arc<AtomicBool>,
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
    /// Who waits for events.
    listeners: Arc<Listeners>,
    /// A hook hangs on the engine's thread, which will never end.
    hung: AtomicBool,
}

impl Shared {
    /// A hook hangs: answers everybody who waits, since the engine's thread cannot.
    fn give_up(&self, reason: &str) {
        self.hung.store(true, Ordering::Release);
        {
            let mut stats = lock(&self.stats);
            stats.fatal.get_or_insert_with(|| reason.to_owned());
            (stats.decoding, stats.prefilling, stats.waiting) = (0, 0, 0);
        }
        self.listeners.end(&EngineError::Unavailable(reason.to_owned()));
    }
}

fn lock(stats: &Mutex<EngineStats>) -> MutexGuard<'_, EngineStats> {
    stats.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running engine. Dropping it ends its thread and says goodbye to the other ranks.
pub struct Engine {
    shared: Arc<Shared>,
    hooks: Arc<Hooks>,
    queue: Mutex<Sender<Message>>,
    thread: Option<JoinHandle<Rank>>,
    _watchdog: Watchdog,
}

impl Engine {
    /// Starts serving with rank 0.
    ///
    /// # Errors
    /// When the system gives no thread, or when no plugin brings the way to wait that is asked for.
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
        let shared = Arc::new(Shared {
            info,
            stats: Mutex::default(),
            defaults,
            numbers: AtomicU64::default(),
            listeners: Arc::default(),
            hung: AtomicBool::default(),
        });
        let (sender, receiver) = channel();
        let (seen, alarm) = (shared.clone(), sender.clone());
        // A rank that dies while the engine is idle must be told to the front end, too.
        rank.world.on_end(move |end| {
            lock(&seen.stats).fatal.get_or_insert_with(|| end.to_string());
            let _ = alarm.send(Message::Stop);
        });
        let (inside, hooks) = (shared.clone(), rank.core.hooks().clone());
        let name = rank.options().plan_wait.as_deref();
        let wait =
            chosen(&hooks.waits, "way to wait", name, PlanWait::name).map_err(std::io::Error::other)?;
        let inbox = Inbox::new(receiver, wait.cloned());
        let guard = rank.world.guard();
        let left = shared.clone();
        let watchdog = rank.watch(move |hung: Hung| {
            let reason = hung.to_string();
            tracing::error!("{reason}: the engine ends");
            left.give_up(&reason);
            guard.fail(reason);
        })?;
        let thread = std::thread::Builder::new()
            .name("plugfold-engine".into())
            .spawn(move || Loop::new(rank, inside, inbox).run())?;
        let queue = Mutex::new(sender);
        Ok(Self { shared, hooks, queue, thread: Some(thread), _watchdog: watchdog })
    }

    /// Ends the engine, not its ranks, and gives rank 0 back. Requests that run or wait are told that it shuts down.
    ///
    /// # Panics
    /// When the engine's thread did.
    #[must_use]
    pub fn release(mut self) -> Option<Rank> {
        let _ = self.queue.lock().unwrap_or_else(PoisonError::into_inner).send(Message::Release);
        let thread = self.thread.take().filter(|_| !self.shared.hung.load(Ordering::Acquire))?;
        Some(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

impl Service for Engine {
    fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    fn submit(&self, request: Request) -> Result<Handle, EngineError> {
        check(&request, &self.shared.info, self.shared.defaults.len())?;
        self.hooks.policy(&request.policy)?;
        let number = self.shared.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let (events, receiver) = channel();
        // Before the look at the engine's end: who ends it answers all that are entered.
        let events = self.shared.listeners.enter(number, events);
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
        let (cancel, satisfied) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let job = Job {
            number,
            knobs: request.knobs.clone().unwrap_or_else(|| self.shared.defaults.clone()),
            request,
            events,
            cancel: cancel.clone(),
            satisfied: satisfied.clone(),
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
        Ok(Handle { events: receiver, cancel, satisfied })
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
        if let Some(thread) = self.thread.take().filter(|_| !self.shared.hung.load(Ordering::Acquire)) {
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
    inbox: Inbox,
    waiting: VecDeque<Job>,
    active: Vec<Option<Active>>,
    /// Round in which each slot's last request was admitted.
    admitted: Vec<u64>,
    born: Instant,
    round: u64,
    last: Report,
    /// Bytes that could still be taken, as of the last plan with requests that wait.
    free_bytes: u64,
    /// Observers with what they want to be told.
    observers: Vec<(Hooked<ObserverObject>, u32)>,
    stop: bool,
    /// Whether the rank is wanted back.
    release: bool,
}

impl Loop {
    fn new(rank: Rank, shared: Arc<Shared>, inbox: Inbox) -> Self {
        let slots = rank.core.capacity().slots;
        let observers = &rank.core.hooks().observers;
        let interests = |h: &Hooked<ObserverObject>| (h.clone(), h.call(Observer::interests).unwrap_or(0));
        Self {
            observers: observers.iter().map(interests).collect(),
            rank,
            shared,
            inbox,
            waiting: VecDeque::new(),
            active: (0..slots).map(|_| None).collect(),
            admitted: vec![0; slots],
            born: Instant::now(),
            round: 0,
            last: Report::default(),
            free_bytes: u64::MAX,
            stop: false,
            release: false,
        }
    }

    fn stats(&self) -> MutexGuard<'_, EngineStats> {
        lock(&self.shared.stats)
    }

    /// Tells observers; what they fail with is logged and changes nothing.
    fn observe(&self, what: u32, tell: impl Fn(&ObserverObject) -> Result<(), OpError>) {
        for (h, _) in self.observers.iter().filter(|(_, wants)| wants & what != 0) {
            if let Err(error) = h.call(&tell) {
                tracing::warn!("{error}");
            }
        }
    }

    fn run(mut self) -> Rank {
        self.rank.core.hooks().thread("round");
        let mut held = false;
        while !self.stop {
            let ran = self.receive(held).and_then(|()| {
                if self.stop {
                    return Ok(false);
                }
                let plan = self.plan().map_err(|e| e.to_string())?;
                if plan.is_idle() {
                    // A round that was not run took no time: planners count each round's once.
                    self.last = Report::default();
                    return Ok(true);
                }
                self.round(plan).map(|()| false)
            });
            match ran {
                Ok(idle) => held = idle,
                Err(reason) => {
                    self.stats().fatal.get_or_insert_with(|| reason.clone());
                    // The other ranks end with the reason, too, unless they have one already.
                    self.rank.world.fail(reason);
                    break;
                }
            }
            if self.shared.hung.load(Ordering::Acquire) {
                // The hook that hung has come back: everybody was answered already.
                break;
            }
        }
        self.shut()
    }

    /// Takes in what has arrived; sleeps when there is nothing else to do, shortly when requests are held back.
    fn receive(&mut self, held: bool) -> Result<(), String> {
        let running = self.active.iter().flatten().count();
        if self.waiting.is_empty() && running == 0 {
            let came = self.inbox.idle().map_err(|e| e.to_string())?;
            self.stop |= !came;
        } else if held {
            self.inbox.held();
        }
        self.take_in();
        if !self.waiting.is_empty() && !self.stop {
            self.inbox.gather(self.waiting.len(), running).map_err(|e| e.to_string())?;
            self.take_in();
        }
        Ok(())
    }

    fn take_in(&mut self) {
        while let Some(message) = self.inbox.next() {
            match message {
                Message::Job(job) => self.arrive(*job),
                Message::Stop => self.stop = true,
                Message::Release => (self.stop, self.release) = (true, true),
            }
        }
    }

    /// Queues a request, once the arithmetic of its knobs is known.
    fn arrive(&mut self, mut job: Job) {
        let ids = Slice::from(&job.request.ids[..]);
        self.observe(interest::REQUEST, |o| o.arrived(job.number, ids));
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
    fn shut(mut self) -> Rank {
        let reason = self.stats().fatal.clone();
        let text = reason.clone().unwrap_or_else(|| "the engine is shutting down".into());
        if reason.is_none() && !self.release {
            self.rank.world.goodbye();
        }
        let late = std::iter::from_fn(|| self.inbox.next()).filter_map(|m| match m {
            Message::Job(job) => Some(*job),
            Message::Stop | Message::Release => None,
        });
        let late: Vec<Job> = late.collect();
        let running = self.active.iter_mut().filter_map(|a| a.take().map(|a| a.job));
        for job in running.chain(self.waiting.drain(..)).chain(late) {
            let _ = job.events.send(Event::Error(EngineError::Unavailable(text.clone())));
        }
        {
            let mut stats = self.stats();
            (stats.decoding, stats.prefilling, stats.waiting) = (0, 0, 0);
        }
        self.rank
    }
}

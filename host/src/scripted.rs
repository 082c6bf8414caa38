//! An engine that is scripted: it "generates" given tokens, in given rounds, with gates and delays.
//!
//! Everything around an engine can be tested with it, without a model. It keeps the engine's promises: slots and a
//! queue, budgets and stop ids, cancelling, statistics.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use plugfold_engine::logprobs::TokenLogprobs;
use plugfold_engine::service::{
    EngineError, EngineStats, Event, Finish, Handle, ModelInfo, Request, RequestStats, Service,
};

/// One step of a script.
#[derive(Clone, Debug)]
pub enum Step {
    /// Reports prefill progress.
    Prefill(usize),
    /// A round that generates these ids.
    Tokens(Vec<u32>),
    /// Waits until the gate is open.
    Wait(Gate),
    /// Waits for a time; for benchmarks and trials.
    Delay(Duration),
    /// Fails.
    Fail(EngineError),
}

/// Holds scripts up until it is opened.
#[derive(Clone, Debug, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    /// Lets everything through from now on.
    pub fn open(&self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.1.notify_all();
    }

    /// Waits for the opening; `false` when cancelled before.
    fn wait(&self, cancel: &AtomicBool) -> bool {
        let mut open = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
        while !*open {
            if cancel.load(Ordering::Acquire) {
                return false;
            }
            let pause = Duration::from_millis(2);
            open = self.0.1.wait_timeout(open, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// What happens to a request. After the last step the reply ends as [`Finish::Stop`].
pub type Script = Vec<Step>;

struct Work {
    request: Request,
    events: Sender<Event>,
    cancel: Arc<AtomicBool>,
    since: Instant,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Work>,
    busy: Vec<bool>,
    stats: EngineStats,
    stopping: bool,
}

struct Shared {
    info: ModelInfo,
    respond: Box<dyn Fn(&Request) -> Script + Send + Sync>,
    state: Mutex<State>,
    changed: Condvar,
    queue_limit: usize,
    /// Prompts of requests that ended, once the engine was told to remember.
    memory: Mutex<Option<Vec<Vec<u32>>>>,
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A [`Service`] that plays scripts, one thread a slot.
pub struct ScriptedService {
    shared: Arc<Shared>,
}

impl ScriptedService {
    /// Plays what `respond` gives for each request.
    pub fn new(info: ModelInfo, respond: impl Fn(&Request) -> Script + Send + Sync + 'static) -> Self {
        let slots = info.slots.max(1);
        let shared = Arc::new(Shared {
            info,
            respond: Box::new(respond),
            state: Mutex::new(State { busy: vec![false; slots], ..State::default() }),
            changed: Condvar::new(),
            queue_limit: 1024,
            memory: Mutex::default(),
        });
        for slot in 0..slots {
            let shared = Arc::clone(&shared);
            std::thread::spawn(move || serve_slot(&shared, slot));
        }
        Self { shared }
    }

    /// Facts for tests: a byte vocabulary and a context.
    pub fn info_for_tests(context: usize, slots: usize) -> ModelInfo {
        ModelInfo {
            architecture: "scripted".into(),
            vocab_size: crate::text::testing::VOCAB,
            hidden_size: 8,
            context,
            eos_ids: vec![crate::text::testing::FIRST_CONTROL],
            slots,
            ranks: 1,
            drafters: Vec::new(),
        }
    }

    /// From now on prompts are remembered, and what a later one shares with one of them counts as cached.
    pub fn remember(&self) {
        self.shared.memory.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default();
    }

    /// From now on the engine counts as failed.
    pub fn fail(&self, reason: &str) {
        self.shared.state().stats.fatal = Some(reason.to_owned());
    }
}

impl Drop for ScriptedService {
    fn drop(&mut self) {
        self.shared.state().stopping = true;
        self.shared.changed.notify_all();
    }
}

impl Service for ScriptedService {
    fn info(&self) -> &ModelInfo {
        &self.shared.info
    }

    fn submit(&self, request: Request) -> Result<Handle, EngineError> {
        let info = &self.shared.info;
        if request.ids.is_empty() || request.max_tokens == 0 {
            return Err(EngineError::Invalid("a request needs a prompt and a budget".into()));
        }
        if let Some(id) = request.ids.iter().find(|id| **id as usize >= info.vocab_size) {
            return Err(EngineError::Invalid(format!("token id {id} is outside the vocabulary")));
        }
        if request.ids.len().saturating_add(request.max_tokens) > info.context {
            return Err(EngineError::Invalid("prompt and budget are over the context".into()));
        }
        let (events, receiver) = channel();
        let cancel = Arc::new(AtomicBool::new(false));
        let mut state = self.shared.state();
        if state.queue.len() >= self.shared.queue_limit {
            return Err(EngineError::Unavailable("the queue is full; try again".into()));
        }
        state.queue.push_back(Work { request, events, cancel: Arc::clone(&cancel), since: Instant::now() });
        state.stats.waiting = state.queue.len();
        drop(state);
        self.shared.changed.notify_one();
        Ok(Handle { events: receiver, cancel, satisfied: Arc::default() })
    }

    fn stats(&self) -> EngineStats {
        self.shared.state().stats.clone()
    }
}

fn serve_slot(shared: &Shared, slot: usize) {
    loop {
        let mut state = shared.state();
        let work = loop {
            if state.stopping {
                return;
            }
            if let Some(work) = state.queue.pop_front() {
                break work;
            }
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        };
        state.stats.waiting = state.queue.len();
        state.stats.prefilling += 1;
        state.busy[slot] = true;
        drop(state);
        play(shared, slot, &work);
    }
}

/// Cached prompt tokens as an engine with snapshots every 64 tokens has them; the prompt is remembered.
fn cached(shared: &Shared, ids: &[u32]) -> usize {
    let mut memory = shared.memory.lock().unwrap_or_else(PoisonError::into_inner);
    let Some(prompts) = memory.as_mut() else { return 0 };
    let common = |known: &Vec<u32>| known.iter().zip(ids).take_while(|(a, b)| a == b).count();
    let longest = prompts.iter().map(common).max().unwrap_or(0);
    prompts.push(ids.to_vec());
    longest.min(ids.len().saturating_sub(1)) / 64 * 64
}

/// What the scripted engine says of a token: it had half the probability, the ids after it a half of the rest each.
fn logprobs(id: u32, top: u32, vocab: usize) -> TokenLogprobs {
    let share = |at: u32| -f64::from(at + 1) * std::f64::consts::LN_2;
    let top = (0..top).map(|at| ((id + at) % vocab as u32, share(at))).collect();
    TokenLogprobs { token: share(0), top }
}

fn play(shared: &Shared, slot: usize, work: &Work) {
    let request = &work.request;
    let queued_s = work.since.elapsed().as_secs_f64();
    let begun = Instant::now();
    let mut stats = RequestStats {
        queued_s,
        slot,
        seed: request.sampling.seed.unwrap_or_default(),
        cached_tokens: cached(shared, &request.ids),
        ..RequestStats::default()
    };
    let mut generated = 0;
    let mut first = None;
    let mut closed = false;
    let mut outcome = Ok(Finish::Stop);
    for step in (shared.respond)(request) {
        if work.cancel.load(Ordering::Acquire) {
            outcome = Ok(Finish::Cancelled);
            break;
        }
        match step {
            Step::Prefill(done) => {
                let _ = work.events.send(Event::Prefill { done, total: request.ids.len() });
            }
            Step::Wait(gate) => {
                if !gate.wait(&work.cancel) {
                    outcome = Ok(Finish::Cancelled);
                    break;
                }
            }
            Step::Delay(time) => std::thread::sleep(time),
            Step::Fail(error) => {
                outcome = Err(error);
                break;
            }
            Step::Tokens(mut ids) => {
                ids.truncate(request.max_tokens - generated);
                let stop = ids.iter().position(|id| request.stop_ids.contains(id));
                if let Some(stop) = stop {
                    ids.truncate(stop + 1);
                }
                if let Some(budget) = request.thinking.filter(|_| !closed) {
                    // As the engine does: at its place in the reply, the id that ends the reasoning.
                    let at = budget.tokens.saturating_sub(generated);
                    if at < ids.len() && !ids[..at].contains(&budget.close) {
                        ids[at] = budget.close;
                    }
                    closed = ids.contains(&budget.close);
                }
                if let Some(top) = request.logprobs {
                    let told = ids.iter().map(|id| logprobs(*id, top, shared.info.vocab_size)).collect();
                    let _ = work.events.send(Event::Logprobs(told));
                }
                if first.is_none() {
                    first = Some(Instant::now());
                    stats.prefill_s = begun.elapsed().as_secs_f64();
                    let mut state = shared.state();
                    state.stats.prefilling -= 1;
                    state.stats.decoding += 1;
                } else {
                    stats.rounds += 1;
                }
                generated += ids.len();
                shared.state().stats.completion_tokens += ids.len() as u64;
                if work.events.send(Event::Tokens(ids)).is_err() {
                    outcome = Ok(Finish::Cancelled);
                    break;
                }
                if stop.is_some() {
                    break;
                }
                if generated >= request.max_tokens {
                    outcome = Ok(Finish::Length);
                    break;
                }
            }
        }
    }
    stats.decode_s = first.map_or(0.0, |at| at.elapsed().as_secs_f64());
    let mut state = shared.state();
    match first {
        Some(_) => state.stats.decoding -= 1,
        None => state.stats.prefilling -= 1,
    }
    state.busy[slot] = false;
    state.stats.requests += 1;
    state.stats.prompt_tokens += request.ids.len() as u64;
    state.stats.cached_tokens += stats.cached_tokens as u64;
    state.stats.rounds += stats.rounds as u64;
    state.stats.prefill_s += stats.prefill_s;
    state.stats.decode_s += stats.decode_s;
    state.stats.errors += u64::from(outcome.is_err());
    drop(state);
    let _ = work.events.send(match outcome {
        Ok(finish) => Event::Done { finish, stats },
        Err(error) => Event::Error(error),
    });
}

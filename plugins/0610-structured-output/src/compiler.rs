//! Compiles grammars off the engine's thread, within bounds, and keeps those that were used last.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::InferenceCapabilities;
use llguidance::{Matcher, ParserFactory};
use serde_json::Value;

use crate::asked::Asked;
use crate::grammar::{self, Source};
use crate::matcher::brief;
use crate::schema::{Problem, Rules};
use crate::tokens::Tokens;

/// Stack of a thread that compiles: schemas of the depth that a knob allows are walked by calls of calls.
const STACK: usize = 64 << 20;
/// Grammars that are compiled at once, of each lane.
const AT_ONCE: usize = 2;
/// Longer texts have a lane of their own, so that short ones do not wait behind them.
const SHORT: usize = 8 << 10;

/// A compiled grammar, as it is before the first token.
pub struct Compiled {
    matcher: Mutex<Matcher>,
    /// Pointers of keywords that are not enforced.
    pub unenforced: Vec<String>,
    /// Bytes that it is taken to be, for the cache.
    bytes: usize,
}

impl Compiled {
    /// A matcher of its own: nothing that one reply does is seen by another.
    pub fn matcher(&self) -> Matcher {
        lock(&self.matcher).deep_clone()
    }
}

/// Bounds of compiling.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// How schemas are looked at.
    pub rules: Rules,
    /// Bytes of what was asked for.
    pub bytes: usize,
    /// MiB of one grammar.
    pub mib: u64,
    /// How long a request waits.
    pub time: Duration,
    /// Grammars that are kept.
    pub entries: usize,
    /// Bytes of grammars that are kept.
    pub cache: usize,
}

/// The compiler of one rank.
pub struct Compiler {
    /// The vocabulary.
    pub tokens: Tokens,
    /// Bounds.
    pub bounds: Bounds,
    factory: ParserFactory,
    kept: Mutex<VecDeque<(Asked, Arc<Compiled>)>>,
    running: Mutex<[usize; 2]>,
    freed: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A place among those that compile; given back when it is dropped, whatever became of the work.
struct Place(Arc<Compiler>, usize);

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.0.running)[self.1] -= 1;
        self.0.freed.notify_all();
    }
}

/// What the library may take for one grammar: its figures are of parts, states and steps, each of a known size.
fn limits(mib: u64) -> ParserLimits {
    let kib = usize::try_from(mib.saturating_mul(1024)).unwrap_or(usize::MAX);
    ParserLimits {
        // Two KiB a state, half of the memory.
        max_lexer_states: kib / 4,
        // About 100 bytes a symbol, a quarter of the memory.
        max_grammar_size: kib.saturating_mul(10) / 4,
        // Steps of work: 50,000 and 14,000 a millisecond.
        initial_lexer_fuel: mib.saturating_mul(16_000),
        step_lexer_fuel: 400_000,
        step_max_items: 100_000,
        max_items_in_row: 4_000,
        // That would make compiling dear and masks cheap; masks are cheap enough.
        precompute_large_lexemes: false,
        verbose_errors: false,
    }
}

impl Compiler {
    /// A compiler for a vocabulary.
    ///
    /// # Errors
    /// What the library says.
    pub fn new(tokens: Tokens, bounds: Bounds) -> Result<Self, String> {
        let slices = SlicedBiasComputer::json_slices();
        let factory = ParserFactory::new(&tokens.env, InferenceCapabilities::default(), &slices);
        let mut factory = factory.map_err(|e| brief(&e))?;
        factory.quiet();
        *factory.limits_mut() = limits(bounds.mib);
        let (kept, running, freed) = (Mutex::default(), Mutex::default(), Condvar::new());
        Ok(Self { tokens, bounds, factory, kept, running, freed })
    }

    /// What is kept of a grammar.
    pub fn known(&self, asked: &Asked) -> Option<Arc<Compiled>> {
        let mut kept = lock(&self.kept);
        let at = kept.iter().position(|(known, _)| known == asked)?;
        let found = kept.remove(at)?;
        let compiled = found.1.clone();
        kept.push_back(found);
        Some(compiled)
    }

    fn keep(&self, asked: &Asked, compiled: &Arc<Compiled>) {
        let mut kept = lock(&self.kept);
        if kept.iter().any(|(known, _)| known == asked) {
            return;
        }
        kept.push_back((asked.clone(), compiled.clone()));
        let bytes =
            |kept: &VecDeque<(Asked, Arc<Compiled>)>| kept.iter().map(|(_, c)| c.bytes).sum::<usize>();
        while kept.len() > self.bounds.entries || bytes(&kept) > self.bounds.cache {
            kept.pop_front();
        }
    }

    /// Compiles on this thread.
    ///
    /// # Errors
    /// What cannot be enforced, and where.
    pub fn compile(&self, asked: &Asked) -> Result<Arc<Compiled>, Problem> {
        if let Some(known) = self.known(asked) {
            return Ok(known);
        }
        if asked.text.len() > self.bounds.bytes {
            let what = format!(
                "has {} bytes; the limit is {} (knob schema_kib)",
                asked.text.len(),
                self.bounds.bytes
            );
            return Err(Problem { at: asked.at.clone(), what });
        }
        let Source { grammar, mut unenforced, parts } =
            grammar::source(asked, &self.tokens, self.bounds.rules)?;
        let mut matcher = self.parsed(grammar).map_err(|what| self.at_fault(asked, parts, what))?;
        for warning in matcher.grammar_warnings() {
            // Its other warnings are of its own language, which no client writes.
            if warning.contains("oneOf") {
                unenforced.push(format!("{}: {}", asked.at, brief(&warning)));
            }
        }
        // Nothing can be told from outside of what it takes: the text is what it was made of.
        let bytes = 4096 + asked.text.len().saturating_mul(32);
        let compiled = Arc::new(Compiled { matcher: Mutex::new(matcher), unenforced, bytes });
        self.keep(asked, &compiled);
        Ok(compiled)
    }

    fn parsed(&self, grammar: TopLevelGrammar) -> Result<Matcher, String> {
        let made = catch_unwind(AssertUnwindSafe(|| {
            let mut matcher = Matcher::new(self.factory.create_parser(grammar));
            // The first mask shows what the first steps cost, and that anything can be said at all.
            let first = if matcher.is_error() { None } else { matcher.compute_mask_or_eos().err() };
            (matcher, first)
        }));
        let Ok((matcher, first)) = made else { return Err("the library fails on it".into()) };
        match (matcher.get_error(), first) {
            (Some(error), _) => Err(brief(&error)),
            (None, Some(error)) => Err(brief(&error)),
            (None, None) => {
                let fresh = matcher.deep_clone();
                Ok(fresh)
            }
        }
    }

    /// The part that does not compile by itself, else the whole.
    fn at_fault(&self, asked: &Asked, parts: Vec<(String, Value)>, what: String) -> Problem {
        for (at, alone) in parts.into_iter().take(64) {
            let alone = grammar::settled(alone, self.bounds.rules.lenient);
            if let Err(what) = self.parsed(TopLevelGrammar::from_json_schema(alone)) {
                return Problem { at, what };
            }
        }
        Problem { at: asked.at.clone(), what }
    }

    /// Compiles on a thread of its own and waits as long as a request may.
    ///
    /// # Errors
    /// What cannot be enforced, and where; a grammar that takes too long.
    pub fn within(self: &Arc<Self>, asked: &Asked) -> Result<Arc<Compiled>, Problem> {
        if let Some(known) = self.known(asked) {
            return Ok(known);
        }
        let end = Instant::now() + self.bounds.time;
        let late = || Problem {
            at: asked.at.clone(),
            what: format!("is not compiled within {:?} (knob compile_s)", self.bounds.time),
        };
        // Work that takes too long goes on to its bounds; others must not wait behind more than a few such.
        let lane = usize::from(asked.text.len() > SHORT);
        let mut running = lock(&self.running);
        while running[lane] >= AT_ONCE {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(late());
            }
            running = self.freed.wait_timeout(running, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        running[lane] += 1;
        drop(running);
        let (place, asked_for) = (Place(self.clone(), lane), asked.clone());
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("grammar".into()).stack_size(STACK);
        let spawned = thread.spawn(move || {
            // Who waited may be gone.
            let _ = tell.send(place.0.compile(&asked_for));
        });
        if let Err(error) = spawned {
            return Err(Problem {
                at: asked.at.clone(),
                what: format!("no thread to compile it on: {error}"),
            });
        }
        match told.recv_timeout(end.saturating_duration_since(Instant::now())) {
            Ok(compiled) if Instant::now() < end => compiled,
            // It is kept for who asks again.
            Ok(_) | Err(std::sync::mpsc::RecvTimeoutError::Timeout) => Err(late()),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                Err(Problem { at: asked.at.clone(), what: "the library fails on it".into() })
            }
        }
    }
}

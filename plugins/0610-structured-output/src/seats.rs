//! The constrained requests of one rank: where each reply stands, which drafts may stay, which tokens may come next.
//!
//! A window is a chain: row 0 the pending token, then drafts. Its masks follow from the tokens before them alone, so they are the
//! same whatever the window, the company and the rank. Nothing here changes where a reply stands but the tokens that were kept.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use plugfold_abi::points::{Attachment, BatchFacts, SequenceEvent};
use plugfold_abi::{OpError, Phase, View};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::asked::Asked;
use crate::compiler::{Compiled, Compiler};
use crate::matcher::{Stand, Tracker};
use crate::pool::Pool;
use crate::schema::Problem;

/// Name of the attachment.
pub const ATTACHMENT: &str = "grammar";

/// What goes with a constrained request to all ranks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Order {
    /// The grammar.
    pub asked: Asked,
    /// Ids that end replies.
    pub ends: Vec<u32>,
    /// Closes the reasoning, where the prompt ends inside of it.
    pub think_end: Option<u32>,
    /// Tokens of the prompt.
    pub prompt: u32,
}

/// What a reply says about its grammar.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    windows: u64,
    cut: u64,
    rows: u64,
    fill_s: f64,
    wait_s: f64,
    finished: bool,
    unenforced: Vec<String>,
}

impl Figures {
    /// As the reply's block shows it.
    pub fn block(&self) -> Value {
        let ms = |s: f64| (s * 1e6).round() / 1e3;
        let mut block = json!({
            "windows": self.windows, "cut": self.cut, "rows": self.rows,
            "fill_ms": ms(self.fill_s), "wait_ms": ms(self.wait_s), "finished": self.finished,
        });
        if !self.unenforced.is_empty() {
            block["unenforced"] = json!(self.unenforced);
        }
        block
    }
}

/// A grammar that is being compiled, or is.
enum Grammar {
    Compiling(std::sync::mpsc::Receiver<Result<Arc<Compiled>, Problem>>),
    Ready(Box<Tracker>),
    /// It cannot go on; every later window of the request fails with this.
    Failed(String),
}

/// Masks of a window.
#[derive(Default)]
struct Filled {
    start: u32,
    tokens: Vec<u32>,
    /// For each row, where its mask lies in `words`; none for a free row.
    rows: Vec<Option<usize>>,
    words: Vec<u32>,
}

/// A constrained request in its slot.
struct Seat {
    request: u64,
    order: Order,
    grammar: Grammar,
    /// Tokens at the end of what it began with that are its own reply already: it has stepped aside.
    before: Vec<u32>,
    /// Tokens that were kept and that the grammar has not taken yet, and where the reply stands after them: whoever fills the
    /// next masks takes them, on its thread.
    kept: Vec<u32>,
    stand: Stand,
    filled: Option<Filled>,
    /// The first position of the window whose masks a thread was asked to fill and nobody has begun, and its tokens.
    due: Option<u32>,
    due_tokens: Vec<u32>,
    /// Memory of the last window's masks.
    spare: Filled,
    width: usize,
    figures: Figures,
    /// Its figures were asked for.
    told: bool,
    /// Planted by tests: filling fails from this token of the reply on.
    fails_at: Option<usize>,
}

impl Seat {
    /// The grammar where the reply stands.
    fn tracker(&mut self) -> Result<&mut Tracker, String> {
        self.compiled();
        match &mut self.grammar {
            Grammar::Ready(tracker) => {
                for token in self.kept.drain(..) {
                    if !tracker.accept(token)? {
                        return Err(format!("the grammar does not allow token {token}, which was kept"));
                    }
                }
                Ok(tracker)
            }
            Grammar::Failed(why) => Err(why.clone()),
            Grammar::Compiling(_) => Err("the grammar is not compiled".into()),
        }
    }

    /// Waits for the grammar, if it is not there yet.
    fn compiled(&mut self) {
        if let Grammar::Compiling(told) = &self.grammar {
            let compiled = match told.recv() {
                Ok(Ok(compiled)) => Ok(compiled),
                Ok(Err(problem)) => Err(problem.to_string()),
                Err(_) => Err("the library fails on the grammar".into()),
            };
            self.settle(compiled);
        }
    }

    /// Tokens of the reply that are part of it for good.
    fn len(&self) -> usize {
        match &self.grammar {
            Grammar::Ready(tracker) => tracker.len() + self.kept.len(),
            _ => 0,
        }
    }

    fn settle(&mut self, compiled: Result<Arc<Compiled>, String>) {
        let made = compiled.and_then(|compiled| {
            self.figures.unenforced.clone_from(&compiled.unenforced);
            let ends = Arc::from(&self.order.ends[..]);
            let width = self.width as u32;
            let mut tracker = Tracker::new(compiled.matcher(), ends, self.order.think_end, width);
            for token in &self.before {
                if !tracker.accept(*token)? {
                    return Err(format!("the grammar does not allow token {token}, which the reply has"));
                }
            }
            Ok(tracker)
        });
        self.grammar = match made {
            Ok(tracker) => {
                self.stand = tracker.stand();
                Grammar::Ready(Box::new(tracker))
            }
            Err(why) => Grammar::Failed(why),
        };
    }

    /// Nothing more can be said of this reply.
    fn fail(&mut self, why: String) -> String {
        self.grammar = Grammar::Failed(why.clone());
        why
    }

    /// Whether any row of a forward has a mask, without the cost of any.
    fn constrains(&mut self, start: u32, tokens: &[u32]) -> bool {
        let Some(own) = self.own(start, tokens.len()) else { return false };
        self.compiled();
        let stand = self.stand;
        let Grammar::Ready(tracker) = &self.grammar else { return true };
        // Rows of the prompt but the last say nothing that is drawn.
        let tokens = &tokens[tokens.len() - own..];
        match stand {
            Stand::Over => false,
            Stand::Inside => !(own > 0 && tracker.ends(tokens[0])),
            Stand::Thinking => tokens.iter().any(|token| tracker.closes(*token)),
        }
    }

    /// How many of a forward's last rows hold tokens of the reply, where its last row is one that is drawn from.
    fn own(&self, start: u32, rows: usize) -> Option<usize> {
        let after = start as usize + rows;
        let prompt = self.order.prompt as usize + self.before.len();
        (after >= prompt).then(|| after - prompt).map(|own| own.min(rows))
    }

    fn is_filled(&self, start: u32, tokens: &[u32]) -> bool {
        self.filled.as_ref().is_some_and(|f| f.start == start && f.tokens == tokens)
    }

    /// Fills the masks that are due on another thread, unless that was done or the reply has gone on since: a thread may come late.
    /// What it fails with stays with the seat, and is told when the masks are asked for.
    fn ahead(&mut self) {
        if let Some(start) = self.due.take() {
            let tokens = std::mem::take(&mut self.due_tokens);
            let _ = self.fill(start, &tokens);
            self.due_tokens = tokens;
        }
    }

    /// Fills the masks of a forward's rows, unless they are there.
    fn fill(&mut self, start: u32, tokens: &[u32]) -> Result<(), String> {
        self.due = None;
        if self.is_filled(start, tokens) {
            return Ok(());
        }
        let began = Instant::now();
        let mut filled = self.filled.take().unwrap_or_else(|| std::mem::take(&mut self.spare));
        filled.start = start;
        filled.tokens.clear();
        filled.tokens.extend_from_slice(tokens);
        filled.rows.clear();
        filled.rows.resize(tokens.len(), None);
        filled.words.clear();
        let done = self.masks(start, tokens, &mut filled);
        self.figures.fill_s += began.elapsed().as_secs_f64();
        match done {
            Ok(rows) => {
                self.figures.windows += 1;
                self.figures.rows += rows;
                self.filled = Some(filled);
                Ok(())
            }
            Err(why) => {
                self.spare = filled;
                Err(self.fail(why))
            }
        }
    }

    fn masks(&mut self, start: u32, tokens: &[u32], filled: &mut Filled) -> Result<u64, String> {
        let Some(own) = self.own(start, tokens.len()) else { return Ok(0) };
        let (fails_at, words) = (self.fails_at, self.width.div_ceil(32));
        let prompt = self.order.prompt as usize;
        let tracker = self.tracker()?;
        let first = tokens.len() - own;
        if tracker.len() + prompt != start as usize + first {
            let (at, stands) = (start as usize + first, tracker.len() + prompt);
            return Err(format!("the matcher stands at token {stands} and is asked about {at}"));
        }
        let mut taken = 0;
        let mut rows = 0;
        // The row before the reply's first token is drawn from too, where it is in this forward.
        let mut row = first.checked_sub(1);
        loop {
            if fails_at.is_some_and(|at| tracker.len() >= at) {
                return Err("a fault was planted".into());
            }
            if let Some(row) = row
                && tracker.stand() == Stand::Inside
            {
                let at = filled.words.len();
                filled.words.resize(at + words, 0);
                tracker.mask(&mut filled.words[at..])?;
                filled.rows[row] = Some(at);
                rows += 1;
            }
            let next = first + taken;
            let Some(token) = tokens.get(next) else { break };
            if !tracker.accept(*token)? {
                if taken == 0 {
                    return Err(format!("the grammar does not allow token {token}, which was kept"));
                }
                // A draft that no mask above it allows: its row is never reached.
                break;
            }
            taken += 1;
            row = Some(next);
        }
        tracker.rollback(taken)?;
        Ok(rows)
    }

    /// How many drafts after the pending token may stay.
    fn cut(&mut self, pending: u32, drafts: &[u32]) -> Result<u32, String> {
        let tracker = self.tracker()?;
        if tracker.stand() == Stand::Over {
            return Ok(drafts.len() as u32);
        }
        if !tracker.accept(pending)? {
            return Err(format!("the grammar does not allow token {pending}, which was drawn"));
        }
        let mut keep = 0;
        for draft in drafts {
            // A draft that ends the reply would stand in a window for nothing.
            let ends = tracker.stand() == Stand::Inside && tracker.ends(*draft);
            if ends || !tracker.accept(*draft)? {
                break;
            }
            keep += 1;
        }
        tracker.rollback(keep + 1)?;
        self.figures.cut += (drafts.len() - keep) as u64;
        Ok(keep as u32)
    }

    fn over(&self) -> Over {
        let inside = matches!(&self.grammar, Grammar::Ready(_)) && self.stand == Stand::Inside;
        Over { figures: self.figures.clone(), inside, ends: self.order.ends.clone() }
    }

    /// Tokens became part of the reply.
    fn committed(&mut self, start: u32, tokens: &[u32]) -> Result<(), String> {
        self.due = None;
        if let Some(filled) = self.filled.take() {
            self.spare = filled;
        }
        self.compiled();
        let stands = self.len() + self.order.prompt as usize;
        let Grammar::Ready(tracker) = &self.grammar else { return self.tracker().map(|_| ()) };
        if stands != start as usize {
            return Err(format!("the matcher stands at token {stands} and {start} was kept"));
        }
        for token in tokens {
            self.stand = tracker.after(self.stand, *token);
        }
        self.kept.extend_from_slice(tokens);
        if self.stand == Stand::Over {
            self.figures.finished = true;
        }
        Ok(())
    }
}

/// What is left of a reply.
struct Over {
    figures: Figures,
    /// Where it stood before its last token, which is in no window.
    inside: bool,
    ends: Vec<u32>,
}

/// All constrained requests of a rank.
pub struct Seats {
    compiler: Arc<Compiler>,
    pool: Pool,
    slots: Mutex<HashMap<u32, Arc<Mutex<Seat>>>>,
    /// What is left of replies that are over, until they are asked for; on rank 0 only.
    over: Mutex<HashMap<u64, Over>>,
    lead: bool,
    fails_at: Option<usize>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The rows of each sequence of a forward.
fn sequences<'b>(batch: &'b BatchFacts<'_>) -> impl Iterator<Item = (u32, u32, std::ops::Range<usize>)> + 'b {
    let mut from = 0;
    batch.slots.iter().zip(batch.starts.iter()).zip(batch.rows.iter()).map(move |((slot, start), rows)| {
        let range = from..from + *rows as usize;
        from = range.end;
        (*slot, *start, range)
    })
}

impl Seats {
    /// No requests yet. `fails_at` is planted by tests.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn new(
        compiler: Arc<Compiler>,
        threads: usize,
        lead: bool,
        fails_at: Option<usize>,
    ) -> std::io::Result<Self> {
        let pool = Pool::new(threads)?;
        Ok(Self { compiler, pool, slots: Mutex::default(), over: Mutex::default(), lead, fails_at })
    }

    fn of(&self, slot: u32) -> Option<Arc<Mutex<Seat>>> {
        lock(&self.slots).get(&slot).cloned()
    }

    /// What happened to the sequence of a slot.
    ///
    /// # Errors
    /// An attachment that cannot be read.
    pub fn event(&self, slot: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        match event {
            SequenceEvent::Begun { request, ids, attachments, .. } => {
                let mine = attachments.iter().find(|a| a.name.as_str() == ATTACHMENT);
                let seat = mine.map(|mine| self.seat(*request, ids, mine)).transpose()?;
                let mut seats = lock(&self.slots);
                seats.remove(&slot);
                if let Some(seat) = seat {
                    seats.insert(slot, Arc::new(Mutex::new(seat)));
                }
            }
            SequenceEvent::Committed { start, tokens } => {
                if let Some(seat) = self.of(slot) {
                    let mut seat = lock(&seat);
                    if let Err(why) = seat.committed(*start, tokens) {
                        // The next window of the request ends with it.
                        seat.fail(why);
                    }
                }
            }
            SequenceEvent::Ended { .. } => {
                if let Some(seat) = lock(&self.slots).remove(&slot)
                    && self.lead
                {
                    let seat = lock(&seat);
                    if !seat.told {
                        lock(&self.over).insert(seat.request, seat.over());
                    }
                }
            }
            SequenceEvent::Absorbed { .. } | SequenceEvent::Saved { .. } => {}
        }
        Ok(())
    }

    fn seat(&self, request: u64, ids: &[u32], mine: &Attachment) -> Result<Seat, OpError> {
        let order: Order = serde_json::from_slice(&mine.bytes)
            .map_err(|e| OpError::new(format!("the grammar of request {request} cannot be read: {e}")))?;
        let prompt = (order.prompt as usize).min(ids.len());
        let mut seat = Seat {
            request,
            before: ids[prompt..].to_vec(),
            grammar: Grammar::Failed("not compiled".into()),
            kept: Vec::new(),
            stand: Stand::Inside,
            filled: None,
            due: None,
            due_tokens: Vec::new(),
            spare: Filled::default(),
            width: self.compiler.tokens.width as usize,
            figures: Figures::default(),
            told: false,
            fails_at: self.fails_at,
            order,
        };
        let (compiler, asked) = (self.compiler.clone(), seat.order.asked.clone());
        if let Some(known) = compiler.known(&asked) {
            seat.settle(Ok(known));
        } else {
            // Another rank than the one that checked it, or it was forgotten since. The prompt runs meanwhile.
            let (tell, told) = std::sync::mpsc::channel();
            let work = move || {
                // Who waits may be gone.
                let _ = tell.send(compiler.compile(&asked));
            };
            let thread = std::thread::Builder::new().name("grammar".into()).stack_size(64 << 20);
            thread
                .spawn(work)
                .map_err(|e| OpError::new(format!("no thread to compile a grammar on: {e}")))?;
            seat.grammar = Grammar::Compiling(told);
        }
        Ok(seat)
    }

    /// 1 when a row of the forward has a mask; then masks are begun.
    pub fn word(&self, batch: &BatchFacts<'_>) -> u64 {
        if batch.phase == Phase::Draft || batch.tokens.is_empty() || lock(&self.slots).is_empty() {
            return 0;
        }
        let mut any = 0;
        for (slot, start, rows) in sequences(batch) {
            let Some(seat) = self.of(slot) else { continue };
            let tokens = &batch.tokens[rows];
            let mut held = lock(&seat);
            if held.constrains(start, tokens) {
                any = 1;
                if !self.pool.is_idle() && !held.is_filled(start, tokens) {
                    held.due = Some(start);
                    held.due_tokens.clear();
                    held.due_tokens.extend_from_slice(tokens);
                    drop(held);
                    self.pool.push(Box::new(move || lock(&seat).ahead()));
                }
            }
        }
        any
    }

    /// What a thread does that was asked for the masks of a slot's window.
    pub fn ahead(&self, slot: u32) {
        if let Some(seat) = self.of(slot) {
            lock(&seat).ahead();
        }
    }

    /// Writes where the mask of each row lies: two words a row, an address.
    ///
    /// # Errors
    /// The reply of a request cannot go on.
    pub fn addresses(&self, batch: &BatchFacts<'_>, entries: View) -> Result<(), OpError> {
        if batch.phase == Phase::Draft {
            // Its tokens are those that follow its rows: proposals, which are cut later.
            return Ok(());
        }
        for (slot, start, rows) in sequences(batch) {
            let Some(seat) = self.of(slot) else { continue };
            let tokens = &batch.tokens[rows.clone()];
            let began = Instant::now();
            let mut seat = lock(&seat);
            if !seat.constrains(start, tokens) {
                continue;
            }
            // Where no thread has come to it yet, this one does it.
            seat.fill(start, tokens).map_err(OpError::new)?;
            seat.figures.wait_s += began.elapsed().as_secs_f64();
            let Some(filled) = &seat.filled else { continue };
            for (row, at) in rows.zip(&filled.rows) {
                let address = at.map_or(0, |at| filled.words[at..].as_ptr() as u64);
                #[allow(clippy::cast_ptr_alignment)]
                // fields lie on multiples of 64 bytes, entries are of two words
                let entry = entries.ptr.cast::<u32>();
                // SAFETY: the view has a row of two words for each row of the batch, and this hook alone writes it.
                unsafe {
                    let entry = entry.add(row * entries.stride as usize);
                    *entry = address as u32;
                    *entry.add(1) = (address >> 32) as u32;
                }
            }
        }
        Ok(())
    }

    /// How many drafts may stay.
    ///
    /// # Errors
    /// The reply of the request cannot go on.
    pub fn cut(&self, slot: u32, pending: u32, drafts: &[u32]) -> Result<u32, OpError> {
        let Some(seat) = self.of(slot) else { return Ok(drafts.len() as u32) };
        let mut seat = lock(&seat);
        let cut = seat.cut(pending, drafts);
        cut.map_err(|why| OpError::new(seat.fail(why)))
    }

    /// Figures of a reply that is over, whose last token this was.
    pub fn figures(&self, request: u64, last: Option<u32>) -> Option<Figures> {
        let over = lock(&self.over).remove(&request);
        let over = over.or_else(|| {
            let seats: Vec<_> = lock(&self.slots).values().cloned().collect();
            seats.into_iter().find_map(|seat| {
                let mut seat = lock(&seat);
                (seat.request == request && !seat.told).then(|| {
                    seat.told = true;
                    seat.over()
                })
            })
        });
        let Over { mut figures, inside, ends } = over?;
        figures.finished |= inside && last.is_some_and(|last| ends.contains(&last));
        Some(figures)
    }
}

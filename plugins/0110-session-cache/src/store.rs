//! The links: store, marks, and what a reply tells of the store.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use plugfold_0110_session_cache_api::{Room, Session, SessionStore};
use plugfold_abi::points::{
    DraftRows, Ended, Figure, Host, HostObject, Level, Mark, Observer, Planner, RequestFacts, SaveFacts,
    Sequences, SequencesObject, Store, StoreOffer, interest,
};
use plugfold_abi::{List, OpError, Slice, Text, TextBuf};
use serde::{Deserialize, Serialize};

use crate::index::{Decision, Ids, Index, SLAB, Save, Skipped};
use crate::keys::{Key, Kind, PAGE};
use crate::marks::Rules;
use crate::pages::{Layout, Pages, Rows, tail_bytes};

/// Bytes a millisecond that a restore copies, for the price of an offer.
const COPY_BYTES_MS: f64 = 10e6;

/// The settings.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Bytes that the store may hold on this rank.
    pub budget: u64,
    /// Bytes that must stay free.
    pub reserve: u64,
    /// Where prompts are marked.
    pub rules: Rules,
}

/// What the caches of a slot hold of shared pages, from the first on.
#[derive(Clone, Debug, Default)]
struct Live {
    keys: Vec<Key>,
    kind: Option<Kind>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    hits: u64,
    copied: u64,
    already: u64,
    stored: u64,
    duplicates: u64,
    evicted: u64,
    skipped: u64,
}

struct Open {
    index: Index,
    pages: Pages,
}

#[derive(Default)]
struct State {
    open: Option<Open>,
    live: Vec<Live>,
    counts: Counts,
    /// The prompt looked at last: the same request is asked about again and again while it waits.
    prompt: Option<(u64, Ids)>,
    warned: [bool; 3],
}

/// What rank 0 tells of a save.
#[derive(Debug, Serialize, Deserialize)]
struct Sent {
    /// Its index before the save.
    digest: u64,
    /// Bytes that it counts for the entry: shares of a model may differ by a head between ranks.
    private: u64,
    outcome: Outcome,
}

#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    Stored { id: u64, evicted: Vec<u64> },
    Duplicate(u64),
}

impl From<Outcome> for Decision {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Stored { id, evicted } => Decision::Stored { id, evicted },
            Outcome::Duplicate(id) => Decision::Duplicate(id),
        }
    }
}

/// Reads what rank 0 decided.
fn sent(decision: &[u8]) -> Result<Sent, OpError> {
    let unread = |e: postcard::Error| OpError::fatal(format!("a decision that cannot be read: {e}"));
    postcard::from_bytes(decision).map_err(unread)
}

/// The store.
pub struct Sessions {
    settings: Settings,
    host: Option<&'static HostObject>,
    state: Mutex<State>,
}

/// What a slot's state consists of, besides the bytes.
struct Facts {
    save: Save,
    tail: Vec<(Rows, u32, u32)>,
}

fn not_open() -> OpError {
    OpError::fatal("the session store was not opened")
}

impl Live {
    fn holds(&self, pages: &[Key]) -> usize {
        self.keys.iter().zip(pages).take_while(|(a, b)| a == b).count()
    }
}

impl Open {
    /// Looks at the committed state of a slot.
    fn facts(&self, save: &SaveFacts<'_>, sequences: &SequencesObject) -> Result<Facts, OpError> {
        let layout = self.pages.layout();
        let length = save.ids.len();
        let (draft, shared, rows) = match sequences.draft_rows(save.slot)? {
            DraftRows::Good(rows) => (true, true, (rows as usize).min(length)),
            // Whatever they are: together with the parts' records they are the drafter's state.
            DraftRows::Silent => (true, false, length),
            DraftRows::Broken => (false, false, 0),
        };
        let kind = Kind { formats: layout.formats, tag: save.tag, grid: save.grid, draft_rows: shared };
        let ids = Ids::new(&save.ids);
        let pages = kind.pages(&ids.ids, &ids.chain, rows);
        let mut tail = layout.tail(pages.len(), shared, length, rows);
        for own in &sequences.part_rows(save.slot)? {
            tail.push((layout.own_rows(own.family), own.first, own.rows));
        }
        let key = kind.entry(&ids.ids, draft);
        let mut parts = List::new();
        sequences.parts(save.slot, &mut parts)?;
        let private = (layout.state_bytes + parts.len() + 4 * length) as u64 + tail_bytes(&tail);
        let save = Save { key, ids, kind, draft, pages: pages.into(), private };
        Ok(Facts { save, tail })
    }
}

impl Sessions {
    /// An empty store.
    pub fn new(settings: Settings, host: Option<&'static HostObject>) -> Self {
        Self { settings, host, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn say(&self, level: Level, message: &str) {
        if let Some(host) = self.host {
            // A log that does not work has nobody to tell.
            let _ = host.log(level, Text::from(message));
        }
    }

    /// A line on the settings, once the layout is known.
    fn introduce(&self, layout: &Layout) {
        let Settings { budget, reserve, rules } = self.settings;
        let page = layout.page_bytes();
        self.say(
            Level::Info,
            &format!(
                "sessions: {budget} bytes, pages of {PAGE} positions and {page} bytes ({} bytes a token), {} bytes of state \
                 a snapshot; marks every {} tokens, forks {} tokens past the resume point; {reserve} bytes stay free",
                page / PAGE as u64,
                layout.state_bytes,
                rules.every,
                rules.fork_min
            ),
        );
    }

    fn skipped(&self, state: &mut State, why: Skipped, save: &Save) {
        state.counts.skipped += 1;
        self.warn(state, why, save.ids.ids.len());
    }

    /// Says once a reason why a session of so many tokens is not kept.
    fn warn(&self, state: &mut State, why: Skipped, n: usize) {
        if !std::mem::replace(&mut state.warned[why as usize], true) {
            let text = match why {
                Skipped::TooLarge => "it is larger than the whole budget: raise `gib`",
                Skipped::Pinned => "what it shares pages with fills the budget: raise `gib`",
                Skipped::Memory => "memory would fall below the reserve: lower `gib` or `reserve_gib`",
            };
            self.say(Level::Warn, &format!("a session of {n} tokens was not kept: {text} (told once)"));
        }
    }

    /// The prompt of a request, with digests.
    fn prompt(state: &mut State, request: &RequestFacts<'_>) -> Ids {
        match &state.prompt {
            Some((number, ids)) if *number == request.request && *ids.ids == request.ids[..] => ids.clone(),
            _ => {
                let ids = Ids::new(&request.ids);
                state.prompt = Some((request.request, ids.clone()));
                ids
            }
        }
    }

    /// Figures by name.
    fn list(state: &State, budget: u64) -> Vec<(&'static str, f64)> {
        let (entries, pages) = state.open.as_ref().map_or((0, 0), |o| o.index.counts());
        let used = state.open.as_ref().map_or(0, |o| o.index.used());
        let c = &state.counts;
        let whole = [
            ("entries", entries as u64),
            ("pages", pages as u64),
            ("used_bytes", used),
            ("budget_bytes", budget),
            ("hits", c.hits),
            ("copied_pages", c.copied),
            ("skipped_pages", c.already),
            ("stored", c.stored),
            ("duplicates", c.duplicates),
            ("evicted", c.evicted),
            ("skipped", c.skipped),
        ];
        whole.map(|(name, n)| (name, n as f64)).to_vec()
    }
}

impl Store for Sessions {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("sessions".into())
    }

    fn open(&self, sequences: &SequencesObject) -> Result<(), OpError> {
        let draft = sequences.draft_rows(0)? != DraftRows::Broken;
        let layout = Layout::of(&sequences.families()?, draft)?;
        self.introduce(&layout);
        let index = Index::new(self.settings.budget, layout.page_bytes() * u64::from(SLAB));
        self.state().open = Some(Open { index, pages: Pages::new(layout) });
        Ok(())
    }

    fn offer(&self, request: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        let mut offers = List::new();
        if !request.draft {
            return Ok(offers);
        }
        let mut state = self.state();
        let prompt = Self::prompt(&mut state, request);
        let State { open: Some(open), live, .. } = &*state else { return Err(not_open()) };
        let found = open.index.find(&prompt, request.tag, request.draft_layer);
        let Some((id, length)) = found else { return Ok(offers) };
        let Some(entry) = open.index.entry(id) else { return Ok(offers) };
        // The slot that has most of it already.
        let pages = &entry.save.pages;
        let there =
            live.iter().map(|l| l.holds(pages)).enumerate().max_by_key(|(slot, n)| (*n, usize::MAX - slot));
        let (slot, there) = there.filter(|(_, n)| *n > 0).map_or((u32::MAX, 0), |(slot, n)| (slot as u32, n));
        let copied = (pages.len() - there) as u64 * open.pages.layout().page_bytes() + entry.save.private;
        let price_ms = (copied as f64 / COPY_BYTES_MS) as f32;
        offers.push(StoreOffer { store: 0, ticket: id, length: length as u32, price_ms, slot });
        Ok(offers)
    }

    fn common_prefix(&self, ids: Slice<'_, u32>) -> Result<u32, OpError> {
        let state = self.state();
        let open = state.open.as_ref().ok_or_else(not_open)?;
        Ok(open.index.common_prefix(&Ids::new(&ids)) as u32)
    }

    fn decide(&self, save: &SaveFacts<'_>, sequences: &SequencesObject) -> Result<List<u8>, OpError> {
        if !save.draft {
            return Ok(List::new());
        }
        let mut state = self.state();
        let open = state.open.as_ref().ok_or_else(not_open)?;
        let facts = open.facts(save, sequences)?;
        let room = sequences.free_bytes()?.saturating_sub(self.settings.reserve);
        let outcome = match open.index.decide(&facts.save, room) {
            Decision::Stored { id, evicted } => Outcome::Stored { id, evicted },
            Decision::Duplicate(id) => Outcome::Duplicate(id),
            Decision::Skipped(why) => {
                self.skipped(&mut state, why, &facts.save);
                return Ok(List::new());
            }
        };
        let sent = Sent { digest: open.index.digest(), private: facts.save.private, outcome };
        let bytes = postcard::to_stdvec(&sent).map_err(|e| OpError::new(e.to_string()))?;
        Ok(bytes.into())
    }

    fn fits(
        &self,
        save: &SaveFacts<'_>,
        decision: Slice<'_, u8>,
        sequences: &SequencesObject,
    ) -> Result<bool, OpError> {
        let decision = Decision::from(sent(&decision)?.outcome);
        let mut state = self.state();
        let open = state.open.as_ref().ok_or_else(not_open)?;
        // By this rank's own bytes: they are what it takes here.
        let facts = open.facts(save, sequences)?;
        let room = sequences.free_bytes()?.saturating_sub(self.settings.reserve);
        let fits = open.index.growth(&facts.save, &decision) <= room;
        if !fits {
            self.warn(&mut state, Skipped::Memory, save.ids.len());
        }
        Ok(fits)
    }

    fn refused(&self, _: &SaveFacts<'_>) -> Result<(), OpError> {
        self.state().counts.skipped += 1;
        Ok(())
    }

    fn save(
        &self,
        save: &SaveFacts<'_>,
        decision: Slice<'_, u8>,
        sequences: &SequencesObject,
    ) -> Result<(), OpError> {
        let sent = sent(&decision)?;
        let mut state = self.state();
        let State { open: Some(open), live, counts, .. } = &mut *state else { return Err(not_open()) };
        let mine = open.index.digest();
        if mine != sent.digest {
            return Err(OpError::fatal(format!(
                "the index of sessions differs between ranks: {mine:08x} here, {:08x} on rank 0",
                sent.digest
            )));
        }
        let mut facts = open.facts(save, sequences)?;
        facts.save.private = sent.private;
        let decision = Decision::from(sent.outcome);
        let changes = open.index.apply(&facts.save, &decision).map_err(|e| OpError::fatal(e.to_string()))?;
        for id in &changes.evicted {
            open.pages.drop_entry(*id);
        }
        for slab in &changes.released {
            open.pages.drop_slab(*slab);
        }
        counts.evicted += changes.evicted.len() as u64;
        if matches!(decision, Decision::Stored { .. }) {
            counts.stored += 1;
            for (page, at) in &changes.fresh {
                open.pages.take_page(sequences, save.slot, *page, *at, facts.save.kind.draft_rows)?;
            }
            open.pages.take_private(sequences, save.slot, changes.id, &facts.tail)?;
        } else {
            counts.duplicates += 1;
        }
        *slot_of(live, save.slot) = Live { keys: facts.save.pages.to_vec(), kind: Some(facts.save.kind) };
        Ok(())
    }

    fn resume(&self, ticket: u64, slot: u32, sequences: &SequencesObject) -> Result<bool, OpError> {
        let mut state = self.state();
        let State { open: Some(open), live, counts, .. } = &mut *state else { return Err(not_open()) };
        // Counts as use whatever comes of it, so that all ranks keep the same order.
        open.index.touch(ticket);
        let Some(entry) = open.index.entry(ticket) else { return Ok(false) };
        let save = &entry.save;
        let live = slot_of(live, slot);
        let have = std::mem::take(live);
        let there = have.holds(&save.pages);
        let mut page = there;
        while page < save.pages.len() {
            let at = |p: usize| save.pages.get(p).and_then(|key| open.index.page(key)).map(|found| found.0);
            let gone = || OpError::new(format!("page {page} of entry {ticket} is not stored"));
            let first = at(page).ok_or_else(gone)?;
            let follows =
                |n: usize| at(page + n).is_some_and(|a| a == first + n as u32 && a / SLAB == first / SLAB);
            let count = (1..SLAB as usize).take_while(|n| follows(*n)).count() + 1;
            open.pages.put_pages(sequences, slot, page, first, count, save.kind.draft_rows)?;
            page += count;
        }
        open.pages.put_private(sequences, slot, ticket, &save.ids.ids)?;
        counts.hits += 1;
        counts.copied += (save.pages.len() - there) as u64;
        counts.already += there as u64;
        *live = Live { keys: save.pages.to_vec(), kind: Some(save.kind) };
        Ok(true)
    }

    fn digest(&self) -> Result<u64, OpError> {
        Ok(self.state().open.as_ref().ok_or_else(not_open)?.index.digest())
    }

    fn overwritten(&self, slot: u32, length: u32) -> Result<(), OpError> {
        let mut state = self.state();
        let live = slot_of(&mut state.live, slot);
        let Some(kind) = live.kind else { return Ok(()) };
        let stays = (0..live.keys.len()).take_while(|p| kind.key_end(*p) <= length as usize).count();
        live.keys.truncate(stays);
        Ok(())
    }

    fn figures(&self) -> Result<List<Figure>, OpError> {
        let list = Self::list(&self.state(), self.settings.budget);
        Ok(list.into_iter().map(|(name, value)| Figure { name: name.into(), value }).collect())
    }
}

fn slot_of(live: &mut Vec<Live>, slot: u32) -> &mut Live {
    let slot = slot as usize;
    if live.len() <= slot {
        live.resize(slot + 1, Live::default());
    }
    &mut live[slot]
}

impl SessionStore for Sessions {
    fn sessions(&self) -> Result<List<Session>, OpError> {
        let state = self.state();
        let open = state.open.as_ref().ok_or_else(not_open)?;
        let of = |(id, e): (u64, &crate::index::Entry)| Session {
            id,
            length: e.save.ids.ids.len() as u32,
            tag: e.save.kind.tag,
            draft: e.save.draft,
            pages: e.save.pages.len() as u32,
            private_bytes: e.save.private,
        };
        Ok(open.index.entries().map(of).collect())
    }

    fn ids(&self, id: u64) -> Result<List<u32>, OpError> {
        let state = self.state();
        let open = state.open.as_ref().ok_or_else(not_open)?;
        Ok(open.index.entry(id).map_or_else(List::new, |e| e.save.ids.ids.to_vec().into()))
    }

    fn live_pages(&self, slot: u32, id: u64) -> Result<u32, OpError> {
        let state = self.state();
        let open = state.open.as_ref().ok_or_else(not_open)?;
        let (Some(live), Some(entry)) = (state.live.get(slot as usize), open.index.entry(id)) else {
            return Ok(0);
        };
        Ok(live.holds(&entry.save.pages) as u32)
    }

    fn room(&self) -> Result<Room, OpError> {
        let used = self.state().open.as_ref().ok_or_else(not_open)?.index.used();
        Ok(Room { used, budget: self.settings.budget })
    }
}

/// The link of `plan.marks`.
pub struct Marks(pub Arc<Sessions>);

impl Planner for Marks {
    fn marks(&self, request: &RequestFacts<'_>, resumed: u32, marks: &mut List<Mark>) -> Result<(), OpError> {
        if !request.draft {
            return Ok(());
        }
        let mut state = self.0.state();
        let prompt = Sessions::prompt(&mut state, request);
        let open = state.open.as_ref().ok_or_else(not_open)?;
        let common = open.index.common_prefix(&prompt) as u32;
        let tokens = request.ids.len() as u32;
        for (at, reason) in self.0.settings.rules.marks(tokens, resumed, request.grid, common) {
            let stored = open.index.stored(&prompt.ids[..at as usize], request.tag, request.draft_layer);
            if !stored {
                marks.push(Mark { at, reason: reason.into() });
            }
        }
        Ok(())
    }
}

/// What a reply tells of the store.
pub struct Told(pub Arc<Sessions>);

impl Observer for Told {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::REQUEST)
    }

    fn request(&self, _: &Ended<'_>) -> Result<TextBuf, OpError> {
        let list = Sessions::list(&self.0.state(), self.0.settings.budget);
        let told = ["entries", "pages", "used_bytes", "budget_bytes"];
        let fields = list.iter().filter(|(name, _)| told.contains(name));
        let fields: Vec<String> = fields.map(|(name, n)| format!("\"{name}\":{n}")).collect();
        Ok(format!("{{\"sessions\":{{{}}}}}", fields.join(",")).into())
    }
}

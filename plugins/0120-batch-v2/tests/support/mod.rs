//! The tiny model in this process, on one rank or several, with hooks; shared by the tests of the planning plugins.
#![allow(dead_code)] // each test program uses its part
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;

use plugfold_abi::points::{
    Choice, DraftCut, DraftCutObject, DraftPolicy, DraftPolicyObject, Drafter, DrafterObject, ForwardsObject,
    NO_DRAFTER, Observer, ObserverObject, Proposal, RequestFacts, RoundDone, Rule, SaveFacts, SaveKind,
    SequenceEvent, SequenceFacts, Sequences, SequencesObject, Store, StoreObject, StoreOffer, interest,
};
use plugfold_abi::{Addressing, List, Maybe, OpError, Slice, Text, TextBuf};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::{Options, Rank, StartError};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{Event, Finish, Handle, Request, RequestStats, Sampling, Service};

/// The model's folder.
pub fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny")
}

/// Options for it.
pub fn options(slots: usize) -> Options {
    Options { slots, context: Some(1024), ..Options::new(tiny()) }
}

/// Loads all ranks; the followers' ends are in the handles.
#[allow(clippy::type_complexity)]
pub fn start(
    options: &Options,
    ranks: usize,
    hooks: impl Fn(usize) -> Hooks,
) -> (Result<Engine, StartError>, Vec<thread::JoinHandle<Result<(), StartError>>>) {
    let mut worlds = World::local(ranks).unwrap();
    let mut followers = Vec::new();
    for world in worlds.drain(1..) {
        let rank = world.rank();
        let core = CoreOptions { hooks: Arc::new(hooks(rank)), ..CoreOptions::default() };
        let options = options.clone();
        followers.push(thread::spawn(move || Rank::load(&options, core, world)?.follow()));
    }
    let core = CoreOptions { hooks: Arc::new(hooks(0)), ..CoreOptions::default() };
    let lead = Rank::load(options, core, worlds.remove(0)).map(|rank| Engine::start(rank).unwrap());
    (lead, followers)
}

/// An engine that has to start.
pub fn engine(options: &Options, ranks: usize, hooks: impl Fn(usize) -> Hooks) -> Engine {
    start(options, ranks, hooks).0.unwrap_or_else(|e| panic!("{e}"))
}

/// Pseudo-random ids below 480.
pub fn ids(seed: u64, n: usize) -> Vec<u32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state % 480) as u32
    };
    (0..n).map(|_| next()).collect()
}

pub const SAMPLED: Sampling = Sampling { temperature: 0.8, top_k: 20, top_p: 0.9, min_p: 0.0, seed: Some(7) };

pub fn request(ids: Vec<u32>, tokens: usize) -> Request {
    Request { ids, max_tokens: tokens, ..Request::default() }
}

/// The reply and what it took.
pub fn outcome(handle: &Handle) -> Result<(Vec<u32>, RequestStats, Finish), String> {
    let mut tokens = Vec::new();
    for event in &handle.events {
        match event {
            Event::Tokens(new) => tokens.extend(new),
            Event::Done { finish, stats } => return Ok((tokens, stats, finish)),
            Event::Error(error) => return Err(error.to_string()),
            Event::Prefill { .. } | Event::Logprobs(_) => {}
        }
    }
    panic!("the events ended without a last one")
}

pub fn ask(engine: &Engine, request: Request) -> (Vec<u32>, RequestStats) {
    let handle = engine.submit(request).unwrap();
    let (tokens, stats, _) = outcome(&handle).unwrap();
    (tokens, stats)
}

/// The reply of an engine that does nothing but this, one token a round.
pub fn alone(request: &Request) -> Vec<u32> {
    let engine = engine(&options(1), 1, |_| Hooks::default());
    ask(&engine, Request { draft: false, background: false, policy: String::new(), ..request.clone() }).0
}

/// Digests of committed states, by ids.
pub type States = Arc<Mutex<BTreeMap<(SaveMoment, Vec<u32>), u64>>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SaveMoment {
    Prompt,
    Reply,
}

/// A store that keeps nothing and notes the whole committed state whenever one could be kept.
pub struct Spy(pub States);

impl Store for Spy {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("spy".into())
    }
    fn offer(&self, _: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        Ok(List::new())
    }
    fn decide(&self, save: &SaveFacts<'_>, sequences: &SequencesObject) -> Result<List<u8>, OpError> {
        let moment = match save.kind {
            SaveKind::Mark => return Ok(List::new()),
            SaveKind::Prompt => SaveMoment::Prompt,
            SaveKind::Reply => SaveMoment::Reply,
        };
        let mut bytes = List::new();
        sequences.state(save.slot, &mut bytes)?;
        for (i, info) in sequences.families()?.iter().enumerate() {
            let f = &info.family;
            if f.addressing == Addressing::Linear && f.owner == plugfold_abi::points::Owner::Model {
                let rows = save.ids.len() as u32 / f.positions_a_row;
                sequences.gather(save.slot, i as u32, 0, rows, &mut bytes)?;
            }
        }
        let digest = bytes
            .iter()
            .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3));
        self.0.lock().unwrap().insert((moment, save.ids.to_vec()), digest);
        Ok(List::new())
    }
    fn save(&self, _: &SaveFacts<'_>, _: Slice<'_, u8>, _: &SequencesObject) -> Result<(), OpError> {
        Ok(())
    }
    fn resume(&self, _: u64, _: u32, _: &SequencesObject) -> Result<bool, OpError> {
        Ok(false)
    }
}

pub fn spy(hooks: &mut Hooks) -> States {
    let states = States::default();
    hooks.add_object("spy", StoreObject::new(Spy(states.clone()))).unwrap();
    states
}

/// Proposes what followed the last token the last time, or ids at random.
struct Guess {
    name: &'static str,
    blind: bool,
}

impl Drafter for Guess {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(self.name.into())
    }
    fn propose(
        &self,
        asks: Slice<'_, plugfold_abi::points::Ask<'_>>,
        _: &ForwardsObject,
    ) -> Result<List<Proposal>, OpError> {
        let one = |ask: &plugfold_abi::points::Ask<'_>| {
            let all = ask.ids.get_ref();
            let before = &all[..all.len() - 1];
            let at = before.iter().rposition(|id| *id == ask.pending).unwrap_or(0);
            let found = if self.blind {
                ids(u64::from(ask.length), 8)
            } else {
                before[at..].iter().skip(1).copied().collect()
            };
            let tokens: Vec<u32> = found.into_iter().take(ask.budget as usize).collect();
            Proposal { tokens: tokens.into(), probabilities: List::new() }
        };
        Ok(asks.iter().map(one).collect())
    }
}

/// `gN`: the first drafter with budget N, `bN`: the second.
struct ByName;

impl DraftPolicy for ByName {
    fn accepts(&self, policy: Text<'_>) -> Result<Maybe<TextBuf>, OpError> {
        Ok(Maybe::RSome(policy.get_str().into()))
    }
    fn decide(&self, facts: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> Result<(), OpError> {
        for (f, choice) in facts.iter().zip(choices.iter_mut()) {
            let budget = f.policy.get_str().get(1..).and_then(|n| n.parse().ok()).unwrap_or(0);
            let drafter = match f.policy.get_str().chars().next() {
                Some('g') => 0,
                Some('b') => 1,
                _ => NO_DRAFTER,
            };
            *choice = Choice { drafter, budget, rule: Rule { floor: 0.0, min_match: 0 } };
        }
        Ok(())
    }
}

/// Two drafters, one that may be right and one that never is.
pub fn guesses(hooks: &mut Hooks) {
    for (name, blind) in [("guess", false), ("blind", true)] {
        hooks.add_object("drafts", DrafterObject::new(Guess { name, blind })).unwrap();
    }
    by_name(hooks);
}

/// The policy without drafters of its own.
pub fn by_name(hooks: &mut Hooks) {
    hooks.add_object("drafts", DraftPolicyObject::new(ByName)).unwrap();
}

/// Everything that drafters proposed, in order.
pub type Proposals = Arc<Mutex<Vec<Vec<u32>>>>;

struct Listen(Proposals);

impl DraftCut for Listen {
    fn cut(&self, _: u32, _: u32, drafts: Slice<'_, u32>) -> Result<u32, OpError> {
        self.0.lock().unwrap().push(drafts.to_vec());
        Ok(drafts.len() as u32)
    }
}

pub fn listen(hooks: &mut Hooks) -> Proposals {
    let proposals = Proposals::default();
    hooks.add_object("listen", DraftCutObject::new(Listen(proposals.clone()))).unwrap();
    proposals
}

/// What an observer saw, as lines.
pub type Seen = Arc<Mutex<Vec<String>>>;

struct Watch(Seen);

impl Observer for Watch {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::ROUND | interest::SEQUENCE)
    }
    fn round(&self, done: &RoundDone) -> Result<(), OpError> {
        let RoundDone { round, prefill_rows, decoded, window_rows, kept } = done;
        let line =
            format!("round {round} prefill {prefill_rows} decoded {decoded} rows {window_rows} kept {kept}");
        self.0.lock().unwrap().push(line);
        Ok(())
    }
    fn sequence(&self, slot: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        self.0.lock().unwrap().push(format!("slot {slot} {event:?}"));
        Ok(())
    }
}

/// Numbers of a round's line.
pub fn rounds(seen: &Seen) -> Vec<[u32; 5]> {
    let all = seen.lock().unwrap();
    let numbers = |line: &String| {
        let found: Vec<u32> = line.split(' ').filter_map(|w| w.parse().ok()).collect();
        <[u32; 5]>::try_from(found).unwrap()
    };
    all.iter().filter(|line| line.starts_with("round")).map(numbers).collect()
}

pub fn watch(hooks: &mut Hooks) -> Seen {
    let seen = Seen::default();
    hooks.add_object("watch", ObserverObject::new(Watch(seen.clone()))).unwrap();
    seen
}

/// Holds the engine before one of its rounds until it is dropped, so that what a test does meanwhile comes in time
/// however slow the machine is.
pub struct Gate(Arc<Held>);

#[derive(Default)]
struct Held {
    /// Decoding rounds before the one that waits.
    after: u32,
    passed: AtomicU32,
    open: Mutex<bool>,
    opened: Condvar,
}

impl Drop for Gate {
    fn drop(&mut self) {
        *self.0.open.lock().unwrap() = true;
        self.0.opened.notify_all();
    }
}

struct Hold(Arc<Held>);

impl Observer for Hold {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::PLAN)
    }
    fn planned(&self, _: u64, _: u32, _: u32, decoding: u32) -> Result<(), OpError> {
        let passed = self.0.passed.fetch_add(decoding.min(1), Ordering::Relaxed);
        if passed >= self.0.after {
            let open = self.0.open.lock().unwrap();
            drop(self.0.opened.wait_while(open, |open| !*open).unwrap());
        }
        Ok(())
    }
}

/// A gate before the first round after so many that decode. To be dropped before the engine.
pub fn gate(hooks: &mut Hooks, after: u32) -> Gate {
    let held = Arc::new(Held { after, ..Held::default() });
    hooks.add_object("gate", ObserverObject::new(Hold(held.clone()))).unwrap();
    Gate(held)
}

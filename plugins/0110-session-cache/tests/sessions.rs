//! The acceptance list of 0110, on the tiny model.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

#[path = "../../0120-batch-v2/tests/support/mod.rs"]
mod support;

use std::sync::{Arc, Mutex};

use plugfold_0110_session_cache::marks::Rules;
use plugfold_0110_session_cache::store::{Marks, Sessions, Settings, Told};
use plugfold_abi::points::{
    DrafterObject, Figure, LayoutLinkObject, ObserverObject, PlannerObject, RequestFacts, SaveFacts,
    SaveKind, Sequences, SequencesObject, StatePartObject, Store, StoreObject, StoreOffer,
};
use plugfold_abi::{List, OpError, PassObject, ProviderObject, Slice, TextBuf};
use plugfold_base_mtp::Chains;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{Request, Service};

use support::{SAMPLED, States, alone, ask, engine, guesses, ids, options, request};

const MIB: u64 = 1 << 20;
const SETTINGS: Settings =
    Settings { budget: 512 * MIB, reserve: 0, rules: Rules { every: 0, fork_min: 512 } };

fn hooks(settings: Settings) -> Hooks {
    let mut hooks = Hooks::default();
    let sessions = Arc::new(Sessions::new(settings, None));
    hooks.add_object("0110", StoreObject::new(sessions.clone())).unwrap();
    hooks.add_object("0110", PlannerObject::new(Marks(sessions.clone()))).unwrap();
    hooks.add_object("0110", ObserverObject::new(Told(sessions))).unwrap();
    guesses(&mut hooks);
    hooks
}

fn figure(engine: &Engine, name: &str) -> u64 {
    let stats = engine.stats();
    let found = stats.stores.iter().find(|(store, n, _)| store == "sessions" && n == name);
    found.map_or_else(|| panic!("no figure {name} in {:?}", stats.stores), |f| f.2 as u64)
}

/// One turn of a conversation: the prompt so far, with what is new.
fn turn(session: &mut Vec<u32>, new: &[u32], sampled: bool) -> Request {
    session.extend_from_slice(new);
    let sampling = if sampled { SAMPLED } else { Request::default().sampling };
    Request { sampling, policy: "g3".into(), ..request(session.clone(), 9) }
}

/// Plays turns of three conversations over one system prompt; gives replies, cached tokens and committed states.
fn play(
    order: &[usize],
    slots: usize,
    ranks: usize,
    sampled: bool,
    fresh: bool,
) -> (Vec<(Vec<u32>, usize)>, States) {
    let states = Mutex::new(States::default());
    let start = || {
        engine(&options(slots), ranks, |rank| {
            let mut hooks = if fresh { Hooks::default() } else { hooks(SETTINGS) };
            if fresh {
                guesses(&mut hooks);
            }
            let spied = support::spy(&mut hooks);
            if rank == 0 {
                let before = std::mem::replace(&mut *states.lock().unwrap(), spied.clone());
                spied.lock().unwrap().append(&mut before.lock().unwrap());
            }
            hooks
        })
    };
    let system = ids(1, 300);
    let mut sessions: Vec<Vec<u32>> = (0..3).map(|s| [&system[..], &ids(10 + s, 40)].concat()).collect();
    let mut one = start();
    let mut out = Vec::new();
    for (i, &s) in order.iter().enumerate() {
        if fresh && i > 0 {
            one = start();
        }
        let asked = turn(&mut sessions[s], &ids(100 + i as u64, 20), sampled);
        let (reply, stats) = ask(&one, asked);
        sessions[s].extend_from_slice(&reply);
        out.push((reply, stats.cached_tokens));
    }
    (out, states.into_inner().unwrap())
}

#[test]
fn interleaved_sessions_equal_fresh_prefills_in_replies_and_states() {
    let order = [0, 1, 0, 2, 1, 0];
    for (slots, ranks, sampled) in [(1, 1, false), (1, 1, true), (2, 1, false), (1, 2, true)] {
        let what = format!("{slots} slots, {ranks} ranks, sampled: {sampled}");
        let (with, states) = play(&order, slots, ranks, sampled, false);
        let (without, yardstick) = play(&order, slots, ranks, sampled, true);
        let replies = |all: &[(Vec<u32>, usize)]| all.iter().map(|r| r.0.clone()).collect::<Vec<_>>();
        assert_eq!(replies(&with), replies(&without), "{what}");
        assert!(without.iter().all(|r| r.1 == 0), "the yardstick resumes nothing");
        // A's second turn, B's second and A's third resume all but the token drawn last.
        for i in [2, 4, 5] {
            assert!(with[i].1 > 300, "turn {i} resumed {} tokens; {what}", with[i].1);
        }
        let (states, yardstick) = (states.lock().unwrap(), yardstick.lock().unwrap());
        assert_eq!(yardstick.len(), 12, "after each prompt and each reply");
        assert_eq!(*states, *yardstick, "{what}");
    }
}

#[test]
fn cached_tokens_are_the_entrys_length_and_requests_without_drafts_leave_the_store_alone() {
    let engine = engine(&options(1), 1, |_| hooks(SETTINGS));
    let a = ids(1, 400);
    ask(&engine, request(a.clone(), 1));
    ask(&engine, request(ids(2, 100), 1));
    assert_eq!(figure(&engine, "entries"), 2);
    let longer = [&a[..], &ids(3, 30)].concat();
    let off = Request { draft: false, ..request(longer.clone(), 3) };
    let before = engine.stats().stores;
    let (reply, stats) = ask(&engine, off.clone());
    assert_eq!(stats.cached_tokens, 0);
    assert_eq!(reply, alone(&off));
    assert_eq!(engine.stats().stores, before, "neither read nor written");
    let (_, stats) = ask(&engine, request(longer, 3));
    assert_eq!(stats.cached_tokens, 400);
    assert_eq!(figure(&engine, "hits"), 1);
    assert!(stats.fields["sessions"]["entries"].as_u64().unwrap() >= 3, "{:?}", stats.fields);
}

#[test]
fn a_restore_into_caches_that_hold_the_pages_copies_none() {
    let rules = Rules { every: 768, fork_min: 1 };
    let engine = engine(&options(1), 1, |_| hooks(Settings { rules, ..SETTINGS }));
    let a = ids(1, 900);
    ask(&engine, request(a.clone(), 1));
    assert_eq!(figure(&engine, "entries"), 2, "the mark at 768 and the prompt");
    // What the slot keeps is of 900 tokens and no prefix of this one; the mark is in the store.
    let forked = request([&a[..800], &ids(2, 30)].concat(), 4);
    let (reply, stats) = ask(&engine, forked.clone());
    assert_eq!((stats.cached_tokens, reply), (768, alone(&forked)));
    let pages = |name| figure(&engine, name);
    assert_eq!((pages("copied_pages"), pages("skipped_pages")), (0, 2));
    // Another conversation overwrites the slot: now they have to be copied.
    ask(&engine, request(ids(3, 300), 1));
    let again = request([&a[..800], &ids(4, 30)].concat(), 4);
    let (reply, stats) = ask(&engine, again.clone());
    assert_eq!((stats.cached_tokens, reply), (768, alone(&again)));
    assert_eq!((pages("copied_pages"), pages("skipped_pages")), (2, 2));
}

#[test]
fn a_fork_is_marked_and_serves_the_next_that_forks_there() {
    let engine = engine(&options(1), 1, |_| hooks(SETTINGS));
    let system = ids(1, 600);
    let prompt = |seed| request([&system[..], &ids(seed, 50)].concat(), 3);
    let asked = [2, 3, 4].map(|seed| ask(&engine, prompt(seed)));
    let cached = asked.each_ref().map(|a| a.1.cached_tokens);
    assert_eq!(cached, [0, 0, 512], "the second leaves a mark at the page before the fork");
    for (seed, (reply, _)) in [2, 3, 4].into_iter().zip(&asked) {
        assert_eq!(*reply, alone(&prompt(seed)), "{seed}");
    }
}

#[test]
fn a_tiny_budget_is_kept_and_what_is_larger_is_skipped() {
    let probe = engine(&options(1), 1, |_| hooks(SETTINGS));
    ask(&probe, request(ids(1, 200), 1));
    let one = figure(&probe, "used_bytes");
    let budget = one * 5 / 2;
    let engine = engine(&options(1), 1, |_| hooks(Settings { budget, ..SETTINGS }));
    for seed in 1..6 {
        ask(&engine, request(ids(seed, 200), 1));
        assert!(figure(&engine, "used_bytes") <= budget);
    }
    assert_eq!((figure(&engine, "entries"), figure(&engine, "evicted")), (2, 3));
    let large = request(ids(9, 900), 2);
    assert_eq!(ask(&engine, large.clone()).0, alone(&large));
    assert_eq!((figure(&engine, "entries"), figure(&engine, "skipped")), (2, 2), "prompt and reply");
    let (_, stats) = ask(&engine, request([ids(5, 200), ids(7, 9)].concat(), 1));
    assert_eq!(stats.cached_tokens, 200, "the last is still there");
}

#[test]
fn drafts_after_a_restore_are_those_of_a_fresh_prefill() {
    let prompt = ids(1, 600);
    let next = Request { policy: "g4".into(), ..request([&prompt[..], &ids(2, 30)].concat(), 16) };
    for ranks in [1, 2] {
        let run = |store: bool| {
            let heard = Mutex::new(support::Proposals::default());
            let engine = engine(&options(1), ranks, |rank| {
                let mut hooks = Hooks::default();
                let chains = Arc::new(Chains::default());
                hooks.add_object("base-mtp", DrafterObject::new(chains.clone())).unwrap();
                hooks.add_object("base-mtp", StatePartObject::new(chains)).unwrap();
                support::by_name(&mut hooks);
                let proposals = support::listen(&mut hooks);
                if rank == 0 {
                    *heard.lock().unwrap() = proposals;
                }
                if store {
                    let sessions = Arc::new(Sessions::new(SETTINGS, None));
                    hooks.add_object("0110", StoreObject::new(sessions)).unwrap();
                }
                hooks
            });
            let heard = heard.into_inner().unwrap();
            if store {
                // The reply's drafts leave a backlog in the draft layer; another conversation takes the slot over.
                ask(&engine, Request { policy: "g2".into(), ..request(prompt.clone(), 5) });
                ask(&engine, Request { policy: "g3".into(), ..request(ids(3, 700), 5) });
                heard.lock().unwrap().clear();
            }
            let (reply, stats) = ask(&engine, next.clone());
            let proposals = heard.lock().unwrap().clone();
            (reply, stats.cached_tokens, proposals)
        };
        let (with, without) = (run(true), run(false));
        assert_eq!((with.1, without.1), (600, 0), "{ranks} ranks");
        assert_eq!(with.0, without.0);
        assert!(without.2.iter().map(Vec::len).sum::<usize>() > 20, "{:?}", without.2);
        assert_eq!(with.2, without.2, "{ranks} ranks");
    }
}

#[test]
fn what_a_rank_above_0_has_no_room_for_is_kept_by_none() {
    for (short, kept) in [(None, true), (Some(1), false), (Some(2), false)] {
        let engine = engine(&options(1), 3, |rank| {
            // No machine leaves so much free.
            let reserve = if Some(rank) == short { u64::MAX } else { 0 };
            hooks(Settings { reserve, ..SETTINGS })
        });
        let first = request(ids(1, 400), 2);
        assert_eq!(ask(&engine, first.clone()).0, alone(&first));
        ask(&engine, request(ids(2, 100), 1));
        let next = request([&ids(1, 400)[..], &ids(3, 20)].concat(), 4);
        let (reply, stats) = ask(&engine, next.clone());
        assert_eq!(reply, alone(&next), "short on {short:?}");
        assert_eq!(stats.cached_tokens, if kept { 400 } else { 0 }, "short on {short:?}");
        assert_eq!((figure(&engine, "entries") > 0, figure(&engine, "skipped") > 0), (kept, !kept));
    }
}

/// A drafter with a ring of its own: a step at the end of every forward writes the row's token into it.
mod ring {
    use plugfold_abi::points::{Families, Family, LayoutLink, Owner, PartRows, StatePart};
    use plugfold_abi::{
        Addressing, BelowObject, Bits, Call, Claim, Granted, List, MAX_DIMS, MAX_PARAMS, Maybe, OpError,
        Pass, PassContext, Plan, Program, Provider, Query, Reach, Slice, SlotState, Span, Step, TextBuf,
    };

    pub const ROWS: u32 = 24;
    const NAME: &str = "toy.ring";

    pub struct Hooks;

    impl LayoutLink for Hooks {
        fn edit(&self, families: &mut Families) -> Result<(), OpError> {
            families.all.push(Family {
                id: NAME.into(),
                layers: vec![0].into(),
                owner: Owner::Drafter,
                addressing: Addressing::Ring,
                format: "f32".into(),
                row_bytes: 8,
                positions_a_row: 1,
                rows: ROWS,
                buffers: 1,
                in_snapshot: false,
            });
            Ok(())
        }
    }

    impl Pass for Hooks {
        fn name(&self) -> Result<TextBuf, OpError> {
            Ok("toy".into())
        }
        fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
            if program.shape.kind.as_str() == "forward" {
                program.steps.push(Step {
                    op: "toy.write".into(),
                    layer: 0,
                    site: 9,
                    rows: Span::ALL,
                    seqs: Span::ALL,
                    inputs: List::new(),
                    outputs: List::new(),
                    weights: List::new(),
                    caches: vec![NAME.into()].into(),
                    dims: [0; MAX_DIMS],
                    params: [0.0; MAX_PARAMS],
                    reach: Reach::Sequence,
                    stream: 0,
                    waits: List::new(),
                    signal: Maybe::RNone,
                });
            }
            Ok(())
        }
    }

    impl Provider for Hooks {
        fn op(&self) -> Result<TextBuf, OpError> {
            Ok("toy.write".into())
        }
        fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
            Ok(Claim::Yes(Granted::plain(Bits::own("toy"))))
        }
        #[allow(clippy::cast_ptr_alignment)] // rows of caches lie at multiples of their size
        fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
            for (i, position) in call.round.positions.iter().enumerate() {
                let slot = call.round.seq_slot[call.round.row_seq[i] as usize];
                let at = call.caches[0].row_ptr(SlotState { slot, parity: 0 }, position % ROWS).cast::<u32>();
                // SAFETY: a row of this call's own sequence, of 8 bytes.
                unsafe {
                    at.write(call.round.tokens[i]);
                    at.add(1).write(*position);
                }
            }
            Ok(())
        }
    }

    /// Says that its record relies on the whole ring, or, to see that it matters, on nothing.
    pub struct Part {
        pub told: bool,
    }

    impl StatePart for Part {
        fn id(&self) -> Result<TextBuf, OpError> {
            Ok("toy".into())
        }
        fn version(&self) -> Result<u32, OpError> {
            Ok(1)
        }
        fn rows(&self, _: u32) -> Result<List<PartRows>, OpError> {
            let rows = PartRows { family: NAME.into(), first: 0, rows: ROWS };
            Ok(if self.told { vec![rows].into() } else { List::new() })
        }
        fn save(&self, _: u32, out: &mut List<u8>) -> Result<(), OpError> {
            out.push(7);
            Ok(())
        }
        fn load(&self, _: u32, record: Slice<'_, u8>) -> Result<(), OpError> {
            assert_eq!(record[..], [7]);
            Ok(())
        }
    }
}

#[test]
fn rows_of_a_drafter_with_caches_of_its_own_are_stored_and_restored() {
    // The ring after a resumed turn; its oldest rows are those of the conversation, written before another took the slot.
    let run = |store: bool, told: bool| {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let engine = engine(&options(1), 1, |_| {
            let mut hooks = Hooks::default();
            hooks.add_object("toy", LayoutLinkObject::new(ring::Hooks)).unwrap();
            hooks.add_object("toy", PassObject::new(ring::Hooks)).unwrap();
            hooks.add_object("toy", ProviderObject::new(ring::Hooks)).unwrap();
            hooks.add_object("toy", StatePartObject::new(ring::Part { told })).unwrap();
            if store {
                hooks.add_object("0110", StoreObject::new(Sessions::new(SETTINGS, None))).unwrap();
            }
            hooks.add_object("spy", StoreObject::new(RingSpy(seen.clone()))).unwrap();
            hooks
        });
        if store {
            ask(&engine, request(ids(1, 300), 1));
            ask(&engine, request(ids(2, 310), 1));
        }
        seen.lock().unwrap().clear();
        let next = request([&ids(1, 300)[..], &ids(3, 5)].concat(), 1);
        let (_, stats) = ask(&engine, next);
        let rings = seen.lock().unwrap().clone();
        (stats.cached_tokens, rings)
    };
    let (cached, want) = run(false, true);
    assert!(cached == 0 && want.len() == 1 && want[0].len() == 8 * ring::ROWS as usize);
    assert_eq!(run(true, true), (300, want.clone()));
    let (cached, forgotten) = run(true, false);
    assert!(cached == 300 && forgotten != want, "rows that nobody names are another conversation's");
}

/// Notes the drafter's ring at the end of each prompt.
struct RingSpy(Arc<Mutex<Vec<Vec<u8>>>>);

impl Store for RingSpy {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("ring".into())
    }
    fn offer(&self, _: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        Ok(List::new())
    }
    fn decide(&self, save: &SaveFacts<'_>, sequences: &SequencesObject) -> Result<List<u8>, OpError> {
        if save.kind == SaveKind::Prompt {
            let at = sequences.families()?.iter().position(|f| f.family.id.as_str() == "toy.ring").unwrap();
            let mut bytes = List::new();
            sequences.gather(save.slot, at as u32, 0, ring::ROWS, &mut bytes)?;
            self.0.lock().unwrap().push(bytes.into());
        }
        Ok(List::new())
    }
    fn save(&self, _: &SaveFacts<'_>, _: Slice<'_, u8>, _: &SequencesObject) -> Result<(), OpError> {
        Ok(())
    }
    fn resume(&self, _: u64, _: u32, _: &SequencesObject) -> Result<bool, OpError> {
        Ok(false)
    }
}

/// A store on one rank that forgets its first save.
struct Forgets(Arc<Sessions>, Mutex<bool>);

impl Store for Forgets {
    fn name(&self) -> Result<TextBuf, OpError> {
        self.0.name()
    }
    fn open(&self, sequences: &SequencesObject) -> Result<(), OpError> {
        self.0.open(sequences)
    }
    fn offer(&self, request: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        self.0.offer(request)
    }
    fn decide(&self, save: &SaveFacts<'_>, sequences: &SequencesObject) -> Result<List<u8>, OpError> {
        self.0.decide(save, sequences)
    }
    fn save(
        &self,
        save: &SaveFacts<'_>,
        decision: Slice<'_, u8>,
        sequences: &SequencesObject,
    ) -> Result<(), OpError> {
        if std::mem::replace(&mut *self.1.lock().unwrap(), false) {
            return Ok(());
        }
        self.0.save(save, decision, sequences)
    }
    fn resume(&self, ticket: u64, slot: u32, sequences: &SequencesObject) -> Result<bool, OpError> {
        self.0.resume(ticket, slot, sequences)
    }
    fn digest(&self) -> Result<u64, OpError> {
        self.0.digest()
    }
    fn overwritten(&self, slot: u32, length: u32) -> Result<(), OpError> {
        self.0.overwritten(slot, length)
    }
    fn figures(&self) -> Result<List<Figure>, OpError> {
        self.0.figures()
    }
}

#[test]
fn an_index_that_differs_between_ranks_ends_the_engine_by_name() {
    let engine = engine(&options(1), 2, |rank| {
        let mut hooks = Hooks::default();
        let sessions = Arc::new(Sessions::new(SETTINGS, None));
        let store = Forgets(sessions, Mutex::new(rank == 1));
        hooks.add_object("0110", StoreObject::new(store)).unwrap();
        hooks
    });
    ask(&engine, request(ids(1, 50), 1));
    let handle = engine.submit(request(ids(2, 50), 500)).unwrap();
    let told = support::outcome(&handle).err().unwrap_or_default();
    assert!(told.contains("plugin 0110") && told.contains("differs between ranks"), "{told}");
}

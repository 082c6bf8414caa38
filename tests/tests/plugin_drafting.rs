//! base-mtp, base-auto and 0020 in the engine: no policy changes a reply; resumed sequences draft as fresh ones; what a
//! drafter does wrong stays with the requests that it drafts for.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use plugfold_abi::points::{
    Absorbed, Ask, Choice, DraftCut, DraftCutObject, DraftPolicy, DraftPolicyObject, Drafter, DrafterObject,
    Draw, Forwards, ForwardsObject, HeadRows, Proposal, Rule, SequenceFacts, Wants,
};
use plugfold_abi::{KnobValue, List, OpError, Slice, TextBuf};
use plugfold_engine::checkpoint::Checkpoint;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::service::{Attachment, EngineError, Event, Finish, Handle, Request, Sampling, Service};
use plugfold_tests::drafting::Drafting;
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{engine, ids, options, plain, reply, reply_with_stats};

fn demo_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/assets/demo-model")
}

const SAMPLED: Sampling = Sampling { temperature: 0.7, top_k: 20, top_p: 0.95, min_p: 0.0, seed: Some(11) };

/// A prompt that repeats itself, so that lookups find something.
fn prompt(seed: u64, length: usize, vocab: u32) -> Vec<u32> {
    let part = ids(seed, length.div_ceil(2), vocab);
    part.iter().chain(&part).copied().take(length).collect()
}

fn job(ids: Vec<u32>, tokens: usize, sampling: Sampling, policy: &str) -> Request {
    Request { ids, max_tokens: tokens, sampling, policy: policy.into(), ..Request::default() }
}

const POLICIES: [&str; 15] = [
    "",
    "auto",
    "auto:1:2:0.1",
    "0",
    "1",
    "3",
    "7",
    "a",
    "a:0.1:0.2",
    "c3:0.35",
    "c7:0.01",
    "l7",
    "l3:1",
    "o",
    "om5",
];

/// Greedy and sampled, short and past the dense limit: prompts, tokens, sampling.
fn cases(dense: usize, vocab: u32, tokens: usize) -> Vec<(Vec<u32>, usize, Sampling)> {
    [(1, 9), (2, dense - 8), (3, dense + 25)]
        .into_iter()
        .flat_map(|(seed, n)| {
            [Sampling::GREEDY, SAMPLED].map(|sampling| (prompt(seed, n, vocab), tokens, sampling))
        })
        .collect()
}

/// All policies at once over four slots, coming and going, with some that leave early; each equals its serial run.
fn every_policy_equals_serial(model: &Path, ranks: usize, cases: &[(Vec<u32>, usize, Sampling)]) {
    let serial = engine(&options(model, 1, 64), 1, plain);
    let want: Vec<(Vec<u32>, Finish)> = cases
        .iter()
        .map(|(ids, tokens, sampling)| {
            let one = Request { draft: false, ..job(ids.clone(), *tokens, *sampling, "") };
            reply(&serial.submit(one).unwrap()).unwrap()
        })
        .collect();
    drop(serial);
    let drafted = engine(&options(model, 4, 24), ranks, |_| Drafting::default().core());
    let mut running: Vec<(usize, &str, Handle)> = Vec::new();
    let mut leaving = Vec::new();
    for (n, policy) in POLICIES.iter().enumerate() {
        for (i, (ids, tokens, sampling)) in cases.iter().enumerate() {
            let one = job(ids.clone(), *tokens, *sampling, policy);
            if (n + i) % 5 == 0 {
                leaving.push(drafted.submit(Request { max_tokens: 300, ..one.clone() }).unwrap());
            }
            running.push((i, policy, drafted.submit(one).unwrap()));
        }
    }
    for (i, handle) in leaving.iter().enumerate() {
        for _ in 0..i % 4 {
            let _ = handle.events.recv();
        }
        handle.cancel();
    }
    let mut by = std::collections::BTreeMap::new();
    for (i, policy, handle) in running {
        let (tokens, finish, stats) = reply_with_stats(&handle).unwrap();
        assert_eq!((tokens, finish), want[i].clone(), "case {i} with policy {policy:?} on {ranks} ranks");
        assert!(policy != "0" || stats.drafted == 0, "policy 0 drafts nothing");
        for (name, rounds) in stats.drafters {
            *by.entry(name).or_insert(0) += rounds;
        }
    }
    assert!(["mtp", "lookup"].iter().all(|name| by.get(*name).is_some_and(|n| *n > 0)), "{by:?}");
    let stats = drafted.stats();
    assert_eq!((stats.errors, stats.decoding, stats.waiting), (0, 0, 0));
    assert!(stats.drafted > stats.accepted && stats.accepted > 0, "{stats:?}");
}

#[test]
fn every_policy_equals_serial_on_the_tiny_model() {
    every_policy_equals_serial(&tiny_dir(), 1, &cases(36, 480, 30));
}

#[test]
fn every_policy_equals_serial_on_the_tiny_model_on_two_ranks() {
    every_policy_equals_serial(&tiny_dir(), 2, &cases(36, 480, 30));
}

#[test]
fn every_policy_equals_serial_on_the_demo_model() {
    every_policy_equals_serial(&demo_dir(), 1, &cases(260, 4000, 16)[1..5]);
}

#[test]
fn every_policy_equals_serial_on_the_demo_model_on_two_ranks() {
    every_policy_equals_serial(&demo_dir(), 2, &cases(260, 4000, 16)[3..5]);
}

/// The windows of a request: tokens kept in each round, who drafted, drafts.
#[allow(clippy::type_complexity)] // read at once by the callers
fn windows(engine: &Engine, request: Request) -> (Vec<u32>, Vec<u16>, Vec<(String, usize)>, usize, usize) {
    let (tokens, _, stats) = reply_with_stats(&engine.submit(request).unwrap()).unwrap();
    (tokens, stats.keeps, stats.drafters, stats.drafted, stats.cached_tokens)
}

#[test]
fn resumed_equals_fresh_proposals_included() {
    for (model, vocab, n) in [(tiny_dir(), 480, 50), (demo_dir(), 4000, 40)] {
        for policy in ["3", "c7:0.02", "a", "l7", "auto"] {
            let fresh = engine(&options(&model, 1, 64), 1, |_| Drafting::default().core());
            let resumed = engine(&options(&model, 1, 64), 1, |_| Drafting::default().core());
            let first = job(prompt(5, n, vocab), 12, Sampling::GREEDY, policy);
            let said = windows(&resumed, first.clone());
            // The next turn: what was said, and more. Another sequence may not come between, for there is one slot.
            let mut turn = first.ids.clone();
            turn.extend(&said.0);
            turn.extend(ids(9, 7, vocab));
            let second = job(turn, 20, Sampling::GREEDY, policy);
            let (a, b) = (windows(&fresh, second.clone()), windows(&resumed, second));
            assert!(a.4 == 0 && b.4 > n, "resumed {} tokens of {n} and the reply", b.4);
            assert_eq!((a.0, a.1, a.2, a.3), (b.0, b.1, b.2, b.3), "{policy} on {}", model.display());
        }
    }
}

#[test]
fn the_servers_own_policy_comes_from_its_knobs() {
    let drafts = |drafting: Drafting| {
        let engine = engine(&options(&tiny_dir(), 1, 64), 1, |_| drafting.core());
        let (tokens, _, stats) =
            reply_with_stats(&engine.submit(job(ids(4, 20, 480), 12, Sampling::GREEDY, "")).unwrap())
                .unwrap();
        let most = if stats.rounds == 0 { 0 } else { stats.drafted.div_ceil(stats.rounds) };
        (tokens, most, stats.drafted > 0)
    };
    let usual = drafts(Drafting::default());
    assert!(usual.2);
    let two = drafts(Drafting { mtp_drafts: Some(2), ..Drafting::default() });
    assert!(two.2 && two.1 <= 2, "{two:?}");
    for off in [
        Drafting { mtp_drafts: Some(0), ..Drafting::default() },
        Drafting { no_drafts: true, ..Drafting::default() },
        Drafting { policy: "0", ..Drafting::default() },
    ] {
        let none = drafts(off);
        assert_eq!((&none.0, none.2), (&usual.0, false), "{off:?}");
    }
    let refused = |d: Drafting| d.hooks().err().map(|e| e.to_string()).unwrap_or_default();
    assert!(refused(Drafting { policy: "c9:0.1", ..Drafting::default() }).contains("N is \"9\""));
    assert!(refused(Drafting { policy: "fast", ..Drafting::default() }).contains("is not a draft policy"));
    for bad in [0, 65, -1] {
        assert!(refused(Drafting { lookup_min: bad, ..Drafting::default() }).contains("give 1 to 64 tokens"));
    }
}

#[test]
fn policies_that_cannot_be_had_are_refused_before_anything_runs() {
    let all = engine(&options(&tiny_dir(), 1, 64), 1, |_| Drafting::default().core());
    let bare = engine(&options(&tiny_dir(), 1, 64), 1, plain);
    let no_mtp = engine(&options(&tiny_dir(), 1, 64), 1, |_| {
        Drafting { without_mtp: true, without_lookup: true, ..Drafting::default() }.core()
    });
    let submit = |e: &Engine, policy: &str| match e.submit(job(vec![1, 2, 3], 2, Sampling::GREEDY, policy)) {
        Ok(handle) => reply(&handle).map(|_| String::new()).unwrap(),
        Err(EngineError::Invalid(message)) => message,
        Err(other) => panic!("{other:?}"),
    };
    for (engine, policy, said) in [
        (&all, "f5", "needs the drafter `dflash2`"),
        (&all, "c9:0.1", "N is \"9\": give a whole number from 1 to 7"),
        (&all, "fast", "is not a draft policy; valid are auto, "),
        (&no_mtp, "3", "needs the drafter `mtp`"),
        (&no_mtp, "l3", "needs the drafter `lookup`"),
        (&no_mtp, "auto", ""),
        (&bare, "3", "is not a draft policy; valid are auto, 0 (no plugin with draft policies is loaded)"),
        (&bare, "auto", ""),
        (&bare, "0", ""),
    ] {
        let told = submit(engine, policy);
        assert!(told.contains(said) && told.is_empty() == said.is_empty(), "{policy}: {told}");
        assert_eq!(engine.policy(policy).is_ok(), said.is_empty(), "{policy}");
    }
}

#[test]
fn the_policy_in_force_is_told() {
    let told = |drafting: Drafting, asked: &str| {
        engine(&options(&tiny_dir(), 1, 64), 1, |_| drafting.core()).policy(asked).unwrap()
    };
    let three = Drafting { mtp_drafts: Some(3), ..Drafting::default() };
    assert_eq!([told(three, ""), told(three, "a"), told(Drafting::default(), "")], ["3", "a", "auto"]);
    assert_eq!(told(Drafting { no_drafts: true, ..Drafting::default() }, "a"), "0");
}

#[test]
fn a_follower_with_other_local_settings_runs_rank_0s_windows() {
    // Rank 1 would not look anything up by its own settings; the values of a request are rank 0's.
    let run = |there: Drafting| {
        let core = |rank: usize| if rank == 0 { Drafting::default().core() } else { there.core() };
        let engine = engine(&options(&tiny_dir(), 2, 64), 2, core);
        ["l7", "auto", ""]
            .map(|policy| windows(&engine, job(prompt(8, 60, 480), 40, Sampling::GREEDY, policy)))
    };
    let alike = run(Drafting::default());
    let unlike = run(Drafting { lookup: false, lookup_min: 64, ..Drafting::default() });
    assert_eq!(alike, unlike);
    assert!(alike[0].2.iter().any(|(name, _)| name == "lookup"), "{alike:?}");
}

#[test]
fn request_knobs_decide_lookups_of_their_request_alone() {
    let engine = engine(&options(&tiny_dir(), 2, 64), 1, |_| Drafting::default().core());
    let ask = |on: bool, min: i64| {
        let knobs: Arc<[KnobValue]> = [KnobValue::Bool(on), KnobValue::Int(min)].into();
        let one = job(prompt(8, 60, 480), 40, Sampling::GREEDY, "auto");
        engine.submit(Request { knobs: Some(knobs), ..one }).unwrap()
    };
    let (with, without, far) = (ask(true, 1), ask(false, 1), ask(true, 64));
    let [with, without, far] = [with, without, far].map(|h| reply_with_stats(&h).unwrap());
    assert_eq!((&with.0, &with.0), (&without.0, &far.0));
    let looked = |drafters: &[(String, usize)]| drafters.iter().any(|(name, _)| name == "lookup");
    assert!(looked(&with.2.drafters), "{:?}", with.2.drafters);
    assert!(!looked(&without.2.drafters) && !looked(&far.2.drafters));
}

/// What a planted drafter does for the request that is marked.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Plant {
    /// Ids of no vocabulary, too many, on every rank.
    Garbage,
    /// Guesses of its own on each rank.
    Unequal,
    PanicAtPropose,
    PanicAtAbsorb,
    PanicAtDecide,
    /// Runs the layer, and panics before the first or before the second step.
    PanicBeforeStep(u32),
    /// Panics while it absorbs, where the other ranks run the layer.
    PanicWhereOthersAbsorb,
}

/// The first id of the marked request's prompt.
const MARK: u32 = 477;

/// Drafter and policy of one rank.
struct Planted {
    plant: Plant,
    here: bool,
    seed: u32,
    marked: Mutex<Vec<u32>>,
    absorbed: AtomicU32,
    own: AtomicU32,
}

impl Planted {
    fn is_marked(&self, slot: u32) -> bool {
        self.marked.lock().unwrap_or_else(std::sync::PoisonError::into_inner).contains(&slot)
    }
}

impl Drafter for Planted {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("planted".into())
    }
    fn wants(&self) -> Result<Wants, OpError> {
        let layer = matches!(self.plant, Plant::PanicBeforeStep(_) | Plant::PanicWhereOthersAbsorb);
        Ok(Wants { hidden: layer, mtp_layer: layer })
    }
    fn begun(&self, slot: u32, ids: Slice<'_, u32>, _: u32) -> Result<(), OpError> {
        if ids[0] == MARK {
            self.marked.lock().unwrap().push(slot);
        }
        Ok(())
    }
    fn ended(&self, slot: u32) -> Result<(), OpError> {
        self.marked.lock().unwrap_or_else(std::sync::PoisonError::into_inner).retain(|s| *s != slot);
        Ok(())
    }
    fn absorb(&self, absorbed: &Absorbed<'_>, forwards: &ForwardsObject) -> Result<(), OpError> {
        if !self.is_marked(absorbed.slot) {
            return Ok(());
        }
        // Three chunks of its prompt, then windows.
        let times = self.absorbed.fetch_add(1, Ordering::Relaxed);
        let now = times == 4;
        assert!(!(now && self.here && self.plant == Plant::PanicAtAbsorb), "planted at absorb");
        if now && self.plant == Plant::PanicWhereOthersAbsorb {
            assert!(!self.here, "planted where others absorb");
            let row = HeadRows {
                slot: absorbed.slot,
                start: 0,
                position: 1,
                next_ids: Slice::from(&absorbed.tokens[..1]),
                hidden: Slice::from(&absorbed.hidden[..forwards.hidden_size()? as usize]),
                pick: false,
                draw: Draw::BEST,
            };
            forwards.head(Slice::from(&[row][..]))?;
        }
        Ok(())
    }
    fn propose(
        &self,
        asks: Slice<'_, Ask<'_>>,
        forwards: &ForwardsObject,
    ) -> Result<List<Proposal>, OpError> {
        let marked = asks.iter().any(|a| self.is_marked(a.slot));
        assert!(!(marked && self.here && self.plant == Plant::PanicAtPropose), "planted at propose");
        if marked && let Plant::PanicBeforeStep(step) = self.plant {
            let width = forwards.hidden_size()? as usize;
            let zeros = vec![0.0; width];
            for i in 0..3 {
                assert!(!(self.here && i == step), "planted before a step");
                let row = HeadRows {
                    slot: asks[0].slot,
                    start: i,
                    position: i + 1,
                    next_ids: Slice::from(&[1][..]),
                    hidden: Slice::from(&zeros[..]),
                    pick: true,
                    draw: Draw::BEST,
                };
                forwards.head(Slice::from(&[row][..]))?;
            }
        }
        let draft = |ask: &Ask<'_>| -> Vec<u32> {
            match self.plant {
                Plant::Garbage if ask.length.is_multiple_of(3) => vec![u32::MAX, 1 << 24, 511, 3],
                Plant::Garbage => (0..100).map(|i| (i * 37 + ask.length) % 512).collect(),
                Plant::Unequal => vec![(ask.length * 7 + self.seed) % 480],
                _ => vec![ask.pending],
            }
        };
        Ok(asks.iter().map(|a| Proposal { tokens: draft(a).into(), probabilities: List::new() }).collect())
    }
}

impl DraftPolicy for Planted {
    fn drafters(&self, names: Slice<'_, TextBuf>) -> Result<(), OpError> {
        let at = names.iter().position(|n| n.as_str() == "planted").unwrap();
        self.own.store(at as u32, Ordering::Relaxed);
        Ok(())
    }
    fn decide(&self, facts: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> Result<(), OpError> {
        for (fact, choice) in facts.iter().zip(choices) {
            if self.is_marked(fact.slot) {
                assert!(!(self.here && self.plant == Plant::PanicAtDecide), "planted at decide");
                let rule = Rule { floor: 0.0, min_match: 0 };
                *choice = Choice { drafter: self.own.load(Ordering::Relaxed), budget: fact.room, rule };
            }
        }
        Ok(())
    }
}

/// The drafting plugins and a planted one, behind them or before.
fn planted(plant: Plant, culprit: usize, first: bool, rank: usize) -> CoreOptions {
    let planted = Arc::new(Planted {
        plant,
        here: culprit == rank || (plant == Plant::Garbage),
        seed: rank as u32,
        marked: Mutex::default(),
        absorbed: AtomicU32::new(0),
        own: AtomicU32::new(0),
    });
    let mut hooks = Drafting::default().hooks().unwrap();
    hooks.add_object("planted", DrafterObject::new(planted.clone())).unwrap();
    hooks.add_object("planted", DraftPolicyObject::new(planted)).unwrap();
    if first {
        hooks.drafters.rotate_right(1);
    }
    CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
}

#[test]
fn what_a_drafter_does_wrong_stays_with_its_request() {
    let serial = engine(&options(&tiny_dir(), 1, 64), 1, plain);
    let alone = |job: &Request| {
        reply(&serial.submit(Request { draft: false, policy: String::new(), ..job.clone() }).unwrap())
    };
    let mut marked = job(prompt(21, 70, 470), 20, Sampling::GREEDY, "");
    marked.ids[0] = MARK;
    let others: Vec<Request> = [("3", 30), ("auto", 50), ("l7", 41)]
        .into_iter()
        .enumerate()
        .map(|(i, (policy, n))| {
            job(prompt(30 + i as u64, n, 470), 24, if i == 1 { SAMPLED } else { Sampling::GREEDY }, policy)
        })
        .collect();
    let want: Vec<_> = others.iter().map(|j| alone(j).unwrap()).collect();
    let marked_alone = alone(&marked).unwrap();
    let plants = [
        Plant::Garbage,
        Plant::Unequal,
        Plant::PanicAtPropose,
        Plant::PanicAtAbsorb,
        Plant::PanicAtDecide,
        Plant::PanicBeforeStep(0),
        Plant::PanicBeforeStep(1),
        Plant::PanicWhereOthersAbsorb,
    ];
    for (n, plant) in plants.into_iter().enumerate() {
        for ranks in [1, 2] {
            let culprit = if ranks == 1 { 0 } else { n % 2 };
            let engine =
                engine(&options(&tiny_dir(), 4, 24), ranks, |rank| planted(plant, culprit, n % 3 == 1, rank));
            // The marked request first, so that it runs beside all others.
            let bad = engine.submit(marked.clone()).unwrap();
            let good: Vec<Handle> = others.iter().map(|j| engine.submit(j.clone()).unwrap()).collect();
            let told = reply(&bad);
            let harmless = plant == Plant::Garbage || (plant == Plant::Unequal && ranks == 1);
            let name = format!("{plant:?} on rank {culprit} of {ranks}");
            if harmless {
                assert_eq!(told.as_ref().unwrap(), &marked_alone, "{name}");
            } else {
                let EngineError::Failed(message) = told.unwrap_err() else { panic!("{name}") };
                assert!(message.contains("plugin planted"), "{name}: {message}");
                let says = if plant == Plant::Unequal {
                    "drafts differ between rank 0 and rank 1"
                } else {
                    "planted"
                };
                assert!(message.contains(says), "{name}: {message}");
                if ranks > 1 && plant != Plant::Unequal {
                    assert!(message.starts_with(&format!("rank {culprit}: ")), "{name}: {message}");
                }
            }
            for (handle, want) in good.iter().zip(&want) {
                assert_eq!(&reply(handle).unwrap(), want, "{name}");
            }
            // And the server serves on, in every slot.
            let again: Vec<Handle> = others.iter().map(|j| engine.submit(j.clone()).unwrap()).collect();
            for (handle, want) in again.iter().zip(&want) {
                assert_eq!(&reply(handle).unwrap(), want, "{name}, afterwards");
            }
            let stats = engine.stats();
            assert_eq!((stats.fatal, stats.errors), (None, u64::from(!harmless)), "{name}");
        }
    }
}

#[test]
fn a_request_that_asks_for_no_drafts_gets_none_whatever_its_policy() {
    let engine = engine(&options(&tiny_dir(), 1, 64), 1, |_| Drafting::default().core());
    for policy in ["7", "l7", "auto"] {
        let one = Request { draft: false, ..job(prompt(3, 40, 480), 20, Sampling::GREEDY, policy) };
        let handle = engine.submit(one).unwrap();
        let (_, _, stats) = reply_with_stats(&handle).unwrap();
        assert_eq!((stats.drafted, stats.rounds), (0, 19), "{policy}");
        assert!(handle.events.iter().all(|e| !matches!(e, Event::Error(_))));
    }
}

/// Hears every proposal.
struct Hears(Arc<Mutex<Vec<Vec<u32>>>>);

impl DraftCut for Hears {
    fn cut(&self, _: u32, _: u32, drafts: Slice<'_, u32>) -> Result<u32, OpError> {
        self.0.lock().unwrap().push(drafts.to_vec());
        Ok(drafts.len() as u32)
    }
}

/// The reply and all proposals of the draft layer on the way to it.
fn proposals(request: Request, ranks: usize) -> (Vec<u32>, Vec<Vec<u32>>) {
    let heard = Arc::<Mutex<Vec<Vec<u32>>>>::default();
    let drafting = Drafting { without_lookup: true, ..Drafting::default() };
    let engine = engine(&options(&tiny_dir(), 1, 24), ranks, |rank| {
        let mut hooks = drafting.hooks().unwrap();
        let kept = if rank == 0 { heard.clone() } else { Arc::default() };
        hooks.add_object("hears", DraftCutObject::new(Hears(kept))).unwrap();
        CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
    });
    let (tokens, _) = reply(&engine.submit(request).unwrap()).unwrap();
    let all = heard.lock().unwrap().clone();
    (tokens, all)
}

/// Rows of the embedding table.
fn embedding(ids: &[u32]) -> Vec<f32> {
    let checkpoint = Checkpoint::open(&tiny_dir()).unwrap();
    let table = checkpoint.tensor("model.language_model.embed_tokens.weight").unwrap();
    let width = table.shape[1];
    let values: Vec<f32> =
        table.bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect();
    ids.iter().flat_map(|id| values[*id as usize * width..][..width].to_vec()).collect()
}

#[test]
fn rows_of_an_image_reach_the_draft_layer_as_the_tokens_that_they_are() {
    // Rows that are the embeddings of real tokens must be drafted after as those tokens are: in the prompt's middle, over the
    // edge of a chunk, and at its end.
    let text = ids(21, 70, 480);
    for (from, to) in [(0, 5), (10, 40), (60, 70)] {
        for (sampling, ranks) in [(Sampling::GREEDY, 1), (SAMPLED, 2)] {
            let plain = job(text.clone(), 14, sampling, "4");
            let mut seen = plain.clone();
            for (i, id) in seen.ids[from..to].iter_mut().enumerate() {
                *id = plugfold_abi::FIRST_VIRTUAL_ID + i as u32;
            }
            seen.attachments = vec![Attachment { at: from, rows: embedding(&text[from..to]).into() }];
            let (want, got) = (proposals(plain, ranks), proposals(seen, ranks));
            assert!(want.1.len() > 5 && want.1.iter().all(|p| !p.is_empty()), "{want:?}");
            assert_eq!(got, want, "rows {from} to {to} on {ranks} ranks");
        }
    }
}

#[test]
fn drafts_of_sampled_requests_are_drawn_and_the_same_on_any_ranks() {
    let asked = |sampling| job(prompt(31, 50, 480), 30, sampling, "4");
    let hot = Sampling { temperature: 1.5, top_k: 50, top_p: 1.0, ..SAMPLED };
    let (one, two) = (proposals(asked(hot), 1), proposals(asked(hot), 2));
    assert_eq!(one, two);
    let other = proposals(asked(Sampling { seed: Some(12), ..hot }), 1);
    assert_ne!(one.1, other.1, "another key, other noise");
    // With no room for noise the draw is the most likely token.
    let (cold, greedy) = (Sampling { top_k: 1, ..hot }, Sampling::GREEDY);
    assert_eq!(proposals(asked(cold), 1), proposals(asked(greedy), 1));
}

//! Planning, thin: pieces of several prompts a round (0120), admission by what is left of a pool (0290), and prefixes that
//! several prompts share, kept once and waited for (0310). On one and two ranks, with the replies of an engine without them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use plugfold_abi::points::{
    Ended, LimitsLink, LimitsLinkObject, Mark, Observer, ObserverObject, PieceChoice, PlanFacts, Planner,
    PlannerObject, RequestFacts, SlotFacts, StoreObject, StoreOffer, Verdict, interest,
};
use plugfold_abi::{List, OpError, Slice, TextBuf};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{EngineError, Request, Sampling, Service};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::keeper::Keeper;
use plugfold_tests::model::{engine, ids, options, plain, reply, reply_with_stats, request};

/// Positions of a page, and pages of the pool.
const PAGE: u32 = 16;
const POOL: u32 = 12;

/// 0120: a piece for every prompt, and everybody decodes.
#[derive(Default)]
struct Batch {
    /// Most prompts that had a piece in one round.
    most: Mutex<usize>,
}

impl Planner for Batch {
    fn pieces(&self, facts: &PlanFacts<'_>, pieces: &mut List<PieceChoice>) -> Result<(), OpError> {
        let prompts = |s: &&SlotFacts| s.request != 0 && !s.decoding;
        *pieces =
            facts.slots.iter().filter(prompts).map(|s| PieceChoice { slot: s.slot, tokens: 16 }).collect();
        let mut most = self.most.lock().unwrap();
        *most = (*most).max(pieces.len());
        Ok(())
    }
}

impl LimitsLink for Batch {
    fn raise(&self, limits: &mut plugfold_abi::points::Limits) -> Result<(), OpError> {
        limits.slots = limits.slots.max(4);
        Ok(())
    }
}

/// 0290: a request enters when the pool has pages for all that it may hold.
#[derive(Default)]
struct Pool {
    reserved: Mutex<HashMap<u64, u32>>,
    /// Most pages that were reserved at once.
    peak: Mutex<u32>,
    /// Reads of other requests that had to wait.
    blocked: Mutex<u32>,
}

impl Planner for Pool {
    fn admit(
        &self,
        _: &PlanFacts<'_>,
        request: &RequestFacts<'_>,
        verdict: &mut Verdict,
    ) -> Result<(), OpError> {
        let Verdict::Admit(_) = verdict else { return Ok(()) };
        let pages = (request.ids.len() as u32 + request.max_tokens).div_ceil(PAGE);
        if pages > POOL {
            let text = format!("{pages} pages for one request, the pool has {POOL}: ask for fewer tokens");
            *verdict = Verdict::Refuse(text.into());
            return Ok(());
        }
        let mut reserved = self.reserved.lock().unwrap();
        let taken: u32 = reserved.values().sum();
        if taken + pages > POOL {
            *self.blocked.lock().unwrap() += 1;
            *verdict = Verdict::Block;
            return Ok(());
        }
        reserved.insert(request.request, pages);
        let mut peak = self.peak.lock().unwrap();
        *peak = (*peak).max(taken + pages);
        Ok(())
    }
}

impl Observer for Pool {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::REQUEST)
    }
    fn request(&self, ended: &Ended<'_>) -> Result<TextBuf, OpError> {
        self.reserved.lock().unwrap().remove(&ended.request);
        Ok(TextBuf::new())
    }
}

/// 0310: the prefix of a prompt that others wait with gets a mark; who shares it with one in flight is held.
#[derive(Default)]
struct Prefixes {
    /// Prompts in flight.
    running: Mutex<HashMap<u64, Vec<u32>>>,
    held: Mutex<u32>,
}

/// What two prompts begin with alike, in whole pages.
fn shared(a: &[u32], b: &[u32]) -> u32 {
    let same = a.iter().zip(b).take_while(|(x, y)| x == y).count() as u32;
    same.min(a.len() as u32 - 1).min(b.len() as u32 - 1) / PAGE * PAGE
}

impl Planner for Prefixes {
    fn admit(
        &self,
        facts: &PlanFacts<'_>,
        request: &RequestFacts<'_>,
        verdict: &mut Verdict,
    ) -> Result<(), OpError> {
        let running = self.running.lock().unwrap();
        for slot in facts.slots.iter().filter(|s| s.request != 0) {
            let Some(other) = running.get(&slot.request) else { continue };
            let prefix = shared(&request.ids, other);
            if prefix > 0 && slot.absorbed < prefix && matches!(verdict, Verdict::Admit(_)) {
                *self.held.lock().unwrap() += 1;
                *verdict = Verdict::Hold;
            }
        }
        Ok(())
    }
    fn marks(&self, request: &RequestFacts<'_>, resumed: u32, marks: &mut List<Mark>) -> Result<(), OpError> {
        let mut running = self.running.lock().unwrap();
        let longest = running.values().map(|other| shared(&request.ids, other)).max().unwrap_or(0);
        // The system prompt of this test is four pages long.
        let at = longest.max(4 * PAGE);
        if at > resumed && (at as usize) < request.ids.len() {
            marks.push(Mark { at, reason: "prefix".into() });
            marks.push(Mark { at, reason: "periodic".into() });
        }
        marks.push(Mark { at: 100_000, reason: "beyond the prompt".into() });
        running.insert(request.request, request.ids.to_vec());
        Ok(())
    }
    fn place(
        &self,
        _: &PlanFacts<'_>,
        _: &RequestFacts<'_>,
        offers: Slice<'_, StoreOffer>,
        _: &mut Verdict,
    ) -> Result<(), OpError> {
        assert!(offers.iter().all(|o| o.length > 0));
        Ok(())
    }
}

impl Observer for Prefixes {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::REQUEST)
    }
    fn request(&self, ended: &Ended<'_>) -> Result<TextBuf, OpError> {
        self.running.lock().unwrap().remove(&ended.request);
        Ok(TextBuf::new())
    }
}

struct Planned {
    engine: Engine,
    batch: Arc<Batch>,
    pool: Arc<Pool>,
    prefixes: Arc<Prefixes>,
    keepers: Vec<Arc<Keeper>>,
}

fn start(ranks: usize) -> Planned {
    let (batch, pool, prefixes) =
        (Arc::<Batch>::default(), Arc::<Pool>::default(), Arc::<Prefixes>::default());
    let keepers: Vec<Arc<Keeper>> = (0..ranks).map(|_| Keeper::new("memory", 2, None)).collect();
    let engine = engine(&options(&tiny_dir(), 1, 16), ranks, |rank| {
        let mut hooks = Hooks::default();
        hooks.add_object("0120", LimitsLinkObject::new(batch.clone())).unwrap();
        hooks.add_object("0110", StoreObject::new(keepers[rank].clone())).unwrap();
        hooks.add_object("0120", PlannerObject::new(batch.clone())).unwrap();
        hooks.add_object("0310", PlannerObject::new(prefixes.clone())).unwrap();
        hooks.add_object("0310", ObserverObject::new(prefixes.clone())).unwrap();
        // Last: who is held reserves nothing.
        hooks.add_object("0290", PlannerObject::new(pool.clone())).unwrap();
        hooks.add_object("0290", ObserverObject::new(pool.clone())).unwrap();
        CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
    });
    Planned { engine, batch, pool, prefixes, keepers }
}

/// A question behind the system prompt.
fn question(seed: u64) -> Request {
    let mut asks = request(seed, 6, 5, Sampling::GREEDY);
    asks.ids = [ids(99, 4 * PAGE as usize, 480), asks.ids].concat();
    asks
}

#[test]
fn pieces_pool_and_prefixes_together_change_no_reply() {
    for ranks in [1, 2] {
        let jobs: Vec<Request> = vec![
            question(1),
            question(2),
            request(3, 33, 6, Sampling::GREEDY),
            request(4, 50, 6, Sampling::GREEDY),
            question(5),
        ];
        let fresh = engine(&options(&tiny_dir(), 1, 16), ranks, plain);
        let want: Vec<_> = jobs.iter().map(|j| reply(&fresh.submit(j.clone()).unwrap()).unwrap()).collect();
        drop(fresh);
        let planned = start(ranks);
        assert_eq!(planned.engine.info().slots, 4);
        let handles: Vec<_> = jobs.iter().map(|j| planned.engine.submit(j.clone()).unwrap()).collect();
        let got: Vec<_> = handles.iter().map(|h| reply_with_stats(h).unwrap()).collect();
        for ((tokens, finish, _), want) in got.iter().zip(&want) {
            assert_eq!((tokens, finish), (&want.0, &want.1), "{ranks} ranks");
        }
        assert!(*planned.pool.peak.lock().unwrap() <= POOL, "the pool is never overdrawn");
        assert!(planned.pool.reserved.lock().unwrap().is_empty(), "everything was given back");
        // The system prompt was computed once: its mark is kept under the reason that came first, on every rank.
        let cached: Vec<usize> = [0, 1, 4].map(|i: usize| got[i].2.cached_tokens).into();
        assert_eq!(cached, [0, 64, 64], "{ranks} ranks");
        for keeper in &planned.keepers {
            let marks: Vec<_> = keeper.log().into_iter().filter(|k| k.marked).collect();
            assert!(marks.iter().any(|k| k.length == 64 && k.reason == "prefix"), "{marks:?}");
            assert!(marks.iter().all(|k| k.reason == "prefix"), "{marks:?}");
            assert!(keeper.lengths().contains(&64), "prefixes are pushed out last: {:?}", keeper.lengths());
        }
        assert!(*planned.batch.most.lock().unwrap() >= 1);
        assert_eq!(planned.engine.stats().fatal, None);
    }
}

#[test]
fn what_waits_for_a_prefix_or_for_pages_runs_when_they_are_there() {
    let planned = start(1);
    // More than the pool holds, all at once: the first fills it, the rest wait and nobody is lost.
    let jobs: Vec<Request> = (1..8).map(question).collect();
    let handles: Vec<_> = jobs.iter().map(|j| planned.engine.submit(j.clone()).unwrap()).collect();
    for handle in &handles {
        assert_eq!(reply(handle).unwrap().0.len(), 5);
    }
    assert_eq!(planned.engine.stats().waiting, 0);
    assert!(planned.pool.reserved.lock().unwrap().is_empty());
    assert!(planned.prefixes.running.lock().unwrap().is_empty());
    let waited = *planned.prefixes.held.lock().unwrap() + *planned.pool.blocked.lock().unwrap();
    assert!(waited > 0, "four slots, five pages each, a pool of twelve");
}

#[test]
fn a_request_that_never_fits_is_refused_and_blocks_nobody() {
    let planned = start(2);
    let mut large = request(1, 190, 20, Sampling::GREEDY);
    large.background = true;
    let refused = planned.engine.submit(large).unwrap();
    let small = planned.engine.submit(request(2, 9, 3, Sampling::GREEDY)).unwrap();
    let EngineError::Invalid(told) = reply(&refused).unwrap_err() else { panic!("not refused") };
    assert!(told.contains("14 pages for one request, the pool has 12"), "{told}");
    assert_eq!(reply(&small).unwrap().0.len(), 3);
}

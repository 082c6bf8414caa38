//! The course of rounds, thin: a driver that runs several windows a plan (0450), a way to wait (0560, 0630), threads (0530).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use plugfold_abi::points::{
    Bell, BellObject, Observer, ObserverObject, PlanWait, PlanWaitObject, RoundDriver, RoundDriverObject,
    RoundFacts, RoundParts, RoundPartsObject, interest,
};
use plugfold_abi::{OpError, Text, TextBuf};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::Options;
use plugfold_engine::service::{Event, Sampling, Service};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::guess::{Guess, guessing};
use plugfold_tests::model::{engine, options, plain, reply, request};

fn with(options: &Options, ranks: usize, hooks: impl Fn(&mut Hooks)) -> Engine {
    engine(options, ranks, |_| {
        let mut all = Hooks::default();
        hooks(&mut all);
        CoreOptions { hooks: Arc::new(all), ..CoreOptions::default() }
    })
}

const SAMPLED: Sampling = Sampling { temperature: 0.9, top_k: 20, top_p: 0.95, min_p: 0.0, seed: None };

/// Stays resident: several windows, as long as somebody decodes.
struct Resident {
    windows: u32,
    rounds: Arc<AtomicU64>,
}

impl RoundDriver for Resident {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("resident".into())
    }
    fn round(&self, facts: &RoundFacts, parts: &RoundPartsObject) -> Result<(), OpError> {
        self.rounds.fetch_add(1, Ordering::Relaxed);
        parts.admit()?;
        parts.prefill()?;
        let most = if facts.decoding > 0 { self.windows } else { 1 };
        for _ in 0..most {
            if parts.window()? == 0 {
                break;
            }
        }
        Ok(())
    }
}

#[test]
fn several_windows_a_plan_change_no_reply() {
    let jobs = || {
        [(1, 20, 17, Sampling::GREEDY), (2, 7, 30, SAMPLED), (3, 33, 5, Sampling::GREEDY)]
            .map(|(seed, prompt, tokens, sampling)| request(seed, prompt, tokens, sampling))
    };
    let options = options(&tiny_dir(), 2, 16);
    for ranks in [1, 2] {
        let all = |engine: &Engine| -> Vec<_> {
            let handles: Vec<_> = jobs().into_iter().map(|j| engine.submit(j).unwrap()).collect();
            handles.iter().map(|h| reply(h).unwrap()).collect()
        };
        let fresh = engine(&options, ranks, plain);
        let want = all(&fresh);
        let serial = fresh.stats().rounds;
        drop(fresh);
        let rounds = Arc::default();
        let driven = Options { round_driver: Some("resident".into()), ..options.clone() };
        let resident = with(&driven, ranks, |hooks| {
            let driver = Resident { windows: 4, rounds: Arc::clone(&rounds) };
            hooks.add_object("0450", RoundDriverObject::new(driver)).unwrap();
        });
        assert_eq!(all(&resident), want, "{ranks} ranks");
        assert!(resident.stats().rounds * 2 < serial, "{} rounds, {serial} without", resident.stats().rounds);
        assert!(rounds.load(Ordering::Relaxed) > 0);
    }
}

/// Drafts right and wrong in turn.
struct Recorded(Vec<u32>);

impl Guess for Recorded {
    fn guess(&self, ids: &[u32], budget: usize) -> Vec<u32> {
        let mut drafts: Vec<u32> = self.0.iter().skip(ids.len()).take(budget).copied().collect();
        if ids.len().is_multiple_of(3)
            && let Some(last) = drafts.last_mut()
        {
            *last = (*last + 1) % 480;
        }
        drafts
    }
}

#[test]
fn resident_windows_draft_and_stop_where_the_reply_ends() {
    let job = request(1, 20, 23, Sampling::GREEDY);
    let options = options(&tiny_dir(), 1, 16);
    let want = reply(&engine(&options, 1, plain).submit(job.clone()).unwrap()).unwrap();
    let text: Vec<u32> = job.ids.iter().chain(&want.0).copied().collect();
    let driven = Options { round_driver: Some("resident".into()), ..options };
    let resident = engine(&driven, 2, |_| {
        let mut options = guessing(Recorded(text.clone()));
        let mut hooks = (*options.hooks).clone();
        let driver = Resident { windows: 3, rounds: Arc::default() };
        hooks.add_object("0450", RoundDriverObject::new(driver)).unwrap();
        options.hooks = Arc::new(hooks);
        options
    });
    assert_eq!(reply(&resident.submit(job.clone()).unwrap()).unwrap(), want);
    let stats = resident.stats();
    assert!(stats.accepted > 0 && stats.accepted < stats.drafted, "{stats:?}");
    let mut stopped = job;
    stopped.stop_ids = vec![want.0[9]];
    let upto = want.0.iter().position(|t| *t == want.0[9]).unwrap();
    assert_eq!(reply(&resident.submit(stopped).unwrap()).unwrap().0, want.0[..=upto]);
}

/// Waits for company before a plan, and says how it was asked.
struct Coalesce {
    company: u32,
    seen: Arc<Mutex<Vec<u32>>>,
    followed: Arc<AtomicU64>,
}

impl PlanWait for Coalesce {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("coalesce".into())
    }
    fn gather(&self, running: u32, bell: &BellObject) -> Result<(), OpError> {
        // A generous time that no test waits for: company comes first.
        let until = Instant::now() + Duration::from_secs(60);
        while running == 0 && bell.arrived()? < self.company && Instant::now() < until {
            bell.sleep(0.05)?;
        }
        self.seen.lock().unwrap().push(bell.arrived()?);
        Ok(())
    }
    fn follow(&self, bell: &BellObject) -> Result<(), OpError> {
        while !bell.sleep(0.2)? {}
        assert_eq!(bell.arrived()?, 1);
        self.followed.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn a_way_to_wait_lets_requests_begin_together() {
    for ranks in [1, 2] {
        let (seen, followed) = (Arc::<Mutex<Vec<u32>>>::default(), Arc::default());
        let options = Options { plan_wait: Some("coalesce".into()), ..options(&tiny_dir(), 4, 16) };
        let engine = with(&options, ranks, |hooks| {
            let wait = Coalesce { company: 3, seen: seen.clone(), followed: Arc::clone(&followed) };
            hooks.add_object("0560", PlanWaitObject::new(wait)).unwrap();
        });
        let handles: Vec<_> =
            (1..4).map(|seed| engine.submit(request(seed, 9, 6, Sampling::GREEDY)).unwrap()).collect();
        for handle in &handles {
            assert_eq!(reply(handle).unwrap().0.len(), 6);
        }
        assert_eq!(seen.lock().unwrap()[0], 3, "nothing is planned before three are there");
        assert_eq!(engine.stats().fatal, None);
        drop(engine);
        assert_eq!(followed.load(Ordering::Relaxed) > 0, ranks == 2, "followers wait by the same name");
    }
}

/// Counts threads by role.
struct Roles(Arc<Mutex<BTreeMap<String, u64>>>);

impl Observer for Roles {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::THREAD)
    }
    fn thread(&self, role: Text<'_>) -> Result<(), OpError> {
        let on = std::thread::current().name().unwrap_or("").to_owned();
        *self.0.lock().unwrap().entry(format!("{}: {on}", role.get_str())).or_default() += 1;
        Ok(())
    }
}

#[test]
fn threads_are_told_on_themselves() {
    let roles = Arc::<Mutex<BTreeMap<String, u64>>>::default();
    let engine = with(&options(&tiny_dir(), 1, 16), 1, |hooks| {
        hooks.add_object("0530", ObserverObject::new(Roles(roles.clone()))).unwrap();
    });
    let handle = engine.submit(request(1, 5, 2, Sampling::GREEDY)).unwrap();
    assert!(handle.events.iter().any(|e| matches!(e, Event::Done { .. })));
    let roles = roles.lock().unwrap();
    assert_eq!(roles.get("round: plugfold-engine"), Some(&1), "{roles:?}");
    let workers: u64 = roles.iter().filter(|(role, _)| role.starts_with("worker")).map(|(_, n)| n).sum();
    assert!(workers >= 1, "{roles:?}");
}

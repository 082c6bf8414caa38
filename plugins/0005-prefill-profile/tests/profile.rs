//! The acceptance list of 0005, on the tiny model.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use plugfold_0005_prefill_profile::PrefillProfile;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::{
    Below as _, BelowObject, Bits, Call, Claim, Granted, Knob, KnobValue, Knobs, OpError, Plan, Provider,
    ProviderObject, Query, Slice, Text, TextBuf,
};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::knobs::{Effect, Fold, KnobSpec};
use plugfold_engine::rank::Options;
use plugfold_engine::service::{EngineError, Request, Service as _};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::host::Alone;
use plugfold_tests::model::{engine, ids, options, reply};
use plugfold_tests::states::States;

/// Fails the next prefill of which it is asked, in the middle of its program.
struct Fails(Arc<AtomicBool>);

impl Provider for Fails {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok("moe.pick".into())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::of("ref"))))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, below: &BelowObject) -> Result<(), OpError> {
        if self.0.swap(false, Ordering::SeqCst) {
            return Err(OpError::new("planted"));
        }
        below.run(call)
    }
}

/// An engine with the plugin, its log, its states, and what makes a prefill fail.
struct Profiled {
    engine: Engine,
    host: Alone,
    states: States,
    fails: Arc<AtomicBool>,
}

impl Profiled {
    fn new() -> Self {
        let host = Alone::default();
        let all = [Knob { key: "profile".into(), value: KnobValue::Bool(false), id: Some(0).into() }];
        let setup = Setup {
            knobs: Knobs { all: Slice::from(&all[..]) },
            host: host.object(),
            device_class: Text::from("cpu"),
        };
        let mut hooks = Hooks::default();
        for offer in PrefillProfile.configure(&setup).unwrap() {
            hooks.add("0005", &[], offer).unwrap();
        }
        let spec = KnobSpec { name: "0005.profile".into(), fold: Fold::Any, effect: Effect::Speed };
        hooks.knobs.specs = [spec].into();
        hooks.knobs.defaults = [KnobValue::Bool(false)].into();
        let fails = Arc::<AtomicBool>::default();
        hooks.add_object("fails", ProviderObject::new(Fails(fails.clone()))).unwrap();
        let states = States::of(&mut hooks);
        let hooks = Arc::new(hooks);
        let options = Options { context: Some(1024), ..options(&tiny_dir(), 1, 512) };
        let core = |_| CoreOptions { hooks: hooks.clone(), ..CoreOptions::default() };
        Self { engine: engine(&options, 1, core), host, states, fails }
    }

    fn ask(&self, seed: u64, profile: Option<bool>) -> Result<Vec<u32>, EngineError> {
        let knobs = profile.map(|on| [KnobValue::Bool(on)].into());
        let asked = Request { ids: ids(seed, 700, 480), max_tokens: 2, knobs, ..Request::default() };
        reply(&self.engine.submit(asked).unwrap()).map(|(tokens, _)| tokens)
    }

    /// The reports since the last look.
    fn reports(&self, seen: &mut usize) -> Vec<serde_json::Value> {
        let lines = self.host.lines();
        let new = lines[*seen..].iter().filter_map(|l| l.strip_prefix("PREFILL_PROFILE "));
        let reports = new.map(|l| serde_json::from_str(l).unwrap()).collect();
        *seen = lines.len();
        reports
    }
}

#[test]
fn states_are_the_same_with_the_probe_and_without_it() {
    let run = |on| {
        let profiled = Profiled::new();
        let told = profiled.ask(1, Some(on)).unwrap();
        (told, profiled.states.take(), profiled.reports(&mut 0).len())
    };
    let ((told, states, none), (same, probed, one)) = (run(false), run(true));
    assert!(!states.is_empty() && states == probed && told == same);
    assert_eq!((none, one), (0, 1));
}

#[test]
fn a_prompt_of_700_tokens_in_chunks_of_512_is_told_in_full() {
    let profiled = Profiled::new();
    profiled.ask(1, Some(true)).unwrap();
    let reports = profiled.reports(&mut 0);
    let [report] = &reports[..] else { panic!("{reports:?}") };
    for (key, want) in [("tokens", 700), ("cached", 0), ("rows", 700), ("chunks", 2)] {
        assert_eq!(report[key], want, "{report}");
    }
    let parts: Vec<f64> = report["ms"].as_object().unwrap().values().map(|v| v.as_f64().unwrap()).collect();
    assert!(parts.len() > 10 && parts.iter().all(|ms| *ms >= 0.0), "{report}");
    let (sum, total) = (parts.iter().sum::<f64>(), report["ms_total"].as_f64().unwrap());
    assert!((sum - total).abs() <= 1e-6 * total.max(1.0), "{sum} of {total}");
}

#[test]
fn only_who_asks_is_told_and_a_prefill_that_fails_leaves_no_session() {
    let profiled = Profiled::new();
    let mut seen = 0;
    let mut reports = |seed, on| {
        let done = profiled.ask(seed, on).is_ok();
        (done, profiled.reports(&mut seen).iter().map(|r| r["tokens"].clone()).collect::<Vec<_>>())
    };
    let told = vec![serde_json::json!(700)];
    assert_eq!(reports(1, None), (true, vec![]));
    assert_eq!(reports(2, Some(true)), (true, told.clone()));
    assert_eq!(reports(3, None), (true, vec![]), "the server's own value is back");
    profiled.fails.store(true, Ordering::SeqCst);
    assert_eq!(reports(4, Some(true)), (false, vec![]), "nothing is told of half a prefill");
    assert_eq!(reports(5, None), (true, vec![]), "and it is not told as another's");
    assert_eq!(reports(6, Some(true)), (true, told), "the next that asks is told as ever");
}

//! The executor in force and the policy of capture, thin: recorded and replayed programs, raised bounds, a script.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use plugfold_abi::points::{
    BatchFacts, Bounds, Capture, CaptureFacts, CaptureObject, Executor, ExecutorObject, FieldId, FieldPer,
    FieldSpec, Fields, FieldsObject, Launch, Launched, Mode, Observer, ObserverObject, Steps, StepsObject,
    interest,
};
use plugfold_abi::{Call, DType, List, OpError, Phase, Program, TextBuf, View};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{EngineError, Sampling, Service};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::model::{engine, options, plain, reply, request};

fn with(executor: &str, hooks: impl Fn(&mut Hooks) + Copy, ranks: usize) -> Engine {
    let options = Options { executor: Some(executor.into()), ..options(&tiny_dir(), 2, 16) };
    engine(&options, ranks, |_| {
        let mut all = Hooks::default();
        hooks(&mut all);
        CoreOptions { hooks: Arc::new(all), ..CoreOptions::default() }
    })
}

/// What became of forwards, by mode.
#[derive(Default)]
struct Tally {
    modes: Mutex<HashMap<&'static str, u64>>,
    order: Mutex<Vec<&'static str>>,
}

impl Tally {
    fn count(&self, mode: Mode) {
        let name = match mode {
            Mode::Eager => "eager",
            Mode::Capture => "capture",
            Mode::Replay => "replay",
        };
        *self.modes.lock().unwrap().entry(name).or_default() += 1;
    }
    fn of(&self, mode: &str) -> u64 {
        self.modes.lock().unwrap().get(mode).copied().unwrap_or(0)
    }
    fn says(&self, what: &'static str) {
        let mut order = self.order.lock().unwrap();
        if order.len() < 64 {
            order.push(what);
        }
    }
}

/// Keeps the numbers of what it captured, and takes what it replays in other stretches.
struct Recorder {
    tally: Arc<Tally>,
    kept: Mutex<HashMap<u64, u64>>,
}

impl Executor for Recorder {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("recorder".into())
    }
    fn run(&self, launch: &Launch<'_>, steps: &StepsObject) -> Result<Mode, OpError> {
        let all = launch.program.steps.len() as u32;
        let kept = self.kept.lock().unwrap().get(&launch.number) == Some(&launch.memory);
        let mode = match launch.mode {
            // What was captured lies elsewhere now, or never was.
            Mode::Replay if !kept => Mode::Eager,
            mode => mode,
        };
        self.tally.count(mode);
        match mode {
            Mode::Eager => drop(steps.run(all)?),
            Mode::Capture => {
                steps.run(all)?;
                self.kept.lock().unwrap().insert(launch.number, launch.memory);
            }
            Mode::Replay => {
                self.tally.says("before");
                steps.run(launch.late)?;
                self.tally.says("past late");
                steps.run(all)?;
            }
        }
        Ok(mode)
    }
}

/// Every shape is captured the second time it is seen, at most so many.
struct SecondTime {
    most: u32,
}

impl Capture for SecondTime {
    fn mode(&self, facts: &CaptureFacts<'_>, mode: &mut Mode) -> Result<(), OpError> {
        *mode = match (facts.sightings, facts.captured) {
            (_, true) => Mode::Replay,
            (1.., false) if facts.captures < self.most => Mode::Capture,
            _ => Mode::Eager,
        };
        Ok(())
    }
}

/// Raises every window to the largest, so that one program serves all.
struct Pad;

impl Capture for Pad {
    fn bounds(&self, batch: &BatchFacts<'_>, bounds: &mut Bounds) -> Result<(), OpError> {
        if batch.phase == Phase::Window {
            *bounds = Bounds { rows: 16, seqs: 2, out_rows: 16 };
        }
        Ok(())
    }
}

/// A late field that says when it is filled.
struct Late(Arc<Tally>);

impl Fields for Late {
    fn spec(&self) -> Result<FieldSpec, OpError> {
        Ok(FieldSpec { name: "late".into(), dtype: DType::U32, per: FieldPer::Row, width: 1, late: true })
    }
    fn numbered(&self, _: FieldId) -> Result<(), OpError> {
        Ok(())
    }
    fn fill(&self, _: &BatchFacts<'_>, _: View) -> Result<(), OpError> {
        self.0.says("late");
        Ok(())
    }
}

/// Says when forwards are under way, and sees the rows of the head.
struct Watching {
    tally: Arc<Tally>,
    heads: Arc<AtomicU64>,
    forwards: Arc<AtomicU64>,
}

impl Observer for Watching {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::LAUNCHED)
    }
    fn watches(&self) -> Result<List<TextBuf>, OpError> {
        Ok(List::from(vec!["head".into()]))
    }
    fn ran(&self, call: &Call<'_>) -> Result<(), OpError> {
        self.heads.fetch_add(u64::from(call.outputs[0].rows), Ordering::Relaxed);
        Ok(())
    }
    fn launched(&self, forward: &Launched<'_>) -> Result<(), OpError> {
        if forward.mode == Mode::Replay {
            self.tally.says("launched");
        }
        Ok(())
    }
    fn forward(&self, forward: &Launched<'_>, seconds: f64) -> Result<(), OpError> {
        assert!(seconds >= 0.0 && forward.rows > 0);
        self.forwards.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn captured_programs_replay_with_the_same_bits() {
    let jobs = || [request(1, 20, 12, Sampling::GREEDY), request(2, 9, 12, Sampling::GREEDY)];
    for ranks in [1, 2] {
        let fresh = engine(&options(&tiny_dir(), 2, 16), ranks, plain);
        let want: Vec<_> = jobs().into_iter().map(|j| reply(&fresh.submit(j).unwrap()).unwrap()).collect();
        drop(fresh);
        let (tally, heads, forwards) = (Arc::<Tally>::default(), Arc::default(), Arc::default());
        let hooks = |hooks: &mut Hooks| {
            let tally = tally.clone();
            let recorder = Recorder { tally: tally.clone(), kept: Mutex::default() };
            hooks.add_object("base-graph", ExecutorObject::new(recorder)).unwrap();
            hooks.add_object("base-graph", CaptureObject::new(SecondTime { most: 4 })).unwrap();
            hooks.add_object("0200", CaptureObject::new(Pad)).unwrap();
            hooks.add_object("0610", FieldsObject::new(Late(tally.clone()))).unwrap();
            let watching = Watching { tally, heads: Arc::clone(&heads), forwards: Arc::clone(&forwards) };
            hooks.add_object("0370", ObserverObject::new(watching)).unwrap();
        };
        let two = with("recorder", hooks, ranks);
        for _ in 0..2 {
            let handles: Vec<_> = jobs().into_iter().map(|j| two.submit(j).unwrap()).collect();
            let got: Vec<_> = handles.iter().map(|h| reply(h).unwrap()).collect();
            assert_eq!(got, want, "{ranks} ranks");
        }
        assert!(tally.of("capture") > 0 && tally.of("replay") > tally.of("capture"), "{ranks} ranks");
        assert!(tally.of("capture") <= 4 * ranks as u64, "no more shapes than the policy allows");
        // Two times 24 tokens, seen on every rank.
        assert_eq!(heads.load(Ordering::Relaxed), 48 * ranks as u64);
        let ran = tally.of("eager") + tally.of("capture") + tally.of("replay");
        assert_eq!(forwards.load(Ordering::Relaxed), ran);
        if ranks == 1 {
            // *launched* is told and late fields are filled between the head and what comes after it.
            let order = tally.order.lock().unwrap();
            let at = order.iter().position(|s| *s == "before").unwrap();
            assert_eq!(order[at..at + 4], ["before", "launched", "late", "past late"]);
        }
    }
}

/// Runs nothing: says what the model would have said.
struct Script {
    text: Vec<u32>,
    /// Buffers of each program: candidates' values and ids.
    buffers: Mutex<HashMap<u64, [Option<u32>; 2]>>,
}

fn numbers<T: Copy>(view: View, fill: impl Fn(usize, usize) -> T) {
    for row in 0..view.rows as usize {
        for col in 0..view.cols as usize {
            #[allow(clippy::cast_ptr_alignment)] // buffers lie on multiples of 64 bytes
            let first = view.ptr.cast::<T>();
            // SAFETY: the buffer has these rows and columns, and nothing else runs.
            unsafe { *first.add(row * view.stride as usize + col) = fill(row, col) };
        }
    }
}

impl Executor for Script {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("scripted".into())
    }
    fn prepare(&self, number: u64, program: &Program) -> Result<(), OpError> {
        let named = |name: &str| program.buffers.iter().position(|b| b.name.as_str() == name);
        let found = ["values", "ids"].map(|name| named(name).map(|at| at as u32));
        self.buffers.lock().unwrap().insert(number, found);
        Ok(())
    }
    fn run(&self, launch: &Launch<'_>, steps: &StepsObject) -> Result<Mode, OpError> {
        steps.ran(launch.program.steps.len() as u32)?;
        let found = self.buffers.lock().unwrap()[&launch.number];
        if let [Some(values), Some(ids)] = found {
            let said = |row: usize| {
                let at = launch.round.positions[launch.round.out_rows[row] as usize] as usize;
                self.text[(at + 1) % self.text.len()]
            };
            numbers(steps.buffer(values)?, |_, col| if col == 0 { 1.0f32 } else { f32::NEG_INFINITY });
            numbers(steps.buffer(ids)?, |row, _| said(row) as i32);
        }
        Ok(launch.mode)
    }
}

#[test]
fn a_script_says_what_it_is_given_on_any_ranks() {
    for ranks in [1, 2] {
        let hooks = |hooks: &mut Hooks| {
            let script = Script { text: (100..140).collect(), buffers: Mutex::default() };
            hooks.add_object("base-scripted", ExecutorObject::new(script)).unwrap();
        };
        let engine = with("scripted", hooks, ranks);
        let handles: Vec<_> =
            [5, 30].map(|n| (n, engine.submit(request(1, n, 8, Sampling::GREEDY)).unwrap())).into();
        for (prompt, handle) in handles {
            let want: Vec<u32> = (0..8).map(|i| 100 + (prompt as u32 + i) % 40).collect();
            assert_eq!(reply(&handle).unwrap().0, want, "{ranks} ranks");
        }
    }
}

/// Takes steps that it must not.
struct Wrong(fn(&Launch<'_>, &StepsObject) -> Result<(), OpError>);

impl Executor for Wrong {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("wrong".into())
    }
    fn run(&self, launch: &Launch<'_>, steps: &StepsObject) -> Result<Mode, OpError> {
        (self.0)(launch, steps)?;
        Ok(Mode::Eager)
    }
}

#[test]
fn an_executor_that_does_not_keep_to_the_rules_fails_its_request_on_all_ranks() {
    type Deed = fn(&Launch<'_>, &StepsObject) -> Result<(), OpError>;
    let deeds: [(Deed, &str); 4] = [
        (|_, _| Ok(()), "its executor left steps 0 to"),
        (|_, steps| steps.run(3).map(|_| ()), "its executor left steps 3 to"),
        (|_, steps| steps.run(100_000).map(|_| ()), "stretches go forward"),
        (|_, steps| steps.run(5).and_then(|_| steps.ran(4)), "stretches go forward"),
    ];
    for (deed, says) in deeds {
        for ranks in [1, 2] {
            let hooks = |hooks: &mut Hooks| {
                hooks.add_object("w", ExecutorObject::new(Wrong(deed))).unwrap();
            };
            let engine = with("wrong", hooks, ranks);
            for _ in 0..2 {
                let failed = reply(&engine.submit(request(1, 9, 3, Sampling::GREEDY)).unwrap()).unwrap_err();
                let EngineError::Failed(told) = &failed else { panic!("{failed:?}") };
                assert!(told.contains(says) && told.contains("run by w"), "{ranks} ranks: {told}");
            }
            assert_eq!(engine.stats().fatal, None);
        }
    }
}

#[test]
fn a_name_that_nobody_brings_and_one_that_two_bring_refuse_the_start() {
    let load = |name: Option<&str>, owners: &[&str]| {
        let mut hooks = Hooks::default();
        for owner in owners {
            hooks.add_object(owner, ExecutorObject::new(Wrong(|_, _| Ok(())))).unwrap();
        }
        let options = Options { executor: name.map(Into::into), ..options(&tiny_dir(), 1, 16) };
        let core = CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() };
        Rank::load(&options, core, World::single()).err().map(|e| e.to_string())
    };
    assert_eq!(load(None, &["a"]), None, "what is not asked for is not used");
    assert_eq!(load(Some("wrong"), &["a"]), None);
    let told = load(Some("graph"), &["a"]).unwrap();
    assert_eq!(told, "no loaded plugin brings the executor `graph`; there are: wrong");
    let told = load(None, &["a", "b"]).unwrap();
    assert!(told.contains("two plugins bring executor `wrong` (the second is b)"), "{told}");
}

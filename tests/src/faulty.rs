//! Hooks that do nothing, but for one that fails when it is asked to: what a fault anywhere must come to.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use plugfold_abi::points::{
    Absorbed, Ask, BatchFacts, Bell, BellObject, Bounds, Capture, CaptureFacts, CaptureObject, Choice,
    DraftCut, DraftCutObject, DraftPolicy, DraftPolicyObject, Drafter, DrafterObject, Draw, Ended, Executor,
    ExecutorObject, FieldId, FieldPer, FieldSpec, Fields, FieldsObject, Forwards, ForwardsObject, HeadRows,
    Launch, Launched, Mark, Mode, Observed, Observer, ObserverObject, PieceChoice, PlanFacts, PlanWait,
    PlanWaitObject, Planner, PlannerObject, Proposal, RequestFacts, Rider, RiderObject, RoundDone,
    RoundDriver, RoundDriverObject, RoundFacts, RoundParts, RoundPartsObject, SaveFacts, Section,
    SectionObject, SequenceEvent, SequenceFacts, SequencesObject, SpanChoice, SpanFacts, Spans, SpansObject,
    StatePart, StatePartObject, Steps, StepsObject, Store, StoreObject, StoreOffer, Verdict, Wants, Words,
    WordsObject, interest,
};
use plugfold_abi::{
    Below, BelowObject, Bits, Call, Claim, DType, Granted, KnobValue, List, OpError, Plan, Provider,
    ProviderObject, Query, Slice, SliceMut, TextBuf, View,
};
use plugfold_engine::hooks::Hooks;

/// Owner of the faulty hooks.
pub const OWNER: &str = "faulty";

/// What a hook does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deed {
    /// It gives an error.
    Error,
    /// It panics.
    Panic,
    /// It takes its time, and is right.
    Delay,
    /// It does not return.
    Hang,
}

/// The one fault of a rank: nothing until it is lit, and then once.
#[derive(Default)]
pub struct Fuse {
    lit: Mutex<Option<(String, Deed)>>,
    fired: AtomicU64,
}

impl Fuse {
    /// From now on the hook fails when it is called next.
    pub fn light(&self, point: &str, deed: Deed) {
        *self.lit.lock().unwrap_or_else(PoisonError::into_inner) = Some((point.to_owned(), deed));
    }

    /// Forgets a fault that no call has met; whether there was one.
    pub fn put_out(&self) -> bool {
        self.lit.lock().unwrap_or_else(PoisonError::into_inner).take().is_some()
    }

    /// How many faults there were.
    pub fn fired(&self) -> u64 {
        self.fired.load(Ordering::SeqCst)
    }

    fn at(&self, point: &str) -> Result<(), OpError> {
        let deed = {
            let mut lit = self.lit.lock().unwrap_or_else(PoisonError::into_inner);
            match &*lit {
                Some((at, _)) if at == point => lit.take().map(|(_, deed)| deed),
                _ => None,
            }
        };
        let Some(deed) = deed else { return Ok(()) };
        self.fired.fetch_add(1, Ordering::SeqCst);
        match deed {
            Deed::Error => Err(OpError::new(format!("planted at {point}"))),
            Deed::Panic => panic!("planted at {point}"),
            Deed::Delay => {
                std::thread::sleep(Duration::from_millis(30));
                Ok(())
            }
            Deed::Hang => loop {
                std::thread::park();
            },
        }
    }
}

/// One hook at every point that is called while an engine serves, and a provider of every operation.
///
/// # Panics
/// When a hook is not one of this build.
pub fn hooks(fuse: &Arc<Fuse>) -> Hooks {
    let mut hooks = Hooks::default();
    let faulty = || Faulty(fuse.clone());
    let ops: std::collections::BTreeSet<String> = operations().into_iter().collect();
    let add = || -> Result<(), plugfold_engine::hooks::OfferError> {
        for op in ops {
            hooks.add_object(OWNER, ProviderObject::new(Through { op, fuse: fuse.clone() }))?;
        }
        hooks.add_object(OWNER, WordsObject::new(faulty()))?;
        hooks.add_object(OWNER, FieldsObject::new(Field(faulty(), false)))?;
        hooks.add_object(OWNER, FieldsObject::new(Field(faulty(), true)))?;
        hooks.add_object(OWNER, CaptureObject::new(faulty()))?;
        hooks.add_object(OWNER, ExecutorObject::new(faulty()))?;
        hooks.add_object(OWNER, PlanWaitObject::new(faulty()))?;
        hooks.add_object(OWNER, RoundDriverObject::new(faulty()))?;
        hooks.add_object(OWNER, PlannerObject::new(faulty()))?;
        hooks.add_object(OWNER, SpansObject::new(faulty()))?;
        hooks.add_object(OWNER, DrafterObject::new(faulty()))?;
        hooks.add_object(OWNER, DraftPolicyObject::new(faulty()))?;
        hooks.add_object(OWNER, DraftCutObject::new(faulty()))?;
        hooks.add_object(OWNER, ObserverObject::new(faulty()))?;
        hooks.add_object(OWNER, StoreObject::new(faulty()))?;
        hooks.add_object(OWNER, StatePartObject::new(faulty()))?;
        hooks.add_object(OWNER, SectionObject::new(faulty()))?;
        hooks.add_object(OWNER, RiderObject::new(faulty()))
    };
    add().unwrap_or_else(|e| panic!("{e}"));
    hooks
}

/// Operations of the reference.
pub fn operations() -> Vec<String> {
    let all = plugfold_kernels::cpu::reference();
    let mut names: Vec<String> = all.iter().filter_map(|p| p.op().ok()).map(|op| op.to_string()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

struct Faulty(Arc<Fuse>);

struct Through {
    op: String,
    fuse: Arc<Fuse>,
}

impl Provider for Through {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.op.as_str().into())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::of("ref"))))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, below: &BelowObject) -> Result<(), OpError> {
        self.fuse.at(&self.op)?;
        below.run(call)
    }
}

impl Words for Faulty {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(OWNER.into())
    }
    fn value(&self, _: &BatchFacts<'_>) -> Result<u64, OpError> {
        self.0.at("words.value")?;
        Ok(0)
    }
}

struct Field(Faulty, bool);

impl Fields for Field {
    fn spec(&self) -> Result<FieldSpec, OpError> {
        let name = if self.1 { "late" } else { "early" };
        Ok(FieldSpec { name: name.into(), dtype: DType::U32, per: FieldPer::Row, width: 1, late: self.1 })
    }
    fn numbered(&self, _: FieldId) -> Result<(), OpError> {
        Ok(())
    }
    fn fill(&self, _: &BatchFacts<'_>, _: View) -> Result<(), OpError> {
        self.0.0.at(if self.1 { "field.fill late" } else { "field.fill" })
    }
}

impl Capture for Faulty {
    fn bounds(&self, _: &BatchFacts<'_>, _: &mut Bounds) -> Result<(), OpError> {
        self.0.at("capture.bounds")
    }
    fn mode(&self, _: &CaptureFacts<'_>, _: &mut Mode) -> Result<(), OpError> {
        self.0.at("capture.mode")
    }
}

impl Executor for Faulty {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(OWNER.into())
    }
    fn run(&self, launch: &Launch<'_>, steps: &StepsObject) -> Result<Mode, OpError> {
        let all = launch.program.steps.len() as u32;
        self.0.at("executor.run before")?;
        steps.run(all / 2)?;
        self.0.at("executor.run between")?;
        steps.run(all)?;
        self.0.at("executor.run after")?;
        Ok(launch.mode)
    }
}

impl PlanWait for Faulty {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(OWNER.into())
    }
    fn idle(&self, bell: &BellObject) -> Result<(), OpError> {
        bell.sleep(f64::INFINITY)?;
        self.0.at("plan-wait.idle")
    }
    fn gather(&self, _: u32, _: &BellObject) -> Result<(), OpError> {
        self.0.at("plan-wait.gather")
    }
    fn follow(&self, bell: &BellObject) -> Result<(), OpError> {
        bell.sleep(f64::INFINITY)?;
        self.0.at("plan-wait.follow")
    }
}

impl RoundDriver for Faulty {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(OWNER.into())
    }
    fn round(&self, _: &RoundFacts, parts: &RoundPartsObject) -> Result<(), OpError> {
        parts.admit()?;
        parts.prefill()?;
        self.0.at("round-driver.round")?;
        parts.window().map(|_| ())
    }
}

impl Planner for Faulty {
    fn order(&self, _: &PlanFacts<'_>, _: &mut List<u64>) -> Result<(), OpError> {
        self.0.at("planner.order")
    }
    fn step_aside(&self, _: &PlanFacts<'_>, _: &mut List<u32>) -> Result<(), OpError> {
        self.0.at("planner.step_aside")
    }
    fn place(
        &self,
        _: &PlanFacts<'_>,
        _: &RequestFacts<'_>,
        _: Slice<'_, StoreOffer>,
        _: &mut Verdict,
    ) -> Result<(), OpError> {
        self.0.at("planner.place")
    }
    fn admit(&self, _: &PlanFacts<'_>, _: &RequestFacts<'_>, _: &mut Verdict) -> Result<(), OpError> {
        self.0.at("planner.admit")
    }
    fn marks(&self, _: &RequestFacts<'_>, _: u32, _: &mut List<Mark>) -> Result<(), OpError> {
        self.0.at("planner.marks")
    }
    fn pieces(&self, _: &PlanFacts<'_>, _: &mut List<PieceChoice>) -> Result<(), OpError> {
        self.0.at("planner.pieces")
    }
    fn decode(&self, _: &PlanFacts<'_>, _: &mut List<u32>) -> Result<(), OpError> {
        self.0.at("planner.decode")
    }
}

impl Spans for Faulty {
    fn spans(&self, _: &SpanFacts<'_>, _: &mut List<SpanChoice>) -> Result<(), OpError> {
        self.0.at("spans.spans")
    }
}

/// Proposes what the draft layer says first, and then nonsense, so that windows are cut.
impl Drafter for Faulty {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(OWNER.into())
    }
    fn wants(&self) -> Result<Wants, OpError> {
        Ok(Wants { hidden: true, mtp_layer: true })
    }
    fn begun(&self, _: u32, _: Slice<'_, u32>, _: u32) -> Result<(), OpError> {
        self.0.at("drafter.begun")
    }
    fn absorb(&self, absorbed: &Absorbed<'_>, forwards: &ForwardsObject) -> Result<(), OpError> {
        self.0.at("drafter.absorb")?;
        let (n, width) = (absorbed.tokens.len(), forwards.hidden_size()? as usize);
        if n < 2 {
            return Ok(());
        }
        let rows = [HeadRows {
            slot: absorbed.slot,
            start: absorbed.start,
            position: absorbed.start + 1,
            next_ids: Slice::from(&absorbed.tokens[1..]),
            hidden: Slice::from(&absorbed.hidden[..(n - 1) * width]),
            pick: false,
            draw: Draw::BEST,
        }];
        forwards.head(Slice::from(&rows[..])).map(|_| ())
    }
    fn propose(
        &self,
        asks: Slice<'_, Ask<'_>>,
        forwards: &ForwardsObject,
    ) -> Result<List<Proposal>, OpError> {
        self.0.at("drafter.propose")?;
        let width = forwards.hidden_size()? as usize;
        let hidden = vec![0.5; width];
        let mut all = List::new();
        for ask in asks.iter() {
            let next = [ask.pending];
            let rows = [HeadRows {
                slot: ask.slot,
                start: ask.length,
                position: ask.length,
                next_ids: Slice::from(&next[..]),
                hidden: Slice::from(&hidden[..]),
                pick: true,
                draw: ask.draw,
            }];
            let picked = forwards.head(Slice::from(&rows[..]))?;
            let first = picked.first().map_or(0, |out| out.token);
            all.push(Proposal { tokens: vec![first, ask.length % 480].into(), probabilities: List::new() });
        }
        Ok(all)
    }
    fn ended(&self, _: u32) -> Result<(), OpError> {
        self.0.at("drafter.ended")
    }
}

impl DraftPolicy for Faulty {
    fn decide(&self, _: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> Result<(), OpError> {
        self.0.at("policy.decide")?;
        for choice in choices.iter_mut() {
            (choice.drafter, choice.budget) = (0, 2);
        }
        Ok(())
    }
    fn observe(&self, _: &Observed) -> Result<(), OpError> {
        self.0.at("policy.observe")
    }
    fn begun(&self, _: u32, _: Slice<'_, KnobValue>) -> Result<(), OpError> {
        self.0.at("policy.begun")
    }
    fn ended(&self, _: u32) -> Result<(), OpError> {
        self.0.at("policy.ended")
    }
}

impl DraftCut for Faulty {
    fn cut(&self, _: u32, _: u32, drafts: Slice<'_, u32>) -> Result<u32, OpError> {
        self.0.at("drafts.cut")?;
        Ok(drafts.len() as u32)
    }
}

impl Observer for Faulty {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::PLAN
            | interest::ROUND
            | interest::SEQUENCE
            | interest::OPERATION
            | interest::REQUEST
            | interest::LAUNCHED)
    }
    fn planned(&self, _: u64, _: u32, _: u32, _: u32) -> Result<(), OpError> {
        self.0.at("observer.planned")
    }
    fn round(&self, _: &RoundDone) -> Result<(), OpError> {
        self.0.at("observer.round")
    }
    fn sequence(&self, _: u32, _: &SequenceEvent<'_>) -> Result<(), OpError> {
        self.0.at("observer.sequence")
    }
    fn times(&self, _: Slice<'_, KnobValue>) -> Result<bool, OpError> {
        self.0.at("observer.times")?;
        Ok(true)
    }
    fn operation(&self, _: &plugfold_abi::points::OpDone<'_>) -> Result<(), OpError> {
        self.0.at("observer.operation")
    }
    fn watches(&self) -> Result<List<TextBuf>, OpError> {
        Ok(List::from(vec!["head".into()]))
    }
    fn ran(&self, _: &Call<'_>) -> Result<(), OpError> {
        self.0.at("observer.ran")
    }
    fn launched(&self, _: &Launched<'_>) -> Result<(), OpError> {
        self.0.at("observer.launched")
    }
    fn forward(&self, _: &Launched<'_>, _: f64) -> Result<(), OpError> {
        self.0.at("observer.forward")
    }
    fn arrived(&self, _: u64, _: Slice<'_, u32>) -> Result<(), OpError> {
        self.0.at("observer.arrived")
    }
    fn request(&self, _: &Ended<'_>) -> Result<TextBuf, OpError> {
        self.0.at("observer.request")?;
        Ok(TextBuf::new())
    }
}

/// Keeps nothing, but decides and is asked as if it did.
impl Store for Faulty {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(OWNER.into())
    }
    fn offer(&self, request: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        self.0.at("store.offer")?;
        // Prompts of an even length are left to what slots keep.
        let length = request.ids.len() as u32;
        let offer = StoreOffer { store: 0, ticket: 7, length: length - 1, price_ms: 0.0, slot: u32::MAX };
        Ok(List::from(if length % 2 == 1 { vec![offer] } else { Vec::new() }))
    }
    fn decide(&self, _: &SaveFacts<'_>, _: &SequencesObject) -> Result<List<u8>, OpError> {
        self.0.at("store.decide")?;
        Ok(List::from(vec![1]))
    }
    fn save(&self, _: &SaveFacts<'_>, _: Slice<'_, u8>, _: &SequencesObject) -> Result<(), OpError> {
        self.0.at("store.save")
    }
    fn resume(&self, _: u64, _: u32, _: &SequencesObject) -> Result<bool, OpError> {
        self.0.at("store.resume")?;
        Ok(false)
    }
    fn digest(&self) -> Result<u64, OpError> {
        self.0.at("store.digest")?;
        Ok(0)
    }
    fn overwritten(&self, _: u32, _: u32) -> Result<(), OpError> {
        self.0.at("store.overwritten")
    }
    fn figures(&self) -> Result<List<plugfold_abi::points::Figure>, OpError> {
        self.0.at("store.figures")?;
        Ok(List::new())
    }
}

impl StatePart for Faulty {
    fn id(&self) -> Result<TextBuf, OpError> {
        Ok(OWNER.into())
    }
    fn version(&self) -> Result<u32, OpError> {
        Ok(1)
    }
    fn begin(&self, _: u32) -> Result<(), OpError> {
        self.0.at("part.begin")
    }
    fn save(&self, _: u32, _: &mut List<u8>) -> Result<(), OpError> {
        self.0.at("part.save")
    }
    fn load(&self, _: u32, _: Slice<'_, u8>) -> Result<(), OpError> {
        self.0.at("part.load")
    }
}

impl Section for Faulty {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(OWNER.into())
    }
    fn write(&self, round: u64) -> Result<List<u8>, OpError> {
        self.0.at("section.write")?;
        Ok(List::from(round.to_le_bytes().to_vec()))
    }
    fn read(&self, _: u64, _: Slice<'_, u8>) -> Result<(), OpError> {
        self.0.at("section.read")
    }
}

impl Rider for Faulty {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(OWNER.into())
    }
    fn words(&self) -> Result<u32, OpError> {
        Ok(1)
    }
    fn write(&self, _: SliceMut<'_, u32>) -> Result<(), OpError> {
        self.0.at("rider.write")
    }
    fn read(&self, _: Slice<'_, u32>) -> Result<(), OpError> {
        self.0.at("rider.read")
    }
}

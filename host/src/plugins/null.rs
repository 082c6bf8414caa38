//! A hook at every point that does nothing: what the boundary itself costs.
//!
//! `plugfold bench hooks` runs an engine with these against one with none; a test counts what they allocate.

use plugfold_abi::points::{
    Ask, Choice, DraftCut, DraftCutObject, DraftPolicy, DraftPolicyObject, Drafter, DrafterObject, Families,
    FieldId, FieldPer, FieldSpec, Fields, FieldsObject, ForwardsObject, LayoutLink, LayoutLinkObject, Limits,
    LimitsLink, LimitsLinkObject, Observer, ObserverObject, Planner, PlannerObject, PromptLink,
    PromptLinkObject, Proposal, ReplyLink, ReplyLinkObject, RequestFacts, RequestLink, RequestLinkObject,
    Rider, RiderObject, SaveFacts, Section, SectionObject, SequenceFacts, SequencesObject, SpanChoice,
    SpanFacts, Spans, SpansObject, StatePart, StatePartObject, Store, StoreObject, StoreOffer, StreamLink,
    StreamLinkObject, StreamPiece, Transport, TransportObject, WeightLink, WeightLinkObject, Words,
    WordsObject, interest,
};
use plugfold_abi::points::{
    BatchFacts, Capture, CaptureObject, Command, CommandObject, ControlObject, DeviceAccessObject, Executor,
    ExecutorObject, Figure, Launch, Mapper, MapperObject, Matrix, MatrixRowsObject, Mode, Piece, PlanWait,
    PlanWaitObject, Prepared, PreparedKey, PreparedStore, PreparedStoreObject, RoundDriver,
    RoundDriverObject, RoundFacts, RoundPartsObject, StepsObject, WeightBuilder, WeightBuilderObject,
    WeightLayout,
};
use plugfold_abi::{
    BelowObject, Bits, Call, Claim, CommObject, DType, Granted, List, Maybe, OpError, Pass, PassContext,
    PassObject, Plan, Program, Provider, ProviderObject, Query, Slice, SliceMut, Text, TextBuf, View,
};
use plugfold_engine::hooks::{Hooks, OfferError};
use plugfold_engine::rank::Options;

/// Owner of the null hooks.
pub const NULL: &str = "null";

/// Every observer's interest.
const ALL: u32 = interest::BOOT
    | interest::PLAN
    | interest::ROUND
    | interest::SEQUENCE
    | interest::OPERATION
    | interest::REQUEST
    | interest::LAUNCHED
    | interest::THREAD;

/// One null hook at each point, and one null provider for each operation of the reference.
///
/// # Errors
/// A reference provider that does not say what it runs.
pub fn hooks() -> Result<Hooks, OfferError> {
    let mut hooks = Hooks::default();
    let mut ops: Vec<TextBuf> = Vec::new();
    for provider in plugfold_kernels::cpu::reference() {
        // The reference answers without fail; an operation that it could not name would be in no program.
        let Ok(op) = provider.op() else { continue };
        if !ops.contains(&op) {
            ops.push(op);
        }
    }
    for op in ops {
        hooks.add_object(NULL, ProviderObject::new(Through(op)))?;
    }
    hooks.add_object(NULL, PassObject::new(Null))?;
    hooks.add_object(NULL, LimitsLinkObject::new(Null))?;
    hooks.add_object(NULL, LayoutLinkObject::new(Null))?;
    hooks.add_object(NULL, MapperObject::new(Null))?;
    hooks.add_object(NULL, WordsObject::new(Null))?;
    hooks.add_object(NULL, FieldsObject::new(Null))?;
    hooks.add_object(NULL, PlannerObject::new(Null))?;
    hooks.add_object(NULL, SpansObject::new(Null))?;
    hooks.add_object(NULL, DrafterObject::new(Null))?;
    hooks.add_object(NULL, DraftPolicyObject::new(Null))?;
    hooks.add_object(NULL, DraftCutObject::new(Null))?;
    hooks.add_object(NULL, ObserverObject::new(Null))?;
    hooks.add_object(NULL, StoreObject::new(Null))?;
    hooks.add_object(NULL, StatePartObject::new(Null))?;
    hooks.add_object(NULL, SectionObject::new(Null))?;
    hooks.add_object(NULL, RiderObject::new(Null))?;
    hooks.add_object(NULL, TransportObject::new(Null))?;
    hooks.add_object(NULL, ExecutorObject::new(Null))?;
    hooks.add_object(NULL, CaptureObject::new(Null))?;
    hooks.add_object(NULL, PlanWaitObject::new(Null))?;
    hooks.add_object(NULL, RoundDriverObject::new(Null))?;
    hooks.add_object(NULL, WeightLinkObject::new(Null))?;
    hooks.add_object(NULL, WeightBuilderObject::new(Null))?;
    hooks.add_object(NULL, PreparedStoreObject::new(Null))?;
    hooks.add_object(NULL, CommandObject::new(Null))?;
    hooks.add_object(NULL, RequestLinkObject::new(Null))?;
    hooks.add_object(NULL, PromptLinkObject::new(Null))?;
    hooks.add_object(NULL, StreamLinkObject::new(Null))?;
    hooks.add_object(NULL, ReplyLinkObject::new(Null))?;
    Ok(hooks)
}

/// Options by which the null hooks are in force that are chosen by name, but for the transport: it would move nothing.
#[must_use]
pub fn options(options: Options) -> Options {
    let null = || Some(NULL.to_owned());
    Options { executor: null(), plan_wait: null(), round_driver: null(), ..options }
}

/// Passes every call of an operation on.
struct Through(TextBuf);

impl Provider for Through {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.0.clone())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::of("ref"))))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, below: &BelowObject) -> Result<(), OpError> {
        use plugfold_abi::Below as _;
        below.run(call)
    }
}

/// Does nothing, wherever it is asked.
struct Null;

impl Pass for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn rewrite(&self, _: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        Ok(())
    }
}

impl LimitsLink for Null {
    fn raise(&self, _: &mut Limits) -> Result<(), OpError> {
        Ok(())
    }
}

impl LayoutLink for Null {
    fn edit(&self, _: &mut Families) -> Result<(), OpError> {
        Ok(())
    }
}

impl Mapper for Null {
    fn family(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn rows(&self, slot: u32, _: u32, _: u32, _: bool, _: &mut List<u32>) -> Result<(), OpError> {
        Err(OpError::new(format!("asked for rows of slot {slot}, of a family that it does not map")))
    }
}

impl Words for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn value(&self, _: &BatchFacts<'_>) -> Result<u64, OpError> {
        Ok(0)
    }
}

impl Fields for Null {
    fn spec(&self) -> Result<FieldSpec, OpError> {
        Ok(FieldSpec { name: NULL.into(), dtype: DType::F32, per: FieldPer::Row, width: 1, late: false })
    }
    fn numbered(&self, _: FieldId) -> Result<(), OpError> {
        Ok(())
    }
    fn fill(&self, _: &BatchFacts<'_>, _: View) -> Result<(), OpError> {
        Ok(())
    }
}

impl Planner for Null {}

impl Spans for Null {
    fn spans(&self, _: &SpanFacts<'_>, _: &mut List<SpanChoice>) -> Result<(), OpError> {
        Ok(())
    }
}

impl Drafter for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn propose(&self, asks: Slice<'_, Ask<'_>>, _: &ForwardsObject) -> Result<List<Proposal>, OpError> {
        Ok(vec![Proposal::default(); asks.len()].into())
    }
}

impl DraftPolicy for Null {
    fn decide(&self, _: Slice<'_, SequenceFacts<'_>>, _: &mut List<Choice>) -> Result<(), OpError> {
        Ok(())
    }
}

impl DraftCut for Null {
    fn cut(&self, _: u32, _: u32, drafts: Slice<'_, u32>) -> Result<u32, OpError> {
        Ok(drafts.len() as u32)
    }
}

impl Observer for Null {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(ALL)
    }
}

impl Store for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn offer(&self, _: &RequestFacts<'_>) -> Result<List<StoreOffer>, OpError> {
        Ok(List::new())
    }
    fn decide(&self, _: &SaveFacts<'_>, _: &SequencesObject) -> Result<List<u8>, OpError> {
        Ok(List::new())
    }
    fn save(&self, _: &SaveFacts<'_>, _: Slice<'_, u8>, _: &SequencesObject) -> Result<(), OpError> {
        Ok(())
    }
    fn resume(&self, _: u64, _: u32, _: &SequencesObject) -> Result<bool, OpError> {
        Ok(false)
    }
    fn figures(&self) -> Result<List<Figure>, OpError> {
        Ok(List::new())
    }
}

impl StatePart for Null {
    fn id(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn version(&self) -> Result<u32, OpError> {
        Ok(1)
    }
    fn save(&self, _: u32, _: &mut List<u8>) -> Result<(), OpError> {
        Ok(())
    }
    fn load(&self, _: u32, _: Slice<'_, u8>) -> Result<(), OpError> {
        Ok(())
    }
}

impl Section for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn write(&self, _: u64) -> Result<List<u8>, OpError> {
        Ok(List::new())
    }
    fn read(&self, _: u64, _: Slice<'_, u8>) -> Result<(), OpError> {
        Ok(())
    }
}

impl Rider for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn words(&self) -> Result<u32, OpError> {
        Ok(1)
    }
    fn write(&self, _: SliceMut<'_, u32>) -> Result<(), OpError> {
        Ok(())
    }
    fn read(&self, _: Slice<'_, u32>) -> Result<(), OpError> {
        Ok(())
    }
}

impl Transport for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn open(&self, _: ControlObject, _: Maybe<DeviceAccessObject>) -> Result<CommObject, OpError> {
        Err(OpError::new("the null transport moves nothing: choose another by the setting `transport`"))
    }
}

impl Executor for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn run(&self, launch: &Launch<'_>, steps: &StepsObject) -> Result<Mode, OpError> {
        use plugfold_abi::points::Steps as _;
        steps.run(launch.program.steps.len() as u32)?;
        Ok(Mode::Eager)
    }
}

impl Capture for Null {}

impl PlanWait for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
}

impl RoundDriver for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn round(&self, _: &RoundFacts, _: &RoundPartsObject) -> Result<(), OpError> {
        Ok(())
    }
}

impl WeightLink for Null {
    fn key(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn names(&self) -> Result<List<TextBuf>, OpError> {
        Ok(List::new())
    }
    fn rows(
        &self,
        name: Text<'_>,
        _: u64,
        _: u64,
        _: u64,
        _: u64,
        _: Slice<'_, f32>,
        _: &mut List<f32>,
    ) -> Result<(), OpError> {
        Err(OpError::new(format!("asked for {}, which it does not replace", name.get_str())))
    }
}

impl WeightBuilder for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn key(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn layout(&self, _: &Matrix<'_>) -> Result<Maybe<WeightLayout>, OpError> {
        Ok(Maybe::RNone)
    }
    fn build(&self, matrix: &Matrix<'_>, _: &MatrixRowsObject, _: Slice<'_, View>) -> Result<(), OpError> {
        Err(OpError::new(format!("asked to build {}, which it does not store", matrix.role)))
    }
}

impl PreparedStore for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn find(&self, _: &PreparedKey<'_>) -> Result<Maybe<Prepared>, OpError> {
        Ok(Maybe::RNone)
    }
    fn read(&self, _: &PreparedKey<'_>, _: SliceMut<'_, u8>) -> Result<(), OpError> {
        Err(OpError::new("asked to read what it never found"))
    }
    fn offer(&self, _: &PreparedKey<'_>, _: Slice<'_, u8>, _: Slice<'_, Piece<'_>>) -> Result<(), OpError> {
        Ok(())
    }
}

impl Command for Null {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(NULL.into())
    }
    fn run(&self, _: Slice<'_, TextBuf>) -> Result<TextBuf, OpError> {
        Ok(TextBuf::new())
    }
}

impl RequestLink for Null {}

impl PromptLink for Null {}

impl StreamLink for Null {
    fn piece(&self, _: u64, _: &mut StreamPiece) -> Result<(), OpError> {
        Ok(())
    }
}

impl ReplyLink for Null {}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn there_is_a_null_hook_of_every_kind() {
        let hooks = hooks().unwrap_or_else(|e| panic!("{e}"));
        let kinds: BTreeSet<&str> = hooks.list().into_iter().map(|(kind, _)| kind).collect();
        assert_eq!(kinds.len(), 30, "a kind of hook is missing here, or a new one has no null: {kinds:?}");
        assert!(hooks.providers.len() > 20, "one for each operation of the reference");
    }
}

//! The hook points besides operations: what the engine and the host ask of plugins, and what plugins may ask of them.
//!
//! A plugin hands out one object a point it uses ([`crate::life::Plugin::configure`]). Chains and policies run in the
//! order of the configuration list, each link seeing what the ones before it made. "Replicated" hooks run on every rank
//! with equal arguments and must give equal answers: they get no clock, no memory figure and no host name.

mod cache;
mod command;
mod drafts;
mod drive;
mod execute;
mod observe;
mod plan;
mod request;
mod services;
mod setup;
mod store;
mod transport;
mod weights;

pub use cache::{
    Families, Family, FamilyInfo, FamilyRows, Mapper, MapperObject, MapperTable, Owner, Sequences,
    SequencesObject, SequencesTable,
};
pub use command::{Command, CommandObject, CommandTable};
pub use drafts::{
    Absorbed, Ask, Choice, DraftCut, DraftCutObject, DraftCutTable, DraftPolicy, DraftPolicyObject,
    DraftPolicyTable, Drafter, DrafterObject, DrafterTable, Draw, Forwards, ForwardsObject, ForwardsTable,
    HeadOut, HeadRows, NO_DRAFTER, Observed, Proposal, Rule, SequenceFacts, Wants,
};
pub use drive::{
    Bell, BellObject, BellTable, PlanWait, PlanWaitObject, PlanWaitTable, RoundDriver, RoundDriverObject,
    RoundDriverTable, RoundFacts, RoundParts, RoundPartsObject, RoundPartsTable,
};
pub use execute::{
    Bounds, Capture, CaptureFacts, CaptureObject, CaptureTable, Executor, ExecutorObject, ExecutorTable,
    Graphs, GraphsObject, Launch, Mode, Steps, StepsObject, StepsTable,
};
pub use observe::{
    BootPhase, Ended, Launched, Observer, ObserverObject, ObserverTable, OpDone, RoundDone, SequenceEvent,
    interest,
};
pub use plan::{
    Mark, PieceChoice, PlanFacts, Planner, PlannerObject, PlannerTable, RequestFacts, SlotFacts, SpanChoice,
    SpanFacts, Spans, SpansObject, SpansTable, Verdict,
};
pub use request::{
    Attachment, ControlToken, Document, DocumentObject, DocumentTable, PromptLink, PromptLinkObject,
    PromptLinkTable, Refusal, Reply, ReplyLink, ReplyLinkObject, ReplyLinkTable, RequestLink,
    RequestLinkObject, RequestLinkTable, StreamLink, StreamLinkObject, StreamLinkTable, StreamPiece,
    Tokenizer, TokenizerObject, TokenizerTable, ToolCall,
};
pub use services::{Host, HostObject, HostTable, Level, Services, ServicesObject, ServicesTable};
pub use setup::{
    BatchFacts, FieldId, FieldPer, FieldSpec, Fields, FieldsObject, FieldsTable, LayoutLink,
    LayoutLinkObject, LayoutLinkTable, Limits, LimitsLink, LimitsLinkObject, LimitsLinkTable, SlotMemory,
    Words, WordsObject, WordsTable,
};
pub use store::{
    DraftRows, Figure, PartRows, SaveFacts, SaveKind, StatePart, StatePartObject, StatePartTable, Store,
    StoreObject, StoreOffer, StoreTable,
};
pub use transport::{
    Control, ControlObject, ControlTable, DeviceAccess, DeviceAccessObject, DeviceAccessTable, DeviceFacts,
    Rider, RiderObject, RiderTable, Section, SectionObject, SectionTable, Transport, TransportObject,
    TransportTable,
};
pub use weights::{
    Matrix, MatrixRows, MatrixRowsObject, MatrixRowsTable, PREPARED_PAGE, Piece, PlaneLayout, Prepared,
    PreparedKey, PreparedStore, PreparedStoreObject, PreparedStoreTable, Purpose, Stored, WeightBuilder,
    WeightBuilderObject, WeightBuilderTable, WeightLayout, WeightLink, WeightLinkObject, WeightLinkTable,
};

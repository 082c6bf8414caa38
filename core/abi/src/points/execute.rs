//! Running programs: the executor in force, and the policy of what it may capture.

use super::BatchFacts;
use crate::{BufferId, Program, RoundTable, Shape, TextBuf, View};

/// How a forward is to run. The bits are the same in each.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// One step after another.
    #[default]
    Eager = 0,
    /// As [`Mode::Eager`], and kept so that it can be replayed.
    Capture = 1,
    /// As it was captured.
    Replay = 2,
}

/// A program that is to run over a round.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy)]
pub struct Launch<'a> {
    /// Number of the program among those of this engine: one number always means one program over the same caches.
    pub number: u64,
    /// Changes when the memory of buffers has moved: what was captured before is void.
    pub memory: u64,
    /// The program.
    pub program: &'a Program,
    /// Steps before this one read no late field. Once an executor is past it, *launched* is told and late fields are filled.
    pub late: u32,
    /// The round.
    pub round: &'a RoundTable<'a>,
    /// Recordings of the device; none where it has none, as on the CPU.
    pub graphs: Option<&'a GraphsObject>,
    /// Whether exchanges among the steps may be recorded with the others. Otherwise they wait for other ranks on the host.
    pub exchanges: bool,
    /// How to run it. An executor that cannot capture, or has not captured what it is to replay, runs it eagerly.
    pub mode: Mode,
}

crate::interface! {
    /// Recordings of what steps ask of the device, for executors. One at a time, on the thread that runs steps.
    "graphs", 0: Graphs, GraphsObject, GraphsTable {
        /// A number for everything that a recording holds of its round: one of a program may be launched for any round that
        /// has the number that its own had. Equal numbers of two programs mean nothing.
        fn key(&self, round: &RoundTable<'_>) -> u64;
        /// From now on what steps ask of the device is recorded, and not done. A step that waits for the device fails.
        fn begin(&self, round: &RoundTable<'_>) -> ();
        /// Ends the recording and gives its number.
        fn end(&self) -> u64;
        /// Does what was recorded, over a round, after whatever was asked for before.
        fn launch(&self, recording: u64, round: &RoundTable<'_>) -> ();
        /// Forgets a recording.
        fn forget(&self, recording: u64) -> ();
    }
}

crate::interface! {
    /// The steps of a program over one round. An executor takes all of them, in order and each once, in as many stretches as
    /// it likes; a stretch cannot end inside of a fusion.
    "steps", 0: Steps, StepsObject, StepsTable {
        /// Runs the steps up to `end` (not included) one after another on their providers. What a step fails with is kept:
        /// after it only exchanges run, so that other ranks do not wait. `false`: a step has failed.
        fn run(&self, end: u32) -> bool;
        /// Says that the steps up to `end` ran by other means (a captured graph, a script). Exchanges among them count as
        /// made: every rank has to say the same.
        fn ran(&self, end: u32) -> ();
        /// Memory of a buffer with the rows that it has in this round.
        fn buffer(&self, buffer: BufferId) -> View;
    }
}

crate::interface! {
    /// Runs programs; chosen by name (the setting `executor`). Without one steps run one after another.
    "executor", 0: Executor, ExecutorObject, ExecutorTable {
        /// Name.
        fn name(&self) -> TextBuf;
        /// A program was made; also at the start, before anything is served. An error fails the forwards of its shape.
        fn prepare(&self, number: u64, program: &Program) -> () = Ok(());
        /// Runs a program and says how it did. An error, or steps that were not taken, fail the forward: its exchanges are
        /// then made up for, so that all ranks end it alike.
        fn run(&self, launch: &Launch<'_>, steps: &StepsObject) -> Mode;
    }
}

/// Bounds of a shape.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Most rows.
    pub rows: u32,
    /// Most sequences.
    pub seqs: u32,
    /// Most rows that want logits.
    pub out_rows: u32,
}

/// A shape whose program is about to run. The same on every rank.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct CaptureFacts<'a> {
    /// The shape.
    pub shape: &'a Shape,
    /// Forwards of this shape that ran before.
    pub sightings: u64,
    /// Whether one of them was to be captured.
    pub captured: bool,
    /// Shapes for which a forward was to be captured.
    pub captures: u32,
}

crate::interface! {
    /// A link of `capture`: bounds of shapes, and how their forwards run. Replicated, pure.
    "capture", 0: Capture, CaptureObject, CaptureTable {
        /// Raises the bounds under which a forward is looked up; it cannot lower them.
        fn bounds(&self, batch: &BatchFacts<'_>, bounds: &mut Bounds) -> () = Ok(());
        /// Changes how the forward runs; [`Mode::Eager`] where no link says otherwise.
        fn mode(&self, facts: &CaptureFacts<'_>, mode: &mut Mode) -> () = Ok(());
    }
}

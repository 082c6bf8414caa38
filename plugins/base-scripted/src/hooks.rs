//! The hooks: a pass that empties forwards, providers of what is left, drafts that make chunks, and who begins where.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use plugfold_abi::points::{
    Ask, Choice, DraftPolicy, Drafter, ForwardsObject, NO_DRAFTER, Observer, Proposal, Rule, SequenceEvent,
    SequenceFacts, interest,
};
use plugfold_abi::{
    BelowObject, Bits, BufferId, Call, Claim, DType, Granted, List, MAX_DIMS, MAX_PARAMS, Maybe, OpError,
    Operand, Pass, PassContext, Phase, Plan, Program, Provider, Query, Reach, Slice, Span, Step, TextBuf,
    View,
};

use crate::script::Fault;
use crate::stage::{Line, Stage};

/// The operation that stands for all layers.
pub const ROWS: &str = "scripted.rows";
const HEAD: &str = "head";
const CANDIDATES: &str = "sample.candidates";
const BITS: &str = "scripted";
/// The drafter.
pub const DRAFTER: &str = "scripted";
/// Logits fall by this much with each id away from the scripted one: no temperature and no noise reaches another.
const FALL: f32 = 1000.0;
/// Places of this rank's first id, and of the number of ids, among the sizes of the head.
const FIRST: usize = 2;
const VOCAB: usize = 3;

/// Empties forwards: what is left is the head over rows of zeros.
pub struct Emptied;

impl Pass for Emptied {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("scripted".into())
    }

    fn rewrite(&self, program: &mut Program, context: &PassContext<'_>) -> Result<(), OpError> {
        match program.shape.kind.as_str() {
            "forward" => forward(program, context),
            // No state was computed, so none is kept.
            "commit" => {
                program.steps.clear();
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

fn forward(program: &mut Program, context: &PassContext<'_>) -> Result<(), OpError> {
    let embed = program.steps.iter().find(|s| s.op.as_str() == "embed").map(|s| s.dims[2]);
    let vocab = embed.ok_or_else(|| {
        OpError::new("a forward without an embedding: base-scripted has to be the first pass")
    })?;
    // Shares of the vocabulary, as the engine cuts it.
    let first = (u64::from(context.rank) * u64::from(vocab) / u64::from(context.ranks.max(1))) as u32;
    let made: Vec<BufferId> =
        program.buffers.iter().enumerate().filter(|(_, b)| b.output).map(|(i, _)| i as BufferId).collect();
    let after = ["rows.pick", HEAD, CANDIDATES];
    let mut kept: List<Step> = List::new();
    for mut step in std::mem::take(&mut program.steps) {
        if !after.contains(&step.op.as_str()) {
            continue;
        }
        if step.op.as_str() == HEAD {
            (step.dims[FIRST], step.dims[VOCAB]) = (first, vocab);
        }
        if step.op.as_str() == CANDIDATES && step.dims[FIRST] != first {
            return Err(OpError::new(format!(
                "this rank's first id is {}, not {first}: the engine cuts the vocabulary in another way",
                step.dims[FIRST]
            )));
        }
        kept.push(step);
    }
    let written: Vec<BufferId> = kept.iter().flat_map(|s| s.outputs.iter().map(|o| o.buffer)).collect();
    for buffer in made.into_iter().filter(|b| !written.contains(b)) {
        let cols = program.buffers[buffer as usize].cols;
        program.steps.push(zeros(Operand { buffer, col: 0, cols }));
    }
    program.steps.extend(kept);
    compact(program);
    Ok(())
}

/// Rows of zeros.
fn zeros(out: Operand) -> Step {
    let mut dims = [0; MAX_DIMS];
    dims[0] = out.cols;
    Step {
        op: ROWS.into(),
        layer: plugfold_abi::NO_LAYER,
        site: 0,
        rows: Span::ALL,
        seqs: Span::ALL,
        inputs: List::new(),
        outputs: vec![out].into(),
        weights: List::new(),
        caches: List::new(),
        dims,
        params: [0.0; MAX_PARAMS],
        reach: Reach::Row,
        stream: 0,
        waits: List::new(),
        signal: Maybe::RNone,
    }
}

/// Drops buffers that nothing touches any more.
fn compact(program: &mut Program) {
    let used = |id: usize| {
        let of = |o: &Operand| o.buffer as usize == id;
        program.steps.iter().any(|s| s.inputs.iter().any(of) || s.outputs.iter().any(of))
    };
    let keep: Vec<bool> = (0..program.buffers.len()).map(used).collect();
    let place = |id: BufferId| keep[..id as usize].iter().filter(|k| **k).count() as BufferId;
    for step in &mut program.steps {
        for operand in step.inputs.iter_mut().chain(step.outputs.iter_mut()) {
            operand.buffer = place(operand.buffer);
        }
    }
    let buffers = std::mem::take(&mut program.buffers);
    program.buffers = buffers.into_iter().zip(&keep).filter(|(_, k)| **k).map(|(b, _)| b).collect();
}

fn mine(query: &Query<'_>, op: &str) -> Claim {
    let forward = query.program.get_str() == "forward" && query.phase != Phase::Draft;
    let claimed = query.op.get_str() == op && query.device_class.get_str() == "cpu" && forward;
    if claimed { Claim::Yes(Granted::plain(Bits::own(BITS))) } else { Claim::No }
}

/// A row of an f32 output.
#[allow(clippy::mut_from_ref)] // a view is an address; the memory is the call's own output
#[allow(clippy::cast_ptr_alignment)] // f32 buffers are placed on multiples of 64 bytes
fn row(view: &View, row: usize) -> Result<&mut [f32], OpError> {
    if view.dtype != DType::F32 || row >= view.rows as usize || view.ptr.is_null() {
        return Err(OpError::new(format!(
            "row {row} of an output of {} rows of {:?}",
            view.rows, view.dtype
        )));
    }
    // SAFETY: the engine placed `rows` rows of `stride` numbers here for this call's output alone, `row` is one of them, and
    // no two slices of one row live at a time.
    Ok(unsafe {
        std::slice::from_raw_parts_mut(
            view.ptr.cast::<f32>().add(row * view.stride as usize),
            view.cols as usize,
        )
    })
}

/// Writes zeros.
pub struct Zeros;

impl Provider for Zeros {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(ROWS.into())
    }
    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        Ok(mine(query, ROWS))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        let out = &call.outputs[0];
        (0..out.rows as usize).try_for_each(|r| row(out, r).map(|row| row.fill(0.0)))
    }
}

/// Writes logits whose largest is the scripted token's.
pub struct Head {
    /// The scripts.
    pub stage: Arc<Stage>,
    /// This rank: pauses are rank 0's, faults are one rank's.
    pub rank: u32,
}

impl Head {
    fn go_wrong(fault: Fault, logits: &mut [f32]) -> Result<(), OpError> {
        match fault {
            Fault::Error => Err(OpError::new("the script says that this fails")),
            Fault::Panic => panic!("the script says that this panics"),
            Fault::Fatal => Err(OpError::fatal("the script says that this ends the engine")),
            Fault::Abort => std::process::abort(),
            Fault::Nan => {
                logits.fill(f32::NAN);
                Ok(())
            }
        }
    }
}

impl Provider for Head {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(HEAD.into())
    }

    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        Ok(mine(query, HEAD))
    }

    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        let (out, first, vocab) = (&call.outputs[0], call.dims[FIRST], call.dims[VOCAB]);
        for (i, at) in call.round.out_rows.iter().enumerate() {
            let slot = call.round.seq_slot[call.round.row_seq[*at as usize] as usize];
            let logits = row(out, i)?;
            let (token, begins) = match self.stage.line(slot, call.round.positions[*at as usize] as usize) {
                Line::Token(token, _) if token >= vocab => {
                    let text = format!("the script says id {token}, outside the vocabulary of {vocab} ids");
                    return Err(OpError::invalid(text));
                }
                Line::Token(token, begins) => (token, begins),
                Line::Nothing(why) => return Err(OpError::invalid(why)),
            };
            for (id, value) in (first..).zip(logits.iter_mut()) {
                *value = -FALL * id.abs_diff(token) as f32;
            }
            let Some(chunk) = begins else { continue };
            if self.rank == 0 && !chunk.pause.is_zero() {
                std::thread::sleep(chunk.pause);
            }
            match chunk.fault {
                Some((Fault::Nan, _)) => Self::go_wrong(Fault::Nan, logits)?,
                Some((fault, rank)) if rank == self.rank => Self::go_wrong(fault, logits)?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Proposes the rest of a chunk.
pub struct Chunks(pub Arc<Stage>);

impl Drafter for Chunks {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(DRAFTER.into())
    }

    fn propose(&self, asks: Slice<'_, Ask<'_>>, _: &ForwardsObject) -> Result<List<Proposal>, OpError> {
        let one = |ask: &Ask<'_>| {
            let tokens = self.0.drafts(ask.slot, ask.length as usize, ask.budget as usize);
            Proposal { tokens: tokens.into(), probabilities: List::new() }
        };
        Ok(asks.iter().map(one).collect())
    }
}

/// Gives scripted sequences to [`Chunks`], whatever they ask for.
pub struct Always {
    stage: Arc<Stage>,
    drafter: AtomicU32,
}

impl Always {
    /// For these scripts.
    pub fn new(stage: Arc<Stage>) -> Self {
        Self { stage, drafter: AtomicU32::new(NO_DRAFTER) }
    }
}

impl DraftPolicy for Always {
    fn drafters(&self, names: Slice<'_, TextBuf>) -> Result<(), OpError> {
        let at = names.iter().position(|n| n.as_str() == DRAFTER);
        self.drafter.store(at.map_or(NO_DRAFTER, |at| at as u32), Ordering::Relaxed);
        Ok(())
    }

    fn decide(&self, facts: Slice<'_, SequenceFacts<'_>>, choices: &mut List<Choice>) -> Result<(), OpError> {
        let drafter = self.drafter.load(Ordering::Relaxed);
        for (fact, choice) in facts.iter().zip(choices).filter(|(f, _)| self.stage.plays(f.slot)) {
            *choice = Choice { drafter, budget: fact.room, rule: Rule { floor: 0.0, min_match: 0 } };
        }
        Ok(())
    }
}

/// Learns who is in which slot.
pub struct Cast(pub Arc<Stage>);

impl Observer for Cast {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::SEQUENCE)
    }

    fn sequence(&self, slot: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        match event {
            SequenceEvent::Begun { ids, .. } => self.0.begin(slot, ids),
            SequenceEvent::Ended { .. } => self.0.end(slot),
            SequenceEvent::Absorbed { .. }
            | SequenceEvent::Committed { .. }
            | SequenceEvent::Saved { .. } => {}
        }
        Ok(())
    }
}

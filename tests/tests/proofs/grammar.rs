//! Constrained replies (0610) beside image rows (0500), thin: attachments that reach all ranks, a late field, an operation that
//! a pass inserts before the candidates, drafts that are cut, and failing alike.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use plugfold_abi::points::{
    Attachment, BatchFacts, DraftCut, DraftCutObject, FieldId, FieldPer, FieldSpec, Fields, FieldsObject,
    Observer, ObserverObject, SequenceEvent, Words, WordsObject, interest,
};
use plugfold_abi::{
    Base, BelowObject, Bits, Buffer, Call, Claim, DType, Extent, FIRST_VIRTUAL_ID, Granted, List, Maybe,
    OpError, Operand, Pass, PassContext, PassObject, Plan, Program, Provider, ProviderObject, Query, Reach,
    Slice, Span, Step, TextBuf, View,
};
use plugfold_engine::core::CoreOptions;
use plugfold_engine::engine::Engine;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::service::{self, EngineError, Finish, Request, Sampling, Service};
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::guess::{Guess, guessing};
use plugfold_tests::model::{engine, options, plain, reply, request};

const OWNER: &str = "0610";
const ATTACHMENT: &str = "grammar";
const VOCAB: u32 = 512;
/// Words of a mask row on a rank that has the whole vocabulary.
const WIDTH: u32 = VOCAB / 32;

/// What a reply may be: token `i` has this remainder.
#[derive(Clone)]
struct Matcher {
    prompt: u32,
    /// Remainders modulo [`MODULUS`], in a circle; none: the grammar could not be read.
    circle: Vec<u32>,
}

const MODULUS: u32 = 7;

impl Matcher {
    fn allows(&self, position: u32, token: u32) -> bool {
        let Some(at) = position.checked_sub(self.prompt) else { return true };
        token % MODULUS == self.circle[at as usize % self.circle.len()]
    }
}

/// The plugin's own state on one rank: a matcher a slot.
#[derive(Clone, Default)]
struct Grammar {
    slots: Arc<Mutex<HashMap<u32, Matcher>>>,
    field: Arc<Mutex<FieldId>>,
    /// Planted: fails at this position.
    fails: Option<u32>,
}

impl Grammar {
    fn of(&self, slot: u32) -> Option<Matcher> {
        self.slots.lock().unwrap().get(&slot).cloned()
    }
}

impl Observer for Grammar {
    fn interests(&self) -> Result<u32, OpError> {
        Ok(interest::SEQUENCE)
    }
    fn sequence(&self, slot: u32, event: &SequenceEvent<'_>) -> Result<(), OpError> {
        let mut slots = self.slots.lock().unwrap();
        match event {
            SequenceEvent::Begun { ids, attachments, .. } => {
                slots.remove(&slot);
                if let Some(mine) = attachments.iter().find(|a| a.name.as_str() == ATTACHMENT) {
                    let word = |b: &[u8]| u32::from(b[0]) % MODULUS;
                    let circle: Vec<u32> = mine.bytes.chunks(1).map(word).collect();
                    slots.insert(slot, Matcher { prompt: ids.len() as u32, circle });
                }
            }
            SequenceEvent::Ended { .. } => drop(slots.remove(&slot)),
            _ => {}
        }
        Ok(())
    }
}

impl Words for Grammar {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("masked".into())
    }
    fn value(&self, batch: &BatchFacts<'_>) -> Result<u64, OpError> {
        let slots = self.slots.lock().unwrap();
        Ok(u64::from(batch.slots.iter().any(|slot| slots.contains_key(slot))))
    }
}

impl Fields for Grammar {
    fn spec(&self) -> Result<FieldSpec, OpError> {
        Ok(FieldSpec { name: "mask".into(), dtype: DType::U32, per: FieldPer::Row, width: WIDTH, late: true })
    }
    fn numbered(&self, id: FieldId) -> Result<(), OpError> {
        *self.field.lock().unwrap() = id;
        Ok(())
    }
    fn fill(&self, batch: &BatchFacts<'_>, entries: View) -> Result<(), OpError> {
        let mut row = 0;
        for ((slot, rows), start) in batch.slots.iter().zip(batch.rows.iter()).zip(batch.starts.iter()) {
            let matcher = self.of(*slot);
            for i in 0..*rows {
                let next = start + i + 1;
                if let Some(matcher) = &matcher {
                    if matcher.circle.is_empty() {
                        return Err(OpError::new("the grammar is empty: nothing could follow"));
                    }
                    if self.fails.is_some_and(|at| next >= matcher.prompt + at) {
                        return Err(OpError::new("the matcher lost its place"));
                    }
                }
                let allowed = |token: u32| matcher.as_ref().is_none_or(|m| m.allows(next, token));
                #[allow(clippy::cast_ptr_alignment)] // fields lie on multiples of 64 bytes
                let words = entries.ptr.cast::<u32>();
                for word in 0..WIDTH {
                    let bits = (0..32).filter(|b| allowed(word * 32 + b)).fold(0u32, |all, b| all | 1 << b);
                    // SAFETY: the view has a row of `WIDTH` words for each row of the batch, and this hook fills it alone.
                    unsafe { *words.add(row * entries.stride as usize + word as usize) = bits };
                }
                row += 1;
            }
        }
        Ok(())
    }
}

impl DraftCut for Grammar {
    fn cut(&self, slot: u32, _: u32, drafts: Slice<'_, u32>) -> Result<u32, OpError> {
        // Where the first draft will be: the verification has the last word, so a bound is enough.
        Ok(if self.of(slot).is_some() { drafts.len().min(3) as u32 } else { drafts.len() as u32 })
    }
}

impl Pass for Grammar {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("mask".into())
    }
    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        if !program.shape.words.iter().any(|w| w.name.as_str() == "masked" && w.value == 1) {
            return Ok(());
        }
        let at = program.steps.iter().position(|s| s.op.as_str() == "sample.candidates");
        let Some(at) = at else { return Ok(()) };
        let logits = program.steps[at].inputs[0];
        program.buffers.push(Buffer {
            name: "masked".into(),
            extent: Extent { base: Base::OutRows, times: 1 },
            cols: logits.cols,
            dtype: DType::F32,
            input: false,
            output: false,
        });
        let masked = Operand { buffer: program.buffers.len() as u32 - 1, ..logits };
        // Sizes: columns, and the first id of this rank.
        let (columns, first) = (program.steps[at].dims[0], program.steps[at].dims[2]);
        let mut dims = [0; 8];
        (dims[0], dims[1]) = (columns, first);
        let step = Step {
            op: "logits.mask".into(),
            inputs: List::from(vec![logits]),
            outputs: List::from(vec![masked]),
            dims,
            rows: Span::ALL,
            reach: Reach::Row,
            signal: Maybe::RNone,
            waits: List::new(),
            ..program.steps[at].clone()
        };
        program.steps[at].inputs[0] = masked;
        program.steps.insert(at, step);
        Ok(())
    }
}

impl Provider for Grammar {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok("logits.mask".into())
    }
    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::own("logits-mask"))))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        let (columns, first) = (call.dims[0] as usize, call.dims[1]);
        let field = call.round.fields[*self.field.lock().unwrap() as usize];
        let (from, to) = (call.inputs[0], call.outputs[0]);
        for (i, row) in call.round.out_rows.iter().enumerate() {
            for col in 0..columns {
                let token = first + col as u32;
                #[allow(clippy::cast_ptr_alignment)] // rows of f32 and u32 buffers
                // SAFETY: views have these rows and columns; the outputs of a call are its own while it runs.
                unsafe {
                    let word = *field
                        .ptr
                        .cast::<u32>()
                        .add(*row as usize * field.stride as usize + (token / 32) as usize);
                    let value = *from.ptr.cast::<f32>().add(i * from.stride as usize + col);
                    let open = word >> (token % 32) & 1 == 1;
                    *to.ptr.cast::<f32>().add(i * to.stride as usize + col) =
                        if open { value } else { f32::NEG_INFINITY };
                }
            }
        }
        Ok(())
    }
}

fn add(hooks: &mut Hooks, fails: Option<u32>) {
    let grammar = Grammar { fails, ..Grammar::default() };
    hooks.add_object(OWNER, ObserverObject::new(grammar.clone())).unwrap();
    hooks.add_object(OWNER, WordsObject::new(grammar.clone())).unwrap();
    hooks.add_object(OWNER, FieldsObject::new(grammar.clone())).unwrap();
    hooks.add_object(OWNER, DraftCutObject::new(grammar.clone())).unwrap();
    hooks.add_object(OWNER, PassObject::new(grammar.clone())).unwrap();
    hooks.add_object(OWNER, ProviderObject::new(grammar)).unwrap();
}

/// Guesses the token after the last one, so that some drafts are allowed and few are right.
struct Next;

impl Guess for Next {
    fn guess(&self, ids: &[u32], budget: usize) -> Vec<u32> {
        let last = *ids.last().unwrap_or(&0);
        (1..=budget as u32).map(|i| (last % VOCAB + i) % 480).collect()
    }
}

fn start(ranks: usize, slots: usize, drafts: bool, fails: Option<usize>) -> Engine {
    engine(&options(&tiny_dir(), slots, 16), ranks, |rank| {
        let mut options = if drafts { guessing(Next) } else { plain(rank) };
        let mut hooks = (*options.hooks).clone();
        add(&mut hooks, (fails == Some(rank)).then_some(2));
        options.hooks = Arc::new(hooks);
        CoreOptions { ..options }
    })
}

fn constrained(seed: u64, circle: &[u8]) -> Request {
    let bytes = List::from(circle.to_vec());
    let blobs = vec![Attachment { name: ATTACHMENT.into(), bytes }];
    Request { blobs, ..request(seed, 19, 9, Sampling::GREEDY) }
}

/// Two rows of the prompt come from an image.
fn with_image(mut request: Request) -> Request {
    let rows: Vec<f32> = (0..256).map(|i| ((i * 37 % 64) as f32 - 32.0) / 64.0).collect();
    (request.ids[4], request.ids[5]) = (FIRST_VIRTUAL_ID, FIRST_VIRTUAL_ID + 1);
    request.attachments = vec![service::Attachment { at: 4, rows: rows.into() }];
    request
}

type Said = (Vec<u32>, Finish);

fn say(engine: &Engine, request: Request) -> Said {
    reply(&engine.submit(request).unwrap()).unwrap()
}

#[test]
fn constrained_replies_keep_to_their_grammar_drafted_and_in_company() {
    let circle = [3, 5, 0, 6];
    for ranks in [1, 2] {
        let free = request(2, 12, 9, Sampling::GREEDY);
        let want = say(&engine(&options(&tiny_dir(), 1, 16), ranks, plain), free.clone());
        let serial = start(ranks, 1, false, None);
        let jobs = [constrained(1, &circle), with_image(constrained(3, &circle)), free];
        let alone: Vec<Said> = jobs.iter().map(|j| say(&serial, j.clone())).collect();
        drop(serial);
        assert_eq!(alone[2], want, "a free request is not touched");
        for (tokens, _) in &alone[..2] {
            let rests: Vec<u32> = tokens.iter().map(|t| t % MODULUS).collect();
            assert_eq!(rests, [3, 5, 0, 6, 3, 5, 0, 6, 3], "{ranks} ranks");
        }
        assert_ne!(alone[0], alone[1]);
        let three = start(ranks, 3, true, None);
        let handles: Vec<_> = jobs.iter().map(|j| three.submit(j.clone()).unwrap()).collect();
        let together: Vec<Said> = handles.iter().map(|h| reply(h).unwrap()).collect();
        assert_eq!(together, alone, "drafted and in company, {ranks} ranks");
        assert!(three.stats().drafted > 0);
    }
}

#[test]
fn a_matcher_that_fails_on_any_rank_ends_its_request_on_all() {
    let free = request(2, 12, 9, Sampling::GREEDY);
    for ranks in [1, 2] {
        for culprit in 0..ranks {
            let two = start(ranks, 2, true, Some(culprit));
            let want = say(&two, free.clone());
            let (bad, good) =
                (two.submit(constrained(1, &[3, 5])).unwrap(), two.submit(free.clone()).unwrap());
            let EngineError::Failed(told) = reply(&bad).unwrap_err() else { panic!("not a failed request") };
            assert!(told.contains("plugin 0610: the matcher lost its place"), "{told}");
            assert!(ranks == 1 || told.starts_with(&format!("rank {culprit}: ")), "{told}");
            assert_eq!(reply(&good).unwrap(), want, "the other request");
            assert_eq!(say(&two, free.clone()), want, "the next request");
            assert_eq!(two.stats().fatal, None);
        }
        // A grammar that no rank can read fails on all, and is told once.
        let two = start(ranks, 2, false, None);
        let EngineError::Failed(told) = reply(&two.submit(constrained(1, &[])).unwrap()).unwrap_err() else {
            panic!("not a failed request")
        };
        assert!(told.contains("the grammar is empty") && told.matches("plugin 0610").count() == 1, "{told}");
    }
}

//! However a reply is cut into windows, drafted or not, the masks of its rows are those of a matcher that takes it token by token.
#![allow(clippy::unwrap_used)]

mod support;

use std::sync::Arc;

use plugfold_0610_structured_output::compiler::Compiler;
use plugfold_0610_structured_output::mask::apply;
use plugfold_0610_structured_output::matcher::{Stand, Tracker};
use plugfold_0610_structured_output::seats::{ATTACHMENT, Order, Seats};
use plugfold_abi::points::{Attachment, BatchFacts, SequenceEvent};
use plugfold_abi::{DType, Phase, Slice, View};
use plugfold_engine::sampling::{draw, sort_candidates};
use plugfold_engine::service::Sampling;
use proptest::prelude::*;
use serde_json::{Value, json};
use support::{Dice, ENDS, THINK_END, asked, choose, compiler, open};

const PROMPT: u32 = 7;

fn grammars() -> Vec<Value> {
    vec![
        json!({"guided_json": {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "array", "items": {"type": "integer"}}}, "required": ["a", "n"]}}),
        json!({"guided_regex": "([a-f]{1,3}-)*[0-9]+"}),
        json!({"guided_choice": ["one", "two and", "two or"]}),
        json!({"guided_grammar": "root ::= \"x\" | \"(\" root \")\""}),
        json!({"tool_choice": "required", "tools": [{"function": {"name": "f", "parameters": {"type": "object",
            "properties": {"s": {"type": "string"}, "i": {"type": "integer"}}, "required": ["s", "i"]}}}]}),
    ]
}

/// A reply, thinking first where that is asked for, and the mask after each of its tokens; the first is before it.
fn reference(
    compiler: &Compiler,
    body: &Value,
    thinking: bool,
    seed: u64,
) -> (Vec<u32>, Vec<Option<Vec<u32>>>) {
    let compiled = compiler.compile(&asked(body)).unwrap();
    let think_end = thinking.then_some(THINK_END);
    let mut tracker =
        Tracker::new(compiled.matcher(), Arc::from(&ENDS[..]), think_end, compiler.tokens.width);
    let mut dice = Dice::new(seed);
    let (mut ids, mut masks) = (Vec::new(), Vec::new());
    for step in 0..60 {
        let mut mask = vec![0; compiler.tokens.words()];
        let id = match tracker.stand() {
            Stand::Inside => {
                tracker.mask(&mut mask).unwrap();
                let id = choose(compiler, &mask, step, &mut dice);
                masks.push(Some(mask));
                id
            }
            stand => {
                masks.push(None);
                if stand == Stand::Thinking && dice.below(4) == 0 {
                    THINK_END
                } else {
                    dice.below(4000) as u32
                }
            }
        };
        assert!(tracker.accept(id).unwrap());
        ids.push(id);
    }
    (ids, masks)
}

/// A mask for each row that has one.
type Masks = Vec<Option<Vec<u32>>>;

/// A rank with one constrained request.
struct Rank {
    seats: Seats,
    words: usize,
}

impl Rank {
    fn new(compiler: &Arc<Compiler>, body: &Value, thinking: bool, threads: usize) -> Self {
        let seats = Seats::new(compiler.clone(), threads, true, None).unwrap();
        let order = Order {
            asked: asked(body),
            ends: ENDS.to_vec(),
            think_end: thinking.then_some(THINK_END),
            prompt: PROMPT,
        };
        let bytes = serde_json::to_vec(&order).unwrap();
        let attachments = [Attachment { name: ATTACHMENT.into(), bytes: bytes.into() }];
        let ids: Vec<u32> = (0..PROMPT).collect();
        let begun = SequenceEvent::Begun {
            request: 1,
            ids: Slice::from(&ids[..]),
            resumed: 0,
            knobs: Slice::default(),
            attachments: Slice::from(&attachments[..]),
        };
        seats.event(2, &begun).unwrap();
        Self { seats, words: compiler.tokens.words() }
    }

    /// The masks of a forward's rows, between two other sequences that are free.
    fn masks(&self, phase: Phase, start: u32, tokens: &[u32]) -> Result<(u64, Masks), String> {
        let all: Vec<u32> = [9, 9].iter().chain(tokens).chain(&[8]).copied().collect();
        let (rows, starts, slots) = ([2, tokens.len() as u32, 1], [40, start, 3], [0, 2, 1]);
        let batch = BatchFacts {
            phase,
            tokens: Slice::from(&all[..]),
            rows: Slice::from(&rows[..]),
            starts: Slice::from(&starts[..]),
            slots: Slice::from(&slots[..]),
            knobs: Slice::default(),
        };
        let word = self.seats.word(&batch);
        let mut entries = vec![[0u32; 16]; all.len()];
        let view = View {
            ptr: entries.as_mut_ptr().cast(),
            rows: all.len() as u32,
            cols: 2,
            stride: 16,
            dtype: DType::U32,
        };
        self.seats.addresses(&batch, view).map_err(|e| e.to_string())?;
        let mask = |entry: &[u32; 16]| {
            let address = (u64::from(entry[0]) | u64::from(entry[1]) << 32) as *const u32;
            // SAFETY: an address that is given leads to a mask of the whole vocabulary, kept until the next window.
            (!address.is_null()).then(|| unsafe { std::slice::from_raw_parts(address, self.words) }.to_vec())
        };
        let masks: Vec<_> = entries.iter().map(mask).collect();
        assert!(
            masks[..2].iter().chain(&masks[masks.len() - 1..]).all(Option::is_none),
            "free sequences stay free"
        );
        Ok((word, masks[2..masks.len() - 1].to_vec()))
    }

    fn commit(&self, start: u32, tokens: &[u32]) {
        let committed = SequenceEvent::Committed { start, tokens: Slice::from(tokens) };
        self.seats.event(2, &committed).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn any_cutting_into_windows_gives_the_same_masks(
        grammar in 0..5usize, thinking: bool, seed in 1..1000u64, threads in prop::sample::select(vec![0usize, 3]),
        cuts in prop::collection::vec((1..6usize, 0..6usize, 0..4096u32), 40),
    ) {
        let compiler = compiler();
        let body = &grammars()[grammar];
        let (ids, masks) = reference(&compiler, body, thinking, seed);
        let rank = Rank::new(&compiler, body, thinking, threads);
        // The prompt in two pieces: only its last row is drawn from.
        let prompt: Vec<u32> = (0..PROMPT).collect();
        prop_assert_eq!(rank.masks(Phase::Prefill, 0, &prompt[..4]).unwrap(), (0, vec![None; 4]));
        let (word, first) = rank.masks(Phase::Prefill, 4, &prompt[4..]).unwrap();
        prop_assert_eq!(&first[..2], &[None, None]);
        prop_assert_eq!(&first[2], &masks[0]);
        prop_assert_eq!(word == 1, masks[0].is_some());
        let mut at = 0;
        for (rows, keep, wrong) in cuts {
            let rows = rows.min(ids.len().saturating_sub(at + 1));
            if rows == 0 {
                break;
            }
            let start = PROMPT + at as u32;
            // Drafts that are cut as they would be, the last of them not the reply's.
            let mut drafts = ids[at + 1..at + rows].to_vec();
            if let Some(last) = drafts.last_mut() {
                *last = wrong;
            }
            let stays = rank.seats.cut(2, ids[at], &drafts).unwrap() as usize;
            let mut fresh = Tracker::new(compiler.compile(&asked(body)).unwrap().matcher(), Arc::from(&ENDS[..]), thinking.then_some(THINK_END), compiler.tokens.width);
            for id in &ids[..=at] {
                prop_assert!(fresh.accept(*id).unwrap());
            }
            let takes = |id: &&u32| !(fresh.stand() == Stand::Inside && ENDS.contains(id)) && fresh.accept(**id).unwrap();
            prop_assert_eq!(stays, drafts.iter().take_while(takes).count(), "the cut keeps what a fresh matcher accepts");
            // A window of the reply's own tokens; asked for twice, as a forward and its commit do.
            let window = &ids[at..at + rows];
            // A drafter's own forward over these rows is free, whatever it guesses after them.
            let guesses: Vec<u32> = window.iter().rev().copied().collect();
            let free = (0, vec![None; guesses.len()]);
            prop_assert_eq!(rank.masks(Phase::Draft, start, &guesses).unwrap(), free);
            let (word, got) = rank.masks(Phase::Window, start, window).unwrap();
            prop_assert_eq!(&got, &masks[at + 1..=at + rows]);
            prop_assert_eq!(word == 1, got.iter().any(Option::is_some));
            prop_assert_eq!(rank.masks(Phase::Window, start, window).unwrap(), (word, got));
            let keep = keep.clamp(1, rows);
            rank.commit(start, &ids[at..at + keep]);
            at += keep;
        }
    }
}

#[test]
fn a_request_that_has_stepped_aside_goes_on_where_it_was() {
    let compiler = compiler();
    for body in grammars() {
        let (ids, masks) = reference(&compiler, &body, false, 5);
        let rank = Rank::new(&compiler, &body, false, 0);
        let order = Order { asked: asked(&body), ends: ENDS.to_vec(), think_end: None, prompt: PROMPT };
        let bytes = serde_json::to_vec(&order).unwrap();
        let attachments = [Attachment { name: ATTACHMENT.into(), bytes: bytes.into() }];
        let all: Vec<u32> = (0..PROMPT).chain(ids[..3].iter().copied()).collect();
        let begun = SequenceEvent::Begun {
            request: 1,
            ids: Slice::from(&all[..]),
            resumed: 2,
            knobs: Slice::default(),
            attachments: Slice::from(&attachments[..]),
        };
        rank.seats.event(2, &begun).unwrap();
        let (_, got) = rank.masks(Phase::Prefill, 2, &all[2..]).unwrap();
        assert_eq!(got.last().unwrap(), &masks[3]);
        let (_, got) = rank.masks(Phase::Window, PROMPT + 3, &ids[3..5]).unwrap();
        assert_eq!(got, masks[4..=5]);
    }
}

#[test]
fn a_thread_that_comes_late_changes_nothing() {
    let compiler = compiler();
    for body in grammars() {
        let (ids, masks) = reference(&compiler, &body, false, 9);
        let rank = Rank::new(&compiler, &body, false, 2);
        for at in 0..12 {
            let (start, window) = (PROMPT + at as u32, &ids[at..at + 2]);
            rank.seats.ahead(2);
            let (_, got) = rank.masks(Phase::Window, start, window).unwrap();
            rank.seats.ahead(2);
            assert_eq!(got, masks[at + 1..=at + 2]);
            rank.commit(start, &window[..1]);
            // The window is over; its masks were filled by whoever asked for them first.
            rank.seats.ahead(2);
        }
    }
}

#[test]
fn a_kept_token_that_the_grammar_forbids_ends_the_reply() {
    let compiler = compiler();
    let body = json!({"guided_choice": ["one", "two"]});
    for threads in [0, 2] {
        let rank = Rank::new(&compiler, &body, false, threads);
        // Row 0 is a token that no mask allowed.
        let told = rank.masks(Phase::Window, PROMPT, &[3]).unwrap_err();
        assert!(told.contains("does not allow token 3, which was kept"), "{told}");
        let again = rank.masks(Phase::Window, PROMPT, &[3]).unwrap_err();
        assert_eq!(again, told, "it stays so");
        let rank = Rank::new(&compiler, &body, false, threads);
        rank.commit(PROMPT, &[3]);
        let told = rank.masks(Phase::Window, PROMPT + 1, &[5]).unwrap_err();
        assert!(told.contains("does not allow token 3, which was kept"), "{told}");
        assert!(rank.seats.cut(2, 5, &[]).unwrap_err().to_string().contains("token 3"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn a_masked_draw_is_the_rule_over_the_allowed_tokens_alone(
        logits in prop::collection::vec(-20f32..20.0, 96), allowed in prop::collection::btree_set(0..96u32, 1..12),
        top_k in 0..30u32, top_p in 0.2..1.0f64, temperature in prop::sample::select(vec![0.0, 0.7, 3.0]), seed: u64,
    ) {
        let mut mask = [0u32; 3];
        for id in &allowed {
            mask[*id as usize / 32] |= 1 << (id % 32);
        }
        prop_assert_eq!(open(&mask), allowed.iter().copied().collect::<Vec<_>>());
        let sampling = Sampling { temperature, top_k, top_p, min_p: 0.0, seed: None };
        let mut alone: Vec<(f32, u32)> = allowed.iter().map(|id| (logits[*id as usize], *id)).collect();
        let want = draw(&mut alone, &sampling, seed, 11);
        // One rank, and two halves of the vocabulary, each with as many candidates as the draw needs.
        for width in [96usize, 48] {
            let mut candidates = Vec::new();
            for part in (0..96).step_by(width).map(|first| first..first + width) {
                let mut masked = vec![0.0; part.len()];
                apply(&mask, part.start, &logits[part.clone()], &mut masked);
                let mut own: Vec<(f32, u32)> = masked.into_iter().zip(part.start as u32..).collect();
                sort_candidates(&mut own);
                own.truncate(if top_k == 0 { 96 } else { top_k as usize });
                candidates.extend(own);
            }
            prop_assert_eq!(draw(&mut candidates, &sampling, seed, 11), want);
        }
    }
}

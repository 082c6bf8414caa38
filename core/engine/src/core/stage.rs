//! What a forward gets besides its rows: folded knobs, shape words, plugins' fields.

use std::sync::Arc;

use plugfold_abi::points::{
    BatchFacts, FieldPer, FieldSpec, Fields, Observer, ObserverObject, OpDone, Words, interest,
};
use plugfold_abi::{KnobValue, OpError, Shape, Slice, Step, Text, View, Word};

use super::{ResolveError, RoundBuffer};
use crate::hooks::{HookError, Hooked, Hooks};
use crate::knobs::Values;
use crate::state::Slot;

/// A word of a shape.
pub(super) fn word(name: &str, value: u64) -> Word {
    Word { name: name.into(), value }
}

/// What was asked of hooks once: names, specs, interests.
pub(super) struct Stages {
    words: Vec<String>,
    fields: Vec<Field>,
    timers: Vec<Hooked<ObserverObject>>,
}

struct Field {
    spec: FieldSpec,
    memory: Vec<[u64; 8]>,
}

/// Tells timed steps.
type Timer<'a> = Box<dyn Fn(&Step, u32, f64) + 'a>;

impl Stages {
    pub(super) fn new(hooks: &Hooks) -> Result<Self, HookError> {
        let words = hooks.words.iter().map(|h| Ok(h.call(Words::name)?.to_string()));
        let mut fields = Vec::new();
        for (id, h) in hooks.fields.iter().enumerate() {
            let spec = h.call(Fields::spec)?;
            h.call(|f| f.numbered(id as u32))?;
            fields.push(Field { spec, memory: Vec::new() });
        }
        let mut timers = Vec::new();
        for h in &hooks.observers {
            if h.call(Observer::interests)? & interest::OPERATION != 0 {
                timers.push(h.clone());
            }
        }
        Ok(Self { words: words.collect::<Result<_, HookError>>()?, fields, timers })
    }

    /// Adds words and the shape's part of the knobs.
    pub(super) fn words(
        &self,
        hooks: &Hooks,
        shape: &mut Shape,
        (rows, starts, slots): (&[u32], &[u32], &[u32]),
        knobs: &[KnobValue],
    ) -> Result<(), ResolveError> {
        let facts = BatchFacts {
            phase: shape.phase,
            rows: Slice::from(rows),
            starts: Slice::from(starts),
            slots: Slice::from(slots),
            knobs: Slice::from(knobs),
        };
        for (h, name) in hooks.words.iter().zip(&self.words) {
            let value = h.call(|w| w.value(&facts));
            let value = value.map_err(|error| ResolveError::Claim { op: format!("word {name}"), error })?;
            if value != 0 {
                shape.words.push(word(name, value));
            }
        }
        shape.words.sort_by(|a, b| a.name.cmp(&b.name));
        if !hooks.knobs.specs.is_empty() {
            shape.knobs = hooks.knobs.of_shape(knobs).into();
        }
        Ok(())
    }

    /// Folds the knobs of a round's sequences, completes the shape, fills the early fields.
    pub(super) fn stage(
        &mut self,
        hooks: &Hooks,
        slots: &[Slot],
        shape: &mut Shape,
        round: &mut RoundBuffer,
    ) -> Result<Values, ResolveError> {
        let defaults = &hooks.knobs.defaults;
        let of = |slot: &u32| &slots[*slot as usize].knobs;
        let knobs = if round.seq_slot.iter().all(|s| Arc::ptr_eq(of(s), defaults) || of(s).is_empty()) {
            defaults.clone()
        } else {
            hooks.knobs.fold(round.seq_slot.iter().map(|s| &of(s)[..]))
        };
        if hooks.words.is_empty() && hooks.knobs.specs.is_empty() && hooks.fields.is_empty() {
            return Ok(knobs);
        }
        self.words(hooks, shape, (&round.seq_rows, &round.seq_start, &round.seq_slot), &knobs)?;
        round.fields.clear();
        for field in &mut self.fields {
            let entries = match field.spec.per {
                FieldPer::Row => round.tokens.len(),
                FieldPer::Sequence => round.seq_first.len(),
                FieldPer::Once => 1,
            };
            let (size, width) = (field.spec.dtype.size(), field.spec.width);
            let units = (entries * width as usize * size).div_ceil(64);
            field.memory.clear();
            field.memory.resize(units, [0; 8]);
            let ptr = field.memory.as_mut_ptr().cast();
            let dtype = field.spec.dtype;
            round.fields.push(View { ptr, rows: entries as u32, cols: width, stride: width, dtype });
        }
        let filled = self.fill(hooks, shape, round, &knobs, false);
        filled.map_err(|error| ResolveError::Claim { op: "a round-table field".into(), error })?;
        Ok(knobs)
    }

    /// Lets plugins fill their early or late fields of a round.
    pub(super) fn fill(
        &self,
        hooks: &Hooks,
        shape: &Shape,
        round: &RoundBuffer,
        knobs: &[KnobValue],
        late: bool,
    ) -> Result<(), HookError> {
        for (i, h) in hooks.fields.iter().enumerate().filter(|(i, _)| self.fields[*i].spec.late == late) {
            let facts = BatchFacts {
                phase: shape.phase,
                rows: Slice::from(&round.seq_rows[..]),
                starts: Slice::from(&round.seq_start[..]),
                slots: Slice::from(&round.seq_slot[..]),
                knobs: Slice::from(knobs),
            };
            let view = round.fields.get(i).copied();
            let view = view.ok_or_else(|| h.named(&OpError::new("its field is not in the round table")))?;
            h.call(|f| f.fill(&facts, view))?;
        }
        Ok(())
    }

    /// The timer of a forward, where somebody asks for one.
    pub(super) fn timer<'a>(&'a self, shape: &'a Shape, knobs: &[KnobValue]) -> Option<Timer<'a>> {
        let wants = |h: &&Hooked<ObserverObject>| h.hook.times(Slice::from(knobs)).unwrap_or(false);
        let asked: Vec<&Hooked<ObserverObject>> = self.timers.iter().filter(wants).collect();
        if asked.is_empty() {
            return None;
        }
        Some(Box::new(move |step: &Step, rows, seconds| {
            let done = OpDone {
                op: Text::from(step.op.as_str()),
                program: Text::from(shape.kind.as_str()),
                phase: shape.phase,
                layer: step.layer,
                site: step.site,
                rows,
                seconds,
            };
            for h in &asked {
                if let Err(error) = h.call(|o| o.operation(&done)) {
                    tracing::warn!("{error}");
                }
            }
        }))
    }
}

//! What a forward gets besides its rows: folded knobs, shape words, plugins' fields.

use std::sync::Arc;
use std::time::Instant;

use plugfold_abi::points::{
    BatchFacts, Bounds, Capture, FieldPer, FieldSpec, Fields, Launched, Observer, ObserverObject, OpDone,
    Words, interest,
};
use plugfold_abi::{Call, KnobValue, OpError, Phase, Shape, Slice, Step, Text, View, Word};

use super::programs::Key;
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
    values: Vec<u64>,
    /// Values that were folded last, where all sequences had the same ones, and what they came to.
    folded: Option<(Values, Values)>,
    fields: Vec<Field>,
    timers: Vec<Hooked<ObserverObject>>,
    /// Who is told of forwards.
    followers: Vec<Hooked<ObserverObject>>,
    /// Who sees the calls of operations, and of which.
    watchers: Vec<(Hooked<ObserverObject>, Vec<String>)>,
}

struct Field {
    spec: FieldSpec,
    memory: Vec<[u64; 8]>,
}

/// Tells timed steps.
type Timer<'a> = Box<dyn Fn(&Step, u32, f64) + Sync + 'a>;

/// Tells observers; what they fail with is logged and changes nothing.
fn tell(observers: &[Hooked<ObserverObject>], told: impl Fn(&ObserverObject) -> Result<(), OpError>) {
    for h in observers {
        if let Err(error) = h.call(&told) {
            tracing::warn!("{error}");
        }
    }
}

/// Bounds of a forward's shape, as `capture` raises them.
fn bounds(hooks: &Hooks, key: &mut Key, facts: &BatchFacts<'_>) -> Result<(), HookError> {
    for h in &hooks.captures {
        let mut bounds = Bounds { rows: key.rows, seqs: key.seqs, out_rows: key.out_rows };
        let raised = h.call(|c| c.bounds(facts, &mut bounds)).and_then(|()| {
            let lowered = bounds.rows < key.rows || bounds.seqs < key.seqs || bounds.out_rows < key.out_rows;
            if lowered {
                return Err(h.named(&OpError::new("it lowers the bounds of a shape")));
            }
            Ok(())
        });
        raised?;
        (key.rows, key.seqs) = (bounds.rows, bounds.seqs);
        // Whether a forward has a head is no matter of bounds.
        key.out_rows = if key.out_rows == 0 { 0 } else { bounds.out_rows };
    }
    Ok(())
}

impl Stages {
    pub(super) fn new(hooks: &Hooks) -> Result<Self, HookError> {
        let words = hooks.words.iter().map(|h| Ok(h.call(Words::name)?.to_string()));
        let mut fields = Vec::new();
        for (id, h) in hooks.fields.iter().enumerate() {
            let spec = h.call(Fields::spec)?;
            h.call(|f| f.numbered(id as u32))?;
            fields.push(Field { spec, memory: Vec::new() });
        }
        let (mut timers, mut followers, mut watchers) = (Vec::new(), Vec::new(), Vec::new());
        for h in &hooks.observers {
            let interests = h.call(Observer::interests)?;
            if interests & interest::OPERATION != 0 {
                timers.push(h.clone());
            }
            if interests & interest::LAUNCHED != 0 {
                followers.push(h.clone());
            }
            let watches: Vec<String> = h.call(Observer::watches)?.iter().map(ToString::to_string).collect();
            if !watches.is_empty() {
                watchers.push((h.clone(), watches));
            }
        }
        let words = words.collect::<Result<_, HookError>>()?;
        Ok(Self { words, values: Vec::new(), folded: None, fields, timers, followers, watchers })
    }

    /// Values of plugins' words, as staged last.
    pub(super) fn values(&self) -> &[u64] {
        &self.values
    }

    fn facts<'a>(
        phase: Phase,
        tokens: &'a [u32],
        (rows, starts, slots): (&'a [u32], &'a [u32], &'a [u32]),
        knobs: &'a [KnobValue],
    ) -> BatchFacts<'a> {
        BatchFacts {
            phase,
            tokens: Slice::from(tokens),
            rows: Slice::from(rows),
            starts: Slice::from(starts),
            slots: Slice::from(slots),
            knobs: Slice::from(knobs),
        }
    }

    /// Asks for every word; one that fails is left out.
    fn ask_words(&mut self, hooks: &Hooks, facts: &BatchFacts<'_>) -> Result<(), HookError> {
        self.values.clear();
        let mut failed = Ok(());
        for h in &hooks.words {
            let value = h.call(|w| w.value(facts));
            self.values.push(value.as_ref().map_or(0, |value| *value));
            failed = failed.and(value.map(|_| ()));
        }
        failed
    }

    /// Adds words with their values, and the shape's part of the knobs.
    pub(super) fn complete(&self, hooks: &Hooks, shape: &mut Shape, values: &[u64], knobs: &[KnobValue]) {
        let set = self.words.iter().zip(values).filter(|(_, value)| **value != 0);
        shape.words.extend(set.map(|(name, value)| word(name, *value)));
        shape.words.sort_by(|a, b| a.name.cmp(&b.name));
        if !hooks.knobs.specs.is_empty() {
            shape.knobs = hooks.knobs.of_shape(knobs).into();
        }
    }

    /// Asks for words, and adds them and the shape's part of the knobs.
    pub(super) fn words(
        &mut self,
        hooks: &Hooks,
        shape: &mut Shape,
        batch: (&[u32], &[u32], &[u32]),
        knobs: &[KnobValue],
    ) -> Result<(), ResolveError> {
        let asked = self.ask_words(hooks, &Self::facts(shape.phase, &[], batch, knobs));
        asked.map_err(|error| ResolveError::Claim { op: "a word of the shape".into(), error })?;
        let values = std::mem::take(&mut self.values);
        self.complete(hooks, shape, &values, knobs);
        self.values = values;
        Ok(())
    }

    /// Folds the knobs of a round's sequences, asks for words and bounds, fills the early fields. A hook that fails does not
    /// keep the others from being asked: the rank still has to run its part of the exchanges.
    pub(super) fn stage(
        &mut self,
        hooks: &Hooks,
        slots: &[Slot],
        key: &mut Key,
        round: &mut RoundBuffer,
    ) -> (Values, Result<(), HookError>) {
        let defaults = &hooks.knobs.defaults;
        let of = |slot: &u32| &slots[*slot as usize].knobs;
        let first = round.seq_slot.first().map_or(defaults, of);
        let knobs = if round.seq_slot.iter().all(|s| Arc::ptr_eq(of(s), defaults) || of(s).is_empty()) {
            defaults.clone()
        } else if let Some((_, folded)) = self.folded.as_ref().filter(|(values, _)| {
            // The same sequence again, or others of the same request's values.
            Arc::ptr_eq(values, first) && round.seq_slot.iter().all(|s| Arc::ptr_eq(of(s), first))
        }) {
            folded.clone()
        } else {
            let folded = hooks.knobs.fold(round.seq_slot.iter().map(|s| &of(s)[..]));
            if round.seq_slot.iter().all(|s| Arc::ptr_eq(of(s), first)) {
                self.folded = Some((first.clone(), folded.clone()));
            }
            folded
        };
        round.fields.clear();
        self.values.clear();
        if hooks.words.is_empty() && hooks.captures.is_empty() && hooks.fields.is_empty() {
            return (knobs, Ok(()));
        }
        let batch = (&round.seq_rows[..], &round.seq_start[..], &round.seq_slot[..]);
        let facts = Self::facts(key.phase, &round.tokens, batch, &knobs);
        let words = self.ask_words(hooks, &facts);
        let bounds = bounds(hooks, key, &facts);
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
        let filled = self.fill(hooks, key.phase, round, &knobs, false);
        (knobs, words.and(bounds).and(filled))
    }

    /// Lets plugins fill their early or late fields of a round.
    pub(super) fn fill(
        &self,
        hooks: &Hooks,
        phase: Phase,
        round: &RoundBuffer,
        knobs: &[KnobValue],
        late: bool,
    ) -> Result<(), HookError> {
        for (i, h) in hooks.fields.iter().enumerate().filter(|(i, _)| self.fields[*i].spec.late == late) {
            let batch = (&round.seq_rows[..], &round.seq_start[..], &round.seq_slot[..]);
            let facts = Self::facts(phase, &round.tokens, batch, knobs);
            let view = round.fields.get(i).copied();
            let view = view.ok_or_else(|| h.named(&OpError::new("its field is not in the round table")))?;
            h.call(|f| f.fill(&facts, view))?;
        }
        Ok(())
    }

    /// The time, if somebody is told of forwards.
    pub(super) fn clock(&self) -> Option<Instant> {
        (!self.followers.is_empty()).then(Instant::now)
    }

    /// Tells that a forward is under way.
    pub(super) fn launched(&self, forward: &Launched<'_>) {
        tell(&self.followers, |o| o.launched(forward));
    }

    /// Tells that a forward is over.
    pub(super) fn forward(&self, forward: &Launched<'_>, began: Instant) {
        let seconds = began.elapsed().as_secs_f64();
        tell(&self.followers, |o| o.forward(forward, seconds));
    }

    /// Shows the call of a watched operation.
    pub(super) fn ran(&self, call: &Call<'_>) {
        for (h, _) in self.watchers.iter().filter(|(_, ops)| ops.iter().any(|op| *op == call.op.get_str())) {
            tell(std::slice::from_ref(h), |o| o.ran(call));
        }
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

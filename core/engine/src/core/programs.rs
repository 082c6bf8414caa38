//! The programs of a core: made once a shape, found without looking at a name.

use std::collections::HashMap;
use std::sync::Arc;

use plugfold_abi::points::{Capture, CaptureFacts, Executor, Mode};
use plugfold_abi::{KnobValue, List, Phase, Shape};

use super::stage::word;
use super::{Core, ResolveError};
use crate::hooks::HookError;
use crate::program::Resolved;
use crate::program::build::{Builder, WORD_STREAMS, WORD_ZERO_FIRST, kinds};

/// Which of the builder's programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Forward,
    Mtp,
    Commit,
}

impl Kind {
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Forward => kinds::FORWARD,
            Kind::Mtp => kinds::MTP,
            Kind::Commit => kinds::COMMIT,
        }
    }
}

/// The part of a shape that the engine decides. Plugins' words and knobs are compared beside it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub kind: Kind,
    pub phase: Phase,
    pub rows: u32,
    pub seqs: u32,
    pub out_rows: u32,
    pub select: bool,
    pub candidates: u32,
    pub streams: bool,
    pub zero_first: bool,
}

impl Key {
    /// A key with bounds of powers of two, so that few shapes occur.
    pub(super) fn new(kind: Kind, phase: Phase, rows: u32, seqs: u32, out_rows: u32) -> Self {
        Self {
            kind,
            phase,
            rows: rows.next_power_of_two(),
            seqs: seqs.next_power_of_two(),
            out_rows: if out_rows == 0 { 0 } else { out_rows.next_power_of_two() },
            select: false,
            candidates: 0,
            streams: false,
            zero_first: false,
        }
    }

    /// The shape, without words and knobs of plugins.
    pub(super) fn shape(&self) -> Shape {
        let mut words = List::new();
        for (name, on) in [(WORD_STREAMS, self.streams), (WORD_ZERO_FIRST, self.zero_first)] {
            if on {
                words.push(word(name, 1));
            }
        }
        Shape {
            kind: self.kind.name().into(),
            phase: self.phase,
            rows: self.rows,
            seqs: self.seqs,
            out_rows: self.out_rows,
            select: self.select,
            candidates: self.candidates,
            words,
            knobs: List::new(),
        }
    }
}

/// A program with what it is kept under beside its key.
pub(super) struct Kept {
    words: Vec<u64>,
    knobs: Vec<KnobValue>,
    pub resolved: Arc<Resolved>,
    sightings: u64,
    captured: bool,
}

/// Where a program is kept.
#[derive(Clone, Copy)]
pub(super) struct Place(Key, usize);

/// All programs that were made.
#[derive(Default)]
pub(super) struct Programs {
    by_shape: HashMap<Shape, Arc<Resolved>>,
    by_key: HashMap<Key, Vec<Kept>>,
    made: u64,
    captures: u32,
}

impl Programs {
    /// Forgets all: they hold the addresses of caches.
    pub(super) fn clear(&mut self) {
        self.by_shape.clear();
        self.by_key.clear();
        self.captures = 0;
    }

    pub(super) fn at(&self, place: &Place) -> &Kept {
        &self.by_key[&place.0][place.1]
    }
}

impl Core {
    /// The program of a shape, made once.
    ///
    /// # Errors
    /// A step that nobody runs, or an executor that cannot prepare it.
    pub fn program(&mut self, shape: &Shape) -> Result<Arc<Resolved>, ResolveError> {
        if let Some(found) = self.programs.by_shape.get(shape) {
            return Ok(found.clone());
        }
        let program = Builder { config: &self.config, split: self.split }.build(shape);
        let mut resolved = self.registry.resolve(program, &self.weights, &self.caches)?;
        self.programs.made += 1;
        resolved.number = self.programs.made;
        self.arena.reserve(resolved.placement.total)?;
        if let Some(h) = &self.executor {
            let prepared = h.call(|e| e.prepare(resolved.number, &resolved.program));
            prepared.map_err(|error| ResolveError::Claim { op: "executor".into(), error })?;
        }
        let resolved = Arc::new(resolved);
        self.programs.by_shape.insert(shape.clone(), resolved.clone());
        Ok(resolved)
    }

    /// The program for the words and knobs that were staged.
    pub(super) fn find(&mut self, key: Key, knobs: &[KnobValue]) -> Result<Place, ResolveError> {
        let table = &self.hooks.knobs;
        let words = self.stages.values();
        let known = self.programs.by_key.get(&key).and_then(|list| {
            list.iter().position(|k| k.words == words && table.is_of_shape(&k.knobs, knobs))
        });
        if let Some(at) = known {
            return Ok(Place(key, at));
        }
        let words = words.to_vec();
        let mut shape = key.shape();
        self.stages.complete(&self.hooks, &mut shape, &words, knobs);
        let knobs = shape.knobs.to_vec();
        let resolved = self.program(&shape)?;
        let list = self.programs.by_key.entry(key).or_default();
        list.push(Kept { words, knobs, resolved, sightings: 0, captured: false });
        Ok(Place(key, list.len() - 1))
    }

    /// How the forward of a program runs. Without an executor there is one way only.
    pub(super) fn mode(&mut self, place: &Place) -> (Mode, Result<(), HookError>) {
        let mut mode = Mode::Eager;
        if self.executor.is_none() {
            return (mode, Ok(()));
        }
        let captures = self.programs.captures;
        let Some(kept) = self.programs.by_key.get_mut(&place.0).and_then(|list| list.get_mut(place.1)) else {
            return (mode, Ok(()));
        };
        let (sightings, captured) = (kept.sightings, kept.captured);
        let facts = CaptureFacts { shape: &kept.resolved.program.shape, sightings, captured, captures };
        let asked = self.hooks.captures.iter().try_for_each(|h| h.call(|c| c.mode(&facts, &mut mode)));
        kept.sightings += 1;
        if mode == Mode::Capture && !kept.captured {
            kept.captured = true;
            self.programs.captures += 1;
        }
        (mode, asked)
    }
}

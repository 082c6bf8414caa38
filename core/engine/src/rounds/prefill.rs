//! A piece of a prompt: cut into chunks, run, committed, kept where it is asked for.

use plugfold_abi::points::Observer;
use plugfold_abi::points::{SaveKind, SequenceEvent, SpanFacts, Spans, interest};
use plugfold_abi::{List, OpError, Phase, Slice, Span};

use super::window::{candidates, settle, tell};
use super::{Outcome, RoundError, Rounds};
use crate::core::{Core, SeqRows, Want};
use crate::hooks::HookError;
use crate::plan::{Admission, PROMPT, Piece};
use crate::program::Read;
use crate::ranks::World;

impl Rounds {
    pub(super) fn prefill(
        &mut self,
        core: &mut Core,
        world: &World,
        piece: Piece,
    ) -> Result<Outcome, RoundError> {
        let slot = piece.slot;
        if self.running[slot].is_none() {
            return Ok(Outcome::Failed("no such sequence".into()));
        }
        let cut = self.chunks(core, piece);
        let chunks = match cut {
            Ok(chunks) => chunks,
            Err(error) => {
                self.note(slot, Err::<(), _>(error));
                Vec::new()
            }
        };
        if let Some(message) = self.failed(core, world, slot, "chunks of a piece")? {
            return Ok(Outcome::Failed(message));
        }
        let mut outcome = Outcome::Absorbed(core.slot(slot).len());
        for chunk in chunks {
            outcome = self.chunk(core, world, slot, chunk)?;
            if matches!(outcome, Outcome::Failed(_)) {
                return Ok(outcome);
            }
        }
        Ok(outcome)
    }

    fn failed(
        &mut self,
        core: &Core,
        world: &World,
        slot: usize,
        what: &str,
    ) -> Result<Option<String>, RoundError> {
        let failed = self.agree(core, world, what)?;
        Ok(failed.into_iter().find(|(s, _)| *s == slot).map(|(_, message)| message))
    }

    /// The chunks of a piece: the server's size, cut at marks, as plugins change them.
    fn chunks(&self, core: &Core, piece: Piece) -> Result<Vec<Span>, HookError> {
        let Some(running) = &self.running[piece.slot] else { return Ok(Vec::new()) };
        let begin = core.slot(piece.slot).len();
        let prompt = running.admission.ids.len();
        let end = (begin + piece.tokens).min(prompt);
        let marks: Vec<u32> =
            running.admission.marks.iter().filter(|m| **m > begin && **m <= end).map(|m| *m as u32).collect();
        let mut chunks: List<Span> = cut(begin, end, self.chunk, &marks).into();
        let facts = SpanFacts {
            begin: begin as u32,
            tokens: (end - begin) as u32,
            prompt: prompt as u32,
            marks: Slice::from(&marks[..]),
            knobs: Slice::from(&running.knobs[..]),
            most: self.chunk_most as u32,
        };
        for h in &self.hooks.spans {
            h.call(|s| s.spans(&facts, &mut chunks))?;
            if let Some(wrong) = fault(&chunks, begin, end, self.chunk_most, &marks) {
                return Err(h.named(&OpError::new(format!("its chunks of tokens {begin} to {end} {wrong}"))));
            }
        }
        Ok(chunks.into())
    }

    fn chunk(
        &mut self,
        core: &mut Core,
        world: &World,
        slot: usize,
        chunk: Span,
    ) -> Result<Outcome, RoundError> {
        let Some(running) = &self.running[slot] else {
            return Ok(Outcome::Failed("no such sequence".into()));
        };
        let (start, end) = (chunk.start as usize, chunk.end as usize);
        let prompt = running.admission.ids.len();
        let last = end == prompt;
        let hidden = core.config().hidden_size;
        let embeds = embeds(&running.admission, start, end, hidden);
        let tokens = running.admission.ids[start..end].to_vec();
        let rows = [SeqRows {
            slot,
            tokens: &tokens,
            want: if last { Want::Last } else { Want::Nothing },
            embeds: &embeds,
        }];
        let wanted = last.then(|| candidates(core, std::iter::once(&running.admission)));
        let forward = core.forward(Phase::Prefill, &rows, wanted, false)?;
        let mut found = match settle(core, world, &forward, &[])? {
            Ok(exchanged) => exchanged.rows,
            Err(message) => {
                self.end(core, slot);
                return Ok(Outcome::Failed(message));
            }
        };
        let draft = running.admission.draft;
        let marked = running.admission.marks.contains(&end);
        let stands = marked && running.admission.reason(end) == PROMPT;
        // A mark may stand for the prompt, whose own end then leaves nothing.
        let kept = match (stands, last) {
            (true, _) => Some(SaveKind::Prompt),
            (false, true) => (!running.admission.early).then_some(SaveKind::Prompt),
            (false, false) => marked.then_some(SaveKind::Mark),
        };
        let mut taken = last.then(|| self.take(core, slot, end, &mut found, 0, &[], 1));
        if let Some(taken) = &mut taken {
            tell(core, &forward, std::slice::from_mut(taken))?;
        }
        let rows = self.hidden(core, &forward, draft);
        core.commit(&forward, &[end - start])?;
        core.recycle(forward);
        if draft {
            self.absorbed(core, world, slot, start, &tokens, &rows)?;
        }
        let event = SequenceEvent::Absorbed {
            start: start as u32,
            tokens: (end - start) as u32,
            prompt: prompt as u32,
        };
        self.observe(interest::SEQUENCE, |o| o.sequence(slot as u32, &event));
        if let Some(message) = self.failed(core, world, slot, "a chunk")? {
            return Ok(Outcome::Failed(message));
        }
        if let Some(kind) = kept {
            self.keep(core, world, slot, kind)?;
        }
        let Some(taken) = taken else { return Ok(Outcome::Absorbed(end)) };
        if taken.ends() {
            self.end(core, slot);
        }
        Ok(taken.outcome)
    }

    /// The final rows of a forward, where a drafter reads them.
    pub(super) fn hidden(&self, core: &mut Core, forward: &crate::core::Forward, draft: bool) -> Vec<f32> {
        if draft && self.drafting.wants_hidden() {
            core.read(forward, Read::Rows).map(<[f32]>::to_vec).unwrap_or_default()
        } else {
            Vec::new()
        }
    }
}

/// Chunks of `size` from `begin` to `end`, ending at marks as well.
fn cut(begin: usize, end: usize, size: usize, marks: &[u32]) -> Vec<Span> {
    let mut chunks = Vec::new();
    let mut start = begin;
    while start < end {
        let mark = marks.iter().map(|m| *m as usize).find(|m| *m > start).unwrap_or(end);
        let stop = (start + size).min(mark).min(end);
        chunks.push(Span { start: start as u32, end: stop as u32 });
        start = stop;
    }
    chunks
}

/// What is wrong with chunks, if anything.
fn fault(chunks: &[Span], begin: usize, end: usize, most: usize, marks: &[u32]) -> Option<String> {
    let mut at = begin as u32;
    for c in chunks {
        if c.start != at || c.end <= c.start {
            return Some(format!("have {}..{} where {at} is next", c.start, c.end));
        }
        if (c.end - c.start) as usize > most {
            return Some(format!("have {} rows in one, over the largest chunk of {most}", c.end - c.start));
        }
        at = c.end;
    }
    if at as usize != end {
        return Some(format!("end at {at}"));
    }
    let missed = marks.iter().find(|m| !chunks.iter().any(|c| c.end == **m));
    missed.map(|m| format!("do not end at {m}, where a snapshot is wanted"))
}

/// Per position, the image row that replaces its embedding; nothing where the sequence has none.
pub(super) fn embeds(admission: &Admission, start: usize, end: usize, hidden: usize) -> Vec<Option<&[f32]>> {
    if admission.attachments.is_empty() {
        return Vec::new();
    }
    let row = |position: usize| {
        admission.attachments.iter().find_map(|(at, rows)| {
            let i = position.checked_sub(*at)?;
            rows.get(i * hidden..(i + 1) * hidden)
        })
    };
    (start..end).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn chunks_are_the_piece_and_end_at_marks(
            begin in 0usize..100, tokens in 1usize..300, size in 1usize..70, marks in prop::collection::btree_set(0u32..400, 0..6),
        ) {
            let end = begin + tokens;
            let marks: Vec<u32> = marks.into_iter().filter(|m| (*m as usize) > begin && (*m as usize) <= end).collect();
            let chunks = cut(begin, end, size, &marks);
            prop_assert_eq!(fault(&chunks, begin, end, size, &marks), None);
        }
    }

    #[test]
    fn faults_of_chunks_are_named() {
        let span = |start, end| Span { start, end };
        assert!(fault(&[span(0, 4), span(5, 8)], 0, 8, 8, &[]).unwrap().contains("where 4 is next"));
        assert!(fault(&[span(0, 8)], 0, 8, 7, &[]).unwrap().contains("8 rows in one"));
        assert!(fault(&[span(0, 4)], 0, 8, 8, &[]).unwrap().contains("end at 4"));
        assert!(fault(&[span(0, 8)], 0, 8, 8, &[3]).unwrap().contains("do not end at 3"));
    }
}

//! Prompt chunks of a chosen size.
//!
//! Each chunk reads every weight once, so large chunks read fewer weights a token; a row's bits do not depend on its chunk.

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Limits, LimitsLink, LimitsLinkObject, SpanChoice, SpanFacts, Spans, SpansObject};
use plugfold_abi::{KnobId, List, OpError, Span, TextBuf, value_of};

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");
const KEY: &str = "prefill_rows";

/// The plugin.
pub struct PrefillRows;

impl Plugin for PrefillRows {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }

    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let rows = rows_of(setup.knobs.int(KEY)?)?;
        let chunks = Chunks { id: setup.knobs.id(KEY)?, rows };
        let raise = Buffers { rows };
        Ok(List::from(vec![Offer::of(SpansObject::new(chunks)), Offer::of(LimitsLinkObject::new(raise))]))
    }
}

fn rows_of(value: i64) -> Result<u32, OpError> {
    let rows = u32::try_from(value).ok().filter(|rows| *rows > 0);
    rows.ok_or_else(|| OpError::invalid(format!("{KEY} is {value}: give at least 1 row")))
}

/// Buffers hold the server's own chunk.
struct Buffers {
    rows: u32,
}

impl LimitsLink for Buffers {
    fn raise(&self, limits: &mut Limits) -> Result<(), OpError> {
        limits.prefill_rows = self.rows;
        limits.prefill_rows_max = limits.prefill_rows_max.max(self.rows);
        Ok(())
    }
}

/// Cuts pieces.
struct Chunks {
    id: KnobId,
    rows: u32,
}

impl Spans for Chunks {
    fn spans(&self, facts: &SpanFacts<'_>, chunks: &mut List<SpanChoice>) -> Result<(), OpError> {
        let rows = match value_of(facts.knobs, self.id).and_then(plugfold_abi::KnobValue::as_int) {
            Some(asked) => rows_of(asked)?,
            None => self.rows,
        };
        if rows > facts.most {
            return Err(OpError::invalid(format!(
                "{KEY} is {rows}: this server's buffers hold 1 to {} rows; ask for fewer, or start it with more",
                facts.most
            )));
        }
        let end = facts.begin.saturating_add(facts.tokens);
        let mut marks = facts.marks.iter().copied().filter(|m| *m > facts.begin && *m < end).peekable();
        chunks.clear();
        let mut start = facts.begin;
        while start < end {
            while marks.next_if(|m| *m <= start).is_some() {}
            let mark = marks.peek().copied().unwrap_or(end);
            let next = start.saturating_add(rows).min(mark).min(end);
            chunks.push(Span { start, end: next });
            start = next;
        }
        Ok(())
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: PrefillRows);

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::{KnobValue, Slice};

    fn cut(begin: u32, tokens: u32, marks: &[u32], asked: Option<i64>) -> Result<Vec<(u32, u32)>, OpError> {
        let knobs: Vec<KnobValue> = asked.into_iter().map(KnobValue::Int).collect();
        let facts = SpanFacts {
            begin,
            tokens,
            prompt: begin + tokens,
            marks: Slice::from(marks),
            knobs: Slice::from(knobs.as_slice()),
            most: 100,
        };
        let mut chunks = List::from(vec![Span { start: begin, end: begin + tokens }]);
        Chunks { id: 0, rows: 64 }.spans(&facts, &mut chunks)?;
        Ok(chunks.iter().map(|c| (c.start, c.end)).collect())
    }

    #[test]
    fn chunks_are_the_piece_in_order() {
        assert_eq!(cut(0, 130, &[], None).unwrap(), [(0, 64), (64, 128), (128, 130)]);
        assert_eq!(cut(5, 3, &[], Some(1)).unwrap(), [(5, 6), (6, 7), (7, 8)]);
        assert_eq!(cut(10, 90, &[], Some(100)).unwrap(), [(10, 100)]);
        assert_eq!(cut(7, 0, &[], None).unwrap(), []);
    }

    #[test]
    fn a_chunk_ends_at_each_mark() {
        assert_eq!(cut(0, 100, &[10, 70, 100], None).unwrap(), [(0, 10), (10, 70), (70, 100)]);
        assert_eq!(cut(50, 50, &[10, 50, 60], Some(30)).unwrap(), [(50, 60), (60, 90), (90, 100)]);
    }

    #[test]
    fn sizes_that_no_buffer_holds_are_refused() {
        let told = cut(0, 10, &[], Some(101)).unwrap_err().to_string();
        assert!(told.contains("prefill_rows is 101") && told.contains("1 to 100"), "{told}");
        for bad in [0, -1, i64::MAX] {
            assert!(cut(0, 10, &[], Some(bad)).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_largest_chunk_is_raised_and_never_lowered() {
        let mut limits =
            Limits { context: 1, slots: 1, window_rows: 1, prefill_rows: 64, prefill_rows_max: 64, piece: 1 };
        Buffers { rows: 16 }.raise(&mut limits).unwrap();
        assert_eq!((limits.prefill_rows, limits.prefill_rows_max), (16, 64));
        Buffers { rows: 512 }.raise(&mut limits).unwrap();
        assert_eq!((limits.prefill_rows, limits.prefill_rows_max), (512, 512));
    }
}

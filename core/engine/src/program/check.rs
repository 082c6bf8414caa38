//! The checker: a program that passes it can be run by any executor, on any number of streams.

use plugfold_abi::{Base, Operand, Program, Reach, Span, Step, ops};

use super::order::Order;

/// What is wrong with a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProgramError {
    /// A wait for an event that no earlier step signals.
    #[error("step {step} ({op}) waits for event {event}, which no earlier step signals")]
    Wait {
        /// Index of the step.
        step: usize,
        /// Its operation.
        op: String,
        /// The event.
        event: u32,
    },
    /// Two steps signal one event.
    #[error("step {step} ({op}) signals event {event} a second time")]
    SignalTwice {
        /// Index of the step.
        step: usize,
        /// Its operation.
        op: String,
        /// The event.
        event: u32,
    },
    /// An operand lies outside its buffer.
    #[error("step {step} ({op}) uses columns {start}..{end} of buffer {buffer}, which has {cols}")]
    Operand {
        /// Index of the step.
        step: usize,
        /// Its operation.
        op: String,
        /// Name of the buffer, or its number if there is none.
        buffer: String,
        /// First column.
        start: u32,
        /// One past the last column.
        end: u32,
        /// Columns there are.
        cols: u32,
    },
    /// A read that no write is certain to precede.
    #[error(
        "step {step} ({op}) reads rows {rows:?} of buffer {buffer}, which not every earlier write has filled: a write or a wait is missing"
    )]
    Unwritten {
        /// Index of the step.
        step: usize,
        /// Its operation.
        op: String,
        /// Name of the buffer.
        buffer: String,
        /// Rows read.
        rows: (u32, u32),
    },
    /// Rows or columns written twice.
    #[error("steps {first} and {second} ({op}) both write rows of buffer {buffer}")]
    WrittenTwice {
        /// Index of the first step.
        first: usize,
        /// Index of the second step.
        second: usize,
        /// Operation of the second.
        op: String,
        /// Name of the buffer.
        buffer: String,
    },
    /// Two steps touch one cache family of one layer, and nothing orders them.
    #[error(
        "steps {first} and {second} ({op}) touch cache {family} of layer {layer} without an order between them"
    )]
    CacheRace {
        /// Index of the first step.
        first: usize,
        /// Index of the second step.
        second: usize,
        /// Operation of the second.
        op: String,
        /// Family.
        family: String,
        /// Layer.
        layer: u32,
    },
    /// Rows that an operation without outputs covers twice or not at all.
    #[error("{op} of layer {layer} covers rows {rows:?} {times} times, not once")]
    Coverage {
        /// Operation.
        op: String,
        /// Layer.
        layer: u32,
        /// Rows in question.
        rows: (u32, u32),
        /// How often.
        times: usize,
    },
    /// A stream whose last steps nothing waits for.
    #[error("stream {stream} is never joined by stream 0")]
    OpenFork {
        /// Stream.
        stream: usize,
    },
    /// Two exchanges whose order may differ between ranks.
    #[error("exchanges {first} and {second} have no fixed order: ranks could run them crosswise")]
    CollectiveOrder {
        /// Index of the first step.
        first: usize,
        /// Index of the second step.
        second: usize,
    },
    /// Two buffers share memory while both are in use.
    #[error("buffers {first} and {second} share memory while both are in use")]
    Overlap {
        /// Name of the first.
        first: String,
        /// Name of the second.
        second: String,
    },
}

#[derive(Clone, Copy)]
struct Rect {
    step: usize,
    rows: Span,
    cols: (u32, u32),
}

fn overlap(a: (u32, u32), b: (u32, u32)) -> bool {
    a.0 < b.1 && b.0 < a.1
}

fn rows_of(span: Span) -> (u32, u32) {
    (span.start, span.end)
}

/// Rows of its input buffers that a step reads: its own, or all where it picks from anywhere or groups over all.
fn read_span(program: &Program, step: &Step, input: Operand) -> Span {
    let from = program.buffers[input.buffer as usize].extent.base;
    let picks = from == Base::Rows
        && step.outputs.iter().any(|o| program.buffers[o.buffer as usize].extent.base == Base::OutRows);
    if picks || from == Base::One { Span::ALL } else { step.rows }
}

/// Whether the rectangles cover `want` wholly (both are unions of axis-parallel rectangles: cut at every edge).
fn covered(want: Rect, by: &[Rect]) -> bool {
    let mut xs = vec![want.cols.0, want.cols.1];
    let mut ys = vec![want.rows.start, want.rows.end];
    for r in by {
        xs.extend([r.cols.0, r.cols.1]);
        ys.extend([r.rows.start, r.rows.end]);
    }
    xs.sort_unstable();
    ys.sort_unstable();
    let inside = |x: u32, y: u32| {
        by.iter().any(|r| r.cols.0 <= x && x < r.cols.1 && r.rows.start <= y && y < r.rows.end)
    };
    xs.iter()
        .filter(|&&x| want.cols.0 <= x && x < want.cols.1)
        .all(|&x| ys.iter().filter(|&&y| want.rows.start <= y && y < want.rows.end).all(|&y| inside(x, y)))
}

/// Checks everything that does not depend on where buffers lie.
///
/// # Errors
/// The first fault found.
pub fn check(program: &Program) -> Result<(), ProgramError> {
    let order = Order::of(program)?;
    let mut writes: Vec<Vec<Rect>> = vec![Vec::new(); program.buffers.len()];
    for (i, step) in program.steps.iter().enumerate() {
        check_operands(program, i, step)?;
        for input in &step.inputs {
            let buffer = &program.buffers[input.buffer as usize];
            if buffer.input {
                continue;
            }
            let rows = read_span(program, step, *input);
            let want = Rect { step: i, rows, cols: (input.col, input.col + input.cols) };
            let earlier: Vec<Rect> =
                writes[input.buffer as usize].iter().copied().filter(|w| order.before(w.step, i)).collect();
            if !covered(want, &earlier) {
                return Err(ProgramError::Unwritten {
                    step: i,
                    op: step.op.to_string(),
                    buffer: buffer.name.to_string(),
                    rows: rows_of(rows),
                });
            }
        }
        for output in &step.outputs {
            let base = program.buffers[output.buffer as usize].extent.base;
            let rows = if base == Base::Rows { step.rows } else { Span::ALL };
            let mine = Rect { step: i, rows, cols: (output.col, output.col + output.cols) };
            let seen = &mut writes[output.buffer as usize];
            if let Some(w) = seen
                .iter()
                .find(|w| overlap(w.cols, mine.cols) && overlap(rows_of(w.rows), rows_of(mine.rows)))
            {
                return Err(ProgramError::WrittenTwice {
                    first: w.step,
                    second: i,
                    op: step.op.to_string(),
                    buffer: program.buffers[output.buffer as usize].name.to_string(),
                });
            }
            seen.push(mine);
        }
    }
    check_written(program, &writes)?;
    check_caches(program, &order)?;
    check_coverage(program)?;
    if let Some(&stream) = order.open_forks().first() {
        return Err(ProgramError::OpenFork { stream });
    }
    check_collectives(program, &order)
}

fn check_operands(program: &Program, i: usize, step: &Step) -> Result<(), ProgramError> {
    for o in step.inputs.iter().chain(&step.outputs) {
        let buffer = program.buffers.get(o.buffer as usize);
        let cols = buffer.map_or(0, |b| b.cols);
        let end = o.col.saturating_add(o.cols);
        if end > cols {
            return Err(ProgramError::Operand {
                step: i,
                op: step.op.to_string(),
                buffer: buffer.map_or_else(|| o.buffer.to_string(), |b| b.name.to_string()),
                start: o.col,
                end,
                cols,
            });
        }
    }
    Ok(())
}

/// What is read from outside must have been written whole.
fn check_written(program: &Program, writes: &[Vec<Rect>]) -> Result<(), ProgramError> {
    for (buffer, rects) in program.buffers.iter().zip(writes) {
        let whole = Rect { step: program.steps.len(), rows: Span::ALL, cols: (0, buffer.cols) };
        if buffer.output && !buffer.input && !covered(whole, rects) {
            return Err(ProgramError::Unwritten {
                step: program.steps.len(),
                op: "output".into(),
                buffer: buffer.name.to_string(),
                rows: rows_of(Span::ALL),
            });
        }
    }
    Ok(())
}

fn check_caches(program: &Program, order: &Order) -> Result<(), ProgramError> {
    for (second, b) in program.steps.iter().enumerate() {
        for (first, a) in program.steps[..second].iter().enumerate() {
            if a.layer != b.layer || order.before(first, second) {
                continue;
            }
            let shared = a.caches.iter().find(|f| b.caches.contains(f));
            if let Some(family) = shared
                && overlap(rows_of(a.seqs), rows_of(b.seqs))
            {
                return Err(ProgramError::CacheRace {
                    first,
                    second,
                    op: b.op.to_string(),
                    family: family.to_string(),
                    layer: b.layer,
                });
            }
        }
    }
    Ok(())
}

/// Steps that write caches have no output buffer to show a missing or doubled row: count their rows.
fn check_coverage(program: &Program) -> Result<(), ProgramError> {
    let mut seen: Vec<(&str, u32, u32)> = Vec::new();
    for step in program.steps.iter().filter(|s| !s.caches.is_empty()) {
        let key = (step.op.as_str(), step.layer, step.site);
        if seen.contains(&key) {
            continue;
        }
        seen.push(key);
        let spans: Vec<(u32, u32)> = program
            .steps
            .iter()
            .filter(|s| (s.op.as_str(), s.layer, s.site) == key)
            .map(|s| rows_of(if step.reach == Reach::Sequence { s.seqs } else { s.rows }))
            .collect();
        let mut cuts: Vec<u32> = spans.iter().flat_map(|s| [s.0, s.1]).chain([0, u32::MAX]).collect();
        cuts.sort_unstable();
        cuts.dedup();
        for pair in cuts.windows(2) {
            let times = spans.iter().filter(|s| s.0 <= pair[0] && pair[0] < s.1).count();
            if times != 1 {
                return Err(ProgramError::Coverage {
                    op: step.op.to_string(),
                    layer: step.layer,
                    rows: (pair[0], pair[1]),
                    times,
                });
            }
        }
    }
    Ok(())
}

fn check_collectives(program: &Program, order: &Order) -> Result<(), ProgramError> {
    let all: Vec<usize> = program
        .steps
        .iter()
        .enumerate()
        .filter(|(_, s)| s.reach == Reach::Exchange || ops::is_collective(&s.op))
        .map(|(i, _)| i)
        .collect();
    for pair in all.windows(2) {
        if !order.before(pair[0], pair[1]) {
            return Err(ProgramError::CollectiveOrder { first: pair[0], second: pair[1] });
        }
    }
    Ok(())
}

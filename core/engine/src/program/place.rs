//! Where buffers lie in the arena: buffers whose uses are ordered share memory.
//!
//! Steps that a fusion runs together count as one: it may read any of their inputs after it has written any of their outputs.

use std::ops::Range;

use plugfold_abi::{Base, Program};

use super::ProgramError;
use super::order::Order;

/// Buffers start on multiples of this, in bytes.
const ALIGN: usize = 64;

/// Offsets of all buffers of one program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Byte offset of each buffer.
    pub offsets: Vec<usize>,
    /// Bytes of each buffer.
    pub sizes: Vec<usize>,
    /// Bytes that the arena needs.
    pub total: usize,
}

fn bytes(program: &Program, buffer: usize) -> usize {
    let b = &program.buffers[buffer];
    let unit = match b.extent.base {
        Base::Rows => program.shape.rows,
        Base::OutRows => program.shape.out_rows,
        Base::One => 1,
    };
    let rows = unit as usize * b.extent.times as usize;
    (rows * b.cols as usize * b.dtype.size()).next_multiple_of(ALIGN)
}

/// Steps that touch each buffer; of steps that run together, the first and the last.
fn uses(program: &Program, together: &[Range<usize>]) -> Vec<Vec<usize>> {
    let mut uses = vec![Vec::new(); program.buffers.len()];
    for (i, step) in program.steps.iter().enumerate() {
        let unit = together.iter().find(|unit| unit.contains(&i));
        let (first, last) = unit.map_or((i, i), |unit| (unit.start, unit.end - 1));
        for o in step.inputs.iter().chain(&step.outputs) {
            let uses = &mut uses[o.buffer as usize];
            uses.push(first);
            if last > first {
                uses.push(last);
            }
        }
    }
    uses
}

/// Whether every use of `a` is certainly over before the first use of `b` starts, or the other way round.
fn apart(order: &Order, a: &[usize], b: &[usize]) -> bool {
    let all_before = |x: &[usize], y: &[usize]| x.iter().all(|&i| y.iter().all(|&j| order.before(i, j)));
    all_before(a, b) || all_before(b, a)
}

/// Places the buffers, first fit in order of first use. `together`: steps that fusions run in one go.
///
/// # Errors
/// When the program's waits are wrong (see [`super::check`]).
pub fn place(program: &Program, together: &[Range<usize>]) -> Result<Placement, ProgramError> {
    let order = Order::of(program)?;
    let uses = uses(program, together);
    let sizes: Vec<usize> = (0..program.buffers.len()).map(|b| bytes(program, b)).collect();
    let pinned = |b: usize| program.buffers[b].output || program.buffers[b].input;
    let mut offsets = vec![0; sizes.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut queue: Vec<usize> = (0..sizes.len()).collect();
    queue.sort_by_key(|&b| uses[b].first().copied().unwrap_or(0));
    for b in queue {
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(|&&p| pinned(b) || pinned(p) || !apart(&order, &uses[p], &uses[b]))
            .map(|&p| (offsets[p], offsets[p] + sizes[p]))
            .collect();
        taken.sort_unstable();
        let mut at = 0;
        for (start, end) in taken {
            if at + sizes[b] <= start {
                break;
            }
            at = at.max(end);
        }
        offsets[b] = at;
        placed.push(b);
    }
    let total = offsets.iter().zip(&sizes).map(|(o, s)| o + s).max().unwrap_or(0);
    Ok(Placement { offsets, sizes, total })
}

/// Checks that no two buffers share memory while both are in use.
///
/// # Errors
/// The first such pair.
pub fn check_placement(
    program: &Program,
    placement: &Placement,
    together: &[Range<usize>],
) -> Result<(), ProgramError> {
    let order = Order::of(program)?;
    let uses = uses(program, together);
    for b in 0..program.buffers.len() {
        for a in 0..b {
            let (sa, sb) = (placement.offsets[a], placement.offsets[b]);
            let meet = sa < sb + placement.sizes[b] && sb < sa + placement.sizes[a];
            let kept = [a, b].iter().any(|&x| program.buffers[x].output || program.buffers[x].input);
            if meet && (kept || !apart(&order, &uses[a], &uses[b])) {
                return Err(ProgramError::Overlap {
                    first: program.buffers[a].name.to_string(),
                    second: program.buffers[b].name.to_string(),
                });
            }
        }
    }
    Ok(())
}

//! The pass: steps of a prefill that work row by row run in two pieces.

use plugfold_abi::{
    Base, List, Maybe, OpError, Operand, Pass, PassContext, Phase, Program, Reach, Span, Step, TextBuf,
};

/// Rows of the first piece.
const CUT: u32 = 5;

/// The pass.
pub struct Pieces;

impl Pass for Pieces {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("pieces".into())
    }

    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        if program.shape.phase != Phase::Prefill {
            return Ok(());
        }
        let chosen = |o: &Operand| {
            let buffer = program.buffers.get(o.buffer as usize);
            buffer.is_some_and(|b| b.extent.base == Base::OutRows)
        };
        let mut steps = List::new();
        for step in &program.steps {
            if step.reach != Reach::Row || step.inputs.iter().chain(&step.outputs).any(chosen) {
                steps.push(step.clone());
                continue;
            }
            let first = Span { start: 0, end: CUT };
            let rest = Span { start: CUT, end: u32::MAX };
            steps.push(Step { rows: first, signal: Maybe::RNone, ..step.clone() });
            steps.push(Step { rows: rest, waits: List::new(), ..step.clone() });
        }
        program.steps = steps;
        Ok(())
    }
}

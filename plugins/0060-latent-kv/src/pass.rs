//! The program: what is written needs no matrix any more; attention stands between the two products with it.

use plugfold_abi::{
    Base, Buffer, BufferId, DType, Extent, List, MAX_PARAMS, Maybe, OpError, Operand, Pass, PassContext,
    Program, Reach, Step, TextBuf,
};

use crate::{ABSORB, EXPAND, FAMILY, KV_B};

/// Programs that read the families of the model and of the MTP layer.
const KINDS: [&str; 2] = ["forward", "mtp"];

/// The pass.
pub struct Around;

fn buffer(program: &mut Program, name: &str, step: &Step, cols: u32) -> Operand {
    let id = program.buffers.len();
    program.buffers.push(Buffer {
        // The number keeps the parts of a step that another pass has cut apart.
        name: format!("mla.{name}.{}.{}.{id}", step.layer, step.site).into(),
        extent: Extent { base: Base::Rows, times: 1 },
        cols,
        dtype: DType::F32,
        input: false,
        output: false,
    });
    Operand { buffer: id as BufferId, col: 0, cols }
}

/// A product with the matrix, on the rows and the stream of attention.
fn product(op: &str, of: &Step, input: Operand, output: Operand) -> Step {
    Step {
        op: op.into(),
        inputs: vec![input].into(),
        outputs: vec![output].into(),
        weights: vec![KV_B.into()].into(),
        caches: List::new(),
        params: [0.0; MAX_PARAMS],
        reach: Reach::Row,
        waits: List::new(),
        signal: Maybe::RNone,
        ..of.clone()
    }
}

/// A step of attention as three.
fn around(program: &mut Program, step: Step) -> Result<[Step; 3], OpError> {
    let (Some(q), Some(y)) = (step.inputs.first().copied(), step.outputs.first().copied()) else {
        return Err(OpError::new(format!("{} of layer {} has no query or no output", step.op, step.layer)));
    };
    let wide = step.dims[0].checked_mul(step.dims[3]).filter(|n| *n > 0).ok_or_else(|| {
        let (heads, rank) = (step.dims[0], step.dims[3]);
        OpError::new(format!("{} of layer {} has {heads} heads and latents of {rank}", step.op, step.layer))
    })?;
    let absorbed = buffer(program, "absorbed", &step, wide);
    let sums = buffer(program, "sums", &step, wide);
    let mut absorb = product(ABSORB, &step, q, absorbed);
    let mut expand = product(EXPAND, &step, sums, y);
    let mut attend = step;
    absorb.waits = std::mem::take(&mut attend.waits);
    expand.signal = std::mem::replace(&mut attend.signal, Maybe::RNone);
    attend.inputs[0] = absorbed;
    attend.outputs[0] = sums;
    Ok([absorb, attend, expand])
}

impl Pass for Around {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("latent".into())
    }

    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        if !KINDS.contains(&program.shape.kind.as_str()) {
            return Ok(());
        }
        let mut steps = List::new();
        for mut step in std::mem::take(&mut program.steps) {
            let ours = step.caches.first().is_some_and(|f| f.as_str() == FAMILY);
            match step.op.as_str() {
                "mla.write" if ours => {
                    step.weights.clear();
                    steps.push(step);
                }
                "mla.dense" | "mla.sparse" if ours => steps.extend(around(program, step)?),
                _ => steps.push(step),
            }
        }
        program.steps = steps;
        Ok(())
    }
}

//! The operation that takes away what a row may not say, and the pass that puts it before the candidates.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use plugfold_abi::{
    Base, BelowObject, Bits, Buffer, BufferId, Call, Claim, DType, Extent, Granted, List, MAX_DIMS,
    MAX_PARAMS, Maybe, OpError, Operand, Pass, PassContext, Plan, Program, Provider, Query, Reach, Step,
    TextBuf,
};

/// The operation.
pub const OP: &str = "logits.mask";
/// The word of a shape in which it stands.
pub const WORD: &str = "masked";
/// What it stands before.
const BEFORE: &str = "sample.candidates";

/// The pass.
pub struct Insert;

impl Pass for Insert {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("mask".into())
    }

    fn rewrite(&self, program: &mut Program, _: &PassContext<'_>) -> Result<(), OpError> {
        if !program.shape.words.iter().any(|word| word.name.as_str() == WORD && word.value != 0) {
            return Ok(());
        }
        let Some(at) = program.steps.iter().position(|step| step.op.as_str() == BEFORE) else {
            return Ok(());
        };
        let Some(logits) = program.steps[at].inputs.first().copied() else {
            return Err(OpError::new(format!("{BEFORE} reads no logits")));
        };
        program.buffers.push(Buffer {
            name: WORD.into(),
            extent: Extent { base: Base::OutRows, times: 1 },
            cols: logits.cols,
            dtype: DType::F32,
            input: false,
            output: false,
        });
        let masked = Operand { buffer: (program.buffers.len() - 1) as BufferId, col: 0, cols: logits.cols };
        let before = program.steps[at].clone();
        let mut dims = [0; MAX_DIMS];
        // Columns, and the token of the first.
        (dims[0], dims[1]) = (before.dims[0], before.dims[2]);
        let step = Step {
            op: OP.into(),
            inputs: List::from(vec![logits]),
            outputs: List::from(vec![masked]),
            weights: List::new(),
            caches: List::new(),
            dims,
            params: [0.0; MAX_PARAMS],
            reach: Reach::Row,
            signal: Maybe::RNone,
            ..before
        };
        program.steps[at].inputs[0] = masked;
        program.steps[at].waits = List::new();
        program.steps.insert(at, step);
        Ok(())
    }
}

/// Runs the operation.
pub struct Apply {
    /// Number of the field with the addresses of the masks.
    pub field: Arc<AtomicU32>,
}

impl Provider for Apply {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(OP.into())
    }

    fn claim(&self, _: &Query<'_>) -> Result<Claim, OpError> {
        Ok(Claim::Yes(Granted::plain(Bits::own("logits-mask"))))
    }

    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        let (columns, first) = (call.dims[0] as usize, call.dims[1] as usize);
        let Some(field) = call.round.fields.get(self.field.load(Ordering::Relaxed) as usize) else {
            return Err(OpError::new("the field of masks is not in the round table"));
        };
        let (from, to) = (call.inputs[0], call.outputs[0]);
        for (i, row) in call.round.out_rows.iter().enumerate() {
            #[allow(clippy::cast_ptr_alignment)] // buffers and fields lie on multiples of 64 bytes
            // SAFETY: views of a call have a row of `columns` numbers for each row that wants logits, and its output is its
            // own. The field has two words for each row of the table: the address of a mask of the whole vocabulary, which
            // its request keeps until the forward is over.
            let (from, to, mask) = unsafe {
                let entry = field.ptr.cast::<u32>().add(*row as usize * field.stride as usize);
                let address = u64::from(*entry) | u64::from(*entry.add(1)) << 32;
                let from = from.ptr.cast::<f32>().add(i * from.stride as usize);
                let to = to.ptr.cast::<f32>().add(i * to.stride as usize);
                let mask = address as *const u32;
                let mask = (!mask.is_null())
                    .then(|| std::slice::from_raw_parts(mask, (first + columns).div_ceil(32)));
                (std::slice::from_raw_parts(from, columns), std::slice::from_raw_parts_mut(to, columns), mask)
            };
            match mask {
                None => to.copy_from_slice(from),
                Some(mask) => apply(mask, first, from, to),
            }
        }
        Ok(())
    }
}

/// Logits of the tokens from `first` on, with -inf at those that the mask does not have.
pub fn apply(mask: &[u32], first: usize, from: &[f32], to: &mut [f32]) {
    let mut column = 0;
    // A word of the mask at a time: most of them have none or all of their tokens.
    while column < from.len() {
        let (word, bit) = ((first + column) / 32, (first + column) % 32);
        let end = from.len().min(column + 32 - bit);
        let (from, to) = (&from[column..end], &mut to[column..end]);
        match mask[word] {
            u32::MAX => to.copy_from_slice(from),
            bits => {
                to.fill(f32::NEG_INFINITY);
                let mut open = bits >> bit;
                while open != 0 {
                    let at = open.trailing_zeros() as usize;
                    let Some(to) = to.get_mut(at) else { break };
                    *to = from[at];
                    open &= open - 1;
                }
            }
        }
        column = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_logit_is_kept_or_taken_away_as_its_bit_says() {
        let mut seed = 7_u32;
        let mut next = move || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            seed ^ seed >> 15
        };
        for turn in 0..200 {
            // Words with none, all, few and many of their tokens.
            let mask: Vec<u32> =
                (0..6).map(|_| [0, u32::MAX, next() & next(), next()][next() as usize % 4]).collect();
            let (first, columns) = (turn % 70, turn % 119);
            let from: Vec<f32> = (0..columns).map(|_| next() as f32).collect();
            let mut to = vec![f32::NAN; columns];
            apply(&mask, first, &from, &mut to);
            for (column, (to, from)) in to.iter().zip(&from).enumerate() {
                let token = first + column;
                let open = mask[token / 32] >> (token % 32) & 1 == 1;
                assert_eq!(
                    *to,
                    if open { *from } else { f32::NEG_INFINITY },
                    "token {token} of {first} + {columns}"
                );
            }
        }
    }
}

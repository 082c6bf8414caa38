//! Dense product with an EXL3 layer.

use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::hadamard::{BLOCK, hadamard_block};
use super::lanes::Path;
use super::layer::Layer;
use super::products::multiply_blocks;
use super::rotate::{Activations, Rotated};

/// How a product is computed. The default is what the engine runs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Precision of rotated activations.
    pub activations: Activations,
    /// Instruction set; no effect on the result.
    pub path: Path,
}

/// Blocks of 128 columns that one task takes at most: 512 columns at 4 bits are a page of trellis words a row of
/// tiles, long enough for the hardware to read ahead.
const TASK_BLOCKS: usize = 4;

impl Layer {
    /// `y = x W + bias`: `x` is `(rows, in)`, `y` is `(rows, out)`, both row-major.
    ///
    /// `in` may be smaller than [`Layer::k`] (the rest of a padded matrix meets zeros), `out` smaller than
    /// [`Layer::n`] (padding columns are cut off). Activations are rotated as `H(x ∘ suh)` in single precision,
    /// rounded as `options` say, and products are summed in single precision. The bits of a row depend neither on
    /// other rows nor on threads nor on the instruction set. Work is spread over the current rayon pool.
    ///
    /// # Panics
    /// If the lengths of `x` or `y` are no multiple of `rows`, or their widths exceed the layer's.
    pub fn matmul(&self, x: &[f32], rows: usize, y: &mut [f32], options: Options) {
        if rows == 0 {
            return;
        }
        assert!(x.len().is_multiple_of(rows) && x.len() / rows <= self.k(), "x must be (rows, at most k)");
        assert!(y.len().is_multiple_of(rows) && y.len() / rows <= self.n(), "y must be (rows, at most n)");
        let (width, out) = (x.len() / rows, y.len() / rows);
        if out == 0 {
            return;
        }
        let x_rows: Vec<&[f32]> = (0..rows).map(|r| &x[r * width..(r + 1) * width]).collect();
        let rotated = Rotated::new(x_rows.into_iter(), self.suh(), options.activations, options.path);
        let blocks = out.div_ceil(BLOCK);
        let per_task = (blocks / (2 * rayon::current_num_threads())).clamp(1, TASK_BLOCKS);
        let parts: Vec<Vec<f32>> = (0..blocks.div_ceil(per_task))
            .into_par_iter()
            .map(|task| {
                let first = task * per_task;
                let count = per_task.min(blocks - first);
                let mut part = vec![0.0; rows * count * BLOCK];
                multiply_blocks(self, &rotated, first, count, options.path, |row, block, columns| {
                    self.finish_block(block, columns);
                    part[(row * count + block - first) * BLOCK..][..BLOCK].copy_from_slice(columns);
                });
                part
            })
            .collect();
        for (task, part) in parts.iter().enumerate() {
            let column = task * per_task * BLOCK;
            for (part, y) in part.chunks_exact(part.len() / rows).zip(y.chunks_exact_mut(out)) {
                let count = part.len().min(out - column);
                y[column..column + count].copy_from_slice(&part[..count]);
            }
        }
    }

    /// Brings the products with a block of columns back to the original basis: `H(columns) ∘ svh + bias`.
    pub(super) fn finish_block(&self, block: usize, columns: &mut [f32; BLOCK]) {
        hadamard_block(columns);
        let mut scales = [0.0; BLOCK];
        self.svh()[block * BLOCK..][..BLOCK].convert_to_f32_slice(&mut scales);
        for (y, scale) in columns.iter_mut().zip(&scales) {
            *y *= scale;
        }
        if let Some(bias) = self.bias() {
            for (y, bias) in columns.iter_mut().zip(&bias[block * BLOCK..]) {
                *y += bias;
            }
        }
    }
}

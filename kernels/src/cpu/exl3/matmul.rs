//! Products with EXL3 layers: how their work is spread over threads.

use half::slice::HalfFloatSliceExt;

use super::hadamard::{BLOCK, hadamard_block};
use super::lanes::Path;
use super::layer::Layer;
use super::products::multiply_blocks;
use super::rotate::{Activations, Rotated};
use super::view::LayerView;
use crate::cpu::par;

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
        let rotated = Rotated::new(x_rows.into_iter(), 0, self.suh(), options.activations, options.path);
        let job = Job { layer: self.view(), rotated: &rotated, skip: 0, outputs: out };
        run(&[job], options.path, |_, row, column, values| {
            y[row * out + column..][..values.len()].copy_from_slice(values);
        });
    }
}

/// The product of rotated rows with some columns of a layer.
pub(super) struct Job<'a> {
    pub layer: LayerView<'a>,
    pub rotated: &'a Rotated,
    /// First column.
    pub skip: usize,
    /// Columns.
    pub outputs: usize,
}

impl Job<'_> {
    /// The blocks that hold the columns.
    fn blocks(&self) -> std::ops::Range<usize> {
        self.skip / BLOCK..(self.skip + self.outputs).div_ceil(BLOCK)
    }

    fn work(&self) -> usize {
        self.rotated.rows() * self.layer.k() * self.blocks().len() * BLOCK
    }
}

/// Some blocks of a job.
struct Task {
    job: usize,
    first: usize,
    count: usize,
    /// `(rows, count, 128)`.
    result: Vec<f32>,
}

/// Runs all jobs together. `write(job, row, column, values)` gets the results in pieces, `column` counted from the job's
/// first.
pub(super) fn run(jobs: &[Job<'_>], path: Path, mut write: impl FnMut(usize, usize, usize, &[f32])) {
    let blocks: usize = jobs.iter().map(|job| job.blocks().len()).sum();
    let work = jobs.iter().map(Job::work).sum();
    let per_task = (blocks / (2 * par::threads())).clamp(1, TASK_BLOCKS);
    let mut tasks = Vec::new();
    for (job, blocks) in jobs.iter().map(Job::blocks).enumerate() {
        let end = blocks.end;
        for first in blocks.step_by(per_task) {
            tasks.push(Task { job, first, count: per_task.min(end - first), result: Vec::new() });
        }
    }
    par::each(tasks.iter_mut(), work, |_, task: &mut Task| {
        let Job { layer, rotated, .. } = jobs[task.job];
        let mut result = vec![0.0; rotated.rows() * task.count * BLOCK];
        multiply_blocks(layer, rotated, task.first, task.count, path, |row, block, columns| {
            layer.finish_block(block, columns);
            result[(row * task.count + block - task.first) * BLOCK..][..BLOCK].copy_from_slice(columns);
        });
        task.result = result;
    });
    for task in &tasks {
        let Job { skip, outputs, .. } = jobs[task.job];
        let first = task.first * BLOCK;
        let columns = first.max(skip)..(first + task.count * BLOCK).min(skip + outputs);
        for (row, values) in task.result.chunks_exact(task.count * BLOCK).enumerate() {
            let values = &values[columns.start - first..columns.end - first];
            write(task.job, row, columns.start - skip, values);
        }
    }
}

impl LayerView<'_> {
    /// Brings the products with a block of columns back to the original basis: `H(columns) ∘ svh + bias`.
    fn finish_block(&self, block: usize, columns: &mut [f32; BLOCK]) {
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

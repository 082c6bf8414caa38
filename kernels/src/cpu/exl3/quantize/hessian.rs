//! Second moments of a layer's inputs: the metric of calibrated quantization.

use half::f16;
use rayon::prelude::*;

use super::cholesky::{PANEL, dot, factor};
use crate::cpu::exl3::hadamard::BLOCK;

/// Part of the mean diagonal that is added to every input's own moment.
const DAMPING: f64 = 0.025;

/// `XᵀX` over the calibration rows that reached a layer.
#[derive(Clone, Debug)]
pub struct Hessian {
    inputs: usize,
    rows: usize,
    /// `(inputs, inputs)`, lower triangle.
    sums: Vec<f64>,
}

impl Hessian {
    /// No rows yet.
    pub fn new(inputs: usize) -> Self {
        Self { inputs, rows: 0, sums: vec![0.0; inputs * inputs] }
    }

    /// Input channels.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Rows seen.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Adds the rows of `x`, `(rows, inputs)` row-major.
    ///
    /// # Panics
    /// If the length of `x` is no multiple of the number of inputs.
    pub fn add(&mut self, x: &[f32]) {
        assert!(x.len().is_multiple_of(self.inputs), "calibration rows have {} inputs", self.inputs);
        self.rows += x.len() / self.inputs;
        self.sums.par_chunks_exact_mut(self.inputs).enumerate().for_each(|(i, sums)| {
            for x in x.chunks_exact(self.inputs) {
                let own = f64::from(x[i]);
                for (sum, &other) in sums[..=i].iter_mut().zip(x) {
                    *sum += own * f64::from(other);
                }
            }
        });
    }

    /// The damped mean, scaled by `su` and transformed on both sides: the metric of errors of the stored tiles.
    ///
    /// Channels beyond the inputs are padding and get the damping alone.
    pub(super) fn rotated(&self, su: &[f16]) -> Metric {
        let k = su.len();
        let rows = self.rows.max(1) as f64;
        let trace: f64 = (0..self.inputs).map(|i| self.sums[i * self.inputs + i] / rows).sum();
        // Without any input there is no preference among errors.
        let damping = if trace > 0.0 { DAMPING * trace / self.inputs as f64 } else { 1.0 };
        let norm = (su.iter().map(|s| s.to_f64().powi(2)).sum::<f64>() / k as f64).sqrt();
        let scale: Vec<f64> = su.iter().map(|s| if norm > 0.0 { s.to_f64() / norm } else { 1.0 }).collect();
        let mut metric = vec![0.0; k * k];
        metric.par_chunks_exact_mut(k).enumerate().for_each(|(i, row)| {
            if i < self.inputs {
                for (j, value) in row.iter_mut().enumerate().take(self.inputs) {
                    *value = self.sums[i.max(j) * self.inputs + i.min(j)] / rows * scale[i] * scale[j];
                }
            }
            row[i] += damping * scale[i].powi(2).max(1e-4);
            transform(row);
        });
        // Symmetric: transforming the rows of the transpose is transforming the columns.
        let mut metric = transpose(&metric, k);
        metric.par_chunks_exact_mut(k).for_each(transform);
        Metric { k, values: metric }
    }
}

/// A symmetric positive definite matrix over the rotated input channels.
pub(super) struct Metric {
    k: usize,
    values: Vec<f64>,
}

impl Metric {
    /// The feedback matrix `L` of the block factorization `L D Lᵀ` with blocks of 16, `L` having unit blocks on its
    /// diagonal; `(k, k)` row-major, only what lies below the diagonal blocks is meant.
    pub fn feedback(&self) -> Vec<f32> {
        let k = self.k;
        let mut factored = self.values.clone();
        let mut boost = 0.0;
        while !factor(&mut factored, k) {
            // Rounding made it indefinite. More damping only weakens the feedback.
            let mean = (0..k).map(|i| self.values[i * k + i]).sum::<f64>() / k as f64;
            boost = if boost == 0.0 { 1e-6 * mean.max(f64::MIN_POSITIVE) } else { boost * 10.0 };
            factored.copy_from_slice(&self.values);
            for i in 0..k {
                factored[i * k + i] += boost;
            }
        }
        // L = C · diag(C_ii)^-1 for the Cholesky factor C: solve with each diagonal block from the right.
        let mut feedback = vec![0.0_f32; k * k];
        let factored = &factored;
        feedback.par_chunks_exact_mut(k).enumerate().for_each(|(r, out)| {
            for first in (0..r / PANEL * PANEL).step_by(PANEL) {
                let mut solved = [0.0; PANEL];
                for c in (0..PANEL).rev() {
                    let mut value = factored[r * k + first + c];
                    for later in c + 1..PANEL {
                        value -= solved[later] * factored[(first + later) * k + first + c];
                    }
                    solved[c] = value / factored[(first + c) * k + first + c];
                    out[first + c] = solved[c] as f32;
                }
            }
        });
        feedback
    }

    /// `tr(EᵀME) / tr(WᵀMW)` for `W` = `targets`, `E` = `decoded` − `targets`, both `(k, n)` row-major.
    pub fn relative_error(&self, targets: &[f32], decoded: &[f32], n: usize) -> f64 {
        let k = self.k;
        let (error, norm) = (0..n)
            .into_par_iter()
            .map(|j| {
                let w: Vec<f64> = (0..k).map(|i| f64::from(targets[i * n + j])).collect();
                let e: Vec<f64> = (0..k).map(|i| f64::from(decoded[i * n + j]) - w[i]).collect();
                let form =
                    |v: &[f64]| -> f64 { (0..k).map(|i| v[i] * dot(&self.values[i * k..][..k], v)).sum() };
                (form(&e), form(&w))
            })
            .collect::<Vec<_>>()
            .into_iter()
            .fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1));
        if norm > 0.0 { error / norm } else { 0.0 }
    }
}

fn transpose(a: &[f64], k: usize) -> Vec<f64> {
    let mut out = vec![0.0; k * k];
    out.par_chunks_exact_mut(k).enumerate().for_each(|(i, row)| {
        for (j, value) in row.iter_mut().enumerate() {
            *value = a[j * k + i];
        }
    });
    out
}

fn transform(row: &mut [f64]) {
    for block in row.as_chunks_mut::<BLOCK>().0 {
        let mut stride = 1;
        while stride < BLOCK {
            for pair in block.chunks_exact_mut(2 * stride) {
                let (low, high) = pair.split_at_mut(stride);
                for (a, b) in low.iter_mut().zip(high) {
                    (*a, *b) = (*a + *b, *a - *b);
                }
            }
            stride *= 2;
        }
        for value in block {
            *value *= 1.0 / (BLOCK as f64).sqrt();
        }
    }
}

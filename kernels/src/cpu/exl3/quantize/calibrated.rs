//! Encoding with feedback: each row of tiles makes up for the errors of the rows done before.
//!
//! With the metric factored as `L D Lᵀ` in blocks of 16, the error of the outputs is that of independent blocks if
//! block `i` is encoded from `W_i + Σ_{j>i} L_jiᵀ (W_j − Ŵ_j)`, from the last block up.

use rayon::prelude::*;

use super::cholesky::PANEL;
use super::hessian::Metric;
use super::matrix::{Progress, row_of_tiles};
use super::viterbi::Tiles;
use crate::cpu::exl3::bits::place;
use crate::cpu::exl3::error::Error;
use crate::cpu::exl3::lanes::{Kernel, Path, dispatch};
use crate::cpu::exl3::rate::POSITIONS;

/// Columns whose errors one task sums up.
const STRIP: usize = 64;

/// Encodes `values`, `(k, n)` row-major, in the given metric; states of all tiles, row of tiles by row of tiles.
pub(super) fn encode_with_feedback(
    tiles: &dyn Tiles,
    values: &[f32],
    n: usize,
    metric: &Metric,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<Vec<[u16; POSITIONS]>, Error> {
    let codes = tiles.kind().0.table();
    let k = values.len() / n;
    let feedback = metric.feedback();
    let total = values.len() / POSITIONS;
    // Errors W − Ŵ, column strip by column strip: (n / STRIP, k, STRIP).
    let mut errors = vec![0.0_f32; values.len()];
    let mut states = vec![[0; POSITIONS]; total];
    for (done, first) in (0..k).step_by(PANEL).rev().enumerate() {
        let mut wanted = values[first * n..][..PANEL * n].to_vec();
        let sums: Vec<[[f32; STRIP]; PANEL]> = errors
            .par_chunks_exact(k * STRIP)
            .map(|errors| {
                let mut sums = [[0.0; STRIP]; PANEL];
                let below = first + PANEL;
                dispatch(
                    Path::Simd,
                    Feed {
                        k,
                        below,
                        first,
                        feedback: &feedback,
                        errors: &errors[below * STRIP..],
                        sums: &mut sums,
                    },
                );
                sums
            })
            .collect();
        for (strip, sums) in sums.iter().enumerate() {
            for (row, sums) in sums.iter().enumerate() {
                for (value, sum) in wanted[row * n + strip * STRIP..][..STRIP].iter_mut().zip(sums) {
                    *value += sum;
                }
            }
        }
        let row = tiles.encode(&row_of_tiles(&wanted, n))?;
        for (tile, states) in row.iter().enumerate() {
            for (position, &state) in states.iter().enumerate() {
                let (r, c) = place(position);
                let (row, column) = (first + r, 16 * tile + c);
                errors[(column / STRIP * k + row) * STRIP + column % STRIP] =
                    values[row * n + column] - codes[usize::from(state)];
            }
        }
        states[first / 16 * (n / 16)..][..n / 16].copy_from_slice(&row);
        progress(Progress { done: (done + 1) * (n / 16), total });
    }
    Ok(states)
}

/// `sums[a][c] = Σ_r L[r][first + a] · errors[r][c]` over the rows from `below` on.
struct Feed<'a> {
    k: usize,
    below: usize,
    first: usize,
    feedback: &'a [f32],
    errors: &'a [f32],
    sums: &'a mut [[f32; STRIP]; PANEL],
}

impl Kernel for Feed<'_> {
    fn run_scalar(self) {
        self.run();
    }

    #[inline(always)]
    fn run(self) {
        for (r, errors) in (self.below..self.k).zip(self.errors.as_chunks::<STRIP>().0) {
            let factors = &self.feedback[r * self.k + self.first..][..PANEL];
            for (sums, factor) in self.sums.iter_mut().zip(factors) {
                for (sum, error) in sums.iter_mut().zip(errors) {
                    *sum += factor * error;
                }
            }
        }
    }
}

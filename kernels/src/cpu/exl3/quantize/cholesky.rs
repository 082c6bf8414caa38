//! The factor of a positive definite matrix, in double precision.

use rayon::prelude::*;

use crate::cpu::exl3::lanes::{Kernel, Path, dispatch};

/// Columns factored together: the rows of a tile.
pub(super) const PANEL: usize = 16;
/// Sums that a dot product keeps apart, in a fixed order on every machine.
const SUMS: usize = 8;

/// Replaces the lower triangle of `a`, `(k, k)` row-major with `k` a multiple of 16, by its Cholesky factor.
///
/// Returns false if `a` is not positive definite.
pub(super) fn factor(a: &mut [f64], k: usize) -> bool {
    for first in (0..k).step_by(PANEL) {
        let (done, rest) = a.split_at_mut(first * k);
        let _ = done;
        let (panel, below) = rest.split_at_mut(PANEL * k);
        // Everything to the left is final: subtract its part, first inside the panel's own rows, then below.
        for i in 0..PANEL {
            for j in 0..=i {
                let s = dot(&panel[i * k..][..first], &panel[j * k..][..first]);
                panel[i * k + first + j] -= s;
            }
        }
        for j in 0..PANEL {
            for i in j..PANEL {
                let s: f64 = (0..j).map(|c| panel[i * k + first + c] * panel[j * k + first + c]).sum();
                panel[i * k + first + j] -= s;
            }
            let pivot = panel[j * k + first + j];
            if pivot.is_nan() || pivot <= 0.0 {
                return false;
            }
            let root = pivot.sqrt();
            panel[j * k + first + j] = root;
            for i in j + 1..PANEL {
                panel[i * k + first + j] /= root;
            }
        }
        let panel = &*panel;
        below.par_chunks_exact_mut(k).for_each(|row| {
            let (left, right) = row.split_at_mut(first);
            for j in 0..PANEL {
                let above = &panel[j * k..][..k];
                let mut s = dot(left, &above[..first]);
                for c in 0..j {
                    s += right[c] * above[first + c];
                }
                right[j] = (right[j] - s) / above[first + j];
            }
        });
    }
    true
}

/// A dot product whose order of summation does not depend on the machine.
pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sum = 0.0;
    dispatch(Path::Simd, Dot { a, b, sum: &mut sum });
    sum
}

struct Dot<'a> {
    a: &'a [f64],
    b: &'a [f64],
    sum: &'a mut f64,
}

impl Kernel for Dot<'_> {
    fn run_scalar(self) {
        self.run();
    }

    #[inline(always)]
    fn run(self) {
        let (a, a_rest) = self.a.as_chunks::<SUMS>();
        let (b, b_rest) = self.b.as_chunks::<SUMS>();
        let mut sums = [0.0; SUMS];
        for (a, b) in a.iter().zip(b) {
            for i in 0..SUMS {
                sums[i] += a[i] * b[i];
            }
        }
        let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
        *self.sum = sums.iter().sum::<f64>() + rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factor_times_its_transpose_gives_the_matrix() {
        let k = 48;
        let base: Vec<f64> = (0..k * k).map(|i| ((i * 7919 + 13) % 101) as f64 / 50.0 - 1.0).collect();
        let entry = |i: usize, j: usize| {
            dot(&base[i * k..][..k], &base[j * k..][..k]) + if i == j { 1.0 } else { 0.0 }
        };
        let mut a: Vec<f64> = (0..k * k).map(|at| entry(at / k, at % k)).collect();
        assert!(factor(&mut a, k));
        for i in 0..k {
            for j in 0..=i {
                let product: f64 = (0..=j).map(|c| a[i * k + c] * a[j * k + c]).sum();
                assert!((product - entry(i, j)).abs() < 1e-9, "({i}, {j})");
            }
        }
        let mut indefinite = vec![0.0; 16 * 16];
        indefinite[0] = -1.0;
        assert!(!factor(&mut indefinite, 16));
    }
}

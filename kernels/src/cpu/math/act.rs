//! SwiGLU with the clamp of the model.

use super::num::silu;
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::simd::kernel;

/// silu(min(gate, limit)) * clamp(up, -limit, limit): one-sided on the gate, clamped before the silu.
#[inline(always)]
fn swiglu_one(gate: f32, up: f32, limit: f32) -> f32 {
    let gate = if gate > limit { limit } else { gate };
    let up = if up > limit { limit } else { up };
    let up = if up < -limit { -limit } else { up };
    silu(gate) * up
}

kernel! {
    fn swiglu_rows[][](x: Rows<'a>, limit: f32, out: RowsMut<'a>) -> () {
        let mut out = out;
        for r in 0..x.rows() {
            let (row, out) = (x.row(r), out.row_mut(r));
            let (gate, up) = row.split_at(out.len());
            for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
                *o = swiglu_one(*g, *u, limit);
            }
        }
    }
}

/// `x [R, 2*I]` (gate, then up) to `out [R, I]`.
///
/// # Panics
/// When the shapes do not fit.
pub fn swiglu(x: Rows<'_>, limit: f32, out: RowsMut<'_>) {
    assert_eq!((x.rows(), x.cols()), (out.rows(), 2 * out.cols()), "swiglu: input and output");
    let work = x.rows() * x.cols() * 16;
    par::each(out.row_pieces(8), work, |i, out| swiglu_rows(x.range(i * 8, out.rows()), limit, out));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::testing::{bits, close, random};
    use crate::cpu::simd::both_paths;

    #[test]
    fn the_clamp_is_one_sided_on_the_gate() {
        let x: Vec<f32> = [5.0, -5.0, 1.0, -1.0, 0.5, 5.0, -5.0, 1.0].to_vec();
        let mut out = vec![0.0; 4];
        swiglu(Rows::new(&x, 8), 2.0, RowsMut::new(&mut out, 4));
        let silu = |v: f64| v / (1.0 + (-v).exp());
        let want = [silu(2.0) * 0.5, silu(-5.0) * 2.0, silu(1.0) * -2.0, silu(-1.0)];
        close(&out, &want, 1e-6, "swiglu");
    }

    #[test]
    fn rows_and_paths_agree() {
        let x: Vec<f32> = random(4, 64 * 2 * 37).iter().map(|v| v * 8.0).collect();
        let run = |x: &[f32]| {
            let mut out = vec![0.0; x.len() / 2];
            swiglu(Rows::new(x, 74), 3.0, RowsMut::new(&mut out, 37));
            bits(&out)
        };
        let (scalar, together) = both_paths(|| run(&x));
        assert_eq!(scalar, together);
        for r in 0..64 {
            assert_eq!(run(&x[r * 74..][..74]), together[r * 37..][..37]);
        }
    }
}

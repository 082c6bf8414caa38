//! The two ends of attention over latents: queries go into the space of the latents, outputs come back from it.
//!
//! Keys and values of a head are linear in a token's latent c: the key is Wk c, the value Wv c. So `q . (Wk c)` is
//! `(Wk^T q) . c`, and the weighted sum of values is Wv times the weighted sum of latents. The rows of Wk and Wv stay where
//! they are, in the panels of the one matrix `[heads * (key + value), rank]`; nothing is stored a second time.

use super::dense::{Element, Elements, PANEL, PackedMatrix, RowMap, multiply_here, widen};
use super::grouped::GroupedMatrix;
use super::mla::Shape;
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::simd::kernel;

/// Latent channels that are summed at a time.
const CHANNELS: usize = 4;

/// Channels `at .. at + C` of a query in the latents' space: each is sixteen chains over the panels in order (one a row of
/// a panel), which are then added pairwise.
#[inline(always)]
fn absorb_channels<W: Element, const C: usize>(
    q: &[[f32; PANEL]],
    w: &[[W; PANEL]],
    rank: usize,
    at: usize,
    out: &mut [f32],
) {
    let mut acc = [[0.0f32; PANEL]; C];
    let mut panel = 0;
    while panel < q.len() {
        let q = &q[panel];
        let w = &w[panel * rank + at..panel * rank + at + C];
        for c in 0..C {
            let wide = widen(&w[c]);
            for l in 0..PANEL {
                acc[c][l] = q[l].mul_add(wide[l], acc[c][l]);
            }
        }
        panel += 1;
    }
    for c in 0..C {
        let mut half = PANEL / 2;
        while half > 0 {
            for l in 0..half {
                acc[c][l] += acc[c][l + half];
            }
            half /= 2;
        }
        out[at + c] = acc[c][0];
    }
}

kernel! {
    /// Rows of one head: `q [rows][panels]` with the panels `w [panels][rank]` into `out [rows][rank]`.
    fn absorb_head[W: Element][W](
        q: &'a [[f32; PANEL]], w: &'a [[W; PANEL]], rank: usize, out: &'a mut [f32],
    ) -> () {
        let panels = w.len() / rank;
        let rows = out.len() / rank;
        let mut at = 0;
        while at < rank {
            // A few channels for all rows: their weights are then in the nearest cache.
            let wide = rank - at >= CHANNELS;
            for r in 0..rows {
                let (q, out) = (&q[r * panels..(r + 1) * panels], &mut out[r * rank..(r + 1) * rank]);
                if wide {
                    absorb_channels::<W, CHANNELS>(q, w, rank, at, out);
                } else {
                    absorb_channels::<W, 1>(q, w, rank, at, out);
                }
            }
            at += if wide { CHANNELS } else { 1 };
        }
    }
}

/// The panels that hold `rows` rows of a matrix from row `first` on: (first panel, panels, rows before the first).
fn covering(first: usize, rows: usize) -> (usize, usize, usize) {
    let panel = first / PANEL;
    (panel, (first + rows).div_ceil(PANEL) - panel, first % PANEL)
}

/// A matrix whose panels can be looked at, a few at a time.
pub trait Panels: Sync {
    /// Outputs and inputs.
    fn sizes(&self) -> (usize, usize);
    /// Shows panels `first .. first + count` as a matrix.
    fn show(&self, first: usize, count: usize, look: &mut dyn FnMut(PackedMatrix<'_>));
}

impl Panels for PackedMatrix<'_> {
    fn sizes(&self) -> (usize, usize) {
        (self.n(), self.k())
    }
    fn show(&self, first: usize, count: usize, look: &mut dyn FnMut(PackedMatrix<'_>)) {
        look(self.panels(first, count));
    }
}

/// Decoded where they are needed, a head's at a time.
impl Panels for GroupedMatrix<'_> {
    fn sizes(&self) -> (usize, usize) {
        (self.grid().n, self.grid().k)
    }
    fn show(&self, first: usize, count: usize, look: &mut dyn FnMut(PackedMatrix<'_>)) {
        let (n, k) = self.sizes();
        let outputs = (n - first * PANEL).min(count * PANEL);
        let decoded = self.decode(first, outputs.div_ceil(PANEL));
        // As many as the panels have: the sizes are those that were decoded.
        if let Ok(panels) = PackedMatrix::new(outputs, k, Elements::F32(&decoded)) {
            look(panels);
        }
    }
}

fn check(w: &impl Panels, shape: Shape, rows: (usize, usize), cols: [(usize, usize); 2]) {
    assert_eq!(w.sizes().0, shape.row_len(), "latents: rows of the matrix");
    assert_eq!(rows.0, rows.1, "latents: rows in and out");
    assert!(cols.iter().all(|(got, want)| got == want), "latents: widths {cols:?}");
}

/// `q [R, heads*key]` into the latents' space, `out [R, heads*rank]`: per head the key rows of `w`, transposed, times q.
///
/// # Panics
/// When the shapes do not fit.
#[allow(clippy::needless_pass_by_value)] // panels are views
pub fn absorb(q: Rows<'_>, w: impl Panels, shape: Shape, out: RowsMut<'_>) {
    let (rows, rank) = (q.rows(), w.sizes().1);
    let cols = [(q.cols(), shape.heads * shape.key), (out.cols(), shape.heads * rank)];
    check(&w, shape, (rows, out.rows()), cols);
    if rows == 0 || rank == 0 {
        return;
    }
    par::each(out.column_pieces(rank), rows * shape.heads * shape.key * rank, |head, mut out| {
        let (panel, panels, before) = covering(head * (shape.key + shape.value), shape.key);
        // Rows of other heads and of values in these panels meet zeros.
        let mut padded = vec![[0.0f32; PANEL]; rows * panels];
        for (r, to) in padded.chunks_exact_mut(panels).enumerate() {
            let q = &q.row(r)[head * shape.key..(head + 1) * shape.key];
            to.as_flattened_mut()[before..before + shape.key].copy_from_slice(q);
        }
        let mut made = vec![0.0f32; rows * rank];
        w.show(panel, panels, &mut |w| match w.data() {
            Elements::Bf16(data) => absorb_head(&padded, data.as_chunks().0, rank, &mut made),
            Elements::F32(data) => absorb_head(&padded, data.as_chunks().0, rank, &mut made),
        });
        for (r, made) in made.chunks_exact(rank).enumerate() {
            out.row_mut(r).copy_from_slice(made);
        }
    });
}

/// `u [R, heads*rank]`, sums of latents, to `out [R, heads*value]`: per head the value rows of `w` times u, with the
/// arithmetic of every product with panels (see [`super::dense`]).
///
/// # Panics
/// When the shapes do not fit.
#[allow(clippy::needless_pass_by_value)] // panels are views
pub fn expand(u: Rows<'_>, w: impl Panels, shape: Shape, out: RowsMut<'_>) {
    let (rows, rank) = (u.rows(), w.sizes().1);
    let cols = [(u.cols(), shape.heads * rank), (out.cols(), shape.heads * shape.value)];
    check(&w, shape, (rows, out.rows()), cols);
    if rows == 0 || shape.value == 0 {
        return;
    }
    par::each(out.column_pieces(shape.value), rows * shape.heads * shape.value * rank, |head, mut out| {
        let first = head * (shape.key + shape.value) + shape.key;
        let (panel, panels, before) = covering(first, shape.value);
        w.show(panel, panels, &mut |w| {
            let mut made = vec![0.0f32; rows * w.n()];
            let view = &mut RowsMut::new(&mut made, w.n());
            multiply_here(u.columns(head * rank, rank), w, RowMap::All, view);
            for (r, made) in made.chunks_exact(w.n()).enumerate() {
                out.row_mut(r).copy_from_slice(&made[before..before + shape.value]);
            }
        });
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::dense::{pack_bf16, pack_f32};
    use crate::cpu::math::mla::{Keys, attention, latent_attention};
    use crate::cpu::math::testing::{bits, close, random};
    use crate::cpu::simd::both_paths;
    use half::bf16;

    /// Shapes whose heads begin on panels and shapes whose heads do not.
    const SHAPES: [(Shape, usize); 3] = [
        (Shape { heads: 2, key: 32, value: 32 }, 64),
        (Shape { heads: 3, key: 20, value: 12 }, 28),
        (Shape { heads: 1, key: 5, value: 7 }, 3),
    ];

    /// Absorbed attention: everything between query and output rows.
    fn latent(
        q: &[f32],
        w: &[f32],
        latents: &[f32],
        shape: Shape,
        rank: usize,
        keys: &[Keys<'_>],
    ) -> Vec<f32> {
        let packed = pack_f32(w, shape.row_len(), rank);
        let w = PackedMatrix::new(shape.row_len(), rank, Elements::F32(&packed)).unwrap();
        let rows = q.len() / (shape.heads * shape.key);
        let (mut a, mut u) =
            (vec![f32::NAN; rows * shape.heads * rank], vec![f32::NAN; rows * shape.heads * rank]);
        let wide = shape.heads * rank;
        absorb(Rows::new(q, shape.heads * shape.key), w, shape, RowsMut::new(&mut a, wide));
        let (q, out) = (Rows::new(&a, wide), RowsMut::new(&mut u, wide));
        latent_attention(q, Rows::new(latents, rank), shape.heads, |r| keys[r], 0.3, out);
        let mut y = vec![f32::NAN; rows * shape.heads * shape.value];
        let out = RowsMut::new(&mut y, shape.heads * shape.value);
        expand(Rows::new(&u, wide), w, shape, out);
        y
    }

    #[test]
    fn it_is_attention_over_expanded_keys_and_values() {
        for (shape, rank) in SHAPES {
            let (rows, positions) = (7, 40);
            let q = random(1, rows * shape.heads * shape.key);
            let (w, latents) = (random(2, shape.row_len() * rank), random(3, positions * rank));
            let list: Vec<i32> = (0..positions as i32).filter(|t| t % 3 != 1).collect();
            let keys: Vec<Keys<'_>> = (0..rows)
                .map(|r| if r == 2 { Keys::Listed(&list) } else { Keys::Below(positions - rows + r) })
                .collect();
            let got = latent(&q, &w, &latents, shape, rank, &keys);
            let kv: Vec<f32> = (0..positions)
                .flat_map(|t| (0..shape.row_len()).map(move |n| (t, n)))
                .map(|(t, n)| {
                    (0..rank)
                        .map(|j| f64::from(w[n * rank + j]) * f64::from(latents[t * rank + j]))
                        .sum::<f64>() as f32
                })
                .collect();
            let mut want = vec![f32::NAN; got.len()];
            let out = RowsMut::new(&mut want, shape.heads * shape.value);
            let q = Rows::new(&q, shape.heads * shape.key);
            attention(q, Rows::new(&kv, shape.row_len()), shape, |r| keys[r], 0.3, out);
            let want: Vec<f64> = want.into_iter().map(f64::from).collect();
            close(&got, &want, 2e-5, "absorbed against expanded");
        }
    }

    #[test]
    fn a_row_has_the_same_bits_in_any_company_and_on_every_instruction_set() {
        for (shape, rank) in SHAPES {
            let (rows, positions) = (33, 60);
            let width = shape.heads * shape.key;
            let q = random(5, rows * width);
            let (w, latents) = (random(6, shape.row_len() * rank), random(7, positions * rank));
            let keys: Vec<Keys<'_>> = (0..rows).map(|r| Keys::Below(positions - rows + r + 1)).collect();
            let (portable, together) = both_paths(|| bits(&latent(&q, &w, &latents, shape, rank, &keys)));
            assert_eq!(portable, together);
            for r in 0..rows {
                // As a list of all positions, too: sparse and dense rows are one arithmetic.
                let all: Vec<i32> = (0..(positions - rows + r + 1) as i32).collect();
                let q = &q[r * width..(r + 1) * width];
                for keys in [keys[r], Keys::Listed(&all)] {
                    let one = bits(&latent(q, &w, &latents, shape, rank, &[keys]));
                    assert_eq!(one[..], together[r * one.len()..(r + 1) * one.len()], "row {r}");
                }
            }
        }
    }

    #[test]
    fn bf16_weights_are_widened_exactly() {
        let (shape, rank) = SHAPES[1];
        let w: Vec<bf16> = random(8, shape.row_len() * rank).iter().map(|v| bf16::from_f32(*v)).collect();
        let wide: Vec<f32> = w.iter().map(|v| v.to_f32()).collect();
        let (q, u) = (random(9, 4 * shape.heads * shape.key), random(10, 4 * shape.heads * rank));
        let run = |data: Elements<'_>| {
            let w = PackedMatrix::new(shape.row_len(), rank, data).unwrap();
            let mut a = vec![f32::NAN; 4 * shape.heads * rank];
            let mut y = vec![f32::NAN; 4 * shape.heads * shape.value];
            let out = RowsMut::new(&mut a, shape.heads * rank);
            absorb(Rows::new(&q, shape.heads * shape.key), w, shape, out);
            let out = RowsMut::new(&mut y, shape.heads * shape.value);
            expand(Rows::new(&u, shape.heads * rank), w, shape, out);
            (bits(&a), bits(&y))
        };
        let (narrow, same) = (pack_bf16(&w, shape.row_len(), rank), pack_f32(&wide, shape.row_len(), rank));
        assert_eq!(run(Elements::Bf16(&narrow)), run(Elements::F32(&same)));
    }
}

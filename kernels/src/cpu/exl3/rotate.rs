//! Activations in the rotated basis in which the tiles are stored.

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::hadamard::{BLOCK, hadamard_block};
use super::lanes::{Kernel, LANES, Lanes, Path, dispatch};

/// Tiles in a block.
const BLOCK_TILES: usize = BLOCK / 16;

/// How exact rotated activations are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Activations {
    /// Rounded to half, as the engine's number formats say: products with code values are exact then.
    #[default]
    Half,
    /// Kept in single precision.
    Single,
}

/// Rows of activations, scaled and transformed: `H(x ∘ suh)`, laid out for the product kernels.
#[derive(Debug)]
pub(super) struct Rotated {
    rows: usize,
    k_tiles: usize,
    activations: Activations,
    /// `(k tiles / 8, rows, 8)`, so that the rows of a block lie together, whatever the number of channels; entry `[e][i]` belongs to the input channel that ring position `e` of lane `i` has.
    tiles: Vec<[Lanes<f32>; 4]>,
}

impl Rotated {
    /// Room for `rows` rows of `k` channels.
    pub fn zeros(rows: usize, k: usize, activations: Activations) -> Self {
        Self { rows, k_tiles: k / 16, activations, tiles: vec![[Lanes::splat(0.0); 4]; rows * k / 16] }
    }

    /// Rotates the rows of `x`, each after `lead` zeros and extended with zeros to the length of `suh`.
    pub fn new<'a>(
        x: impl ExactSizeIterator<Item = &'a [f32]>,
        lead: usize,
        suh: &[f16],
        activations: Activations,
        path: Path,
    ) -> Self {
        let mut rotated = Self::zeros(x.len(), suh.len(), activations);
        if rotated.rows == 0 {
            return rotated;
        }
        let mut scales = vec![0.0; suh.len()];
        suh.convert_to_f32_slice(&mut scales);
        let rows = rotated.rows;
        for (row, x) in x.enumerate() {
            let out = &mut rotated.tiles[row * BLOCK_TILES..];
            dispatch(
                path,
                RotateRow { x, lead, scales: &scales, activations, out, stride: rows * BLOCK_TILES },
            );
        }
        rotated
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Channels.
    pub fn k(&self) -> usize {
        16 * self.k_tiles
    }

    /// Whether a product with a code value fits a float: then it makes no difference whether it is fused.
    #[inline(always)]
    pub fn products_are_exact(&self) -> bool {
        self.activations == Activations::Half
    }

    /// A block of eight k tiles of a row.
    #[inline(always)]
    pub fn block(&self, row: usize, block: usize) -> &[[Lanes<f32>; 4]; BLOCK_TILES] {
        &self.tiles.as_chunks().0[block * self.rows + row]
    }
}

struct RotateRow<'a> {
    x: &'a [f32],
    lead: usize,
    scales: &'a [f32],
    activations: Activations,
    /// From the row's first block on.
    out: &'a mut [[Lanes<f32>; 4]],
    /// Tiles from one of its blocks to the next.
    stride: usize,
}

impl Kernel for RotateRow<'_> {
    fn run_scalar(self) {
        self.run();
    }

    #[inline(always)]
    fn run(self) {
        let blocks = self.scales.as_chunks::<BLOCK>().0;
        for (b, (scales, out)) in blocks.iter().zip(self.out.chunks_mut(self.stride)).enumerate() {
            let place = |channel: usize| channel.saturating_sub(self.lead).min(self.x.len());
            let x = &self.x[place(b * BLOCK)..place((b + 1) * BLOCK)];
            let mut block = [0.0; BLOCK];
            block[self.lead.saturating_sub(b * BLOCK).min(BLOCK - x.len())..][..x.len()].copy_from_slice(x);
            rotate_block(&mut block, scales, self.activations);
            spread(&block, &mut out[..BLOCK_TILES]);
        }
    }
}

/// `H(block ∘ scales)` in place, rounded as `activations` says.
#[inline(always)]
pub(super) fn rotate_block(block: &mut [f32; BLOCK], scales: &[f32; BLOCK], activations: Activations) {
    for (x, scale) in block.iter_mut().zip(scales) {
        *x *= scale;
    }
    hadamard_block(block);
    if activations == Activations::Half {
        let mut halves = [f16::ZERO; BLOCK];
        halves.convert_from_f32_slice(block);
        halves.convert_to_f32_slice(block);
    }
}

#[inline(always)]
fn spread(block: &[f32], out: &mut [[Lanes<f32>; 4]]) {
    for (x, out) in block.as_chunks::<16>().0.iter().zip(out) {
        for (e, lanes) in out.iter_mut().enumerate() {
            *lanes = Lanes(core::array::from_fn(|i| x[2 * (i % (LANES / 2)) + (e & 1) + 8 * (e >> 1)]));
        }
    }
}

//! Matrix products with packed weights.
//!
//! An output is a chain of fused multiply-adds over k in order, cut into blocks of [`BLOCK`]; the blocks' chains start
//! at zero and are added in order. That is all that decides its bits: how many rows a call has, which of them share a
//! tile and how columns are spread over threads only change the speed.

use half::bf16;

use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::simd::kernel;

/// Output columns of a panel.
pub const PANEL: usize = 16;
/// Length in k of one chain of multiply-adds.
pub const BLOCK: usize = 256;

/// Rows of a register tile.
const TILE: usize = 6;
/// Rows whose inputs of one block are packed together (they stay in the second-level cache).
const ROW_GROUP: usize = 16 * TILE;
/// Most panels that share a packed group of rows.
const PANEL_GROUP: usize = 8;

/// A size that does not fit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapeError(String);

impl ShapeError {
    pub(super) fn new(text: String) -> Self {
        Self(text)
    }
}

impl std::fmt::Display for ShapeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}
impl std::error::Error for ShapeError {}

/// Elements of a packed matrix.
#[derive(Clone, Copy, Debug)]
pub enum Elements<'a> {
    /// bfloat16, widened exactly.
    Bf16(&'a [bf16]),
    /// Single precision.
    F32(&'a [f32]),
}

impl<'a> Elements<'a> {
    fn len(&self) -> usize {
        match self {
            Elements::Bf16(data) => data.len(),
            Elements::F32(data) => data.len(),
        }
    }

    fn part(&self, start: usize, len: usize) -> Elements<'a> {
        match self {
            Elements::Bf16(data) => Elements::Bf16(&data[start..start + len]),
            Elements::F32(data) => Elements::F32(&data[start..start + len]),
        }
    }
}

/// A matrix `[n, k]` (y = W x) in panels of 16 outputs: `[ceil(n/16)][k][16]`, the last panel padded with zeros.
#[derive(Clone, Copy, Debug)]
pub struct PackedMatrix<'a> {
    n: usize,
    k: usize,
    data: Elements<'a>,
}

/// Elements of a packed matrix `[n, k]`.
pub const fn packed_len(n: usize, k: usize) -> usize {
    n.div_ceil(PANEL) * PANEL * k
}

impl<'a> PackedMatrix<'a> {
    /// A matrix over packed elements.
    ///
    /// # Errors
    /// When `data` does not have [`packed_len`] elements.
    pub fn new(n: usize, k: usize, data: Elements<'a>) -> Result<Self, ShapeError> {
        if data.len() == packed_len(n, k) {
            Ok(Self { n, k, data })
        } else {
            Err(ShapeError(format!(
                "packed matrix [{n}, {k}] needs {} elements, got {}",
                packed_len(n, k),
                data.len()
            )))
        }
    }

    /// Outputs.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Inputs.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.data.len() * if matches!(self.data, Elements::Bf16(_)) { 2 } else { 4 }
    }

    /// Matrix `index` of a stack that holds `count` matrices `[n, k]` one after another.
    ///
    /// # Errors
    /// When `data` is not such a stack or has no such matrix.
    pub fn of_stack(
        n: usize,
        k: usize,
        count: usize,
        index: usize,
        data: Elements<'a>,
    ) -> Result<Self, ShapeError> {
        let len = packed_len(n, k);
        if index < count && data.len() == len * count {
            Self::new(n, k, data.part(index * len, len))
        } else {
            Err(ShapeError(format!(
                "matrix {index} of a stack of {count} packed [{n}, {k}]: needs {} elements, got {}",
                len * count,
                data.len()
            )))
        }
    }

    /// The elements.
    pub(super) fn data(&self) -> Elements<'a> {
        self.data
    }

    /// Panels `first .. first + count` as a matrix of their own.
    pub(super) fn panels(&self, first: usize, count: usize) -> Self {
        let size = self.k * PANEL;
        let n = (self.n - first * PANEL).min(count * PANEL);
        Self { n, k: self.k, data: self.data.part(first * size, n.div_ceil(PANEL) * size) }
    }
}

fn pack<T: Copy + Default>(src: &[T], n: usize, k: usize) -> Vec<T> {
    assert_eq!(src.len(), n * k, "pack: a matrix [{n}, {k}] has {} elements", n * k);
    let mut out = vec![T::default(); packed_len(n, k)];
    for (row, values) in src.chunks_exact(k.max(1)).enumerate() {
        let panel = &mut out[row / PANEL * PANEL * k..];
        for (slot, value) in panel[row % PANEL..].iter_mut().step_by(PANEL).zip(values) {
            *slot = *value;
        }
    }
    out
}

/// Packs rows `[n, k]`.
///
/// # Panics
/// When `src` does not have n * k elements.
pub fn pack_bf16(src: &[bf16], n: usize, k: usize) -> Vec<bf16> {
    pack(src, n, k)
}

/// Packs rows `[n, k]`.
///
/// # Panics
/// When `src` does not have n * k elements.
pub fn pack_f32(src: &[f32], n: usize, k: usize) -> Vec<f32> {
    pack(src, n, k)
}

/// Which rows of input and output belong together.
#[derive(Clone, Copy, Debug)]
pub enum RowMap<'a> {
    /// Row i of the input gives row i of the output.
    All,
    /// `ids[i]` is an output row, made from input row `ids[i] / fan`. Each output row may appear once.
    Listed {
        /// Output rows.
        ids: &'a [i32],
        /// Output rows an input row.
        fan: usize,
    },
}

impl RowMap<'_> {
    #[inline(always)]
    pub(crate) fn len(&self, rows: usize) -> usize {
        match self {
            RowMap::All => rows,
            RowMap::Listed { ids, .. } => ids.len(),
        }
    }
    #[inline(always)]
    pub(crate) fn input(&self, i: usize) -> usize {
        match self {
            RowMap::All => i,
            RowMap::Listed { ids, fan } => ids[i] as usize / fan,
        }
    }
    #[inline(always)]
    pub(crate) fn output(&self, i: usize) -> usize {
        match self {
            RowMap::All => i,
            RowMap::Listed { ids, .. } => ids[i] as usize,
        }
    }
}

/// `out = x Wᵀ (+ bias)`, one output row for each input row.
///
/// # Panics
/// When the sizes of `x`, `w`, `bias` and `out` do not fit each other.
pub fn matmul(x: Rows<'_>, w: PackedMatrix<'_>, bias: Option<&[f32]>, out: RowsMut<'_>) {
    assert_eq!(x.rows(), out.rows(), "matmul: rows in and out");
    matmul_mapped(x, w, bias, RowMap::All, out);
}

/// As [`matmul`], for chosen rows; the other rows of `out` are left alone.
///
/// # Panics
/// When the sizes do not fit each other, or a listed row does not exist.
pub fn matmul_mapped(
    x: Rows<'_>,
    w: PackedMatrix<'_>,
    bias: Option<&[f32]>,
    map: RowMap<'_>,
    out: RowsMut<'_>,
) {
    assert_eq!(x.cols(), w.k, "matmul: width of the input and k of the weight");
    assert_eq!(out.cols(), w.n, "matmul: width of the output and n of the weight");
    if let Some(bias) = bias {
        assert_eq!(bias.len(), w.n, "matmul: bias and n of the weight");
    }
    let rows = map.len(x.rows());
    if rows == 0 || w.n == 0 {
        return;
    }
    let panels = w.n.div_ceil(PANEL);
    let group = panels.div_ceil(2 * par::threads()).clamp(1, PANEL_GROUP);
    let pieces = out.column_pieces(group * PANEL);
    par::each(pieces, rows * w.n * w.k, |i, mut out| {
        let w = w.panels(i * group, group);
        let bias = bias.map(|bias| &bias[i * group * PANEL..][..w.n]);
        multiply_here(x, w, map, &mut out);
        if let Some(bias) = bias {
            for r in 0..rows {
                out.row_mut(map.output(r)).iter_mut().zip(bias).for_each(|(o, b)| *o += b);
            }
        }
    });
}

/// The product on this thread: for whoever has spread the work already.
pub(super) fn multiply_here(x: Rows<'_>, w: PackedMatrix<'_>, map: RowMap<'_>, out: &mut RowsMut<'_>) {
    if map.len(x.rows()) <= TILE {
        stream_panels(x, w, map, out);
    } else {
        tile_panels(x, w, map, out);
    }
}

/// A weight element.
pub(super) trait Element: Copy + Sync + 'static {
    fn widen(self) -> f32;
}
impl Element for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}
impl Element for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

#[inline(always)]
pub(super) fn widen<W: Element>(w: &[W; PANEL]) -> [f32; PANEL] {
    let mut wide = [0.0; PANEL];
    for c in 0..PANEL {
        wide[c] = w[c].widen();
    }
    wide
}

#[inline(always)]
fn fma_panel(acc: &mut [f32; PANEL], x: f32, w: &[f32; PANEL]) {
    for c in 0..PANEL {
        acc[c] = x.mul_add(w[c], acc[c]);
    }
}

kernel! {
    /// R rows times P neighbouring panels, straight from memory: for few rows, where reading the weights is all the time.
    fn stream[W: Element, const R: usize, const P: usize][W, R, P](
        x: [&'a [f32]; R], w: &'a [[W; PANEL]],
    ) -> [[[f32; PANEL]; P]; R] {
        let k = x[0].len();
        let panels: [&[[W; PANEL]]; P] = std::array::from_fn(|p| &w[p * k..(p + 1) * k]);
        let mut total = [[[0.0f32; PANEL]; P]; R];
        let mut at = 0;
        while at < k {
            let len = if k - at < BLOCK { k - at } else { BLOCK };
            let rows: [&[f32]; R] = std::array::from_fn(|r| &x[r][at..at + len]);
            let weights: [&[[W; PANEL]]; P] = std::array::from_fn(|p| &panels[p][at..at + len]);
            let mut acc = [[[0.0f32; PANEL]; P]; R];
            for i in 0..len {
                for p in 0..P {
                    let wide = widen(&weights[p][i]);
                    for r in 0..R {
                        fma_panel(&mut acc[r][p], rows[r][i], &wide);
                    }
                }
            }
            for r in 0..R {
                for p in 0..P {
                    for c in 0..PANEL {
                        total[r][p][c] += acc[r][p][c];
                    }
                }
            }
            at += len;
        }
        total
    }
}

fn stream_panels(x: Rows<'_>, w: PackedMatrix<'_>, map: RowMap<'_>, out: &mut RowsMut<'_>) {
    match w.data {
        Elements::Bf16(data) => stream_elements(x, data, w, map, out),
        Elements::F32(data) => stream_elements(x, data, w, map, out),
    }
}

fn stream_elements<W: Element>(
    x: Rows<'_>,
    data: &[W],
    w: PackedMatrix<'_>,
    map: RowMap<'_>,
    out: &mut RowsMut<'_>,
) {
    let (panels, _) = data.as_chunks::<PANEL>();
    match map.len(x.rows()) {
        1 => stream_rows::<W, 1, 4>(x, panels, w, map, out),
        2 => stream_rows::<W, 2, 2>(x, panels, w, map, out),
        3 => stream_rows::<W, 3, 2>(x, panels, w, map, out),
        4 => stream_rows::<W, 4, 1>(x, panels, w, map, out),
        5 => stream_rows::<W, 5, 1>(x, panels, w, map, out),
        _ => stream_rows::<W, 6, 1>(x, panels, w, map, out),
    }
}

fn stream_rows<W: Element, const R: usize, const P: usize>(
    x: Rows<'_>,
    data: &[[W; PANEL]],
    w: PackedMatrix<'_>,
    map: RowMap<'_>,
    out: &mut RowsMut<'_>,
) {
    let panels = w.n.div_ceil(PANEL);
    let rows: [&[f32]; R] = std::array::from_fn(|r| x.row(map.input(r)));
    let mut panel = 0;
    while panel < panels {
        let part = &data[panel * w.k..];
        if panel + P <= panels {
            store(&stream::<W, R, P>(rows, part), panel, map, out);
            panel += P;
        } else {
            store(&stream::<W, R, 1>(rows, part), panel, map, out);
            panel += 1;
        }
    }
}

fn store<const R: usize, const P: usize>(
    sums: &[[[f32; PANEL]; P]; R],
    panel: usize,
    map: RowMap<'_>,
    out: &mut RowsMut<'_>,
) {
    for (r, row) in sums.iter().enumerate() {
        let out = &mut out.row_mut(map.output(r))[panel * PANEL..];
        let n = out.len().min(P * PANEL);
        out[..n].copy_from_slice(&row.as_flattened()[..n]);
    }
}

kernel! {
    /// R packed rows times one widened panel, over one block of k.
    fn tile[const R: usize][R](x: &'a [[f32; R]], w: &'a [[f32; PANEL]]) -> [[f32; PANEL]; R] {
        let mut acc = [[0.0f32; PANEL]; R];
        for (x, w) in x.iter().zip(w) {
            for r in 0..R {
                fma_panel(&mut acc[r], x[r], w);
            }
        }
        acc
    }
}

kernel! {
    fn widen_block[][](src: &'a [[bf16; PANEL]], out: &'a mut [[f32; PANEL]]) -> () {
        for (wide, narrow) in out.iter_mut().zip(src) {
            *wide = widen(narrow);
        }
    }
}

/// Many rows: the inputs of a block are packed tile by tile, the weights of a block are widened once for all rows.
fn tile_panels(x: Rows<'_>, w: PackedMatrix<'_>, map: RowMap<'_>, out: &mut RowsMut<'_>) {
    let rows = map.len(x.rows());
    let mut packed = vec![0.0f32; ROW_GROUP.min(rows) * BLOCK.min(w.k)];
    let mut wide = [[0.0f32; PANEL]; BLOCK];
    let panels = w.n.div_ceil(PANEL);
    if w.k == 0 {
        for r in 0..rows {
            out.row_mut(map.output(r)).fill(0.0);
        }
    }
    for first in (0..rows).step_by(ROW_GROUP) {
        let count = ROW_GROUP.min(rows - first);
        for at in (0..w.k).step_by(BLOCK) {
            let len = BLOCK.min(w.k - at);
            for t in (0..count).step_by(TILE) {
                let height = TILE.min(count - t);
                let tile = &mut packed[t * len..(t + height) * len];
                for r in 0..height {
                    let src = &x.row(map.input(first + t + r))[at..at + len];
                    tile[r..].iter_mut().step_by(height).zip(src).for_each(|(d, s)| *d = *s);
                }
            }
            for panel in 0..panels {
                let span = panel * w.k + at..panel * w.k + at + len;
                let weights: &[[f32; PANEL]] = match w.data {
                    Elements::Bf16(data) => {
                        widen_block(&data.as_chunks().0[span], &mut wide[..len]);
                        &wide[..len]
                    }
                    Elements::F32(data) => &data.as_chunks().0[span],
                };
                for t in (0..count).step_by(TILE) {
                    let height = TILE.min(count - t);
                    let tile = &packed[t * len..(t + height) * len];
                    let at_row = first + t;
                    match height {
                        1 => add_tile::<1>(tile, weights, at == 0, at_row, panel, map, out),
                        2 => add_tile::<2>(tile, weights, at == 0, at_row, panel, map, out),
                        3 => add_tile::<3>(tile, weights, at == 0, at_row, panel, map, out),
                        4 => add_tile::<4>(tile, weights, at == 0, at_row, panel, map, out),
                        5 => add_tile::<5>(tile, weights, at == 0, at_row, panel, map, out),
                        _ => add_tile::<6>(tile, weights, at == 0, at_row, panel, map, out),
                    }
                }
            }
        }
    }
}

fn add_tile<const R: usize>(
    x: &[f32],
    w: &[[f32; PANEL]],
    first: bool,
    at_row: usize,
    panel: usize,
    map: RowMap<'_>,
    out: &mut RowsMut<'_>,
) {
    let sums = tile::<R>(x.as_chunks().0, w);
    for (r, sums) in sums.iter().enumerate() {
        let out = &mut out.row_mut(map.output(at_row + r))[panel * PANEL..];
        // The first block is added to zero, as in the other path, so that a sum of -0 gives the same bits.
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = if first { 0.0 + sum } else { *out + sum };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::testing::{bits, random};
    use crate::cpu::simd::both_paths;
    use proptest::prelude::*;

    fn naive(x: &[f32], w: &[f32], n: usize, k: usize) -> Vec<f64> {
        let dot = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        x.chunks_exact(k).flat_map(|x| w.chunks_exact(k).take(n).map(move |w| dot(x, w))).collect()
    }

    fn run(x: &[f32], w: PackedMatrix<'_>, bias: Option<&[f32]>) -> Vec<f32> {
        let x = Rows::new(x, w.k());
        let mut out = vec![f32::NAN; x.rows() * w.n()];
        matmul(x, w, bias, RowsMut::new(&mut out, w.n()));
        out
    }

    #[test]
    fn packing_is_panels_of_sixteen_padded_with_zeros() {
        let src: Vec<f32> = (0..18 * 3).map(|v| v as f32 + 1.0).collect();
        let packed = pack_f32(&src, 18, 3);
        assert_eq!(packed.len(), 2 * 3 * 16);
        assert_eq!(packed[2 * 16 + 5], src[5 * 3 + 2]);
        assert_eq!(packed[48 + 16 + 1], src[17 * 3 + 1]);
        assert_eq!(packed[48 + 16 + 2], 0.0);
        assert!(PackedMatrix::new(18, 3, Elements::F32(&packed[1..])).is_err());
        assert!(PackedMatrix::of_stack(18, 3, 2, 0, Elements::F32(&packed)).is_err());
    }

    #[test]
    fn products_match_double_precision() {
        for (rows, n, k) in
            [(1, 16, 16), (1, 130, 300), (3, 17, 1), (6, 40, 515), (7, 33, 256), (70, 150, 700)]
        {
            let x = random(1, rows * k);
            let w: Vec<bf16> = random(2, n * k).into_iter().map(bf16::from_f32).collect();
            let wide: Vec<f32> = w.iter().map(|v| v.to_f32()).collect();
            let want = naive(&x, &wide, n, k);
            let (half, single) = (pack_bf16(&w, n, k), pack_f32(&wide, n, k));
            let half = run(&x, PackedMatrix::new(n, k, Elements::Bf16(&half)).unwrap(), None);
            let single = run(&x, PackedMatrix::new(n, k, Elements::F32(&single)).unwrap(), None);
            assert_eq!(bits(&half), bits(&single), "bf16 weights are widened exactly");
            for (got, want) in half.iter().zip(&want) {
                assert!(
                    (f64::from(*got) - want).abs() < 2e-6 * (k as f64).sqrt(),
                    "{rows}x{n}x{k}: {got} {want}"
                );
            }
        }
    }

    #[test]
    fn nothing_in_gives_nothing_out() {
        let w = pack_f32(&random(1, 32), 4, 8);
        let w = PackedMatrix::new(4, 8, Elements::F32(&w)).unwrap();
        assert!(run(&[], w, None).is_empty());
        let empty = PackedMatrix::new(0, 8, Elements::F32(&[])).unwrap();
        matmul(Rows::new(&random(1, 8), 8), empty, None, RowsMut::new(&mut [0.0; 0], 0).reborrow_rows(1));
    }

    impl<'a> RowsMut<'a> {
        fn reborrow_rows(self, rows: usize) -> RowsMut<'a> {
            assert_eq!(self.cols(), 0);
            // SAFETY: rows without elements cover no memory.
            unsafe { RowsMut::from_raw(std::ptr::NonNull::dangling().as_ptr(), rows, 0, 0) }
        }
    }

    #[test]
    fn bias_and_listed_rows() {
        let (n, k) = (20, 40);
        let (x, w, bias) = (random(1, 4 * k), pack_f32(&random(2, n * k), n, k), random(3, n));
        let w = PackedMatrix::new(n, k, Elements::F32(&w)).unwrap();
        let plain = run(&x, w, Some(&bias));
        let without = run(&x, w, None);
        for (i, (a, b)) in plain.iter().zip(&without).enumerate() {
            assert_eq!(*a, b + bias[i % n]);
        }
        let mut out = vec![7.0; 8 * n];
        let map = RowMap::Listed { ids: &[6, 1, 3], fan: 2 };
        matmul_mapped(Rows::new(&x, k), w, None, map, RowsMut::new(&mut out, n));
        for (row, from) in [(6, 3), (1, 0), (3, 1)] {
            assert_eq!(out[row * n..][..n], without[from * n..][..n]);
        }
        assert!(out[..n].iter().all(|&v| v == 7.0), "rows not listed are left alone");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_row_has_the_same_bits_in_any_company(
            rows in 1usize..=64, n in 1usize..80, k in 1usize..700, seed in 0u64..1000, half in any::<bool>(),
        ) {
            let x = random(seed, rows * k);
            let src = random(seed + 1, n * k);
            let narrow = pack_bf16(&src.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>(), n, k);
            let wide = pack_f32(&src, n, k);
            let data = if half { Elements::Bf16(&narrow) } else { Elements::F32(&wide) };
            let w = PackedMatrix::new(n, k, data).unwrap();
            let (scalar, together) = both_paths(|| run(&x, w, None));
            prop_assert_eq!(bits(&scalar), bits(&together));
            for r in 0..rows {
                let alone = run(&x[r * k..][..k], w, None);
                prop_assert_eq!(bits(&alone), bits(&together[r * n..][..n]));
            }
            let some = rows.min(5);
            let few = run(&x[..some * k], w, None);
            prop_assert_eq!(bits(&few), bits(&together[..some * n]));
        }
    }
}

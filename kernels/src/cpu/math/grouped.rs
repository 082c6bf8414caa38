//! Matrix products with small integers that share a scale (and an offset) a group of inputs.
//!
//! A weight is `scale * code (+ offset)`, with one scale and offset for each output and group of inputs. Matrices lie in
//! panels of 16 outputs. An output is made group by group: `P`, a chain of fused multiply-adds of inputs and codes from
//! zero, in order; then `acc = fma(P, scale, acc)`, and `acc = fma(sum of the group's inputs, offset, acc)` where there are
//! offsets. Groups are cut into a fixed number of slices; each is summed from zero, then they are added in order. Nothing
//! of that depends on the rows of a call or on threads, so a row has its bits in any company.

use half::bf16;

use super::dense::{PANEL, ShapeError, widen};
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::simd::kernel;

/// Rows of a register tile, and rows from which on a panel's codes are widened once for all of them.
const TILE: usize = 6;
/// Most panels that a task takes.
const PANEL_GROUP: usize = 8;
/// Words of a header plane.
pub const HEADER: usize = 16;

/// Where and how the groups of a matrix lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Inputs of the first group that come before the first one here: a share of a matrix may begin inside a group.
    pub lead: usize,
    /// Inputs of a group.
    pub group: usize,
    /// Slices that are summed by themselves. Divides the groups.
    pub slices: usize,
}

impl Grid {
    /// Groups, those at the ends included.
    pub const fn groups(&self) -> usize {
        (self.lead + self.k).div_ceil(self.group)
    }

    /// Panels of 16 outputs.
    pub const fn panels(&self) -> usize {
        self.n.div_ceil(PANEL)
    }

    /// The words of a header plane.
    pub fn header(&self) -> [u32; HEADER] {
        let mut words = [0; HEADER];
        for (word, size) in words.iter_mut().zip([self.lead, self.group, self.slices]) {
            *word = size as u32;
        }
        words
    }

    /// The grid of a matrix `[n, k]` with this header.
    ///
    /// # Errors
    /// A header that makes no sense.
    pub fn read(n: usize, k: usize, header: &[u32]) -> Result<Self, ShapeError> {
        let [lead, group, slices, ..] = *header else {
            return Err(ShapeError::new(format!("a header of {} words, must be {HEADER}", header.len())));
        };
        let grid = Self { n, k, lead: lead as usize, group: group as usize, slices: slices as usize };
        let fits = grid.group > 0
            && grid.group.is_multiple_of(8)
            && grid.lead < grid.group
            && grid.slices > 0
            && grid.groups().is_multiple_of(grid.slices);
        if fits {
            Ok(grid)
        } else {
            Err(ShapeError::new(format!(
                "a matrix [{n}, {k}] in groups of {group} that begin {lead} before it, in {slices} slices"
            )))
        }
    }
}

/// The codes of a matrix.
#[derive(Clone, Copy, Debug)]
pub enum Codes<'a> {
    /// 0 to 15: `[panels][groups][group / 8][16]` words, input `8 w + j` of an output in bits `4 j` of its word w.
    Nibbles(&'a [u32]),
    /// -127 to 127: `[panels][groups][group][16]` bytes.
    Bytes(&'a [i8]),
}

/// A matrix in groups.
#[derive(Clone, Copy, Debug)]
pub struct GroupedMatrix<'a> {
    grid: Grid,
    codes: Codes<'a>,
    scales: &'a [[bf16; PANEL]],
    offsets: &'a [[bf16; PANEL]],
}

/// Codes of neighbouring inputs, for 16 outputs.
trait Unit: Copy + Sync + 'static {
    /// How many inputs.
    const INPUTS: usize;
    /// The codes of one of them.
    fn codes(&self, input: usize) -> [f32; PANEL];
}

impl Unit for [u32; PANEL] {
    const INPUTS: usize = 8;
    #[inline(always)]
    fn codes(&self, input: usize) -> [f32; PANEL] {
        let mut codes = [0.0; PANEL];
        for c in 0..PANEL {
            // Signed conversions are one instruction everywhere; the value is below 16.
            codes[c] = (((self[c] >> (4 * input)) & 15) as i32) as f32;
        }
        codes
    }
}

impl Unit for [i8; PANEL] {
    const INPUTS: usize = 1;
    #[inline(always)]
    fn codes(&self, _: usize) -> [f32; PANEL] {
        let mut codes = [0.0; PANEL];
        for c in 0..PANEL {
            codes[c] = f32::from(self[c]);
        }
        codes
    }
}

impl Unit for [f32; PANEL] {
    const INPUTS: usize = 1;
    #[inline(always)]
    fn codes(&self, _: usize) -> [f32; PANEL] {
        *self
    }
}

/// What the panels of a product have in common.
#[derive(Clone, Copy)]
struct Sizes {
    group: usize,
    groups: usize,
    slices: usize,
}

kernel! {
    /// R rows times P neighbouring panels; `x` are padded rows, `sums` their sums a group.
    fn multiply[U: Unit, const R: usize, const P: usize][U, R, P](
        x: [&'a [f32]; R], sums: [&'a [f32]; R], units: &'a [U], scales: &'a [[bf16; PANEL]],
        offsets: &'a [[bf16; PANEL]], sizes: Sizes,
    ) -> [[[f32; PANEL]; P]; R] {
        let each = sizes.group / U::INPUTS;
        let length = sizes.groups / sizes.slices;
        let mut total = [[[0.0f32; PANEL]; P]; R];
        for slice in 0..sizes.slices {
            let mut acc = [[[0.0f32; PANEL]; P]; R];
            for g in slice * length..(slice + 1) * length {
                let rows: [&[f32]; R] = std::array::from_fn(|r| &x[r][g * sizes.group..(g + 1) * sizes.group]);
                let units: [&[U]; P] = std::array::from_fn(|p| &units[(p * sizes.groups + g) * each..][..each]);
                let mut product = [[[0.0f32; PANEL]; P]; R];
                for u in 0..each {
                    for p in 0..P {
                        for i in 0..U::INPUTS {
                            let codes = units[p][u].codes(i);
                            for r in 0..R {
                                let x = rows[r][u * U::INPUTS + i];
                                for c in 0..PANEL {
                                    product[r][p][c] = x.mul_add(codes[c], product[r][p][c]);
                                }
                            }
                        }
                    }
                }
                for p in 0..P {
                    let scale = widen(&scales[p * sizes.groups + g]);
                    for r in 0..R {
                        for c in 0..PANEL {
                            acc[r][p][c] = product[r][p][c].mul_add(scale[c], acc[r][p][c]);
                        }
                    }
                    if !offsets.is_empty() {
                        let offset = widen(&offsets[p * sizes.groups + g]);
                        for r in 0..R {
                            for c in 0..PANEL {
                                acc[r][p][c] = sums[r][g].mul_add(offset[c], acc[r][p][c]);
                            }
                        }
                    }
                }
            }
            for r in 0..R {
                for p in 0..P {
                    for c in 0..PANEL {
                        total[r][p][c] = if slice == 0 { acc[r][p][c] } else { total[r][p][c] + acc[r][p][c] };
                    }
                }
            }
        }
        total
    }
}

kernel! {
    fn widen_units[U: Unit][U](units: &'a [U], out: &'a mut [[f32; PANEL]]) -> () {
        for (unit, out) in units.iter().zip(out.chunks_exact_mut(U::INPUTS)) {
            for i in 0..U::INPUTS {
                out[i] = unit.codes(i);
            }
        }
    }
}

kernel! {
    /// The numbers of one panel, from input `lead` of its first group on.
    fn decode[U: Unit][U](
        units: &'a [U], scales: &'a [[bf16; PANEL]], offsets: &'a [[bf16; PANEL]], group: usize, lead: usize,
        out: &'a mut [[f32; PANEL]],
    ) -> () {
        for (i, out) in out.iter_mut().enumerate() {
            let at = lead + i;
            let codes = units[at / U::INPUTS].codes(at % U::INPUTS);
            let scale = widen(&scales[at / group]);
            let offset = if offsets.is_empty() { [0.0; PANEL] } else { widen(&offsets[at / group]) };
            for c in 0..PANEL {
                out[c] = codes[c].mul_add(scale[c], offset[c]);
            }
        }
    }
}

/// Rows with zeros before and after, so that they are whole groups, and their sums a group.
struct Padded {
    width: usize,
    groups: usize,
    x: Vec<f32>,
    sums: Vec<f32>,
}

impl Padded {
    fn new(x: Rows<'_>, grid: &Grid, sums: bool) -> Self {
        let groups = grid.groups();
        let width = groups * grid.group;
        let mut padded = vec![0.0; x.rows() * width];
        for (r, to) in padded.chunks_exact_mut(width).enumerate() {
            to[grid.lead..grid.lead + grid.k].copy_from_slice(x.row(r));
        }
        let sum = |group: &[f32]| group.iter().fold(0.0, |sum, v| sum + v);
        let sums = if sums { padded.chunks_exact(grid.group).map(sum).collect() } else { Vec::new() };
        Self { width, groups, x: padded, sums }
    }

    fn row(&self, r: usize) -> &[f32] {
        &self.x[r * self.width..(r + 1) * self.width]
    }

    fn sums(&self, r: usize) -> &[f32] {
        if self.sums.is_empty() { &[] } else { &self.sums[r * self.groups..(r + 1) * self.groups] }
    }
}

impl<'a> GroupedMatrix<'a> {
    /// A matrix over its planes: codes, scales `[panels][groups][16]`, and offsets alike or none.
    ///
    /// # Errors
    /// Planes of another size.
    pub fn new(
        grid: Grid,
        codes: Codes<'a>,
        scales: &'a [bf16],
        offsets: &'a [bf16],
    ) -> Result<Self, ShapeError> {
        let all = grid.panels() * grid.groups();
        let (got, want) = match codes {
            Codes::Nibbles(words) => (words.len(), all * grid.group / 8 * PANEL),
            Codes::Bytes(bytes) => (bytes.len(), all * grid.group * PANEL),
        };
        if got != want || scales.len() != all * PANEL || ![0, scales.len()].contains(&offsets.len()) {
            return Err(ShapeError::new(format!(
                "a matrix [{}, {}] in groups of {} needs {want} codes and {} scales, got {got} and {} (offsets: {})",
                grid.n,
                grid.k,
                grid.group,
                all * PANEL,
                scales.len(),
                offsets.len()
            )));
        }
        let (scales, offsets) = (scales.as_chunks().0, offsets.as_chunks().0);
        Ok(Self { grid, codes, scales, offsets })
    }

    /// Its sizes.
    pub fn grid(&self) -> &Grid {
        &self.grid
    }

    /// The number that stands at an output and an input: `scale * code (+ offset)`, rounded once.
    pub fn value(&self, output: usize, input: usize) -> f32 {
        let (panel, c) = (output / PANEL, output % PANEL);
        let at = input + self.grid.lead;
        let group = panel * self.grid.groups() + at / self.grid.group;
        let within = at % self.grid.group;
        let code = match self.codes {
            Codes::Nibbles(words) => {
                let word = words[(group * self.grid.group / 8 + within / 8) * PANEL + c];
                ((word >> (4 * (within % 8))) & 15) as f32
            }
            Codes::Bytes(bytes) => f32::from(bytes[(group * self.grid.group + within) * PANEL + c]),
        };
        let offset = self.offsets.get(group).map_or(0.0, |o| o[c].to_f32());
        code.mul_add(self.scales[group][c].to_f32(), offset)
    }

    /// The numbers of panels `first .. first + count`, as [`super::dense::PackedMatrix`] has them.
    ///
    /// # Panics
    /// When there are not so many panels.
    pub fn decode(&self, first: usize, count: usize) -> Vec<f32> {
        let (groups, each) = (self.grid.groups(), self.grid.groups() * self.grid.group);
        let mut out = vec![[0.0; PANEL]; count * self.grid.k];
        for (panel, out) in (first..first + count).zip(out.chunks_exact_mut(self.grid.k.max(1))) {
            let own = panel * groups..(panel + 1) * groups;
            let scales = &self.scales[own.clone()];
            let offsets = if self.offsets.is_empty() { &[][..] } else { &self.offsets[own] };
            let (group, lead) = (self.grid.group, self.grid.lead);
            match self.codes {
                Codes::Nibbles(words) => {
                    let units = &words.as_chunks::<PANEL>().0[panel * each / 8..(panel + 1) * each / 8];
                    decode(units, scales, offsets, group, lead, out);
                }
                Codes::Bytes(bytes) => {
                    let units = &bytes.as_chunks::<PANEL>().0[panel * each..(panel + 1) * each];
                    decode(units, scales, offsets, group, lead, out);
                }
            }
        }
        out.into_flattened()
    }

    /// `out = x Wᵀ (+ bias)`.
    ///
    /// # Panics
    /// When the sizes of `x`, `bias` and `out` do not fit.
    pub fn matmul(&self, x: Rows<'_>, bias: Option<&[f32]>, out: RowsMut<'_>) {
        let (n, k, rows) = (self.grid.n, self.grid.k, x.rows());
        assert_eq!((x.cols(), out.cols(), out.rows()), (k, n, rows), "matmul: sizes of rows in and out");
        assert!(bias.is_none_or(|b| b.len() == n), "matmul: bias and n of the weight");
        if rows == 0 || n == 0 {
            return;
        }
        let padded = Padded::new(x, &self.grid, !self.offsets.is_empty());
        let group = self.grid.panels().div_ceil(2 * par::threads()).clamp(1, PANEL_GROUP);
        let pieces = out.column_pieces(group * PANEL);
        par::each(pieces, rows * n * k, |i, mut out| {
            let (first, count) = (i * group, out.cols().div_ceil(PANEL));
            match self.codes {
                Codes::Nibbles(words) => {
                    self.panels(&padded, words.as_chunks().0, first..first + count, &mut out);
                }
                Codes::Bytes(bytes) => {
                    self.panels(&padded, bytes.as_chunks().0, first..first + count, &mut out);
                }
            }
            if let Some(bias) = bias {
                for r in 0..rows {
                    let bias = &bias[first * PANEL..][..out.cols()];
                    out.row_mut(r).iter_mut().zip(bias).for_each(|(o, b)| *o += b);
                }
            }
        });
    }

    fn panels<U: Unit>(
        &self,
        x: &Padded,
        units: &[U],
        panels: std::ops::Range<usize>,
        out: &mut RowsMut<'_>,
    ) {
        let sizes = Sizes { group: self.grid.group, groups: self.grid.groups(), slices: self.grid.slices };
        let each = sizes.groups * sizes.group / U::INPUTS;
        let of = |from: usize, to: usize| Panels {
            units: &units[from * each..to * each],
            scales: &self.scales[from * sizes.groups..to * sizes.groups],
            offsets: if self.offsets.is_empty() {
                &[]
            } else {
                &self.offsets[from * sizes.groups..to * sizes.groups]
            },
            sizes,
            column: (from - panels.start) * PANEL,
        };
        let rows = out.rows();
        if rows > TILE {
            let mut wide = vec![[0.0f32; PANEL]; sizes.groups * sizes.group];
            for panel in panels.clone() {
                let narrow = of(panel, panel + 1);
                widen_units(narrow.units, &mut wide);
                let panel = Panels {
                    units: &wide[..],
                    scales: narrow.scales,
                    offsets: narrow.offsets,
                    sizes,
                    column: narrow.column,
                };
                let mut first = 0;
                while first < rows {
                    let count = (rows - first).min(TILE);
                    panel.some::<1>(x, first, count, out);
                    first += count;
                }
            }
            return;
        }
        let wide = if rows == 1 { 4 } else { 1 };
        let mut at = panels.start;
        while at < panels.end {
            if at + wide <= panels.end && wide == 4 {
                of(at, at + 4).some::<4>(x, 0, rows, out);
                at += 4;
            } else {
                of(at, at + 1).some::<1>(x, 0, rows, out);
                at += 1;
            }
        }
    }
}

/// Some neighbouring panels.
struct Panels<'p, U> {
    units: &'p [U],
    scales: &'p [[bf16; PANEL]],
    offsets: &'p [[bf16; PANEL]],
    sizes: Sizes,
    /// First of their columns in the output.
    column: usize,
}

impl<U: Unit> Panels<'_, U> {
    /// Rows `first .. first + count` times P panels.
    fn some<const P: usize>(&self, x: &Padded, first: usize, count: usize, out: &mut RowsMut<'_>) {
        match count {
            1 => self.rows::<1, P>(x, first, out),
            2 => self.rows::<2, P>(x, first, out),
            3 => self.rows::<3, P>(x, first, out),
            4 => self.rows::<4, P>(x, first, out),
            5 => self.rows::<5, P>(x, first, out),
            _ => self.rows::<6, P>(x, first, out),
        }
    }

    fn rows<const R: usize, const P: usize>(&self, x: &Padded, first: usize, out: &mut RowsMut<'_>) {
        let rows = std::array::from_fn(|r| x.row(first + r));
        let sums = std::array::from_fn(|r| x.sums(first + r));
        let made = multiply::<U, R, P>(rows, sums, self.units, self.scales, self.offsets, self.sizes);
        for (r, made) in made.iter().enumerate() {
            let out = &mut out.row_mut(first + r)[self.column..];
            let n = out.len().min(P * PANEL);
            out[..n].copy_from_slice(&made.as_flattened()[..n]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::both_paths;
    use proptest::prelude::*;

    /// A matrix with its planes, by a small generator.
    struct Planes {
        grid: Grid,
        words: Vec<u32>,
        bytes: Vec<i8>,
        scales: Vec<bf16>,
        offsets: Vec<bf16>,
    }

    fn numbers(seed: u64) -> impl FnMut() -> u32 {
        let mut state = seed | 1;
        move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 16) as u32
        }
    }

    fn floats(seed: u64, n: usize) -> Vec<f32> {
        let mut next = numbers(seed);
        (0..n).map(|_| (next() % 2001) as f32 / 1000.0 - 1.0).collect()
    }

    fn planes(grid: Grid, seed: u64) -> Planes {
        let all = grid.panels() * grid.groups();
        let mut next = numbers(seed);
        let words = (0..all * grid.group / 8 * PANEL).map(|_| next() ^ next() << 16).collect();
        let bytes =
            (0..all * grid.group * PANEL).map(|_| (next() % 255) as i8).map(|b| b.max(-127)).collect();
        let small = |v: f32| bf16::from_f32(v * 0.1);
        Planes {
            grid,
            words,
            bytes,
            scales: floats(seed + 1, all * PANEL).into_iter().map(small).collect(),
            offsets: floats(seed + 2, all * PANEL).into_iter().map(small).collect(),
        }
    }

    impl Planes {
        fn four(&self) -> GroupedMatrix<'_> {
            GroupedMatrix::new(self.grid, Codes::Nibbles(&self.words), &self.scales, &self.offsets).unwrap()
        }
        fn eight(&self) -> GroupedMatrix<'_> {
            GroupedMatrix::new(self.grid, Codes::Bytes(&self.bytes), &self.scales, &[]).unwrap()
        }
    }

    fn product(w: GroupedMatrix<'_>, x: &[f32]) -> Vec<u32> {
        let mut out = vec![f32::NAN; x.len() / w.grid.k * w.grid.n];
        w.matmul(Rows::new(x, w.grid.k), None, RowsMut::new(&mut out, w.grid.n));
        out.iter().map(|v| v.to_bits()).collect()
    }

    /// The arithmetic as it is written down above, one output at a time.
    fn by_definition(w: &GroupedMatrix<'_>, x: &[f32], output: usize) -> f32 {
        let g = w.grid;
        let padded: Vec<f32> = std::iter::repeat_n(0.0, g.lead).chain(x.iter().copied()).collect();
        let (panel, c) = (output / PANEL, output % PANEL);
        let mut total = 0.0;
        for slice in 0..g.slices {
            let mut acc = 0.0f32;
            let length = g.groups() / g.slices;
            for group in slice * length..(slice + 1) * length {
                let (mut product, mut sum) = (0.0f32, 0.0f32);
                let at = panel * g.groups() + group;
                for i in 0..g.group {
                    let x = padded.get(group * g.group + i).copied().unwrap_or(0.0);
                    let code = match w.codes {
                        Codes::Nibbles(words) => {
                            { words[(at * g.group / 8 + i / 8) * PANEL + c] >> (4 * (i % 8)) & 15 }
                                .cast_signed()
                        }
                        Codes::Bytes(bytes) => i32::from(bytes[(at * g.group + i) * PANEL + c]),
                    };
                    product = x.mul_add(code as f32, product);
                    sum += x;
                }
                acc = product.mul_add(w.scales[at][c].to_f32(), acc);
                if let Some(offset) = w.offsets.get(at) {
                    acc = sum.mul_add(offset[c].to_f32(), acc);
                }
            }
            total = if slice == 0 { acc } else { total + acc };
        }
        total
    }

    const GRIDS: [Grid; 5] = [
        Grid { n: 33, k: 256, lead: 0, group: 64, slices: 4 },
        Grid { n: 16, k: 200, lead: 40, group: 64, slices: 2 },
        Grid { n: 70, k: 7, lead: 60, group: 64, slices: 1 },
        Grid { n: 5, k: 384, lead: 0, group: 128, slices: 3 },
        Grid { n: 130, k: 130, lead: 1, group: 64, slices: 3 },
    ];

    #[test]
    fn every_output_is_the_sum_that_is_written_down() {
        for (i, grid) in GRIDS.into_iter().enumerate() {
            let planes = planes(grid, i as u64);
            let x = floats(7, 9 * grid.k);
            for w in [planes.four(), planes.eight()] {
                let got = product(w, &x);
                for (r, x) in x.chunks_exact(grid.k).enumerate() {
                    for o in 0..grid.n {
                        let want = by_definition(&w, x, o).to_bits();
                        assert_eq!(got[r * grid.n + o], want, "{grid:?}, row {r}, output {o}");
                    }
                }
            }
        }
    }

    #[test]
    fn decoded_panels_hold_the_numbers() {
        for (i, grid) in GRIDS.into_iter().enumerate() {
            let planes = planes(grid, i as u64 + 5);
            for w in [planes.four(), planes.eight()] {
                let all = w.decode(0, grid.panels());
                for (o, k) in (0..grid.n).flat_map(|o| (0..grid.k).map(move |k| (o, k))) {
                    let got = all[(o / PANEL * grid.k + k) * PANEL + o % PANEL];
                    assert_eq!(got.to_bits(), w.value(o, k).to_bits(), "{grid:?}, output {o}, input {k}");
                }
                let last = w.decode(grid.panels() - 1, 1);
                assert_eq!(last[..], all[all.len() - last.len()..]);
            }
        }
    }

    #[test]
    fn both_instruction_sets_give_the_same_bits_and_values_are_near_the_decoded_product() {
        let planes = planes(GRIDS[1], 3);
        let x = floats(1, 8 * 200);
        for w in [planes.four(), planes.eight()] {
            let (portable, detected) = both_paths(|| product(w, &x));
            assert_eq!(portable, detected);
            for o in 0..w.grid.n {
                let exact: f64 = (0..200).map(|i| f64::from(w.value(o, i)) * f64::from(x[i])).sum();
                let got = f64::from(f32::from_bits(portable[o]));
                assert!((got - exact).abs() < 1e-3, "output {o}: {got}, {exact}");
            }
        }
    }

    proptest! {
        #[test]
        fn a_row_has_its_bits_in_any_company(at in 0usize..5, seed in 1u64..1000, rows in 1usize..40, pick in any::<prop::sample::Index>()) {
            let grid = GRIDS[at];
            let planes = planes(grid, seed);
            let x = floats(seed + 9, rows * grid.k);
            let row = pick.index(rows);
            for w in [planes.four(), planes.eight()] {
                let together = product(w, &x);
                let alone = product(w, &x[row * grid.k..(row + 1) * grid.k]);
                prop_assert_eq!(&together[row * grid.n..(row + 1) * grid.n], &alone[..]);
            }
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        for header in [[0, 0, 1], [64, 64, 1], [0, 64, 0], [0, 64, 3], [0, 60, 1]] {
            let mut words = [0; HEADER];
            words[..3].copy_from_slice(&header);
            assert!(Grid::read(16, 256, &words).is_err(), "{header:?}");
        }
        assert!(Grid::read(16, 256, &[0, 64]).is_err());
        for grid in GRIDS {
            assert_eq!(Grid::read(grid.n, grid.k, &grid.header()), Ok(grid));
        }
        let planes = planes(GRIDS[0], 1);
        let short = GroupedMatrix::new(GRIDS[0], Codes::Nibbles(&planes.words[1..]), &planes.scales, &[]);
        assert!(short.unwrap_err().to_string().contains("[33, 256]"));
    }
}

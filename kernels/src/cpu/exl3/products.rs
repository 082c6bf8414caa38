//! Products of rotated activations with tiles, straight from trellis words.
//!
//! A tile's 32 lanes and two column halves give 64 running sums, eight vectors a row of activations. Each sum
//! takes its products in the order of the input channels: k tile by k tile, ring positions upward. After every
//! [`CHAIN`] tiles it begins anew, and what these chains give is added in rising order: so a machine with many more
//! threads than columns can run chains side by side. That order is the same in both kernels below, for every rate,
//! instruction set, number of rows and split of the columns, and so are the bits.

use std::marker::PhantomData;
use std::ops::Range;

use super::bits::unpack_states;
use super::codebook::{Code, Codebook, Mcg, Mul1, ThreeInst};
use super::hadamard::BLOCK;
use super::lanes::{Kernel, LANES, Lanes, Path, dispatch};
use super::rotate::Rotated;
use super::tile::{GROUPS, Staged, Values, decode, decode_all, stage};
use super::view::LayerView;

/// Tiles in the 128 columns of one transformed block.
pub(super) const BLOCK_TILES: usize = BLOCK / 16;
/// Tiles along k whose products are one chain of multiply-adds: 1,024 inputs. A whole number of chunks.
const CHAIN: usize = 64;
/// Tiles along k that are decoded together when several rows share them.
const CHUNK: usize = 8;
/// Rows that share one decoded chunk: their sums (2 KiB each) stay in the second-level cache.
const ROW_GROUP: usize = 64;

/// The running sums of a row and a tile: entry `2 · group + half`.
type Sums = [Lanes<f32>; 2 * GROUPS];

const NO_SUMS: Sums = [Lanes([0.0; LANES]); 2 * GROUPS];
/// What chains are added to: the first keeps its bits, a negative zero too.
const NO_CHAINS: Sums = [Lanes([-0.0; LANES]); 2 * GROUPS];
const NO_WINDOWS: Staged = [Lanes([0; LANES]); 4 * GROUPS];

/// Multiplies every row of `x` with the columns of blocks `[first, first + count)` of the stored matrix.
///
/// `finish(row, block, columns)` receives the 128 products of a row with a block, not yet transformed.
pub(super) fn multiply_blocks(
    layer: LayerView<'_>,
    x: &Rotated,
    first: usize,
    count: usize,
    path: Path,
    mut finish: impl FnMut(usize, usize, &mut [f32; BLOCK]),
) {
    assert_eq!(x.k(), layer.k(), "rotated activations belong to another layer");
    let mut row = 0;
    while row < x.rows() {
        let rows = (x.rows() - row).min(ROW_GROUP);
        let mut sums = vec![NO_SUMS; rows * count * BLOCK_TILES];
        let mut totals = vec![NO_CHAINS; sums.len()];
        for begin in (0..layer.k() / 16).step_by(CHAIN) {
            let k_tiles = begin..(begin + CHAIN).min(layer.k() / 16);
            let first_tile = first * BLOCK_TILES;
            sums.fill(NO_SUMS);
            multiply(Job { layer, x, first_row: row, rows, first_tile, k_tiles, sums: &mut sums }, path);
            for (total, sum) in totals.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
                *total = total.zip(*sum, |total, sum| total + sum);
            }
        }
        for (r, sums) in totals.chunks_exact(count * BLOCK_TILES).enumerate() {
            for (block, sums) in sums.as_chunks::<BLOCK_TILES>().0.iter().enumerate() {
                finish(row + r, first + block, &mut reduce(sums));
            }
        }
        row += rows;
    }
}

/// Adds the four lanes that share a column, always in the same order.
fn reduce(sums: &[Sums; BLOCK_TILES]) -> [f32; BLOCK] {
    let mut columns = [0.0; BLOCK];
    for (tile, sums) in sums.iter().enumerate() {
        for (index, sums) in sums.iter().enumerate() {
            let (group, half) = (index / 2, index % 2);
            for (pair, s) in sums.0.as_chunks::<4>().0.iter().enumerate() {
                columns[16 * tile + 8 * half + 2 * group + pair] = (s[0] + s[1]) + (s[2] + s[3]);
            }
        }
    }
    columns
}

/// Products of some rows with some columns of tiles.
struct Job<'a> {
    layer: LayerView<'a>,
    x: &'a Rotated,
    first_row: usize,
    rows: usize,
    first_tile: usize,
    /// Tiles along k: whole blocks.
    k_tiles: Range<usize>,
    /// `(rows, tiles)`.
    sums: &'a mut [Sums],
}

fn multiply(job: Job<'_>, path: Path) {
    if job.rows == 1 { by_codebook(job.layer, OneRow(job), path) } else { multiply_rows(job, path) }
}

/// Several rows: a column of tiles is decoded piece by piece, and each piece serves all rows.
fn multiply_rows(job: Job<'_>, path: Path) {
    let Job { layer, x, first_row, rows, first_tile, k_tiles, sums } = job;
    let tiles = sums.len() / rows;
    let mut values = [[[Lanes([0.0; LANES]); GROUPS]; 8]; CHUNK];
    for first_k in k_tiles.step_by(CHUNK) {
        for tile in 0..tiles {
            by_codebook(layer, Decode { layer, first_k, tile: first_tile + tile, values: &mut values }, path);
            dispatch(path, Accumulate { x, first_row, rows, first_k, values: &values, tile, tiles, sums });
        }
    }
}

/// A kernel for one codebook and rate.
trait RateKernel {
    fn run<C: Code, const H: usize>(self);
    fn run_scalar(self, codebook: Codebook);
}

struct AtRate<K, C, const H: usize>(K, Codebook, PhantomData<C>);

impl<K: RateKernel, C: Code, const H: usize> Kernel for AtRate<K, C, H> {
    #[inline(always)]
    fn run(self) {
        self.0.run::<C, H>();
    }

    fn run_scalar(self) {
        self.0.run_scalar(self.1);
    }
}

fn by_codebook<K: RateKernel>(layer: LayerView<'_>, kernel: K, path: Path) {
    match (layer.codebook(), layer.rate().halves()) {
        (Codebook::ThreeInst, halves) => by_rate::<K, ThreeInst>(Codebook::ThreeInst, halves, kernel, path),
        (Codebook::Mcg, halves) => by_rate::<K, Mcg>(Codebook::Mcg, halves, kernel, path),
        (Codebook::Mul1, 3) => at_rate::<K, Mul1, 3>(Codebook::Mul1, kernel, path),
        (Codebook::Mul1, 5) => at_rate::<K, Mul1, 5>(Codebook::Mul1, kernel, path),
        (Codebook::Mul1, 7) => at_rate::<K, Mul1, 7>(Codebook::Mul1, kernel, path),
        (Codebook::Mul1, halves) => by_rate::<K, Mul1>(Codebook::Mul1, halves, kernel, path),
    }
}

fn by_rate<K: RateKernel, C: Code>(codebook: Codebook, halves: usize, kernel: K, path: Path) {
    match halves {
        2 => at_rate::<K, C, 2>(codebook, kernel, path),
        4 => at_rate::<K, C, 4>(codebook, kernel, path),
        6 => at_rate::<K, C, 6>(codebook, kernel, path),
        8 => at_rate::<K, C, 8>(codebook, kernel, path),
        10 => at_rate::<K, C, 10>(codebook, kernel, path),
        12 => at_rate::<K, C, 12>(codebook, kernel, path),
        14 => at_rate::<K, C, 14>(codebook, kernel, path),
        16 => at_rate::<K, C, 16>(codebook, kernel, path),
        _ => unreachable!("a layer with {halves} half bits a weight cannot be made"),
    }
}

fn at_rate<K: RateKernel, C: Code, const H: usize>(codebook: Codebook, kernel: K, path: Path) {
    dispatch(path, AtRate::<K, C, H>(kernel, codebook, PhantomData));
}

/// One row: values go from the decoder straight into the sums.
struct OneRow<'a>(Job<'a>);

impl RateKernel for OneRow<'_> {
    #[inline(always)]
    fn run<C: Code, const H: usize>(self) {
        let Job { layer, x, first_row, first_tile, k_tiles, sums, .. } = self.0;
        let mut staged = [NO_WINDOWS; BLOCK_TILES];
        let blocks = k_tiles.start / BLOCK_TILES..k_tiles.end / BLOCK_TILES;
        let x = blocks.flat_map(|block| x.block(first_row, block));
        for (kt, x) in k_tiles.zip(x) {
            let words = layer.tiles(kt, first_tile, sums.len());
            let blocks = sums.as_chunks_mut::<BLOCK_TILES>().0.iter_mut();
            for (words, sums) in words.chunks_exact(BLOCK_TILES * 4 * H).zip(blocks) {
                for (words, staged) in words.chunks_exact(4 * H).zip(&mut staged) {
                    // Two windows a lane are cut a lane at a time otherwise, which takes half of all time.
                    if matches!(H, 5..=10 | 14..) {
                        stage::<H, true>(words, staged);
                    } else {
                        stage::<H, false>(words, staged);
                    }
                }
                for (staged, sums) in staged.iter().zip(sums) {
                    let mut s = *sums;
                    decode::<C, H>(staged, |group, e, values| {
                        let sum = &mut s[2 * group + (e >> 2)];
                        *sum = sum.add_product(values, x[e & 3]);
                    });
                    *sums = s;
                }
            }
        }
    }

    fn run_scalar(self, _codebook: Codebook) {
        multiply_rows(self.0, Path::Scalar);
    }
}

/// Decodes [`CHUNK`] tiles that lie below one another.
struct Decode<'a> {
    layer: LayerView<'a>,
    first_k: usize,
    tile: usize,
    values: &'a mut [Values; CHUNK],
}

impl RateKernel for Decode<'_> {
    #[inline(always)]
    fn run<C: Code, const H: usize>(self) {
        let mut staged = [NO_WINDOWS; CHUNK];
        for (kt, staged) in staged.iter_mut().enumerate() {
            let words = self.layer.tiles(self.first_k + kt, self.tile, 1);
            if H == 12 { stage::<H, false>(words, staged) } else { stage::<H, true>(words, staged) }
        }
        for (staged, values) in staged.iter().zip(self.values) {
            decode_all::<C, H>(staged, values);
        }
    }

    fn run_scalar(self, codebook: Codebook) {
        let table = codebook.table();
        for (kt, values) in self.values.iter_mut().enumerate() {
            let words = self.layer.tiles(self.first_k + kt, self.tile, 1);
            let states = unpack_states(words, self.layer.rate());
            for (position, &state) in states.iter().enumerate() {
                let (lane, e) = (position / 8, position % 8);
                values[e][lane / LANES].0[lane % LANES] = table[usize::from(state)];
            }
        }
    }
}

/// Multiplies decoded tiles with all rows of a job.
struct Accumulate<'a> {
    x: &'a Rotated,
    first_row: usize,
    rows: usize,
    first_k: usize,
    values: &'a [Values; CHUNK],
    tile: usize,
    tiles: usize,
    sums: &'a mut [Sums],
}

impl Accumulate<'_> {
    #[inline(always)]
    fn all_rows(self, product: impl Fn(f32, f32, f32) -> f32 + Copy) {
        let Self { x, first_row, rows, first_k, values, tile, tiles, sums } = self;
        let x = |row: usize| x.block(first_row + row, first_k / CHUNK);
        let mut row = 0;
        while row + 1 < rows {
            let (a, b) = sums[row * tiles..].split_at_mut(tiles);
            accumulate::<2>(values, [x(row), x(row + 1)], [&mut a[tile], &mut b[tile]], product);
            row += 2;
        }
        if row < rows {
            accumulate::<1>(values, [x(row)], [&mut sums[row * tiles + tile]], product);
        }
    }
}

impl Kernel for Accumulate<'_> {
    #[inline(always)]
    fn run(self) {
        self.all_rows(f32::mul_add);
    }

    fn run_scalar(self) {
        if self.x.products_are_exact() {
            self.all_rows(|a, b, sum| a * b + sum);
        } else {
            self.run();
        }
    }
}

#[inline(always)]
fn accumulate<const R: usize>(
    values: &[Values; CHUNK],
    x: [&[[Lanes<f32>; 4]; CHUNK]; R],
    mut sums: [&mut Sums; R],
    product: impl Fn(f32, f32, f32) -> f32,
) {
    for half in 0..2 {
        let mut s: [[Lanes<f32>; GROUPS]; R] =
            core::array::from_fn(|r| core::array::from_fn(|group| sums[r][2 * group + half]));
        for (kt, values) in values.iter().enumerate() {
            for e in 0..4 {
                for r in 0..R {
                    let x = x[r][kt][e];
                    for group in 0..GROUPS {
                        let (v, sum) = (values[4 * half + e][group], &mut s[r][group]);
                        *sum = Lanes(core::array::from_fn(|i| product(v.0[i], x.0[i], sum.0[i])));
                    }
                }
            }
        }
        for (sums, s) in sums.iter_mut().zip(&s) {
            for (group, s) in s.iter().enumerate() {
                sums[2 * group + half] = *s;
            }
        }
    }
}

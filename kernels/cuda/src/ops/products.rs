//! Products with weights in any format: `dense`, `head`, `moe.logits`, the products of `hc.dots` and `mla.write`, and over
//! lists of rows `moe.up` and `moe.down`.

use plugfold_abi::{OpError, Segment};

use super::operands::{CachedArg, Mat, Matrix, Operands};
use crate::kernel::{Arg, GRID_YZ};
use crate::machine::Scratch;
use crate::segments::{Shape, Table, Tables, Wave, words};

/// Rows of a product: `Rows` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct RowsArg {
    x: u64,
    x_stride: u64,
    out: u64,
    out_stride: u64,
    to: CachedArg,
    order: u64,
    starts: u64,
    experts: u32,
    fan: u32,
    first: u32,
    count: u32,
}

/// `Segments` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
struct SegmentsArg {
    table: u64,
    first: u64,
    data: u64,
}

/// `Stack` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct StackArg {
    data: u64,
    n: u32,
    k: u32,
    segments: SegmentsArg,
    part: u32,
    unused: u32,
}

/// `Wave` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct WaveArg {
    segments: SegmentsArg,
    part: u32,
    k: u32,
    n: u32,
    known: u32,
    rotated: u64,
    raw: u64,
    handed: u64,
    /// The fields of a [`Segment`], in order.
    only: [u32; Segment::WORDS],
}

/// `Chains` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct ChainsArg {
    x: u64,
    w: u64,
    bias: u64,
    out: u64,
    handed: u64,
    to: CachedArg,
    x_stride: u32,
    out_stride: u32,
    rows: u32,
    n: u32,
    k: u32,
    unused: u32,
}

/// Which rows of an expert: the lists of `moe.group`.
#[derive(Clone, Copy, Debug)]
pub struct Lists {
    /// Pairs by expert.
    pub order: u64,
    /// Where each expert's begin.
    pub starts: u64,
    /// Experts.
    pub experts: usize,
    /// Pairs that an input row has.
    pub fan: usize,
    /// Pairs that a row of the call has, each of another expert.
    pub slots: usize,
}

/// One product: `count` matrices `[n, k]` and their rows.
#[derive(Clone, Copy, Debug)]
pub struct Product<'n> {
    /// The weight's name, for messages.
    pub name: &'n str,
    /// The weight.
    pub matrix: Matrix,
    /// Outputs.
    pub n: usize,
    /// Inputs.
    pub k: usize,
    /// Matrices of the weight.
    pub count: usize,
    /// Input rows.
    pub x: Mat,
    /// Output rows.
    pub out: Mat,
    /// The output rows, where they do not lie in `out`.
    pub to: CachedArg,
    /// Output rows.
    pub rows: usize,
    /// Lists of rows by matrix.
    pub lists: Option<Lists>,
    /// Bias, or 0.
    pub bias: u64,
}

/// Rows from which on `panels_tile` is used.
const MANY: usize = 16;
/// Rows that a stream may serve at once.
const STREAM: [usize; 3] = [1, 4, 8];
/// Blocks of a grid below which the blocks of k are spread too: a GPU has 48 to 150 multiprocessors, each with room for
/// three blocks.
const FEW: usize = 400;

/// Shared memory of `panels_stream`: two stages (`Cut` of the source) and the sums of `rows` rows.
const fn stream_bytes(rows: usize, bf16: bool) -> u32 {
    let bytes = if rows == 1 { 4096 } else { 2048 };
    let inputs = if rows == 1 { 0 } else { rows * 8 * (bytes / if bf16 { 32 } else { 64 } + 4) * 4 };
    (2 * (8 * (bytes + 32) + inputs) + 8 * rows * 16 * 4) as u32
}
/// Rows of a block of chains: `CHAIN_ROWS` of the source.
const CHAIN_ROWS: usize = 4;
/// Rows of a launch of chains: their sums have a place of their own until the next launch.
const CHAINED: usize = 64;
/// Chains from which on they are spread only where panels are few: with fewer, most lanes of `panels_stream` have none.
const SPREAD: usize = 3;
/// Shared memory of a block of chains: two panels, a row more in each (`ChainRoom` of the source), and the inputs.
const fn chain_bytes(bf16: bool) -> u32 {
    (2 * 257 * 16 * if bf16 { 2 } else { 4 } + CHAIN_ROWS * 256 * 4) as u32
}
/// What `hc_dots` holds of a row whose squares it adds: `HELD_ROW` of the source.
const SQUARES: u32 = 16_384 * 4;
/// Shared memory of a block of EXL3 products: the rings of words of four warps (`Ring` of the source).
const RINGS: u32 = 4 * 8 * 256 * 4;
/// The same where four warps share a column: four times the warps, half the stages.
const SHARED_RINGS: u32 = 2 * RINGS;
/// Rotated channels before the rings, at one row: `CHUNK` of the source.
const CHUNK: u32 = 4096 * 4;
/// Blocks of EXL3 products that take 64 columns each from which on there are enough of them: two for each multiprocessor
/// of the largest GPUs. Below, blocks take 32.
const ENOUGH: usize = 264;
/// The same for one row, whose kernel for few outputs takes a multiprocessor whole.
const ALONE: usize = 132;
/// Rows whose rotated inputs are held at once.
const ROTATED: usize = 4096;
/// Rows of a tile of many rows in EXL3: `HEIGHT` of the source.
const TILE: usize = 64;
/// Rows from which on there are tiles, of lists what a matrix has on average.
const TILED: usize = 24;
/// Sums of tiles that are held at once: 256 MiB.
const SUMS: usize = 1 << 26;

impl<'n> Product<'n> {
    /// One matrix `[n, k]` over `rows` rows of `x`, to those of `out`, without a bias.
    pub fn plain(
        name: &'n str,
        matrix: Matrix,
        (n, k): (usize, usize),
        x: Mat,
        out: Mat,
        rows: usize,
    ) -> Self {
        Self { name, matrix, n, k, count: 1, x, out, to: CachedArg::default(), rows, lists: None, bias: 0 }
    }

    fn rows_arg(&self, first: usize, count: usize) -> RowsArg {
        let lists = self.lists.unwrap_or(Lists { order: 0, starts: 0, experts: 0, fan: 1, slots: 0 });
        RowsArg {
            x: self.x.at,
            x_stride: u64::from(self.x.stride),
            out: self.out.at,
            out_stride: u64::from(self.out.stride),
            to: self.to,
            order: lists.order,
            starts: lists.starts,
            experts: lists.experts as u32,
            fan: lists.fan as u32,
            first: first as u32,
            count: count as u32,
        }
    }

    /// Runs it.
    ///
    /// # Errors
    /// A table of segments that does not describe the weight, or what the machine says.
    pub fn run(&self, o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
        if self.rows == 0 {
            return Ok(());
        }
        let this = Product { x: self.aligned(o)?, ..*self };
        this.run_aligned(o, tables)
    }

    fn run_aligned(&self, o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
        match self.matrix {
            Matrix::Panels { at, bf16 } => {
                let stack = StackArg {
                    data: at,
                    n: self.n as u32,
                    k: self.k as u32,
                    segments: SegmentsArg::default(),
                    part: 0,
                    unused: 0,
                };
                self.panels(o, tables, stack, bf16, self.n, self.x)
            }
            Matrix::Segments { table, rows, data, lines } => {
                let shape =
                    Shape { n: self.n as u32, k: self.k as u32, count: self.count as u32, rows, lines };
                let found = tables
                    .get(o.machine, table, shape)
                    .map_err(|e| o.error(&format!("weight {}: {e}", self.name)))?;
                self.segments(o, tables, &found, SegmentsArg { table, first: found.first, data })
            }
        }
    }

    /// Panels of up to `n` outputs over rows `x`.
    fn panels(
        &self,
        o: &Operands<'_>,
        tables: &Tables,
        stack: StackArg,
        bf16: bool,
        n: usize,
        x: Mat,
    ) -> Result<(), OpError> {
        let kind = if bf16 { "bf16" } else { "f32" };
        // With lists, how many rows a matrix has is known on the device only: on average so many, and one of each if all
        // have one input row.
        let (rows, at_once) = match self.lists {
            Some(l) => (self.rows.div_ceil(self.count), if self.rows == l.slots { 1 } else { 4 }),
            None => (self.rows, self.rows),
        };
        if rows > MANY {
            let name = format!("panels_tile_{kind}");
            return self.pieces(|first, count| {
                let arg = RowsArg { x: x.at, x_stride: u64::from(x.stride), ..self.rows_arg(first, count) };
                let tiles = if self.lists.is_some() { count } else { count.div_ceil(64) };
                let args = [
                    Arg::Struct("Rows", bytemuck::bytes_of(&arg)),
                    Arg::Struct("Stack", bytemuck::bytes_of(&stack)),
                    Arg::Pointer(self.bias),
                ];
                o.launch(&name, [n.div_ceil(64), tiles, 1], 256, 0, &args)
            });
        }
        let most = STREAM.into_iter().find(|s| *s >= at_once).unwrap_or(STREAM[STREAM.len() - 1]);
        let (panels, tiles) = (n.div_ceil(16), self.rows.div_ceil(most));
        let (whole, chains) = (self.lists.is_none() && stack.data != 0, self.k.div_ceil(256));
        if whole && (chains < SPREAD || panels * tiles < FEW) {
            return self.chains(o, tables, stack.data, bf16, x, false);
        }
        let name = format!("panels_stream_{kind}_{most}");
        self.pieces(|first, count| {
            let arg = RowsArg { x: x.at, x_stride: u64::from(x.stride), ..self.rows_arg(first, count) };
            let tiles = if self.lists.is_some() { count } else { count.div_ceil(most) };
            let args = [
                Arg::Struct("Rows", bytemuck::bytes_of(&arg)),
                Arg::Struct("Stack", bytemuck::bytes_of(&stack)),
                Arg::Pointer(self.bias),
            ];
            o.launch(&name, [panels, tiles, 1], 64, stream_bytes(most, bf16), &args)
        })
    }

    /// The input, with rows that start on multiples of 16 bytes: a copy, where they do not.
    fn aligned(&self, o: &Operands<'_>) -> Result<Mat, OpError> {
        if self.x.quads() {
            return Ok(self.x);
        }
        let rows = self.lists.map_or(self.rows, |l| self.rows / l.fan);
        let stride = self.k.next_multiple_of(4);
        let copy = Mat { at: o.machine.aligned_input(rows * stride * 4)?, stride: stride as u32 };
        super::plain::copy(o, self.x, 0, rows, self.k, copy)?;
        Ok(copy)
    }

    /// Rows in pieces that a grid can hold, each a whole number of tiles.
    fn pieces(&self, run: impl Fn(usize, usize) -> Result<(), OpError>) -> Result<(), OpError> {
        let most = GRID_YZ as usize / 64 * 64;
        (0..self.rows).step_by(most).try_for_each(|first| run(first, most.min(self.rows - first)))
    }

    /// The same with the sum of squares of each row behind its outputs: `hc.dots`, at any number of rows.
    ///
    /// # Errors
    /// A weight that does not lie in panels, or what the machine says.
    pub fn run_with_squares(&self, o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
        let Matrix::Panels { at, bf16 } = self.matrix else {
            return Err(o.error(&format!("weight {} lies in segments, must lie in panels", self.name)));
        };
        let x = self.aligned(o)?;
        self.chains(o, tables, at, bf16, x, true)
    }

    fn chains(
        &self,
        o: &Operands<'_>,
        tables: &Tables,
        w: u64,
        bf16: bool,
        x: Mat,
        squares: bool,
    ) -> Result<(), OpError> {
        let (chains, pairs) = (self.k.div_ceil(256), self.n.div_ceil(32));
        let (name, before, shared) = if squares {
            ("hc_dots", CHAIN_ROWS, chain_bytes(bf16).max(SQUARES))
        } else {
            ("panels_chains", 0, chain_bytes(bf16))
        };
        let name = format!("{name}_{}", if bf16 { "bf16" } else { "f32" });
        let most = self.rows.min(CHAINED);
        let handed = tables.handed(o.machine, most * chains * pairs * 32)?;
        for first in (0..self.rows).step_by(CHAINED) {
            let rows = CHAINED.min(self.rows - first);
            let arg = ChainsArg {
                x: x.row(first).at,
                w,
                bias: self.bias,
                out: self.out.row(first).at,
                handed,
                to: CachedArg { first_row: self.to.first_row + first as u32, ..self.to },
                x_stride: x.stride,
                out_stride: self.out.stride,
                rows: rows as u32,
                n: self.n as u32,
                k: self.k as u32,
                unused: 0,
            };
            let args = [Arg::Struct("Chains", bytemuck::bytes_of(&arg))];
            o.launch(&name, [before + chains, rows.div_ceil(CHAIN_ROWS), pairs], 128, shared, &args)?;
        }
        Ok(())
    }

    fn segments(
        &self,
        o: &Operands<'_>,
        tables: &Tables,
        table: &Table,
        segments: SegmentsArg,
    ) -> Result<(), OpError> {
        for wave in &table.waves {
            if wave.kinds[0] {
                let tiled = self.lists.map_or(self.rows, |_| self.rows / self.count) >= TILED;
                // Of tiles every output has four sums.
                let row = 4 * wave.n as usize * wave.parts as usize;
                let most = if tiled { (SUMS / row / TILE * TILE).clamp(TILE, ROTATED) } else { ROTATED };
                for first in (0..self.rows).step_by(most) {
                    self.trellises(o, wave, segments, tables, first, most.min(self.rows - first), tiled)?;
                }
            }
            for (there, bf16) in [(wave.kinds[1], true), (wave.kinds[2], false)] {
                for part in wave.part..if there { wave.part + wave.parts } else { wave.part } {
                    let stack =
                        StackArg { data: 0, n: self.n as u32, k: self.k as u32, segments, part, unused: 0 };
                    let plain = Product { bias: 0, ..*self };
                    plain.panels(o, tables, stack, bf16, wave.panels as usize, self.x)?;
                }
            }
        }
        if self.bias == 0 {
            return Ok(());
        }
        let arg = self.rows_arg(0, self.rows);
        let args = [
            Arg::Struct("Rows", bytemuck::bytes_of(&arg)),
            Arg::Pointer(self.bias),
            Arg::Word(self.n as u32),
        ];
        o.launch("exl3_bias", [self.rows, self.n.div_ceil(128), 1], 128, 0, &args)
    }

    fn trellises(
        &self,
        o: &Operands<'_>,
        wave: &Wave,
        segments: SegmentsArg,
        tables: &Tables,
        first: usize,
        count: usize,
        tiled: bool,
    ) -> Result<(), OpError> {
        let (k, n, parts) = (wave.k as usize, wave.n as usize, wave.parts as usize);
        let rows = self.rows_arg(first, count);
        // One row, or lists of one row each: each block rotates its row itself.
        let alone = self.lists.map_or(self.rows == 1, |l| self.rows == l.slots);
        // A short tile reads what a full one would: seven rows more.
        let rotated = if alone { 0 } else { (parts * count + 7) * k * 4 };
        let split = if tiled { 4 } else { 1 };
        let sums = parts * count * n * split;
        let pieces = Scratch::pieces(&[rotated, if alone { 0 } else { sums * 4 }]).take(o.machine)?;
        let handed = if alone { tables.handed(o.machine, sums)? } else { 0 };
        let arg = WaveArg {
            segments,
            part: wave.part,
            k: wave.k,
            n: wave.n,
            known: u32::from(wave.only.is_some()),
            rotated: pieces[0],
            raw: pieces[1],
            handed,
            only: wave.only.map_or([0; Segment::WORDS], |s| words(&s)),
        };
        let args =
            [Arg::Struct("Rows", bytemuck::bytes_of(&rows)), Arg::Struct("Wave", bytemuck::bytes_of(&arg))];
        let height = if tiled { TILE } else { 8 };
        let tiles = if alone || self.lists.is_some() { count } else { count.div_ceil(height) };
        // Blocks that have rows: with lists not every place has.
        let busy = if alone { count } else { self.lists.map_or(tiles, |l| tiles.min(l.experts)) };
        let enough = if alone { ALONE } else { ENOUGH };
        let (halves, columns) = if busy * parts * n / 64 < enough { (1, 32) } else { (2, 64) };
        let grid = [n / columns, tiles, parts];
        if alone {
            let (threads, rings) = if halves == 1 { (512, SHARED_RINGS) } else { (128, RINGS) };
            return o.launch(&format!("exl3_one_{halves}"), grid, threads, CHUNK + rings, &args);
        }
        o.launch("exl3_rotate", [count, k.div_ceil(512), parts], 128, 0, &args)?;
        if tiled {
            o.launch("exl3_tile", [4 * n.div_ceil(128), tiles, parts], 128, 0, &args)?;
        } else {
            o.launch(&format!("exl3_rows_{halves}"), grid, 128, RINGS, &args)?;
        }
        let args = [args[0], args[1], Arg::Word(split as u32)];
        o.launch("exl3_finish", [count, n.div_ceil(512), parts], 128, 0, &args)
    }
}

//! Matrices put together of parts that keep their own storage: the format [`formats::EXL3_SEGMENTS`].
//!
//! A fused matrix (the projections that read the same rows) or an expert's gate and up are several stored layers, each
//! with its own scales, rate and codebook, and some may have been left unquantized. So a weight is a table of
//! [`Segment`]s over one block of memory. [`Plan`] lays such a weight out, [`Segments`] multiplies by it.
//!
//! [`formats::EXL3_SEGMENTS`]: plugfold_abi::formats::EXL3_SEGMENTS

use std::ops::Range;

use half::{bf16, f16};
use plugfold_abi::Segment;

use super::codebook::Codebook;
use super::hadamard::BLOCK;
use super::matmul::{Job, Options, run};
use super::rate::Rate;
use super::rotate::Rotated;
use super::stored::Header;
use super::view::LayerView;
use crate::cpu::math::dense::{Elements, PackedMatrix, RowMap, matmul_mapped, packed_len};
use crate::cpu::rows::{Rows, RowsMut};

/// Words of a line.
const WORDS: usize = Segment::LINE / 4;

/// What is wrong with a table of segments.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SegmentError(String);

/// Zeroed memory in lines of [`Segment::LINE`] bytes, aligned to one.
#[derive(Debug)]
pub struct Lines {
    buffer: Vec<u128>,
    start: usize,
    count: usize,
}

impl Lines {
    const EACH: usize = Segment::LINE / size_of::<u128>();

    /// `count` lines. The system hands the pages out when they are first written.
    pub fn zeroed(count: usize) -> Self {
        let buffer = vec![0_u128; (count + 1) * Self::EACH];
        let start = (buffer.as_ptr() as usize).wrapping_neg() % Segment::LINE / size_of::<u128>();
        Self { buffer, start, count }
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.count
    }

    /// All words.
    pub fn words(&self) -> &[u32] {
        bytemuck::cast_slice(&self.buffer[self.start..][..self.count * Self::EACH])
    }

    /// All words, to write.
    pub fn words_mut(&mut self) -> &mut [u32] {
        bytemuck::cast_slice_mut(&mut self.buffer[self.start..][..self.count * Self::EACH])
    }
}

/// Which part of a stored block becomes which part of a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Which matrix of the stack.
    pub matrix: usize,
    /// First output of the matrix.
    pub output: usize,
    /// First input of the matrix.
    pub input: usize,
    /// The outputs of the stored matrix that are wanted.
    pub rows: Range<usize>,
    /// The inputs of the stored matrix that are wanted.
    pub cols: Range<usize>,
}

/// The layout of a weight.
#[derive(Debug, Default)]
pub struct Plan {
    table: Vec<Segment>,
    lines: usize,
}

/// The blocks of 128 channels that hold `range`.
fn blocks(range: &Range<usize>) -> Range<usize> {
    range.start / BLOCK * BLOCK..range.end.next_multiple_of(BLOCK)
}

impl Plan {
    fn take(&mut self, bytes: usize) -> u32 {
        let at = self.lines;
        self.lines += bytes.div_ceil(Segment::LINE);
        at as u32
    }

    /// Adds a part of an EXL3 layer: the blocks of 128 channels that hold it. Gives the channels of these, `(k, n)`.
    ///
    /// With `same_input` the scales of the input are those of the segment before: parts of one layer, with the same
    /// inputs.
    pub fn trellis(&mut self, cut: &Cut, header: &Header, same_input: bool) -> (Range<usize>, Range<usize>) {
        let (k, n) = (blocks(&cut.cols), blocks(&cut.rows));
        let words = k.len() / 16 * (n.len() / 16) * header.rate.words();
        let data = self.take(4 * words);
        let svh = self.take(2 * n.len());
        // The bias goes with the first input: the other shares of a sum must not add it again.
        let bias = header.bias && cut.cols.start == 0;
        let bias = if bias { self.take(4 * n.len()) } else { Segment::NONE };
        let suh = match self.table.last() {
            Some(before) if same_input => before.suh,
            _ => self.take(2 * k.len()),
        };
        let codebook = Codebook::ALL.iter().position(|c| *c == header.codebook).unwrap_or(0);
        self.table.push(Segment {
            lead: (cut.cols.start - k.start) as u32,
            skip: (cut.rows.start - n.start) as u32,
            kind: Segment::EXL3,
            k: k.len() as u32,
            n: n.len() as u32,
            halves: header.rate.halves() as u32,
            codebook: codebook as u32,
            suh,
            svh,
            bias,
            ..Self::segment(cut, data)
        });
        (k, n)
    }

    /// Adds panels, in bf16 or f32.
    pub fn panels(&mut self, cut: &Cut, bf16s: bool) {
        let (n, k) = (cut.rows.len(), cut.cols.len());
        let data = self.take(packed_len(n, k) * if bf16s { 2 } else { 4 });
        let kind = if bf16s { Segment::BF16 } else { Segment::F32 };
        self.table.push(Segment { kind, k: k as u32, n: n as u32, ..Self::segment(cut, data) });
    }

    fn segment(cut: &Cut, data: u32) -> Segment {
        Segment {
            matrix: cut.matrix as u32,
            output: cut.output as u32,
            outputs: cut.rows.len() as u32,
            input: cut.input as u32,
            inputs: cut.cols.len() as u32,
            lead: 0,
            skip: 0,
            kind: Segment::F32,
            k: 0,
            n: 0,
            halves: 0,
            codebook: 0,
            data,
            suh: Segment::NONE,
            svh: Segment::NONE,
            bias: Segment::NONE,
        }
    }

    /// Lines of all data.
    pub fn lines(&self) -> usize {
        self.lines
    }

    /// The table as the words of a plane.
    pub fn words(&self) -> Vec<u32> {
        self.table.iter().flat_map(words).collect()
    }

    /// The places of every segment's planes in the plan's lines, to be filled in any order.
    ///
    /// # Panics
    /// If `data` is not as long as the plan's lines.
    pub fn slots<'a>(&self, data: &'a mut [u32]) -> Vec<Slots<'a>> {
        assert_eq!(data.len(), self.lines * WORDS, "data of another plan");
        let mut rest = data;
        let ends = self.table.iter().skip(1).map(|s| s.data as usize).chain([self.lines]);
        self.table
            .iter()
            .zip(ends)
            .map(|(segment, end)| {
                let start = segment.data as usize;
                let (mine, more) = std::mem::take(&mut rest).split_at_mut((end - start) * WORDS);
                rest = more;
                Slots::new(segment, start, mine)
            })
            .collect()
    }
}

/// The fields in the order of the structure, as a plane holds them.
fn words(s: &Segment) -> [u32; Segment::WORDS] {
    [
        s.matrix, s.output, s.outputs, s.input, s.inputs, s.lead, s.skip, s.kind, s.k, s.n, s.halves,
        s.codebook, s.data, s.suh, s.svh, s.bias,
    ]
}

fn segment(words: &[u32; Segment::WORDS]) -> Segment {
    let [
        matrix,
        output,
        outputs,
        input,
        inputs,
        lead,
        skip,
        kind,
        k,
        n,
        halves,
        codebook,
        data,
        suh,
        svh,
        bias,
    ] = *words;
    Segment {
        matrix,
        output,
        outputs,
        input,
        inputs,
        lead,
        skip,
        kind,
        k,
        n,
        halves,
        codebook,
        data,
        suh,
        svh,
        bias,
    }
}

/// Where the planes of a segment go.
#[derive(Debug)]
pub enum Slots<'a> {
    /// An EXL3 layer.
    Trellis {
        /// Words of the tiles.
        trellis: &'a mut [u32],
        /// Scales of the inputs, unless they are those of the segment before.
        suh: Option<&'a mut [f16]>,
        /// Scales of the outputs.
        svh: &'a mut [f16],
        /// The bias.
        bias: Option<&'a mut [f32]>,
    },
    /// Panels of bf16.
    Bf16(&'a mut [bf16]),
    /// Panels of f32.
    F32(&'a mut [f32]),
}

impl<'a> Slots<'a> {
    fn new(s: &Segment, start: usize, mine: &'a mut [u32]) -> Self {
        let (k, n) = (s.k as usize, s.n as usize);
        match s.kind {
            Segment::BF16 => Slots::Bf16(&mut bytemuck::cast_slice_mut(mine)[..packed_len(n, k)]),
            Segment::F32 => Slots::F32(&mut bytemuck::cast_slice_mut(mine)[..packed_len(n, k)]),
            _ => {
                // In the order in which the plan took them.
                let (trellis, rest) = mine.split_at_mut((s.svh as usize - start) * WORDS);
                let words = k / 16 * (n / 16) * 4 * s.halves as usize;
                let (svh, rest) = rest.split_at_mut((2 * n).div_ceil(Segment::LINE) * WORDS);
                let bias_lines = if s.bias == Segment::NONE { 0 } else { (4 * n).div_ceil(Segment::LINE) };
                let (bias, suh) = rest.split_at_mut(bias_lines * WORDS);
                let bias = (bias_lines > 0).then(|| &mut bytemuck::cast_slice_mut(bias)[..n]);
                let suh = (!suh.is_empty()).then(|| &mut bytemuck::cast_slice_mut(suh)[..k]);
                let svh = &mut bytemuck::cast_slice_mut(svh)[..n];
                Slots::Trellis { trellis: &mut trellis[..words], suh, svh, bias }
            }
        }
    }
}

/// A stack of matrices in segments.
#[derive(Clone, Copy, Debug)]
pub struct Segments<'a> {
    n: usize,
    k: usize,
    table: &'a [[u32; Segment::WORDS]],
    data: &'a [u32],
}

/// A segment with its data.
#[derive(Clone, Copy)]
enum Part<'a> {
    Trellis(LayerView<'a>),
    Panels(PackedMatrix<'a>),
}

/// Rows that one matrix of a stack is multiplied by.
type Group<'a> = (usize, RowMap<'a>);

impl<'a> Segments<'a> {
    /// Matrices `[n, k]` over the words of the two planes. What the table says is checked when it is used.
    ///
    /// # Errors
    /// When the table is no whole number of segments.
    pub fn new(n: usize, k: usize, table: &'a [u32], data: &'a [u32]) -> Result<Self, SegmentError> {
        let (rows, rest) = table.as_chunks();
        if rest.is_empty() && !rows.is_empty() {
            Ok(Self { n, k, table: rows, data })
        } else {
            Err(SegmentError(format!(
                "a table of {} words is no whole number of segments of {} words",
                table.len(),
                Segment::WORDS
            )))
        }
    }

    /// The segments of a matrix, which must cover it.
    fn of(&self, matrix: usize) -> Result<Vec<Segment>, SegmentError> {
        let first = self.table.partition_point(|s| (s[0] as usize) < matrix);
        let found: Vec<Segment> =
            self.table[first..].iter().map(segment).take_while(|s| s.matrix as usize == matrix).collect();
        let (mut outputs, mut inputs) = (0..0, self.k);
        for s in &found {
            let (from, to) = (s.output as usize, s.output as usize + s.outputs as usize);
            if inputs == self.k && s.input == 0 {
                inputs = 0;
                outputs = outputs.end..to;
            }
            if (from..to) != outputs || from >= to || s.input as usize != inputs || s.inputs == 0 {
                outputs.end = usize::MAX;
                break;
            }
            inputs += s.inputs as usize;
        }
        if outputs.end == self.n && inputs == self.k {
            return Ok(found);
        }
        let (n, k) = (self.n, self.k);
        Err(SegmentError(format!("the segments of matrix {matrix} do not cover [{n}, {k}] once")))
    }

    fn plane<T: bytemuck::AnyBitPattern>(
        &self,
        line: u32,
        count: usize,
        what: &str,
    ) -> Result<&'a [T], SegmentError> {
        let words = (count * size_of::<T>()).div_ceil(4);
        let start = line as usize * WORDS;
        match self.data.get(start..start.saturating_add(words)) {
            Some(words) => Ok(&bytemuck::cast_slice(words)[..count]),
            None => Err(SegmentError(format!(
                "the {what} of a segment needs words {start}..{} of {}",
                start.saturating_add(words),
                self.data.len()
            ))),
        }
    }

    fn part(&self, s: &Segment) -> Result<Part<'a>, SegmentError> {
        let (k, n) = (s.k as usize, s.n as usize);
        if s.lead.saturating_add(s.inputs) > s.k || s.skip.saturating_add(s.outputs) > s.n {
            return Err(SegmentError(format!("a segment uses more than its stored [{n}, {k}]: {s:?}")));
        }
        let panels = |data| {
            if (s.lead, s.skip, s.inputs, s.outputs) != (0, 0, s.k, s.n) {
                return Err(SegmentError(format!("panels are used whole, not as in {s:?}")));
            }
            PackedMatrix::new(n, k, data).map(Part::Panels).map_err(|e| SegmentError(e.to_string()))
        };
        match s.kind {
            Segment::BF16 => panels(Elements::Bf16(self.plane(s.data, packed_len(n, k), "panels")?)),
            Segment::F32 => panels(Elements::F32(self.plane(s.data, packed_len(n, k), "panels")?)),
            Segment::EXL3 => {
                let rate = u8::try_from(s.halves).ok().and_then(Rate::from_halves);
                let (Some(rate), Some(&codebook)) = (rate, Codebook::ALL.get(s.codebook as usize)) else {
                    return Err(SegmentError(format!("no such rate or codebook: {s:?}")));
                };
                let words = k / 16 * (n / 16) * rate.words();
                let bias = match s.bias {
                    Segment::NONE => None,
                    line => Some(self.plane(line, n, "bias")?),
                };
                let (trellis, suh) = (self.plane(s.data, words, "trellis")?, self.plane(s.suh, k, "suh")?);
                LayerView::new("segment", rate, codebook, trellis, suh, self.plane(s.svh, n, "svh")?, bias)
                    .map(Part::Trellis)
                    .map_err(|e| SegmentError(e.to_string()))
            }
            other => Err(SegmentError(format!("segments of kind {other} do not exist"))),
        }
    }

    /// `out = x Wᵀ (+ bias)` with the first matrix. The bits of a row depend on the row alone.
    ///
    /// # Errors
    /// A table that does not describe a matrix.
    ///
    /// # Panics
    /// When the sizes of `x`, `bias` and `out` do not fit the matrix or each other.
    pub fn matmul(
        &self,
        x: Rows<'_>,
        bias: Option<&[f32]>,
        mut out: RowsMut<'_>,
    ) -> Result<(), SegmentError> {
        assert_eq!(x.rows(), out.rows(), "segments: rows in and out");
        self.multiply(x, &[(0, RowMap::All)], &mut out)?;
        if let Some(bias) = bias {
            assert_eq!(bias.len(), self.n, "segments: bias");
            for r in 0..out.rows() {
                out.row_mut(r).iter_mut().zip(bias).for_each(|(o, b)| *o += b);
            }
        }
        Ok(())
    }

    /// Every expert's matrix times its rows: output row p (a pair) comes from input row `p / fan`; `order` holds the
    /// pairs by expert, `starts` where each expert's begin. A tile is decoded once for up to 64 rows of its expert.
    ///
    /// # Errors
    /// A table that does not describe the matrices of the experts that have rows.
    ///
    /// # Panics
    /// When the rows of input and output do not fit `order`.
    pub fn experts(
        &self,
        x: Rows<'_>,
        order: &[i32],
        starts: &[i32],
        fan: usize,
        mut out: RowsMut<'_>,
    ) -> Result<(), SegmentError> {
        let groups: Vec<Group<'_>> = starts
            .windows(2)
            .map(|w| &order[w[0] as usize..w[1] as usize])
            .enumerate()
            .filter(|(_, ids)| !ids.is_empty())
            .map(|(e, ids)| (e, RowMap::Listed { ids, fan }))
            .collect();
        self.multiply(x, &groups, &mut out)
    }

    fn multiply(&self, x: Rows<'_>, groups: &[Group<'_>], out: &mut RowsMut<'_>) -> Result<(), SegmentError> {
        assert_eq!((x.cols(), out.cols()), (self.k, self.n), "segments: widths of input and output");
        let mut waiting = Vec::new();
        for (group, &(matrix, map)) in groups.iter().enumerate() {
            for s in self.of(matrix)? {
                if s.input > 0 {
                    // It is added to what the segments before it give.
                    trellises(x, groups, &std::mem::take(&mut waiting), out);
                }
                match self.part(&s)? {
                    Part::Trellis(layer) => waiting.push((group, s, layer)),
                    Part::Panels(w) => panels(x, w, map, &s, out),
                }
                if s.input > 0 {
                    trellises(x, groups, &std::mem::take(&mut waiting), out);
                }
            }
        }
        trellises(x, groups, &waiting, out);
        Ok(())
    }
}

/// The columns of a segment's outputs.
fn columns<'o>(out: &'o mut RowsMut<'_>, s: &Segment) -> RowsMut<'o> {
    let (_, rest) = out.reborrow().split_columns_at(s.output as usize);
    rest.split_columns_at(s.outputs as usize).0
}

fn panels(x: Rows<'_>, w: PackedMatrix<'_>, map: RowMap<'_>, s: &Segment, out: &mut RowsMut<'_>) {
    let x = x.columns(s.input as usize, s.inputs as usize);
    let mut out = columns(out, s);
    if s.input == 0 {
        matmul_mapped(x, w, None, map, out);
        return;
    }
    let (rows, cols) = (out.rows(), out.cols());
    let mut more = vec![0.0; rows * cols];
    matmul_mapped(x, w, None, map, RowsMut::new(&mut more, cols));
    for i in 0..map.len(x.rows()) {
        let row = map.output(i);
        out.row_mut(row).iter_mut().zip(&more[row * cols..]).for_each(|(o, v)| *o += v);
    }
}

/// Runs segments of trellises together.
fn trellises(
    x: Rows<'_>,
    groups: &[Group<'_>],
    waiting: &[(usize, Segment, LayerView<'_>)],
    out: &mut RowsMut<'_>,
) {
    if waiting.is_empty() {
        return;
    }
    let options = Options::default();
    // Neighbours that share scales and inputs, the parts of one stored layer, share the rotated rows.
    let key = |(group, s, _): &(usize, Segment, LayerView<'_>)| (*group, s.suh, s.input, s.inputs, s.lead);
    let mut first: Vec<usize> = Vec::new();
    let mut rotation = Vec::with_capacity(waiting.len());
    for (i, item) in waiting.iter().enumerate() {
        if first.last().is_none_or(|&f| key(&waiting[f]) != key(item)) {
            first.push(i);
        }
        rotation.push(first.len() - 1);
    }
    let rotate = |i: usize| {
        let (group, s, layer) = &waiting[i];
        let map = groups[*group].1;
        let x = x.columns(s.input as usize, s.inputs as usize);
        let rows: Vec<&[f32]> = (0..map.len(x.rows())).map(|r| x.row(map.input(r))).collect();
        Rotated::new(rows.into_iter(), s.lead as usize, layer.suh(), options.activations, options.path)
    };
    let mut rotated: Vec<(usize, Option<Rotated>)> = first.into_iter().map(|i| (i, None)).collect();
    let channels: usize = waiting.iter().map(|(_, s, _)| s.k as usize).sum();
    // A rotation is seven steps of additions.
    let work = 8 * channels * x.rows();
    crate::cpu::par::each(rotated.iter_mut(), work, |_, (i, rotated)| *rotated = Some(rotate(*i)));
    let rotated: Vec<Rotated> = rotated.into_iter().filter_map(|(_, rotated)| rotated).collect();
    let jobs: Vec<Job<'_>> = waiting
        .iter()
        .zip(&rotation)
        .map(|((_, s, layer), &rotation)| Job {
            layer: *layer,
            rotated: &rotated[rotation],
            skip: s.skip as usize,
            outputs: s.outputs as usize,
        })
        .collect();
    run(&jobs, options.path, |job, row, column, values| {
        let (group, s, _) = &waiting[job];
        let row = groups[*group].1.output(row);
        let out = &mut out.row_mut(row)[s.output as usize + column..][..values.len()];
        if s.input == 0 {
            out.copy_from_slice(values);
        } else {
            out.iter_mut().zip(values).for_each(|(o, v)| *o += v);
        }
    });
}

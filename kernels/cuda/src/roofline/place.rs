//! Calls of operations on operands that a kernel fills: nothing large is copied from the host.

use plugfold_abi::{
    Addressing, Below, BelowObject, CacheView, Call, DType, MAX_CACHES, MAX_DIMS, MAX_INPUTS, MAX_OUTPUTS,
    MAX_PARAMS, MAX_WEIGHTS, NO_LAYER, OpError, Phase, Provider as _, ProviderObject, RoundTable, Segment,
    Slice, Text, View, Weight, formats,
};

use super::limits::probe;
use crate::error::CudaError;
use crate::kernel::Arg;
use crate::machine::Machine;

/// A matrix that goes in: of random numbers, or of words that matter.
pub(super) struct Input {
    pub rows: usize,
    pub cols: usize,
    pub words: Option<Vec<u32>>,
    pub float: bool,
}

impl Input {
    pub fn random(rows: usize, cols: usize) -> Self {
        Self { rows, cols, words: None, float: true }
    }
    pub fn ints(values: &[i32], cols: usize) -> Self {
        let words = values.iter().map(|v| v.cast_unsigned()).collect();
        Self { rows: values.len() / cols, cols, words: Some(words), float: false }
    }
}

/// A matrix that comes out.
pub(super) struct Output {
    pub rows: usize,
    pub cols: usize,
    pub float: bool,
}

impl Output {
    pub fn floats(rows: usize, cols: usize) -> Self {
        Self { rows, cols, float: true }
    }
    pub fn ints(rows: usize, cols: usize) -> Self {
        Self { rows, cols, float: false }
    }
}

/// A weight operand.
#[derive(Clone, Copy)]
pub(super) enum Stored {
    /// So many numbers.
    Vector(usize),
    /// bf16 panels of a stack of `count` matrices `[n, k]`.
    Panels { n: usize, k: usize, count: usize },
    /// EXL3 at 4 bits, a segment a matrix.
    Trellis { n: usize, k: usize, count: usize },
    /// bf16 rows that are looked up.
    Rows { n: usize, k: usize },
}

/// A cache family of one slot.
pub(super) struct Family {
    pub rows: usize,
    pub row: usize,
    pub buffers: usize,
    pub addressing: Addressing,
}

/// A call.
pub(super) struct Task {
    pub name: String,
    pub op: &'static str,
    pub phase: Phase,
    pub rows: usize,
    /// Position of the first row.
    pub start: usize,
    /// Rows that are kept.
    pub keep: usize,
    pub inputs: Vec<Input>,
    pub outputs: Vec<Output>,
    pub weights: Vec<Stored>,
    pub caches: Vec<Family>,
    pub dims: Vec<usize>,
    pub params: Vec<f32>,
    /// What it has to do at least.
    pub costs: Vec<super::Cost>,
}

/// How words of random bits become operands: bits that stay and bits that are set.
const FLOATS: (u32, u32) = (0x807f_ffff, 0x3e00_0000);
const BF16_PAIRS: (u32, u32) = (0x80ff_80ff, 0x3b00_3b00);
const HALF_PAIRS: (u32, u32) = (0x83ff_83ff, 0x2c00_2c00);
const ANY: (u32, u32) = (!0, 0);

/// Memory of a machine, given back when this goes.
struct Held<'m> {
    machine: &'m dyn Machine,
    all: Vec<u64>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        for at in &self.all {
            self.machine.release(*at);
        }
    }
}

impl Held<'_> {
    fn room(&mut self, bytes: usize) -> Result<u64, CudaError> {
        let at = self.machine.allocate("operands that are timed", bytes.max(4))?;
        self.all.push(at);
        Ok(at)
    }

    fn fill(&self, at: u64, words: usize, (keep, set): (u32, u32)) -> Result<(), CudaError> {
        let args = [
            Arg::Pointer(at),
            Arg::Long(words as u64),
            Arg::Word((at >> 8) as u32),
            Arg::Word(keep),
            Arg::Word(set),
        ];
        let blocks = words.div_ceil(256).clamp(1, 4096) as u32;
        probe(self.machine, "probe_fill", blocks, 256, &args)
    }

    fn random(&mut self, words: usize, bits: (u32, u32)) -> Result<u64, CudaError> {
        let at = self.room(words * 4)?;
        self.fill(at, words, bits)?;
        Ok(at)
    }

    fn words(&mut self, words: &[u32]) -> Result<u64, CudaError> {
        let at = self.room(words.len() * 4)?;
        self.machine.upload(at, bytemuck::cast_slice(words))?;
        Ok(at)
    }

    fn weight(&mut self, stored: Stored) -> Result<Weight, CudaError> {
        let view = |at: u64, rows: usize, cols: usize, dtype| View {
            ptr: at as *mut u8,
            rows: rows as u32,
            cols: cols as u32,
            stride: cols as u32,
            dtype,
        };
        let mut planes = [View::EMPTY; 4];
        let (format, n, k, count) = match stored {
            Stored::Vector(len) => {
                planes[0] = view(self.random(len, FLOATS)?, 1, len, DType::F32);
                (formats::PLAIN_F32, len, 1, 1)
            }
            Stored::Panels { n, k, count } => {
                let each = n.next_multiple_of(16) * k;
                planes[0] = view(self.random(count * each / 2, BF16_PAIRS)?, count, each, DType::Bf16);
                (formats::PANEL16_BF16, n, k, count)
            }
            Stored::Rows { n, k } => {
                planes[0] = view(self.random((n * k).div_ceil(2), BF16_PAIRS)?, n, k, DType::Bf16);
                (formats::ROWS_BF16, n, k, 1)
            }
            Stored::Trellis { n, k, count } => {
                // Lines: for each matrix its words, then the scales that all share.
                let lines = |bytes: usize| bytes.div_ceil(Segment::LINE);
                let (each, suh) = (lines(n * k / 2), lines(k * 2));
                let total = count * each + suh + lines(n * 2);
                let words = total * Segment::LINE / 4;
                let data = self.random(words, ANY)?;
                let scales = data + (count * each * Segment::LINE) as u64;
                self.fill(scales, (total - count * each) * Segment::LINE / 4, HALF_PAIRS)?;
                let (n32, k32) = (n as u32, k as u32);
                let mut table = Vec::with_capacity(count * Segment::WORDS);
                for matrix in 0..count {
                    let at = |line: usize| line as u32;
                    table.extend([matrix as u32, 0, n32, 0, k32, 0, 0, Segment::EXL3, k32, n32, 8, 2]);
                    table.extend([
                        at(matrix * each),
                        at(count * each),
                        at(count * each + suh),
                        Segment::NONE,
                    ]);
                }
                let at = self.words(&table)?;
                planes[0] = view(at, count, Segment::WORDS, DType::U32);
                planes[1] = view(data, total, Segment::LINE / 4, DType::U32);
                (formats::EXL3_SEGMENTS, n, k, count)
            }
        };
        Ok(Weight {
            role: Text::from("timed"),
            format: Text::from(format),
            n: n as u32,
            k: k as u32,
            count: count as u32,
            planes,
        })
    }
}

/// A call whose operands lie in a machine's memory.
pub(super) struct Placed<'t> {
    task: &'t Task,
    inputs: Vec<View>,
    outputs: Vec<View>,
    weights: Vec<Weight>,
    caches: Vec<CacheView>,
    positions: Vec<u32>,
    zeros: Vec<u32>,
    rows: Vec<u32>,
    _memory: Held<'t>,
}

struct Nothing;

impl Below for Nothing {
    fn run(&self, _call: &Call<'_>) -> Result<(), OpError> {
        Err(OpError::new("nothing lies beneath"))
    }
}

impl<'t> Placed<'t> {
    pub fn new(task: &'t Task, machine: &'t dyn Machine) -> Result<Self, CudaError> {
        let mut memory = Held { machine, all: Vec::new() };
        let view = |at: u64, rows: usize, cols: usize, float: bool| View {
            ptr: at as *mut u8,
            rows: rows as u32,
            cols: cols as u32,
            stride: cols as u32,
            dtype: if float { DType::F32 } else { DType::I32 },
        };
        let (mut inputs, mut outputs, mut weights) = (Vec::new(), Vec::new(), Vec::new());
        for i in &task.inputs {
            let at = match &i.words {
                Some(words) => memory.words(words)?,
                None => memory.random(i.rows * i.cols, FLOATS)?,
            };
            inputs.push(view(at, i.rows, i.cols, i.float));
        }
        for o in &task.outputs {
            outputs.push(view(memory.room(o.rows * o.cols * 4)?, o.rows, o.cols, o.float));
        }
        for w in &task.weights {
            weights.push(memory.weight(*w)?);
        }
        let mut caches = Vec::new();
        for f in &task.caches {
            let buffer = f.rows * f.row;
            let at = memory.random(buffer * f.buffers, FLOATS)?;
            caches.push(CacheView {
                base: at as *mut u8,
                slot_stride: (buffer * f.buffers * 4) as u64,
                parity_stride: if f.buffers > 1 { buffer as u64 * 4 } else { 0 },
                row_bytes: f.row as u64 * 4,
                rows: f.rows as u32,
                slots: 1,
                format: Text::from("f32"),
                addressing: f.addressing,
            });
        }
        Ok(Self {
            inputs,
            outputs,
            weights,
            caches,
            positions: (0..task.rows).map(|i| (task.start + i) as u32).collect(),
            zeros: vec![0; task.rows],
            rows: (0..task.rows as u32).collect(),
            task,
            _memory: memory,
        })
    }

    /// Runs the call.
    pub fn run(&self, provider: &ProviderObject) -> Result<(), OpError> {
        let t = self.task;
        let (count, start, keep) = ([t.rows as u32], [t.start as u32], [t.keep as u32]);
        let round = RoundTable {
            tokens: Slice::from(&self.zeros[..]),
            positions: Slice::from(&self.positions[..]),
            row_seq: Slice::from(&self.zeros[..]),
            seq_first: Slice::from(&[0][..]),
            seq_rows: Slice::from(&count[..]),
            seq_start: Slice::from(&start[..]),
            seq_slot: Slice::from(&[0][..]),
            seq_parity: Slice::from(&[0][..]),
            seq_keep: Slice::from(&keep[..]),
            out_rows: Slice::from(&self.rows[..]),
            embeds: Slice::default(),
            fields: Slice::default(),
        };
        let mut call = Call {
            layer: NO_LAYER,
            inputs: [View::EMPTY; MAX_INPUTS],
            outputs: [View::EMPTY; MAX_OUTPUTS],
            weights: [None; MAX_WEIGHTS],
            caches: [CacheView::EMPTY; MAX_CACHES],
            dims: [0; MAX_DIMS],
            params: [0.0; MAX_PARAMS],
            ..Call::of(t.op, t.phase, &round)
        };
        for (to, v) in call.dims.iter_mut().zip(&t.dims) {
            *to = *v as u32;
        }
        call.params[..t.params.len()].copy_from_slice(&t.params);
        call.inputs[..self.inputs.len()].copy_from_slice(&self.inputs);
        call.outputs[..self.outputs.len()].copy_from_slice(&self.outputs);
        call.caches[..self.caches.len()].copy_from_slice(&self.caches);
        call.weights.iter_mut().zip(&self.weights).for_each(|(to, w)| *to = Some(w));
        provider.run(&call, &[0; 64], &BelowObject::lend(&Nothing))
    }
}

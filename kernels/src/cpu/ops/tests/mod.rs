//! The reference providers, called as the engine calls them.

mod refusals;
mod rows;
mod sequences;

use plugfold_abi::{
    Addressing, Below, BelowObject, CacheView, Call, CommObject, DType, MAX_CACHES, MAX_DIMS, MAX_INPUTS,
    MAX_OUTPUTS, MAX_PARAMS, MAX_WEIGHTS, NO_LAYER, OpError, Phase, Provider, ProviderObject, RoundTable,
    Slice, Span, Text, View, Weight, formats,
};

use super::reference;

/// Numbers of one operand.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Data {
    F32(Vec<f32>),
    I32(Vec<i32>),
}

/// An operand: `[rows, cols]` inside rows of `cols + gap`.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Matrix {
    pub data: Data,
    pub rows: usize,
    pub cols: usize,
    gap: usize,
}

impl Matrix {
    pub fn f32(values: &[f32], cols: usize) -> Self {
        Self { data: Data::F32(values.to_vec()), rows: values.len() / cols, cols, gap: 0 }
    }
    pub fn i32(values: &[i32], cols: usize) -> Self {
        Self { data: Data::I32(values.to_vec()), rows: values.len() / cols, cols, gap: 0 }
    }
    pub fn out(rows: usize, cols: usize) -> Self {
        Self::f32(&vec![f32::NAN; rows * cols], cols).with_rows(rows)
    }
    pub fn out_i32(rows: usize, cols: usize) -> Self {
        Self::i32(&vec![-7; rows * cols], cols).with_rows(rows)
    }
    fn with_rows(mut self, rows: usize) -> Self {
        self.rows = rows;
        self
    }

    /// The same numbers with others between the rows, as when an operand is a few columns of a buffer.
    pub fn gapped(&self, gap: usize) -> Self {
        let Data::F32(values) = &self.data else { panic!("f32 only") };
        let data = values.chunks(self.cols).flat_map(|r| r.iter().copied().chain(vec![1e30; gap])).collect();
        Self { data: Data::F32(data), gap, ..*self }
    }

    pub fn values(&self) -> Vec<f32> {
        let Data::F32(values) = &self.data else { panic!("not f32") };
        values.chunks(self.cols + self.gap).flat_map(|r| r[..self.cols].to_vec()).collect()
    }
    pub fn ids(&self) -> &[i32] {
        let Data::I32(values) = &self.data else { panic!("not i32") };
        values
    }

    fn view(&mut self) -> View {
        let (ptr, dtype) = match &mut self.data {
            Data::F32(v) => (v.as_mut_ptr().cast::<u8>(), DType::F32),
            Data::I32(v) => (v.as_mut_ptr().cast::<u8>(), DType::I32),
        };
        let (rows, cols) = (self.rows as u32, self.cols as u32);
        View { ptr, rows, cols, stride: cols + self.gap as u32, dtype }
    }
}

/// A weight of `count` matrices `[n, k]` in f32.
pub(super) struct Held {
    data: Vec<f32>,
    format: &'static str,
    n: usize,
    k: usize,
    count: usize,
}

pub(super) fn plain(data: &[f32]) -> Held {
    Held { data: data.to_vec(), format: formats::PLAIN_F32, n: data.len(), k: 1, count: 1 }
}
pub(super) fn table(data: &[f32], n: usize, k: usize) -> Held {
    Held { data: data.to_vec(), format: formats::ROWS_F32, n, k, count: 1 }
}
pub(super) fn dense(data: &[f32], n: usize, k: usize) -> Held {
    stack(data, n, k, 1)
}
pub(super) fn stack(data: &[f32], n: usize, k: usize, count: usize) -> Held {
    let packed = data.chunks(n * k).flat_map(|w| crate::cpu::math::dense::pack_f32(w, n, k)).collect();
    Held { data: packed, format: formats::PANEL16_F32, n, k, count }
}

impl Held {
    fn weight(&self) -> Weight {
        let cols = (self.data.len() / self.count) as u32;
        let ptr = self.data.as_ptr().cast::<u8>().cast_mut();
        let view = View { ptr, rows: self.count as u32, cols, stride: cols, dtype: DType::F32 };
        Weight {
            role: Text::from("test"),
            format: Text::from(self.format),
            n: self.n as u32,
            k: self.k as u32,
            count: self.count as u32,
            planes: [view, View::EMPTY, View::EMPTY, View::EMPTY],
        }
    }
}

/// A cache family over some slots.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Family {
    pub data: Vec<f32>,
    row: usize,
    rows: usize,
    buffers: usize,
    slots: usize,
    addressing: Addressing,
}

impl Family {
    pub fn new(slots: usize, buffers: usize, rows: usize, row: usize, addressing: Addressing) -> Self {
        let data = vec![0.0; slots * buffers * rows * row];
        Self { data, row, rows, buffers, slots, addressing }
    }
    /// A slot's buffer.
    pub fn part(&self, slot: usize, parity: usize) -> &[f32] {
        let len = self.rows * self.row;
        &self.data[(slot * self.buffers + parity) * len..][..len]
    }
    fn view(&mut self) -> CacheView {
        let buffer = (self.rows * self.row * 4) as u64;
        CacheView {
            base: self.data.as_mut_ptr().cast(),
            slot_stride: buffer * self.buffers as u64,
            parity_stride: if self.buffers > 1 { buffer } else { 0 },
            row_bytes: self.row as u64 * 4,
            rows: self.rows as u32,
            slots: self.slots as u32,
            format: Text::from("f32"),
            addressing: self.addressing,
        }
    }
}

/// A sequence in a round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seq {
    pub slot: u32,
    pub parity: u32,
    pub start: u32,
    pub rows: u32,
    pub keep: u32,
}

/// Everything of one call.
pub(super) struct Run<'a> {
    pub op: &'a str,
    pub phase: Phase,
    pub inputs: Vec<Matrix>,
    pub outputs: Vec<Matrix>,
    pub weights: Vec<Held>,
    pub caches: Vec<&'a mut Family>,
    pub dims: &'a [u32],
    pub params: &'a [f32],
    pub seqs: &'a [Seq],
    pub tokens: Option<Vec<u32>>,
    pub embeds: Vec<usize>,
    pub out_rows: Vec<u32>,
    pub comm: Option<&'a CommObject>,
}

impl<'a> Run<'a> {
    pub fn new(op: &'a str) -> Self {
        Self {
            op,
            phase: Phase::Window,
            inputs: Vec::new(),
            outputs: Vec::new(),
            weights: Vec::new(),
            caches: Vec::new(),
            dims: &[],
            params: &[],
            seqs: &[],
            tokens: None,
            embeds: Vec::new(),
            out_rows: Vec::new(),
            comm: None,
        }
    }

    /// Calls the reference provider.
    pub fn go(&mut self) -> Result<Vec<Matrix>, OpError> {
        let mut first = Vec::new();
        let (mut positions, mut row_seq) = (Vec::new(), Vec::new());
        for (i, s) in self.seqs.iter().enumerate() {
            first.push(positions.len() as u32);
            positions.extend(s.start..s.start + s.rows);
            row_seq.extend(std::iter::repeat_n(i as u32, s.rows as usize));
        }
        let of = |f: fn(&Seq) -> u32| self.seqs.iter().map(f).collect::<Vec<u32>>();
        let (rows, start, slot) = (of(|s| s.rows), of(|s| s.start), of(|s| s.slot));
        let (parity, keep) = (of(|s| s.parity), of(|s| s.keep));
        let tokens = self.tokens.clone().unwrap_or_else(|| vec![0; positions.len()]);
        let round = RoundTable {
            tokens: Slice::from(&tokens[..]),
            positions: Slice::from(&positions[..]),
            row_seq: Slice::from(&row_seq[..]),
            seq_first: Slice::from(&first[..]),
            seq_rows: Slice::from(&rows[..]),
            seq_start: Slice::from(&start[..]),
            seq_slot: Slice::from(&slot[..]),
            seq_parity: Slice::from(&parity[..]),
            seq_keep: Slice::from(&keep[..]),
            out_rows: Slice::from(&self.out_rows[..]),
            embeds: Slice::from(&self.embeds[..]),
            fields: Slice::default(),
        };
        let weights: Vec<Weight> = self.weights.iter().map(Held::weight).collect();
        let mut call = Call {
            op: Text::from(self.op),
            layer: NO_LAYER,
            site: 0,
            phase: self.phase,
            rows: Span::ALL,
            seqs: Span::ALL,
            inputs: [View::EMPTY; MAX_INPUTS],
            outputs: [View::EMPTY; MAX_OUTPUTS],
            weights: [None; MAX_WEIGHTS],
            caches: [CacheView::EMPTY; MAX_CACHES],
            dims: [0; MAX_DIMS],
            params: [0.0; MAX_PARAMS],
            round: &round,
            comm: self.comm,
            knobs: Slice::default(),
        };
        call.dims[..self.dims.len()].copy_from_slice(self.dims);
        call.params[..self.params.len()].copy_from_slice(self.params);
        let mut outputs = self.outputs.clone();
        call.inputs.iter_mut().zip(&mut self.inputs).for_each(|(v, m)| *v = m.view());
        call.outputs.iter_mut().zip(&mut outputs).for_each(|(v, m)| *v = m.view());
        call.weights.iter_mut().zip(&weights).for_each(|(v, w)| *v = Some(w));
        call.caches.iter_mut().zip(&mut self.caches).for_each(|(v, f)| *v = f.view());
        find(self.op).run(&call, &[0; 64], &BelowObject::lend(&Nothing))?;
        Ok(outputs)
    }
}

struct Nothing;
impl Below for Nothing {
    fn run(&self, _call: &Call<'_>) -> Result<(), OpError> {
        Err(OpError::new("nothing lies beneath"))
    }
}

pub(super) fn find(op: &str) -> ProviderObject {
    reference().into_iter().find(|p| p.op().is_ok_and(|o| o == op)).expect("every operation has a provider")
}

/// One sequence in slot 0 from position 0.
pub(super) const fn one(rows: u32) -> Seq {
    Seq { slot: 0, parity: 0, start: 0, rows, keep: 0 }
}

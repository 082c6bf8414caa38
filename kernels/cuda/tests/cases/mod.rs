//! Calls of operations, run by the CPU's reference and by the kernels on a machine: every bit must be equal.

// Each program that includes this uses a part of it.
#![allow(dead_code)]

pub mod products;
pub mod rows;
pub mod sequences;
pub mod vision;

use std::sync::Arc;

use half::{bf16, f16};
use plugfold_abi::{
    Addressing, Below, BelowObject, CacheView, Call, DType, MAX_CACHES, MAX_DIMS, MAX_INPUTS, MAX_OUTPUTS,
    MAX_PARAMS, MAX_WEIGHTS, NO_LAYER, OpError, Phase, Provider, ProviderObject, RoundTable, Slice, Span,
    Text, View, Weight, formats,
};
use plugfold_cuda::{Machine, providers};
use plugfold_kernels::cpu::math::dense::{pack_bf16, pack_f32};

/// Small deterministic numbers.
pub struct Numbers(pub u64);

impl Numbers {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }
    /// Uniform in [-1, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
    /// Below a bound.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.bits() % bound as u64) as usize
    }
}

/// Numbers in (-scale, scale).
pub fn random(seed: u64, n: usize, scale: f32) -> Vec<f32> {
    let mut numbers = Numbers(seed);
    (0..n).map(|_| numbers.uniform() * scale).collect()
}

/// A matrix of 32-bit numbers: `[rows, cols]` inside rows of `cols + gap`.
#[derive(Clone, Debug, PartialEq)]
pub struct Matrix {
    pub words: Vec<u32>,
    pub rows: usize,
    pub cols: usize,
    pub gap: usize,
    pub float: bool,
}

impl Matrix {
    pub fn f32(values: &[f32], cols: usize) -> Self {
        let words = values.iter().map(|v| v.to_bits()).collect();
        Self { words, rows: values.len() / cols, cols, gap: 0, float: true }
    }
    pub fn i32(values: &[i32], cols: usize) -> Self {
        let words = values.iter().map(|v| v.cast_unsigned()).collect();
        Self { words, rows: values.len() / cols, cols, gap: 0, float: false }
    }
    pub fn out(rows: usize, cols: usize) -> Self {
        Self { rows, ..Self::f32(&vec![-77.0; rows * cols], cols) }
    }
    pub fn out_i32(rows: usize, cols: usize) -> Self {
        Self { rows, ..Self::i32(&vec![-77; rows * cols], cols) }
    }
    /// The same numbers with others between the rows.
    pub fn gapped(&self, gap: usize) -> Self {
        let words = self
            .words
            .chunks(self.cols)
            .flat_map(|r| r.iter().copied().chain(vec![0x7149_f2ca; gap]))
            .collect();
        Self { words, gap, ..*self }
    }
    /// Rows of the matrix.
    pub fn range(&self, first: usize, count: usize) -> Self {
        let stride = self.cols + self.gap;
        Self { words: self.words[first * stride..(first + count) * stride].to_vec(), rows: count, ..*self }
    }
    pub fn ints(&self) -> Vec<i32> {
        self.words.iter().map(|w| w.cast_signed()).collect()
    }
    fn view(&self, at: u64) -> View {
        let dtype = if self.float { DType::F32 } else { DType::I32 };
        let (rows, cols, stride) = (self.rows as u32, self.cols as u32, (self.cols + self.gap) as u32);
        View { ptr: at as *mut u8, rows, cols, stride, dtype }
    }
}

/// A plane of a weight: its bytes (in words, so that they are aligned), elements and type.
#[derive(Clone)]
pub struct Plane {
    words: Vec<u128>,
    pub bytes: usize,
    rows: usize,
    dtype: DType,
}

impl Plane {
    pub fn new(bytes: &[u8], rows: usize, dtype: DType) -> Self {
        // One line more: segments' data is aligned to 64 bytes by `weight`.
        let mut words = vec![0u128; bytes.len().div_ceil(16)];
        bytemuck::cast_slice_mut::<u128, u8>(&mut words)[..bytes.len()].copy_from_slice(bytes);
        Self { words, bytes: bytes.len(), rows, dtype }
    }
    fn data(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.bytes]
    }
    fn view(&self, at: u64) -> View {
        let cols = (self.bytes / self.dtype.size() / self.rows) as u32;
        View { ptr: at as *mut u8, rows: self.rows as u32, cols, stride: cols, dtype: self.dtype }
    }
}

/// A weight of `count` matrices `[n, k]`.
#[derive(Clone)]
pub struct Held {
    pub format: &'static str,
    pub n: usize,
    pub k: usize,
    pub count: usize,
    pub planes: Vec<Plane>,
}

impl Held {
    pub fn plain(data: &[f32]) -> Self {
        let plane = Plane::new(bytemuck::cast_slice(data), 1, DType::F32);
        Self { format: formats::PLAIN_F32, n: data.len(), k: 1, count: 1, planes: vec![plane] }
    }
    pub fn rows_f32(data: &[f32], n: usize, k: usize) -> Self {
        let plane = Plane::new(bytemuck::cast_slice(data), n, DType::F32);
        Self { format: formats::ROWS_F32, n, k, count: 1, planes: vec![plane] }
    }
    pub fn rows_bf16(data: &[f32], n: usize, k: usize) -> Self {
        let data: Vec<bf16> = data.iter().map(|v| bf16::from_f32(*v)).collect();
        let plane = Plane::new(bytemuck::cast_slice(&data), n, DType::Bf16);
        Self { format: formats::ROWS_BF16, n, k, count: 1, planes: vec![plane] }
    }
    /// Panels of a stack.
    pub fn panels(seed: u64, n: usize, k: usize, count: usize, narrow: bool) -> Self {
        let data = random(seed, n * k * count, 1.0 / (k as f32).sqrt());
        let plane = if narrow {
            let data: Vec<bf16> = data.iter().map(|v| bf16::from_f32(*v)).collect();
            let packed: Vec<bf16> = data.chunks(n * k).flat_map(|w| pack_bf16(w, n, k)).collect();
            Plane::new(bytemuck::cast_slice(&packed), count, DType::Bf16)
        } else {
            let packed: Vec<f32> = data.chunks(n * k).flat_map(|w| pack_f32(w, n, k)).collect();
            Plane::new(bytemuck::cast_slice(&packed), count, DType::F32)
        };
        let format = if narrow { formats::PANEL16_BF16 } else { formats::PANEL16_F32 };
        Self { format, n, k, count, planes: vec![plane] }
    }
    /// Coded embedding rows of random rings.
    pub fn rows_exl3(seed: u64, n: usize, k: usize, bits: usize) -> Self {
        let (groups, mut numbers) = (k.div_ceil(256), Numbers(seed));
        let mut rings = Vec::new();
        for _ in 0..n * groups {
            rings.extend_from_slice(&f16::from_f32(numbers.uniform()).to_le_bytes());
            rings.extend((0..32 * bits).map(|_| numbers.bits() as u8));
        }
        let signs: Vec<f32> =
            (0..groups * 256).map(|_| if numbers.below(2) == 0 { 1.0 } else { -1.0 }).collect();
        let planes = vec![
            Plane::new(&rings, n, DType::U8),
            Plane::new(bytemuck::cast_slice(&signs), groups, DType::F32),
        ];
        Self { format: formats::EXL3_ROWS, n, k, count: 1, planes }
    }
    fn weight(&self, at: &[u64]) -> Weight {
        let mut planes = [View::EMPTY; 4];
        for ((view, plane), at) in planes.iter_mut().zip(&self.planes).zip(at) {
            *view = plane.view(*at);
        }
        Weight {
            role: Text::from("test"),
            format: Text::from(self.format),
            n: self.n as u32,
            k: self.k as u32,
            count: self.count as u32,
            planes,
        }
    }
}

/// A cache family over some slots.
#[derive(Clone, PartialEq, Debug)]
pub struct Family {
    pub data: Vec<f32>,
    pub row: usize,
    pub rows: usize,
    pub buffers: usize,
    pub slots: usize,
    pub addressing: Addressing,
}

impl Family {
    pub fn new(
        seed: u64,
        slots: usize,
        buffers: usize,
        rows: usize,
        row: usize,
        addressing: Addressing,
    ) -> Self {
        let data = random(seed, slots * buffers * rows * row, 1.0);
        Self { data, row, rows, buffers, slots, addressing }
    }
    fn view(&self, at: u64) -> CacheView {
        let buffer = (self.rows * self.row * 4) as u64;
        CacheView {
            base: at as *mut u8,
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
pub struct Seq {
    pub slot: u32,
    pub parity: u32,
    pub start: u32,
    pub rows: u32,
    pub keep: u32,
}

/// One sequence in slot 0 from position 0.
pub fn one(rows: usize) -> Vec<Seq> {
    vec![Seq { slot: 0, parity: 0, start: 0, rows: rows as u32, keep: rows as u32 }]
}

/// Everything of one call.
#[derive(Clone)]
pub struct Setup {
    pub op: &'static str,
    pub phase: Phase,
    pub inputs: Vec<Matrix>,
    pub outputs: Vec<Matrix>,
    pub weights: Vec<Held>,
    pub caches: Vec<Family>,
    pub dims: Vec<usize>,
    pub params: Vec<f32>,
    pub seqs: Vec<Seq>,
    pub tokens: Vec<u32>,
    /// Rows that stand in for embeddings.
    pub embeds: Vec<Option<Vec<f32>>>,
    pub out_rows: Vec<u32>,
    pub rows: Span,
}

impl Setup {
    pub fn new(op: &'static str) -> Self {
        Self {
            op,
            phase: Phase::Window,
            inputs: Vec::new(),
            outputs: Vec::new(),
            weights: Vec::new(),
            caches: Vec::new(),
            dims: Vec::new(),
            params: Vec::new(),
            seqs: Vec::new(),
            tokens: Vec::new(),
            embeds: Vec::new(),
            out_rows: Vec::new(),
            rows: Span::ALL,
        }
    }
}

/// What a call left behind.
#[derive(Clone, Debug, PartialEq)]
pub struct Result {
    pub outputs: Vec<Matrix>,
    pub caches: Vec<Family>,
}

struct Nothing;
impl Below for Nothing {
    fn run(&self, _call: &Call<'_>) -> std::result::Result<(), OpError> {
        Err(OpError::new("nothing lies beneath"))
    }
}

/// Where the memory of a call is.
trait Memory {
    /// Memory that holds the bytes, aligned to 64.
    fn put(&mut self, bytes: &[u8]) -> u64;
    /// What memory holds now.
    fn get(&self, at: u64, bytes: &mut [u8]);
}

/// A call whose operands lie in memory: to be run as often as one likes.
pub struct Placed<'s> {
    setup: &'s Setup,
    inputs: Vec<u64>,
    outputs: Vec<u64>,
    weights: Vec<Weight>,
    caches: Vec<u64>,
    embeds: Vec<usize>,
    columns: [Vec<u32>; 8],
}

impl<'s> Placed<'s> {
    fn new(setup: &'s Setup, memory: &mut dyn Memory) -> Self {
        let words = |m: &Matrix, memory: &mut dyn Memory| memory.put(bytemuck::cast_slice(&m.words));
        let weights = setup.weights.iter().map(|w| {
            let at: Vec<u64> = w.planes.iter().map(|p| memory.put(p.data())).collect();
            w.weight(&at)
        });
        let weights = weights.collect();
        let mut columns: [Vec<u32>; 8] = Default::default();
        for (i, s) in setup.seqs.iter().enumerate() {
            let first = columns[0].len() as u32;
            columns[0].extend(s.start..s.start + s.rows);
            columns[1].extend(std::iter::repeat_n(i as u32, s.rows as usize));
            for (column, value) in
                columns[2..].iter_mut().zip([first, s.rows, s.start, s.slot, s.parity, s.keep])
            {
                column.push(value);
            }
        }
        Self {
            inputs: setup.inputs.iter().map(|m| words(m, memory)).collect(),
            outputs: setup.outputs.iter().map(|m| words(m, memory)).collect(),
            weights,
            caches: setup.caches.iter().map(|f| memory.put(bytemuck::cast_slice(&f.data))).collect(),
            embeds: setup
                .embeds
                .iter()
                .map(|e| e.as_ref().map_or(0, |e| memory.put(bytemuck::cast_slice(e)) as usize))
                .collect(),
            columns,
            setup,
        }
    }

    /// Runs the call.
    pub fn run(&self, provider: &ProviderObject) -> std::result::Result<(), OpError> {
        let s = self.setup;
        let [positions, row_seq, first, rows, start, slot, parity, keep] = &self.columns;
        let tokens = if s.tokens.is_empty() { vec![0; positions.len()] } else { s.tokens.clone() };
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
            out_rows: Slice::from(&s.out_rows[..]),
            embeds: Slice::from(&self.embeds[..]),
            fields: Slice::default(),
        };
        let mut call = Call {
            layer: NO_LAYER,
            rows: s.rows,
            inputs: [View::EMPTY; MAX_INPUTS],
            outputs: [View::EMPTY; MAX_OUTPUTS],
            weights: [None; MAX_WEIGHTS],
            caches: [CacheView::EMPTY; MAX_CACHES],
            dims: [0; MAX_DIMS],
            params: [0.0; MAX_PARAMS],
            ..Call::of(s.op, s.phase, &round)
        };
        for (to, v) in call.dims.iter_mut().zip(&s.dims) {
            *to = *v as u32;
        }
        call.params[..s.params.len()].copy_from_slice(&s.params);
        call.inputs.iter_mut().zip(&s.inputs).zip(&self.inputs).for_each(|((v, m), at)| *v = m.view(*at));
        call.outputs.iter_mut().zip(&s.outputs).zip(&self.outputs).for_each(|((v, m), at)| *v = m.view(*at));
        call.weights.iter_mut().zip(&self.weights).for_each(|(v, w)| *v = Some(w));
        call.caches.iter_mut().zip(&s.caches).zip(&self.caches).for_each(|((v, f), at)| *v = f.view(*at));
        provider.run(&call, &[0; 64], &BelowObject::lend(&Nothing))
    }

    fn result(&self, memory: &dyn Memory) -> Result {
        let mut result = Result { outputs: self.setup.outputs.clone(), caches: self.setup.caches.clone() };
        for (m, at) in result.outputs.iter_mut().zip(&self.outputs) {
            memory.get(*at, bytemuck::cast_slice_mut(&mut m.words));
        }
        for (f, at) in result.caches.iter_mut().zip(&self.caches) {
            memory.get(*at, bytemuck::cast_slice_mut(&mut f.data));
        }
        result
    }
}

/// This process's memory.
#[derive(Default)]
struct Host(Vec<Vec<[u64; 8]>>);

impl Memory for Host {
    fn put(&mut self, bytes: &[u8]) -> u64 {
        let mut held = vec![[0u64; 8]; bytes.len().div_ceil(64) + 1];
        let skip = (held.as_ptr() as usize).wrapping_neg() % 64;
        bytemuck::cast_slice_mut::<_, u8>(&mut held)[skip..skip + bytes.len()].copy_from_slice(bytes);
        let at = held.as_ptr() as u64 + skip as u64;
        self.0.push(held);
        at
    }
    fn get(&self, at: u64, bytes: &mut [u8]) {
        // SAFETY: `at` came from `put` with as many bytes, and what was put is held.
        bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(at as *const u8, bytes.len()) });
    }
}

struct OnMachine<'m>(&'m dyn Machine);

impl Memory for OnMachine<'_> {
    fn put(&mut self, bytes: &[u8]) -> u64 {
        self.0.keep(bytes).expect("memory")
    }
    fn get(&self, at: u64, bytes: &mut [u8]) {
        self.0.download(at, bytes).expect("a download");
    }
}

/// The kernels' providers on a machine.
pub struct Kernels {
    machine: Arc<dyn Machine>,
    providers: Vec<ProviderObject>,
}

fn find<'p>(all: &'p [ProviderObject], op: &str) -> &'p ProviderObject {
    all.iter().find(|p| p.op().is_ok_and(|o| o == op)).expect("every operation has a provider")
}

impl Kernels {
    pub fn new(machine: Arc<dyn Machine>) -> Self {
        Self { providers: providers(&machine), machine }
    }
    pub fn machine(&self) -> &dyn Machine {
        &*self.machine
    }
    /// The call's operands in the machine's memory, and its provider.
    pub fn place<'s>(&self, setup: &'s Setup) -> (Placed<'s>, &ProviderObject) {
        (Placed::new(setup, &mut OnMachine(&*self.machine)), find(&self.providers, setup.op))
    }
    /// What the kernels make of a call.
    pub fn run(&self, setup: &Setup) -> std::result::Result<Result, OpError> {
        let (placed, provider) = self.place(setup);
        placed.run(provider)?;
        Ok(placed.result(&OnMachine(&*self.machine)))
    }
    /// Runs a call on both and compares every bit.
    ///
    /// # Errors
    /// The first difference, or what either says.
    pub fn compare(&self, setup: &Setup) -> std::result::Result<Result, String> {
        let want = reference(setup).map_err(|e| format!("the reference: {e}"))?;
        let got = self.run(setup).map_err(|e| format!("the kernels: {e}"))?;
        same(&got, &want)?;
        Ok(got)
    }
}

/// What the CPU's reference makes of a call.
pub fn reference(setup: &Setup) -> std::result::Result<Result, OpError> {
    let mut memory = Host::default();
    let placed = Placed::new(setup, &mut memory);
    let mut all = plugfold_kernels::cpu::reference();
    all.extend(plugfold_kernels::cpu::tower());
    placed.run(find(&all, setup.op))?;
    Ok(placed.result(&memory))
}

/// Compares every bit of two results; bits that mean no number are equal.
///
/// # Errors
/// How many differ, and the first.
pub fn same(got: &Result, want: &Result) -> std::result::Result<(), String> {
    for (i, (got, want)) in got.outputs.iter().zip(&want.outputs).enumerate() {
        words(&format!("output {i}"), &got.words, &want.words, got.cols + got.gap, got.float)?;
    }
    for (i, (got, want)) in got.caches.iter().zip(&want.caches).enumerate() {
        words(
            &format!("cache {i}"),
            bytemuck::cast_slice(&got.data),
            bytemuck::cast_slice(&want.data),
            got.row,
            true,
        )?;
    }
    Ok(())
}

fn words(
    what: &str,
    got: &[u32],
    want: &[u32],
    stride: usize,
    float: bool,
) -> std::result::Result<(), String> {
    let nan = |w: u32| float && f32::from_bits(w).is_nan();
    let differ = |(g, w): &(&u32, &u32)| *g != *w && !(nan(**g) && nan(**w));
    let count = got.iter().zip(want).filter(differ).count();
    let Some(at) = got.iter().zip(want).position(|p| differ(&p)) else { return Ok(()) };
    let show = |w: u32| if float { format!("{}", f32::from_bits(w)) } else { w.cast_signed().to_string() };
    Err(format!(
        "{what}: {count} of {} differ, first row {} column {}: {} ({:#x}) for {} ({:#x})",
        got.len(),
        at / stride.max(1),
        at % stride.max(1),
        show(got[at]),
        got[at],
        show(want[at]),
        want[at]
    ))
}

/// Each row of a call of `dense` or `mla.dense` as a call of its own: the row, and the call.
pub fn alone(setup: &Setup) -> Vec<(usize, Setup)> {
    let mut all = Vec::new();
    if setup.rows != Span::ALL || !["dense", "mla.dense"].contains(&setup.op) {
        return all;
    }
    for s in &setup.seqs {
        for i in 0..s.rows {
            let row = all.len();
            let mut one = setup.clone();
            one.inputs[0] = setup.inputs[0].range(row, 1);
            one.outputs[0] = setup.outputs[0].range(row, 1);
            one.seqs = vec![Seq { start: s.start + i, rows: 1, keep: 1, ..*s }];
            all.push((row, one));
        }
    }
    all
}

impl Kernels {
    /// Whether rows have the bits in company that they have alone.
    ///
    /// # Errors
    /// The first row that does not.
    pub fn compare_alone(&self, setup: &Setup) -> std::result::Result<(), String> {
        let parts = alone(setup);
        if parts.is_empty() {
            return Ok(());
        }
        let together = self.run(setup).map_err(|e| e.to_string())?;
        for (row, part) in parts {
            let got = self.run(&part).map_err(|e| e.to_string())?;
            let want = together.outputs[0].range(row, 1);
            let (got, want) = (
                Result { outputs: got.outputs, caches: vec![] },
                Result { outputs: vec![want], caches: vec![] },
            );
            same(&got, &want).map_err(|e| format!("row {row} alone: {e}"))?;
        }
        Ok(())
    }
}

/// A named set of calls.
pub struct Case {
    pub name: &'static str,
    pub setups: fn() -> Vec<Setup>,
}

/// All cases.
pub fn all() -> Vec<Case> {
    let all = [rows::CASES, products::CASES, sequences::CASES, vision::CASES].concat();
    all.into_iter().map(|(name, setups)| Case { name, setups }).collect()
}

/// How a table of cases is written.
pub type Entry = (&'static str, fn() -> Vec<Setup>);

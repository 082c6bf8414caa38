//! The tower on a device: weights and rows lie in its memory, every operation is a call of its providers, and the bits are
//! the host's.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use plugfold_abi::{
    Below, BelowObject, Call, DType, OpError, Phase, Provider as _, ProviderObject, RoundTable, Slice, Span,
    Text, View, Weight, formats,
};
use plugfold_kernels::cpu::math::vision::{Grid, MERGER_EPS, Shape, angles};
use plugfold_kernels::device::{Device, DeviceError, Memory};

use super::{Matrix, Panels, TowerError, Weights};

/// Patches that go through a block's wide rows at a time: what a large image takes is bounded by its narrow ones.
const PIECE: usize = 1024;

/// Numbers of a norm.
struct Vector {
    memory: Memory,
    len: usize,
}

/// A matrix in panels, and its bias.
struct Placed {
    panels: Memory,
    bf16: bool,
    n: usize,
    k: usize,
    bias: Option<Vector>,
}

struct Block {
    norm1: Vector,
    qkv: Placed,
    q_norm: Vector,
    k_norm: Vector,
    proj: Placed,
    norm2: Vector,
    gate_up: Placed,
    down: Placed,
}

/// A tower whose weights lie on a device.
pub(super) struct OnDevice {
    device: Arc<dyn Device>,
    providers: HashMap<String, ProviderObject>,
    shape: Shape,
    patch: Placed,
    blocks: Vec<Block>,
    post_norm: Vector,
    downsample: Placed,
    merger: Placed,
    merger_norm: Vector,
    merger_norm_bias: Vector,
    merger_gate_up: Placed,
    merger_down: Placed,
    /// Operations of a device share memory for what lies between their kernels: one image at a time.
    turn: Mutex<()>,
}

/// Rows in the device's memory.
struct Rows {
    memory: Memory,
    cols: usize,
}

impl Rows {
    fn new(device: &Arc<dyn Device>, rows: usize, cols: usize) -> Result<Self, DeviceError> {
        Ok(Self { memory: Memory::new(Some(device), "rows of an image", rows * cols * 4)?, cols })
    }
    fn holding(device: &Arc<dyn Device>, values: &[f32], cols: usize) -> Result<Self, DeviceError> {
        let memory = Memory::holding(device, "patches of an image", bytemuck::cast_slice(values))?;
        Ok(Self { memory, cols })
    }
    /// So many rows from `first` on.
    fn view(&self, first: usize, rows: usize) -> View {
        self.cut(first, rows, self.cols)
    }
    /// The same, as if rows were `cols` wide.
    fn cut(&self, first: usize, rows: usize, cols: usize) -> View {
        assert!((first + rows) * cols * 4 <= self.memory.len(), "rows {first} and {rows} more");
        let ptr = self.memory.address().wrapping_add(first * cols * 4);
        View { ptr, rows: rows as u32, cols: cols as u32, stride: cols as u32, dtype: DType::F32 }
    }
}

/// Nothing lies beneath what a device provides.
struct Nothing;

impl Below for Nothing {
    fn run(&self, _: &Call<'_>) -> Result<(), OpError> {
        Err(OpError::new("nothing lies beneath a device's own provider"))
    }
}

/// The rows of a forward: frames are sequences.
struct Table {
    zeros: Vec<u32>,
    positions: Vec<u32>,
    row_seq: Vec<u32>,
    first: Vec<u32>,
    count: Vec<u32>,
}

impl Table {
    fn new(frames: impl Iterator<Item = usize>) -> Self {
        let mut this = Self {
            zeros: Vec::new(),
            positions: Vec::new(),
            row_seq: Vec::new(),
            first: Vec::new(),
            count: Vec::new(),
        };
        for (index, rows) in frames.enumerate() {
            this.first.push(this.positions.len() as u32);
            this.count.push(rows as u32);
            this.positions.extend(0..rows as u32);
            this.row_seq.extend(std::iter::repeat_n(index as u32, rows));
        }
        this.zeros = vec![0; this.positions.len().max(this.first.len())];
        this
    }
    fn rows(&self) -> usize {
        self.positions.len()
    }
    fn round(&self) -> RoundTable<'_> {
        let (rows, seqs) =
            (Slice::from(&self.zeros[..self.rows()]), Slice::from(&self.zeros[..self.first.len()]));
        RoundTable {
            tokens: rows,
            positions: Slice::from(&self.positions[..]),
            row_seq: Slice::from(&self.row_seq[..]),
            seq_first: Slice::from(&self.first[..]),
            seq_rows: Slice::from(&self.count[..]),
            seq_start: seqs,
            seq_slot: seqs,
            seq_parity: seqs,
            seq_keep: seqs,
            out_rows: Slice::default(),
            embeds: Slice::default(),
            fields: Slice::default(),
        }
    }
    /// Stretches of rows, each a call's.
    fn pieces(&self) -> impl Iterator<Item = Range<usize>> {
        let rows = self.rows();
        (0..rows).step_by(PIECE).map(move |first| first..rows.min(first + PIECE))
    }
}

fn vector(device: &Arc<dyn Device>, values: &[f32]) -> Result<Vector, DeviceError> {
    let memory = Memory::holding(device, "the vision tower", bytemuck::cast_slice(values))?;
    Ok(Vector { memory, len: values.len() })
}

fn placed(device: &Arc<dyn Device>, matrix: &Matrix) -> Result<Placed, DeviceError> {
    let (bytes, bf16): (&[u8], bool) = match &matrix.panels {
        Panels::Bf16(v) => (bytemuck::cast_slice(v), true),
        Panels::F32(v) => (bytemuck::cast_slice(v), false),
    };
    let panels = Memory::holding(device, "the vision tower", bytes)?;
    let bias = matrix.bias.as_deref().map(|b| vector(device, b)).transpose()?;
    Ok(Placed { panels, bf16, n: matrix.n, k: matrix.k, bias })
}

impl Vector {
    fn weight(&self) -> Weight {
        let (ptr, cols) = (self.memory.address(), self.len as u32);
        let plane = View { ptr, rows: 1, cols, stride: cols, dtype: DType::F32 };
        weight(formats::PLAIN_F32, self.len, 1, plane)
    }
}

impl Placed {
    fn weight(&self) -> Weight {
        let (format, dtype) =
            if self.bf16 { (formats::PANEL16_BF16, DType::Bf16) } else { (formats::PANEL16_F32, DType::F32) };
        let (ptr, cols) = (self.panels.address(), (self.n.next_multiple_of(16) * self.k) as u32);
        weight(format, self.n, self.k, View { ptr, rows: 1, cols, stride: cols, dtype })
    }
}

fn weight(format: &'static str, n: usize, k: usize, plane: View) -> Weight {
    let mut planes = [View::EMPTY; 4];
    planes[0] = plane;
    let (role, format) = (Text::from("vision"), Text::from(format));
    Weight { role, format, n: n as u32, k: k as u32, count: 1, planes }
}

impl OnDevice {
    /// Brings weights to a device.
    pub fn new(device: &Arc<dyn Device>, host: &Weights) -> Result<Self, TowerError> {
        let put = |v: &[f32]| vector(device, v);
        let matrix = |m: &Matrix| placed(device, m);
        let mut blocks = Vec::with_capacity(host.blocks.len());
        for b in &host.blocks {
            blocks.push(Block {
                norm1: put(&b.norm1)?,
                qkv: matrix(&b.qkv)?,
                q_norm: put(&b.q_norm)?,
                k_norm: put(&b.k_norm)?,
                proj: matrix(&b.proj)?,
                norm2: put(&b.norm2)?,
                gate_up: matrix(&b.gate_up)?,
                down: matrix(&b.down)?,
            });
        }
        let mut providers = HashMap::new();
        for provider in device.providers() {
            providers.insert(provider.op()?.to_string(), provider);
        }
        Ok(Self {
            device: device.clone(),
            providers,
            shape: host.shape,
            patch: matrix(&host.patch)?,
            blocks,
            post_norm: put(&host.post_norm)?,
            downsample: matrix(&host.downsample)?,
            merger: matrix(&host.merger)?,
            merger_norm: put(&host.merger_norm)?,
            merger_norm_bias: put(&host.merger_norm_bias)?,
            merger_gate_up: matrix(&host.merger_gate_up)?,
            merger_down: matrix(&host.merger_down)?,
            turn: Mutex::new(()),
        })
    }

    fn call(
        &self,
        op: &str,
        table: &Table,
        rows: Range<usize>,
        inputs: &[View],
        outputs: &[View],
        weights: &[&Weight],
        dims: &[usize],
        params: &[f32],
    ) -> Result<(), TowerError> {
        let round = table.round();
        let mut call = Call::of(op, Phase::Prefill, &round);
        call.rows = Span { start: rows.start as u32, end: rows.end as u32 };
        call.inputs[..inputs.len()].copy_from_slice(inputs);
        call.outputs[..outputs.len()].copy_from_slice(outputs);
        call.weights.iter_mut().zip(weights).for_each(|(to, w)| *to = Some(*w));
        call.dims.iter_mut().zip(dims).for_each(|(to, v)| *to = *v as u32);
        call.params[..params.len()].copy_from_slice(params);
        let provider = self
            .providers
            .get(op)
            .ok_or_else(|| OpError::new(format!("{op}: the device has no provider")))?;
        Ok(provider.run(&call, &[0; 64], &BelowObject::lend(&Nothing))?)
    }

    /// `x` times a matrix, with its bias.
    fn product(
        &self,
        t: &Table,
        rows: &Range<usize>,
        m: &Placed,
        x: View,
        out: View,
    ) -> Result<(), TowerError> {
        let (panels, bias) = (m.weight(), m.bias.as_ref().map(Vector::weight));
        let weights: Vec<&Weight> = std::iter::once(&panels).chain(&bias).collect();
        self.call("dense", t, rows.clone(), &[x], &[out], &weights, &[m.n, m.k], &[])
    }

    fn norm(&self, t: &Table, rows: &Range<usize>, w: &Vector, x: View, out: View) -> Result<(), TowerError> {
        self.call("norm", t, rows.clone(), &[x], &[out], &[&w.weight()], &[w.len], &[self.shape.eps])
    }

    fn act(
        &self,
        t: &Table,
        rows: &Range<usize>,
        width: usize,
        x: View,
        out: View,
    ) -> Result<(), TowerError> {
        self.call("mlp.act", t, rows.clone(), &[x], &[out], &[], &[width], &[self.shape.clamp])
    }

    /// `x += y`: each number is read and written by one thread.
    fn add(&self, t: &Table, rows: &Range<usize>, x: View, y: View) -> Result<(), TowerError> {
        self.call("residual", t, rows.clone(), &[x, y], &[x], &[], &[x.cols as usize, 1], &[])
    }

    /// The rows before the merger, and their table.
    fn rows_before(&self, patches: &[f32], grids: &[Grid]) -> Result<(Rows, Table), TowerError> {
        let Shape { width, heads, merge, eps, theta, .. } = self.shape;
        let (dim, places) = (width / heads, merge * merge);
        let t = Table::new(grids.iter().flat_map(|g| std::iter::repeat_n(g.frame(), g.frames)));
        let (d, all, piece) = (&self.device, t.rows(), PIECE.min(t.rows()));
        let patches = Rows::holding(d, patches, self.patch.k)?;
        let angles = Rows::holding(d, &angles(grids, merge, dim, theta), dim)?;
        let new = |rows, cols| Rows::new(d, rows, cols);
        let (x, q, kv, seen) = (new(all, width)?, new(all, width)?, new(all, 2 * width)?, new(all, width)?);
        let inner = self.blocks.iter().map(|b| b.down.k).max().unwrap_or(0);
        let (narrow, wide) = (new(piece, width)?, new(piece, (3 * width).max(2 * inner))?);
        let active = new(piece, inner)?;
        for r in t.pieces() {
            self.product(&t, &r, &self.patch, patches.view(r.start, r.len()), x.view(r.start, r.len()))?;
        }
        for b in &self.blocks {
            for r in t.pieces() {
                let (here, few) = (x.view(r.start, r.len()), narrow.view(0, r.len()));
                let qkv = wide.cut(0, r.len(), 3 * width);
                self.norm(&t, &r, &b.norm1, here, few)?;
                self.product(&t, &r, &b.qkv, few, qkv)?;
                let out = [q.view(r.start, r.len()), kv.view(r.start, r.len())];
                let turns = angles.view(r.start, r.len());
                let norms = [&b.q_norm.weight(), &b.k_norm.weight()];
                self.call("vision.rotate", &t, r, &[qkv, turns], &out, &norms, &[heads, dim], &[eps])?;
            }
            let (rows, scale) = ([q.view(0, all), kv.view(0, all)], 1.0 / (dim as f32).sqrt());
            let out = [seen.view(0, all)];
            self.call("vision.attend", &t, 0..all, &rows, &out, &[], &[heads, dim], &[scale])?;
            for r in t.pieces() {
                let (here, few) = (x.view(r.start, r.len()), narrow.view(0, r.len()));
                self.product(&t, &r, &b.proj, seen.view(r.start, r.len()), few)?;
                self.add(&t, &r, here, few)?;
                self.norm(&t, &r, &b.norm2, here, few)?;
                let inner = b.down.k;
                let (hidden, active) = (wide.cut(0, r.len(), 2 * inner), active.cut(0, r.len(), inner));
                self.product(&t, &r, &b.gate_up, few, hidden)?;
                self.act(&t, &r, inner, hidden, active)?;
                self.product(&t, &r, &b.down, active, few)?;
                self.add(&t, &r, here, few)?;
            }
        }
        self.norm(&t, &(0..all), &self.post_norm, x.view(0, all), seen.view(0, all))?;
        let t = Table::new(std::iter::once(all / places));
        let groups = q.cut(0, t.rows(), width * places);
        let dims = [width, places];
        self.call("vision.gather", &t, 0..t.rows(), &[seen.view(0, all)], &[groups], &[], &dims, &[])?;
        let down = Rows::new(d, t.rows(), self.downsample.n)?;
        self.product(&t, &(0..t.rows()), &self.downsample, groups, down.view(0, t.rows()))?;
        Ok((down, t))
    }

    /// As `VisionTower::downsampled`, of patches that fit their grids.
    pub fn downsampled(&self, patches: &[f32], grids: &[Grid]) -> Result<Vec<f32>, TowerError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (rows, table) = self.rows_before(patches, grids)?;
        read(&rows, table.rows())
    }

    /// As `VisionTower::rows`, of patches that fit their grids.
    pub fn rows(&self, patches: &[f32], grids: &[Grid]) -> Result<Vec<f32>, TowerError> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let (down, t) = self.rows_before(patches, grids)?;
        let (width, inner, piece) = (self.merger.n, self.merger_down.k, PIECE.min(t.rows()));
        let new = |rows, cols| Rows::new(&self.device, rows, cols);
        let (z, active) = (new(piece, width)?, new(piece, width)?);
        let (hidden, short) = (new(piece, 2 * inner)?, new(piece, inner)?);
        let out = new(t.rows(), self.merger_down.n)?;
        for r in t.pieces() {
            let n = r.len();
            self.product(&t, &r, &self.merger, down.view(r.start, n), z.view(0, n))?;
            let norms = [&self.merger_norm.weight(), &self.merger_norm_bias.weight()];
            let (from, to) = ([z.view(0, n)], [active.view(0, n)]);
            self.call("vision.gelu", &t, r.clone(), &from, &to, &norms, &[width], &[MERGER_EPS])?;
            self.product(&t, &r, &self.merger_gate_up, active.view(0, n), hidden.view(0, n))?;
            self.act(&t, &r, inner, hidden.view(0, n), short.view(0, n))?;
            self.product(&t, &r, &self.merger_down, short.view(0, n), out.view(r.start, n))?;
        }
        read(&out, t.rows())
    }
}

fn read(rows: &Rows, count: usize) -> Result<Vec<f32>, TowerError> {
    let mut values = vec![0.0f32; count * rows.cols];
    rows.memory.read(0, bytemuck::cast_slice_mut(&mut values))?;
    Ok(values)
}

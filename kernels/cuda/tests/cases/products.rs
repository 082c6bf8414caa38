//! Products with weights.

use plugfold_abi::{DType, Segment, formats};

use super::rows::ids;
use super::{Entry, Held, Matrix, Numbers, Plane, Setup, one, random};

pub const CASES: &[Entry] = &[
    ("dense, few rows", few),
    ("dense, many rows", many),
    ("dense, long k and few outputs", long),
    ("hc.dots", hc_dots),
    ("head and moe.logits", others),
    ("experts", experts),
    ("dense in exl3, every rate and codebook", rates),
    ("dense in exl3, wide and long", large),
    ("dense in exl3, many rows", tall),
    ("dense in segments", segments),
    ("experts in exl3", coded_experts),
];

fn dense(rows: usize, n: usize, k: usize, narrow: bool, bias: bool) -> Setup {
    let mut weights = vec![Held::panels(3, n, k, 1, narrow)];
    if bias {
        weights.push(Held::plain(&random(4, n, 1.0)));
    }
    Setup {
        inputs: vec![Matrix::f32(&random(rows as u64, rows * k, 1.0), k)],
        outputs: vec![Matrix::out(rows, n)],
        weights,
        dims: vec![n, k],
        seqs: one(rows),
        ..Setup::new("dense")
    }
}

fn few() -> Vec<Setup> {
    let mut all = Vec::new();
    for rows in [1, 2, 3, 5, 8, 16] {
        for narrow in [true, false] {
            all.push(dense(rows, 40, 600, narrow, rows % 2 == 1));
        }
    }
    // Sizes that are no multiples of anything, and rows inside a wider buffer.
    let mut odd = dense(3, 17, 259, true, true);
    odd.inputs[0] = odd.inputs[0].gapped(3);
    odd.outputs[0] = odd.outputs[0].gapped(1);
    all.extend([odd, dense(2, 1, 1, false, false), dense(1, 130, 4, true, false)]);
    all
}

fn many() -> Vec<Setup> {
    let mut odd = dense(70, 37, 270, false, true);
    odd.inputs[0] = odd.inputs[0].gapped(1);
    vec![dense(17, 80, 300, true, true), odd, dense(130, 16, 513, true, false)]
}

fn long() -> Vec<Setup> {
    let mut all = vec![
        dense(1, 24, 4096, true, true),
        dense(5, 24, 2500, false, false),
        dense(3, 20, 2310, true, false),
    ];
    // Three panels, so that a pair has only one; a chain of one number; more chains than are added at a time.
    all.extend([dense(6, 48, 513, false, true), dense(1, 3, 33 * 256, true, false)]);
    // Rows that do not start on multiples of 16 bytes.
    let mut odd = dense(2, 70, 771, true, true);
    odd.inputs[0] = odd.inputs[0].gapped(3);
    odd.outputs[0] = odd.outputs[0].gapped(1);
    all.push(odd);
    all
}

fn hc_dots() -> Vec<Setup> {
    [
        (1, 4, 640, true),
        (3, 4, 128, true),
        (2, 2, 100, false),
        // More numbers than a ring holds; panels without a neighbour and more rows than a block has; one odd stream.
        (1, 4, 2400, false),
        (9, 8, 37, true),
        (2, 1, 35, false),
    ]
    .into_iter()
    .map(|(rows, n, d, narrow)| Setup {
        inputs: vec![Matrix::f32(&random(1, rows * n * d, 1.0), n * d)],
        outputs: vec![Matrix::out(rows, (2 + n) * n + 1)],
        weights: vec![Held::panels(2, (2 + n) * n, n * d, 1, narrow)],
        dims: vec![n, d],
        seqs: one(rows),
        ..Setup::new("hc.dots")
    })
    .collect()
}

fn others() -> Vec<Setup> {
    let head = Setup { op: "head", seqs: one(9), out_rows: vec![1, 4, 8], ..dense(3, 50, 128, true, false) };
    let logits = Setup { op: "moe.logits", ..dense(4, 16, 128, true, false) };
    vec![head, logits]
}

/// `moe.up` and `moe.down` over a stack.
fn stacks(
    rows: usize,
    e: usize,
    k: usize,
    (n, width): (usize, usize),
    stack: &dyn Fn(usize, usize) -> Held,
) -> Vec<Setup> {
    let ids = ids(rows as u64, rows, e, k);
    let mut starts = vec![0; e + 1];
    let mut order: Vec<i32> = (0..(rows * k) as i32).collect();
    order.sort_by_key(|p| ids[*p as usize]);
    for id in &ids {
        starts[*id as usize + 1] += 1;
    }
    for i in 0..e {
        starts[i + 1] += starts[i];
    }
    let call = |op, x: usize, width_in: usize, width_out: usize| Setup {
        inputs: vec![
            Matrix::f32(&random(7, x * width_in, 1.0), width_in),
            Matrix::i32(&order, 1),
            Matrix::i32(&starts, 1),
        ],
        outputs: vec![Matrix::out(rows * k, width_out)],
        weights: vec![stack(width_out, width_in)],
        dims: vec![e, k, width, n],
        seqs: one(rows),
        ..Setup::new(op)
    };
    vec![call("moe.up", rows, n, 2 * width), call("moe.down", rows * k, width, n)]
}

fn experts() -> Vec<Setup> {
    let mut all = Vec::new();
    for (rows, e, k, sizes, narrow) in [
        (1, 16, 4, (128, 64), true),
        (9, 8, 3, (100, 36), false),
        (40, 5, 2, (128, 40), true),
        (90, 3, 2, (64, 24), true),
    ] {
        all.extend(stacks(rows, e, k, sizes, &|n, k| Held::panels(9, n, k, e, narrow)));
    }
    all
}

/// A weight of segments under way: table and lines.
#[derive(Default)]
struct Parts {
    table: Vec<u32>,
    lines: Vec<u8>,
}

/// One segment: which matrix and outputs, and which inputs.
#[derive(Clone, Copy)]
struct At {
    matrix: usize,
    output: usize,
    outputs: usize,
    input: usize,
    inputs: usize,
}

impl Parts {
    fn line(&mut self, bytes: &[u8]) -> u32 {
        let at = self.lines.len() / Segment::LINE;
        self.lines.extend_from_slice(bytes);
        self.lines.resize(self.lines.len().next_multiple_of(Segment::LINE), 0);
        at as u32
    }

    fn scales(&mut self, numbers: &mut Numbers, n: usize) -> u32 {
        let scales: Vec<half::f16> = (0..n).map(|_| half::f16::from_f32(numbers.uniform() * 0.1)).collect();
        self.line(bytemuck::cast_slice(&scales))
    }

    /// A trellis of random words; `again`: with the input scales of the segment before.
    fn trellis(
        &mut self,
        at: At,
        lead: usize,
        skip: usize,
        halves: usize,
        codebook: u32,
        bias: bool,
        again: bool,
    ) {
        let mut numbers = Numbers(self.table.len() as u64 + 1);
        let (k, n) = ((lead + at.inputs).next_multiple_of(128), (skip + at.outputs).next_multiple_of(128));
        let words: Vec<u32> = (0..k / 16 * (n / 16) * 4 * halves).map(|_| numbers.bits() as u32).collect();
        let data = self.line(bytemuck::cast_slice(&words));
        let suh = if again { self.table[self.table.len() - 3] } else { self.scales(&mut numbers, k) };
        let svh = self.scales(&mut numbers, n);
        let biases = random(5, n, 1.0);
        let bias = if bias { self.line(bytemuck::cast_slice(&biases)) } else { Segment::NONE };
        let fields = [at.matrix, at.output, at.outputs, at.input, at.inputs, lead, skip, 0, k, n, halves];
        self.table.extend(fields.map(|v| v as u32));
        self.table.extend([codebook, data, suh, svh, bias]);
    }

    fn panels(&mut self, at: At, narrow: bool) {
        let held = Held::panels(self.table.len() as u64, at.outputs, at.inputs, 1, narrow);
        let data = self.line(held.planes[0].data());
        let kind = if narrow { Segment::BF16 } else { Segment::F32 } as usize;
        let fields =
            [at.matrix, at.output, at.outputs, at.input, at.inputs, 0, 0, kind, at.inputs, at.outputs, 0];
        self.table.extend(fields.map(|v| v as u32));
        self.table.extend([0, data, Segment::NONE, Segment::NONE, Segment::NONE]);
    }

    fn held(self, n: usize, k: usize, count: usize) -> Held {
        let planes = vec![
            Plane::new(bytemuck::cast_slice(&self.table), self.table.len() / 16, DType::U32),
            Plane::new(&self.lines, self.lines.len() / Segment::LINE, DType::U32),
        ];
        Held { format: formats::EXL3_SEGMENTS, n, k, count, planes }
    }
}

fn coded(rows: usize, n: usize, k: usize, held: Held, bias: bool) -> Setup {
    let mut setup = dense(rows, n, k, true, bias);
    setup.weights[0] = held;
    setup
}

/// A matrix of one trellis.
fn trellis(n: usize, k: usize, halves: usize, codebook: u32) -> Held {
    let mut parts = Parts::default();
    parts.trellis(
        At { matrix: 0, output: 0, outputs: n, input: 0, inputs: k },
        0,
        0,
        halves,
        codebook,
        false,
        false,
    );
    parts.held(n, k, 1)
}

/// A stack of trellises, gate and up apart if `split`.
fn trellises(n: usize, k: usize, count: usize, split: bool) -> Held {
    let mut parts = Parts::default();
    for matrix in 0..count {
        let pieces = if split { 2 } else { 1 };
        for piece in 0..pieces {
            let at = At { matrix, output: piece * n / pieces, outputs: n / pieces, input: 0, inputs: k };
            parts.trellis(at, 0, 0, 8, 2, false, false);
        }
    }
    parts.held(n, k, count)
}

fn rates() -> Vec<Setup> {
    let mut all = Vec::new();
    for halves in [2usize, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16] {
        for codebook in 0..3 {
            if halves.is_multiple_of(2) || codebook == 2 {
                all.push(coded(1 + halves % 3, 128, 256, trellis(128, 256, halves, codebook), false));
            }
        }
    }
    all
}

/// So many outputs that a warp takes whole columns, and more inputs than a block rotates at a time.
fn large() -> Vec<Setup> {
    let wide = trellis(264 * 64, 128, 8, 2);
    let mut all: Vec<Setup> = [1, 2, 5].map(|rows| coded(rows, 264 * 64, 128, wide.clone(), false)).into();
    all.push(coded(1, 264 * 64, 128, trellis(264 * 64, 128, 5, 2), false));
    all.push(coded(1, 264 * 64, 128, trellis(264 * 64, 128, 12, 1), false));
    for (halves, codebook) in [(8, 2), (7, 2), (16, 0)] {
        all.push(coded(1, 128, 4096 + 256, trellis(128, 4096 + 256, halves, codebook), false));
    }
    all.push(coded(4, 128, 4096 + 256, trellis(128, 4096 + 256, 8, 0), false));
    // Chains that are shared by warps: a whole one less than there are shares, a part of one more than that, and two rounds.
    for (k, halves, codebook) in [(3072, 8, 2), (2048 + 128, 5, 2), (1024 + 384, 12, 1), (8192 + 1152, 8, 1)]
    {
        all.push(coded(1, 128, k, trellis(128, k, halves, codebook), false));
    }
    // Chains of warps that take whole columns, and of several rows.
    all.push(coded(1, 264 * 64, 2048 + 128, trellis(264 * 64, 2048 + 128, 8, 2), false));
    all.extend([2, 7].map(|rows| coded(rows, 128, 1024 + 128, trellis(128, 1024 + 128, 8, 2), false)));
    all
}

/// Tiles of 64 rows, whole ones and others, of rates and codebooks; chains that are whole, and that are not.
fn tall() -> Vec<Setup> {
    let mut all: Vec<Setup> =
        [24, 64, 150].map(|rows| coded(rows, 256, 1024 + 128, trellis(256, 1024 + 128, 8, 2), false)).into();
    for (halves, codebook) in [(2, 0), (3, 2), (7, 2), (8, 1), (10, 0), (12, 1), (16, 2)] {
        all.push(coded(26 + halves, 128, 128, trellis(128, 128, halves, codebook), false));
    }
    all
}

fn segments() -> Vec<Setup> {
    let at = |output, outputs, input, inputs| At { matrix: 0, output, outputs, input, inputs };
    // Two trellises of one layer, panels of either kind beside them.
    let mut fused = Parts::default();
    fused.trellis(at(0, 128, 0, 256), 0, 0, 8, 2, true, false);
    fused.trellis(at(128, 256, 0, 256), 0, 0, 6, 1, false, true);
    fused.panels(at(384, 20, 0, 256), true);
    fused.panels(at(404, 7, 0, 256), false);
    let fused = fused.held(411, 256, 1);
    // A share cut out of a larger layer: some of its channels meet zeros or are dropped.
    let mut cut = Parts::default();
    cut.trellis(at(0, 70, 0, 90), 40, 30, 8, 2, true, false);
    let cut = cut.held(70, 90, 1);
    // Two stretches of inputs whose results are added, of each kind.
    let mut sum = Parts::default();
    sum.trellis(at(0, 100, 0, 128), 0, 0, 8, 2, false, false);
    sum.trellis(at(0, 100, 128, 100), 0, 20, 4, 0, false, false);
    sum.panels(at(100, 30, 0, 64), true);
    sum.panels(at(100, 30, 64, 164), false);
    let sum = sum.held(130, 228, 1);
    let mut all = Vec::new();
    for rows in [1, 2, 3, 8, 19] {
        all.push(coded(rows, 411, 256, fused.clone(), true));
        all.push(coded(rows, 70, 90, cut.clone(), false));
        all.push(coded(rows, 130, 228, sum.clone(), true));
    }
    all
}

fn coded_experts() -> Vec<Setup> {
    let mut all = Vec::new();
    for (rows, e) in [(1, 16), (9, 4), (40, 3), (70, 3)] {
        all.extend(stacks(rows, e, 3, (128, 128), &|n, k| trellises(n, k, e, n == 256)));
    }
    all
}

//! Gated linear attention: `kda.mix`, `kda.commit`.

use plugfold_abi::{Addressing, OpError, Phase};

use super::operands::{CacheArg, Operands, Sequence};
use crate::kernel::Arg;
use crate::machine::Scratch;
use crate::segments::Tables;

/// Widest head: `MAX_WIDTH` of the source.
const MAX_WIDTH: usize = 256;

/// `Sizes` of the source.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct Sizes {
    heads: u32,
    width: u32,
    taps: u32,
}

/// `Mix` of the source.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct MixArg {
    round: u64,
    qkv: u64,
    f: u64,
    gate: u64,
    b: u64,
    conv: u64,
    dt_bias: u64,
    a_log: u64,
    o_norm: u64,
    out: u64,
    qkv_stride: u32,
    f_stride: u32,
    gate_stride: u32,
    b_stride: u32,
    out_stride: u32,
    first_seq: u32,
    first_row: u32,
    bounded: u32,
    record: u32,
    bound: f32,
    eps: f32,
    sizes: Sizes,
}

/// Threads beside those that hold the state: `HELPERS` of the source.
const HELPERS: u32 = 128;

struct Layer {
    heads: usize,
    width: usize,
    taps: usize,
}

impl Layer {
    fn new(o: &Operands<'_>) -> Result<Self, OpError> {
        let this = Self { heads: o.size(0, "H")?, width: o.size(1, "K")?, taps: o.size(2, "T")? };
        if this.width > MAX_WIDTH {
            return Err(
                o.error(&format!("heads of {} channels, at most {MAX_WIDTH} are supported", this.width))
            );
        }
        Ok(this)
    }
    fn channels(&self) -> usize {
        self.heads * self.width
    }
    fn sizes(&self) -> Sizes {
        Sizes { heads: self.heads as u32, width: self.width as u32, taps: self.taps as u32 }
    }
    /// Numbers of a row of scratch: `prepared_len` of the source.
    fn prepared_len(&self) -> usize {
        (4 * self.channels() + self.heads).next_multiple_of(4)
    }
    /// Whether there are kernels for the heads' width, that do everything in one launch.
    fn known(&self) -> bool {
        [32, 64, 128].contains(&self.width)
    }
    /// Shared memory of a recurrence of any width.
    fn column_bytes(&self) -> u32 {
        (self.width * 32 * 4) as u32
    }
    /// Blocks of such a recurrence over so many sequences.
    fn grid(&self, sequences: usize) -> [usize; 3] {
        [sequences, self.heads, self.width.div_ceil(32)]
    }
}

struct Families {
    state: CacheArg,
    window: CacheArg,
    replay: CacheArg,
}

fn families(
    o: &Operands<'_>,
    l: &Layer,
    sequences: &[Sequence],
    records: impl Fn(&Sequence) -> usize,
) -> Result<Families, OpError> {
    let c = l.channels();
    Ok(Families {
        state: o.state(0, "kda.state", c * l.width, sequences)?,
        window: o.state(1, "kda.conv", (l.taps - 1) * 3 * c, sequences)?,
        replay: o.cache(2, "kda.replay", 6 * c + l.heads, Addressing::State, records, sequences)?,
    })
}

pub(super) fn mix(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let l = Layer::new(o)?;
    let (rows, c) = (o.rows(), l.channels());
    let qkv = o.input(0, "qkv", rows, 3 * c)?;
    let f = o.input(1, "f", rows, c)?;
    let gate = o.input(2, "gate", rows, c)?;
    let b = o.input(3, "b", rows, l.heads)?;
    let conv = o.vector(0, "kda.conv", 3 * c * l.taps)?;
    let dt_bias = o.vector(1, "kda.dt_bias", c)?;
    let a_log = o.vector(2, "kda.a_log", l.heads)?;
    let o_norm = o.vector(3, "kda.o_norm", l.width)?;
    let out = o.output(0, "rows", rows, c)?;
    let sequences = o.sequences()?;
    for s in &sequences {
        if !s.whole {
            let all = o.table().seq_rows[s.index];
            return Err(o.error(&format!(
                "the call covers {} of {all} rows of sequence {}, must cover all",
                s.rows.len(),
                s.index
            )));
        }
    }
    let record = o.call.phase == Phase::Window;
    let families = families(o, &l, &sequences, |s| if record { s.rows.len() } else { 0 })?;
    let Some(first_seq) = sequences.first().map(|s| s.index) else { return Ok(()) };
    let round = o.round()?;
    if l.known() {
        let arg = MixArg {
            round,
            qkv: qkv.at,
            f: f.at,
            gate: gate.at,
            b: b.at,
            conv,
            dt_bias,
            a_log,
            o_norm,
            out: out.at,
            qkv_stride: qkv.stride,
            f_stride: f.stride,
            gate_stride: gate.stride,
            b_stride: b.stride,
            out_stride: out.stride,
            first_seq: first_seq as u32,
            first_row: o.first_row() as u32,
            bounded: u32::from(o.dim(3) != 0),
            record: u32::from(record),
            bound: o.param(1),
            eps: o.param(0),
            sizes: l.sizes(),
        };
        let cache = |c| Arg::Struct("Cache", bytemuck::bytes_of(c));
        let args = [
            Arg::Struct("Mix", bytemuck::bytes_of(&arg)),
            cache(&families.state),
            cache(&families.window),
            cache(&families.replay),
        ];
        let (name, threads) = (format!("kda_mix_{}", l.width), l.width as u32 + HELPERS);
        return o.launch(&name, [sequences.len(), l.heads, 1], threads, 0, &args);
    }
    let pieces = Scratch::pieces(&[rows * l.prepared_len() * 4, rows * c * 4]).take(o.machine)?;
    let sizes = l.sizes();
    let (first_row, z) = (Arg::Word(o.first_row() as u32), Arg::Struct("Sizes", bytemuck::bytes_of(&sizes)));
    let cache = |c| Arg::Struct("Cache", bytemuck::bytes_of(c));
    let args = [
        Arg::Pointer(round),
        first_row,
        z,
        Arg::Pointer(qkv.at),
        Arg::Word(qkv.stride),
        Arg::Pointer(f.at),
        Arg::Word(f.stride),
        Arg::Pointer(b.at),
        Arg::Word(b.stride),
        Arg::Pointer(conv),
        Arg::Pointer(dt_bias),
        Arg::Pointer(a_log),
        Arg::Word(u32::from(o.dim(3) != 0)),
        Arg::Float(o.param(1)),
        cache(&families.window),
        Arg::Pointer(pieces[0]),
        cache(&families.replay),
        Arg::Word(u32::from(record)),
    ];
    o.launch("kda_prepare", [rows, l.heads, 1], 128, 0, &args)?;
    let args = [
        Arg::Pointer(round),
        Arg::Word(first_seq as u32),
        first_row,
        z,
        Arg::Pointer(pieces[0]),
        cache(&families.state),
        Arg::Pointer(pieces[1]),
    ];
    o.launch("kda_recur_any", l.grid(sequences.len()), 32, l.column_bytes(), &args)?;
    let args = [
        z,
        Arg::Pointer(pieces[1]),
        Arg::Pointer(o_norm),
        Arg::Float(o.param(0)),
        Arg::Pointer(gate.at),
        Arg::Word(gate.stride),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("kda_gate", [rows, l.heads, 1], 128, 0, &args)?;
    let args = [
        Arg::Pointer(round),
        Arg::Word(first_seq as u32),
        first_row,
        z,
        Arg::Pointer(qkv.at),
        Arg::Word(qkv.stride),
        cache(&families.window),
        cache(&families.replay),
        Arg::Word(0),
    ];
    o.launch("kda_slide", [sequences.len(), ((l.taps - 1) * 3 * c).div_ceil(128), 1], 128, 0, &args)
}

pub(super) fn commit(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let l = Layer::new(o)?;
    let round = o.table();
    if round.seq_keep.len() != round.seqs() {
        return Err(o.error(&format!(
            "round table: seq_keep has {} entries, must have {}",
            round.seq_keep.len(),
            round.seqs()
        )));
    }
    let seqs = o.call.seqs.within(round.seqs());
    let mut sequences = Vec::new();
    for index in seqs.clone() {
        let (keep, all) = (round.seq_keep[index], round.seq_rows[index]);
        if keep > all {
            return Err(o.error(&format!("keep {keep} rows of sequence {index}, which has {all}")));
        }
        sequences.push(Sequence { index, rows: 0..keep as usize, start: 0, whole: true });
    }
    // Sequences that keep all their rows are left alone, wherever their records are.
    let some = |s: &Sequence| s.rows.len() < round.seq_rows[s.index] as usize;
    let families = families(o, &l, &sequences, |s| if some(s) { s.rows.len() } else { 0 })?;
    if !sequences.iter().any(some) {
        return Ok(());
    }
    let address = o.round()?;
    let sizes = l.sizes();
    let z = Arg::Struct("Sizes", bytemuck::bytes_of(&sizes));
    let cache = |c| Arg::Struct("Cache", bytemuck::bytes_of(c));
    let first = Arg::Word(seqs.start as u32);
    if l.known() {
        let args = [
            Arg::Pointer(address),
            first,
            z,
            cache(&families.state),
            cache(&families.window),
            cache(&families.replay),
        ];
        let (name, threads) = (format!("kda_replay_{}", l.width), l.width as u32 + HELPERS);
        return o.launch(&name, [seqs.len(), l.heads, 1], threads, 0, &args);
    }
    let args = [Arg::Pointer(address), first, z, cache(&families.state), cache(&families.replay)];
    o.launch("kda_replay_any", l.grid(seqs.len()), 32, l.column_bytes(), &args)?;
    let args = [
        Arg::Pointer(address),
        first,
        Arg::Word(0),
        z,
        Arg::Pointer(0),
        Arg::Word(0),
        cache(&families.window),
        cache(&families.replay),
        Arg::Word(1),
    ];
    o.launch("kda_slide", [seqs.len(), ((l.taps - 1) * 3 * l.channels()).div_ceil(128), 1], 128, 0, &args)
}

//! Latent attention in per-head form: `mla.write`, `mla.dense`, `mla.sparse`.

use plugfold_abi::{Addressing, OpError};

use super::operands::{CacheArg, CachedArg, Mat, Operands, Sequence};
use super::products::Product;
use crate::kernel::Arg;
use crate::segments::Tables;

/// Most channels of a value: two a thread.
const MAX_VALUE: usize = 512;

/// Rows of a sequence up to which four share a block.
const FEW: usize = 16;

/// Rows of a block, and keys that it has at a time, where rows are many.
const MANY: usize = 32;

/// Numbers in shared memory of a block of `attend_many_64` or `_256` (`Plan` of the source): rows and keys with four more each, values of their own where heads
/// are narrow, scores twice, and what rows keep of two tiles.
const fn shared_of(wide: usize) -> u32 {
    let values = if wide == 64 { MANY * wide } else { 0 };
    (4 * (2 * MANY * (wide + 4) + values + 2 * MANY * (MANY + 4) + (3 * 2 + 1) * MANY)) as u32
}

/// `Attend` of the source.
#[repr(C)]
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
struct AttendArg {
    q: u64,
    q_stride: u64,
    out: u64,
    out_stride: u64,
    lists: u64,
    lists_stride: u64,
    counts: u64,
    counts_stride: u64,
    first_row: u32,
    rows: u32,
    d: u32,
    v: u32,
    scale: f32,
    longest: u32,
    whole: u32,
    unused: u32,
}

struct Layer {
    heads: usize,
    key: usize,
    value: usize,
    rank: usize,
    sequences: Vec<Sequence>,
    cache: CacheArg,
}

fn layer(o: &Operands<'_>) -> Result<Layer, OpError> {
    let (heads, key, value) = (o.size(0, "H")?, o.size(1, "d")?, o.size(2, "v")?);
    if value > MAX_VALUE {
        return Err(o.error(&format!("values of {value} channels, at most {MAX_VALUE} are supported")));
    }
    let sequences = o.sequences()?;
    let end = |s: &Sequence| s.start + s.rows.len();
    let cache = o.cache(0, "mla.kv", heads * (key + value), Addressing::Linear, end, &sequences)?;
    Ok(Layer { heads, key, value, rank: o.size(3, "r")?, sequences, cache })
}

pub(super) fn write(o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
    let l = layer(o)?;
    let (n, rows) = (l.heads * (l.key + l.value), o.rows());
    let x = o.input(0, "latent", rows, l.rank)?;
    let matrix = o.matrix(0, "mla.kv_b", n, l.rank, 1)?;
    if rows == 0 {
        return Ok(());
    }
    let to = CachedArg { round: o.round()?, cache: l.cache, first_row: o.first_row() as u32, unused: 0 };
    let out = Mat { at: 0, stride: 0 };
    Product { to, ..Product::plain("mla.kv_b", matrix, (n, l.rank), x, out, rows) }.run(o, tables)
}

/// Runs attention. `lists` are the addresses of lists of up to `longest` positions and their counts, or none. Lists are on
/// the device: a wrong one gives a row that is no number, where the CPU refuses the call.
fn attend(o: &Operands<'_>, l: &Layer, lists: Option<(Mat, Mat)>, longest: usize) -> Result<(), OpError> {
    let rows = o.rows();
    let q = o.input(0, "q", rows, l.heads * l.key)?;
    let out = o.output(0, "rows", rows, l.heads * l.value)?;
    if rows == 0 {
        return Ok(());
    }
    let none = Mat { at: 0, stride: 0 };
    let (list, count) = lists.unwrap_or((none, none));
    let arg = AttendArg {
        q: q.at,
        q_stride: u64::from(q.stride),
        out: out.at,
        out_stride: u64::from(out.stride),
        lists: list.at,
        lists_stride: u64::from(list.stride),
        counts: count.at,
        counts_stride: u64::from(count.stride),
        first_row: o.first_row() as u32,
        rows: rows as u32,
        d: l.key as u32,
        v: l.value as u32,
        scale: o.param(0),
        longest: longest as u32,
        whole: 0,
        unused: 0,
    };
    launch(o, &arg, &l.cache, l.heads, &l.sequences)
}

fn launch(
    o: &Operands<'_>,
    arg: &AttendArg,
    cache: &CacheArg,
    heads: usize,
    sequences: &[Sequence],
) -> Result<(), OpError> {
    let args = [
        Arg::Pointer(o.round()?),
        Arg::Struct("Attend", bytemuck::bytes_of(arg)),
        Arg::Struct("Cache", bytemuck::bytes_of(cache)),
    ];
    // Rows with lists of their own share no keys; nor do sequences of one row. A few rows go four at a time, so that there
    // are more blocks. Heads wider than published ones have a kernel for any width.
    let most = sequences.iter().map(|s| s.rows.len()).max().unwrap_or(0);
    let kernel = match (most, arg.d.max(arg.v)) {
        _ if arg.lists != 0 => "mla_attend_1",
        (..=1, _) => "mla_attend_1",
        (2..=FEW, _) => "mla_attend_4",
        (_, wide @ ..=256) => {
            let blocks = sequences.iter().map(|s| s.rows.len().div_ceil(MANY)).sum();
            let (kernel, wide) = if wide <= 64 { ("attend_many_64", 64) } else { ("attend_many_256", 256) };
            return o.launch(kernel, [blocks, heads, 1], 128, shared_of(wide), &args);
        }
        _ => "mla_attend_8",
    };
    o.launch(kernel, [o.rows(), heads, 1], 256, 0, &args)
}

/// `vision.attend`: rows see all rows of their sequence, which lie in the call.
pub(super) fn frames(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (heads, d, rows) = (o.size(0, "H")?, o.size(1, "d")?, o.rows());
    if !d.is_multiple_of(4) || d > MAX_VALUE {
        return Err(o.error(&format!("heads of {d} channels, must be a multiple of 4 up to {MAX_VALUE}")));
    }
    let q = o.input(0, "q", rows, heads * d)?;
    let kv = o.input(1, "kv", rows, 2 * heads * d)?;
    let out = o.output(0, "rows", rows, heads * d)?;
    let sequences = o.sequences()?;
    if let Some(s) = sequences.iter().find(|s| !s.whole) {
        return Err(o.error(&format!("the call has a part of frame {}, must have all of it", s.index)));
    }
    if rows == 0 {
        return Ok(());
    }
    let arg = AttendArg {
        q: q.at,
        q_stride: u64::from(q.stride),
        out: out.at,
        out_stride: u64::from(out.stride),
        lists: 0,
        lists_stride: 0,
        counts: 0,
        counts_stride: 0,
        first_row: o.first_row() as u32,
        rows: rows as u32,
        d: d as u32,
        v: d as u32,
        scale: o.param(0),
        longest: 0,
        whole: 1,
        unused: 0,
    };
    launch(o, &arg, &CacheArg::rows(kv), heads, &sequences)
}

pub(super) fn dense(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    attend(o, &layer(o)?, None, 0)
}

pub(super) fn sparse(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let longest = o.size(4, "L")?;
    let lists = o.input_i32(1, "lists", o.rows(), longest)?;
    let counts = o.input_i32(2, "counts", o.rows(), 1)?;
    attend(o, &layer(o)?, Some((lists, counts)), longest)
}

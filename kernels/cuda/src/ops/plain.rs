//! Operations on rows by themselves: `embed` and `mtp.in`, `dense`, `head`, `norm`, the activations, `residual`, `tap`,
//! `final`, `rows.pick`, `comm.sum`, `sample.candidates`.

use plugfold_abi::{Comm, CommObject, FIRST_VIRTUAL_ID, OpError};

use super::operands::{Mat, Operands, TableArg};
use super::products::Product;
use crate::kernel::Arg;
use crate::machine::Scratch;
use crate::segments::Tables;

/// Refuses ids that the table does not have: the kernel reads what it is told.
fn check_ids(o: &Operands<'_>, vocab: usize) -> Result<(), OpError> {
    let round = o.table();
    if !round.embeds.is_empty() && round.embeds.len() != round.rows() {
        let text =
            format!("round table: embeds has {} entries for {} rows", round.embeds.len(), round.rows());
        return Err(o.error(&text));
    }
    for row in o.first_row()..o.first_row() + o.rows() {
        let (id, address) = (round.tokens[row], round.embeds.get(row).copied().unwrap_or(0));
        if !address.is_multiple_of(4) {
            return Err(
                o.error(&format!("embedding of row {row} lies at {address:#x}, must be a multiple of 4"))
            );
        }
        if address == 0 && id as usize >= vocab {
            let why = if id >= FIRST_VIRTUAL_ID { "a virtual id without an embedding" } else { "outside" };
            return Err(o.error(&format!("token {id} of row {row} is {why}; the vocabulary has {vocab}")));
        }
    }
    Ok(())
}

fn table_args<'a>(round: u64, table: TableArg, first_row: usize) -> [Arg<'a>; 6] {
    [
        Arg::Pointer(round),
        Arg::Pointer(table.data),
        Arg::Pointer(table.signs),
        Arg::Word(table.kind),
        Arg::Word(table.bits),
        Arg::Word(first_row as u32),
    ]
}

pub(super) fn embed(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (streams, width, vocab) = (o.size(0, "N")?, o.size(1, "D")?, o.size(2, "V")?);
    let table = o.rows_of(0, "embed", vocab, width)?;
    check_ids(o, vocab)?;
    let out = o.output(0, "x", o.rows(), streams * width)?;
    let mut args = table_args(o.round()?, table, o.first_row()).to_vec();
    args.extend([
        Arg::Word(streams as u32),
        Arg::Word(width as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ]);
    o.launch("embed", [o.rows(), 1, 1], 256, 0, &args)
}

pub(super) fn mtp_in(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (width, vocab) = (o.size(0, "D")?, o.size(1, "V")?);
    let hidden = o.input(0, "hidden", o.rows(), width)?;
    let table = o.rows_of(0, "embed", vocab, width)?;
    check_ids(o, vocab)?;
    let (enorm, hnorm) = (o.vector(1, "mtp.enorm", width)?, o.vector(2, "mtp.hnorm", width)?);
    let out = o.output(0, "rows", o.rows(), 2 * width)?;
    let mut args = table_args(o.round()?, table, o.first_row()).to_vec();
    args.extend([
        Arg::Word(u32::from(o.dim(2) != 0)),
        Arg::Word(width as u32),
        Arg::Pointer(enorm),
        Arg::Pointer(hnorm),
        Arg::Float(o.param(0)),
        Arg::Pointer(hidden.at),
        Arg::Word(hidden.stride),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ]);
    o.launch("mtp_in", [o.rows(), 2, 1], 256, 0, &args)
}

pub(super) fn dense(o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
    let (n, k, rows) = (o.size(0, "n")?, o.size(1, "k")?, o.rows());
    let x = o.input(0, "rows", rows, k)?;
    let matrix = o.matrix(0, "matrix", n, k, 1)?;
    let bias = o.maybe_vector(1, "bias", n)?;
    let out = o.output(0, "rows", rows, n)?;
    let product = Product::plain("matrix", matrix, (n, k), x, out, rows);
    Product { bias, ..product }.run(o, tables)
}

pub(super) fn head(o: &Operands<'_>, tables: &Tables) -> Result<(), OpError> {
    let (n, k, rows) = (o.size(0, "n")?, o.size(1, "D")?, o.table().out_rows.len());
    let x = o.input(0, "rows", rows, k)?;
    let matrix = o.matrix(0, "head", n, k, 1)?;
    let out = o.output(0, "logits", rows, n)?;
    Product::plain("head", matrix, (n, k), x, out, rows).run(o, tables)
}

pub(super) fn norm(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let k = o.size(0, "k")?;
    let (x, weight) = (o.input(0, "rows", o.rows(), k)?, o.vector(0, "norm", k)?);
    let out = o.output(0, "rows", o.rows(), k)?;
    let args = [
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Pointer(weight),
        Arg::Float(o.param(0)),
        Arg::Word(k as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("rms_norm", [o.rows(), 1, 1], 256, 0, &args)
}

/// `mlp.act` has the call's rows, `moe.act` as many pairs as come in.
pub(super) fn act(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let width = o.size(0, "I")?;
    let rows = if o.call.op.get_str() == "moe.act" { o.call.inputs[0].rows as usize } else { o.rows() };
    let x = o.input(0, "gate and up", rows, 2 * width)?;
    let out = o.output(0, "rows", rows, width)?;
    let args = [
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Float(o.param(0)),
        Arg::Word(width as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("swiglu", [rows, width.div_ceil(256), 1], 256, 0, &args)
}

pub(super) fn residual(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (d, parts) = (o.size(0, "D")?, o.size(1, "P")?);
    let x = o.input(0, "x", o.rows(), d)?;
    let y = o.input(1, "parts", o.rows(), parts * d)?;
    let out = o.output(0, "x", o.rows(), d)?;
    let args = [
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Pointer(y.at),
        Arg::Word(y.stride),
        Arg::Word(d as u32),
        Arg::Word(parts as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("residual", [o.rows(), 1, 1], 256, 0, &args)
}

pub(super) fn tap(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (n, d) = (o.size(0, "N")?, o.size(1, "D")?);
    let x = o.input(0, "x", o.rows(), n * d)?;
    let out = o.output(0, "mean", o.rows(), d)?;
    let args = [
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Word(n as u32),
        Arg::Word(d as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("tap", [o.rows(), 1, 1], 256, 0, &args)
}

pub(super) fn last(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (n, d) = (o.size(0, "N")?, o.size(1, "D")?);
    let (x, weight) = (o.input(0, "x", o.rows(), n * d)?, o.vector(0, "norm", d)?);
    let out = o.output(0, "rows", o.rows(), d)?;
    let args = [
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Pointer(weight),
        Arg::Float(o.param(0)),
        Arg::Word(n as u32),
        Arg::Word(d as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("final_norm", [o.rows(), 1, 1], 256, 0, &args)
}

/// Rows of `x` to rows of `out`; `list` is the address of the rows' numbers, or 0.
pub(super) fn copy(
    o: &Operands<'_>,
    x: Mat,
    list: u64,
    rows: usize,
    d: usize,
    out: Mat,
) -> Result<(), OpError> {
    let args = [
        Arg::Pointer(x.at),
        Arg::Word(x.stride),
        Arg::Pointer(list),
        Arg::Word(d as u32),
        Arg::Pointer(out.at),
        Arg::Word(out.stride),
    ];
    o.launch("copy_rows", [rows, 1, 1], 256, 0, &args)
}

pub(super) fn pick(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (d, rows, wanted) = (o.size(0, "D")?, o.table().rows(), o.table().out_rows.get_ref());
    let x = o.input(0, "rows", rows, d)?;
    let out = o.output(0, "rows", wanted.len(), d)?;
    if let Some(row) = wanted.iter().find(|r| **r as usize >= rows) {
        return Err(o.error(&format!("row {row} is wanted, the table has {rows}")));
    }
    if wanted.is_empty() {
        return Ok(());
    }
    let list = crate::machine::out_rows(o.round()?, o.table());
    copy(o, x, list, wanted.len(), d, out)
}

/// One rank's rows are copied. Those of several ranks are exchanged where they are, if the transport can, or go through the
/// host; either way they come in the order of ranks.
pub(super) fn sum(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (d, ranks, rows) = (o.size(0, "D")?, o.size(1, "P")?, o.rows());
    let mine = o.input(0, "partial", rows, d)?;
    let parts = o.output(0, "parts", rows, ranks * d)?;
    let Some(comm) = o.call.comm else {
        if ranks != 1 {
            return Err(o.error(&format!("P is {ranks}, but this engine has one rank")));
        }
        return copy(o, mine, 0, rows, d, parts);
    };
    let there = comm.ranks()? as usize;
    if there != ranks {
        return Err(o.error(&format!("P is {ranks}, but there are {there} ranks")));
    }
    let on_device = comm.exchanges()?.device;
    let bytes = rows * d * 4;
    if rows == 0 {
        return if on_device { Ok(()) } else { comm.gather(&[], &mut []) };
    }
    let staged = Scratch::pieces(&[bytes, ranks * bytes]).take(o.machine)?;
    if on_device {
        return exchange(o, comm, mine, parts, (rows, d, ranks), &staged);
    }
    copy(o, mine, 0, rows, d, Mat { at: staged[0], stride: d as u32 })?;
    let (mut sent, mut all) = (vec![0u8; bytes], vec![0u8; ranks * bytes]);
    o.machine.download(staged[0], &mut sent)?;
    comm.gather(&sent, &mut all)?;
    o.machine.upload(staged[1], &all)?;
    for rank in 0..ranks {
        let from = Mat { at: staged[1] + (rank * bytes) as u64, stride: d as u32 };
        copy(o, from, 0, rows, d, parts.columns(rank * d))?;
    }
    Ok(())
}

/// All ranks' rows, from and to the device's memory.
///
/// `staged`: room for rows that do not lie one after the other, and for all that come.
fn exchange(
    o: &Operands<'_>,
    comm: &CommObject,
    mine: Mat,
    parts: Mat,
    (rows, d, ranks): (usize, usize, usize),
    staged: &[u64],
) -> Result<(), OpError> {
    let bytes = rows * d * 4;
    let sent = if rows == 1 || mine.stride as usize == d {
        mine.at
    } else {
        copy(o, mine, 0, rows, d, Mat { at: staged[0], stride: d as u32 })?;
        staged[0]
    };
    // The parts of a single row lie as they come.
    let all = if rows == 1 { parts.at } else { staged[1] };
    comm.gather_on_device(sent, all, bytes as u64, o.machine.stream())?;
    if rows == 1 {
        return Ok(());
    }
    for rank in 0..ranks {
        let from = Mat { at: all + (rank * bytes) as u64, stride: d as u32 };
        copy(o, from, 0, rows, d, parts.columns(rank * d))?;
    }
    Ok(())
}

/// Logits of a slice of a row: `SLICE` of the source.
const SLICE: usize = 4096;
/// Threads of a slice: `SLICE_THREADS` of the source.
const SLICE_THREADS: u32 = 512;
/// Most candidates of `sample_pick`; more are chosen of what the slices keep.
const FEW_CANDIDATES: usize = 128;
/// Logits whose largest is found first, as a power of two: `MOST_STRETCH` of the source, and of short rows less, so that there are enough of
/// them.
const fn stretch_shift(n: usize) -> usize {
    if n > 32_768 { 7 } else { 5 }
}
/// Most candidates that are sorted in shared memory.
const MOST_CANDIDATES: usize = 8192;

pub(super) fn candidates(o: &Operands<'_>, _: &Tables) -> Result<(), OpError> {
    let (n, count, first, rows) = (o.size(0, "n")?, o.size(1, "C")?, o.dim(2), o.table().out_rows.len());
    let logits = o.input(0, "logits", rows, n)?;
    let values = o.output(0, "values", rows, count)?;
    let ids = o.output_i32(1, "ids", rows, count)?;
    if count.min(n) > MOST_CANDIDATES {
        return Err(o.error(&format!(
            "{count} candidates a row, at most {MOST_CANDIDATES} are sorted on the device"
        )));
    }
    if rows == 0 {
        return Ok(());
    }
    let keep = count.min(n);
    if keep <= FEW_CANDIDATES {
        let shift = stretch_shift(n);
        let stretches = n.div_ceil(1 << shift);
        let tops = Scratch::pieces(&[rows * stretches * 4]).take(o.machine)?[0];
        let size = [Arg::Word(shift as u32), Arg::Word(stretches as u32)];
        let row = [Arg::Pointer(logits.at), Arg::Word(logits.stride), Arg::Word(n as u32)];
        let args = [row[0], row[1], row[2], size[0], size[1], Arg::Pointer(tops)];
        o.launch("sample_tops", [rows, stretches.div_ceil(8), 1], 256, 0, &args)?;
        let args = [
            row[0],
            row[1],
            row[2],
            Arg::Pointer(tops),
            size[0],
            size[1],
            Arg::Word(keep as u32),
            Arg::Word(first as u32),
            Arg::Pointer(values.at),
            Arg::Word(values.stride),
            Arg::Pointer(ids.at),
            Arg::Word(ids.stride),
            Arg::Word(count as u32),
        ];
        return o.launch("sample_pick", [rows, 1, 1], 1024, 0, &args);
    }
    let slices = n.div_ceil(SLICE);
    // Only the last slice may have fewer than that.
    let each = keep.min(SLICE);
    let held = slices * each;
    let pieces = Scratch::pieces(&[rows * held * 4; 2]).take(o.machine)?;
    let args = [
        Arg::Pointer(logits.at),
        Arg::Word(logits.stride),
        Arg::Word(n as u32),
        Arg::Word(each as u32),
        Arg::Pointer(pieces[0]),
        Arg::Pointer(pieces[1]),
    ];
    o.launch("sample_slices", [rows, slices, 1], SLICE_THREADS, 0, &args)?;
    let room = keep.next_power_of_two();
    let args = [
        Arg::Pointer(logits.at),
        Arg::Word(logits.stride),
        Arg::Pointer(pieces[0]),
        Arg::Pointer(pieces[1]),
        Arg::Word(held as u32),
        Arg::Word(keep as u32),
        Arg::Word(room as u32),
        Arg::Word(first as u32),
        Arg::Pointer(values.at),
        Arg::Word(values.stride),
        Arg::Pointer(ids.at),
        Arg::Word(ids.stride),
        Arg::Word(count as u32),
    ];
    o.launch("sample_merge", [rows, 1, 1], 1024, (room * 8) as u32, &args)
}

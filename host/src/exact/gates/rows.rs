//! A row's bits depend on the row: alone, with one other sequence, with up to eight others, in every kind of program.

use plugfold_abi::Phase;
use plugfold_engine::core::{Core, Forward, MtpRows, SeqRows, Want};
use plugfold_engine::state::Snapshot;

use super::super::Setup;
use super::super::script::{Image, ids, images};
use super::{Failed, PIECE, Ran, Sizes, holds, prefill, sizes};

/// Sequences that meet at most: one, and eight others.
const COMPANY: usize = 9;
/// Companies that are tried for every kind of program.
const TURNS: usize = 24;

/// The bits of one row: its streams after every layer, its final row, its logits.
type Bits = Vec<u32>;

/// One sequence of the trial.
struct Seq {
    slot: usize,
    /// Tokens of its prompt.
    length: usize,
    /// Its state after its prompt.
    start: Snapshot,
    /// Tokens that follow.
    tokens: Vec<u32>,
    /// Rows for the draft layer, as many as there are tokens.
    hidden: Vec<f32>,
}

/// One of a company: which of the sequences, with how many rows.
type Member = (usize, usize);

/// Companies of every size, in changing order, with changing row counts.
fn companies(n: usize, window: usize) -> Vec<Vec<Member>> {
    let one = |turn: usize| {
        let mut order: Vec<usize> = (0..n).collect();
        order.rotate_left(turn % n);
        if turn % 2 == 1 {
            order.reverse();
        }
        order.truncate(1 + turn % n);
        order.into_iter().map(|i| (i, 1 + (turn * 5 + i * 3) % window)).collect()
    };
    (0..TURNS).map(one).collect()
}

pub(super) fn rows(setup: &Setup) -> Ran {
    let mut wide = setup.clone();
    wide.options.slots = wide.options.slots.max(COMPANY);
    holds(&wide, |p| {
        let s = sizes(p.rank);
        let core = &mut p.rank.core;
        let seqs = sequences(core, &s)?;
        let all = companies(seqs.len(), s.window);
        let mut count = 0;
        for phase in [Phase::Window, Phase::Prefill] {
            let run = |core: &mut Core, company: &[Member]| forward(core, phase, &seqs, company);
            match compare(core, &format!("{phase:?} forward"), &seqs, &all, s.window, run)? {
                Ok(n) => count += n,
                Err(failed) => return Ok(Err(failed)),
            }
        }
        if core.has_mtp() {
            match compare(core, "draft forward", &seqs, &all, s.window, |core, c| draft(core, &seqs, c))? {
                Ok(n) => count += n,
                Err(failed) => return Ok(Err(failed)),
            }
        }
        match commits(core, &seqs, &all)? {
            Ok(n) => count += n,
            Err(failed) => return Ok(Err(failed)),
        }
        Ok(Ok(count))
    })
}

/// Prompts on both sides of the dense limit, one a slot.
fn sequences(core: &mut Core, s: &Sizes) -> Result<Vec<Seq>, String> {
    let lengths = [2, s.limit.min(s.context / 2), s.limit + 5];
    let width = core.config().hidden_size;
    let mut seqs = Vec::new();
    for slot in 0..s.slots.min(COMPANY) {
        let n = lengths[slot % lengths.len()] + slot / lengths.len();
        if n + s.window >= s.context {
            continue;
        }
        let prompt = ids(slot as u64 + 20, n, s.vocab);
        prefill(core, slot, &prompt)?;
        let seq = Seq {
            slot,
            length: n,
            start: core.snapshot(slot).map_err(|e| e.to_string())?,
            tokens: ids(slot as u64 + 40, s.window, s.vocab),
            hidden: numbers(slot as u64 + 60, s.window * width),
        };
        if core.has_mtp() {
            for (i, next_ids) in prompt.chunks(PIECE).enumerate() {
                let hidden = &numbers((slot * 1000 + i) as u64, next_ids.len() * width);
                let rows =
                    [MtpRows { slot, start: i * PIECE, next_ids, hidden, want: Want::Nothing, embeds: &[] }];
                let f = core.mtp(&rows, true, None).map_err(|e| e.to_string())?;
                bits(core, &f, 0, &[])?;
            }
        }
        seqs.push(seq);
    }
    Ok(seqs)
}

/// Pseudo-random numbers in -1..1.
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    ids(seed, n, 1 << 16).into_iter().map(|v| v as f32 / 32768.0 - 1.0).collect()
}

/// Puts all sequences back to the ends of their prompts.
fn back(core: &mut Core, seqs: &[Seq]) -> Result<(), String> {
    for seq in seqs {
        if !core.restore(&seq.start).map_err(|e| e.to_string())? {
            return Err(format!("slot {} lost the rows of its prompt", seq.slot));
        }
    }
    Ok(())
}

/// Runs every company and compares each row with what the same row is where its sequence is alone.
fn compare(
    core: &mut Core,
    kind: &str,
    seqs: &[Seq],
    all: &[Vec<Member>],
    window: usize,
    mut run: impl FnMut(&mut Core, &[Member]) -> Result<Vec<Bits>, String>,
) -> Result<Result<usize, Failed>, String> {
    let mut alone = Vec::with_capacity(seqs.len());
    for i in 0..seqs.len() {
        alone.push(run(core, &[(i, window)])?);
    }
    let mut count = 0;
    // Fewer rows of the same sequence, then others beside it.
    let fewer = (0..seqs.len()).flat_map(|i| (1..window).map(move |n| vec![(i, n)]));
    for company in fewer.chain(all.iter().cloned()) {
        let found = run(core, &company)?;
        let mut rows = found.iter();
        for &(i, n) in &company {
            for (row, (want, found)) in alone[i].iter().zip(rows.by_ref().take(n)).enumerate() {
                if let Some(at) = (0..want.len().max(found.len())).find(|at| want.get(*at) != found.get(*at))
                {
                    let others: Vec<usize> = company.iter().map(|c| seqs[c.0].slot).collect();
                    let case = format!("{kind}, row {row} of slot {} among slots {others:?}", seqs[i].slot);
                    let told = |all: &Bits| all.get(at).map_or("nothing".into(), |b| format!("{b:08x}"));
                    return Ok(Err((
                        case,
                        format!(
                            "number {at} of its streams and logits is {}, not {} as alone",
                            told(found),
                            told(want)
                        ),
                    )));
                }
                count += 1;
            }
        }
    }
    Ok(Ok(count))
}

/// The rows of a forward that ran, by its outputs of these names.
fn bits(core: &mut Core, f: &Forward, rows: usize, names: &[String]) -> Result<Vec<Bits>, String> {
    if let Some(failure) = &f.failure {
        return Err(failure.to_string());
    }
    let mut out = vec![Bits::new(); rows];
    for name in names {
        let Some(values) = core.output(f, name) else { continue };
        let width = values.len() / rows.max(1);
        for (row, part) in out.iter_mut().zip(values.chunks(width.max(1))) {
            row.extend(part.iter().map(|v| v.to_bits()));
        }
    }
    Ok(out)
}

fn total(company: &[Member]) -> usize {
    company.iter().map(|c| c.1).sum()
}

fn forward(core: &mut Core, phase: Phase, seqs: &[Seq], company: &[Member]) -> Result<Vec<Bits>, String> {
    let rows: Vec<SeqRows<'_>> = company
        .iter()
        .map(|&(i, n)| SeqRows {
            slot: seqs[i].slot,
            tokens: &seqs[i].tokens[..n],
            want: Want::All,
            embeds: &[],
        })
        .collect();
    let f = core.forward(phase, &rows, None, true).map_err(|e| e.to_string())?;
    let layers = core.config().layers.len();
    let names = (0..layers).map(|i| format!("layer.{i}")).chain(["rows".into(), "logits".into()]);
    bits(core, &f, total(company), &names.collect::<Vec<_>>())
}

/// Rows of the draft layer, after as many as the prompt has.
fn draft(core: &mut Core, seqs: &[Seq], company: &[Member]) -> Result<Vec<Bits>, String> {
    let width = core.config().hidden_size;
    let rows: Vec<MtpRows<'_>> = company
        .iter()
        .map(|&(i, n)| MtpRows {
            slot: seqs[i].slot,
            start: seqs[i].length,
            next_ids: &seqs[i].tokens[..n],
            hidden: &seqs[i].hidden[..n * width],
            want: Want::All,
            embeds: &[],
        })
        .collect();
    let f = core.mtp(&rows, true, None).map_err(|e| e.to_string())?;
    bits(core, &f, total(company), &["rows".into(), "logits".into()])
}

/// Windows that are cut in company leave each sequence the state that it gets alone.
fn commits(core: &mut Core, seqs: &[Seq], all: &[Vec<Member>]) -> Result<Result<usize, Failed>, String> {
    let mut count = 0;
    for (turn, company) in all.iter().enumerate() {
        // Keeps at least one row, often fewer than all.
        let keeps: Vec<usize> = company.iter().map(|&(i, n)| 1 + (turn + i) % n).collect();
        let mut want: Vec<Image> = Vec::with_capacity(company.len());
        for (one, keep) in company.iter().zip(&keeps) {
            back(core, seqs)?;
            cut(core, seqs, std::slice::from_ref(one), &[*keep])?;
            want.push(core.image(seqs[one.0].slot));
        }
        back(core, seqs)?;
        cut(core, seqs, company, &keeps)?;
        for ((&(i, n), keep), want) in company.iter().zip(&keeps).zip(&want) {
            let slot = seqs[i].slot;
            if let Some(what) = images(&core.image(slot), want) {
                let others = company.len() - 1;
                return Ok(Err((
                    format!("commit of {keep} of {n} rows of slot {slot} with {others} others"),
                    what,
                )));
            }
            count += 1;
        }
    }
    Ok(Ok(count))
}

fn cut(core: &mut Core, seqs: &[Seq], company: &[Member], keeps: &[usize]) -> Result<(), String> {
    let rows: Vec<SeqRows<'_>> = company
        .iter()
        .map(|&(i, n)| SeqRows {
            slot: seqs[i].slot,
            tokens: &seqs[i].tokens[..n],
            want: Want::Nothing,
            embeds: &[],
        })
        .collect();
    let f = core.forward(Phase::Window, &rows, None, false).map_err(|e| e.to_string())?;
    if let Some(failure) = &f.failure {
        return Err(failure.to_string());
    }
    core.commit(&f, keeps).map_err(|e| e.to_string())
}

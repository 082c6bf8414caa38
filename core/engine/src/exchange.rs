//! The exchange after a forward: every rank's status and best candidates, on every rank.

use crate::core::{Core, Forward};
use crate::program::Read;

/// What all ranks know after the exchange.
pub struct Exchanged {
    /// Ranks whose forward failed, lowest first.
    pub failed: Vec<usize>,
    /// Per wanted row, all ranks' candidates.
    pub rows: Vec<Vec<(f32, u32)>>,
    /// Riders' words of all ranks, in rank order; none on one rank, whose own words are all there are.
    pub riders: Vec<u32>,
}

/// A failure of the exchange itself: the ranks are not in step any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExchangeError {
    /// The transport failed.
    #[error("exchange after a forward: {0}")]
    Comm(#[from] plugfold_abi::OpError),
    /// A rank ran other exchanges.
    #[error(
        "rank {rank} ran other exchanges than rank 0 ({theirs:016x} against {ours:016x}): the ranks are out of step"
    )]
    OutOfStep {
        /// The rank.
        rank: usize,
        /// Its hash.
        theirs: u64,
        /// Rank 0's hash.
        ours: u64,
    },
}

/// Bytes before the candidates: status, collectives hash.
const HEADER: usize = 12;

/// Shares this rank's outcome and candidates of a forward with all ranks.
///
/// `riders`: words of plugins that travel along, as many on every rank.
///
/// # Errors
/// The transport, or ranks out of step.
pub fn exchange(core: &mut Core, forward: &Forward, riders: &[u32]) -> Result<Exchanged, ExchangeError> {
    let rows = forward.out_rows();
    let mine = candidates(core, forward, rows);
    let Some(comm) = core.comm().cloned() else {
        let failed = if forward.failure.is_some() { vec![0] } else { Vec::new() };
        return Ok(Exchanged { failed, rows: mine, riders: Vec::new() });
    };
    let ranks = core.split().ranks;
    // Shares of the vocabulary differ by at most one, and with them the number of candidates: all send the widest.
    let width = forward.candidates(core.config().vocab_size.div_ceil(ranks));
    let message = encode(forward, &mine, rows, width, riders);
    let mut all = vec![0; message.len() * ranks];
    let waits = core.exchanging().begin();
    comm.gather(&message, &mut all)?;
    drop(waits);
    decode(ranks, &all, message.len(), rows, width, riders.len())
}

fn candidates(core: &mut Core, forward: &Forward, rows: usize) -> Vec<Vec<(f32, u32)>> {
    if rows == 0 || forward.failure.is_some() {
        return vec![Vec::new(); rows];
    }
    let Some(ids) = core.read(forward, Read::Ids).map(<[f32]>::to_vec) else {
        return vec![Vec::new(); rows];
    };
    let values = core.read(forward, Read::Values).unwrap_or(&[]);
    let width = values.len() / rows;
    let pairs: Vec<(f32, u32)> = values.iter().zip(&ids).map(|(v, id)| (*v, id.to_bits())).collect();
    pairs.chunks(width.max(1)).map(<[_]>::to_vec).collect()
}

fn encode(forward: &Forward, mine: &[Vec<(f32, u32)>], rows: usize, width: usize, riders: &[u32]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER + riders.len() * 4 + rows * width * 8);
    out.extend(u32::from(forward.failure.is_some()).to_le_bytes());
    out.extend(forward.collectives.to_le_bytes());
    out.extend(riders.iter().flat_map(|word| word.to_le_bytes()));
    for row in 0..rows {
        for i in 0..width {
            let (value, id) =
                mine.get(row).and_then(|r| r.get(i)).copied().unwrap_or((f32::NEG_INFINITY, u32::MAX));
            out.extend(value.to_le_bytes());
            out.extend(id.to_le_bytes());
        }
    }
    out
}

fn word<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[..N]);
    out
}

fn decode(
    ranks: usize,
    all: &[u8],
    size: usize,
    rows: usize,
    width: usize,
    riders: usize,
) -> Result<Exchanged, ExchangeError> {
    let mut failed = Vec::new();
    let mut words = Vec::with_capacity(riders * ranks);
    let head = HEADER + riders * 4;
    let mut merged = vec![Vec::with_capacity(width * ranks); rows];
    let mut ours = 0;
    for (rank, part) in all.chunks(size).enumerate() {
        let theirs = u64::from_le_bytes(word(&part[4..]));
        if rank == 0 {
            ours = theirs;
        } else if theirs != ours {
            return Err(ExchangeError::OutOfStep { rank, theirs, ours });
        }
        if u32::from_le_bytes(word(part)) != 0 {
            failed.push(rank);
        }
        words.extend(part[HEADER..head].chunks(4).map(|w| u32::from_le_bytes(word(w))));
        for (row, list) in part[head..].chunks((width * 8).max(1)).zip(&mut merged) {
            for pair in row.chunks(8) {
                let value = f32::from_le_bytes(word(pair));
                if value != f32::NEG_INFINITY {
                    list.push((value, u32::from_le_bytes(word(&pair[4..]))));
                }
            }
        }
    }
    Ok(Exchanged { failed, rows: merged, riders: words })
}

//! Collectives through memory that ranks on one host share: a window a rank, in one file that has no name once all have it.

mod board;
mod comm;

use plugfold_abi::boundary::Offer;
use plugfold_abi::life::{Plugin, Setup};
use plugfold_abi::points::{Control, ControlObject, DeviceAccessObject, Transport, TransportObject};
use plugfold_abi::{CommObject, List, Maybe, OpError, Slice, Text, TextBuf};

use board::Board;
use comm::Shared;

/// The manifest.
pub const MANIFEST: &str = include_str!("../plugin.toml");

/// The plugin.
pub struct Shm;

impl Plugin for Shm {
    fn describe(&self) -> Result<TextBuf, OpError> {
        Ok(MANIFEST.into())
    }
    fn configure(&self, setup: &Setup<'_>) -> Result<List<Offer>, OpError> {
        let kib = setup.knobs.int("window_kib")?;
        let window = usize::try_from(kib).ok().filter(|k| (4..=65536).contains(k)).map(|k| k * 1024);
        let refused = || OpError::invalid(format!("window_kib is {kib}: give 4 to 65536"));
        let window = window.ok_or_else(refused)?;
        Ok(List::from(vec![Offer::of(TransportObject::new(Memory { window }))]))
    }
}

struct Memory {
    window: usize,
}

/// Every rank's text, or the error of the first rank that has one.
fn agree(control: &ControlObject, what: &str, mine: &str) -> Result<Vec<String>, OpError> {
    let all = control.gather(Text::from(what), Slice::from(mine.as_bytes()))?;
    Ok(all.iter().map(|b| String::from_utf8_lossy(b).into_owned()).collect())
}

impl Transport for Memory {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok("shm".into())
    }

    /// Rank 0 makes the file, the others map it, and it loses its name: what is mapped lives until the last rank ends.
    fn open(&self, control: ControlObject, _: Maybe<DeviceAccessObject>) -> Result<CommObject, OpError> {
        let (rank, ranks) = (control.rank()? as usize, control.ranks()? as usize);
        let hosts = agree(&control, "shm: hosts", &control.host()?)?;
        if let Some(other) = hosts.iter().position(|h| *h != hosts[0] || h.is_empty()) {
            return Err(OpError::invalid(format!(
                "ranks 0 and {other} are not on one host: use the transport `tcp`"
            )));
        }
        let made = if rank == 0 { Some(Board::create(ranks, self.window)) } else { None };
        let told = match &made {
            Some(Ok((path, _))) => format!("={}", path.display()),
            Some(Err(error)) => format!("!{error}"),
            None => String::new(),
        };
        let lead = agree(&control, "shm: file", &told)?.swap_remove(0);
        let board = match (made, lead.strip_prefix('=')) {
            (Some(Ok((_, board))), Some(_)) => Ok(board),
            (Some(Err(error)), _) => Err(error),
            (None, Some(path)) => Board::join(path.as_ref(), ranks, self.window),
            (_, None) => {
                Err(OpError::new(format!("rank 0 has no shared memory: {}", lead.trim_start_matches('!'))))
            }
        };
        let failed = board.as_ref().err().map_or_else(String::new, ToString::to_string);
        let all = agree(&control, "shm: mapped", &failed)?;
        if rank == 0
            && let Some(path) = lead.strip_prefix('=')
        {
            // It may be gone already; nothing depends on the name any more.
            let _ = std::fs::remove_file(path);
        }
        let board = board?;
        if let Some((other, said)) = all.iter().enumerate().find(|(_, s)| !s.is_empty()) {
            return Err(OpError::new(format!("rank {other} cannot map the shared memory: {said}")));
        }
        Ok(CommObject::new(Shared::new(board, rank, control)))
    }
}

plugfold_abi::export!(manifest: MANIFEST, plugin: Shm);

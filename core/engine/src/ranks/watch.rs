//! Heartbeats: a thread a connection, apart from everything that computes or waits.

use std::io::{self, ErrorKind, Read};
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::fate::{Fate, Note, lock};
use super::{EndKind, RankError};

/// A rank tells that it lives this often.
pub const BEAT: Duration = Duration::from_millis(500);
/// A rank that is silent for this long counts as dead.
pub const SILENCE: Duration = Duration::from_millis(3500);
/// Longest wait for one heartbeat. Silence is counted in such waits, so a machine that was asleep accuses nobody.
const TICK: Duration = Duration::from_millis(250);
/// Rounds of heartbeats from all ranks in which all wait and nothing moves, until the ranks count as out of step.
const STUCK_ROUNDS: u32 = 6;
/// Longest line on a heartbeat connection, in bytes.
const LINE_LIMIT: usize = 64 << 10;
/// How long a closed connection is drained, so that the other side can read the last note.
const DRAIN: Duration = Duration::from_secs(1);

/// Who waits for what, on rank 0. If all ranks wait and nothing moves, one of them has left out a call.
pub(super) struct Table(Mutex<Seen>);

struct Seen {
    /// Of each rank: a beat came in this round, it waits as it did before, its last beat.
    ranks: Vec<(bool, bool, (u64, String))>,
    rounds: u32,
}

impl Table {
    pub(super) fn new(ranks: usize) -> Self {
        Self(Mutex::new(Seen { ranks: vec![(false, false, (0, String::new())); ranks], rounds: 0 }))
    }

    /// Takes in a follower's beat; `own` is rank 0's state. Gives each rank's wait once they count as stuck.
    pub(super) fn beat(&self, rank: usize, beat: (u64, String), own: (u64, String)) -> Option<Vec<String>> {
        let mut seen = lock(&self.0);
        for (rank, beat) in [(rank, beat), (0, own)] {
            let (fresh, still, last) = seen.ranks.get_mut(rank)?;
            *still = (*still || !*fresh) && beat == *last && !beat.1.is_empty();
            *fresh = true;
            *last = beat;
        }
        if seen.ranks.iter().all(|(fresh, ..)| *fresh) {
            seen.rounds = if seen.ranks.iter().all(|(_, still, _)| *still) { seen.rounds + 1 } else { 0 };
            seen.ranks.iter_mut().for_each(|(fresh, ..)| *fresh = false);
        }
        (seen.rounds >= STUCK_ROUNDS).then(|| seen.ranks.iter().map(|(.., last)| last.1.clone()).collect())
    }
}

/// Starts the watch over one heartbeat connection, the `link`-th of this rank.
pub(super) fn start(
    fate: &Arc<Fate>,
    table: &Arc<Table>,
    link: usize,
    peer: usize,
    stream: TcpStream,
) -> Result<JoinHandle<()>, RankError> {
    let ready = stream.set_read_timeout(Some(TICK)).and_then(|()| stream.set_write_timeout(Some(BEAT)));
    let (fate_, table) = (Arc::clone(fate), Arc::clone(table));
    let name = format!("rank-watch-{peer}");
    let run = move || {
        Watch { fate: &fate_, table: &table, link, peer, stream: &stream }.run();
        drain(&stream);
    };
    ready.and_then(|()| std::thread::Builder::new().name(name).spawn(run)).map_err(|error| {
        let reason = format!("cannot start the watch over rank {peer}: {error}");
        fate.blame(fate.rank, EndKind::Failed, reason)
    })
}

struct Watch<'a> {
    fate: &'a Fate,
    table: &'a Table,
    link: usize,
    peer: usize,
    stream: &'a TcpStream,
}

impl Watch<'_> {
    fn run(&self) {
        let mut buffer = [0; 4096];
        let mut lines = Vec::new();
        let mut silent = Duration::ZERO;
        let mut last: Option<Instant> = None;
        while !self.fate.over() {
            if last.is_none_or(|last| last.elapsed() >= BEAT) {
                let (moved, doing) = self.fate.pulse();
                self.fate.tell_one(self.link, &Note::Beat { moved, doing });
                last = Some(Instant::now());
            }
            let mut stream = self.stream;
            match stream.read(&mut buffer) {
                Ok(0) => return self.died("its process closed the connection"),
                Ok(got) => {
                    silent = Duration::ZERO;
                    lines.extend_from_slice(&buffer[..got]);
                    if !self.take(&mut lines) {
                        return;
                    }
                }
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    silent += TICK;
                    if silent >= SILENCE {
                        let seconds = SILENCE.as_secs_f32();
                        return self.died(&format!("silent for {seconds} s (stopped, hung or cut off)"));
                    }
                }
                Err(error) if again(&error) => {}
                Err(error) => return self.died(&format!("its connection failed ({error})")),
            }
        }
    }

    fn died(&self, reason: &str) {
        if !self.fate.has_parted(self.peer) {
            self.fate.blame(self.peer, EndKind::Died, reason);
        }
    }

    /// Handles every complete line; false when the watch is over.
    fn take(&self, lines: &mut Vec<u8>) -> bool {
        while let Some(end) = lines.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = lines.drain(..=end).collect();
            match serde_json::from_slice(&line) {
                Ok(Note::Beat { moved, doing }) if self.fate.rank == 0 => {
                    if let Some(waits) = self.table.beat(self.peer, (moved, doing), self.fate.pulse()) {
                        self.stuck(&waits);
                    }
                }
                Ok(Note::Beat { .. }) => {}
                Ok(Note::Bye { rank }) => {
                    if self.fate.parted(rank) && self.fate.rank == 0 {
                        self.fate.tell(&Note::Bye { rank });
                    }
                    if rank == self.peer {
                        return false;
                    }
                }
                Ok(Note::End(end)) => {
                    self.fate.end(end);
                    return false;
                }
                Err(error) => {
                    self.died(&format!("it sent a heartbeat that cannot be read ({error})"));
                    return false;
                }
            }
        }
        if lines.len() > LINE_LIMIT {
            self.died("it sent a heartbeat without end");
        }
        lines.len() <= LINE_LIMIT
    }

    fn stuck(&self, waits: &[String]) {
        let list: Vec<String> =
            waits.iter().enumerate().map(|(rank, doing)| format!("rank {rank} is in {doing}")).collect();
        let odd = (1..waits.len()).find(|&rank| waits[rank] != waits[0]).unwrap_or(0);
        let reason = format!(
            "nothing has moved for {} s and every rank waits for another: {}; one of them left out a call or lost a frame",
            f64::from(STUCK_ROUNDS) * BEAT.as_secs_f64(),
            list.join(", ")
        );
        self.fate.blame(odd, EndKind::OutOfStep, reason);
    }
}

fn again(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}

/// Closes the way out and reads to the other side's end, so that no reset overtakes the last note.
fn drain(mut stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let deadline = Instant::now() + DRAIN;
    let mut buffer = [0; 4096];
    while Instant::now() < deadline {
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(_) => {}
            Err(error) if again(&error) => {}
            Err(_) => break,
        }
    }
    let _ = stream.shutdown(Shutdown::Both);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(moved: u64, doing: &str) -> (u64, String) {
        (moved, doing.to_owned())
    }

    /// Rounds of beats from two followers until they count as stuck.
    fn rounds(beat: impl Fn(usize, u64) -> Option<(u64, String)>) -> Option<u64> {
        let table = Table::new(3);
        (0..20).find(|&round| {
            [1, 2].into_iter().any(|rank| {
                let own = beat(0, round).unwrap_or_default();
                beat(rank, round).is_some_and(|theirs| table.beat(rank, theirs, own).is_some())
            })
        })
    }

    #[test]
    fn ranks_are_stuck_only_if_all_wait_unmoved_and_live() {
        let wait = |_, _| Some(state(5, "exchange"));
        assert_eq!(rounds(wait), Some(u64::from(STUCK_ROUNDS)), "the first round only shows the state");
        let busy = |rank, _| Some(state(5, if rank == 2 { "" } else { "exchange" }));
        assert_eq!(rounds(busy), None, "a rank that computes will come");
        let lead_busy = |rank, _| Some(state(5, if rank == 0 { "" } else { "exchange" }));
        assert_eq!(rounds(lead_busy), None, "rank 0 computes");
        let slow = |rank, round| Some(state(if rank == 1 { round / 4 } else { 5 }, "exchange"));
        assert_eq!(rounds(slow), None, "a transfer gets on now and then");
        let silent = |rank, round| (rank != 2 || round < 4).then(|| state(5, "exchange"));
        assert_eq!(rounds(silent), None, "a stopped rank is for the watch over silence");
    }
}

//! The control plane: plans, prompts and agreements over one connection from rank 0 to each follower.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::fate::{Doing, Fate, lock};
use super::faults::bend;
use super::frame::{Counted, HEAD, Head, Kind};
use super::{At, EndKind, Fault, Faults, RankError};

/// Longest broadcast, and longest sum of an agreement's parts, in bytes.
pub const CONTROL_LIMIT: usize = 256 << 20;
/// Room in a frame beside the payload: the lengths of an agreement's parts.
const FRAME_ROOM: usize = 64 << 10;

pub(super) struct Control {
    fate: Arc<Fate>,
    faults: Arc<Faults>,
    wires: Mutex<Wires>,
}

struct Wires {
    /// On rank 0: follower r at r - 1. On a follower: rank 0.
    streams: Vec<TcpStream>,
    calls: u64,
    sent: u64,
    received: u64,
}

impl Control {
    pub(super) fn new(fate: Arc<Fate>, faults: Arc<Faults>, streams: Vec<TcpStream>) -> Self {
        let wires = Mutex::new(Wires { streams, calls: 0, sent: 0, received: 0 });
        Self { fate, faults, wires }
    }

    pub(super) fn broadcast(&self, message: &[u8]) -> Result<(), RankError> {
        if message.len() > CONTROL_LIMIT {
            return Err(RankError::Call(too_large("a broadcast", message.len(), CONTROL_LIMIT)));
        }
        let mut wires = lock(&self.wires);
        let fault = self.begin(&mut wires)?;
        let _waiting = self.fate.enter(Doing::Broadcast);
        self.send(&mut wires, Kind::Message, message, fault)
    }

    /// `None`: rank 0 has said goodbye.
    pub(super) fn receive(&self) -> Result<Option<Vec<u8>>, RankError> {
        let mut wires = lock(&self.wires);
        self.begin(&mut wires)?;
        let waiting = self.fate.enter(Doing::Receive);
        match self.expect(&mut wires, Kind::Message, &Doing::Receive) {
            Ok(message) => Ok(Some(message)),
            Err(RankError::Ended(end)) if end.rank == 0 && end.kind == EndKind::Left => {
                drop(waiting);
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Whether the next message has begun to arrive. The end of the connection counts: the next call says why.
    pub(super) fn arrived(&self, within: Option<Duration>) -> Result<bool, RankError> {
        let wires = lock(&self.wires);
        let _waiting = self.fate.enter(Doing::Receive);
        let stream = &wires.streams[0];
        let failed =
            |error: std::io::Error| self.fate.lost(0, &format!("its control connection failed ({error})"));
        // A timeout of nothing is refused by the system.
        let within = within.map(|time| time.max(Duration::from_millis(1)));
        stream.set_read_timeout(within).map_err(failed)?;
        let seen = stream.peek(&mut [0]);
        stream.set_read_timeout(None).map_err(failed)?;
        match seen {
            Err(e)
                if matches!(
                    e.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) =>
            {
                Ok(false)
            }
            Ok(_) | Err(_) => Ok(true),
        }
    }

    pub(super) fn gather(&self, label: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>, RankError> {
        let ranks = self.fate.who.len();
        let limit = CONTROL_LIMIT / ranks;
        if mine.len() > limit {
            // The others already wait for this part.
            let reason = too_large(&format!("its part of agreement `{label}`"), mine.len(), limit);
            return Err(self.fate.blame(self.fate.rank, EndKind::Failed, reason));
        }
        let mut wires = lock(&self.wires);
        let fault = self.begin(&mut wires)?;
        let doing = Doing::Agree(label.to_owned());
        let _waiting = self.fate.enter(doing.clone());
        if self.fate.rank != 0 {
            // Only once rank 0 asks is it certain to read, so two long writes never face each other.
            let asked = self.expect(&mut wires, Kind::Ask, &doing)?;
            if asked != label.as_bytes() {
                let asked = Doing::Agree(String::from_utf8_lossy(&asked).into_owned());
                return Err(self.mismatch(0, &asked.to_string(), &doing));
            }
            self.send(&mut wires, Kind::Part, mine, fault)?;
            let all = self.expect(&mut wires, Kind::All, &doing)?;
            return unpack(&all, ranks).ok_or_else(|| self.damaged(0, "an agreement that cannot be read"));
        }
        self.send(&mut wires, Kind::Ask, label.as_bytes(), None)?;
        let mut parts = vec![mine.to_vec()];
        for link in 0..wires.streams.len() {
            parts.push(self.take(&wires, link, Kind::Part, &doing)?);
        }
        wires.received += 1;
        self.send(&mut wires, Kind::All, &pack(&parts), fault)?;
        Ok(parts)
    }

    fn begin(&self, wires: &mut Wires) -> Result<Option<Fault>, RankError> {
        wires.calls += 1;
        self.fate.begin(&self.faults, At::Control(wires.calls - 1))
    }

    /// Sends one frame on every connection of this rank.
    fn send(
        &self,
        wires: &mut Wires,
        kind: Kind,
        payload: &[u8],
        fault: Option<Fault>,
    ) -> Result<(), RankError> {
        let mut head = Head::of(kind, 0, wires.sent, payload).encode().to_vec();
        let bent = (fault == Some(Fault::Corrupt)).then(|| bend(payload));
        wires.sent += 1;
        if fault == Some(Fault::Drop) {
            return Ok(());
        }
        // A small frame leaves as one packet.
        let payload = bent.as_deref().unwrap_or(payload);
        let small = if payload.len() <= 4096 { payload.len() } else { 0 };
        head.extend_from_slice(&payload[..small]);
        for (link, stream) in wires.streams.iter().enumerate() {
            let peer = self.peer(link);
            if self.fate.has_parted(peer) {
                return Err(self.fate.lost(peer, "it has left"));
            }
            let mut out = Counted { stream, moved: &self.fate.moved };
            out.write_all(&head)
                .and_then(|()| out.write_all(&payload[small..]))
                .map_err(|error| self.fate.lost(peer, &format!("its control connection failed ({error})")))?;
        }
        Ok(())
    }

    /// On a follower: the next frame of rank 0.
    fn expect(&self, wires: &mut Wires, kind: Kind, doing: &Doing) -> Result<Vec<u8>, RankError> {
        let payload = self.take(wires, 0, kind, doing)?;
        wires.received += 1;
        Ok(payload)
    }

    fn take(&self, wires: &Wires, link: usize, kind: Kind, doing: &Doing) -> Result<Vec<u8>, RankError> {
        let peer = self.peer(link);
        let mut stream = Counted { stream: &wires.streams[link], moved: &self.fate.moved };
        let lost = |error| self.fate.lost(peer, &format!("its control connection closed ({error})"));
        let mut bytes = [0; HEAD];
        stream.read_exact(&mut bytes).map_err(lost)?;
        let head = Head::decode(&bytes).ok_or_else(|| self.damaged(peer, "a frame without a head"))?;
        if head.len > (CONTROL_LIMIT + FRAME_ROOM) as u64 {
            return Err(self.damaged(peer, &format!("a control frame of {} bytes, over the limit", head.len)));
        }
        let mut payload = Vec::with_capacity((head.len as usize).min(1 << 20));
        stream.take(head.len).read_to_end(&mut payload).map_err(lost)?;
        if payload.len() as u64 != head.len {
            return Err(self.fate.lost(peer, "its control connection closed within a frame"));
        }
        if crc32fast::hash(&payload) != head.crc {
            return Err(self.damaged(peer, &format!("control frame {} with a wrong checksum", head.seq)));
        }
        if head.kind != kind {
            let theirs = match head.kind {
                Kind::Ask => Doing::Agree(String::from_utf8_lossy(&payload).into_owned()).to_string(),
                Kind::Message => Doing::Broadcast.to_string(),
                kind => format!("the {kind:?} step of an agreement"),
            };
            return Err(self.mismatch(peer, &theirs, doing));
        }
        if head.seq != wires.received {
            let theirs = format!("{doing} with control frame {}", head.seq);
            return Err(self.mismatch(peer, &format!("{theirs}, not {}", wires.received), doing));
        }
        Ok(payload)
    }

    fn peer(&self, link: usize) -> usize {
        if self.fate.rank == 0 { link + 1 } else { 0 }
    }

    fn mismatch(&self, peer: usize, theirs: &str, doing: &Doing) -> RankError {
        let rank = self.fate.rank;
        let reason = format!("rank {peer} is in {theirs}, rank {rank} in {doing}");
        self.fate.blame(peer, EndKind::OutOfStep, reason)
    }

    fn damaged(&self, peer: usize, what: &str) -> RankError {
        let reason = format!("rank {} received {what}", self.fate.rank);
        self.fate.blame(peer, EndKind::Damaged, reason)
    }
}

fn too_large(what: &str, len: usize, limit: usize) -> String {
    format!("{what} has {len} bytes, the limit is {limit}: send less at a time")
}

fn pack(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut all = Vec::with_capacity(parts.iter().map(|part| part.len() + 8).sum());
    for part in parts {
        all.extend_from_slice(&(part.len() as u64).to_le_bytes());
        all.extend_from_slice(part);
    }
    all
}

fn unpack(mut all: &[u8], ranks: usize) -> Option<Vec<Vec<u8>>> {
    let mut parts = Vec::with_capacity(ranks);
    for _ in 0..ranks {
        let (len, rest) = all.split_first_chunk::<8>()?;
        let (part, rest) = rest.split_at_checked(usize::try_from(u64::from_le_bytes(*len)).ok()?)?;
        parts.push(part.to_vec());
        all = rest;
    }
    all.is_empty().then_some(parts)
}

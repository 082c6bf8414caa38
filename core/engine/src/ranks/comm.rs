//! Collectives over TCP: every rank sends its part to every other and reads every other's.
//!
//! One thread moves all connections at once (non-blocking sockets and `poll`), so parts of any size cannot block each
//! other. Sleeping in `poll` needs no timeout: the end of a world shuts the sockets down, which wakes it.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use plugfold_abi::{Comm, OpError, Slice, SliceMut};
use rustix::event::{PollFd, PollFlags, poll};

use super::fate::{Doing, Fate, lock};
use super::faults::bend;
use super::frame::{HEAD, Head, Kind};
use super::{At, EndKind, Fault, Faults, RankError};

/// The data plane of one rank.
pub struct TcpComm {
    fate: Arc<Fate>,
    faults: Arc<Faults>,
    tag: AtomicU32,
    data: Mutex<Data>,
}

struct Data {
    links: Vec<Link>,
    seq: u64,
    history: u64,
}

/// The connection to one other rank, and how far the exchange with it is.
struct Link {
    peer: usize,
    stream: TcpStream,
    head: [u8; HEAD],
    sent: usize,
    got: usize,
}

impl TcpComm {
    /// `streams`: one connection to each other rank, none of which blocks.
    pub(super) fn new(fate: Arc<Fate>, faults: Arc<Faults>, streams: Vec<(usize, TcpStream)>) -> Self {
        let link = |(peer, stream)| Link { peer, stream, head: [0; HEAD], sent: 0, got: 0 };
        let links = streams.into_iter().map(link).collect();
        let data = Mutex::new(Data { links, seq: 0, history: 0xcbf2_9ce4_8422_2325 });
        Self { fate, faults, tag: AtomicU32::new(0), data }
    }

    /// What the next exchanges through [`Comm::all_gather`] are, for instance the index of the program's step. Ranks
    /// compare it, so two exchanges of one size in swapped order are found.
    pub fn mark(&self, tag: u32) {
        self.tag.store(tag, Ordering::Relaxed);
    }

    /// How many exchanges this rank has begun, and a hash of their tags and sizes.
    pub fn history(&self) -> (u64, u64) {
        let data = lock(&self.data);
        (data.seq, data.history)
    }

    /// [`Comm::all_gather`] with a tag of its own.
    ///
    /// # Errors
    /// [`RankError::Call`] before anything is sent; [`RankError::Ended`] when a rank is gone, is in another exchange or
    /// sent damaged bytes.
    pub fn gather(&self, tag: u32, mine: &[u8], all: &mut [u8]) -> Result<(), RankError> {
        let (rank, ranks, len) = (self.fate.rank, self.fate.who.len(), mine.len());
        if all.len() != ranks * len {
            let text = format!(
                "rank {rank} gathers {len} bytes from each of {ranks} ranks into {} bytes, not {}",
                all.len(),
                ranks * len
            );
            return Err(RankError::Call(text));
        }
        let mut data = lock(&self.data);
        let fault = self.fate.begin(&self.faults, At::Exchange(data.seq))?;
        let head = Head::of(Kind::Exchange, tag, data.seq, mine);
        for word in [u64::from(tag), head.len] {
            data.history = (data.history ^ word).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
        }
        data.seq += 1;
        all[rank * len..][..len].copy_from_slice(mine);
        if data.links.is_empty() {
            return Ok(());
        }
        let _waiting = self.fate.enter(Doing::Exchange { seq: head.seq, tag, bytes: len });
        let bent = (fault == Some(Fault::Corrupt)).then(|| bend(mine));
        let out = (head.encode(), bent.as_deref().unwrap_or(mine));
        let full = HEAD + len;
        for link in &mut data.links {
            link.got = 0;
            link.sent = if fault == Some(Fault::Drop) { full } else { 0 };
        }
        while data.links.iter().any(|link| link.sent < full || link.got < full) {
            for link in &mut data.links {
                let part = &mut all[link.peer * len..][..len];
                link.send(&out, &self.fate).and_then(|()| link.receive(part, &self.fate)).map_err(
                    |error| self.fate.lost(link.peer, &format!("its data connection closed ({error})")),
                )?;
                if link.got >= HEAD {
                    self.compare(&head, link)?;
                }
            }
            wait(&data.links, full);
        }
        for link in &data.links {
            let sum = Head::decode(&link.head).map(|theirs| theirs.crc);
            if sum != Some(crc32fast::hash(&all[link.peer * len..][..len])) {
                let reason = format!("its part of exchange {} has a wrong checksum at rank {rank}", head.seq);
                return Err(self.fate.blame(link.peer, EndKind::Damaged, reason));
            }
        }
        Ok(())
    }

    fn compare(&self, mine: &Head, link: &Link) -> Result<(), RankError> {
        let (rank, peer) = (self.fate.rank, link.peer);
        let Some(theirs) = Head::decode(&link.head) else {
            let reason = format!("rank {rank} received no head in exchange {}", mine.seq);
            return Err(self.fate.blame(peer, EndKind::Damaged, reason));
        };
        if (theirs.kind, theirs.seq, theirs.tag, theirs.len) == (mine.kind, mine.seq, mine.tag, mine.len) {
            return Ok(());
        }
        let say = |head: &Head| Doing::Exchange { seq: head.seq, tag: head.tag, bytes: head.len as usize };
        let reason = format!("rank {rank} is in {}, rank {peer} in {}", say(mine), say(&theirs));
        Err(self.fate.blame(peer, EndKind::OutOfStep, reason))
    }
}

impl Comm for TcpComm {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(self.fate.rank as u32)
    }

    fn ranks(&self) -> Result<u32, OpError> {
        Ok(self.fate.who.len() as u32)
    }

    fn all_gather(&self, mine: Slice<'_, u8>, all: SliceMut<'_, u8>) -> Result<(), OpError> {
        let tag = self.tag.load(Ordering::Relaxed);
        self.gather(tag, &mine, all.into_mut()).map_err(|error| OpError::new(error.to_string()))
    }
}

impl Link {
    /// Sends what the socket takes now.
    fn send(&mut self, (head, payload): &([u8; HEAD], &[u8]), fate: &Fate) -> io::Result<()> {
        while self.sent < HEAD + payload.len() {
            let head = &head[self.sent.min(HEAD)..];
            let payload = &payload[self.sent.saturating_sub(HEAD)..];
            match (&self.stream).write_vectored(&[IoSlice::new(head), IoSlice::new(payload)]) {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            fate.moved.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Reads what has come, never beyond this exchange.
    fn receive(&mut self, part: &mut [u8], fate: &Fate) -> io::Result<()> {
        while self.got < HEAD + part.len() {
            let head = &mut self.head[self.got.min(HEAD)..];
            let part = &mut part[self.got.saturating_sub(HEAD)..];
            match (&self.stream).read_vectored(&mut [IoSliceMut::new(head), IoSliceMut::new(part)]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(got) => self.got += got,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            fate.moved.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Sleeps until a connection can move. An error here shows at the next read or write.
fn wait(links: &[Link], full: usize) {
    let mut sockets: Vec<PollFd<'_>> = Vec::with_capacity(links.len());
    for link in links {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::IN, link.got < full);
        flags.set(PollFlags::OUT, link.sent < full);
        if !flags.is_empty() {
            sockets.push(PollFd::new(&link.stream, flags));
        }
    }
    if !sockets.is_empty() {
        let _ = poll(&mut sockets, None);
    }
}

//! Frames of both planes: a head of fixed size, then the payload.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU64, Ordering};

const MAGIC: u32 = u32::from_le_bytes(*b"PFfr");
/// Bytes of a head on the wire.
pub(super) const HEAD: usize = 32;
/// Largest step of a transfer between two counts of progress.
const STEP: usize = 64 << 10;

/// What a frame is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Control: rank 0 to a follower, one broadcast.
    Message,
    /// Control: rank 0 asks for a part of an agreement; the payload is its label.
    Ask,
    /// Control: a follower's part.
    Part,
    /// Control: all parts.
    All,
    /// Data: one rank's part of an all-gather.
    Exchange,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Message, Self::Ask, Self::Part, Self::All, Self::Exchange];
}

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub kind: Kind,
    /// What the caller says it is exchanging.
    pub tag: u32,
    /// Counts the frames (control) or exchanges (data) of a connection.
    pub seq: u64,
    /// Bytes of the payload.
    pub len: u64,
    /// CRC-32 of the payload.
    pub crc: u32,
}

impl Head {
    pub(super) fn of(kind: Kind, tag: u32, seq: u64, payload: &[u8]) -> Self {
        Self { kind, tag, seq, len: payload.len() as u64, crc: crc32fast::hash(payload) }
    }

    pub(super) fn encode(&self) -> [u8; HEAD] {
        let mut bytes = [0; HEAD];
        bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[8..12].copy_from_slice(&self.tag.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.crc.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.seq.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// `None`: these bytes are no head, so the connection has lost its frame borders.
    pub(super) fn decode(bytes: &[u8; HEAD]) -> Option<Self> {
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u8 == bytes[4])?;
        (word(0) == MAGIC).then(|| Self { kind, tag: word(8), crc: word(12), seq: long(16), len: long(24) })
    }
}

/// A stream that counts every transfer, so that a slow one is told from a stuck one.
pub(super) struct Counted<'a> {
    pub stream: &'a TcpStream,
    pub moved: &'a AtomicU64,
}

impl Read for Counted<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let got = self.stream.read(buf)?;
        self.moved.fetch_add(1, Ordering::Relaxed);
        Ok(got)
    }
}

impl Write for Counted<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        let sent = self.stream.write(&buf[..buf.len().min(STEP)])?;
        self.moved.fetch_add(1, Ordering::Relaxed);
        Ok(sent)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_head_survives_the_wire(kind in 0usize..5, tag: u32, seq: u64, payload: Vec<u8>) {
            let head = Head::of(Kind::ALL[kind], tag, seq, &payload);
            prop_assert_eq!(Head::decode(&head.encode()), Some(head));
        }

        #[test]
        fn a_head_with_a_wrong_start_is_none(at in 0usize..5, flip in 8u8..=255) {
            let mut bytes = Head::of(Kind::Exchange, 1, 2, b"three").encode();
            bytes[at] ^= flip;
            prop_assert_eq!(Head::decode(&bytes), None);
        }
    }
}

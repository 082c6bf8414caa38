//! How ranks find and check each other before there is a world.
//!
//! A follower opens a control and a heartbeat connection to rank 0, and each rank one data connection to every lower
//! rank. Every connection begins with a hello that is accepted or refused with a reason.

use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{RankError, World};

/// Version of everything that ranks say to each other.
pub const PROTOCOL: u32 = 1;
const MAGIC: &[u8; 8] = b"PLUGFOLD";
/// Longest note of the handshake, in bytes.
const NOTE_LIMIT: usize = 1 << 20;
/// How long a caller may take for its hello.
const HELLO_TIME: Duration = Duration::from_secs(2);
/// Pause between two looks at a listener, and two tries to connect, while the ranks start.
const PAUSE: Duration = Duration::from_millis(5);
/// How many callers that were turned away an error lists.
const STRANGERS: usize = 4;

/// What all ranks of one engine share, so that strangers and ranks of other engines are turned away. Only its hash is
/// sent. It does not hide the ranks' traffic: their network must be a private one.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// A secret that the user chose.
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// A new one, from the system's random numbers.
    ///
    /// # Errors
    /// [`RankError::Setup`] when the system has none.
    pub fn random() -> Result<Self, RankError> {
        Ok(Self(format!("{:016x}{:016x}", random()?, random()?)))
    }

    /// The text, for the environment of a rank's process.
    pub fn reveal(&self) -> &str {
        &self.0
    }

    fn token(&self) -> [u8; 32] {
        Sha256::digest(format!("plugfold ranks {}", self.0)).into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn random() -> Result<u64, RankError> {
    let mut bytes = [0; 8];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .map_err(|error| RankError::Setup { rank: 0, source: error.into() })?;
    Ok(u64::from_le_bytes(bytes))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Role {
    Control,
    Watch,
    Data,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Hello {
    token: [u8; 32],
    rank: usize,
    ranks: usize,
    /// Tells two processes apart that claim one rank.
    id: u64,
    pid: u32,
    role: Role,
    /// Where this rank takes data connections.
    data: Option<SocketAddr>,
}

#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    Accepted,
    Refused(String),
    /// All ranks are there: each in words, and where it takes data connections.
    Welcome {
        who: Vec<String>,
        data: Vec<Option<SocketAddr>>,
    },
}

/// Why a note could not be read.
#[derive(Debug)]
enum Bad {
    Closed(io::Error),
    NotOurs,
    Version(u32),
    Text(String),
}

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed(error) => write!(f, "no answer ({error})"),
            Self::NotOurs => f.write_str("it does not speak the protocol of Plugfold's ranks"),
            Self::Version(theirs) => {
                write!(
                    f,
                    "it speaks version {theirs} of the ranks' protocol, not {PROTOCOL}: run one build everywhere"
                )
            }
            Self::Text(error) => write!(f, "its greeting cannot be read ({error})"),
        }
    }
}

fn write_note(mut stream: &TcpStream, version: u32, note: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(note)?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&version.to_le_bytes());
    bytes.extend_from_slice(&(text.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&text);
    stream.write_all(&bytes)
}

fn read_note<T: DeserializeOwned>(stream: &TcpStream, deadline: Instant) -> Result<T, Bad> {
    let mut word = [0; 4];
    let mut magic = [0; 8];
    read_by(stream, &mut magic, deadline)?;
    if &magic != MAGIC {
        return Err(Bad::NotOurs);
    }
    read_by(stream, &mut word, deadline)?;
    let version = u32::from_le_bytes(word);
    if version != PROTOCOL {
        return Err(Bad::Version(version));
    }
    read_by(stream, &mut word, deadline)?;
    let len = u32::from_le_bytes(word) as usize;
    if len > NOTE_LIMIT {
        return Err(Bad::Text(format!("{len} bytes, the limit is {NOTE_LIMIT}")));
    }
    let mut text = vec![0; len];
    read_by(stream, &mut text, deadline)?;
    serde_json::from_slice(&text).map_err(|error| Bad::Text(error.to_string()))
}

fn read_by(mut stream: &TcpStream, mut buffer: &mut [u8], deadline: Instant) -> Result<(), Bad> {
    while !buffer.is_empty() {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        stream.set_read_timeout(Some(left)).map_err(Bad::Closed)?;
        match stream.read(buffer) {
            Ok(0) => return Err(Bad::Closed(ErrorKind::UnexpectedEof.into())),
            Ok(got) => buffer = &mut buffer[got..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) if Instant::now() >= deadline => return Err(Bad::Closed(ErrorKind::TimedOut.into())),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {}
            Err(error) => return Err(Bad::Closed(error)),
        }
    }
    Ok(())
}

/// Takes the same time for every wrong token.
fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |sum, (a, b)| std::hint::black_box(sum | (a ^ b))) == 0
}

/// A listener that lets ranks in.
struct Gate<'a> {
    listener: &'a TcpListener,
    addr: SocketAddr,
    rank: usize,
    ranks: usize,
    token: [u8; 32],
    timeout: Duration,
    deadline: Instant,
    strangers: Vec<String>,
}

impl Gate<'_> {
    /// The next rank's connection; the caller accepts it. Strangers are turned away, a rank that was started with other
    /// numbers ends the start.
    fn next(
        &mut self,
        missing: &dyn Fn() -> String,
        alive: &mut dyn FnMut() -> Result<(), RankError>,
    ) -> Result<(Hello, TcpStream, SocketAddr), RankError> {
        let setup = |source| RankError::Setup { rank: self.rank, source };
        self.listener.set_nonblocking(true).map_err(setup)?;
        loop {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    alive()?;
                    if Instant::now() >= self.deadline {
                        return Err(self.absent(missing()));
                    }
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) =>
                {
                    continue;
                }
                Err(source) => return Err(RankError::Setup { rank: self.rank, source }),
            };
            if stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true)).is_err() {
                continue;
            }
            let hello = match read_note::<Hello>(&stream, Instant::now() + HELLO_TIME) {
                Ok(hello) if same(&hello.token, &self.token) => hello,
                Ok(hello) => {
                    let reason = format!(
                        "rank {} of {} (pid {}) has another secret than rank {}: give all ranks the same",
                        hello.rank, hello.ranks, hello.pid, self.rank
                    );
                    self.turn_away(&stream, from, reason);
                    continue;
                }
                Err(bad) => {
                    self.turn_away(&stream, from, bad.to_string());
                    continue;
                }
            };
            match self.check(&hello, from) {
                Ok(()) => return Ok((hello, stream, from)),
                Err(reason) => return Err(refuse(&stream, reason)),
            }
        }
    }

    fn check(&self, hello: &Hello, from: SocketAddr) -> Result<(), String> {
        let (rank, ranks) = (self.rank, self.ranks);
        if hello.ranks != ranks {
            return Err(format!(
                "rank {} (pid {}, {from}) was started for {} ranks, rank {rank} for {ranks}: give all ranks the same number",
                hello.rank, hello.pid, hello.ranks
            ));
        }
        if hello.rank <= rank || hello.rank >= ranks {
            return Err(format!(
                "the process {} at {from} says it is rank {}, but rank {rank} of {ranks} waits for ranks {} to {}",
                hello.pid,
                hello.rank,
                rank + 1,
                ranks - 1
            ));
        }
        Ok(())
    }

    fn turn_away(&mut self, stream: &TcpStream, from: SocketAddr, reason: String) {
        tracing::warn!(%from, reason, "turned a caller away from the ranks' port");
        let _ = write_note(stream, PROTOCOL, &Reply::Refused(reason.clone()));
        if self.strangers.len() < STRANGERS {
            self.strangers.push(format!("{from}: {reason}"));
        }
    }

    fn absent(&self, missing: String) -> RankError {
        let strangers = match self.strangers.as_slice() {
            [] => "; start it with this address".to_owned(),
            some => format!("; turned away: {}", some.join("; ")),
        };
        RankError::Absent { missing, ranks: self.ranks, addr: self.addr, timeout: self.timeout, strangers }
    }
}

fn refuse(stream: &TcpStream, reason: String) -> RankError {
    let _ = write_note(stream, PROTOCOL, &Reply::Refused(reason.clone()));
    RankError::Refused(reason)
}

/// A follower while the ranks start.
struct Seat {
    id: u64,
    who: String,
    data: Option<SocketAddr>,
    control: Option<TcpStream>,
    watch: Option<TcpStream>,
}

/// Rank 0 before its world: it listens, so the address can be given to the others.
#[derive(Debug)]
pub struct Lead {
    listener: TcpListener,
    addr: SocketAddr,
}

impl Lead {
    /// Listens at `addr`; port 0 takes any free one.
    ///
    /// # Errors
    /// [`RankError::Listen`], for instance when the port is in use.
    pub fn bind(addr: SocketAddr) -> Result<Self, RankError> {
        let listen = || {
            let listener = TcpListener::bind(addr)?;
            let addr = listener.local_addr()?;
            Ok(Self { listener, addr })
        };
        listen().map_err(|source| RankError::Listen { rank: 0, addr, source })
    }

    /// Where the others find this rank.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Waits for all followers. `alive` is asked now and then, and ends the wait when it fails (a child has exited).
    ///
    /// # Errors
    /// [`RankError::Absent`] after `timeout`, [`RankError::Refused`] when a rank was started with other numbers or
    /// twice; the ranks that are there get the same message.
    pub fn world(
        self,
        ranks: usize,
        secret: &Secret,
        timeout: Duration,
        alive: &mut dyn FnMut() -> Result<(), RankError>,
    ) -> Result<World, RankError> {
        let mut seats: Vec<Option<Seat>> = Vec::new();
        seats.resize_with(ranks.saturating_sub(1), || None);
        self.seat_all(&mut seats, secret, timeout, alive).inspect_err(|error| {
            for control in seats.iter().flatten().filter_map(|seat| seat.control.as_ref()) {
                let _ = write_note(control, PROTOCOL, &Reply::Refused(error.to_string()));
            }
        })
    }

    fn seat_all(
        &self,
        seats: &mut [Option<Seat>],
        secret: &Secret,
        timeout: Duration,
        alive: &mut dyn FnMut() -> Result<(), RankError>,
    ) -> Result<World, RankError> {
        let ranks = seats.len() + 1;
        let mut gate = Gate {
            listener: &self.listener,
            addr: self.addr,
            rank: 0,
            ranks,
            token: secret.token(),
            timeout,
            deadline: Instant::now() + timeout,
            strangers: Vec::new(),
        };
        let full =
            |seat: &Option<Seat>| seat.as_ref().is_some_and(|s| s.control.is_some() && s.watch.is_some());
        while !seats.iter().all(full) {
            let missing = || names(seats.iter().map(full));
            let (hello, stream, from) = gate.next(&missing, &mut || present(seats).and_then(|()| alive()))?;
            let who = format!("rank {} of {ranks} (pid {}, {from})", hello.rank, hello.pid);
            let seat = seats[hello.rank - 1].get_or_insert_with(|| Seat {
                id: hello.id,
                who: who.clone(),
                data: None,
                control: None,
                watch: None,
            });
            let place = match hello.role {
                Role::Watch => &mut seat.watch,
                _ => &mut seat.control,
            };
            if seat.id != hello.id || place.is_some() || hello.role == Role::Data {
                let reason = format!(
                    "two processes say they are rank {}: {} and {who}: give each its own rank",
                    hello.rank, seat.who
                );
                return Err(refuse(&stream, reason));
            }
            if hello.role == Role::Control {
                (seat.who, seat.data) = (who, hello.data);
            }
            let _ = write_note(&stream, PROTOCOL, &Reply::Accepted);
            *place = Some(stream);
        }
        let own = format!("rank 0 of {ranks} (pid {}, {})", std::process::id(), self.addr);
        let seated = || seats.iter().flatten();
        let who: Vec<String> = std::iter::once(own).chain(seated().map(|seat| seat.who.clone())).collect();
        let data = std::iter::once(None).chain(seated().map(|seat| seat.data)).collect();
        let welcome = Reply::Welcome { who: who.clone(), data };
        for control in seated().filter_map(|seat| seat.control.as_ref()) {
            let _ = write_note(control, PROTOCOL, &welcome);
        }
        let data = accept_data(&mut gate, &mut || present(seats).and_then(|()| alive()))?;
        let mut control = Vec::new();
        let mut watch = Vec::new();
        for (rank, seat) in (1..).zip(seats.iter_mut().filter_map(Option::take)) {
            control.extend(seat.control);
            watch.extend(seat.watch.map(|stream| (rank, stream)));
        }
        World::build(0, who, control, watch, data)
    }
}

/// Fails when a rank that has joined is gone again.
fn present(seats: &[Option<Seat>]) -> Result<(), RankError> {
    for seat in seats.iter().flatten() {
        if seat.control.as_ref().is_some_and(closed) {
            return Err(RankError::Refused(format!("{} went away while the ranks were starting", seat.who)));
        }
    }
    Ok(())
}

fn closed(stream: &TcpStream) -> bool {
    let peek = stream.set_nonblocking(true).and_then(|()| stream.peek(&mut [0]));
    let _ = stream.set_nonblocking(false);
    match peek {
        Ok(got) => got == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// The followers whose flag is not set, in words.
fn names(there: impl Iterator<Item = bool>) -> String {
    let missing: Vec<String> =
        (1..).zip(there).filter(|(_, there)| !there).map(|(rank, _): (usize, _)| rank.to_string()).collect();
    format!("rank{} {}", if missing.len() == 1 { "" } else { "s" }, missing.join(", "))
}

/// The data connections of all ranks above this one.
fn accept_data(
    gate: &mut Gate<'_>,
    alive: &mut dyn FnMut() -> Result<(), RankError>,
) -> Result<Vec<(usize, TcpStream)>, RankError> {
    let mut streams: Vec<(usize, TcpStream)> = Vec::new();
    while gate.rank + 1 + streams.len() < gate.ranks {
        let (first, ranks) = (gate.rank, gate.ranks);
        let there = |rank| rank <= first || streams.iter().any(|(peer, _)| *peer == rank);
        let missing = || names((1..ranks).map(there));
        let (hello, stream, from) = gate.next(&missing, alive)?;
        if hello.role != Role::Data || there(hello.rank) {
            let reason =
                format!("rank {} at {from} joined twice: give each process its own rank", hello.rank);
            return Err(refuse(&stream, reason));
        }
        let _ = write_note(&stream, PROTOCOL, &Reply::Accepted);
        streams.push((hello.rank, stream));
    }
    Ok(streams)
}

/// Joins the world of rank 0 at `addr`.
pub(super) fn join(
    addr: SocketAddr,
    rank: usize,
    ranks: usize,
    secret: &Secret,
    timeout: Duration,
) -> Result<World, RankError> {
    let deadline = Instant::now() + timeout;
    let lost = |peer: usize, addr: SocketAddr, reason: String| {
        let peer = format!("rank {peer}");
        RankError::Unreachable { rank, ranks, peer, addr, timeout, reason }
    };
    let connect = |peer: usize, addr: SocketAddr| loop {
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        let tried = TcpStream::connect_timeout(&addr, left);
        match tried.and_then(|stream| stream.set_nodelay(true).map(|()| stream)) {
            Ok(stream) => return Ok(stream),
            Err(error) if Instant::now() + PAUSE >= deadline => {
                return Err(lost(
                    peer,
                    addr,
                    format!("{error}; start rank {peer} first, or give its address"),
                ));
            }
            // Rank 0 may not listen yet.
            Err(_) => std::thread::sleep(PAUSE),
        }
    };
    let answer =
        |stream: &TcpStream, peer: usize, addr: SocketAddr| match read_note::<Reply>(stream, deadline) {
            Ok(Reply::Refused(reason)) => {
                Err(RankError::Refused(format!("rank {peer} at {addr} refused rank {rank}: {reason}")))
            }
            Ok(reply) => Ok(reply),
            Err(bad) => Err(lost(peer, addr, bad.to_string())),
        };
    let setup = |source| RankError::Setup { rank, source };

    let control = connect(0, addr)?;
    let here = control.local_addr().map_err(setup)?.ip();
    let listener = TcpListener::bind((here, 0)).map_err(setup)?;
    let data_addr = listener.local_addr().map_err(setup)?;
    let mut hello = Hello {
        token: secret.token(),
        rank,
        ranks,
        id: random()?,
        pid: std::process::id(),
        role: Role::Control,
        data: Some(data_addr),
    };
    let mut greet = |stream: TcpStream, peer: usize, addr: SocketAddr, role: Role| {
        hello.role = role;
        write_note(&stream, PROTOCOL, &hello).map_err(|error| lost(peer, addr, error.to_string()))?;
        answer(&stream, peer, addr).map(|_| stream)
    };
    let control = greet(control, 0, addr, Role::Control)?;
    let watch = greet(connect(0, addr)?, 0, addr, Role::Watch)?;
    let Reply::Welcome { who, data: addrs } = answer(&control, 0, addr)? else {
        return Err(lost(0, addr, "it did not complete its greeting".to_owned()));
    };
    let mut data = Vec::new();
    for (peer, peer_addr) in addrs.iter().enumerate().take(rank) {
        let peer_addr = peer_addr.unwrap_or(addr);
        data.push((peer, greet(connect(peer, peer_addr)?, peer, peer_addr, Role::Data)?));
    }
    let mut gate = Gate {
        listener: &listener,
        addr: data_addr,
        rank,
        ranks,
        token: secret.token(),
        timeout,
        deadline,
        strangers: Vec::new(),
    };
    let mut alive = || {
        if closed(&control) {
            return Err(lost(0, addr, "it went away while the ranks were starting".to_owned()));
        }
        Ok(())
    };
    data.extend(accept_data(&mut gate, &mut alive)?);
    World::build(rank, who, vec![control], vec![(0, watch)], data)
}

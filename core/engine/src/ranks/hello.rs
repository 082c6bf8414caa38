//! How ranks find and check each other before there is a world.
//!
//! A follower opens a control and a heartbeat connection to rank 0, and each rank one data connection to every lower
//! rank. Every connection begins with a hello that is accepted or refused with a reason. Then each follower says that
//! it has all its connections, and when all have, rank 0 lets the world begin.

use std::fmt;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};

use super::note::{self, Hello, Reply, Role};
use super::{RankError, World};

/// How long a caller may take for its hello.
const HELLO_TIME: Duration = Duration::from_secs(2);
/// Pause between two looks at a listener, and two tries to connect, while the ranks start.
const PAUSE: Duration = Duration::from_millis(5);
/// How much longer than rank 0 a follower waits that has been let in: rank 0 knows who is missing.
const GRACE: Duration = Duration::from_secs(1);
/// How many callers that were turned away an error lists.
const STRANGERS: usize = 4;

type Check<'a> = &'a mut dyn FnMut() -> Result<(), RankError>;

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
    /// [`RankError::Start`] when the system has none.
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
        .map_err(|error| RankError::Start(format!("the system gives no random numbers: {error}")))?;
    Ok(u64::from_le_bytes(bytes))
}

/// Takes the same time for every wrong token.
fn same(a: &[u8; 32], b: &[u8; 32]) -> bool {
    a.iter().zip(b).fold(0, |sum, (a, b)| std::hint::black_box(sum | (a ^ b))) == 0
}

/// For errors of the system on this rank's own connections.
pub(super) fn setup(rank: usize) -> impl Fn(io::Error) -> RankError + Copy {
    move |error| RankError::Start(format!("rank {rank} cannot set up its connections: {error}"))
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
    /// The next rank's connection; the caller accepts it. Strangers are turned away; a rank that was started with other
    /// numbers ends the start.
    fn next(
        &mut self,
        there: &dyn Fn(usize) -> bool,
        alive: Check<'_>,
    ) -> Result<(Hello, TcpStream, SocketAddr), RankError> {
        self.listener.set_nonblocking(true).map_err(setup(self.rank))?;
        loop {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    alive()?;
                    if Instant::now() >= self.deadline {
                        return Err(self.absent(there));
                    }
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Err(error)
                    if matches!(error.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) =>
                {
                    continue;
                }
                Err(error) => return Err(setup(self.rank)(error)),
            };
            if stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true)).is_err() {
                continue;
            }
            let reason = match note::read::<Hello>(&stream, Instant::now() + HELLO_TIME) {
                Ok(hello) if same(&hello.token, &self.token) => {
                    return match self.check(&hello, from) {
                        Ok(()) => Ok((hello, stream, from)),
                        Err(reason) => Err(refuse(&stream, reason)),
                    };
                }
                Ok(Hello { rank, ranks, pid, .. }) => format!(
                    "rank {rank} of {ranks} (pid {pid}) has another secret than rank {}: give all ranks the same",
                    self.rank
                ),
                Err(reason) => reason,
            };
            tracing::warn!(%from, reason, "turned a caller away from the ranks' port");
            if self.strangers.len() < STRANGERS {
                self.strangers.push(format!("{from}: {reason}"));
            }
            refuse(&stream, reason);
        }
    }

    fn check(&self, hello: &Hello, from: SocketAddr) -> Result<(), String> {
        let (rank, ranks) = (self.rank, self.ranks);
        let who = format!("rank {} (pid {}, {from})", hello.rank, hello.pid);
        if hello.ranks != ranks {
            let theirs = hello.ranks;
            return Err(format!(
                "{who} was started for {theirs} ranks, rank {rank} for {ranks}: give all ranks the same number"
            ));
        }
        if hello.rank <= rank || hello.rank >= ranks {
            return Err(format!(
                "{who} called at rank {rank} of {ranks}, which waits for higher ranks below {ranks}"
            ));
        }
        Ok(())
    }

    fn absent(&self, there: &dyn Fn(usize) -> bool) -> RankError {
        let missing: Vec<_> =
            (self.rank + 1..self.ranks).filter(|&rank| !there(rank)).map(|rank| rank.to_string()).collect();
        let (plural, missing) = (if missing.len() == 1 { "" } else { "s" }, missing.join(", "));
        let mend = match self.strangers.as_slice() {
            [] => "; start it with this address".to_owned(),
            some => format!("; turned away: {}", some.join("; ")),
        };
        let (ranks, addr, seconds) = (self.ranks, self.addr, self.timeout.as_secs_f32());
        RankError::Start(format!(
            "rank{plural} {missing} of {ranks} did not join at {addr} within {seconds} s{mend}"
        ))
    }

    /// The data connections of all ranks above this one.
    fn data(&mut self, alive: Check<'_>) -> Result<Vec<(usize, TcpStream)>, RankError> {
        let mut streams: Vec<(usize, TcpStream)> = Vec::new();
        while self.rank + 1 + streams.len() < self.ranks {
            let there = |rank| streams.iter().any(|(peer, _)| *peer == rank);
            let (hello, stream, from) = self.next(&there, alive)?;
            if hello.role != Role::Data || there(hello.rank) {
                return Err(twice(&stream, hello.rank, "one that has joined", &from.to_string()));
            }
            let _ = note::write(&stream, &Reply::Accepted);
            streams.push((hello.rank, stream));
        }
        Ok(streams)
    }
}

fn refuse(stream: &TcpStream, reason: String) -> RankError {
    let _ = note::write(stream, &Reply::Refused(reason.clone()));
    RankError::Start(reason)
}

fn twice(stream: &TcpStream, rank: usize, first: &str, second: &str) -> RankError {
    refuse(
        stream,
        format!("two processes say they are rank {rank}: {first} and {second}: give each its own rank"),
    )
}

/// A follower while the ranks start.
struct Seat {
    id: u64,
    who: String,
    data: SocketAddr,
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
    /// [`RankError::Start`], for instance when the port is in use.
    pub fn bind(addr: SocketAddr) -> Result<Self, RankError> {
        TcpListener::bind(addr)
            .and_then(|listener| listener.local_addr().map(|addr| Self { listener, addr }))
            .map_err(|error| {
                let mend = "free the port or give another address";
                RankError::Start(format!(
                    "rank 0 cannot listen at {addr} for the other ranks: {error}; {mend}"
                ))
            })
    }

    /// Where the others find this rank.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Waits for all followers. `alive` is asked now and then, and ends the wait when it fails (a child has exited).
    ///
    /// # Errors
    /// [`RankError::Start`] after `timeout`, or when a rank was started with other numbers or twice; the ranks that are
    /// there get the same message.
    pub fn world(
        self,
        ranks: usize,
        secret: &Secret,
        timeout: Duration,
        alive: Check<'_>,
    ) -> Result<World, RankError> {
        let followers =
            ranks.checked_sub(1).ok_or_else(|| RankError::Start("0 ranks: give at least 1".into()))?;
        let mut seats: Vec<Option<Seat>> = (0..followers).map(|_| None).collect();
        self.seat_all(&mut seats, secret, timeout, alive).inspect_err(|error| {
            for control in seats.iter().flatten().filter_map(|seat| seat.control.as_ref()) {
                let _ = note::write(control, &Reply::Refused(error.to_string()));
            }
        })
    }

    fn seat_all(
        &self,
        seats: &mut [Option<Seat>],
        secret: &Secret,
        timeout: Duration,
        alive: Check<'_>,
    ) -> Result<World, RankError> {
        let (ranks, addr) = (seats.len() + 1, self.addr);
        let (token, deadline) = (secret.token(), Instant::now() + timeout);
        let strangers = Vec::new();
        let mut gate =
            Gate { listener: &self.listener, addr, rank: 0, ranks, token, timeout, deadline, strangers };
        let full =
            |seat: &Option<Seat>| seat.as_ref().is_some_and(|s| s.control.is_some() && s.watch.is_some());
        while !seats.iter().all(full) {
            let mut check = || present(seats).and_then(|()| alive());
            let (hello, stream, from) = gate.next(&|rank| full(&seats[rank - 1]), &mut check)?;
            let who = format!("rank {} of {ranks} (pid {}, {from})", hello.rank, hello.pid);
            let seat = seats[hello.rank - 1].get_or_insert_with(|| Seat {
                id: hello.id,
                who: who.clone(),
                data: hello.data,
                control: None,
                watch: None,
            });
            let place = if hello.role == Role::Watch { &mut seat.watch } else { &mut seat.control };
            if seat.id != hello.id || place.is_some() || hello.role == Role::Data {
                return Err(twice(&stream, hello.rank, &seat.who, &who));
            }
            let _ = note::write(&stream, &Reply::Accepted);
            *place = Some(stream);
        }
        let mut who = vec![format!("rank 0 of {ranks} (pid {}, {addr})", std::process::id())];
        who.extend(seats.iter().flatten().map(|seat| seat.who.clone()));
        let data = seats.iter().flatten().map(|seat| seat.data).collect();
        let welcome = Reply::Welcome { who: who.clone(), data };
        for control in seats.iter().flatten().filter_map(|seat| seat.control.as_ref()) {
            let _ = note::write(control, &welcome);
        }
        let data = gate.data(&mut || present(seats).and_then(|()| alive()))?;
        // Heartbeats begin together: only when each rank has all its connections.
        let mut ready = vec![false; ranks];
        while let Some(rank) = (1..ranks).find(|&rank| !ready[rank]) {
            present(seats).and_then(|()| alive())?;
            if Instant::now() >= deadline {
                return Err(gate.absent(&|rank| ready[rank]));
            }
            match seats[rank - 1].as_ref().and_then(|seat| seat.control.as_ref()) {
                Some(control) if note::waits(control) => {
                    ready[rank] = note::read::<Reply>(control, deadline).is_ok();
                }
                _ => std::thread::sleep(PAUSE),
            }
        }
        let mut control = Vec::new();
        let mut watch = Vec::new();
        for (rank, seat) in (1..).zip(seats.iter_mut().filter_map(Option::take)) {
            seat.control.iter().for_each(|control| drop(note::write(control, &Reply::Accepted)));
            control.extend(seat.control);
            watch.extend(seat.watch.map(|stream| (rank, stream)));
        }
        World::build(0, who, control, watch, data)
    }
}

/// Fails when a rank that has joined is gone again.
fn present(seats: &[Option<Seat>]) -> Result<(), RankError> {
    let gone = |seat: &&Seat| seat.control.as_ref().is_some_and(note::closed);
    seats.iter().flatten().find(gone).map_or(Ok(()), |seat| {
        Err(RankError::Start(format!("{} went away while the ranks were starting", seat.who)))
    })
}

/// A follower on its way into a world.
struct Joiner {
    hello: Hello,
    lead: SocketAddr,
    timeout: Duration,
    deadline: Instant,
}

impl Joiner {
    fn lost(&self, peer: usize, addr: SocketAddr, reason: &str) -> RankError {
        let (rank, ranks, seconds) = (self.hello.rank, self.hello.ranks, self.timeout.as_secs_f32());
        RankError::Start(format!(
            "rank {rank} of {ranks} cannot reach rank {peer} at {addr} within {seconds} s: {reason}"
        ))
    }

    /// Connects; rank 0 may not listen yet.
    fn connect(&self, peer: usize, addr: SocketAddr, alive: Check<'_>) -> Result<TcpStream, RankError> {
        loop {
            let left = self.deadline.saturating_duration_since(Instant::now()).max(PAUSE);
            let tried = TcpStream::connect_timeout(&addr, left);
            match tried.and_then(|stream| stream.set_nodelay(true).map(|()| stream)) {
                Ok(stream) => return Ok(stream),
                Err(error) if Instant::now() >= self.deadline => {
                    let mend = format!("start rank {peer} first, or give its address");
                    return Err(self.lost(peer, addr, &format!("{error}; {mend}")));
                }
                Err(_) => alive()?,
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Says hello and waits to be accepted.
    fn greet(
        &mut self,
        stream: TcpStream,
        peer: usize,
        addr: SocketAddr,
        role: Role,
    ) -> Result<TcpStream, RankError> {
        self.hello.role = role;
        note::write(&stream, &self.hello).map_err(|error| self.lost(peer, addr, &error.to_string()))?;
        self.answer(&stream, peer, addr).map(|_| stream)
    }

    fn answer(&self, stream: &TcpStream, peer: usize, addr: SocketAddr) -> Result<Reply, RankError> {
        match note::read::<Reply>(stream, self.deadline) {
            Ok(Reply::Refused(reason)) => {
                let rank = self.hello.rank;
                Err(RankError::Start(format!("rank {peer} at {addr} refused rank {rank}: {reason}")))
            }
            Ok(reply) => Ok(reply),
            Err(reason) => Err(self.lost(peer, addr, &reason)),
        }
    }

    /// Once rank 0 has accepted: fails when it has ended the start, and says why.
    fn alive(&self, control: &TcpStream) -> Result<(), RankError> {
        if note::waits(control) { self.answer(control, 0, self.lead).map(|_| ()) } else { Ok(()) }
    }

    /// A further connection; rank 0's reason goes before what is seen here.
    fn call(
        &mut self,
        control: &TcpStream,
        peer: usize,
        addr: SocketAddr,
        role: Role,
    ) -> Result<TcpStream, RankError> {
        let stream = self.connect(peer, addr, &mut || self.alive(control))?;
        self.greet(stream, peer, addr, role).map_err(|error| self.alive(control).err().unwrap_or(error))
    }
}

/// Joins the world of rank 0 at `lead`.
pub(super) fn join(
    lead: SocketAddr,
    rank: usize,
    ranks: usize,
    secret: &Secret,
    timeout: Duration,
) -> Result<World, RankError> {
    let (token, deadline) = (secret.token(), Instant::now() + timeout);
    let (id, pid) = (random()?, std::process::id());
    let hello = Hello { token, rank, ranks, id, pid, role: Role::Control, data: lead };
    let mut joiner = Joiner { hello, lead, timeout, deadline };

    let control = joiner.connect(0, lead, &mut || Ok(()))?;
    // Where rank 0 is reached from, the others can reach this rank.
    let here = control.local_addr().map_err(setup(rank))?.ip();
    let listener = TcpListener::bind((here, 0)).map_err(setup(rank))?;
    let addr = listener.local_addr().map_err(setup(rank))?;
    joiner.hello.data = addr;
    let control = joiner.greet(control, 0, lead, Role::Control)?;
    joiner.deadline = Instant::now() + timeout + GRACE;
    let watch = joiner.call(&control, 0, lead, Role::Watch)?;
    let Reply::Welcome { who, data: followers } = joiner.answer(&control, 0, lead)? else {
        return Err(joiner.lost(0, lead, "it greeted twice"));
    };
    let mut data = Vec::new();
    for (peer, addr) in std::iter::once(lead).chain(followers).enumerate().take(rank) {
        data.push((peer, joiner.call(&control, peer, addr, Role::Data)?));
    }
    let mut gate = Gate {
        listener: &listener,
        addr,
        rank,
        ranks,
        token,
        timeout,
        deadline: joiner.deadline,
        strangers: Vec::new(),
    };
    data.extend(gate.data(&mut || joiner.alive(&control))?);
    let _ = note::write(&control, &Reply::Accepted);
    joiner.answer(&control, 0, lead)?;
    World::build(rank, who, vec![control], vec![(0, watch)], data)
}

//! Ranks: several processes that run one engine, one device each.
//!
//! A [`World`] has two planes. Control (plans, prompts, agreements) goes over one connection from rank 0 to each
//! follower, where an idle follower sleeps in the kernel. Collectives ([`TcpComm`], behind [`Comm`]) go over a full mesh
//! and are used by programs only. Beside both, a watch with its own connections and threads finds a rank that dies,
//! hangs or is cut off, however long a computation takes.
//!
//! No call has a timeout; instead a world *ends*, once, on every rank, with one [`End`] that names the rank at fault.
//! Every call that waits then returns it, within five seconds of a death:
//! - a closed connection is a death at once; silence is one after [`SILENCE`];
//! - a rank that cannot go on says so ([`World::fail`]), one that is done says [`World::goodbye`];
//! - ranks that make different calls are told apart by frame kinds, labels, counts, tags and sizes, and if all of them
//!   wait for each other, by what their heartbeats say they wait for.
//!
//! [`Comm`]: plugfold_abi::Comm

mod agree;
mod comm;
mod control;
mod error;
mod fate;
mod faults;
mod frame;
mod hello;
mod note;
mod plane;
mod shared;
mod spawn;
#[cfg(test)]
mod tests;
mod watch;

use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

pub use agree::{Agreements, SettingsDigest};
pub use comm::TcpComm;
pub use control::CONTROL_LIMIT;
pub use error::{Difference, End, EndKind, RankError};
pub use faults::{At, Fault, Faults};
pub use hello::{Lead, Secret};
pub use note::PROTOCOL;
pub(crate) use plane::Plane;
pub use shared::SharedComm;
pub use spawn::{Children, SECRET_ENV, spawn_local};
pub use watch::{BEAT, SILENCE};

use control::Control;
use fate::Fate;
use watch::Table;

/// One rank's side of all ranks of an engine. Dropped without [`World::goodbye`] it counts as dead.
pub struct World {
    fate: Arc<Fate>,
    faults: Arc<Faults>,
    control: Arc<Control>,
    comm: Arc<TcpComm>,
    watches: Vec<JoinHandle<()>>,
}

impl World {
    /// One rank alone: nothing is listened at, every agreement is its own.
    pub fn single() -> Self {
        let who = vec![format!("rank 0 of 1 (pid {})", std::process::id())];
        Self::assemble(Fate::new(0, who, Vec::new(), Vec::new()), Vec::new(), Vec::new())
    }

    /// Rank 0: listens at `bind` and waits up to `timeout` for all others. [`Lead`] does it in two steps, for a port
    /// that the system chooses.
    ///
    /// # Errors
    /// See [`Lead::bind`] and [`Lead::world`].
    pub fn lead(
        bind: SocketAddr,
        ranks: usize,
        secret: &Secret,
        timeout: Duration,
    ) -> Result<Self, RankError> {
        Lead::bind(bind)?.world(ranks, secret, timeout, &mut || Ok(()))
    }

    /// A follower: joins rank 0 at `addr`, which may come up later, within `timeout`.
    ///
    /// # Errors
    /// [`RankError::Start`], with rank 0's reason if it refused.
    pub fn join(
        addr: SocketAddr,
        rank: usize,
        ranks: usize,
        secret: &Secret,
        timeout: Duration,
    ) -> Result<Self, RankError> {
        if rank == 0 || rank >= ranks {
            return Err(RankError::Start(format!(
                "rank {rank} of {ranks} cannot join: followers are rank 1 and up, below {ranks}"
            )));
        }
        hello::join(addr, rank, ranks, secret, timeout)
    }

    /// All ranks in this process, over real sockets on the loopback address; each is meant for a thread of its own.
    ///
    /// # Errors
    /// As [`World::lead`] and [`World::join`].
    pub fn local(ranks: usize) -> Result<Vec<Self>, RankError> {
        const TIMEOUT: Duration = Duration::from_secs(30);
        let secret = Secret::random()?;
        let lead = Lead::bind(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))?;
        let addr = lead.addr();
        std::thread::scope(|scope| {
            let secret = &secret;
            let join = move |rank| scope.spawn(move || Self::join(addr, rank, ranks, secret, TIMEOUT));
            let followers: Vec<_> = (1..ranks).map(join).collect();
            let lead = lead.world(ranks, secret, TIMEOUT, &mut || Ok(()));
            let failed = |_| Err(RankError::Start("a thread of World::local panicked".to_owned()));
            let followers = followers.into_iter().map(|thread| thread.join().unwrap_or_else(failed));
            std::iter::once(lead).chain(followers).collect()
        })
    }

    /// Puts checked connections together.
    fn build(
        rank: usize,
        who: Vec<String>,
        control: Vec<TcpStream>,
        watch: Vec<(usize, TcpStream)>,
        data: Vec<(usize, TcpStream)>,
    ) -> Result<Self, RankError> {
        let clone = |stream: &TcpStream| {
            // A timeout or mode of the handshake must not outlive it.
            stream.set_read_timeout(None)?;
            stream.set_nonblocking(false)?;
            stream.try_clone()
        };
        let connect = || {
            let waited = control.iter().chain(data.iter().map(|(_, stream)| stream));
            let streams = waited.map(clone).collect::<io::Result<Vec<_>>>()?;
            let watchers = watch.iter().map(|(_, stream)| clone(stream)).collect::<io::Result<Vec<_>>>()?;
            data.iter().try_for_each(|(_, stream)| stream.set_nonblocking(true))?;
            Ok((watchers, streams))
        };
        let (watchers, streams) = connect().map_err(hello::setup(rank))?;
        let table = Arc::new(Table::new(who.len()));
        let mut world = Self::assemble(Fate::new(rank, who, watchers, streams), control, data);
        for (link, (peer, stream)) in watch.into_iter().enumerate() {
            world.watches.push(watch::start(&world.fate, &table, link, peer, stream)?);
        }
        Ok(world)
    }

    fn assemble(fate: Fate, control: Vec<TcpStream>, data: Vec<(usize, TcpStream)>) -> Self {
        let (fate, faults) = (Arc::new(fate), Arc::new(Faults::default()));
        let comm = Arc::new(TcpComm::new(Arc::clone(&fate), Arc::clone(&faults), data));
        let control = Arc::new(Control::new(Arc::clone(&fate), Arc::clone(&faults), control));
        Self { fate, faults, control, comm, watches: Vec::new() }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.fate.rank
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.fate.who.len()
    }

    /// Whether this is rank 0, which plans.
    pub fn is_lead(&self) -> bool {
        self.rank() == 0
    }

    /// A rank in words: `rank 1 of 2 (pid 1234, 10.0.0.2:40112)`.
    pub fn who(&self, rank: usize) -> &str {
        self.fate.who.get(rank).map_or("no rank", String::as_str)
    }

    /// The collectives of this rank.
    pub fn comm(&self) -> Arc<TcpComm> {
        Arc::clone(&self.comm)
    }

    /// Agreements for who does not hold this world. They end with it.
    pub fn agreements(&self) -> Agreements {
        Agreements::new(&self.control)
    }

    /// Rank 0: sends a message of at most [`CONTROL_LIMIT`] bytes to every follower.
    ///
    /// # Errors
    /// [`RankError::Call`] before anything is sent: too long, or on a follower; [`RankError::Ended`].
    pub fn broadcast(&self, message: &[u8]) -> Result<(), RankError> {
        if !self.is_lead() {
            return Err(self.misuse("broadcast", "only rank 0 plans"));
        }
        self.control.broadcast(message)
    }

    /// A follower: sleeps until rank 0's next broadcast. `None`: rank 0 has said goodbye.
    ///
    /// # Errors
    /// [`RankError::Call`] on rank 0, [`RankError::Ended`].
    pub fn receive(&self) -> Result<Option<Vec<u8>>, RankError> {
        if self.is_lead() {
            return Err(self.misuse("receive", "rank 0 sends the plans"));
        }
        self.control.receive()
    }

    /// The end of this world, if it has ended or a rank has left; what a health check asks.
    pub fn ended(&self) -> Option<End> {
        self.fate.ended()
    }

    /// The control plane for transports, which may outlive this borrow: their waits look at the end of the world.
    pub(crate) fn plane(&self) -> Plane {
        Plane {
            fate: Arc::clone(&self.fate),
            control: Arc::clone(&self.control),
            comm: Arc::clone(&self.comm),
        }
    }

    /// For who watches this rank from another thread.
    pub(crate) fn guard(&self) -> Guard {
        Guard(Arc::clone(&self.fate))
    }

    /// A follower: whether rank 0 has sent something, or has gone, within a time (`None`: as long as it takes).
    ///
    /// # Errors
    /// As [`World::receive`].
    pub(crate) fn arrived(&self, within: Option<Duration>) -> Result<bool, RankError> {
        if self.is_lead() {
            return Err(self.misuse("arrived", "rank 0 sends the plans"));
        }
        self.control.arrived(within)
    }

    /// Runs `hook` once when the world ends by another rank's doing, at once if it has; on a thread of the watch or of
    /// the call that found it. To wake what sleeps apart from the ranks, such as a queue of requests.
    pub fn on_end(&self, hook: impl FnOnce(&End) + Send + 'static) {
        self.fate.on_end(Box::new(hook));
    }

    /// This rank cannot go on: ends the world on every rank with this reason, and gives the error to return.
    pub fn fail(&self, reason: impl Into<String>) -> RankError {
        self.fate.blame(self.rank(), EndKind::Failed, reason)
    }

    /// Leaves in good order: followers' [`World::receive`] gives `None` once they have read what was sent before.
    pub fn goodbye(&self) {
        self.fate.leave();
    }

    /// For tests: makes this rank commit a fault.
    pub fn inject(&self, at: At, fault: Fault) {
        self.faults.add(at, fault);
    }

    fn misuse(&self, call: &'static str, rule: &'static str) -> RankError {
        RankError::Call(format!("rank {} of {} called {call}: {rule}", self.rank(), self.ranks()))
    }
}

/// A rank's life, as a watch beside it sees it.
pub(crate) struct Guard(Arc<Fate>);

impl Guard {
    /// Whether the rank is in a call that waits for others.
    pub(crate) fn waits(&self) -> bool {
        !self.0.pulse().1.is_empty()
    }
    /// As [`World::fail`].
    pub(crate) fn fail(&self, reason: impl Into<String>) -> RankError {
        self.0.blame(self.0.rank, EndKind::Failed, reason)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.fate.close();
        let here = std::thread::current().id();
        for watch in self.watches.drain(..) {
            // A hook that holds the world may be its last holder.
            if watch.thread().id() != here {
                let _ = watch.join();
            }
        }
    }
}

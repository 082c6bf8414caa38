//! A communicator, and the watch that gives it up when a rank is gone.
//!
//! No call of NCCL blocks here: what is asked for is polled until it is under way. What waits for another rank is work on the
//! device, which nothing but an abort can end. So a thread beside it looks at the end of the ranks' world and at
//! NCCL's own word every few milliseconds, and aborts; the device's work then ends, whoever waits for it goes on, and is told by
//! [`Comm::check`] that nothing that came is to be used.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use plugfold_abi::points::{Control, ControlObject, DeviceAccess, DeviceAccessObject};
use plugfold_abi::{Comm, CommObject, Exchanges, OpError, Slice, SliceMut};

use crate::library::{Handle, Nccl, Outcome, UniqueId};

/// How often the watch looks.
const LOOK: Duration = Duration::from_millis(20);
/// How long a communicator is kept when a rank is gone, or this one leaves: what all others have sent may still be on its way, and
/// a rank that is done first must not take it from another that needs it.
const GRACE: Duration = Duration::from_millis(250);
/// How long NCCL's word of an error waits for the world's, which names the rank at fault.
const VERDICT: Duration = Duration::from_secs(1);
/// How long who leaves waits for the communicator to be gone.
const LEAVING: Duration = Duration::from_secs(2);
/// Looks at a call that is not under way yet, before the processor is given to another thread.
const SPINS: u32 = 2000;

/// A handle, used under the lock of its state.
struct Held(Handle);

// SAFETY: NCCL's communicators belong to no thread.
unsafe impl Send for Held {}

struct State {
    /// The communicator, until it is given up.
    handle: Option<Held>,
    /// Why it was given up.
    ended: Option<String>,
    /// Until when, and what it is given up for then.
    by: Option<(Instant, String)>,
    /// Who has it is leaving.
    leaving: bool,
    /// The watch is done with it.
    gone: bool,
}

/// What the communicator and its watch share.
pub(crate) struct Line {
    nccl: Nccl,
    control: Arc<ControlObject>,
    pub device: Arc<DeviceAccessObject>,
    state: Mutex<State>,
    changed: Condvar,
}

impl Line {
    /// Begins to join the others, and to watch. The device must be the calling thread's.
    pub fn begin(
        nccl: Nccl,
        control: Arc<ControlObject>,
        device: Arc<DeviceAccessObject>,
        id: &UniqueId,
        (rank, ranks): (u32, u32),
    ) -> Result<Arc<Self>, String> {
        let handle = nccl.begin(id, rank, ranks)?;
        let state = State { handle: Some(Held(handle)), ended: None, by: None, leaving: false, gone: false };
        let this =
            Arc::new(Self { nccl, control, device, state: Mutex::new(state), changed: Condvar::new() });
        let watch = this.clone();
        let started = std::thread::Builder::new().name("nccl-watch".into()).spawn(move || watch.watch());
        match started {
            Ok(_) => Ok(this),
            Err(error) => {
                this.give_up();
                Err(format!("the watch over NCCL does not start: {error}"))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What became of what was asked for last; `None`: it is not under way yet.
    fn look(&self) -> Result<Option<()>, OpError> {
        let mut state = self.lock();
        let Some(held) = &state.handle else { return Err(gone(&state)) };
        // SAFETY: it is there, and aborts take it first, under the same lock.
        match unsafe { self.nccl.state(held.0) } {
            Outcome::SUCCESS => Ok(Some(())),
            Outcome::IN_PROGRESS => Ok(None),
            other => {
                let words = self.nccl.words("an exchange", other, held.0);
                state.ended.get_or_insert(words);
                drop(state);
                Err(self.verdict())
            }
        }
    }

    /// Waits until what was asked for last is under way. `None`: not within this time.
    pub fn settled(&self, within: Option<Duration>) -> Result<Option<()>, OpError> {
        let since = Instant::now();
        let mut looks = 0;
        loop {
            if self.look()?.is_some() {
                return Ok(Some(()));
            }
            if within.is_some_and(|within| since.elapsed() > within) {
                return Ok(None);
            }
            looks += 1;
            if looks < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    }

    /// Asks for an exchange, after what was asked of the stream before.
    pub fn gather(&self, mine: u64, all: u64, bytes: u64, stream: u64) -> Result<(), OpError> {
        self.device.enter()?;
        let state = self.lock();
        let Some(held) = &state.handle else { return Err(gone(&state)) };
        // SAFETY: the communicator is there; addresses and stream are the caller's word, as with every call.
        let asked = unsafe { self.nccl.all_gather(held.0, mine, all, bytes, stream) };
        if asked != Outcome::SUCCESS && asked != Outcome::IN_PROGRESS {
            let words = self.nccl.words("ncclAllGather", asked, held.0);
            return Err(OpError::fatal(words));
        }
        drop(state);
        self.settled(None).map(|_| ())
    }

    /// Within what time all that waits has to come, and what is said when it has not; `None`: it may take as long as it takes.
    pub fn by(&self, limit: Option<(Duration, &str)>) {
        let by = limit.map(|(time, what)| {
            (
                Instant::now() + time,
                format!("{what} within {} s: another rank is stuck or was refused", time.as_secs_f64()),
            )
        });
        self.lock().by = by;
    }

    /// Whether all went well so far.
    pub fn check(&self) -> Result<(), OpError> {
        if self.lock().ended.is_some() {
            return Err(self.verdict());
        }
        self.look().map(|_| ())
    }

    /// Why it was given up: the world's word if it has one soon, since that names the rank at fault.
    fn verdict(&self) -> OpError {
        let since = Instant::now();
        loop {
            match self.control.ended() {
                Ok(end) if !end.is_empty() => return OpError::fatal(end.to_string()),
                Ok(_) if since.elapsed() < VERDICT => std::thread::sleep(LOOK),
                _ => return gone(&self.lock()),
            }
        }
    }

    fn watch(&self) {
        let mut since: Option<Instant> = None;
        loop {
            let ended = self.control.ended().map_or_else(|e| e.to_string(), |end| end.to_string());
            let mut state = self.lock();
            if !ended.is_empty() && since.get_or_insert_with(Instant::now).elapsed() >= GRACE {
                state.ended.get_or_insert(ended);
            } else if let Some((by, what)) = &state.by
                && Instant::now() > *by
            {
                let what = what.clone();
                state.ended.get_or_insert(what);
            } else if let Some(held) = &state.handle {
                // SAFETY: as in `look`.
                let found = unsafe { self.nccl.state(held.0) };
                if found != Outcome::SUCCESS && found != Outcome::IN_PROGRESS {
                    let words = self.nccl.words("an exchange", found, held.0);
                    state.ended.get_or_insert(words);
                }
            }
            if state.ended.is_some() || state.leaving || state.handle.is_none() {
                let leaves = state.ended.is_none();
                drop(state);
                if leaves {
                    std::thread::sleep(GRACE);
                }
                break;
            }
            drop(self.changed.wait_timeout(state, LOOK));
        }
        self.give_up();
    }

    /// Ends what waits in the communicator, and the communicator.
    fn give_up(&self) {
        let held = self.lock().handle.take();
        if let Some(held) = held {
            // Where it cannot be the thread's, the abort can still end what waits.
            let _ = self.device.enter();
            // SAFETY: taken above, so nobody else uses it. Nothing is locked: it may wait for recordings to be forgotten.
            unsafe { self.nccl.abort(held.0) };
        }
        self.lock().gone = true;
        self.changed.notify_all();
    }
}

fn gone(state: &State) -> OpError {
    let why = state.ended.as_deref().unwrap_or("this rank is leaving");
    OpError::fatal(why.to_owned())
}

/// One rank's side.
pub(crate) struct Gpus {
    line: Arc<Line>,
    rank: u32,
    ranks: u32,
    /// For memory of the host.
    streams: CommObject,
}

impl Gpus {
    /// The communicator of a line on which all ranks have met.
    pub fn new(line: Arc<Line>, rank: u32, ranks: u32, streams: CommObject) -> Self {
        Self { line, rank, ranks, streams }
    }
}

impl Comm for Gpus {
    fn rank(&self) -> Result<u32, OpError> {
        Ok(self.rank)
    }

    fn ranks(&self) -> Result<u32, OpError> {
        Ok(self.ranks)
    }

    fn all_gather(&self, mine: Slice<'_, u8>, all: SliceMut<'_, u8>) -> Result<(), OpError> {
        self.streams.all_gather(mine, all)
    }

    fn exchanges(&self) -> Result<Exchanges, OpError> {
        Ok(Exchanges { device: true, recorded: true })
    }

    fn gather_on_device(&self, mine: u64, all: u64, bytes: u64, stream: u64) -> Result<(), OpError> {
        self.line.gather(mine, all, bytes, stream)
    }

    fn check(&self) -> Result<(), OpError> {
        self.line.check()
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        self.line.leave();
    }
}

impl Line {
    /// Lets the watch give the communicator up, and waits a while for it.
    pub fn leave(&self) {
        let deadline = Instant::now() + LEAVING;
        let mut state = self.lock();
        state.leaving = true;
        self.changed.notify_all();
        while !state.gone {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

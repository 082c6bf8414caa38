//! Ranks that found each other, and what they exchange.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use plugfold_emulated::stream::{Handle, Work};

/// Looks that a call takes until it is under way.
const LOOKS: u32 = 3;
/// How often work that waits looks at aborts.
const LOOK: Duration = Duration::from_millis(2);

pub(crate) const SUCCESS: i32 = 0;
pub(crate) const CUDA: i32 = 1;
pub(crate) const SYSTEM: i32 = 2;
pub(crate) const INVALID: i32 = 4;
pub(crate) const REMOTE: i32 = 6;
pub(crate) const IN_PROGRESS: i32 = 7;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is to go wrong, as it was said: a word, a rank, a number.
#[derive(Clone, Debug, Default)]
pub(crate) struct Fault {
    pub word: String,
    pub rank: usize,
    pub number: u64,
}

static FAULT: Mutex<Option<Fault>> = Mutex::new(None);
static OPEN: AtomicUsize = AtomicUsize::new(0);
static EXCHANGES: AtomicU64 = AtomicU64::new(0);
static GROUPS: LazyLock<Mutex<HashMap<Vec<u8>, Arc<Group>>>> = LazyLock::new(Mutex::default);

pub(crate) fn plan(fault: Option<Fault>) {
    *lock(&FAULT) = fault;
}

/// The fault of this word, if it is to happen.
pub(crate) fn planned(word: &str) -> Option<Fault> {
    lock(&FAULT).clone().filter(|fault| fault.word == word)
}

/// Communicators that are open.
pub(crate) fn open() -> usize {
    OPEN.load(Ordering::SeqCst)
}

/// Exchanges that all ranks of a group have made.
pub(crate) fn exchanged() -> u64 {
    EXCHANGES.load(Ordering::SeqCst)
}

/// The parts of an exchange, and how many ranks have taken them.
#[derive(Default)]
struct Round {
    parts: HashMap<usize, Vec<u8>>,
    taken: usize,
}

struct Group {
    ranks: usize,
    joined: AtomicUsize,
    rounds: Mutex<HashMap<u64, Round>>,
    changed: Condvar,
}

/// What a communicator and its work share.
struct Shared {
    group: Arc<Group>,
    rank: usize,
    /// The next exchange: they count when they run, not when they are asked for.
    next: AtomicU64,
    aborted: AtomicBool,
    error: AtomicI32,
}

/// A communicator.
pub(crate) struct Communicator {
    shared: Arc<Shared>,
    /// Work that is not on its stream yet, and the looks until it is.
    asked: Mutex<Option<(Handle, Work, u32)>>,
    looks: Mutex<u32>,
    asked_for: AtomicU64,
}

impl Communicator {
    pub fn new(id: &[u8], rank: usize, ranks: usize) -> Self {
        let new = || Group {
            ranks,
            joined: AtomicUsize::new(0),
            rounds: Mutex::default(),
            changed: Condvar::new(),
        };
        let group = lock(&GROUPS).entry(id.to_vec()).or_insert_with(|| Arc::new(new())).clone();
        group.joined.fetch_add(1, Ordering::SeqCst);
        OPEN.fetch_add(1, Ordering::SeqCst);
        let error = if planned("join").is_some_and(|f| f.rank == rank) { SYSTEM } else { SUCCESS };
        let shared = Shared {
            group,
            rank,
            next: AtomicU64::new(0),
            aborted: AtomicBool::new(false),
            error: AtomicI32::new(error),
        };
        Self {
            shared: Arc::new(shared),
            asked: Mutex::default(),
            looks: Mutex::new(LOOKS),
            asked_for: AtomicU64::new(0),
        }
    }

    /// Takes an all-gather, to be under way some looks later.
    pub fn ask(&self, stream: Handle, mine: u64, all: u64, bytes: usize) -> i32 {
        if lock(&self.asked).is_some() {
            // The last call was not looked at until it was under way.
            return INVALID;
        }
        let shared = self.shared.clone();
        let number = self.asked_for.fetch_add(1, Ordering::SeqCst);
        if planned("async").is_some_and(|f| f.rank == shared.rank && f.number <= number) {
            shared.error.store(REMOTE, Ordering::SeqCst);
            return IN_PROGRESS;
        }
        if planned("lose").is_some_and(|f| f.rank == shared.rank && f.number <= number) {
            shared.error.store(REMOTE, Ordering::SeqCst);
            return INVALID;
        }
        let work = Work::of(move || shared.exchange(stream, mine, all, bytes));
        *lock(&self.asked) = Some((stream, work, LOOKS));
        IN_PROGRESS
    }

    /// How it is.
    pub fn state(&self) -> i32 {
        let error = self.shared.error.load(Ordering::SeqCst);
        if error != SUCCESS {
            return error;
        }
        let group = &self.shared.group;
        let mut looks = lock(&self.looks);
        if *looks > 0 || group.joined.load(Ordering::SeqCst) < group.ranks {
            *looks = looks.saturating_sub(1);
            return IN_PROGRESS;
        }
        let mut asked = lock(&self.asked);
        match asked.take() {
            None => SUCCESS,
            Some((stream, work, 0)) => {
                stream.push(work);
                SUCCESS
            }
            Some((stream, work, looks)) => {
                *asked = Some((stream, work, looks - 1));
                IN_PROGRESS
            }
        }
    }

    /// Ends what waits, and waits until nothing holds an exchange of it.
    pub fn abort(self) {
        self.shared.aborted.store(true, Ordering::SeqCst);
        lock(&self.asked).take();
        while Arc::strong_count(&self.shared) > 1 {
            std::thread::sleep(LOOK);
        }
        OPEN.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Shared {
    /// One exchange: puts this rank's part, waits for the others', takes all.
    fn exchange(&self, stream: Handle, mine: u64, all: u64, bytes: usize) {
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        let mut part = vec![0; bytes];
        stream.read(mine, &mut part);
        let group = &self.group;
        let mut rounds = lock(&group.rounds);
        rounds.entry(number).or_default().parts.insert(self.rank, part);
        group.changed.notify_all();
        let whole = |rounds: &HashMap<u64, Round>| rounds[&number].parts.len() == group.ranks;
        while !whole(&rounds) {
            if self.aborted.load(Ordering::SeqCst) {
                return;
            }
            rounds = group.changed.wait_timeout(rounds, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        let round = rounds.entry(number).or_default();
        let mut parts: Vec<Vec<u8>> = (0..group.ranks).map(|rank| round.parts[&rank].clone()).collect();
        round.taken += 1;
        if round.taken == group.ranks {
            rounds.remove(&number);
            EXCHANGES.fetch_add(1, Ordering::SeqCst);
        }
        drop(rounds);
        if parts.iter().any(|part| part.len() != bytes) {
            self.error.store(INVALID, Ordering::SeqCst);
            return;
        }
        if planned("swap").is_some_and(|f| f.number <= number) && group.ranks > 1 {
            // The first two may change places in a sum, the last two may not.
            parts.swap(group.ranks - 2, group.ranks - 1);
        }
        if planned("same").is_some_and(|f| f.number <= number) && group.ranks > 1 {
            let (first, others) = parts.split_at_mut(1);
            others[0].clone_from(&first[0]);
        }
        stream.write(all, &parts.concat());
    }
}

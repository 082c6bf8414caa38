//! Threads that fill masks while a forward runs.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicIsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a thread that has done something looks for more before it sleeps: a step of a large model. To wake a thread takes the
/// round some 24 us, to fill a mask takes a thread some 60.
const LOOKING: Duration = Duration::from_millis(20);
/// Looks before the processor is offered to others.
const LOOKS: u32 = 64;

/// Something to do.
pub type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Threads that look for more.
    looking: usize,
    over: bool,
}

/// As many as there are jobs, for those that look; on a line of memory of its own, so that looking slows nobody down.
#[derive(Default)]
#[repr(align(128))]
struct Jobs(AtomicIsize);

#[derive(Default)]
struct Desk {
    queue: Mutex<Queue>,
    jobs: Jobs,
    more: Condvar,
}

impl Desk {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self, queue: &mut Queue) -> Option<Job> {
        let job = queue.jobs.pop_front()?;
        self.jobs.0.fetch_sub(1, Ordering::Relaxed);
        Some(job)
    }

    /// Waits a while for something to do, awake.
    fn look(&self) {
        let began = Instant::now();
        while began.elapsed() < LOOKING {
            for _ in 0..LOOKS {
                if self.jobs.0.load(Ordering::Acquire) > 0 {
                    return;
                }
                std::hint::spin_loop();
            }
            std::thread::yield_now();
        }
    }
}

/// The threads; without any, nothing is done ahead.
pub struct Pool {
    desk: Arc<Desk>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Pool {
    /// Starts threads.
    ///
    /// # Errors
    /// No thread can be had.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        let desk = Arc::new(Desk::default());
        let one = |i: usize| {
            let desk = desk.clone();
            std::thread::Builder::new()
                .name(format!("mask {i}"))
                .stack_size(16 << 20)
                .spawn(move || work(&desk))
        };
        let threads = (0..threads).map(one).collect::<Result<_, _>>()?;
        Ok(Self { desk, threads })
    }

    /// Whether anything is done ahead.
    pub fn is_idle(&self) -> bool {
        self.threads.is_empty()
    }

    /// Gives a thread something to do.
    pub fn push(&self, job: Job) {
        let mut queue = self.desk.queue();
        queue.jobs.push_back(job);
        // One that looks sees it, and looks under the lock once more before it sleeps.
        let asleep = queue.jobs.len() > queue.looking;
        drop(queue);
        // Whoever sees this takes the lock, so not before: who finds it taken has to be woken.
        self.desk.jobs.0.fetch_add(1, Ordering::Release);
        if asleep {
            self.desk.more.notify_one();
        }
    }
}

fn work(desk: &Desk) {
    loop {
        let mut queue = desk.queue();
        let job = loop {
            if let Some(job) = desk.take(&mut queue) {
                break job;
            }
            if queue.over {
                return;
            }
            queue = desk.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
        };
        drop(queue);
        run(job);
        desk.queue().looking += 1;
        desk.look();
        desk.queue().looking -= 1;
    }
}

fn run(job: Job) {
    // A job that panics must not take the thread with it; who waits for its result finds none.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.desk.queue().over = true;
        self.desk.more.notify_all();
        for thread in self.threads.drain(..) {
            // It has caught what its jobs fail with.
            let _ = thread.join();
        }
    }
}

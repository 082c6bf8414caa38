//! Threads that fill masks while a forward runs.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Something to do.
pub type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    over: bool,
}

#[derive(Default)]
struct Desk {
    queue: Mutex<Queue>,
    more: Condvar,
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
        self.desk.queue.lock().unwrap_or_else(PoisonError::into_inner).jobs.push_back(job);
        self.desk.more.notify_one();
    }
}

fn work(desk: &Desk) {
    loop {
        let mut queue = desk.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let job = loop {
            if let Some(job) = queue.jobs.pop_front() {
                break job;
            }
            if queue.over {
                return;
            }
            queue = desk.more.wait(queue).unwrap_or_else(PoisonError::into_inner);
        };
        drop(queue);
        // A job that panics must not take the thread with it; who waits for its result finds none.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.desk.queue.lock().unwrap_or_else(PoisonError::into_inner).over = true;
        self.desk.more.notify_all();
        for thread in self.threads.drain(..) {
            // It has caught what its jobs fail with.
            let _ = thread.join();
        }
    }
}

//! The stacks of all threads, on a signal: what a process that seems to hang is doing. It goes on afterwards.
//!
//! `SIGUSR1` wakes a thread that does nothing else. It asks the threads of this process one after another, each by a
//! second signal whose handler notes the return addresses, and writes the names of what they belong to to standard error.

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::SIGUSR1;
use signal_hook::iterator::Signals;

/// Frames noted of a stack.
const FRAMES: usize = 256;
/// How long a thread may take to answer; one that sleeps in the system's core does not.
const ANSWER: Duration = Duration::from_millis(200);

/// The thread that is asked; 0 is nobody.
static ASKED: AtomicI32 = AtomicI32::new(0);
/// Frames of its answer, and one: 0 while there is none.
static NOTED: AtomicUsize = AtomicUsize::new(0);
/// Their addresses.
static ADDRESSES: [AtomicUsize; FRAMES] = [const { AtomicUsize::new(0) }; FRAMES];

/// The signal by which threads are asked.
fn question() -> i32 {
    libc::SIGRTMIN() + 3
}

/// Lets `SIGUSR1` print the stacks, from now on and for the whole process.
///
/// # Errors
/// When the system takes no handler or gives no thread.
pub fn on_signal() -> io::Result<()> {
    static ONCE: Once = Once::new();
    let mut done = Ok(());
    ONCE.call_once(|| done = install());
    done
}

fn install() -> io::Result<()> {
    // SAFETY: `answer` does only what a signal handler may: it reads and writes atomics, asks for its thread's id, and walks
    // its own stack with the system's unwinder, which neither allocates nor takes a lock that this thread could hold.
    unsafe { signal_hook::low_level::register(question(), answer)? };
    let mut signals = Signals::new([SIGUSR1])?;
    let thread = std::thread::Builder::new().name("stacks".into());
    thread.spawn(move || {
        for _ in signals.forever() {
            dump();
        }
    })?;
    Ok(())
}

/// Runs in the thread that is asked.
fn answer() {
    // SAFETY: the call has no conditions.
    if ASKED.load(Ordering::Acquire) != unsafe { libc::gettid() } {
        return;
    }
    let mut frames = 0;
    // SAFETY: unsynchronized walks of different threads do not touch each other; no other walk of this process writes
    // `ADDRESSES`, since threads are asked one after another.
    unsafe {
        backtrace::trace_unsynchronized(|frame| {
            ADDRESSES[frames].store(frame.ip() as usize, Ordering::Relaxed);
            frames += 1;
            frames < FRAMES
        });
    }
    NOTED.store(frames + 1, Ordering::Release);
}

/// Writes the stacks of all threads.
fn dump() {
    let mut text = format!("stacks of process {}:\n", std::process::id());
    // SAFETY: the call has no conditions.
    let own = unsafe { libc::gettid() };
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let mut threads: Vec<i32> = tasks.filter_map(|task| task.file_name().to_str()?.parse().ok()).collect();
    threads.sort_unstable();
    for thread in threads.into_iter().filter(|thread| *thread != own) {
        let name =
            std::fs::read_to_string(Path::new("/proc/self/task").join(thread.to_string()).join("comm"));
        let _ = writeln!(text, "thread {thread} {:?}:", name.unwrap_or_default().trim_end());
        match ask(thread) {
            Some(frames) => frames.into_iter().for_each(|address| describe(address, &mut text)),
            None => text.push_str("  does not answer\n"),
        }
    }
    text.push_str("end of stacks\n");
    let _ = io::stderr().write_all(text.as_bytes());
}

/// The return addresses of a thread, innermost first; nothing when it has ended or does not answer.
fn ask(thread: i32) -> Option<Vec<usize>> {
    NOTED.store(0, Ordering::Release);
    ASKED.store(thread, Ordering::Release);
    // SAFETY: a signal to a thread of this process, whose handler was registered before; a thread that has ended is an error.
    let sent = unsafe { libc::syscall(libc::SYS_tgkill, libc::getpid(), thread, question()) };
    let deadline = Instant::now() + ANSWER;
    while sent == 0 && NOTED.load(Ordering::Acquire) == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    ASKED.store(0, Ordering::Release);
    let frames = NOTED.load(Ordering::Acquire).checked_sub(1)?;
    Some(ADDRESSES[..frames].iter().map(|address| address.load(Ordering::Relaxed)).collect())
}

/// Appends a line for each function at an address.
fn describe(address: usize, text: &mut String) {
    let mut known = false;
    // A return address is behind the call.
    backtrace::resolve(address.saturating_sub(1) as *mut _, |symbol| {
        known = true;
        let name = symbol.name().map_or_else(|| format!("{address:#x}"), |name| format!("{name:#}"));
        let _ = write!(text, "  {name}");
        if let (Some(file), Some(line)) = (symbol.filename(), symbol.lineno()) {
            let _ = write!(text, " ({}:{line})", file.display());
        }
        text.push('\n');
    });
    if !known {
        let _ = writeln!(text, "  {address:#x}");
    }
}

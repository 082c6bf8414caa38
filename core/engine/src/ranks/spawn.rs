//! Starts the other ranks of this machine.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::fate::lock;
use super::{RankError, Secret};

/// The environment variable that carries the ranks' secret; arguments can be read by every user of a machine.
pub const SECRET_ENV: &str = "PLUGFOLD_RANKS_SECRET";
/// Longest piece of a child's standard error that is kept as its last words, in bytes.
const LINE_LIMIT: u64 = 16 << 10;

struct Rank {
    child: Child,
    last: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
}

/// The processes of ranks 1 and up. Dropping kills those that still run.
pub struct Children(Vec<Rank>);

/// Starts ranks 1 to `ranks - 1` as processes of `exe` with the arguments of each rank, the secret in [`SECRET_ENV`].
/// Their standard error goes to ours, line by line; a Ctrl-C in the terminal reaches rank 0 alone.
///
/// # Errors
/// [`RankError::Start`]; those already started are killed.
pub fn spawn_local(
    exe: &Path,
    ranks: usize,
    secret: &Secret,
    args_for: impl Fn(usize) -> Vec<OsString>,
) -> Result<Children, RankError> {
    let mut children = Children(Vec::new());
    for rank in 1..ranks {
        let spawn =
            |error| RankError::Start(format!("cannot start rank {rank} ({}): {error}", exe.display()));
        let mut child = Command::new(exe)
            .args(args_for(rank))
            .env(SECRET_ENV, secret.reveal())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(spawn)?;
        let last = Arc::new(Mutex::new(String::new()));
        let stderr = child.stderr.take();
        let reader = stderr.map(|stderr| {
            let last = Arc::clone(&last);
            std::thread::spawn(move || relay(stderr, &last))
        });
        children.0.push(Rank { child, last, reader });
    }
    Ok(children)
}

/// Passes a child's standard error on in whole lines and keeps its last. What a killed child left unfinished gets its end here,
/// or the next line of another process would go on in it.
fn relay(stderr: ChildStderr, last: &Mutex<String>) {
    let mut stderr = BufReader::new(stderr);
    let mut line = Vec::new();
    while matches!(stderr.by_ref().take(LINE_LIMIT).read_until(b'\n', &mut line), Ok(got) if got > 0) {
        if !line.ends_with(b"\n") {
            line.push(b'\n');
        }
        let _ = std::io::stderr().write_all(&line);
        let text = String::from_utf8_lossy(&line);
        if !text.trim().is_empty() {
            text.trim().clone_into(&mut lock(last));
        }
        line.clear();
    }
}

impl Children {
    /// Fails when a child has ended.
    ///
    /// # Errors
    /// [`RankError::Start`] with its status and its last line on standard error.
    pub fn check(&mut self) -> Result<(), RankError> {
        (1..=self.0.len()).find_map(|rank| self.ended(rank)).map_or(Ok(()), Err)
    }

    /// How the process of this rank ended, if it has.
    pub fn ended(&mut self, rank: usize) -> Option<RankError> {
        let ranks = self.0.len() + 1;
        let process = self.0.get_mut(rank.checked_sub(1)?)?;
        let status = process.child.try_wait().ok()??;
        // All it wrote can be read now; a grandchild that still holds the pipe is not waited for.
        let deadline = Instant::now() + Duration::from_millis(500);
        while process.reader.as_ref().is_some_and(|reader| !reader.is_finished()) && Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(2));
        }
        let pid = process.child.id();
        let last = match lock(&process.last).as_str() {
            "" => String::new(),
            last => format!("; its last words: {last}"),
        };
        Some(RankError::Start(format!("rank {rank} of {ranks} (pid {pid}) ended with {status}{last}")))
    }

    /// The process ids, from rank 1 up.
    pub fn pids(&self) -> Vec<u32> {
        self.0.iter().map(|process| process.child.id()).collect()
    }

    /// Waits for all to end by themselves, and kills those that have not after `timeout`. True if none was killed and
    /// all ended with success.
    pub fn finish(mut self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut fine = true;
        for process in &mut self.0 {
            let status = loop {
                match process.child.try_wait() {
                    Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                    Ok(status) => break status,
                    Err(_) => break None,
                }
            };
            fine &= status.is_some_and(|status| status.success());
        }
        fine
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for process in &mut self.0 {
            let _ = process.child.kill();
        }
        for process in &mut self.0 {
            let _ = process.child.wait();
        }
    }
}

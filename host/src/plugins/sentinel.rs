//! What was running when a process ended without a word: a file that is there while plugins are on.

use std::fs::{File, TryLockError};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::PluginError;

/// What the file says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Running {
    /// Process.
    pub pid: u32,
    /// Its rank.
    pub rank: usize,
    /// Ranks of its engine.
    pub ranks: usize,
    /// "starting" or "serving".
    pub phase: String,
    /// The plugins that are on.
    pub plugins: Vec<String>,
}

impl std::fmt::Display for Running {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let who =
            if self.ranks > 1 { format!(" (rank {} of {})", self.rank, self.ranks) } else { String::new() };
        write!(
            f,
            "process {}{who} ended without a word while {}, with plugins {}; if it was one of them, --safe-mode starts without",
            self.pid,
            self.phase,
            self.plugins.join(", ")
        )
    }
}

/// The file of this process. Removed when dropped: whoever drops it has said why it ends.
pub struct Sentinel {
    path: PathBuf,
    // Locked while this process lives; the system unlocks it however it ends.
    file: File,
    running: Running,
}

fn folder(cache: &Path) -> PathBuf {
    cache.join("running")
}

/// Reads and removes the files of processes that are gone.
pub fn crashed(cache: &Path) -> Vec<Running> {
    let entries = std::fs::read_dir(folder(cache)).into_iter().flatten().flatten();
    let mut found = Vec::new();
    for path in entries.map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "json")) {
        let Ok(file) = File::open(&path) else { continue };
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        if let Ok(running) = serde_json::from_str(&text) {
            found.push(running);
        }
        let _ = std::fs::remove_file(&path);
    }
    found.sort_by_key(|r: &Running| r.pid);
    found
}

/// Removes the files of processes that this one has ended on purpose.
pub fn forget(cache: &Path, pids: &[u32]) {
    for pid in pids {
        let _ = std::fs::remove_file(folder(cache).join(format!("{pid}.json")));
    }
}

impl Sentinel {
    /// Says that these plugins are on from now on, on a rank of so many.
    ///
    /// # Errors
    /// A cache folder that cannot be written.
    pub fn raise(
        cache: &Path,
        (rank, ranks): (usize, usize),
        plugins: Vec<String>,
    ) -> Result<Self, PluginError> {
        let pid = std::process::id();
        let path = folder(cache).join(format!("{pid}.json"));
        let told = |e: std::io::Error| {
            let env = super::CACHE_DIR_ENV;
            PluginError::general(format!(
                "{} cannot be written: {e}; set {env} to another folder",
                path.display()
            ))
        };
        std::fs::create_dir_all(folder(cache)).map_err(told)?;
        // Locked before it can be found: a start beside this one must not take it for a dead process's.
        let partial = folder(cache).join(format!(".{pid}"));
        let file = File::create(&partial).map_err(told)?;
        file.lock().map_err(told)?;
        let running = Running { pid, rank, ranks, phase: "starting".into(), plugins };
        let mut sentinel = Self { path: path.clone(), file, running };
        sentinel.write().and_then(|()| std::fs::rename(&partial, &path)).map_err(told)?;
        Ok(sentinel)
    }

    /// Says that the start is over.
    ///
    /// # Errors
    /// A cache folder that cannot be written.
    pub fn serving(&mut self) -> Result<(), PluginError> {
        self.running.phase = "serving".into();
        self.write().map_err(|e| PluginError::general(format!("{}: {e}", self.path.display())))
    }

    fn write(&mut self) -> std::io::Result<()> {
        use std::io::{Seek as _, SeekFrom};
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(serde_json::to_string(&self.running)?.as_bytes())?;
        let end = self.file.stream_position()?;
        self.file.set_len(end)
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_living_process_is_no_crash_and_a_dead_one_is_told_once() {
        let cache = tempfile::tempdir().unwrap();
        assert_eq!(crashed(cache.path()), []);
        let mut sentinel = Sentinel::raise(cache.path(), (1, 3), vec!["0003-prefill-rows".into()]).unwrap();
        sentinel.serving().unwrap();
        assert_eq!(crashed(cache.path()), []);
        // A process that dies leaves the file and loses the lock.
        let text = std::fs::read(&sentinel.path).unwrap();
        let left = folder(cache.path()).join("1.json");
        std::fs::write(&left, text).unwrap();
        let told = crashed(cache.path());
        assert_eq!(told.len(), 1);
        let text = told[0].to_string();
        for word in ["(rank 1 of 3)", "while serving", "0003-prefill-rows", "--safe-mode"] {
            assert!(text.contains(word), "{text}");
        }
        assert_eq!(crashed(cache.path()), []);
        // One that was ended on purpose is no crash.
        std::fs::copy(&sentinel.path, folder(cache.path()).join("2.json")).unwrap();
        forget(cache.path(), &[2, 3]);
        assert_eq!(crashed(cache.path()), []);
        let path = sentinel.path.clone();
        drop(sentinel);
        assert!(!path.exists());
    }
}

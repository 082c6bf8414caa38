//! The file: whole lines, one write each, rotated by size.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// A file that becomes `.1` when a line would make it too large, and `.1` becomes `.2`, up to the number kept.
pub(crate) struct Rotating {
    path: PathBuf,
    limit: u64,
    keep: usize,
    open: Mutex<Option<(File, u64)>>,
}

fn numbered(path: &Path, n: usize) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{n}"));
    name.into()
}

impl Rotating {
    pub(crate) fn new(path: PathBuf, limit: u64, keep: usize) -> Self {
        Self { path, limit, keep, open: Mutex::new(None) }
    }

    fn open(&self) -> io::Result<(File, u64)> {
        if let Some(dir) = self.path.parent().filter(|d| !d.as_os_str().is_empty()) {
            fs::create_dir_all(dir)?;
        }
        let file = OpenOptions::new().append(true).create(true).open(&self.path)?;
        let size = file.metadata()?.len();
        Ok((file, size))
    }

    /// Appends a line (without its end) in one write.
    pub(crate) fn append(&self, line: &str) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(line.len() + 1);
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut file, mut size) = match open.take() {
            Some(found) => found,
            None => self.open()?,
        };
        if size > 0 && size + bytes.len() as u64 > self.limit {
            drop(file);
            self.rotate()?;
            (file, size) = self.open()?;
        }
        file.write_all(&bytes)?;
        *open = Some((file, size + bytes.len() as u64));
        Ok(())
    }

    fn rotate(&self) -> io::Result<()> {
        if self.keep == 0 {
            return fs::remove_file(&self.path);
        }
        for n in (1..self.keep).rev() {
            let from = numbered(&self.path, n);
            if from.exists() {
                fs::rename(from, numbered(&self.path, n + 1))?;
            }
        }
        fs::rename(&self.path, numbered(&self.path, 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn eight_writers_keep_whole_lines_and_as_many_old_files_as_asked() {
        for keep in [0, 2] {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("new/requests.jsonl");
            let file = Rotating::new(path.clone(), 1000, keep);
            std::thread::scope(|scope| {
                for writer in 0..8 {
                    let file = &file;
                    scope.spawn(move || {
                        for i in 0..40 {
                            file.append(&format!("{{\"writer\":{writer},\"i\":{i}}}")).unwrap();
                        }
                    });
                }
            });
            let files: Vec<PathBuf> =
                fs::read_dir(path.parent().unwrap()).unwrap().map(|e| e.unwrap().path()).collect();
            assert_eq!(files.len(), keep + 1, "{files:?}");
            for file in files {
                let text = fs::read_to_string(&file).unwrap();
                assert!(text.len() <= 1000 && text.ends_with('\n'), "{}", file.display());
                for line in text.lines() {
                    assert!(serde_json::from_str::<serde_json::Value>(line).unwrap().is_object());
                }
            }
        }
    }
}

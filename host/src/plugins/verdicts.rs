//! What the probing process found out, by the content of the file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use super::PluginError;

/// Build of the boundary and of this loader: a verdict of another build counts for nothing.
const BUILD: &str = plugfold_abi::build_id!();
/// Verdicts that are kept; the oldest go first.
const MOST: usize = 1024;

/// Whether a library can be loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// Where the file was.
    pub path: PathBuf,
    /// Why it cannot be loaded; nothing when it can.
    pub refused: Option<String>,
    /// Seconds since 1970.
    pub at: u64,
}

/// All verdicts of a cache folder.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Verdicts {
    build: String,
    by_hash: BTreeMap<String, Verdict>,
    #[serde(skip)]
    changed: bool,
}

fn file(cache: &Path) -> PathBuf {
    cache.join("plugin-verdicts.json")
}

fn build() -> String {
    format!("{} {BUILD} {}", env!("CARGO_PKG_VERSION"), plugfold_abi::BUILD)
}

impl Verdicts {
    /// Reads them. A file that is not there, is damaged or of another build holds none: everything is probed again.
    pub fn read(cache: &Path) -> Self {
        let text = std::fs::read_to_string(file(cache)).unwrap_or_default();
        let read: Self = serde_json::from_str(&text).unwrap_or_default();
        if read.build == build() { read } else { Self { build: build(), ..Self::default() } }
    }

    /// The verdict on a content.
    pub fn of(&self, hash: &str) -> Option<&Verdict> {
        self.by_hash.get(hash)
    }

    /// Keeps a verdict.
    pub fn keep(&mut self, hash: &str, path: &Path, refused: Option<String>) {
        let at = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        self.by_hash.insert(hash.to_owned(), Verdict { path: path.to_owned(), refused, at });
        self.changed = true;
        while self.by_hash.len() > MOST {
            let oldest = self.by_hash.iter().min_by_key(|(_, v)| v.at).map(|(hash, _)| hash.clone());
            self.by_hash.remove(&oldest.unwrap_or_default());
        }
    }

    /// Forgets the verdict on a content.
    pub fn forget(&mut self, hash: &str) {
        self.changed |= self.by_hash.remove(hash).is_some();
    }

    /// Writes them, whole or not at all; two programs at once lose at most what one of them found.
    ///
    /// # Errors
    /// A folder that cannot be written.
    pub fn write(&self, cache: &Path) -> Result<(), PluginError> {
        if !self.changed {
            return Ok(());
        }
        let (to, partial) = (file(cache), cache.join(format!(".plugin-verdicts.{}", std::process::id())));
        let text = serde_json::to_string_pretty(self).unwrap_or_default();
        std::fs::create_dir_all(cache)
            .and_then(|()| std::fs::write(&partial, text))
            .and_then(|()| std::fs::rename(&partial, &to))
            .map_err(|e| {
                let env = super::CACHE_DIR_ENV;
                PluginError::general(format!(
                    "{} cannot be written: {e}; set {env} to another folder",
                    to.display()
                ))
            })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verdicts_are_kept_by_content_and_build() {
        let cache = tempfile::tempdir().unwrap();
        let path = Path::new("/x/libplugfold_0003_x.so");
        let mut verdicts = Verdicts::read(cache.path());
        verdicts.keep("a", path, None);
        verdicts.keep("b", path, Some("aborts".into()));
        verdicts.write(cache.path()).unwrap();
        let read = Verdicts::read(cache.path());
        assert_eq!(read.of("a").unwrap().refused, None);
        assert_eq!(read.of("b").unwrap().refused.as_deref(), Some("aborts"));
        assert!(read.of("c").is_none());
        let text = std::fs::read_to_string(file(cache.path())).unwrap();
        std::fs::write(file(cache.path()), text.replace(BUILD, "another build")).unwrap();
        assert!(Verdicts::read(cache.path()).of("a").is_none());
        std::fs::write(file(cache.path()), "{ damaged").unwrap();
        assert!(Verdicts::read(cache.path()).of("a").is_none());
    }

    #[test]
    fn the_oldest_go_first_and_bad_ones_can_be_forgotten() {
        let mut verdicts = Verdicts::read(Path::new("/nowhere"));
        for i in 0..=MOST {
            verdicts.keep(&format!("{i:05}"), Path::new("x"), None);
            if let Some(kept) = verdicts.by_hash.get_mut(&format!("{i:05}")) {
                kept.at = i as u64;
            }
        }
        assert!(verdicts.of("00000").is_none() && verdicts.of("00001").is_some());
        verdicts.forget("00001");
        assert!(verdicts.of("00001").is_none());
    }
}

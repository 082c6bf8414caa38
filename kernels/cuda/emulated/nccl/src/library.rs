//! The library as tests load it: each test its own, so that what goes wrong in one is not seen by another.

use std::ffi::{CString, c_char};
use std::path::{Path, PathBuf};

use libloading::Library as Loaded;
use tempfile::TempDir;

/// A copy of the library, loaded.
pub struct Library {
    loaded: Loaded,
    path: PathBuf,
    _folder: TempDir,
}

impl Default for Library {
    /// Copies the library that was built beside the test.
    fn default() -> Self {
        let test = std::env::current_exe().expect("the path of the test");
        let name = "libplugfold_emulated_nccl.so";
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("libnccl.so.2");
        let built = test.parent().map(|deps| deps.join(name)).unwrap_or_default();
        std::fs::copy(&built, &path).unwrap_or_else(|e| panic!("{}: {e}", built.display()));
        // SAFETY: this crate, which has no initializers.
        let loaded = unsafe { Loaded::new(&path) }.unwrap_or_else(|e| panic!("{e}"));
        Self { loaded, path, _folder: folder }
    }
}

impl Library {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// From now on something goes wrong. `version`: it is too old; `id`: no id is made; `init`, `join`: rank `rank` cannot begin, or
    /// go on, to join; `async`: from exchange `number` on rank `rank` has a network error; `lose`: on rank `rank` exchange `number` is refused; `swap`: from exchange `number` on the
    /// parts of the last two ranks change places; `same`: that of rank 1 is rank 0's.
    pub fn fault(&self, word: &str, rank: usize, number: u64) {
        let word = CString::new(word).unwrap_or_default();
        // SAFETY: the function has this type.
        unsafe {
            let set = self.loaded.get::<unsafe extern "C" fn(*const c_char, usize, u64)>(b"emulated_fault");
            set.unwrap_or_else(|e| panic!("{e}"))(word.as_ptr(), rank, number);
        }
    }

    /// Communicators that are open.
    pub fn open(&self) -> usize {
        // SAFETY: as above.
        let ask = unsafe { self.loaded.get::<extern "C" fn() -> usize>(b"emulated_open") };
        ask.unwrap_or_else(|e| panic!("{e}"))()
    }

    /// Exchanges that were made by all ranks of a group.
    pub fn exchanges(&self) -> u64 {
        // SAFETY: as above.
        let ask = unsafe { self.loaded.get::<extern "C" fn() -> u64>(b"emulated_exchanges") };
        ask.unwrap_or_else(|e| panic!("{e}"))()
    }
}

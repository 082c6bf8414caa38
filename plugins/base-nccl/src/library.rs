//! The library: where it is looked for, which of its functions are used, and what its results mean.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;

/// Says where NCCL is: the file, or the folder of it.
pub(crate) const VARIABLE: &str = "PLUGFOLD_NCCL";
/// The library's name.
const NAME: &str = "libnccl.so.2";
/// The oldest version that is taken, as NCCL counts: 2.21.0. Older ones were never tried.
const OLDEST: c_int = 22_100;
/// How to get it.
const MEND: &str = "install it (pip install nvidia-nccl-cu13, or NVIDIA's package libnccl2) and set PLUGFOLD_NCCL to the \
                    file or its folder, or choose the transport shm (one host) or tcp";

/// A communicator of NCCL.
pub(crate) type Handle = *mut c_void;

/// What ranks find each other by.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId(pub [u8; 128]);

/// How a communicator is made: `ncclConfig_t` of NCCL 2.18. Newer ones read as much as its size says.
#[repr(C)]
struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// NCCL's word for "not said".
const UNDEFINED: c_int = c_int::MIN;

impl Config {
    /// One whose calls never block.
    fn polled() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: 21_800,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: UNDEFINED,
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// `ncclResult_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outcome(pub c_int);

impl Outcome {
    pub const SUCCESS: Outcome = Outcome(0);
    pub const IN_PROGRESS: Outcome = Outcome(7);
}

/// `ncclUint8`.
const BYTES: c_int = 1;

type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetUniqueId = unsafe extern "C" fn(*mut UniqueId) -> c_int;
type InitRankConfig = unsafe extern "C" fn(*mut Handle, c_int, UniqueId, c_int, *mut Config) -> c_int;
type AllGather = unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, *mut c_void) -> c_int;
type GetAsyncError = unsafe extern "C" fn(Handle, *mut c_int) -> c_int;
type Abort = unsafe extern "C" fn(Handle) -> c_int;
type ErrorString = unsafe extern "C" fn(c_int) -> *const c_char;
type LastError = unsafe extern "C" fn(Handle) -> *const c_char;

/// The functions that are used. The library stays loaded: its threads may outlive who asked for them.
#[derive(Clone, Copy)]
pub(crate) struct Nccl {
    unique_id: GetUniqueId,
    init: InitRankConfig,
    all_gather: AllGather,
    async_error: GetAsyncError,
    abort: Abort,
    error_string: ErrorString,
    last_error: LastError,
    version: c_int,
}

/// A version for people.
fn version_text(code: c_int) -> String {
    // Up to 2.8 a thousand stood for the major version.
    let (major, minor, patch) = if code < 10_000 {
        (code / 1000, code % 1000 / 100, code % 100)
    } else {
        (code / 10_000, code % 10_000 / 100, code % 100)
    };
    format!("{major}.{minor}.{patch}")
}

/// Files that may be it. Told where it is, nothing else is taken.
fn candidates(told: Option<&Path>) -> Vec<PathBuf> {
    match told {
        Some(folder) if folder.is_dir() => [NAME, "libnccl.so"].iter().map(|n| folder.join(n)).collect(),
        Some(file) => vec![file.to_owned()],
        None => vec![NAME.into(), "libnccl.so".into()],
    }
}

/// A function of the library.
fn symbol<T: Copy>(library: &Library, name: &CStr, path: &Path) -> Result<T, String> {
    // SAFETY: the types above are those that NCCL's header gives these names.
    let found = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
    found.map(|symbol| *symbol).map_err(|e| {
        format!("{} is no NCCL of version {} or newer ({e}): {MEND}", path.display(), version_text(OLDEST))
    })
}

impl Nccl {
    /// Loads the library from a file or folder, or from the loader's path where none is told.
    ///
    /// # Errors
    /// Where it was looked for and what the loader said of each place, a library that is too old, the mend.
    pub fn load(told: Option<&Path>) -> Result<Self, String> {
        let mut said = Vec::new();
        for path in candidates(told) {
            // SAFETY: NCCL's initializers have no contract of their own; the path is the system's or the user's word.
            match unsafe { Library::new(&path) } {
                Ok(library) => {
                    let library = std::mem::ManuallyDrop::new(library);
                    return Self::of(&library, &path);
                }
                Err(e) => said.push(format!("{}: {e}", path.display())),
            }
        }
        let place = if told.is_some() { VARIABLE } else { "the loader's path" };
        Err(format!("NCCL is not there; looked for by {place}: {}. {MEND}", said.join("; ")))
    }

    fn of(library: &Library, path: &Path) -> Result<Self, String> {
        let ask: GetVersion = symbol(library, c"ncclGetVersion", path)?;
        let mut version = 0;
        // SAFETY: the pointer is to a live integer.
        let asked = unsafe { ask(&raw mut version) };
        if asked != 0 || version < OLDEST {
            return Err(format!(
                "{} is NCCL {}, and {} or newer is needed: {MEND}",
                path.display(),
                version_text(version),
                version_text(OLDEST)
            ));
        }
        Ok(Self {
            unique_id: symbol(library, c"ncclGetUniqueId", path)?,
            init: symbol(library, c"ncclCommInitRankConfig", path)?,
            all_gather: symbol(library, c"ncclAllGather", path)?,
            async_error: symbol(library, c"ncclCommGetAsyncError", path)?,
            abort: symbol(library, c"ncclCommAbort", path)?,
            error_string: symbol(library, c"ncclGetErrorString", path)?,
            last_error: symbol(library, c"ncclGetLastError", path)?,
            version,
        })
    }

    /// Its version, as `2.28.9`.
    pub fn version(&self) -> String {
        version_text(self.version)
    }

    /// What ranks find each other by; made on one of them.
    pub fn unique_id(&self) -> Result<UniqueId, String> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is to a live value.
        let made = Outcome(unsafe { (self.unique_id)(&raw mut id) });
        if made == Outcome::SUCCESS {
            Ok(id)
        } else {
            Err(self.words("ncclGetUniqueId", made, std::ptr::null_mut()))
        }
    }

    /// Begins to make a communicator, for the device that is the calling thread's.
    pub fn begin(&self, id: &UniqueId, rank: u32, ranks: u32) -> Result<Handle, String> {
        let (mut handle, mut config) = (std::ptr::null_mut(), Config::polled());
        // SAFETY: pointers are to live values; the configuration says its size.
        let begun = Outcome(unsafe {
            (self.init)(&raw mut handle, ranks as c_int, *id, rank as c_int, &raw mut config)
        });
        match begun {
            Outcome::SUCCESS | Outcome::IN_PROGRESS if !handle.is_null() => Ok(handle),
            other => Err(self.words("ncclCommInitRankConfig", other, std::ptr::null_mut())),
        }
    }

    /// Asks for an all-gather of so many bytes of each rank.
    ///
    /// # Safety
    /// The communicator is not aborted. `mine` and `all` are addresses of its device with as many and `ranks` times as many
    /// bytes, which stay until the work is done; the stream is one of its device.
    pub unsafe fn all_gather(&self, handle: Handle, mine: u64, all: u64, bytes: u64, stream: u64) -> Outcome {
        let (mine, all, stream) = (mine as *const c_void, all as *mut c_void, stream as *mut c_void);
        // SAFETY: the caller's.
        Outcome(unsafe { (self.all_gather)(mine, all, bytes as usize, BYTES, handle, stream) })
    }

    /// How a communicator is.
    ///
    /// # Safety
    /// It is not aborted.
    pub unsafe fn state(&self, handle: Handle) -> Outcome {
        let mut state = 0;
        // SAFETY: the caller's; the pointer is to a live integer.
        let asked = Outcome(unsafe { (self.async_error)(handle, &raw mut state) });
        if asked == Outcome::SUCCESS { Outcome(state) } else { asked }
    }

    /// Gives a communicator up: what waits in it ends. May wait for recordings that hold its exchanges.
    ///
    /// # Safety
    /// It is not aborted, and no other call uses it from now on.
    pub unsafe fn abort(&self, handle: Handle) {
        // SAFETY: the caller's. Whatever it says, nothing can be done about it.
        unsafe { (self.abort)(handle) };
    }

    /// A result in words; with a communicator also what it said last.
    pub fn words(&self, call: &str, outcome: Outcome, handle: Handle) -> String {
        let text = |pointer: *const c_char| {
            // SAFETY: NCCL gives null or a text that stays.
            (!pointer.is_null())
                .then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim().to_owned())
        };
        // SAFETY: takes any number.
        let said = text(unsafe { (self.error_string)(outcome.0) }).unwrap_or_default();
        // SAFETY: takes null as well.
        let last = text(unsafe { (self.last_error)(handle) }).filter(|last| !last.is_empty());
        let last = last.map_or_else(String::new, |last| format!(" ({last})"));
        format!("{call} of NCCL {}: {said}{last}", self.version())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there_is_named_with_every_place_and_the_mend() {
        let folder = tempfile::tempdir().unwrap();
        let told = Nccl::load(Some(folder.path())).err().unwrap();
        let place = folder.path().display().to_string();
        for words in
            [&format!("{place}/libnccl.so.2"), "PLUGFOLD_NCCL", "pip install nvidia-nccl-cu13", "shm"]
        {
            assert!(told.contains(words), "{told}");
        }
        let file = folder.path().join("libnccl.so.2");
        std::fs::write(&file, "no library").unwrap();
        let told = Nccl::load(Some(&file)).err().unwrap();
        assert!(told.contains("libnccl.so.2: ") && told.contains("looked for by PLUGFOLD_NCCL"), "{told}");
    }

    #[test]
    fn versions_are_read_as_nccl_counts_them() {
        assert_eq!(version_text(22_809), "2.28.9");
        assert_eq!(version_text(OLDEST), "2.21.0");
        assert_eq!(version_text(2708), "2.7.8");
    }

    #[test]
    fn the_configuration_is_laid_out_as_nccl_reads_it() {
        assert_eq!(size_of::<Config>(), 48);
        assert_eq!(std::mem::offset_of!(Config, blocking), 16);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
    }
}

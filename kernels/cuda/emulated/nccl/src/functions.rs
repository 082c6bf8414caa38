//! The functions, under NCCL's names.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

use plugfold_emulated::stream::Handle;

use crate::group::{
    CUDA, Communicator, Fault, IN_PROGRESS, INVALID, REMOTE, SUCCESS, SYSTEM, exchanged, open, plan, planned,
};

/// The version that it passes for.
const VERSION: c_int = 22_809;
/// One that is too old.
const OLD: c_int = 22_005;

/// NCCL's id.
#[repr(C)]
pub struct Id([u8; 128]);

static IDS: AtomicU64 = AtomicU64::new(1);

/// # Safety
/// The pointer is to an integer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    let value = if planned("version").is_some() { OLD } else { VERSION };
    // SAFETY: the caller's.
    unsafe { *version = value };
    SUCCESS
}

/// # Safety
/// The pointer is to an id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut Id) -> c_int {
    if planned("id").is_some() {
        return SYSTEM;
    }
    let mut bytes = [0; 128];
    bytes[..8].copy_from_slice(&IDS.fetch_add(1, Ordering::SeqCst).to_le_bytes());
    // SAFETY: the caller's.
    unsafe { *id = Id(bytes) };
    SUCCESS
}

/// # Safety
/// The pointers are to a place for a communicator and to a configuration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    comm: *mut *mut Communicator,
    ranks: c_int,
    id: Id,
    rank: c_int,
    config: *const u8,
) -> c_int {
    // SAFETY: it begins with its size, a magic number, a version and whether calls block.
    let (size, magic, blocking) = unsafe {
        (
            config.cast::<usize>().read_unaligned(),
            config.add(8).cast::<u32>().read_unaligned(),
            config.add(16).cast::<c_int>().read_unaligned(),
        )
    };
    if size < 20 || magic != 0xcafe_beef || blocking != 0 {
        return INVALID;
    }
    if planned("init").is_some_and(|f| f.rank == rank as usize) {
        return CUDA;
    }
    let made = Communicator::new(&id.0, rank as usize, ranks as usize);
    // SAFETY: the caller's.
    unsafe { *comm = Box::into_raw(Box::new(made)) };
    IN_PROGRESS
}

/// # Safety
/// The communicator is one of this library's, the stream an emulated machine's, the addresses its memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    mine: *const c_void,
    all: *mut c_void,
    count: usize,
    _bytes: c_int,
    comm: *mut Communicator,
    stream: *mut c_void,
) -> c_int {
    // SAFETY: the caller's; the machine outlives its communicators.
    match unsafe { (comm.as_ref(), Handle::new(stream)) } {
        (Some(comm), Some(stream)) => comm.ask(stream, mine as u64, all as u64, count),
        _ => INVALID,
    }
}

/// # Safety
/// The communicator is one of this library's, the pointer to an integer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(comm: *mut Communicator, state: *mut c_int) -> c_int {
    // SAFETY: the caller's.
    let Some(comm) = (unsafe { comm.as_ref() }) else { return INVALID };
    // SAFETY: the caller's.
    unsafe { *state = comm.state() };
    SUCCESS
}

/// # Safety
/// The communicator is one of this library's, and is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(comm: *mut Communicator) -> c_int {
    if comm.is_null() {
        return INVALID;
    }
    // SAFETY: made from a box, freed once.
    unsafe { Box::from_raw(comm) }.abort();
    SUCCESS
}

/// # Safety
/// Any number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    let text = match code {
        SUCCESS => c"no error",
        CUDA => c"unhandled cuda error",
        SYSTEM => c"unhandled system error",
        INVALID => c"invalid argument",
        REMOTE => c"remote process exited or there was a network error",
        IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

/// # Safety
/// Any communicator, or none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(_comm: *mut Communicator) -> *const c_char {
    c"emulated".as_ptr()
}

/// Says what is to go wrong from now on: a word, a rank, a number. An empty word: nothing.
///
/// # Safety
/// The pointer is to a text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn emulated_fault(word: *const c_char, rank: usize, number: u64) {
    // SAFETY: the caller's.
    let word = unsafe { CStr::from_ptr(word) }.to_string_lossy().into_owned();
    plan((!word.is_empty()).then_some(Fault { word, rank, number }));
}

/// Communicators that are open.
#[unsafe(no_mangle)]
pub extern "C" fn emulated_open() -> usize {
    open()
}

/// Exchanges that were made.
#[unsafe(no_mangle)]
pub extern "C" fn emulated_exchanges() -> u64 {
    exchanged()
}

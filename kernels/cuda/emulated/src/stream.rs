//! The stream of an emulated machine, for libraries that put work of their own into the order of its work, as NCCL does.
//!
//! Such work waits for others, so it is only kept when it is asked for, and done before the machine's next own work: the host
//! waits where it would wait for a GPU, and not where it asks.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

/// What the handle of a stream points to.
#[repr(C)]
pub struct Stream {
    machine: *const c_void,
    push: unsafe extern "C" fn(*const c_void, Work),
    read: unsafe extern "C" fn(*const c_void, u64, *mut u8, usize),
    write: unsafe extern "C" fn(*const c_void, u64, *const u8, usize),
}

// SAFETY: the machine is shared by threads; the rest are functions.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// Something to do, more than once where it is recorded.
#[repr(C)]
pub struct Work {
    data: *mut c_void,
    run: unsafe extern "C" fn(*const c_void),
    free: unsafe extern "C" fn(*mut c_void),
}

// SAFETY: made of a function that is `Send` and `Sync`.
unsafe impl Send for Work {}
// SAFETY: as above.
unsafe impl Sync for Work {}

impl Work {
    /// Work that is a function.
    pub fn of<F: Fn() + Send + Sync + 'static>(work: F) -> Self {
        unsafe extern "C" fn run<F: Fn()>(data: *const c_void) {
            // SAFETY: `of` made it from an `F`, which lives as long as the work.
            unsafe { (*data.cast::<F>())() }
        }
        unsafe extern "C" fn free<F>(data: *mut c_void) {
            // SAFETY: made from a box in `of`, freed once.
            drop(unsafe { Box::from_raw(data.cast::<F>()) });
        }
        Self { data: Box::into_raw(Box::new(work)).cast(), run: run::<F>, free: free::<F> }
    }

    pub(crate) fn run(&self) {
        // SAFETY: function and data belong together.
        unsafe { (self.run)(self.data) }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        // SAFETY: as above; nothing uses the data any more.
        unsafe { (self.free)(self.data) }
    }
}

/// What a machine does for a stream.
pub(crate) trait Streamed {
    fn push(&self, work: Work);
    fn read(&self, from: u64, bytes: &mut [u8]);
    fn write(&self, to: u64, bytes: &[u8]);
}

impl Stream {
    /// The stream of a machine that stays where it is.
    pub(crate) fn of<M: Streamed + Sync>(machine: &M) -> Self {
        unsafe extern "C" fn push<M: Streamed>(machine: *const c_void, work: Work) {
            // SAFETY: who has the handle keeps the machine.
            unsafe { &*machine.cast::<M>() }.push(work);
        }
        unsafe extern "C" fn read<M: Streamed>(machine: *const c_void, from: u64, to: *mut u8, bytes: usize) {
            // SAFETY: as above; `to` has as many bytes, by the contract of `Handle::read`.
            let (machine, to) = unsafe { (&*machine.cast::<M>(), std::slice::from_raw_parts_mut(to, bytes)) };
            machine.read(from, to);
        }
        unsafe extern "C" fn write<M: Streamed>(
            machine: *const c_void,
            to: u64,
            from: *const u8,
            bytes: usize,
        ) {
            // SAFETY: as above.
            let (machine, from) = unsafe { (&*machine.cast::<M>(), std::slice::from_raw_parts(from, bytes)) };
            machine.write(to, from);
        }
        Self { machine: (&raw const *machine).cast(), push: push::<M>, read: read::<M>, write: write::<M> }
    }
}

/// A stream by its handle.
#[derive(Clone, Copy)]
pub struct Handle(NonNull<Stream>);

// SAFETY: see `Stream`.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// The stream of a handle; `None`: zero is none.
    ///
    /// # Safety
    /// The handle is `Machine::stream` of an emulated machine that outlives all uses of this and of work that is asked for.
    pub unsafe fn new(handle: *mut c_void) -> Option<Self> {
        NonNull::new(handle.cast()).map(Self)
    }

    fn stream(&self) -> &Stream {
        // SAFETY: by the contract of `new`.
        unsafe { self.0.as_ref() }
    }

    /// Puts work after what was asked for before.
    pub fn push(&self, work: Work) {
        let stream = self.stream();
        // SAFETY: the functions belong to the machine.
        unsafe { (stream.push)(stream.machine, work) }
    }

    /// Reads the machine's memory.
    pub fn read(&self, from: u64, bytes: &mut [u8]) {
        let stream = self.stream();
        // SAFETY: as above; the slice has as many bytes.
        unsafe { (stream.read)(stream.machine, from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Writes the machine's memory.
    pub fn write(&self, to: u64, bytes: &[u8]) {
        let stream = self.stream();
        // SAFETY: as above.
        unsafe { (stream.write)(stream.machine, to, bytes.as_ptr(), bytes.len()) }
    }
}

/// Work that was asked for and is not done.
#[derive(Default)]
pub(crate) struct Pending(Mutex<VecDeque<Arc<Work>>>);

impl Pending {
    pub(crate) fn push(&self, work: Arc<Work>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push_back(work);
    }

    /// Does it. Nothing of the machine is locked: the work reads and writes its memory.
    pub(crate) fn settle(&self) {
        let next = || self.0.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        while let Some(work) = next() {
            work.run();
        }
    }
}

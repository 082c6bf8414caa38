//! Device memory at fixed addresses, pinned host memory, events.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::sys;

use super::Context;
use super::calls::{call, call_at};
use crate::error::CudaError;

/// Bytes (free, of the whole device).
pub(super) fn free(context: &Context) -> Result<(u64, u64), CudaError> {
    context.enter()?;
    let (mut free, mut total) = (0, 0);
    // SAFETY: pointers are to live integers; the context is current.
    call("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
    Ok((free as u64, total as u64))
}

/// An allocation.
#[derive(Debug)]
pub(super) struct Kept {
    context: Arc<Context>,
    at: u64,
    bytes: usize,
}

impl Kept {
    pub fn new(context: &Arc<Context>, what: &str, bytes: usize) -> Result<Self, CudaError> {
        context.enter()?;
        let mut at = 0;
        // SAFETY: the pointer is to a live address; the context is current.
        match unsafe { sys::cuMemAlloc_v2(&raw mut at, bytes.max(1)) } {
            sys::CUresult::CUDA_SUCCESS => Ok(Self { context: context.clone(), at, bytes }),
            sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                let (free, total) = free(context)?;
                Err(CudaError::OutOfMemory {
                    device: context.index,
                    what: what.into(),
                    need: (bytes as u64).div_ceil(1_000_000),
                    free: free / 1_000_000,
                    total: total / 1_000_000,
                })
            }
            code => {
                call_at("cuMemAlloc", code, || format!("{bytes} bytes for {what}")).map(|()| unreachable!())
            }
        }
    }

    pub fn address(&self) -> u64 {
        self.at
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated once in `new`; the driver waits for work that uses it.
            unsafe { sys::cuMemFree_v2(self.at) };
        }
    }
}

/// Memory that is made anew when more is asked for than it has.
#[derive(Default)]
pub(super) struct Grown(Option<Kept>);

impl Grown {
    pub fn bytes(&self) -> usize {
        self.0.as_ref().map_or(0, |k| k.bytes)
    }

    /// Its address; nothing may be using the memory when more is asked for.
    pub fn at_least(&mut self, context: &Arc<Context>, what: &str, bytes: usize) -> Result<u64, CudaError> {
        if self.bytes() < bytes || self.0.is_none() {
            self.0 = None;
            // Half as much again, so that growing ends soon.
            self.0 = Some(Kept::new(context, what, (bytes + bytes / 2).next_multiple_of(1 << 16))?);
        }
        Ok(self.0.as_ref().map_or(0, Kept::address))
    }
}

/// Device memory at a fixed address, zeroed: for weights, caches and a program's buffers, whose addresses a captured program
/// keeps.
#[derive(Debug)]
pub struct Arena(Kept);

impl Arena {
    pub(super) fn new(context: &Arc<Context>, what: &str, bytes: usize) -> Result<Self, CudaError> {
        let kept = Kept::new(context, what, bytes)?;
        // SAFETY: the memory was just allocated, with as many bytes.
        let zeroed = unsafe { sys::cuMemsetD8_v2(kept.at, 0, bytes.max(1)) };
        call_at("cuMemsetD8", zeroed, || format!("{bytes} bytes for {what}"))?;
        Ok(Self(kept))
    }

    /// Where it is: a multiple of 256.
    pub fn address(&self) -> u64 {
        self.0.at
    }

    /// How large it is.
    pub fn bytes(&self) -> usize {
        self.0.bytes
    }
}

/// Host memory that the device copies from and to without the host's help.
#[derive(Debug)]
pub struct Pinned {
    context: Arc<Context>,
    at: *mut c_void,
    bytes: usize,
}

// SAFETY: the memory is this value's alone.
unsafe impl Send for Pinned {}

impl Pinned {
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        context.enter()?;
        let mut at = std::ptr::null_mut();
        // SAFETY: the pointer is to a live address; the context is current.
        let allocated = unsafe { sys::cuMemHostAlloc(&raw mut at, bytes.max(1), 0) };
        call_at("cuMemHostAlloc", allocated, || format!("{bytes} bytes"))?;
        // SAFETY: just allocated with as many bytes.
        unsafe { at.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), at, bytes })
    }

    /// Its bytes. The device must not be writing them.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: allocated with as many bytes and zeroed.
        unsafe { std::slice::from_raw_parts(self.at.cast(), self.bytes) }
    }

    /// Its bytes, to write. The device must not be reading or writing them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.at.cast(), self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: allocated once in `new`.
            unsafe { sys::cuMemFreeHost(self.at) };
        }
    }
}

/// A point of a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(super) fn record(context: &Arc<Context>, stream: sys::CUstream) -> Result<Self, CudaError> {
        context.enter()?;
        let mut event = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle, the stream lives; the context is current.
        unsafe {
            call("cuEventCreate", sys::cuEventCreate(&raw mut event, 0))?;
            let this = Self { context: context.clone(), event };
            call("cuEventRecord", sys::cuEventRecord(event, stream))?;
            Ok(this)
        }
    }

    /// Waits for it, and gives the seconds since an earlier one.
    ///
    /// # Errors
    /// What the driver says, also of launches before it.
    pub fn seconds_since(&self, earlier: &Event) -> Result<f64, CudaError> {
        self.context.enter()?;
        let mut milliseconds = 0.0f32;
        // SAFETY: both events live; the pointer is to a live number.
        unsafe {
            call("cuEventSynchronize", sys::cuEventSynchronize(self.event))?;
            call(
                "cuEventElapsedTime",
                sys::cuEventElapsedTime_v2(&raw mut milliseconds, earlier.event, self.event),
            )?;
        }
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made once in `record`.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

//! Results of the driver's functions.

use cudarc::driver::sys;

use crate::error::CudaError;

/// An error that names the call and where it was.
pub(super) fn call_at(
    name: &'static str,
    result: sys::CUresult,
    at: impl FnOnce() -> String,
) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    Err(CudaError::Driver { call: name, code: format!("{result:?}"), at: at() })
}

pub(super) fn call(name: &'static str, result: sys::CUresult) -> Result<(), CudaError> {
    call_at(name, result, String::new)
}

/// An attribute of a device that is no negative number.
pub(super) fn attribute(device: sys::CUdevice, which: sys::CUdevice_attribute) -> Result<u32, CudaError> {
    let mut value = 0;
    // SAFETY: the pointer is to a live integer; the device is the driver's.
    let asked = unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) };
    call_at("cuDeviceGetAttribute", asked, || format!("{which:?}"))?;
    Ok(value.max(0) as u32)
}

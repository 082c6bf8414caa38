//! What can go wrong on a device: every message names the call, the kernel and its sizes, and the mend.

use plugfold_abi::OpError;

/// Why a device cannot be used, or a call on it failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver's library is not there.
    #[error(
        "no CUDA driver: {0}. Install NVIDIA's driver (`nvidia-smi` must work; in a container, start it with --gpus all), or \
         choose --device cpu"
    )]
    NoDriver(String),
    /// The driver is older than the device code needs.
    #[error(
        "the CUDA driver supports CUDA {have}, this build needs {need}: install a newer driver, or choose --device cpu"
    )]
    OldDriver {
        /// What it supports, `major.minor`.
        have: String,
        /// What is needed.
        need: String,
    },
    /// There is no such device.
    #[error("no CUDA device {index}: the driver shows {count} (CUDA_VISIBLE_DEVICES hides the others)")]
    NoDevice {
        /// The device asked for.
        index: usize,
        /// How many there are.
        count: usize,
    },
    /// The device cannot run the kernels.
    #[error(
        "device {index} ({name}) has compute capability {have}, the kernels need 8.0 or newer: choose another device"
    )]
    OldDevice {
        /// The device.
        index: usize,
        /// Its name.
        name: String,
        /// Its compute capability.
        have: String,
    },
    /// Device memory is used up.
    #[error(
        "out of memory on device {device}: {what} needs {need} MB, {free} MB of {total} MB are free. Lower --context or \
         --slots, use a smaller quantization, or more ranks"
    )]
    OutOfMemory {
        /// The device.
        device: usize,
        /// For what.
        what: String,
        /// Megabytes asked for.
        need: u64,
        /// Megabytes free.
        free: u64,
        /// Megabytes of the device.
        total: u64,
    },
    /// The run-time compiler's library is not there, and a kernel is not in the cache.
    #[error(
        "kernel file {file} is not in the cache of compiled kernels ({cache}) and NVRTC cannot be loaded: {why}. Install it \
         (pip install nvidia-cuda-nvrtc, or the CUDA toolkit) and put its folder on LD_LIBRARY_PATH, or set \
         PLUGFOLD_CUDA_CACHE to a filled cache"
    )]
    NoCompiler {
        /// The source.
        file: String,
        /// The cache's folder.
        cache: String,
        /// What the loader said.
        why: String,
    },
    /// A kernel's source was refused by the compiler.
    #[error("kernel file {file} does not compile for {arch} (NVRTC {compiler}):\n{log}")]
    Compile {
        /// The source.
        file: String,
        /// The architecture.
        arch: String,
        /// The compiler's version.
        compiler: String,
        /// Its log.
        log: String,
    },
    /// A launch that does not fit the kernel.
    #[error("kernel {kernel}: {problem}")]
    Launch {
        /// The kernel.
        kernel: String,
        /// What is wrong.
        problem: String,
    },
    /// A call of the driver failed.
    #[error("{call} failed: {code}{}", context(.at))]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// Its error, as the driver names it.
        code: String,
        /// The kernel with its grid and arguments, the sizes, or nothing.
        at: String,
    },
    /// The cache of compiled kernels.
    #[error("cache of compiled kernels {path}: {why}")]
    Cache {
        /// The file or folder.
        path: String,
        /// What the system said.
        why: String,
    },
}

fn context(at: &str) -> String {
    if at.is_empty() { String::new() } else { format!(" ({at})") }
}

impl CudaError {
    /// Whether the device cannot be used any more: after a fault in a kernel every call fails.
    pub fn is_sticky(&self) -> bool {
        let CudaError::Driver { code, .. } = self else { return false };
        [
            "ILLEGAL_ADDRESS",
            "LAUNCH_FAILED",
            "MISALIGNED_ADDRESS",
            "ILLEGAL_INSTRUCTION",
            "HARDWARE_STACK_ERROR",
            "ASSERT",
        ]
        .iter()
        .any(|c| code.contains(c))
    }
}

impl From<CudaError> for OpError {
    fn from(error: CudaError) -> Self {
        // After a fault in a kernel nothing on the device can be trusted: the engine must not go on.
        if error.is_sticky() { OpError::fatal(error.to_string()) } else { OpError::new(error.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use plugfold_abi::ErrorKind;

    use super::*;

    #[test]
    fn a_fault_in_a_kernel_ends_the_engine_and_a_refused_launch_does_not() {
        let fault = |code: &str| CudaError::Driver {
            call: "cuStreamSynchronize",
            code: code.into(),
            at: "kernel norm, grid 3 x 1 x 1".into(),
        };
        let error: OpError = fault("CUDA_ERROR_ILLEGAL_ADDRESS").into();
        assert_eq!(error.kind, ErrorKind::Fatal);
        assert_eq!(
            error.to_string(),
            "cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (kernel norm, grid 3 x 1 x 1)"
        );
        assert_eq!(OpError::from(fault("CUDA_ERROR_INVALID_VALUE")).kind, ErrorKind::Failed);
    }
}

//! Why weights cannot be made.

use plugfold_kernels::cpu::exl3;
use plugfold_kernels::device::DeviceError;

use crate::hooks::HookError;

/// A tensor that cannot be read, or a plugin that changes or stores weights and is at fault.
#[derive(Debug, thiserror::Error)]
pub enum WeightError<E: std::error::Error + 'static> {
    /// A tensor.
    #[error(transparent)]
    Source(E),
    /// A plugin failed.
    #[error("{what}: {error}")]
    Hook {
        /// The tensor, or the matrix and the builder.
        what: String,
        /// Who, and what it said.
        error: HookError,
    },
    /// The device that they move to.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// What a plugin registers or gives does not fit.
    #[error("plugin {owner}: {why}")]
    Plugin {
        /// The plugin.
        owner: String,
        /// What is wrong and the mend.
        why: String,
    },
}

impl<E: std::error::Error + From<exl3::Error>> From<exl3::Error> for WeightError<E> {
    fn from(error: exl3::Error) -> Self {
        Self::Source(error.into())
    }
}

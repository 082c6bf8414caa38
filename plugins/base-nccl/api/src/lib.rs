//! What plugins may ask of the transport over NCCL: how it is set up, before it is, and the transport itself, to stand above it.

use plugfold_abi::points::{ControlObject, DeviceAccessObject};
use plugfold_abi::{CommObject, Maybe, Text};

plugfold_abi::fixed_layouts!();

plugfold_abi::interface! {
    /// The transport `nccl`.
    "nccl", 0: Nccl, NcclObject, NcclTable {
        /// Sets one of NCCL's variables (`NCCL_PROTO`) for this process, for the plugin `by`. Refused once a communicator has been
        /// opened, where a setting or the environment says otherwise, and for variables that the transport decides itself.
        fn set(&self, variable: Text<'_>, value: Text<'_>, by: Text<'_>) -> ();
        /// Opens it on all ranks in step, for a transport above it.
        fn open(&self, control: ControlObject, device: Maybe<DeviceAccessObject>) -> CommObject;
    }
}

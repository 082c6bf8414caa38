//! A machine as the device of an engine.

use std::sync::Arc;

use plugfold_abi::points::{DeviceAccess, DeviceAccessObject, DeviceFacts, GraphsObject};
use plugfold_abi::{OpError, ProviderObject, Slice, SliceMut, Text};
use plugfold_kernels::device::{Device, DeviceError};

use crate::error::CudaError;
use crate::graphs::Recordings;
use crate::machine::Machine;
use crate::ops::providers;

/// A machine on which an engine keeps its model and runs it.
pub struct CudaDevice {
    machine: Arc<dyn Machine>,
    graphs: GraphsObject,
}

impl CudaDevice {
    /// The device of a machine.
    pub fn new(machine: Arc<dyn Machine>) -> Self {
        Self { graphs: GraphsObject::new(Recordings(machine.clone())), machine }
    }
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> Self {
        Self { fatal: error.is_sticky(), message: error.to_string() }
    }
}

impl Device for CudaDevice {
    fn class(&self) -> &str {
        self.machine.class()
    }

    fn name(&self) -> String {
        self.machine.name()
    }

    fn free_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.machine.free_bytes()?)
    }

    fn allocate(&self, what: &str, bytes: usize) -> Result<u64, DeviceError> {
        Ok(self.machine.allocate(what, bytes)?)
    }

    fn release(&self, address: u64) {
        self.machine.release(address);
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        Ok(self.machine.upload(to, bytes)?)
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        Ok(self.machine.download(from, bytes)?)
    }

    fn zero(&self, at: u64, bytes: usize) -> Result<(), DeviceError> {
        Ok(self.machine.zero(at, bytes)?)
    }

    fn graphs(&self) -> Option<&GraphsObject> {
        Some(&self.graphs)
    }

    fn forget_recordings(&self) {
        self.machine.forget_recordings();
    }

    fn access(&self) -> Option<DeviceAccessObject> {
        Some(DeviceAccessObject::new(Access(self.machine.clone())))
    }

    fn providers(&self) -> Vec<ProviderObject> {
        providers(&self.machine)
    }
}

/// A machine as transports see it.
struct Access(Arc<dyn Machine>);

impl DeviceAccess for Access {
    fn facts(&self) -> Result<DeviceFacts, OpError> {
        let (index, identity) = self.0.identity()?;
        Ok(DeviceFacts {
            family: "cuda".into(),
            name: self.0.name().into(),
            identity: identity.into(),
            index: index as u32,
        })
    }

    fn enter(&self) -> Result<(), OpError> {
        Ok(self.0.enter()?)
    }

    fn stream(&self) -> Result<u64, OpError> {
        Ok(self.0.stream())
    }

    fn allocate(&self, what: Text<'_>, bytes: u64) -> Result<u64, OpError> {
        Ok(self.0.allocate(what.get_str(), bytes as usize)?)
    }

    fn free(&self, address: u64) -> Result<(), OpError> {
        self.0.release(address);
        Ok(())
    }

    fn upload(&self, to: u64, bytes: Slice<'_, u8>) -> Result<(), OpError> {
        Ok(self.0.upload(to, &bytes)?)
    }

    fn download(&self, from: u64, bytes: SliceMut<'_, u8>) -> Result<(), OpError> {
        Ok(self.0.download(from, bytes.into_mut())?)
    }
}

//! A machine as the device of an engine.

use std::sync::Arc;

use plugfold_abi::ProviderObject;
use plugfold_abi::points::GraphsObject;
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

    fn providers(&self) -> Vec<ProviderObject> {
        providers(&self.machine)
    }
}

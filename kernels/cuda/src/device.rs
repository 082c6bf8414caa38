//! A machine as the device of an engine.

use std::sync::Arc;

use plugfold_abi::ProviderObject;
use plugfold_kernels::device::{Device, DeviceError};

use crate::error::CudaError;
use crate::machine::Machine;
use crate::ops::providers;

/// A machine on which an engine keeps its model and runs it.
pub struct CudaDevice(Arc<dyn Machine>);

impl CudaDevice {
    /// The device of a machine.
    pub fn new(machine: Arc<dyn Machine>) -> Self {
        Self(machine)
    }
}

impl From<CudaError> for DeviceError {
    fn from(error: CudaError) -> Self {
        Self { fatal: error.is_sticky(), message: error.to_string() }
    }
}

impl Device for CudaDevice {
    fn class(&self) -> &str {
        self.0.class()
    }

    fn name(&self) -> String {
        self.0.name()
    }

    fn free_bytes(&self) -> Result<u64, DeviceError> {
        Ok(self.0.free_bytes()?)
    }

    fn allocate(&self, what: &str, bytes: usize) -> Result<u64, DeviceError> {
        Ok(self.0.allocate(what, bytes)?)
    }

    fn release(&self, address: u64) {
        self.0.release(address);
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        Ok(self.0.upload(to, bytes)?)
    }

    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        Ok(self.0.download(from, bytes)?)
    }

    fn zero(&self, at: u64, bytes: usize) -> Result<(), DeviceError> {
        Ok(self.0.zero(at, bytes)?)
    }

    fn providers(&self) -> Vec<ProviderObject> {
        providers(&self.0)
    }
}

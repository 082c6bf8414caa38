//! The device that a model runs on, as the engine sees it: memory at fixed addresses and a provider for every operation.
//!
//! The engine works without one on the host's own memory. Where there is one, weights, caches, buffers of programs and rows
//! of embeddings lie in its memory, and the engine reads and writes them through [`Memory`] only.

use std::fmt;
use std::sync::Arc;

use plugfold_abi::points::{DeviceAccessObject, GraphsObject};
use plugfold_abi::{OpError, ProviderObject};

/// What a device says went wrong.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct DeviceError {
    /// The call, what it was for, and the mend where there is one.
    pub message: String,
    /// Whether nothing on the device can be trusted any more.
    pub fatal: bool,
}

impl From<DeviceError> for OpError {
    fn from(error: DeviceError) -> Self {
        if error.fatal { OpError::fatal(error.message) } else { OpError::new(error.message) }
    }
}

/// Something with memory of its own that runs operations there, in the order in which they are asked for.
pub trait Device: Send + Sync {
    /// Its class in queries, for which providers are chosen: "sm_90" for an H100.
    fn class(&self) -> &str;

    /// What it is, for people.
    fn name(&self) -> String;

    /// Bytes that can still be taken.
    ///
    /// # Errors
    /// What the device says.
    fn free_bytes(&self) -> Result<u64, DeviceError>;

    /// Zeroed memory, aligned to 256 bytes; `what` it is for is said where there is not enough.
    ///
    /// # Errors
    /// Memory that is used up.
    fn allocate(&self, what: &str, bytes: usize) -> Result<u64, DeviceError>;

    /// Gives memory back.
    fn release(&self, address: u64);

    /// Copies bytes there, after what was asked for before.
    ///
    /// # Errors
    /// What the device says, also of earlier work.
    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), DeviceError>;

    /// Copies bytes from there, after what was asked for before, and waits for them; no bytes at all are waited for just so.
    ///
    /// # Errors
    /// As [`Device::upload`].
    fn download(&self, from: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;

    /// Sets bytes to zero, after what was asked for before.
    ///
    /// # Errors
    /// As [`Device::upload`].
    fn zero(&self, at: u64, bytes: usize) -> Result<(), DeviceError>;

    /// Recordings of what operations ask of it, where it can make any.
    fn graphs(&self) -> Option<&GraphsObject> {
        None
    }

    /// Forgets all recordings: what they hold goes away.
    fn forget_recordings(&self) {}

    /// Itself for a transport, where other libraries may use its memory and its stream.
    fn access(&self) -> Option<DeviceAccessObject> {
        None
    }

    /// A provider for every operation of the reference.
    fn providers(&self) -> Vec<ProviderObject>;
}

/// Memory of the host or of a device, zeroed when it is made, at an address that stays.
pub enum Memory {
    /// Of the host, in units of 64 bytes, so that what lies in it is aligned.
    Host(Vec<[u64; 8]>),
    /// Of a device.
    Device(Block),
}

/// A stretch of a device's memory, given back when this is dropped.
pub struct Block {
    device: Arc<dyn Device>,
    at: u64,
    bytes: usize,
}

impl Drop for Block {
    fn drop(&mut self) {
        self.device.release(self.at);
    }
}

impl Default for Memory {
    fn default() -> Self {
        Self::Host(Vec::new())
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = match self {
            Memory::Host(_) => "the host",
            Memory::Device(block) => block.device.class(),
        };
        write!(f, "{} bytes of {place}", self.len())
    }
}

impl Memory {
    /// Takes zeroed memory of a device, or of the host where there is none.
    ///
    /// # Errors
    /// Memory that is used up.
    pub fn new(device: Option<&Arc<dyn Device>>, what: &str, bytes: usize) -> Result<Self, DeviceError> {
        match device {
            None => {
                let units = bytes.div_ceil(64);
                // Asked first: an allocation that fails ends the process.
                if Vec::<[u64; 8]>::new().try_reserve_exact(units).is_err() {
                    let gb = bytes as f64 / 1e9;
                    let message = format!(
                        "{what} need {gb:.1} GB of this machine's memory, which it cannot give: lower --context or --slots"
                    );
                    return Err(DeviceError { message, fatal: false });
                }
                Ok(Self::Host(vec![[0; 8]; units]))
            }
            Some(device) => {
                let at = device.allocate(what, bytes)?;
                Ok(Self::Device(Block { device: device.clone(), at, bytes }))
            }
        }
    }

    /// Memory that holds bytes already.
    ///
    /// # Errors
    /// A device's memory that is used up, or what it says.
    pub fn holding(device: &Arc<dyn Device>, what: &str, bytes: &[u8]) -> Result<Self, DeviceError> {
        let at = device.allocate(what, bytes.len())?;
        let block = Block { device: device.clone(), at, bytes: bytes.len() };
        device.upload(at, bytes)?;
        Ok(Self::Device(block))
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Memory::Host(units) => units.len() * 64,
            Memory::Device(block) => block.bytes,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where it starts: an address of the host or of the device.
    pub fn address(&self) -> *mut u8 {
        match self {
            Memory::Host(units) => units.as_ptr().cast::<u8>().cast_mut(),
            Memory::Device(block) => std::ptr::without_provenance_mut(block.at as usize),
        }
    }

    /// The host's memory; `None` where it is a device's.
    pub fn host(&self) -> Option<&[u8]> {
        match self {
            Memory::Host(units) => Some(bytemuck::cast_slice(units)),
            Memory::Device(_) => None,
        }
    }

    /// Whether bytes from an offset lie inside.
    fn check(&self, offset: usize, bytes: usize) {
        let end = offset.checked_add(bytes);
        assert!(
            end.is_some_and(|end| end <= self.len()),
            "bytes {offset} and {bytes} more of {}",
            self.len()
        );
    }

    /// Reads bytes. On the host nobody may be writing them.
    ///
    /// # Errors
    /// What the device says, also of earlier work.
    ///
    /// # Panics
    /// When they are not inside.
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), DeviceError> {
        self.check(offset, out.len());
        match self {
            // SAFETY: inside of the memory, which kernels may write through the address: a copy makes no reference to it.
            Memory::Host(_) => unsafe {
                std::ptr::copy_nonoverlapping(self.address().add(offset), out.as_mut_ptr(), out.len());
            },
            Memory::Device(block) => block.device.download(block.at + offset as u64, out)?,
        }
        Ok(())
    }

    /// Writes bytes. On the host nobody may be reading or writing them.
    ///
    /// # Errors
    /// As [`Memory::read`].
    ///
    /// # Panics
    /// When they are not inside.
    pub fn write(&mut self, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
        self.check(offset, bytes.len());
        match self {
            // SAFETY: as in `read`, and the borrow is exclusive.
            Memory::Host(_) => unsafe {
                std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address().add(offset), bytes.len());
            },
            Memory::Device(block) => block.device.upload(block.at + offset as u64, bytes)?,
        }
        Ok(())
    }

    /// Sets bytes to zero.
    ///
    /// # Errors
    /// As [`Memory::read`].
    ///
    /// # Panics
    /// When they are not inside.
    pub fn zero(&mut self, offset: usize, bytes: usize) -> Result<(), DeviceError> {
        self.check(offset, bytes);
        match self {
            // SAFETY: as in `write`.
            Memory::Host(_) => unsafe { self.address().add(offset).write_bytes(0, bytes) },
            Memory::Device(block) => block.device.zero(block.at + offset as u64, bytes)?,
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_the_host_is_aligned_zeroed_and_bounded() {
        let mut memory = Memory::new(None, "a test", 100).unwrap();
        assert_eq!((memory.len(), memory.address() as usize % 64), (128, 0));
        memory.write(3, &[1, 2, 3]).unwrap();
        memory.zero(4, 1).unwrap();
        let mut out = [9; 5];
        memory.read(2, &mut out).unwrap();
        assert_eq!(out, [0, 1, 0, 3, 0]);
        assert_eq!(memory.host().map(|h| h[3]), Some(1));
        let outside = std::panic::AssertUnwindSafe(|| memory.read(126, &mut [0; 3]));
        let outside = std::panic::catch_unwind(outside);
        assert!(outside.is_err());
    }

    #[test]
    fn memory_that_there_is_not_is_refused_with_the_mend() {
        let refused = Memory::new(None, "caches", 1 << 62).unwrap_err().to_string();
        assert!(
            refused.starts_with("caches need") && refused.contains("lower --context or --slots"),
            "{refused}"
        );
    }
}

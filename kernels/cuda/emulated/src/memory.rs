//! Memory that only an open region lets through.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};

/// Bytes that the device has. The system gives pages as they are written.
pub const LIMIT: usize = 4 << 30;
/// Blocks start on multiples of this, in bytes, as on a GPU.
const ALIGN: usize = 256;

/// One stretch of addresses, cut into blocks.
pub struct Region {
    base: NonNull<u8>,
    /// Bytes from the start that have been given out.
    used: usize,
    /// Size of each block by its offset.
    blocks: BTreeMap<usize, usize>,
    /// Offsets of blocks that were given back, by size.
    spare: BTreeMap<usize, Vec<usize>>,
    /// Whether it is closed while nobody has opened it.
    guarded: bool,
}

// SAFETY: the mapping is this value's alone.
unsafe impl Send for Region {}

impl Default for Region {
    fn default() -> Self {
        // SAFETY: a new mapping at an address of the system's choice.
        let mapped = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                LIMIT,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = NonNull::new(mapped.expect("addresses for the emulated device").cast());
        Self {
            base: base.expect("no mapping lies at 0"),
            used: 0,
            blocks: BTreeMap::new(),
            spare: BTreeMap::new(),
            guarded: false,
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: mapped once in `default`, with as many bytes.
        let _gone = unsafe { munmap(self.base.as_ptr().cast(), LIMIT) };
    }
}

/// While this lives, the region can be read and written.
pub struct Open<'a>(&'a mut Region);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.protect(MprotectFlags::empty());
    }
}

impl Region {
    /// A region that is closed while nobody has opened it.
    pub fn guarded() -> Self {
        let mut region = Self::default();
        region.guarded = true;
        region
    }

    fn protect(&mut self, flags: MprotectFlags) {
        if self.guarded && self.used > 0 {
            // SAFETY: pages of the mapping; references into them live only while it is open.
            unsafe { mprotect(self.base.as_ptr().cast(), self.used.next_multiple_of(4096), flags) }
                .expect("protection of own pages");
        }
    }

    /// Lets everybody through for a while.
    pub fn open(&mut self) -> Open<'_> {
        self.protect(MprotectFlags::READ | MprotectFlags::WRITE);
        Open(self)
    }

    /// The address of so many bytes, each of this value.
    ///
    /// # Errors
    /// The bytes that are not there.
    pub fn allocate(&mut self, bytes: usize, value: u8) -> Result<u64, usize> {
        let size = bytes.max(1).next_multiple_of(ALIGN);
        let at = match self.spare.get_mut(&size).and_then(Vec::pop) {
            Some(at) => at,
            None if self.used + size > LIMIT => return Err(bytes),
            None => {
                self.used += size;
                self.used - size
            }
        };
        self.blocks.insert(at, size);
        let open = self.open();
        // SAFETY: inside of the mapping, and open.
        let first = unsafe { open.0.base.add(at) };
        // SAFETY: as above.
        unsafe { first.write_bytes(value, size) };
        Ok(first.as_ptr() as u64)
    }

    /// Takes a block back.
    pub fn release(&mut self, address: u64) {
        let at = (address as usize).wrapping_sub(self.base.as_ptr() as usize);
        if let Some(size) = self.blocks.remove(&at) {
            self.spare.entry(size).or_default().push(at);
        }
    }

    /// Where it starts.
    pub fn base(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Bytes that were never given out.
    pub fn free_bytes(&self) -> usize {
        LIMIT - self.used
    }
}

//! Memory that belongs to sequences: cache families and recurrent state.

use crate::Text;

/// How a position becomes a row of a family.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Addressing {
    /// Not by position: one record a slot and parity (recurrent state).
    State = 0,
    /// Row = position / positions_a_row.
    Linear = 1,
    /// Row = position modulo the ring's rows.
    Ring = 2,
    /// Through a page map.
    Paged = 3,
}

/// One family in one layer, over all slots.
///
/// Rows are f32 in the reference formats (a row's bytes are a multiple of 4 and `base` is aligned to 64). `base` is
/// fixed for the life of the engine; slot and parity come from the round table.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct CacheView {
    /// Start of slot 0, parity 0.
    pub base: *mut u8,
    /// Bytes from one slot to the next.
    pub slot_stride: u64,
    /// Bytes from parity 0 to parity 1 inside a slot; 0 where the family has one buffer.
    pub parity_stride: u64,
    /// Bytes a row (or the whole record for [`Addressing::State`]).
    pub row_bytes: u64,
    /// Rows a slot.
    pub rows: u32,
    /// Slots.
    pub slots: u32,
    /// Row format ("f32" in the reference).
    pub format: Text<'static>,
    /// How positions map to rows.
    pub addressing: Addressing,
}

// SAFETY: an address and a shape; access is unsafe and carries the contract.
unsafe impl Send for CacheView {}
// SAFETY: as above.
unsafe impl Sync for CacheView {}

/// Names one record of a family: a slot and one of its buffers.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotState {
    /// Slot index.
    pub slot: u32,
    /// Buffer, 0 or 1.
    pub parity: u32,
}

impl CacheView {
    /// A view of nothing.
    pub const EMPTY: CacheView = CacheView {
        base: std::ptr::null_mut(),
        slot_stride: 0,
        parity_stride: 0,
        row_bytes: 0,
        rows: 0,
        slots: 0,
        format: Text::EMPTY,
        addressing: Addressing::State,
    };

    /// Address of a row.
    ///
    /// # Panics
    /// When slot, parity or row are outside the family: that would be memory of another sequence.
    pub fn row_ptr(&self, at: SlotState, row: u32) -> *mut u8 {
        assert!(
            at.slot < self.slots && at.parity < 2 && row < self.rows,
            "cache row outside its family: slot {} of {}, row {row} of {}",
            at.slot,
            self.slots,
            self.rows
        );
        let offset = u64::from(at.slot) * self.slot_stride
            + u64::from(at.parity) * self.parity_stride
            + u64::from(row) * self.row_bytes;
        // SAFETY: inside the family's allocation, by the check above and the engine's layout.
        unsafe { self.base.add(offset as usize) }
    }

    /// `rows` consecutive rows as f32, to read.
    ///
    /// # Safety
    /// Nobody may write these rows while the slice lives.
    #[allow(clippy::cast_ptr_alignment)] // rows start on multiples of 4 bytes from an aligned base
    pub unsafe fn read_f32<'a>(&self, at: SlotState, row: u32, rows: u32) -> &'a [f32] {
        if rows == 0 {
            return &[];
        }
        let _last = self.row_ptr(at, row + rows - 1);
        // SAFETY: both ends were checked; exclusive access is the caller's duty.
        unsafe {
            std::slice::from_raw_parts(
                self.row_ptr(at, row).cast::<f32>(),
                rows as usize * (self.row_bytes as usize / 4),
            )
        }
    }

    /// `rows` consecutive rows as f32, to write.
    ///
    /// # Safety
    /// Nobody else may read or write these rows while the slice lives.
    #[allow(clippy::cast_ptr_alignment)] // as above
    pub unsafe fn write_f32<'a>(&self, at: SlotState, row: u32, rows: u32) -> &'a mut [f32] {
        if rows == 0 {
            return &mut [];
        }
        let _last = self.row_ptr(at, row + rows - 1);
        // SAFETY: both ends were checked; exclusive access is the caller's duty.
        unsafe {
            std::slice::from_raw_parts_mut(
                self.row_ptr(at, row).cast::<f32>(),
                rows as usize * (self.row_bytes as usize / 4),
            )
        }
    }
}

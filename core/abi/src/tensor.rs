//! A row-major matrix somewhere in memory.

/// Element types.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single.
    F32 = 0,
    /// bfloat16.
    Bf16 = 1,
    /// IEEE half.
    F16 = 2,
    /// Signed 32 bit.
    I32 = 3,
    /// Unsigned 32 bit.
    U32 = 4,
    /// Bytes.
    U8 = 5,
}

impl DType {
    /// Bytes an element.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::Bf16 | DType::F16 => 2,
            DType::U8 => 1,
        }
    }
}

/// A view of `rows` x `cols` elements; row r starts `r * stride` elements after `ptr`.
///
/// A view carries no lifetime: it is made for one call by the executor, which guarantees that the memory outlives the
/// call and that no two output views of calls that run at once overlap.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct View {
    /// First element.
    pub ptr: *mut u8,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Elements from one row to the next.
    pub stride: u32,
    /// Element type.
    pub dtype: DType,
}

// SAFETY: a view is an address and a shape; whoever turns it into a slice takes the duty of exclusive access.
unsafe impl Send for View {}
// SAFETY: as above.
unsafe impl Sync for View {}

impl View {
    /// A view of nothing.
    pub const EMPTY: View =
        View { ptr: std::ptr::null_mut(), rows: 0, cols: 0, stride: 0, dtype: DType::F32 };

    /// Bytes that the view spans, from the first element to one past the last.
    pub const fn span_bytes(&self) -> usize {
        if self.rows == 0 || self.cols == 0 {
            return 0;
        }
        ((self.rows as usize - 1) * self.stride as usize + self.cols as usize) * self.dtype.size()
    }
}

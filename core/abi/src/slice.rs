//! `repr(C)` borrowed slices and strings.

use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;

/// A borrowed slice with a fixed layout.
#[repr(C)]
#[derive(abi_stable::StableAbi)]
pub struct Slice<'a, T> {
    ptr: *const T,
    len: usize,
    life: PhantomData<&'a T>,
}

// SAFETY: a `Slice` is a shared borrow; it may travel wherever `&[T]` may.
unsafe impl<T: Sync> Send for Slice<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Slice<'_, T> {}

impl<T> Clone for Slice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Slice<'_, T> {}

impl<T> Default for Slice<'_, T> {
    fn default() -> Self {
        Self::from(&[][..])
    }
}

impl<'a, T> From<&'a [T]> for Slice<'a, T> {
    fn from(s: &'a [T]) -> Self {
        Self { ptr: s.as_ptr(), len: s.len(), life: PhantomData }
    }
}

impl<'a, T> Slice<'a, T> {
    /// The slice with its own lifetime.
    pub fn get_ref(self) -> &'a [T] {
        // SAFETY: built from a live `&'a [T]` and never mutated.
        unsafe { std::slice::from_raw_parts(self.ptr, self.len) }
    }
}

impl<T> Deref for Slice<'_, T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        self.get_ref()
    }
}

impl<T: fmt::Debug> fmt::Debug for Slice<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get_ref().fmt(f)
    }
}

/// A borrowed UTF-8 string with a fixed layout.
#[repr(transparent)]
#[derive(abi_stable::StableAbi, Clone, Copy, Default)]
pub struct Text<'a>(Slice<'a, u8>);

impl<'a> From<&'a str> for Text<'a> {
    fn from(s: &'a str) -> Self {
        Self(Slice::from(s.as_bytes()))
    }
}

impl Text<'_> {
    /// The empty string.
    pub const EMPTY: Text<'static> =
        Text(Slice { ptr: std::ptr::NonNull::dangling().as_ptr(), len: 0, life: PhantomData });
}

impl<'a> Text<'a> {
    /// The string with its own lifetime.
    pub fn get_str(self) -> &'a str {
        // SAFETY: built from a `&str` only.
        unsafe { std::str::from_utf8_unchecked(self.0.get_ref()) }
    }
}

impl Deref for Text<'_> {
    type Target = str;
    fn deref(&self) -> &str {
        self.get_str()
    }
}

impl PartialEq for Text<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.get_str() == other.get_str()
    }
}
impl Eq for Text<'_> {}

impl fmt::Debug for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get_str().fmt(f)
    }
}
impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self)
    }
}

/// A borrowed slice that may be written, with a fixed layout.
#[repr(C)]
#[derive(abi_stable::StableAbi)]
pub struct SliceMut<'a, T> {
    ptr: *mut T,
    len: usize,
    life: PhantomData<&'a mut T>,
}

// SAFETY: a `SliceMut` is an exclusive borrow; it may travel wherever `&mut [T]` may.
unsafe impl<T: Send> Send for SliceMut<'_, T> {}

impl<'a, T> From<&'a mut [T]> for SliceMut<'a, T> {
    fn from(s: &'a mut [T]) -> Self {
        Self { ptr: s.as_mut_ptr(), len: s.len(), life: PhantomData }
    }
}

impl<'a, T> SliceMut<'a, T> {
    /// The slice with its own lifetime.
    pub fn into_mut(self) -> &'a mut [T] {
        // SAFETY: built from an exclusive `&'a mut [T]`, given up here.
        unsafe { std::slice::from_raw_parts_mut(self.ptr, self.len) }
    }
}

//! Memory for the intermediate numbers of a call: each thread keeps it for the next call, so that a step allocates nothing.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use bytemuck::Pod;

/// 64 bytes, so that whatever lies there is aligned.
type Line = [u64; 8];

/// Larger pieces go back to the system: a long prompt must not leave its memory with every thread.
const MOST: usize = (1 << 20) / size_of::<Line>();

thread_local! {
    static SPARE: RefCell<Vec<Vec<Line>>> = const { RefCell::new(Vec::new()) };
}

/// A slice that is taken back when it is dropped.
pub(crate) struct Scratch<T> {
    lines: Vec<Line>,
    len: usize,
    of: PhantomData<T>,
}

/// So many zeros.
pub(crate) fn zeros<T: Pod>(len: usize) -> Scratch<T> {
    const { assert!(align_of::<T>() <= align_of::<Line>()) };
    let mut lines = SPARE.try_with(|spare| spare.borrow_mut().pop()).ok().flatten().unwrap_or_default();
    lines.clear();
    lines.resize((len * size_of::<T>()).div_ceil(size_of::<Line>()), Line::default());
    Scratch { lines, len, of: PhantomData }
}

impl<T: Pod> Deref for Scratch<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &cast(bytemuck::cast_slice(&self.lines))[..self.len]
    }
}

impl<T: Pod> DerefMut for Scratch<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.lines);
        let whole = bytes.len() / size_of::<T>() * size_of::<T>();
        &mut bytemuck::cast_slice_mut(&mut bytes[..whole])[..self.len]
    }
}

/// As many elements as the bytes hold.
fn cast<T: Pod>(bytes: &[u8]) -> &[T] {
    bytemuck::cast_slice(&bytes[..bytes.len() / size_of::<T>() * size_of::<T>()])
}

impl<T> Drop for Scratch<T> {
    fn drop(&mut self) {
        if self.lines.capacity() <= MOST {
            let lines = std::mem::take(&mut self.lines);
            // A thread that ends has nobody to keep it for.
            let _ = SPARE.try_with(|spare| spare.borrow_mut().push(lines));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_back_is_given_out_again_and_empty() {
        let mut first = zeros::<f32>(100);
        let second = zeros::<[f32; 16]>(3);
        assert_eq!((first.len(), second.len()), (100, 3));
        first.fill(7.0);
        let place = first.as_ptr();
        drop(first);
        let again = zeros::<i32>(50);
        assert_eq!(again.as_ptr().cast(), place);
        assert!(again.iter().all(|v| *v == 0));
        assert!(second.iter().flatten().all(|v| *v == 0.0));
        assert!(zeros::<u64>(0).is_empty());
    }

    #[test]
    fn large_pieces_are_not_kept() {
        drop(zeros::<u8>(10 << 20));
        let kept = SPARE.with(|spare| spare.borrow().iter().map(Vec::capacity).max());
        assert!(kept.is_none_or(|most| most <= MOST));
    }
}

//! Matrices as the kernels see them: rows that lie a stride apart.

use std::marker::PhantomData;

/// A shared view of `rows` x `cols` elements.
#[derive(Debug)]
#[allow(clippy::struct_field_names)] // rows are what both are about
pub struct Rows<'a, T = f32> {
    ptr: *const T,
    rows: usize,
    cols: usize,
    stride: usize,
    life: PhantomData<&'a [T]>,
}

// SAFETY: a `Rows` is a set of shared slices.
unsafe impl<T: Sync> Send for Rows<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Rows<'_, T> {}

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// Rows of `cols` elements that follow each other without a gap.
    ///
    /// # Panics
    /// When `data` is not a whole number of rows.
    pub fn new(data: &'a [T], cols: usize) -> Self {
        assert!(
            cols > 0 && data.len().is_multiple_of(cols) || data.is_empty(),
            "rows: {} elements by {cols}",
            data.len()
        );
        let rows = data.len().checked_div(cols).unwrap_or(0);
        Self { ptr: data.as_ptr(), rows, cols, stride: cols, life: PhantomData }
    }

    /// Rows behind a pointer.
    ///
    /// # Safety
    /// For every row r below `rows`, the `cols` elements from `ptr + r * stride` must be readable, aligned, initialized and unwritten for `'a`.
    pub unsafe fn from_raw(ptr: *const T, rows: usize, cols: usize, stride: usize) -> Self {
        Self { ptr, rows, cols, stride, life: PhantomData }
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// One row.
    ///
    /// # Panics
    /// When there is no such row.
    #[inline(always)]
    pub fn row(&self, r: usize) -> &'a [T] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: inside the view, by the check and the contract of the constructors.
        unsafe { std::slice::from_raw_parts(self.ptr.add(r * self.stride), self.cols) }
    }

    /// Columns `start .. start + cols` of every row.
    ///
    /// # Panics
    /// When they are not all there.
    #[must_use]
    pub fn columns(&self, start: usize, cols: usize) -> Self {
        assert!(start + cols <= self.cols, "columns {start}..{} of {}", start + cols, self.cols);
        // The pointer of an empty view is never read, so it may stay where it is.
        let ptr = if self.rows == 0 { self.ptr } else { self.ptr.wrapping_add(start) };
        Self { ptr, cols, ..*self }
    }

    /// Rows `start .. start + rows`.
    ///
    /// # Panics
    /// When they are not all there.
    #[must_use]
    pub fn range(&self, start: usize, rows: usize) -> Self {
        assert!(start + rows <= self.rows, "rows {start}..{} of {}", start + rows, self.rows);
        Self { ptr: self.ptr.wrapping_add(start * self.stride), rows, ..*self }
    }
}

/// An exclusive view of `rows` x `cols` elements. Elements between the rows belong to others.
#[derive(Debug)]
pub struct RowsMut<'a, T = f32> {
    ptr: *mut T,
    rows: usize,
    cols: usize,
    stride: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: a `RowsMut` is a set of exclusive slices.
unsafe impl<T: Send> Send for RowsMut<'_, T> {}
// SAFETY: a shared `RowsMut` only gives shared slices.
unsafe impl<T: Sync> Sync for RowsMut<'_, T> {}

impl<'a, T> RowsMut<'a, T> {
    /// Rows of `cols` elements that follow each other without a gap.
    ///
    /// # Panics
    /// When `data` is not a whole number of rows.
    pub fn new(data: &'a mut [T], cols: usize) -> Self {
        let shape = Rows::new(data, cols);
        let (rows, cols) = (shape.rows, shape.cols);
        Self { ptr: data.as_mut_ptr(), rows, cols, stride: cols, life: PhantomData }
    }

    /// Rows behind a pointer.
    ///
    /// # Safety
    /// For every row r below `rows`, the `cols` elements from `ptr + r * stride` must be writable, aligned, initialized and touched by nobody else for `'a`; rows may not overlap.
    pub unsafe fn from_raw(ptr: *mut T, rows: usize, cols: usize, stride: usize) -> Self {
        Self { ptr, rows, cols, stride, life: PhantomData }
    }

    /// How many rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// One row, to read.
    ///
    /// # Panics
    /// When there is no such row.
    #[inline(always)]
    pub fn row(&self, r: usize) -> &[T] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: inside the view; the borrow of self keeps writers away.
        unsafe { std::slice::from_raw_parts(self.ptr.add(r * self.stride), self.cols) }
    }

    /// One row, to write.
    ///
    /// # Panics
    /// When there is no such row.
    #[inline(always)]
    pub fn row_mut(&mut self, r: usize) -> &mut [T] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: inside the view; the exclusive borrow of self keeps everybody else away.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.stride), self.cols) }
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> RowsMut<'_, T> {
        RowsMut { life: PhantomData, ..*self }
    }

    /// To read only.
    pub fn shared(&self) -> Rows<'_, T> {
        Rows { ptr: self.ptr, rows: self.rows, cols: self.cols, stride: self.stride, life: PhantomData }
    }

    /// Cuts off the first `cols` columns: (those, the rest).
    ///
    /// # Panics
    /// When there are not so many.
    pub fn split_columns_at(self, cols: usize) -> (Self, Self) {
        assert!(cols <= self.cols, "cut at column {cols} of {}", self.cols);
        let rest = self.ptr.wrapping_add(cols);
        (Self { cols, ..self }, Self { ptr: rest, cols: self.cols - cols, ..self })
    }

    /// Cuts off the first `rows` rows: (those, the rest).
    ///
    /// # Panics
    /// When there are not so many.
    pub fn split_rows_at(self, rows: usize) -> (Self, Self) {
        assert!(rows <= self.rows, "cut at row {rows} of {}", self.rows);
        let rest = self.ptr.wrapping_add(rows * self.stride);
        (Self { rows, ..self }, Self { ptr: rest, rows: self.rows - rows, ..self })
    }

    /// Pieces of `width` columns, the last one narrower.
    pub fn column_pieces(self, width: usize) -> Pieces<'a, T> {
        Pieces { rest: self, size: width, columns: true }
    }

    /// Pieces of `height` rows, the last one lower.
    pub fn row_pieces(self, height: usize) -> Pieces<'a, T> {
        Pieces { rest: self, size: height, columns: false }
    }
}

/// Pieces of rows, cut off one after another.
#[derive(Debug)]
pub struct Pieces<'a, T = f32> {
    rest: RowsMut<'a, T>,
    size: usize,
    columns: bool,
}

impl<T> Pieces<'_, T> {
    fn left(&self) -> usize {
        if self.columns { self.rest.cols } else { self.rest.rows }
    }
}

impl<'a, T> Iterator for Pieces<'a, T> {
    type Item = RowsMut<'a, T>;
    fn next(&mut self) -> Option<Self::Item> {
        let at = self.size.min(self.left());
        if at == 0 {
            return None;
        }
        let none = RowsMut { rows: 0, cols: 0, ..self.rest };
        let rest = std::mem::replace(&mut self.rest, none);
        let (piece, rest) = if self.columns { rest.split_columns_at(at) } else { rest.split_rows_at(at) };
        self.rest = rest;
        Some(piece)
    }
    fn size_hint(&self) -> (usize, Option<usize>) {
        let pieces = if self.size == 0 { 0 } else { self.left().div_ceil(self.size) };
        (pieces, Some(pieces))
    }
}

impl<T> ExactSizeIterator for Pieces<'_, T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_every_element_once() {
        let mut data = vec![0u32; 7 * 10];
        for rows in RowsMut::new(&mut data, 10).row_pieces(3) {
            for mut piece in rows.column_pieces(4) {
                for r in 0..piece.rows() {
                    piece.row_mut(r).iter_mut().for_each(|v| *v += 1);
                }
            }
        }
        assert!(data.iter().all(|&v| v == 1));
    }

    #[test]
    fn columns_and_ranges_are_the_right_elements() {
        let data: Vec<usize> = (0..60).collect();
        let view = Rows::new(&data, 10).columns(3, 4).range(2, 3);
        assert_eq!((view.rows(), view.cols()), (3, 4));
        assert_eq!(view.row(1), &[33, 34, 35, 36]);
        assert_eq!(Rows::<f32>::new(&[], 8).rows(), 0);
    }

    #[test]
    #[should_panic(expected = "row 3 of 3")]
    fn a_row_outside_is_refused() {
        let data = [0.0f32; 30];
        let _row = Rows::new(&data, 10).row(3);
    }
}

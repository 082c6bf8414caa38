//! From the views of a call to checked slices: for the reference and for providers of plugins that run on the CPU.

use std::ops::Range;

use half::bf16;
use plugfold_abi::{
    Addressing, CacheView, Call, DType, OpError, RoundTable, SlotState, View, Weight, formats,
};

use smallvec::SmallVec;

use super::weights::{Matrix, Stack, Table};
use crate::cpu::exl3::{EmbeddingView, Segments};
use crate::cpu::math::dense::{Elements, PackedMatrix, packed_len};
use crate::cpu::math::grouped::{Codes, Grid, GroupedMatrix};
use crate::cpu::rows::{Rows, RowsMut};

/// The only row format of the reference caches.
pub(super) const CACHE_FORMAT: &str = "f32";

/// Rust types of the element types that operands have.
pub trait Item: Copy {
    /// The type in views.
    const DTYPE: DType;
}
impl Item for f32 {
    const DTYPE: DType = DType::F32;
}
impl Item for i32 {
    const DTYPE: DType = DType::I32;
}
impl Item for bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Item for u32 {
    const DTYPE: DType = DType::U32;
}
impl Item for u8 {
    const DTYPE: DType = DType::U8;
}

/// Width of the codes of a matrix in groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 4 bits, with offsets.
    Four,
    /// 8 bits, without.
    Eight,
}

/// The rows of one sequence in a call.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Place in the round table.
    pub index: usize,
    /// Its rows, counted from the call's first.
    pub rows: Range<usize>,
    /// Position of the first of these rows.
    pub start: usize,
    /// Whether these are all rows that it has in the table.
    pub whole: bool,
    /// Where its records lie: slot and committed parity.
    pub at: SlotState,
}

/// Rows or sequences of a call for which nothing is allocated.
pub(super) const FEW: usize = 8;

/// The sequences of one call.
pub type Sequences = SmallVec<[Sequence; FEW]>;

/// The operands of one call.
pub struct Operands<'c> {
    /// Operation name.
    pub op: &'static str,
    /// The call.
    pub call: &'c Call<'c>,
    rows: Range<usize>,
}

fn shape(view: &View) -> String {
    format!("{:?} [{}, {}]", view.dtype, view.rows, view.cols)
}

impl<'c> Operands<'c> {
    /// The operands of a call of `op`.
    ///
    /// # Errors
    /// A round table whose lists are of different lengths.
    pub fn new(op: &'static str, call: &'c Call<'c>) -> Result<Self, OpError> {
        let round = call.round;
        let this = Self { op, call, rows: call.rows.within(round.rows()) };
        for (name, len, want) in [
            ("positions", round.positions.len(), round.rows()),
            ("row_seq", round.row_seq.len(), round.rows()),
            ("seq_rows", round.seq_rows.len(), round.seqs()),
            ("seq_start", round.seq_start.len(), round.seqs()),
            ("seq_slot", round.seq_slot.len(), round.seqs()),
            ("seq_parity", round.seq_parity.len(), round.seqs()),
        ] {
            if len != want {
                return Err(this.error(&format!("round table: {name} has {len} entries, must have {want}")));
            }
        }
        Ok(this)
    }

    /// An error that names the operation.
    pub fn error(&self, text: &str) -> OpError {
        OpError::new(format!("{}: {text}", self.op))
    }

    /// The round table.
    pub fn round(&self) -> &'c RoundTable<'c> {
        self.call.round
    }

    /// Rows of the call.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// The call's first row in the table.
    pub fn first_row(&self) -> usize {
        self.rows.start
    }

    /// A size.
    pub fn dim(&self, i: usize) -> usize {
        self.call.dims[i] as usize
    }

    /// A size that may not be 0.
    ///
    /// # Errors
    /// It is 0.
    pub fn size(&self, i: usize, name: &str) -> Result<usize, OpError> {
        match self.dim(i) {
            0 => Err(self.error(&format!("size {name} (dims[{i}]) is 0, must be at least 1"))),
            n => Ok(n),
        }
    }

    /// A parameter.
    pub fn param(&self, i: usize) -> f32 {
        self.call.params[i]
    }

    fn check<T: Item>(&self, what: &str, view: &View, rows: usize, cols: usize) -> Result<(), OpError> {
        let want = View { rows: rows as u32, cols: cols as u32, dtype: T::DTYPE, ..View::EMPTY };
        if (view.rows, view.cols, view.dtype) != (want.rows, want.cols, want.dtype) {
            return Err(self.error(&format!("{what} is {}, must be {}", shape(view), shape(&want))));
        }
        if view.rows > 1 && view.stride < view.cols {
            return Err(self.error(&format!(
                "{what} has a stride of {} elements, must be at least its {} columns",
                view.stride, view.cols
            )));
        }
        let address = view.ptr as usize;
        if view.rows > 0 && view.cols > 0 && (address == 0 || !address.is_multiple_of(align_of::<T>())) {
            return Err(self.error(&format!(
                "{what} lies at address {address:#x}, must be a multiple of {}",
                align_of::<T>()
            )));
        }
        Ok(())
    }

    /// Input `i` as `[rows, cols]`.
    ///
    /// # Errors
    /// A view of another shape, type or stride.
    pub fn input<T: Item>(
        &self,
        i: usize,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Rows<'c, T>, OpError> {
        let view = &self.call.inputs[i];
        self.check::<T>(&format!("input {name}"), view, rows, cols)?;
        // SAFETY: shape, type, stride and alignment were checked; the executor keeps inputs alive and unwritten during the call.
        Ok(unsafe { Rows::from_raw(view.ptr.cast(), rows, cols, view.stride as usize) })
    }

    /// Output `i` as `[rows, cols]`. To be asked for once a call.
    ///
    /// # Errors
    /// As [`Operands::input`].
    pub fn output<T: Item>(
        &self,
        i: usize,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<RowsMut<'c, T>, OpError> {
        let view = &self.call.outputs[i];
        self.check::<T>(&format!("output {name}"), view, rows, cols)?;
        // SAFETY: shape, type, stride and alignment were checked; the executor gives outputs to this call alone, and each
        // operation asks for each of its outputs once.
        Ok(unsafe { RowsMut::from_raw(view.ptr.cast(), rows, cols, view.stride as usize) })
    }

    fn weight(&self, i: usize, name: &str) -> Result<&'c Weight, OpError> {
        self.call.weights[i].ok_or_else(|| self.error(&format!("weight {name} (operand {i}) is missing")))
    }

    fn plane<T: Item>(&self, weight: &'c Weight, name: &str, len: usize) -> Result<&'c [T], OpError> {
        let view = &weight.planes[0];
        self.slice(weight, view, name, len)
    }

    /// All elements of a plane, however many.
    fn whole_plane<T: Item>(&self, weight: &'c Weight, i: usize, name: &str) -> Result<&'c [T], OpError> {
        let view = &weight.planes[i];
        self.slice(weight, view, name, view.rows as usize * view.cols as usize)
    }

    fn slice<T: Item>(
        &self,
        weight: &'c Weight,
        view: &'c View,
        name: &str,
        len: usize,
    ) -> Result<&'c [T], OpError> {
        let got = view.rows as usize * view.cols as usize;
        if view.dtype != T::DTYPE || got != len || (view.rows > 1 && view.stride != view.cols) {
            return Err(self.error(&format!(
                "weight {name} ({}) holds {got} {:?} elements in rows {} apart, must be {len} {:?} without gaps",
                weight.format,
                view.dtype,
                view.stride,
                T::DTYPE
            )));
        }
        self.check::<T>(&format!("weight {name}"), view, view.rows as usize, view.cols as usize)?;
        if len == 0 {
            return Ok(&[]);
        }
        // SAFETY: type, length, gaps and alignment were checked; weights live and stay unchanged as long as the engine.
        Ok(unsafe { std::slice::from_raw_parts(view.ptr.cast_const().cast(), len) })
    }

    /// A `plain.f32` weight of `len` numbers.
    ///
    /// # Errors
    /// Another weight, or none.
    pub fn vector(&self, i: usize, name: &str, len: usize) -> Result<&'c [f32], OpError> {
        let weight = self.weight(i, name)?;
        if weight.format.get_str() != formats::PLAIN_F32 {
            return Err(self.format_error(name, weight, &[formats::PLAIN_F32]));
        }
        self.plane(weight, name, len)
    }

    /// The same, if there is one.
    ///
    /// # Errors
    /// Another weight.
    pub fn maybe_vector(&self, i: usize, name: &str, len: usize) -> Result<Option<&'c [f32]>, OpError> {
        if self.call.weights[i].is_some() { self.vector(i, name, len).map(Some) } else { Ok(None) }
    }

    fn format_error(&self, name: &str, weight: &Weight, want: &[&str]) -> OpError {
        self.error(&format!("weight {name} has format {}, must be {}", weight.format, want.join(" or ")))
    }

    fn sizes(&self, weight: &Weight, name: &str, n: usize, k: usize, count: usize) -> Result<(), OpError> {
        if (weight.n as usize, weight.k as usize, weight.count as usize) == (n, k, count) {
            Ok(())
        } else {
            Err(self.error(&format!(
                "weight {name} is {} x [{}, {}], must be {count} x [{n}, {k}]",
                weight.count, weight.n, weight.k
            )))
        }
    }

    fn elements(
        &self,
        weight: &'c Weight,
        name: &str,
        n: usize,
        k: usize,
        count: usize,
    ) -> Result<Option<Elements<'c>>, OpError> {
        let len = count * packed_len(n, k);
        Ok(match weight.format.get_str() {
            formats::PANEL16_BF16 => Some(Elements::Bf16(self.plane(weight, name, len)?)),
            formats::PANEL16_F32 => Some(Elements::F32(self.plane(weight, name, len)?)),
            _ => None,
        })
    }

    /// `count` matrices `[n, k]`.
    pub(super) fn stack(
        &self,
        i: usize,
        name: &str,
        n: usize,
        k: usize,
        count: usize,
    ) -> Result<Stack<'c>, OpError> {
        let weight = self.weight(i, name)?;
        self.sizes(weight, name, n, k, count)?;
        if let Some(panels) = self.elements(weight, name, n, k, count)? {
            return Ok(Stack::Panels(panels));
        }
        if weight.format.get_str() == formats::EXL3_SEGMENTS {
            let (table, data) = (self.whole_plane(weight, 0, name)?, self.whole_plane(weight, 1, name)?);
            let segments = Segments::new(n, k, table, data);
            return segments.map(Stack::Segments).map_err(|e| self.error(&format!("weight {name}: {e}")));
        }
        let known = [formats::PANEL16_BF16, formats::PANEL16_F32, formats::EXL3_SEGMENTS];
        Err(self.format_error(name, weight, &known))
    }

    /// A matrix `[n, k]`.
    pub(super) fn matrix(&self, i: usize, name: &str, n: usize, k: usize) -> Result<Matrix<'c>, OpError> {
        match self.stack(i, name, n, k, 1)? {
            Stack::Panels(data) => self.packed(name, n, k, data).map(Matrix::Packed),
            Stack::Segments(segments) => Ok(Matrix::Segments(segments)),
        }
    }

    /// A matrix `[n, k]` that must be one of panels.
    ///
    /// # Errors
    /// Another weight, or none.
    pub fn panels(&self, i: usize, name: &str, n: usize, k: usize) -> Result<PackedMatrix<'c>, OpError> {
        let weight = self.weight(i, name)?;
        self.sizes(weight, name, n, k, 1)?;
        match self.elements(weight, name, n, k, 1)? {
            Some(data) => self.packed(name, n, k, data),
            None => Err(self.format_error(name, weight, &[formats::PANEL16_BF16, formats::PANEL16_F32])),
        }
    }

    /// A matrix `[n, k]` in groups, in a format of a plugin: plane 0 has the codes, plane 1 the scales, plane 2 the offsets
    /// (4 bits only), plane 3 the header of [`Grid`].
    ///
    /// # Errors
    /// Another weight, or none.
    pub fn grouped(
        &self,
        format: &str,
        width: Width,
        i: usize,
        name: &str,
        (n, k): (usize, usize),
    ) -> Result<GroupedMatrix<'c>, OpError> {
        let weight = self.weight(i, name)?;
        if weight.format.get_str() != format {
            return Err(self.format_error(name, weight, &[format]));
        }
        self.sizes(weight, name, n, k, 1)?;
        let wrong = |e: &dyn std::fmt::Display| self.error(&format!("weight {name}: {e}"));
        let grid = Grid::read(n, k, self.whole_plane(weight, 3, name)?).map_err(|e| wrong(&e))?;
        let scales = self.whole_plane(weight, 1, name)?;
        let (codes, offsets): (_, &[bf16]) = match width {
            Width::Four => {
                (Codes::Nibbles(self.whole_plane(weight, 0, name)?), self.whole_plane(weight, 2, name)?)
            }
            Width::Eight => {
                (Codes::Bytes(bytemuck::cast_slice(self.whole_plane::<u8>(weight, 0, name)?)), &[])
            }
        };
        GroupedMatrix::new(grid, codes, scales, offsets).map_err(|e| wrong(&e))
    }

    fn packed(
        &self,
        name: &str,
        n: usize,
        k: usize,
        data: Elements<'c>,
    ) -> Result<PackedMatrix<'c>, OpError> {
        PackedMatrix::new(n, k, data).map_err(|e| self.error(&format!("weight {name}: {e}")))
    }

    /// A matrix `[n, k]` whose rows are looked up.
    pub(super) fn table(&self, i: usize, name: &str, n: usize, k: usize) -> Result<Table<'c>, OpError> {
        let weight = self.weight(i, name)?;
        self.sizes(weight, name, n, k, 1)?;
        match weight.format.get_str() {
            formats::ROWS_BF16 => Ok(Table::Plain(Elements::Bf16(self.plane(weight, name, n * k)?))),
            formats::ROWS_F32 => Ok(Table::Plain(Elements::F32(self.plane(weight, name, n * k)?))),
            formats::EXL3_ROWS => {
                let (rings, signs) = (self.whole_plane(weight, 0, name)?, self.whole_plane(weight, 1, name)?);
                EmbeddingView::new(n, k, rings, signs).map(Table::Coded).ok_or_else(|| {
                    self.error(&format!("weight {name}: {} bytes are not {n} coded rows of {k}", rings.len()))
                })
            }
            _ => Err(self.format_error(
                name,
                weight,
                &[formats::ROWS_BF16, formats::ROWS_F32, formats::EXL3_ROWS],
            )),
        }
    }

    /// The sequences of the call that have rows in it.
    ///
    /// # Errors
    /// A round table whose sequences lie outside of it.
    pub fn sequences(&self) -> Result<Sequences, OpError> {
        let round = self.round();
        let mut found = Sequences::new();
        for index in self.call.seqs.within(round.seqs()) {
            let (first, count) = (round.seq_first[index] as usize, round.seq_rows[index] as usize);
            if first + count > round.rows() {
                return Err(self.error(&format!(
                    "round table: sequence {index} has rows {first}..{}, the table has {}",
                    first + count,
                    round.rows()
                )));
            }
            let start = first.max(self.rows.start);
            let end = (first + count).min(self.rows.end);
            if start < end {
                found.push(Sequence {
                    index,
                    rows: start - self.rows.start..end - self.rows.start,
                    start: round.seq_start[index] as usize + (start - first),
                    whole: end - start == count,
                    at: SlotState { slot: round.seq_slot[index], parity: round.seq_parity[index] },
                });
            }
        }
        Ok(found)
    }

    /// Cache family `i`, with rows (or records) of `row_len` numbers in the reference's format.
    ///
    /// # Errors
    /// A family of another format, row length or addressing.
    pub fn cache(
        &self,
        i: usize,
        name: &'static str,
        row_len: usize,
        addressing: Addressing,
    ) -> Result<Cache<'c>, OpError> {
        self.cache_in(CACHE_FORMAT, i, name, row_len, addressing)
    }

    /// As [`Operands::cache`], in a format of a plugin whose rows are `row_len` numbers in f32.
    ///
    /// # Errors
    /// As [`Operands::cache`].
    pub fn cache_in(
        &self,
        format: &str,
        i: usize,
        name: &'static str,
        row_len: usize,
        addressing: Addressing,
    ) -> Result<Cache<'c>, OpError> {
        let view = &self.call.caches[i];
        if view.base.is_null() || view.addressing != addressing {
            return Err(self.error(&format!(
                "cache {name} (operand {i}) is {:?} at {:?}, must be {addressing:?}",
                view.addressing, view.base
            )));
        }
        if view.format.get_str() != format || view.row_bytes != row_len as u64 * 4 {
            return Err(self.error(&format!(
                "cache {name} has rows of {} bytes in format {}, must be {} bytes in format {format}",
                view.row_bytes,
                view.format,
                row_len * 4
            )));
        }
        Ok(Cache { op: self.op, name, view, row_len })
    }

    /// A recurrent state: cache family `i` with one record of `len` numbers a slot and parity, in however many rows.
    ///
    /// # Errors
    /// A family of another size or addressing.
    pub fn state(&self, i: usize, name: &'static str, len: usize) -> Result<Cache<'c>, OpError> {
        let rows = self.call.caches[i].rows as usize;
        if rows == 0 || !len.is_multiple_of(rows) {
            return Err(
                self.error(&format!("cache {name} has records of {rows} rows, must hold {len} numbers"))
            );
        }
        let cache = self.cache(i, name, len / rows, Addressing::State)?;
        if cache.view.parity_stride == 0 {
            return Err(self.error(&format!("cache {name} has one buffer a slot, must have two")));
        }
        Ok(cache)
    }
}

/// A checked cache family.
#[derive(Clone, Copy)]
pub struct Cache<'c> {
    op: &'static str,
    name: &'static str,
    view: &'c CacheView,
    row_len: usize,
}

impl<'c> Cache<'c> {
    /// Rows a slot.
    pub fn rows(&self) -> usize {
        self.view.rows as usize
    }

    fn check(&self, at: SlotState, row: usize, rows: usize) -> Result<(), OpError> {
        if at.slot >= self.view.slots || at.parity > 1 {
            return Err(OpError::new(format!(
                "{}: slot {} parity {} is outside cache {}, which has {} slots",
                self.op, at.slot, at.parity, self.name, self.view.slots
            )));
        }
        if row + rows > self.rows() {
            return Err(OpError::new(format!(
                "{}: rows {row}..{} of slot {} are outside cache {}, which has {} rows a slot",
                self.op,
                row + rows,
                at.slot,
                self.name,
                self.view.rows
            )));
        }
        Ok(())
    }

    /// Rows to read.
    ///
    /// # Safety
    /// Nothing may write them while the slice lives. (The executor gives a call the records of its sequences.)
    ///
    /// # Errors
    /// Rows outside the family.
    pub unsafe fn read(&self, at: SlotState, row: usize, rows: usize) -> Result<Rows<'c>, OpError> {
        self.check(at, row, rows)?;
        // SAFETY: the range was checked; the rest is the caller's duty.
        let data = unsafe { self.view.read_f32(at, row as u32, rows as u32) };
        Ok(Rows::new(data, self.row_len))
    }

    /// Rows to write.
    ///
    /// # Safety
    /// Nothing else may read or write them while the slice lives. (The executor gives a call the records of its sequences.)
    ///
    /// # Errors
    /// Rows outside the family.
    pub unsafe fn write(&self, at: SlotState, row: usize, rows: usize) -> Result<RowsMut<'c>, OpError> {
        self.check(at, row, rows)?;
        // SAFETY: the range was checked; the rest is the caller's duty.
        let data = unsafe { self.view.write_f32(at, row as u32, rows as u32) };
        Ok(RowsMut::new(data, self.row_len))
    }

    /// The whole record of a slot and parity, to read.
    ///
    /// # Safety
    /// As [`Cache::read`].
    ///
    /// # Errors
    /// A slot outside the family.
    pub unsafe fn record(&self, at: SlotState) -> Result<&'c [f32], OpError> {
        self.check(at, 0, self.rows())?;
        // SAFETY: the range was checked; the rest is the caller's duty.
        Ok(unsafe { self.view.read_f32(at, 0, self.view.rows) })
    }

    /// The whole record of the buffer that is not committed, to write.
    ///
    /// # Safety
    /// As [`Cache::write`].
    ///
    /// # Errors
    /// A slot outside the family.
    pub unsafe fn next_record(&self, at: SlotState) -> Result<&'c mut [f32], OpError> {
        self.check(at, 0, self.rows())?;
        let other = SlotState { slot: at.slot, parity: 1 - at.parity };
        // SAFETY: the range was checked; the rest is the caller's duty.
        Ok(unsafe { self.view.write_f32(other, 0, self.view.rows) })
    }
}

//! From the views of a call to checked addresses. Nothing here reads the memory behind them.

use std::ops::Range;

use plugfold_abi::{Addressing, Call, DType, OpError, RoundTable, View, Weight, formats};

use crate::machine::{Machine, round};

/// The only row format of the reference caches.
pub const CACHE_FORMAT: &str = "f32";

/// Rows of numbers in device memory.
#[derive(Clone, Copy, Debug)]
pub struct Mat {
    /// First number.
    pub at: u64,
    /// Numbers from one row to the next.
    pub stride: u32,
}

impl Mat {
    /// The columns from `first` on.
    pub fn columns(self, first: usize) -> Mat {
        Mat { at: self.at + 4 * first as u64, ..self }
    }

    /// The rows from `first` on.
    pub fn row(self, first: usize) -> Mat {
        Mat { at: self.at + 4 * first as u64 * u64::from(self.stride), ..self }
    }

    /// Whether every row starts on a multiple of 16 bytes.
    pub fn quads(self) -> bool {
        self.at.is_multiple_of(16) && self.stride.is_multiple_of(4)
    }
}

/// A cache family: `Cache` of the sources.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct CacheArg {
    base: u64,
    slot_stride: u64,
    parity_stride: u64,
    row_bytes: u64,
}

impl CacheArg {
    /// Rows of a call as if each were the first of a slot.
    pub fn rows(rows: Mat) -> Self {
        let row_bytes = u64::from(rows.stride) * 4;
        Self { base: rows.at, slot_stride: row_bytes, parity_stride: 0, row_bytes }
    }
}

/// The cache rows of a call's rows, each at its position: `Cached` of the sources. All zeros: none.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub struct CachedArg {
    /// Address of the round table.
    pub round: u64,
    /// The family.
    pub cache: CacheArg,
    /// First row of the call.
    pub first_row: u32,
    /// Zero.
    pub unused: u32,
}

/// A matrix or a stack of them.
#[derive(Clone, Copy, Debug)]
pub enum Matrix {
    /// Panels of 16 outputs, in bf16 or f32.
    Panels {
        /// The elements.
        at: u64,
        /// Their type.
        bf16: bool,
    },
    /// Segments: addresses and lengths of the table and the data.
    Segments {
        /// The table.
        table: u64,
        /// Its rows.
        rows: u32,
        /// The lines.
        data: u64,
        /// How many.
        lines: u32,
    },
}

/// A table whose rows are looked up: `Table` of the sources.
#[derive(Clone, Copy, Debug)]
pub struct TableArg {
    /// The rows.
    pub data: u64,
    /// Signs of coded rows.
    pub signs: u64,
    /// How they are stored.
    pub kind: u32,
    /// Bits of coded rows.
    pub bits: u32,
}

/// The rows of one sequence in a call.
#[derive(Clone, Debug)]
pub struct Sequence {
    /// Place in the round table.
    pub index: usize,
    /// Its rows, counted from the call's first.
    pub rows: Range<usize>,
    /// Position of the first of these.
    pub start: usize,
    /// Whether these are all rows that it has in the table.
    pub whole: bool,
}

/// The operands of one call.
pub struct Operands<'c> {
    op: &'static str,
    /// The call.
    pub call: &'c Call<'c>,
    /// What runs it.
    pub machine: &'c dyn Machine,
    rows: Range<usize>,
}

impl<'c> Operands<'c> {
    /// The operands of a call of `op`.
    ///
    /// # Errors
    /// A round table whose lists are of different lengths.
    pub fn new(op: &'static str, call: &'c Call<'c>, machine: &'c dyn Machine) -> Result<Self, OpError> {
        let round = call.round;
        let this = Self { op, call, machine, rows: call.rows.within(round.rows()) };
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
    pub fn table(&self) -> &'c RoundTable<'c> {
        self.call.round
    }

    /// The round table in the machine's memory.
    ///
    /// # Errors
    /// Memory that is used up.
    pub fn round(&self) -> Result<u64, OpError> {
        Ok(round(self.machine, self.call.round)?)
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

    fn view(&self, what: &str, view: &View, rows: usize, cols: usize, dtype: DType) -> Result<Mat, OpError> {
        let shape = |v: &View| format!("{:?} [{}, {}]", v.dtype, v.rows, v.cols);
        let want = View { rows: rows as u32, cols: cols as u32, dtype, ..View::EMPTY };
        if (view.rows, view.cols, view.dtype) != (want.rows, want.cols, want.dtype) {
            return Err(self.error(&format!("{what} is {}, must be {}", shape(view), shape(&want))));
        }
        let at = view.ptr as u64;
        if rows > 0 && cols > 0 && (at == 0 || !at.is_multiple_of(4) || rows > 1 && view.stride < view.cols) {
            return Err(self.error(&format!(
                "{what} lies at address {at:#x} in rows {} apart: it must be a multiple of 4, the rows at least {cols} apart",
                view.stride
            )));
        }
        Ok(Mat { at, stride: view.stride })
    }

    /// Input `i` as `[rows, cols]` of f32.
    ///
    /// # Errors
    /// A view of another shape, type or stride.
    pub fn input(&self, i: usize, name: &str, rows: usize, cols: usize) -> Result<Mat, OpError> {
        self.view(&format!("input {name}"), &self.call.inputs[i], rows, cols, DType::F32)
    }

    /// Input `i` as `[rows, cols]` of i32.
    ///
    /// # Errors
    /// As [`Operands::input`].
    pub fn input_i32(&self, i: usize, name: &str, rows: usize, cols: usize) -> Result<Mat, OpError> {
        self.view(&format!("input {name}"), &self.call.inputs[i], rows, cols, DType::I32)
    }

    /// Output `i` as `[rows, cols]` of f32.
    ///
    /// # Errors
    /// As [`Operands::input`].
    pub fn output(&self, i: usize, name: &str, rows: usize, cols: usize) -> Result<Mat, OpError> {
        self.view(&format!("output {name}"), &self.call.outputs[i], rows, cols, DType::F32)
    }

    /// Output `i` as `[rows, cols]` of i32.
    ///
    /// # Errors
    /// As [`Operands::input`].
    pub fn output_i32(&self, i: usize, name: &str, rows: usize, cols: usize) -> Result<Mat, OpError> {
        self.view(&format!("output {name}"), &self.call.outputs[i], rows, cols, DType::I32)
    }

    fn weight(&self, i: usize, name: &str) -> Result<&'c Weight, OpError> {
        self.call.weights[i].ok_or_else(|| self.error(&format!("weight {name} (operand {i}) is missing")))
    }

    /// A plane of `len` elements without gaps.
    fn plane(&self, weight: &Weight, i: usize, name: &str, len: usize, dtype: DType) -> Result<u64, OpError> {
        let view = &weight.planes[i];
        let got = view.rows as usize * view.cols as usize;
        let at = view.ptr as u64;
        if view.dtype != dtype
            || got != len
            || (view.rows > 1 && view.stride != view.cols)
            || len > 0 && (at == 0 || !at.is_multiple_of(4))
        {
            return Err(self.error(&format!(
                "weight {name} ({}) holds {got} {:?} elements in rows {} apart at {at:#x}, must be {len} {dtype:?} without gaps",
                weight.format, view.dtype, view.stride
            )));
        }
        Ok(at)
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

    /// A `plain.f32` weight of `len` numbers.
    ///
    /// # Errors
    /// Another weight, or none.
    pub fn vector(&self, i: usize, name: &str, len: usize) -> Result<u64, OpError> {
        let weight = self.weight(i, name)?;
        if weight.format.get_str() != formats::PLAIN_F32 {
            return Err(self.format_error(name, weight, &[formats::PLAIN_F32]));
        }
        self.plane(weight, 0, name, len, DType::F32)
    }

    /// The same, or 0 where there is none.
    ///
    /// # Errors
    /// Another weight.
    pub fn maybe_vector(&self, i: usize, name: &str, len: usize) -> Result<u64, OpError> {
        if self.call.weights[i].is_some() { self.vector(i, name, len) } else { Ok(0) }
    }

    /// `count` matrices `[n, k]`.
    ///
    /// # Errors
    /// Another weight, or none.
    pub fn matrix(&self, i: usize, name: &str, n: usize, k: usize, count: usize) -> Result<Matrix, OpError> {
        let weight = self.weight(i, name)?;
        self.sizes(weight, name, n, k, count)?;
        let len = count * n.div_ceil(16) * 16 * k;
        let aligned = |at: u64| {
            if at.is_multiple_of(16) {
                Ok(at)
            } else {
                Err(self.error(&format!("weight {name} lies at {at:#x}, must be a multiple of 16")))
            }
        };
        match weight.format.get_str() {
            formats::PANEL16_BF16 => Ok(Matrix::Panels {
                at: aligned(self.plane(weight, 0, name, len, DType::Bf16)?)?,
                bf16: true,
            }),
            formats::PANEL16_F32 => Ok(Matrix::Panels {
                at: aligned(self.plane(weight, 0, name, len, DType::F32)?)?,
                bf16: false,
            }),
            formats::EXL3_SEGMENTS => {
                let [table, data] = [weight.planes[0], weight.planes[1]];
                let words = |v: &View| v.rows as usize * v.cols as usize;
                let table_at = self.plane(weight, 0, name, words(&table), DType::U32)?;
                let data_at = aligned(self.plane(weight, 1, name, words(&data), DType::U32)?)?;
                if words(&table) == 0 || !words(&table).is_multiple_of(16) || !words(&data).is_multiple_of(16)
                {
                    return Err(self.error(&format!(
                        "weight {name}: a table of {} words and data of {} are no whole rows of 16",
                        words(&table),
                        words(&data)
                    )));
                }
                let (rows, lines) = (words(&table) as u32 / 16, (words(&data) / 16) as u32);
                Ok(Matrix::Segments { table: table_at, rows, data: data_at, lines })
            }
            _ => {
                let known = [formats::PANEL16_BF16, formats::PANEL16_F32, formats::EXL3_SEGMENTS];
                Err(self.format_error(name, weight, &known))
            }
        }
    }

    /// A matrix `[n, k]` whose rows are looked up.
    ///
    /// # Errors
    /// Another weight, or none.
    pub fn rows_of(&self, i: usize, name: &str, n: usize, k: usize) -> Result<TableArg, OpError> {
        let weight = self.weight(i, name)?;
        self.sizes(weight, name, n, k, 1)?;
        let plain = |kind, dtype| {
            let data = self.plane(weight, 0, name, n * k, dtype)?;
            Ok(TableArg { data, signs: 0, kind, bits: 0 })
        };
        match weight.format.get_str() {
            formats::ROWS_F32 => plain(0, DType::F32),
            formats::ROWS_BF16 => plain(1, DType::Bf16),
            formats::EXL3_ROWS => {
                let groups = k.div_ceil(256);
                let bytes = weight.planes[0].rows as usize * weight.planes[0].cols as usize;
                let row = |bits: usize| 2 * groups * (1 + 16 * bits);
                let Some(bits) = (1..=8).find(|b| row(*b) * n == bytes) else {
                    return Err(
                        self.error(&format!("weight {name}: {bytes} bytes are not {n} coded rows of {k}"))
                    );
                };
                let data = self.plane(weight, 0, name, bytes, DType::U8)?;
                let signs = self.plane(weight, 1, name, groups * 256, DType::F32)?;
                Ok(TableArg { data, signs, kind: 2, bits: bits as u32 })
            }
            _ => {
                let known = [formats::ROWS_BF16, formats::ROWS_F32, formats::EXL3_ROWS];
                Err(self.format_error(name, weight, &known))
            }
        }
    }

    /// The sequences of the call that have rows in it.
    ///
    /// # Errors
    /// A round table whose sequences do not hold the call's rows, one after another.
    pub fn sequences(&self) -> Result<Vec<Sequence>, OpError> {
        let round = self.table();
        let mut found = Vec::new();
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
            for row in start..end {
                let place = round.seq_start[index] as usize + row - first;
                if round.row_seq[row] as usize != index || round.positions[row] as usize != place {
                    return Err(self.error(&format!(
                        "round table: row {row} is position {} of sequence {}, must be {place} of {index}",
                        round.positions[row], round.row_seq[row]
                    )));
                }
            }
            if start < end {
                found.push(Sequence {
                    index,
                    rows: start - self.rows.start..end - self.rows.start,
                    start: round.seq_start[index] as usize + (start - first),
                    whole: end - start == count,
                });
            }
        }
        let rows: usize = found.iter().map(|s| s.rows.len()).sum();
        if rows != self.rows() {
            return Err(self.error(&format!("the call's sequences have {rows} of its {} rows", self.rows())));
        }
        Ok(found)
    }

    /// Cache family `i`, with rows (or records) of `row_len` numbers in the reference's format. `last` says up to which row
    /// of its slot a sequence is touched; kernels trust that.
    ///
    /// # Errors
    /// A family of another format, row length or addressing, or a sequence outside of it.
    pub fn cache(
        &self,
        i: usize,
        name: &str,
        row_len: usize,
        addressing: Addressing,
        last: impl Fn(&Sequence) -> usize,
        sequences: &[Sequence],
    ) -> Result<CacheArg, OpError> {
        let view = &self.call.caches[i];
        if view.base.is_null() || view.addressing != addressing {
            return Err(self.error(&format!(
                "cache {name} (operand {i}) is {:?} at {:?}, must be {addressing:?}",
                view.addressing, view.base
            )));
        }
        if view.format.get_str() != CACHE_FORMAT || view.row_bytes != row_len as u64 * 4 {
            return Err(self.error(&format!(
                "cache {name} has rows of {} bytes in format {}, must be {} bytes in format {CACHE_FORMAT}",
                view.row_bytes,
                view.format,
                row_len * 4
            )));
        }
        for s in sequences {
            let (slot, parity) = (self.table().seq_slot[s.index], self.table().seq_parity[s.index]);
            if slot >= view.slots || parity > 1 {
                return Err(self.error(&format!(
                    "slot {slot} parity {parity} is outside cache {name}, which has {} slots",
                    view.slots
                )));
            }
            let last = last(s);
            if last > view.rows as usize {
                return Err(self.error(&format!(
                    "rows up to {last} of slot {slot} are outside cache {name}, which has {} rows a slot",
                    view.rows
                )));
            }
        }
        Ok(CacheArg {
            base: view.base as u64,
            slot_stride: view.slot_stride,
            parity_stride: view.parity_stride,
            row_bytes: view.row_bytes,
        })
    }

    /// A recurrent state: cache family `i` with one record of `len` numbers a slot and parity, in however many rows.
    ///
    /// # Errors
    /// A family of another size or addressing.
    pub fn state(
        &self,
        i: usize,
        name: &str,
        len: usize,
        sequences: &[Sequence],
    ) -> Result<CacheArg, OpError> {
        let rows = self.call.caches[i].rows as usize;
        if rows == 0 || !len.is_multiple_of(rows) {
            return Err(
                self.error(&format!("cache {name} has records of {rows} rows, must hold {len} numbers"))
            );
        }
        if self.call.caches[i].parity_stride == 0 {
            return Err(self.error(&format!("cache {name} has one buffer a slot, must have two")));
        }
        self.cache(i, name, len / rows, Addressing::State, |_| rows, sequences)
    }
}

//! Weights in any format that the reference reads, and what is done with them.

use plugfold_abi::OpError;

use super::operands::Operands;
use crate::cpu::exl3::{EmbeddingView, Segments};
use crate::cpu::math::dense::{Elements, PackedMatrix, matmul};
use crate::cpu::math::moe::{self, Tiles};
use crate::cpu::rows::{Rows, RowsMut};

/// One matrix.
#[derive(Clone, Copy)]
pub(super) enum Matrix<'c> {
    /// Panels of one type.
    Packed(PackedMatrix<'c>),
    /// Parts in EXL3 or panels.
    Segments(Segments<'c>),
}

impl Matrix<'_> {
    /// `out = x Wᵀ (+ bias)`.
    pub fn multiply(
        &self,
        o: &Operands<'_>,
        x: Rows<'_>,
        bias: Option<&[f32]>,
        out: RowsMut<'_>,
    ) -> Result<(), OpError> {
        match self {
            Matrix::Packed(w) => {
                matmul(x, *w, bias, out);
                Ok(())
            }
            Matrix::Segments(w) => w.matmul(x, bias, out).map_err(|e| o.error(&e.to_string())),
        }
    }
}

/// A stack of matrices.
#[derive(Clone, Copy)]
pub(super) enum Stack<'c> {
    /// Panels of one type.
    Panels(Elements<'c>),
    /// Parts in EXL3 or panels.
    Segments(Segments<'c>),
}

impl Stack<'_> {
    /// Each expert's matrix, with `n` outputs, times its rows. Segments are one set of tasks already: `tiles` cut panels.
    pub fn multiply(
        &self,
        o: &Operands<'_>,
        x: Rows<'_>,
        n: usize,
        (order, starts): (&[i32], &[i32]),
        fan: usize,
        tiles: Option<Tiles>,
        out: RowsMut<'_>,
    ) -> Result<(), OpError> {
        match self {
            Stack::Panels(data) => match tiles {
                Some(tiles) => moe::experts_tiled(x, *data, n, (order, starts), fan, tiles, out),
                None => moe::experts(x, *data, n, order, starts, fan, out),
            }
            .map_err(|e| o.error(&e.to_string())),
            Stack::Segments(w) => w.experts(x, order, starts, fan, out).map_err(|e| o.error(&e.to_string())),
        }
    }
}

/// A matrix whose rows are looked up.
#[derive(Clone, Copy)]
pub(super) enum Table<'c> {
    /// Numbers.
    Plain(Elements<'c>),
    /// Rows in the row codec of EXL3.
    Coded(EmbeddingView<'c>),
}

impl Table<'_> {
    /// Writes row `row` to `out`, which is as long as a row.
    pub fn look_up(&self, row: usize, out: &mut [f32]) {
        let at = row * out.len();
        match self {
            Table::Plain(Elements::Bf16(data)) => {
                out.iter_mut().zip(&data[at..]).for_each(|(o, v)| *o = v.to_f32());
            }
            Table::Plain(Elements::F32(data)) => out.copy_from_slice(&data[at..at + out.len()]),
            Table::Coded(rows) => rows.decode_row(row, out),
        }
    }
}

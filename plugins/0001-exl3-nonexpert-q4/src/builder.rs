//! The builders: one for each mode of 4 bits.

use half::bf16;
use plugfold_0001_exl3_nonexpert_q4_api::{class_of, slices};
use plugfold_abi::points::{Matrix, MatrixRowsObject, Purpose, Stored, WeightBuilder, WeightLayout};
use plugfold_abi::{List, Maybe, OpError, Slice, TextBuf, View};
use plugfold_kernels::cpu::groups::{grid_of, plane_layouts, store_groups};
use plugfold_kernels::cpu::math::grouped::Grid;
use plugfold_kernels::cpu::operands::Width;

use crate::classes::Table;
use crate::encode::{Range, group};
use crate::{FORMAT, GROUP};

/// Stores the matrices whose class has its mode.
pub struct Builder {
    /// Which codes it makes.
    pub range: Range,
    /// Modes of all classes.
    pub table: Table,
}

impl Builder {
    fn grid(&self, matrix: &Matrix<'_>) -> Option<Grid> {
        if matrix.stored == Stored::Coded || class_of(&matrix.role).is_none() {
            return None;
        }
        let mode = self.table.mode_for(matrix)?;
        let mine = match matrix.purpose {
            Purpose::Main => mode == self.range.mode(),
            // A head of more bits has a plain copy of 4 for drafting.
            Purpose::Draft => {
                self.range == Range::Whole && matrix.role.get_str() == "head" && Range::of(&mode).is_none()
            }
            Purpose::Prefill => false,
        };
        mine.then(|| grid_of(matrix, GROUP, slices(&matrix.role, matrix.n, matrix.k)))
    }
}

impl WeightBuilder for Builder {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(self.range.mode().into())
    }

    fn key(&self) -> Result<TextBuf, OpError> {
        Ok(format!("{} {}", self.range.mode(), plugfold_abi::build_id!()).into())
    }

    fn layout(&self, matrix: &Matrix<'_>) -> Result<Maybe<WeightLayout>, OpError> {
        let layout = |grid: Grid| WeightLayout {
            format: FORMAT.into(),
            planes: List::from(plane_layouts(&grid, Width::Four).to_vec()),
        };
        Ok(self.grid(matrix).map(layout).into())
    }

    fn build(
        &self,
        matrix: &Matrix<'_>,
        rows: &MatrixRowsObject,
        planes: Slice<'_, View>,
    ) -> Result<(), OpError> {
        let Some(grid) = self.grid(matrix) else {
            return Err(OpError::new(format!("{} is not stored in {}", matrix.role, self.range.mode())));
        };
        store_groups(matrix, rows, &planes, (&grid, Width::Four), |values, codes| {
            // A group has 64 numbers at most.
            let mut rounded = [0.0; GROUP];
            let rounded = &mut rounded[..values.len()];
            rounded.iter_mut().zip(values).for_each(|(to, v)| *to = bf16::from_f32(*v).to_f32());
            group(self.range, rounded, codes)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::{NO_LAYER, Text};

    fn matrix(role: &'static str, n: u32, k: u32) -> Matrix<'static> {
        Matrix {
            role: Text::from(role),
            layer: NO_LAYER,
            site: 0,
            mtp: false,
            purpose: Purpose::Main,
            n,
            k,
            count: 1,
            first: 0,
            inputs: k,
            stored: Stored::Bf16,
        }
    }

    #[test]
    fn slices_divide_the_groups() {
        let grid = |m: Matrix<'_>| grid_of(&m, GROUP, slices(&m.role, m.n, m.k));
        for (n, k, want) in
            [(12576, 4096, 4), (4096, 8192, 8), (4096, 128, 1), (7, 4096 + 64, 1), (7, 3072, 2)]
        {
            assert_eq!(grid(matrix("kda.in", n, k)).slices, want, "[{n}, {k}]");
        }
        let share = Matrix { first: 40, inputs: 4096, ..matrix("kda.o", 7, 2048) };
        assert_eq!(grid(share), Grid { n: 7, k: 2048, lead: 40, group: 64, slices: 1 }, "33 groups");
    }

    #[test]
    fn coded_matrices_experts_and_what_is_no_class_stay_as_they_are() {
        let table = Table::default();
        table.all("q4");
        let builder = Builder { range: Range::Whole, table: table.clone() };
        let stored = |m: &Matrix<'_>| builder.layout(m).unwrap().is_some();
        assert!(stored(&matrix("kda.in", 64, 64)) && stored(&matrix("mtp.eh", 64, 128)));
        let numbers = Matrix { stored: Stored::Numbers, ..matrix("kda.in", 64, 64) };
        assert!(stored(&numbers));
        assert!(!stored(&Matrix { stored: Stored::Coded, ..numbers }));
        for role in ["experts.gate_up", "experts.down", "moe.router", "hc.fn"] {
            assert!(!stored(&matrix(role, 64, 64)), "{role}");
        }
        let best = Builder { range: Range::Best, table };
        assert!(best.layout(&matrix("kda.in", 64, 64)).unwrap().is_none(), "the other mode's");
    }

    #[test]
    fn a_head_in_bf16_has_a_copy_for_drafting_and_one_in_4_bits_has_none() {
        for (mode, copy) in [("bf16", true), ("q8", true), ("q4", false), ("q4mse", false)] {
            let table = Table::default();
            table.all(mode);
            let draft = Matrix { purpose: Purpose::Draft, ..matrix("head", 64, 64) };
            let copies: Vec<bool> = [Range::Whole, Range::Best]
                .map(|range| Builder { range, table: table.clone() }.layout(&draft).unwrap().is_some())
                .into();
            assert_eq!(copies, [copy, false], "{mode}");
            let other = Matrix { role: Text::from("kda.in"), ..draft };
            assert!(Builder { range: Range::Whole, table }.layout(&other).unwrap().is_none());
        }
    }
}

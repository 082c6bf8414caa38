//! The builder of matrices in 8 bits.

use half::bf16;
use plugfold_0001_exl3_nonexpert_q4_api::{class_of, slices};
use plugfold_abi::points::{Matrix, MatrixRowsObject, Purpose, Stored, WeightBuilder, WeightLayout};
use plugfold_abi::{List, Maybe, OpError, Slice, TextBuf, View};
use plugfold_kernels::cpu::groups::{grid_of, plane_layouts, store_groups};
use plugfold_kernels::cpu::math::grouped::Grid;
use plugfold_kernels::cpu::operands::Width;

use crate::encode::{group, group_of};
use crate::{MODE, Table, format};

/// Inputs of the largest group.
const WIDEST: usize = 128;

/// Stores the matrices whose class has mode `q8`.
pub struct Builder {
    /// Modes of all classes.
    pub table: Table,
}

impl Builder {
    fn grid(&self, matrix: &Matrix<'_>) -> Result<Option<Grid>, OpError> {
        let mode = class_of(&matrix.role).zip(self.table.get()).and_then(|(class, table)| {
            let modes = table.get(class)?;
            Some(if matrix.mtp { &modes.mtp } else { &modes.main })
        });
        let mine = matrix.purpose == Purpose::Main && matrix.stored != Stored::Coded;
        if !mine || mode.is_none_or(|mode| mode.as_str() != MODE) {
            return Ok(None);
        }
        let group = group_of(matrix.inputs).map_err(OpError::invalid)?;
        Ok(Some(grid_of(matrix, group, slices(&matrix.role, matrix.n, matrix.k))))
    }
}

impl WeightBuilder for Builder {
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(MODE.into())
    }

    fn key(&self) -> Result<TextBuf, OpError> {
        Ok(format!("{MODE} {}", plugfold_abi::build_id!()).into())
    }

    fn layout(&self, matrix: &Matrix<'_>) -> Result<Maybe<WeightLayout>, OpError> {
        let layout = |grid: Grid| WeightLayout {
            format: format(grid.group).into(),
            planes: List::from(plane_layouts(&grid, Width::Eight).to_vec()),
        };
        Ok(self.grid(matrix)?.map(layout).into())
    }

    fn build(
        &self,
        matrix: &Matrix<'_>,
        rows: &MatrixRowsObject,
        planes: Slice<'_, View>,
    ) -> Result<(), OpError> {
        let Some(grid) = self.grid(matrix)? else {
            return Err(OpError::new(format!("{} is not stored in {MODE}", matrix.role)));
        };
        store_groups(matrix, rows, &planes, (&grid, Width::Eight), |values, codes| {
            let mut rounded = [0.0; WIDEST];
            let rounded = &mut rounded[..values.len()];
            rounded.iter_mut().zip(values).for_each(|(to, v)| *to = bf16::from_f32(*v).to_f32());
            (group(rounded, codes), bf16::ZERO)
        })
    }
}

//! Where the tensors of weights come from.

use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use plugfold_kernels::cpu::exl3;

use crate::checkpoint::{CheckpointError, Dtype, Exl3Tensor, Resolved};

/// Where tensors come from: a checkpoint on disk, or numbers made for a test.
pub trait Source: Sync {
    /// The failure of a read.
    type Error: std::error::Error + From<exl3::Error> + Send + Sync + 'static;
    /// Whether there is a tensor of this published name.
    fn has(&self, name: &str) -> bool;
    /// Whether a tensor is stored as bf16 (then [`Source::read_bf16`] is exact).
    fn is_bf16(&self, name: &str) -> bool;
    /// Rows and columns of a tensor as f32, row-major. A vector is one column; further dimensions count as columns.
    ///
    /// # Errors
    /// An unreadable tensor, or one with a value that is not a number.
    fn read_f32(&self, name: &str, rows: Range<usize>, cols: Range<usize>) -> Result<Vec<f32>, Self::Error>;
    /// The same, of a tensor stored as bf16.
    ///
    /// # Errors
    /// As above.
    fn read_bf16(&self, name: &str, rows: Range<usize>, cols: Range<usize>)
    -> Result<Vec<bf16>, Self::Error>;
    /// The EXL3 layer that a matrix is stored as, if it is one.
    ///
    /// # Errors
    /// A layer whose tensors contradict each other.
    fn exl3(&self, _name: &str) -> Result<Option<Exl3Tensor<'_>>, Self::Error> {
        Ok(None)
    }
    /// The table of coded rows that a matrix is stored as, if it is one.
    ///
    /// # Errors
    /// As above.
    fn exl3_rows(&self, _name: &str) -> Result<Option<exl3::Embedding>, Self::Error> {
        Ok(None)
    }
}

impl<E: std::error::Error + From<exl3::Error> + Send + Sync + 'static> Source
    for Arc<dyn Source<Error = E> + Send>
{
    type Error = E;

    fn has(&self, name: &str) -> bool {
        (**self).has(name)
    }

    fn is_bf16(&self, name: &str) -> bool {
        (**self).is_bf16(name)
    }

    fn read_f32(&self, name: &str, rows: Range<usize>, cols: Range<usize>) -> Result<Vec<f32>, E> {
        (**self).read_f32(name, rows, cols)
    }

    fn read_bf16(&self, name: &str, rows: Range<usize>, cols: Range<usize>) -> Result<Vec<bf16>, E> {
        (**self).read_bf16(name, rows, cols)
    }

    fn exl3(&self, name: &str) -> Result<Option<Exl3Tensor<'_>>, E> {
        (**self).exl3(name)
    }

    fn exl3_rows(&self, name: &str) -> Result<Option<exl3::Embedding>, E> {
        (**self).exl3_rows(name)
    }
}

impl Source for Resolved {
    type Error = CheckpointError;

    fn has(&self, name: &str) -> bool {
        self.contains(name)
    }

    fn is_bf16(&self, name: &str) -> bool {
        self.dtype(name).is_ok_and(|d| d == Dtype::BF16)
    }

    fn read_f32(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<f32>, CheckpointError> {
        self.rows_f32(name, rows, cols)
    }

    fn read_bf16(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<bf16>, CheckpointError> {
        self.rows_bf16(name, rows, cols)
    }

    fn exl3(&self, name: &str) -> Result<Option<Exl3Tensor<'_>>, CheckpointError> {
        Resolved::exl3(self, name)
    }

    fn exl3_rows(&self, name: &str) -> Result<Option<exl3::Embedding>, CheckpointError> {
        Resolved::exl3_rows(self, name)
    }
}

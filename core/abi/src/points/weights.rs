//! The `weight.source` chain.

use crate::{DType, List, Maybe, Slice, Text, TextBuf};

crate::interface! {
    /// Tensors by checkpoint name, as the links before gave them.
    "weight-source", 0: Source, SourceObject, SourceTable {
        /// Element type and shape; nothing when there is no such tensor.
        fn info(&self, name: Text<'_>) -> Maybe<TensorInfo>;
        /// Bytes of a tensor.
        fn read(&self, name: Text<'_>, out: &mut List<u8>) -> ();
    }
}

/// Type and shape of a tensor.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub shape: List<u64>,
}

crate::interface! {
    /// A link of `weight.source`: replaces tensors while they are loaded.
    "weight-link", 0: WeightLink, WeightLinkObject, WeightLinkTable {
        /// Names that it replaces; one that the checkpoint lacks refuses the start.
        fn names(&self) -> List<TextBuf>;
        /// f32 values of rows `first..first + rows` and columns `col..col + cols` of a tensor that it replaces, given those
        /// of the link before.
        fn rows(
            &self, name: Text<'_>, first: u64, rows: u64, col: u64, cols: u64, before: Slice<'_, f32>, out: &mut List<f32>,
        ) -> ();
    }
}

//! Where weights come from: the `weight.source` chain, builders of weights in formats of their own, and the store of
//! weights that are ready to run.

use crate::{DType, List, Maybe, Slice, SliceMut, Text, TextBuf, View};

crate::interface! {
    /// A link of `weight.source`: replaces tensors while they are loaded.
    "weight-link", 0: WeightLink, WeightLinkObject, WeightLinkTable {
        /// Published names of the tensors that it replaces. One that no weight of the model is made of refuses the start.
        fn names(&self) -> List<TextBuf>;
        /// f32 values of rows `first..first + rows` and columns `col..col + cols` of a tensor that it replaces, given those
        /// of the link before. `out` is empty and must get as many values as `before` has.
        fn rows(
            &self, name: Text<'_>, first: u64, rows: u64, col: u64, cols: u64, before: Slice<'_, f32>, out: &mut List<f32>,
        ) -> ();
        /// Identity of what it puts there: equal on all ranks, and another one for other values. States and prepared
        /// weights of another identity are never used.
        fn key(&self) -> TextBuf;
    }
}

/// What a stored matrix is for.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Purpose {
    /// All phases without a copy of their own.
    Main = 0,
    /// A copy for draft programs alone.
    Draft = 1,
    /// A copy for prefill programs alone.
    Prefill = 2,
}

impl Purpose {
    /// All of them.
    pub const ALL: [Purpose; 3] = [Purpose::Main, Purpose::Draft, Purpose::Prefill];
}

/// How the tensors that a matrix is made of are stored in the checkpoint.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// All of them as bf16.
    Bf16 = 0,
    /// As other numbers (f32, f16, blocks of 8 bits), or replaced by a link.
    Numbers = 1,
    /// At least one of them in a code that a format of the reference keeps as it is (EXL3).
    Coded = 2,
}

/// A matrix (or a stack of equal ones) of this rank that is about to be stored: `count` matrices of `n` outputs and `k`
/// inputs. Fused matrices are one matrix here, their parts one after another along the outputs.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Matrix<'a> {
    /// What it is for in the model, as in [`crate::ops`].
    pub role: Text<'a>,
    /// Layer, [`crate::NO_LAYER`] outside of the layers.
    pub layer: u32,
    /// Site in the layer.
    pub site: u32,
    /// Whether its layer is the multi-token-prediction layer.
    pub mtp: bool,
    /// What it is stored for.
    pub purpose: Purpose,
    /// Outputs on this rank.
    pub n: u32,
    /// Inputs on this rank.
    pub k: u32,
    /// Matrices in the stack.
    pub count: u32,
    /// First of this rank's inputs among those of the whole matrix.
    pub first: u32,
    /// Inputs of the whole matrix, over all ranks.
    pub inputs: u32,
    /// How its tensors are stored.
    pub stored: Stored,
}

/// Sizes of a plane that a builder fills.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneLayout {
    /// Element type.
    pub dtype: DType,
    /// Rows.
    pub rows: u32,
    /// Elements of a row.
    pub cols: u32,
}

/// What a builder makes of a matrix.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct WeightLayout {
    /// Format of the weight ([`crate::Weight::format`]); whoever builds it also brings providers that read it.
    pub format: TextBuf,
    /// Its planes, one to four.
    pub planes: List<PlaneLayout>,
}

crate::interface! {
    /// The values of a matrix that is being built.
    "matrix-rows", 0: MatrixRows, MatrixRowsObject, MatrixRowsTable {
        /// f32 values of outputs `output..output + outputs` of matrix `matrix` of the stack, row-major into `out`. Inputs are
        /// those `input..input + inputs` of the *whole* matrix, also beyond this rank's share: what is decided over a group of
        /// inputs is then the same on every number of ranks.
        fn read(&self, matrix: u32, output: u32, outputs: u32, input: u32, inputs: u32, out: SliceMut<'_, f32>) -> ();
    }
}

crate::interface! {
    /// Stores matrices in a format of its own while they are loaded; the values it read are dropped.
    ///
    /// A matrix goes to the builder that has a layout for it. Where two have one, a plugin that is `over` the other decides;
    /// otherwise the start is refused. A copy for one phase ([`Purpose`]) is only made where a builder has a layout for it.
    "weight-builder", 0: WeightBuilder, WeightBuilderObject, WeightBuilderTable {
        /// Its name, unique in its plugin.
        fn name(&self) -> TextBuf;
        /// Identity of its settings and of its arithmetic, with what decides the stored bits.
        fn key(&self) -> TextBuf;
        /// The format and planes of a matrix; nothing if it does not store this one. Asked on every rank with the share's
        /// own sizes; whether there is an answer must not depend on them.
        fn layout(&self, matrix: &Matrix<'_>) -> Maybe<WeightLayout>;
        /// Fills the planes, which lie in zeroed memory without gaps, aligned to 64 bytes. Called by several threads.
        fn build(&self, matrix: &Matrix<'_>, rows: &MatrixRowsObject, planes: Slice<'_, View>) -> ();
    }
}

/// Identity of the prepared weights of one rank.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct PreparedKey<'a> {
    /// Name of the checkpoint's folder, for people.
    pub model: Text<'a>,
    /// This rank.
    pub rank: u32,
    /// Ranks.
    pub ranks: u32,
    /// Lines `name = value` with everything that decides a byte.
    pub lines: Text<'a>,
}

/// What a store has under a key.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct Prepared {
    /// The engine's description of the bytes.
    pub index: List<u8>,
    /// Bytes in all.
    pub bytes: u64,
}

/// Some bytes of prepared weights.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug)]
pub struct Piece<'a> {
    /// Where they lie: a multiple of [`PREPARED_PAGE`].
    pub offset: u64,
    /// The bytes.
    pub bytes: Slice<'a, u8>,
}

/// Pieces of prepared weights, and the memory they are read into, begin at multiples of this.
pub const PREPARED_PAGE: usize = 4096;

crate::interface! {
    /// Keeps weights as they lie in memory, so that a start reads them instead of building them.
    "prepared-store", 0: PreparedStore, PreparedStoreObject, PreparedStoreTable {
        /// Its name.
        fn name(&self) -> TextBuf;
        /// What is kept under a key; nothing where there is nothing, or nothing that can be trusted (the store says so).
        fn find(&self, key: &PreparedKey<'_>) -> Maybe<Prepared>;
        /// Reads what [`PreparedStore::find`] found into memory of that many bytes, rounded up to whole
        /// [`PREPARED_PAGE`]s and aligned to them. After an error the weights are built from the checkpoint.
        fn read(&self, key: &PreparedKey<'_>, memory: SliceMut<'_, u8>) -> ();
        /// Takes what was built because nothing was found; ascending pieces. An error is told and the start goes on.
        fn offer(&self, key: &PreparedKey<'_>, index: Slice<'_, u8>, pieces: Slice<'_, Piece<'_>>) -> ();
    }
}

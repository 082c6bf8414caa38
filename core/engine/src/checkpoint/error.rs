//! What can be wrong with the files of a checkpoint.

use std::fmt;
use std::path::PathBuf;

use plugfold_kernels::cpu::exl3;
use safetensors::Dtype;

/// Lines of a message before the rest is only counted.
const SHOWN: usize = 20;

/// One thing that is wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file or the folder cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The folder holds no weights in a form that is read.
    #[error("{} holds neither model.safetensors.index.json nor model.safetensors", dir.display())]
    NoWeights {
        /// The folder.
        dir: PathBuf,
    },
    /// The folder holds a sharded and a single-file model, and nothing says which one is meant.
    #[error(
        "{} holds model.safetensors beside a model.safetensors.index.json that does not name it: remove one of them",
        dir.display()
    )]
    Ambiguous {
        /// The folder.
        dir: PathBuf,
    },
    /// The index of a sharded checkpoint is malformed.
    #[error("{}: {reason}", path.display())]
    Index {
        /// The index file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The index names a file that does not exist.
    #[error("{} is missing; the index expects {tensors} tensors in it, such as {example}", path.display())]
    MissingShard {
        /// The missing file.
        path: PathBuf,
        /// Tensors that should be in it.
        tensors: usize,
        /// One of them.
        example: String,
    },
    /// A safetensors file is malformed as a whole.
    #[error("{}: {reason}", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A safetensors file is wrong about one tensor.
    #[error("{}: tensor {tensor}: {reason}", path.display())]
    Entry {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// What is wrong with it.
        reason: String,
    },
    /// Two files hold the same tensor.
    #[error("tensor {tensor} is both in {} and in {}", first.display(), second.display())]
    Duplicate {
        /// The tensor.
        tensor: String,
        /// One file.
        first: PathBuf,
        /// The other file.
        second: PathBuf,
    },
    /// The index places a tensor in a file that does not have it.
    #[error("{}: tensor {tensor} is not in this file, although the index says so", path.display())]
    NotInShard {
        /// The file that the index names.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// The model needs a tensor that is nowhere.
    #[error("tensor {tensor} is missing")]
    Missing {
        /// Its published name.
        tensor: String,
    },
    /// A tensor is there under its published name and under the name of the transformers module.
    #[error("tensor {tensor} is stored twice, also as {other}: remove one of them")]
    TwoNames {
        /// The published name.
        tensor: String,
        /// The other name.
        other: String,
    },
    /// A tensor has the wrong shape.
    #[error("{}: tensor {tensor} has shape {found:?}; the configuration says {expected:?}", path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor, as stored.
        tensor: String,
        /// The stored shape.
        found: Vec<usize>,
        /// The shape that follows from the configuration.
        expected: Vec<usize>,
    },
    /// A tensor is stored in a type that is not read for it.
    #[error("{}: tensor {tensor} is stored as {found}; accepted here: {}", path.display(), names(allowed))]
    Type {
        /// The file.
        path: PathBuf,
        /// The tensor, as stored.
        tensor: String,
        /// The stored type.
        found: Dtype,
        /// The types that are read.
        allowed: &'static [Dtype],
    },
    /// An 8-bit tensor, but the configuration describes no 8-bit format.
    #[error(
        "{}: tensor {tensor} is stored as F8_E4M3, but config.json has no quantization_config with quant_method \
         \"fp8\"",
        path.display()
    )]
    NoBlocks {
        /// The file.
        path: PathBuf,
        /// The tensor, as stored.
        tensor: String,
    },
    /// The tensors of an EXL3 module contradict each other.
    #[error("{}: {source}", path.display())]
    Exl3 {
        /// The file of its trellis.
        path: PathBuf,
        /// What is wrong.
        source: exl3::Error,
    },
    /// An EXL3 module has other sizes than the model.
    #[error(
        "{}: tensor {tensor} codes {} inputs and {} outputs; the configuration says [{}, {}], which is {} and {} in \
         whole blocks of 128",
        path.display(), found[0], found[1], shape[0], shape[1], expected[0], expected[1]
    )]
    Exl3Shape {
        /// The file.
        path: PathBuf,
        /// The trellis.
        tensor: String,
        /// Coded inputs and outputs.
        found: [usize; 2],
        /// Outputs and inputs of the matrix.
        shape: [usize; 2],
        /// Inputs and outputs that its code should have.
        expected: [usize; 2],
    },
    /// A tensor that cannot be put together from the stored ones.
    #[error("tensor {tensor}: {reason}")]
    Layout {
        /// The tensor.
        tensor: String,
        /// Why.
        reason: String,
    },
    /// An EXL3 module that cannot be read.
    #[error(transparent)]
    Coded(#[from] exl3::Error),
    /// The configuration names a storage format that this reader does not know.
    #[error(
        "quantization_config.quant_method is {method:?}; this reader knows plain numbers, \"fp8\" and \"exl3\""
    )]
    Format {
        /// The format.
        method: String,
    },
    /// The configuration ties the head to the embedding, but another head is stored.
    #[error("tie_word_embeddings is true, but {head} differs from {embedding}")]
    NotTied {
        /// The stored head.
        head: String,
        /// The stored embedding.
        embedding: String,
    },
    /// A weight is NaN or infinite.
    #[error("tensor {tensor} is {value} at row {row}, column {column}; --allow-nan loads it all the same")]
    NotFinite {
        /// The tensor.
        tensor: String,
        /// Index in the first dimension.
        row: usize,
        /// Index in the remaining dimensions, flattened.
        column: usize,
        /// What stands there.
        value: f32,
    },
    /// A 32-bit weight was asked for in 16 bits and would change.
    #[error(
        "tensor {tensor} is {value} at row {row}, column {column}, which bfloat16 cannot hold: read it as f32"
    )]
    Inexact {
        /// The tensor.
        tensor: String,
        /// Index in the first dimension.
        row: usize,
        /// Index in the remaining dimensions, flattened.
        column: usize,
        /// What stands there.
        value: f32,
    },
    /// A part was asked for that the tensor does not have.
    #[error("tensor {tensor}: rows {rows:?}, columns {columns:?} do not lie inside {shape:?}")]
    Range {
        /// The tensor.
        tensor: String,
        /// The rows asked for.
        rows: std::ops::Range<usize>,
        /// The columns asked for.
        columns: std::ops::Range<usize>,
        /// Its rows and columns.
        shape: [usize; 2],
    },
}

fn names(types: &[Dtype]) -> String {
    types.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

/// Everything that is wrong with a checkpoint; never empty.
#[derive(Debug)]
pub struct CheckpointErrors {
    /// The checkpoint's folder.
    pub dir: PathBuf,
    /// What is wrong, in order of files and tensors.
    pub errors: Vec<CheckpointError>,
}

impl fmt::Display for CheckpointErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.errors[..] {
            [one] => write!(f, "the checkpoint {} cannot be used: {one}", self.dir.display()),
            all => {
                write!(
                    f,
                    "the checkpoint {} cannot be used, for {} reasons:",
                    self.dir.display(),
                    all.len()
                )?;
                for error in all.iter().take(SHOWN) {
                    write!(f, "\n  {error}")?;
                }
                if all.len() > SHOWN {
                    write!(f, "\n  and {} more", all.len() - SHOWN)?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for CheckpointErrors {}

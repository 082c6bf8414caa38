//! Tensors that are stored in the trellis-coded format EXL3.
//!
//! Which matrices are coded, at which rate and with which codebook, follows from the tensors alone: a module that has a
//! trellis is one, whatever the configuration says about bits.

use std::ops::Range;

use plugfold_kernels::cpu::exl3::{
    BLOCK, Dtype as Stored, Embedding, Header, Layer, Rate, RawTensor, StoredLayer, Tensors, is_embedding,
};
use safetensors::Dtype;

use super::Checkpoint;
use super::error::CheckpointError;

impl Tensors for Checkpoint {
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        let data = Checkpoint::tensor(self, name)?;
        let dtype = match data.dtype {
            Dtype::I16 => Stored::I16,
            Dtype::I32 => Stored::I32,
            Dtype::F16 => Stored::F16,
            Dtype::BF16 => Stored::Bf16,
            Dtype::F32 => Stored::F32,
            _ => Stored::Other,
        };
        Some(RawTensor { dtype, shape: data.shape.to_vec(), data: data.bytes })
    }
}

/// Where a coded tensor lies.
#[derive(Clone, Debug)]
pub(super) struct Exl3 {
    /// The module.
    pub(super) module: String,
    /// Its tensors, the trellis first.
    pub(super) tensors: Vec<String>,
    /// First output of the module that the published tensor has.
    row: usize,
    /// Which codec.
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A linear layer of this rate.
    Linear(Rate),
    /// A table of rows of this many channels.
    Table(usize),
}

impl Exl3 {
    /// Whether a module is stored so. It may still lack tensors.
    pub(super) fn is_stored(checkpoint: &Checkpoint, module: &str) -> bool {
        checkpoint.has(&format!("{module}.trellis")) || checkpoint.has(&format!("{module}.shard_0.trellis"))
    }

    /// Checks the module's tensors against each other and against the shape `[out, in]` that it should have.
    pub(super) fn find(
        checkpoint: &Checkpoint,
        module: &str,
        shape: &[usize],
        row: usize,
    ) -> Result<Self, CheckpointError> {
        let &[outputs, inputs] = shape else {
            return Err(CheckpointError::Missing { tensor: format!("{module}.weight") });
        };
        let module = module.to_owned();
        let trellis = format!("{module}.trellis");
        let path = checkpoint.file_of(&trellis);
        let wrong = |source| CheckpointError::Exl3 { path: path.clone(), source };
        if is_embedding(checkpoint, &module) {
            let table = Embedding::read(checkpoint, &module, inputs).map_err(wrong)?;
            if table.rows() != outputs {
                return Err(CheckpointError::Shape {
                    path: path.clone(),
                    tensor: trellis,
                    found: vec![table.rows(), table.width()],
                    expected: shape.to_vec(),
                });
            }
            let shards = (0..).map(|i| format!("{module}.shard_{i}.trellis"));
            let tensors = std::iter::once(trellis)
                .filter(|name| checkpoint.has(name))
                .chain(shards.take_while(|name| checkpoint.has(name)))
                .chain([format!("{module}.signs")])
                .collect();
            return Ok(Self { module, tensors, row, kind: Kind::Table(inputs) });
        }
        let layer = StoredLayer::open(checkpoint, &module).map_err(wrong)?;
        let header = *layer.header();
        let expected = [inputs, outputs].map(|channels| channels.next_multiple_of(BLOCK));
        if [header.k, header.n] != expected {
            return Err(CheckpointError::Exl3Shape {
                path: path.clone(),
                tensor: trellis,
                found: [header.k, header.n],
                shape: [outputs, inputs],
                expected,
            });
        }
        let mut tensors = layer.tensors();
        tensors.extend([format!("{module}.scale")].into_iter().filter(|name| checkpoint.has(name)));
        Ok(Self { module, tensors, row, kind: Kind::Linear(header.rate) })
    }

    /// First output of the module that the published tensor has.
    pub(super) fn row(&self) -> usize {
        self.row
    }

    /// The linear layer; `None` for a table.
    pub(super) fn linear<'a>(
        &self,
        checkpoint: &'a Checkpoint,
        allow_nan: bool,
    ) -> Result<Option<Exl3Tensor<'a>>, CheckpointError> {
        let Kind::Linear(_) = self.kind else { return Ok(None) };
        let layer = StoredLayer::open(checkpoint, &self.module)?;
        Ok(Some(Exl3Tensor { module: self.module.clone(), layer, row: self.row, allow_nan }))
    }

    /// The table of rows; `None` for a linear layer.
    pub(super) fn table(&self, checkpoint: &Checkpoint) -> Result<Option<Embedding>, CheckpointError> {
        match self.kind {
            Kind::Table(width) => Ok(Some(Embedding::read(checkpoint, &self.module, width)?)),
            Kind::Linear(_) => Ok(None),
        }
    }

    /// Some rows and columns of the published tensor, decoded.
    pub(super) fn decode(
        &self,
        checkpoint: &Checkpoint,
        rows: &Range<usize>,
        cols: &Range<usize>,
        allow_nan: bool,
    ) -> Result<Vec<f32>, CheckpointError> {
        let mut out = Vec::with_capacity(rows.len() * cols.len());
        if rows.is_empty() || cols.is_empty() {
            return Ok(out);
        }
        if let Some(table) = self.table(checkpoint)? {
            let mut row = vec![0.0; table.width()];
            for r in rows.clone() {
                table.decode_row(r, &mut row);
                out.extend_from_slice(&row[cols.clone()]);
            }
            return Ok(out);
        }
        let Some(stored) = self.linear(checkpoint, allow_nan)? else { return Ok(out) };
        let rows = rows.start + self.row..rows.end + self.row;
        let (k, n) = (blocks(cols), blocks(&rows));
        let layer: Layer = stored.layer.layer(k.clone(), n.clone())?;
        let w = layer.weight();
        for r in rows {
            out.extend(cols.clone().map(|c| w[(c - k.start) * n.len() + r - n.start]));
        }
        match out.iter().position(|v| !allow_nan && !v.is_finite()) {
            Some(i) => Err(CheckpointError::NotFinite {
                tensor: self.module.clone(),
                row: i / cols.len(),
                column: cols.start + i % cols.len(),
                value: out[i],
            }),
            None => Ok(out),
        }
    }
}

/// What `quantization_config.json` says otherwise than the tensors, for an operator to hear. The tensors are followed:
/// the file is a digest that merging and renaming leave behind.
pub(super) fn contradictions<'a>(
    checkpoint: &Checkpoint,
    modules: impl Iterator<Item = &'a Exl3>,
) -> Option<String> {
    let path = checkpoint.dir().join("quantization_config.json");
    let length = std::fs::metadata(&path).ok()?.len();
    let said: serde_json::Value = match std::fs::read(&path) {
        Ok(text) if length <= super::MAX_INDEX => match serde_json::from_slice(&text) {
            Ok(said) => said,
            Err(e) => return Some(format!("quantization_config.json is not read: {e}")),
        },
        Ok(_) => return Some(format!("quantization_config.json is not read: it has {length} bytes")),
        Err(e) => return Some(format!("quantization_config.json is not read: {e}")),
    };
    let storage = said.get("tensor_storage")?;
    let mut others = modules.filter_map(|exl3| {
        let Kind::Linear(rate) = exl3.kind else { return None };
        let bits = storage.get(&exl3.module)?.get("bits_per_weight")?.as_f64()?;
        (bits != f64::from(rate.bits())).then(|| format!("{} ({bits}, its trellis has {rate})", exl3.module))
    });
    let example = others.next()?;
    let count = 1 + others.count();
    Some(format!(
        "quantization_config.json says other bits than {count} coded tensors have, such as {example}: the tensors are \
         followed"
    ))
}

/// The blocks of 128 channels that hold `range`.
fn blocks(range: &Range<usize>) -> Range<usize> {
    range.start / BLOCK * BLOCK..range.end.next_multiple_of(BLOCK)
}

/// A published matrix that is stored as an EXL3 layer, or as some outputs of one.
pub struct Exl3Tensor<'a> {
    /// The stored module: parts of one module share the scales of its inputs.
    pub module: String,
    /// The layer.
    pub layer: StoredLayer<'a>,
    /// First output of the layer that belongs to the tensor.
    pub row: usize,
    /// Whether scales that are no numbers are let in.
    pub allow_nan: bool,
}

impl Exl3Tensor<'_> {
    /// What the layer's tensors say about it.
    pub fn header(&self) -> &Header {
        self.layer.header()
    }
}

//! Layers as tensors to write.

use crate::cpu::exl3::format::Dtype;
use crate::cpu::exl3::layer::Layer;

/// A tensor to write: little-endian bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredTensor {
    /// Full name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// The elements.
    pub data: Vec<u8>,
}

/// What `quantization_config.json` says of a layer under `tensor_storage`.
#[derive(Clone, Debug, PartialEq)]
pub struct Storage {
    /// The stored tensors: name, shape, bytes, and type in PyTorch's spelling.
    pub stored_tensors: Vec<(String, Vec<usize>, usize, &'static str)>,
    /// `quant_format`.
    pub quant_format: &'static str,
    /// `bits_per_weight`: a whole number or x.5.
    pub bits_per_weight: f32,
    /// `mcg_multiplier` or `mul1_multiplier`, if the codebook has a marker.
    pub multiplier: Option<(&'static str, u32)>,
}

/// The tensors of layer `name`, in the order in which the format's own converter writes them: `suh`, `svh`, marker,
/// `trellis`, `bias`.
pub fn tensors(name: &str, layer: &Layer) -> Vec<StoredTensor> {
    let tensor = |suffix: &str, dtype, shape, data| StoredTensor {
        name: format!("{name}.{suffix}"),
        dtype,
        shape,
        data,
    };
    let halves = |values: &[half::f16]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
    let mut stored = vec![
        tensor("suh", Dtype::F16, vec![layer.k()], halves(layer.suh())),
        tensor("svh", Dtype::F16, vec![layer.n()], halves(layer.svh())),
    ];
    if let Some((suffix, value)) = layer.codebook().marker() {
        stored.push(tensor(suffix, Dtype::I32, vec![], value.to_le_bytes().to_vec()));
    }
    let shape = vec![layer.k() / 16, layer.n() / 16, layer.rate().units()];
    let words = layer.trellis().iter().flat_map(|w| w.to_le_bytes()).collect();
    stored.push(tensor("trellis", Dtype::I16, shape, words));
    if let Some(bias) = layer.bias() {
        let bias: Vec<half::f16> = bias.iter().map(|&b| half::f16::from_f32(b)).collect();
        stored.push(tensor("bias", Dtype::F16, vec![layer.n()], halves(&bias)));
    }
    stored
}

/// The entry of a layer whose tensors are `stored`.
pub fn storage(layer: &Layer, stored: &[StoredTensor]) -> Storage {
    let kind = |dtype| match dtype {
        Dtype::I16 => "torch.int16",
        Dtype::I32 => "torch.int32",
        Dtype::Bf16 => "torch.bfloat16",
        Dtype::F32 => "torch.float32",
        Dtype::F16 | Dtype::Other => "torch.float16",
    };
    Storage {
        stored_tensors: stored
            .iter()
            .map(|t| (t.name.clone(), t.shape.clone(), t.data.len(), kind(t.dtype)))
            .collect(),
        quant_format: "exl3",
        bits_per_weight: layer.rate().bits(),
        multiplier: layer.codebook().marker().map(|(suffix, value)| match suffix {
            "mcg" => ("mcg_multiplier", value),
            _ => ("mul1_multiplier", value),
        }),
    }
}

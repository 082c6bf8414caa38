//! The vision tower: patches of images to rows that stand in for embeddings. Rank 0 alone has it, on its host or its device.

mod device;

use std::sync::Arc;

use half::bf16;
use plugfold_abi::OpError;
use plugfold_kernels::cpu::math::dense::{Elements, PackedMatrix, ShapeError, pack_bf16, pack_f32};
use plugfold_kernels::cpu::math::vision::{Block, Grid, Linear, Shape, Tower, VisionError, check};
use plugfold_kernels::cpu::rows::Rows;
use plugfold_kernels::device::{Device, DeviceError};

use crate::checkpoint::{CheckpointError, Dtype, Resolved};
use crate::config::VisionConfig;
use device::OnDevice;

const PREFIX: &str = "model.visual.";

/// Why a tower cannot be loaded or run.
#[derive(Debug, thiserror::Error)]
pub enum TowerError {
    /// A tensor.
    #[error(transparent)]
    Tensor(#[from] CheckpointError),
    /// A matrix of the wrong size; the checkpoint's check comes before.
    #[error("vision tower: {0}")]
    Matrix(#[from] ShapeError),
    /// Patches that do not fit.
    #[error(transparent)]
    Run(#[from] VisionError),
    /// A device's memory.
    #[error("vision tower: {0}")]
    Memory(#[from] DeviceError),
    /// An operation on a device.
    #[error("vision tower: {0}")]
    Operation(#[from] OpError),
}

enum Panels {
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
}

struct Matrix {
    n: usize,
    k: usize,
    panels: Panels,
    bias: Option<Vec<f32>>,
}

impl Matrix {
    fn packed(&self) -> Result<PackedMatrix<'_>, ShapeError> {
        let elements = match &self.panels {
            Panels::Bf16(v) => Elements::Bf16(v),
            Panels::F32(v) => Elements::F32(v),
        };
        PackedMatrix::new(self.n, self.k, elements)
    }

    fn linear(&self) -> Result<Linear<'_>, ShapeError> {
        Ok(Linear { weight: self.packed()?, bias: self.bias.as_deref() })
    }
}

struct BlockWeights {
    norm1: Vec<f32>,
    qkv: Matrix,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
    proj: Matrix,
    norm2: Vec<f32>,
    gate_up: Matrix,
    down: Matrix,
}

/// The loaded tower of a checkpoint.
pub struct VisionTower {
    place: Place,
    /// Values of a patch.
    patch: usize,
    /// Patches of a row, along one side.
    merge: usize,
}

/// Where a tower's weights are.
enum Place {
    Host(Box<Weights>),
    Device(Box<OnDevice>),
}

/// What a checkpoint has of a tower, in the host's memory.
struct Weights {
    shape: Shape,
    patch: Matrix,
    blocks: Vec<BlockWeights>,
    post_norm: Vec<f32>,
    downsample: Matrix,
    merger: Matrix,
    merger_norm: Vec<f32>,
    merger_norm_bias: Vec<f32>,
    merger_gate_up: Matrix,
    merger_down: Matrix,
}

struct Reader<'a> {
    tensors: &'a Resolved,
}

impl Reader<'_> {
    fn vector(&self, name: &str) -> Result<Vec<f32>, CheckpointError> {
        self.tensors.f32(&format!("{PREFIX}{name}"))
    }

    /// Matrices `NAME.weight` on top of each other, each flattened to `[out, rest]`, with their biases if any.
    fn matrix(&self, names: &[&str], bias: bool) -> Result<Matrix, CheckpointError> {
        let full: Vec<String> = names.iter().map(|n| format!("{PREFIX}{n}.weight")).collect();
        let mut n = 0;
        let mut k = 0;
        let mut exact = true;
        for name in &full {
            let shape = self.tensors.shape(name)?;
            n += shape[0];
            k = shape[1..].iter().product();
            exact &= self.tensors.dtype(name)? == Dtype::BF16;
        }
        let panels = if exact {
            let mut rows = Vec::with_capacity(n * k);
            for name in &full {
                rows.extend(self.tensors.bf16(name)?);
            }
            Panels::Bf16(pack_bf16(&rows, n, k))
        } else {
            let mut rows = Vec::with_capacity(n * k);
            for name in &full {
                rows.extend(self.tensors.f32(name)?);
            }
            Panels::F32(pack_f32(&rows, n, k))
        };
        let mut biases = Vec::new();
        for name in names.iter().filter(|_| bias) {
            biases.extend(self.vector(&format!("{name}.bias"))?);
        }
        Ok(Matrix { n, k, panels, bias: bias.then_some(biases) })
    }
}

impl Weights {
    fn load(tensors: &Resolved, config: &VisionConfig) -> Result<Self, TowerError> {
        let read = Reader { tensors };
        let blocks = (0..config.depth)
            .map(|b| {
                let at = |name: &str| format!("blocks.{b}.{name}");
                Ok(BlockWeights {
                    norm1: read.vector(&at("norm1.weight"))?,
                    qkv: read.matrix(&[&at("attn.qkv")], true)?,
                    q_norm: read.vector(&at("attn.q_norm.weight"))?,
                    k_norm: read.vector(&at("attn.k_norm.weight"))?,
                    proj: read.matrix(&[&at("attn.proj")], true)?,
                    norm2: read.vector(&at("norm2.weight"))?,
                    gate_up: read.matrix(&[&at("mlp.gate_proj"), &at("mlp.up_proj")], true)?,
                    down: read.matrix(&[&at("mlp.down_proj")], true)?,
                })
            })
            .collect::<Result<Vec<_>, CheckpointError>>()?;
        Ok(Self {
            shape: Shape {
                width: config.hidden_size,
                heads: config.heads,
                merge: config.merge,
                eps: config.rms_norm_eps,
                clamp: config.swiglu_limit,
                theta: config.rope_theta,
            },
            patch: read.matrix(&["patch_embed.proj"], true)?,
            blocks,
            post_norm: read.vector("post_layernorm.weight")?,
            downsample: read.matrix(&["downsample"], true)?,
            merger: read.matrix(&["merger.proj"], false)?,
            merger_norm: read.vector("merger.post_projection_norm.weight")?,
            merger_norm_bias: read.vector("merger.post_projection_norm.bias")?,
            merger_gate_up: read.matrix(&["merger.gate_proj", "merger.up_proj"], false)?,
            merger_down: read.matrix(&["merger.down_proj"], false)?,
        })
    }

    fn tower(&self) -> Result<Tower<'_>, ShapeError> {
        let mut blocks = Vec::with_capacity(self.blocks.len());
        for b in &self.blocks {
            blocks.push(Block {
                norm1: &b.norm1,
                qkv: b.qkv.linear()?,
                q_norm: &b.q_norm,
                k_norm: &b.k_norm,
                proj: b.proj.linear()?,
                norm2: &b.norm2,
                gate_up: b.gate_up.linear()?,
                down: b.down.linear()?,
            });
        }
        Ok(Tower {
            shape: self.shape,
            patch: self.patch.linear()?,
            blocks,
            post_norm: &self.post_norm,
            downsample: self.downsample.linear()?,
            merger: self.merger.packed()?,
            merger_norm: &self.merger_norm,
            merger_norm_bias: &self.merger_norm_bias,
            merger_gate_up: self.merger_gate_up.packed()?,
            merger_down: self.merger_down.packed()?,
        })
    }
}

impl VisionTower {
    /// Loads the tower of a checked checkpoint: to a device, or to the host's memory where there is none. The device must be
    /// one that nobody else runs operations on at the same time.
    ///
    /// # Errors
    /// A tensor that cannot be read or has a value that is not a number; a device's memory that is used up.
    pub fn load(
        tensors: &Resolved,
        config: &VisionConfig,
        device: Option<&Arc<dyn Device>>,
    ) -> Result<Self, TowerError> {
        let weights = Weights::load(tensors, config)?;
        let (patch, merge) = (weights.patch.k, weights.shape.merge);
        let place = match device {
            Some(device) => Place::Device(Box::new(OnDevice::new(device, &weights)?)),
            None => Place::Host(Box::new(weights)),
        };
        Ok(Self { place, patch, merge })
    }

    /// Rows `[patches / merge², hidden]` for patches `[count, values]` in merge-block order, image after image.
    ///
    /// # Errors
    /// Grids and patches that do not fit each other, or what the device says.
    pub fn rows(&self, patches: &[f32], grids: &[Grid]) -> Result<Vec<f32>, TowerError> {
        let pixels = Rows::new(patches, self.patch);
        check(grids, self.merge, self.patch, pixels)?;
        match &self.place {
            Place::Host(weights) => Ok(weights.tower()?.run(pixels, grids)?),
            Place::Device(_) if patches.is_empty() => Ok(Vec::new()),
            Place::Device(tower) => tower.rows(patches, grids),
        }
    }

    /// Rows before the merger, for comparisons.
    ///
    /// # Errors
    /// As [`VisionTower::rows`].
    pub fn downsampled(&self, patches: &[f32], grids: &[Grid]) -> Result<Vec<f32>, TowerError> {
        let pixels = Rows::new(patches, self.patch);
        check(grids, self.merge, self.patch, pixels)?;
        match &self.place {
            Place::Host(weights) => Ok(weights.tower()?.downsampled(pixels, grids)?),
            Place::Device(_) if patches.is_empty() => Ok(Vec::new()),
            Place::Device(tower) => tower.downsampled(patches, grids),
        }
    }
}

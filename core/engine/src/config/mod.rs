//! `config.json`: what the checkpoint says about its shape.
//!
//! [`ModelConfig::from_dir`] reads the nested form (top level, `text_config`, `vision_config`) and the flat form of a
//! text-only checkpoint, fills in the defaults of transformers, and refuses everything that this engine cannot
//! compute, all reasons at once. Every size is bounded here, so that products of sizes cannot overflow and nothing
//! large is allocated on the word of a file that nothing has confirmed yet.

mod error;
pub(crate) mod fields;
mod layers;
pub(crate) mod parse;
#[cfg(test)]
pub(crate) mod tests;

use std::path::Path;

pub use error::{ConfigError, Problem};

/// Everything the engine needs to know of a model before it looks at a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `model_type` of the file, such as `glm5_next`.
    pub model_type: String,
    /// Rows of the embedding table and of the head; token ids are below it.
    pub vocab_size: usize,
    /// Width of a row of the residual stream.
    pub hidden_size: usize,
    /// Most tokens of a sequence (`max_position_embeddings`).
    pub context: usize,
    /// The decoder layers in order, without the MTP layer.
    pub layers: Vec<LayerKind>,
    /// Inner width of a dense feed-forward block.
    pub dense_width: usize,
    /// The gated linear attention.
    pub kda: KdaConfig,
    /// The latent attention.
    pub mla: MlaConfig,
    /// The indexer that chooses what the latent attention sees.
    pub index: IndexConfig,
    /// Router and experts.
    pub moe: MoeConfig,
    /// The hyper-connections.
    pub hc: HcConfig,
    /// ε of the RMS norms.
    pub rms_norm_eps: f32,
    /// Clamp of the SwiGLU.
    pub swiglu_limit: f32,
    /// The head is the embedding table.
    pub tied_head: bool,
    /// Multi-token-prediction layers that the file promises, 0 or 1.
    pub mtp_layers: usize,
    /// Chained drafts may reuse the key set of their first step.
    pub mtp_shares_index: bool,
    /// The vision tower, if the file describes one.
    pub vision: Option<VisionConfig>,
    /// Ids that mark images and videos; below `vocab_size` whenever `vision` is there.
    pub media: MediaIds,
    /// Ids that end a reply: those of `config.json`, then further ones of `generation_config.json`.
    pub eos_ids: Vec<u32>,
    /// The padding id, if it lies inside the vocabulary.
    pub pad_id: Option<u32>,
    /// How matrices are stored, when not as plain numbers.
    pub quantization: Option<Quantization>,
    /// What an operator should hear: fields whose absence was filled in with a value that the published model does
    /// not have, and redundant ones that contradict those in force. Each was logged when it was found.
    pub warnings: Vec<String>,
}

/// What a decoder layer is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// Its attention.
    pub attention: Attention,
    /// Its feed-forward block.
    pub mlp: Mlp,
}

/// The attention of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Gated linear attention with a recurrent state.
    Kda,
    /// Latent attention over chosen keys.
    Mla {
        /// Who chooses the keys.
        indexer: Indexer,
    },
}

/// Who chooses the keys of a latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Indexer {
    /// The layer has an indexer of its own.
    Own,
    /// The layer takes over the choice of the layer directly before it, which has its own.
    Shared,
}

/// The feed-forward block of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// One SwiGLU.
    Dense,
    /// A router, experts, and a shared expert.
    Sparse,
}

/// Sizes of the gated linear attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KdaConfig {
    /// Heads.
    pub heads: usize,
    /// Key channels of a head, equal to its value channels.
    pub head_dim: usize,
    /// Taps of the short convolution; the window keeps one row less.
    pub taps: usize,
    /// Lower bound of the log decay; `None` selects the unbounded softplus form.
    pub lower_bound: Option<f32>,
}

impl KdaConfig {
    /// Channels of all heads, the width of q, of k and of v.
    pub fn channels(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// Sizes of the latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MlaConfig {
    /// Heads of queries, keys and values.
    pub heads: usize,
    /// Width of the query's latent row, which the indexer reads too.
    pub q_rank: usize,
    /// Width of the cached latent row.
    pub kv_rank: usize,
    /// Query and key channels of a head (`qk_nope_head_dim`).
    pub key_dim: usize,
    /// Value channels of a head.
    pub value_dim: usize,
}

/// Sizes of the indexer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexConfig {
    /// Tokens that the chosen pools cover, a multiple of `pool`.
    pub topk: usize,
    /// Tokens of a pool (`index_kpool`).
    pub pool: usize,
    /// Scoring heads.
    pub heads: usize,
    /// Channels of a scoring head.
    pub head_dim: usize,
}

impl IndexConfig {
    /// Pools that a query keeps.
    pub fn pools(&self) -> usize {
        self.topk / self.pool
    }
}

/// Router and experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeConfig {
    /// Routed experts.
    pub experts: usize,
    /// Experts chosen for a token.
    pub per_token: usize,
    /// Shared experts; they form one block of `shared × width`.
    pub shared: usize,
    /// Inner width of one expert.
    pub width: usize,
    /// Factor on the routing weights.
    pub scale: f32,
    /// The chosen weights are divided by their sum first.
    pub normalize: bool,
    /// Groups of experts for grouped selection, 1 for none.
    pub groups: usize,
    /// Groups kept.
    pub groups_kept: usize,
}

impl MoeConfig {
    /// Inner width of the shared expert.
    pub fn shared_width(&self) -> usize {
        self.shared * self.width
    }
}

/// The hyper-connections.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HcConfig {
    /// Residual streams N.
    pub streams: usize,
    /// ε of the coefficients and of Sinkhorn's denominators.
    pub eps: f32,
    /// Sinkhorn iterations.
    pub sinkhorn_iters: usize,
}

impl HcConfig {
    /// Coefficients of one connection, (2 + N) N.
    pub fn coefficients(&self) -> usize {
        (2 + self.streams) * self.streams
    }
}

/// The vision tower.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct VisionConfig {
    /// Blocks.
    pub depth: usize,
    /// Width of a patch row.
    pub hidden_size: usize,
    /// Attention heads.
    pub heads: usize,
    /// Inner width of a block's SwiGLU.
    pub width: usize,
    /// Colour channels, always 3.
    pub channels: usize,
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Frames of a patch.
    pub temporal_patch: usize,
    /// Side of a merge block in patches.
    pub merge: usize,
    /// Width of a finished row, the text model's hidden size.
    pub out_hidden_size: usize,
    /// Inner width of the merger.
    pub projection_width: usize,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// ε of the norms.
    pub rms_norm_eps: f32,
    /// Clamp of the SwiGLU.
    pub swiglu_limit: f32,
}

impl VisionConfig {
    /// Channels of one head.
    pub fn head_dim(&self) -> usize {
        self.hidden_size / self.heads
    }

    /// Values of one patch, channel, frame, row, column.
    pub fn patch_values(&self) -> usize {
        self.channels * self.temporal_patch * self.patch * self.patch
    }
}

/// Token ids around images and videos.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaIds {
    /// Opens an image.
    pub image_start: u32,
    /// Closes an image.
    pub image_end: u32,
    /// Stands for one image row.
    pub image: u32,
    /// Opens a video.
    pub video_start: u32,
    /// Closes a video.
    pub video_end: u32,
    /// Reserved for a video row; the published model writes `image` inside videos too.
    pub video: u32,
}

/// `quantization_config`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quantization {
    /// `quant_method`, such as `fp8`.
    pub method: String,
    /// Rows and columns of a block that shares one scale, for the method `fp8`.
    pub block: [usize; 2],
}

impl ModelConfig {
    /// Reads `config.json` of a checkpoint, and the end-of-text ids of its `generation_config.json` if there is one.
    ///
    /// # Errors
    /// [`ConfigError`]: a file cannot be read, is not JSON, or describes what this engine cannot run.
    pub fn from_dir(dir: &Path) -> Result<Self, ConfigError> {
        let path = dir.join("config.json");
        let text = parse::read(&path)?;
        let generation_path = dir.join("generation_config.json");
        let generation = if generation_path.exists() { Some(parse::read(&generation_path)?) } else { None };
        parse::parse(&path.display().to_string(), &text, generation.as_deref())
    }

    /// Reads the text of a `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`]: it is not JSON, or describes what this engine cannot run.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        parse::parse("config.json", text, None)
    }

    /// Layers with an indexer or a choice taken over, in order: `(layer, indexer)`.
    pub fn mla_layers(&self) -> impl Iterator<Item = (usize, Indexer)> + '_ {
        self.layers.iter().enumerate().filter_map(|(i, layer)| match layer.attention {
            Attention::Mla { indexer } => Some((i, indexer)),
            Attention::Kda => None,
        })
    }
}

//! Which tensors a model of a given shape has: published names, shapes, stored types.

use safetensors::Dtype;

use crate::config::{Attention, Indexer, LayerKind, Mlp, ModelConfig};

/// Prefix of the text model.
pub(super) const TEXT: &str = "model.language_model.";
/// Prefix of the vision tower.
pub(super) const VISION: &str = "model.visual.";
/// The output head.
pub(super) const HEAD: &str = "lm_head.weight";

/// Plain weights.
pub(super) const PLAIN: &[Dtype] = &[Dtype::BF16, Dtype::F32];
/// Matrices that the 8-bit release stores in blocks.
pub(super) const MATRIX: &[Dtype] = &[Dtype::BF16, Dtype::F32, Dtype::F8_E4M3];
/// Parameters that lose their meaning in 16 bits.
pub(super) const EXACT: &[Dtype] = &[Dtype::F32];

/// A tensor that a model must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Published name.
    pub name: String,
    /// Shape under that name.
    pub shape: Vec<usize>,
    /// Stored types that are read for it.
    pub dtypes: &'static [Dtype],
    /// What it belongs to.
    pub part: Part,
}

/// The parts of a model that a checkpoint may have or lack as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The text model, always needed.
    Text,
    /// The multi-token-prediction layer.
    Mtp,
    /// The vision tower.
    Vision,
}

/// Every tensor that the configuration asks for, in order of layers.
pub fn inventory(config: &ModelConfig) -> Vec<Expected> {
    let mut list = List { config, part: Part::Text, prefix: String::new(), tensors: Vec::new() };
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    list.at(TEXT.to_owned());
    list.add("embed_tokens.weight", &[vocab, hidden], PLAIN);
    list.add("norm.weight", &[hidden], PLAIN);
    if !config.tied_head {
        list.tensors.push(head(config));
    }
    for (i, layer) in config.layers.iter().enumerate() {
        list.layer(i, *layer);
    }
    list.part = Part::Mtp;
    for i in 0..config.mtp_layers {
        list.mtp(config.layers.len() + i);
    }
    list.part = Part::Vision;
    list.vision();
    list.tensors
}

/// The output head.
pub(super) fn head(config: &ModelConfig) -> Expected {
    let shape = vec![config.vocab_size, config.hidden_size];
    Expected { name: HEAD.to_owned(), shape, dtypes: PLAIN, part: Part::Text }
}

struct List<'a> {
    config: &'a ModelConfig,
    part: Part,
    prefix: String,
    tensors: Vec<Expected>,
}

impl List<'_> {
    fn at(&mut self, prefix: String) {
        self.prefix = prefix;
    }

    fn add(&mut self, name: &str, shape: &[usize], dtypes: &'static [Dtype]) {
        let name = format!("{}{name}", self.prefix);
        self.tensors.push(Expected { name, shape: shape.to_vec(), dtypes, part: self.part });
    }

    /// A matrix `[out, in]` with a bias `[out]`.
    fn biased(&mut self, name: &str, out: usize, input: usize) {
        self.add(&format!("{name}.weight"), &[out, input], PLAIN);
        self.add(&format!("{name}.bias"), &[out], PLAIN);
    }

    fn layer(&mut self, i: usize, kind: LayerKind) {
        let (hidden, hc) = (self.config.hidden_size, self.config.hc);
        self.at(format!("{TEXT}layers.{i}."));
        for block in ["attn", "ffn"] {
            self.add(&format!("hc_{block}_fn"), &[hc.coefficients(), hc.streams * hidden], PLAIN);
            self.add(&format!("hc_{block}_base"), &[hc.coefficients()], EXACT);
            self.add(&format!("hc_{block}_scale"), &[3], EXACT);
        }
        self.norms();
        match kind.attention {
            Attention::Kda => self.kda(),
            Attention::Mla { indexer } => self.mla(indexer),
        }
        match kind.mlp {
            Mlp::Dense => self.swiglu("mlp", self.config.dense_width),
            Mlp::Sparse => self.moe(),
        }
    }

    fn norms(&mut self) {
        self.add("input_layernorm.weight", &[self.config.hidden_size], PLAIN);
        self.add("post_attention_layernorm.weight", &[self.config.hidden_size], PLAIN);
    }

    fn kda(&mut self) {
        let (hidden, kda) = (self.config.hidden_size, self.config.kda);
        let channels = kda.channels();
        for x in ["q", "k", "v"] {
            self.add(&format!("self_attn.{x}_proj.weight"), &[channels, hidden], PLAIN);
            self.add(&format!("self_attn.{x}_conv1d.weight"), &[channels, 1, kda.taps], PLAIN);
        }
        for x in ["f", "g"] {
            self.add(&format!("self_attn.{x}_a_proj.weight"), &[kda.head_dim, hidden], PLAIN);
            self.add(&format!("self_attn.{x}_b_proj.weight"), &[channels, kda.head_dim], PLAIN);
        }
        self.add("self_attn.b_proj.weight", &[kda.heads, hidden], PLAIN);
        self.add("self_attn.A_log", &[kda.heads], EXACT);
        self.add("self_attn.dt_bias", &[channels], EXACT);
        self.add("self_attn.o_norm.weight", &[kda.head_dim], PLAIN);
        self.add("self_attn.o_proj.weight", &[hidden, channels], PLAIN);
    }

    fn mla(&mut self, indexer: Indexer) {
        let (hidden, mla, index) = (self.config.hidden_size, self.config.mla, self.config.index);
        self.add("self_attn.q_a_proj.weight", &[mla.q_rank, hidden], MATRIX);
        self.add("self_attn.q_a_layernorm.weight", &[mla.q_rank], PLAIN);
        self.add("self_attn.q_b_proj.weight", &[mla.heads * mla.key_dim, mla.q_rank], MATRIX);
        self.add("self_attn.kv_a_proj_with_mqa.weight", &[mla.kv_rank, hidden], MATRIX);
        self.add("self_attn.kv_a_layernorm.weight", &[mla.kv_rank], PLAIN);
        let rows = mla.heads * (mla.key_dim + mla.value_dim);
        self.add("self_attn.kv_b_proj.weight", &[rows, mla.kv_rank], PLAIN);
        self.add("self_attn.o_proj.weight", &[hidden, mla.heads * mla.value_dim], MATRIX);
        if indexer == Indexer::Own {
            let width = index.head_dim;
            self.add("self_attn.indexer.wq_b.weight", &[index.heads * width, mla.q_rank], PLAIN);
            self.add("self_attn.indexer.wk.weight", &[width, hidden], PLAIN);
            self.add("self_attn.indexer.k_norm.weight", &[width], PLAIN);
            self.add("self_attn.indexer.k_norm.bias", &[width], PLAIN);
            self.add("self_attn.indexer.weights_proj.weight", &[index.heads, hidden], PLAIN);
            self.add("self_attn.indexer.index_kpool_compress_ape", &[index.pool, width], PLAIN);
            self.add("self_attn.indexer.index_kpool_compress_gate", &[width, hidden], PLAIN);
        }
    }

    fn swiglu(&mut self, at: &str, width: usize) {
        let hidden = self.config.hidden_size;
        self.add(&format!("{at}.gate_proj.weight"), &[width, hidden], MATRIX);
        self.add(&format!("{at}.up_proj.weight"), &[width, hidden], MATRIX);
        self.add(&format!("{at}.down_proj.weight"), &[hidden, width], MATRIX);
    }

    fn moe(&mut self) {
        let (hidden, moe) = (self.config.hidden_size, self.config.moe);
        self.add("mlp.gate.weight", &[moe.experts, hidden], PLAIN);
        self.add("mlp.gate.e_score_correction_bias", &[moe.experts], EXACT);
        for e in 0..moe.experts {
            self.swiglu(&format!("mlp.experts.{e}"), moe.width);
        }
        self.swiglu("mlp.shared_experts", moe.shared_width());
    }

    fn mtp(&mut self, i: usize) {
        let hidden = self.config.hidden_size;
        self.at(format!("{TEXT}layers.{i}."));
        self.add("eh_proj.weight", &[hidden, 2 * hidden], PLAIN);
        for name in ["enorm", "hnorm", "shared_head.norm"] {
            self.add(&format!("{name}.weight"), &[hidden], PLAIN);
        }
        self.norms();
        self.mla(Indexer::Own);
        self.moe();
    }

    fn vision(&mut self) {
        let Some(tower) = self.config.vision else { return };
        let (width, head, out) = (tower.hidden_size, tower.head_dim(), tower.out_hidden_size);
        self.at(VISION.to_owned());
        let patch = [width, tower.channels, tower.temporal_patch, tower.patch, tower.patch];
        self.add("patch_embed.proj.weight", &patch, PLAIN);
        self.add("patch_embed.proj.bias", &[width], PLAIN);
        for b in 0..tower.depth {
            self.at(format!("{VISION}blocks.{b}."));
            self.add("norm1.weight", &[width], PLAIN);
            self.add("norm2.weight", &[width], PLAIN);
            self.biased("attn.qkv", 3 * width, width);
            self.add("attn.q_norm.weight", &[head], PLAIN);
            self.add("attn.k_norm.weight", &[head], PLAIN);
            self.biased("attn.proj", width, width);
            self.biased("mlp.gate_proj", tower.width, width);
            self.biased("mlp.up_proj", tower.width, width);
            self.biased("mlp.down_proj", width, tower.width);
        }
        self.at(VISION.to_owned());
        self.add("post_layernorm.weight", &[width], PLAIN);
        self.add("downsample.weight", &[out, width, tower.merge, tower.merge], PLAIN);
        self.add("downsample.bias", &[out], PLAIN);
        self.add("merger.proj.weight", &[out, out], PLAIN);
        self.add("merger.post_projection_norm.weight", &[out], PLAIN);
        self.add("merger.post_projection_norm.bias", &[out], PLAIN);
        self.add("merger.gate_proj.weight", &[tower.projection_width, out], PLAIN);
        self.add("merger.up_proj.weight", &[tower.projection_width, out], PLAIN);
        self.add("merger.down_proj.weight", &[out, tower.projection_width], PLAIN);
    }
}

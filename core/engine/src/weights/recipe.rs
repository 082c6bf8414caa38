//! Which tensors, and which part of each, make up each weight of a rank.

use std::ops::Range;

use plugfold_abi::NO_LAYER;

use crate::config::{Attention, Indexer, Mlp, ModelConfig};
use crate::program::build::{AFTER, ATTENTION, FEED_FORWARD};
use crate::split::Split;

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A vector or small matrix in f32.
    Plain,
    /// A matrix whose rows are looked up.
    Rows,
    /// A matrix that rows are multiplied by.
    Dense,
}

/// Some rows and columns of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Published name.
    pub tensor: String,
    /// Rows.
    pub rows: Range<usize>,
    /// Columns (all dimensions after the first, flattened).
    pub cols: Range<usize>,
}

/// One weight.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    /// Layer, or `NO_LAYER`.
    pub layer: u32,
    /// Site.
    pub site: u32,
    /// Role, as in `plugfold_abi::ops`.
    pub role: &'static str,
    /// How it is stored.
    pub kind: Kind,
    /// Rows of one matrix.
    pub n: usize,
    /// Columns.
    pub k: usize,
    /// Matrices in a stack.
    pub count: usize,
    /// First of this rank's columns among those of the whole matrix.
    pub first: usize,
    /// Columns of the whole matrix, over all ranks.
    pub inputs: usize,
    /// What is put together, matrix by matrix, row block by row block.
    pub parts: Vec<Part>,
}

struct List<'a> {
    config: &'a ModelConfig,
    split: Split,
    prefix: String,
    layer: u32,
    site: u32,
    out: Vec<Recipe>,
}

/// A tensor's rows (a share of them, or all) at full width.
type Block<'b> = (&'b str, Range<usize>);

/// The weights of one rank, in layer order.
pub fn recipes(config: &ModelConfig, split: Split, mtp: bool) -> Vec<Recipe> {
    let prefix = "model.language_model.".to_owned();
    let mut list = List { config, split, prefix, layer: NO_LAYER, site: ATTENTION, out: Vec::new() };
    let (d, v) = (config.hidden_size, config.vocab_size);
    list.add("embed", Kind::Rows, d, &[("embed_tokens.weight", 0..v)]);
    list.add("norm", Kind::Plain, 1, &[("norm.weight", 0..d)]);
    // Of a tied head the checkpoint gives the embedding under this name.
    list.prefix.clear();
    list.add("head", Kind::Dense, d, &[("lm_head.weight", split.share(v))]);
    for (i, layer) in config.layers.iter().enumerate() {
        list.at_layer(i);
        list.hyper("attn");
        match layer.attention {
            Attention::Kda => list.kda(),
            Attention::Mla { indexer } => list.mla(indexer),
        }
        list.site = FEED_FORWARD;
        list.hyper("ffn");
        match layer.mlp {
            Mlp::Dense => list.swiglu("mlp.gate_up", "mlp.down", "mlp", config.dense_width),
            Mlp::Sparse => list.moe(),
        }
        list.norms();
    }
    if mtp {
        list.at_layer(config.layers.len());
        list.add("mtp.eh", Kind::Dense, 2 * d, &[("eh_proj.weight", 0..d)]);
        list.add("mtp.enorm", Kind::Plain, 1, &[("enorm.weight", 0..d)]);
        list.add("mtp.hnorm", Kind::Plain, 1, &[("hnorm.weight", 0..d)]);
        list.mla(Indexer::Own);
        list.site = FEED_FORWARD;
        list.moe();
        list.norms();
        list.site = AFTER;
        list.add("norm", Kind::Plain, 1, &[("shared_head.norm.weight", 0..d)]);
    }
    list.out
}

impl List<'_> {
    fn at_layer(&mut self, layer: usize) {
        self.prefix = format!("model.language_model.layers.{layer}.");
        self.layer = layer as u32;
        self.site = ATTENTION;
    }

    /// A weight of stacked row blocks, each `k` wide.
    fn add(&mut self, role: &'static str, kind: Kind, k: usize, blocks: &[Block<'_>]) {
        let parts = blocks
            .iter()
            .map(|(name, rows)| Part {
                tensor: format!("{}{name}", self.prefix),
                rows: rows.clone(),
                cols: 0..k,
            })
            .collect();
        self.push(role, kind, (0..k, k), 1, parts);
    }

    /// A matrix of `n` rows of which this rank has the given columns of `inputs`: its input is divided.
    fn add_columns(&mut self, role: &'static str, name: &str, n: usize, cols: Range<usize>, inputs: usize) {
        let part = Part { tensor: format!("{}{name}", self.prefix), rows: 0..n, cols: cols.clone() };
        self.push(role, Kind::Dense, (cols, inputs), 1, vec![part]);
    }

    /// A weight of parts that all have the columns `cols` of `inputs`.
    fn push(
        &mut self,
        role: &'static str,
        kind: Kind,
        (cols, inputs): (Range<usize>, usize),
        count: usize,
        parts: Vec<Part>,
    ) {
        let n = parts.iter().map(|p| p.rows.len()).sum::<usize>() / count;
        let (layer, site, first, k) = (self.layer, self.site, cols.start, cols.len());
        self.out.push(Recipe { layer, site, role, kind, n, k, count, first, inputs, parts });
    }

    fn norms(&mut self) {
        let d = self.config.hidden_size;
        self.site = ATTENTION;
        self.add("norm", Kind::Plain, 1, &[("input_layernorm.weight", 0..d)]);
        self.site = FEED_FORWARD;
        self.add("norm", Kind::Plain, 1, &[("post_attention_layernorm.weight", 0..d)]);
    }

    fn hyper(&mut self, block: &str) {
        let n = self.config.hc.coefficients();
        let wide = self.config.hc.streams * self.config.hidden_size;
        self.add("hc.fn", Kind::Dense, wide, &[(&format!("hc_{block}_fn"), 0..n)]);
        self.add("hc.base", Kind::Plain, 1, &[(&format!("hc_{block}_base"), 0..n)]);
        self.add("hc.scale", Kind::Plain, 1, &[(&format!("hc_{block}_scale"), 0..3)]);
    }

    fn kda(&mut self) {
        let (d, k) = (self.config.hidden_size, self.config.kda);
        let (heads, c) = (self.split.share(k.heads), self.split.columns(k.heads, k.head_dim));
        self.add(
            "kda.in",
            Kind::Dense,
            d,
            &[
                ("self_attn.q_proj.weight", c.clone()),
                ("self_attn.k_proj.weight", c.clone()),
                ("self_attn.v_proj.weight", c.clone()),
                ("self_attn.f_a_proj.weight", 0..k.head_dim),
                ("self_attn.g_a_proj.weight", 0..k.head_dim),
                ("self_attn.b_proj.weight", heads.clone()),
            ],
        );
        self.add("kda.f_b", Kind::Dense, k.head_dim, &[("self_attn.f_b_proj.weight", c.clone())]);
        self.add("kda.g_b", Kind::Dense, k.head_dim, &[("self_attn.g_b_proj.weight", c.clone())]);
        self.add(
            "kda.conv",
            Kind::Plain,
            k.taps,
            &[
                ("self_attn.q_conv1d.weight", c.clone()),
                ("self_attn.k_conv1d.weight", c.clone()),
                ("self_attn.v_conv1d.weight", c.clone()),
            ],
        );
        self.add("kda.dt_bias", Kind::Plain, 1, &[("self_attn.dt_bias", c.clone())]);
        self.add("kda.a_log", Kind::Plain, 1, &[("self_attn.A_log", heads)]);
        self.add("kda.o_norm", Kind::Plain, 1, &[("self_attn.o_norm.weight", 0..k.head_dim)]);
        self.add_columns("kda.o", "self_attn.o_proj.weight", d, c, k.heads * k.head_dim);
    }

    fn mla(&mut self, indexer: Indexer) {
        let (d, m, ix) = (self.config.hidden_size, self.config.mla, self.config.index);
        let mut blocks = vec![
            ("self_attn.q_a_proj.weight", 0..m.q_rank),
            ("self_attn.kv_a_proj_with_mqa.weight", 0..m.kv_rank),
        ];
        if indexer == Indexer::Own {
            blocks.push(("self_attn.indexer.wk.weight", 0..ix.head_dim));
            blocks.push(("self_attn.indexer.index_kpool_compress_gate", 0..ix.head_dim));
            blocks.push(("self_attn.indexer.weights_proj.weight", 0..ix.heads));
        }
        self.add("mla.in", Kind::Dense, d, &blocks);
        self.add("mla.q_norm", Kind::Plain, 1, &[("self_attn.q_a_layernorm.weight", 0..m.q_rank)]);
        self.add("mla.kv_norm", Kind::Plain, 1, &[("self_attn.kv_a_layernorm.weight", 0..m.kv_rank)]);
        let q = self.split.columns(m.heads, m.key_dim);
        self.add("mla.q_b", Kind::Dense, m.q_rank, &[("self_attn.q_b_proj.weight", q)]);
        let kv = self.split.columns(m.heads, m.key_dim + m.value_dim);
        self.add("mla.kv_b", Kind::Dense, m.kv_rank, &[("self_attn.kv_b_proj.weight", kv)]);
        let o = self.split.columns(m.heads, m.value_dim);
        self.add_columns("mla.o", "self_attn.o_proj.weight", d, o, m.heads * m.value_dim);
        if indexer == Indexer::Own {
            let q = ix.heads * ix.head_dim;
            self.add("idx.q_b", Kind::Dense, m.q_rank, &[("self_attn.indexer.wq_b.weight", 0..q)]);
            self.add("idx.k_norm", Kind::Plain, 1, &[("self_attn.indexer.k_norm.weight", 0..ix.head_dim)]);
            self.add("idx.k_bias", Kind::Plain, 1, &[("self_attn.indexer.k_norm.bias", 0..ix.head_dim)]);
            let ape = "self_attn.indexer.index_kpool_compress_ape";
            self.add("idx.ape", Kind::Plain, ix.head_dim, &[(ape, 0..ix.pool)]);
        }
    }

    fn swiglu(&mut self, up: &'static str, down: &'static str, block: &str, width: usize) {
        let d = self.config.hidden_size;
        let share = self.split.share(width);
        let (gate, value) = (format!("{block}.gate_proj.weight"), format!("{block}.up_proj.weight"));
        self.add(up, Kind::Dense, d, &[(&gate, share.clone()), (&value, share.clone())]);
        self.add_columns(down, &format!("{block}.down_proj.weight"), d, share, width);
    }

    fn moe(&mut self) {
        let (d, m) = (self.config.hidden_size, self.config.moe);
        self.add("moe.router", Kind::Dense, d, &[("mlp.gate.weight", 0..m.experts)]);
        self.add("moe.bias", Kind::Plain, 1, &[("mlp.gate.e_score_correction_bias", 0..m.experts)]);
        let share = self.split.share(m.width);
        let tensor = |e: usize, which: &str| format!("{}mlp.experts.{e}.{which}_proj.weight", self.prefix);
        let up = (0..m.experts)
            .flat_map(|e| {
                ["gate", "up"].map(|w| Part { tensor: tensor(e, w), rows: share.clone(), cols: 0..d })
            })
            .collect();
        let down = (0..m.experts)
            .map(|e| Part { tensor: tensor(e, "down"), rows: 0..d, cols: share.clone() })
            .collect();
        self.push("experts.gate_up", Kind::Dense, (0..d, d), m.experts, up);
        self.push("experts.down", Kind::Dense, (share, m.width), m.experts, down);
        self.swiglu("shared.gate_up", "shared.down", "mlp.shared_experts", m.shared_width());
    }
}

//! The one builder: every forward of the model as a list of calls.
//!
//! Read it beside the operation table of `plugfold_abi::ops`.

use plugfold_abi::{
    Base, Buffer, BufferId, DType, Extent, List, MAX_DIMS, MAX_PARAMS, Maybe, NO_LAYER, Operand, Program,
    Reach, Shape, Span, Step, TextBuf,
};

use crate::config::{Attention, Indexer, Mlp, ModelConfig};
use crate::split::Split;

/// Site of the attention block in a layer.
pub const ATTENTION: u32 = 0;
/// Site of the feed-forward block in a layer.
pub const FEED_FORWARD: u32 = 1;
/// Site of what follows the blocks (the draft head's last norm).
pub const AFTER: u32 = 2;

/// Names of the programs.
pub mod kinds {
    /// Token rows through all layers.
    pub const FORWARD: &str = "forward";
    /// Rows of the multi-token-prediction layer.
    pub const MTP: &str = "mtp";
    /// Keep the first rows of a window.
    pub const COMMIT: &str = "commit";
}

/// Word of a shape: give out the streams after every layer.
pub const WORD_STREAMS: &str = "streams";
/// Word of a shape: the draft head's embedding is zero at position 0.
pub const WORD_ZERO_FIRST: &str = "zero_first";

/// Writes programs for one model and rank.
pub struct Builder<'a> {
    /// The model.
    pub config: &'a ModelConfig,
    /// This rank's share.
    pub split: Split,
}

/// A program being written.
struct Draft<'a> {
    config: &'a ModelConfig,
    split: Split,
    program: Program,
    layer: u32,
    site: u32,
}

fn dims(values: &[usize]) -> [u32; MAX_DIMS] {
    let mut out = [0; MAX_DIMS];
    for (o, v) in out.iter_mut().zip(values) {
        *o = *v as u32;
    }
    out
}

fn params(values: &[f32]) -> [f32; MAX_PARAMS] {
    let mut out = [0.0; MAX_PARAMS];
    out[..values.len()].copy_from_slice(values);
    out
}

fn names(list: &[&str]) -> List<TextBuf> {
    list.iter().map(|n| TextBuf::from(*n)).collect()
}

impl Builder<'_> {
    /// Writes the program of a shape.
    pub fn build(&self, shape: &Shape) -> Program {
        let mut draft = Draft {
            config: self.config,
            split: self.split,
            program: Program { shape: shape.clone(), buffers: List::new(), steps: List::new() },
            layer: NO_LAYER,
            site: ATTENTION,
        };
        match shape.kind.as_str() {
            kinds::MTP => draft.mtp(),
            kinds::COMMIT => draft.commit(),
            _ => draft.forward(),
        }
        draft.program
    }
}

/// What one step needs besides operation, layer and site.
#[derive(Default)]
struct Parts<'p> {
    inputs: &'p [Operand],
    outputs: &'p [Operand],
    weights: &'p [&'static str],
    caches: &'p [&'static str],
    dims: &'p [usize],
    params: &'p [f32],
    reach: Option<Reach>,
}

impl Draft<'_> {
    fn word(&self, name: &str) -> bool {
        self.program.shape.words.iter().any(|w| w.name.as_str() == name && w.value != 0)
    }

    fn buffer(&mut self, name: &str, base: Base, times: usize, cols: usize, dtype: DType) -> Operand {
        let name = match self.layer {
            NO_LAYER => name.to_owned(),
            layer => format!("{name}.{layer}.{}", self.site),
        };
        self.program.buffers.push(Buffer {
            name: name.into(),
            extent: Extent { base, times: times as u32 },
            cols: cols as u32,
            dtype,
            input: false,
            output: false,
        });
        Operand { buffer: self.program.buffers.len() as BufferId - 1, col: 0, cols: cols as u32 }
    }

    fn rows(&mut self, name: &str, cols: usize) -> Operand {
        self.buffer(name, Base::Rows, 1, cols, DType::F32)
    }

    fn step(&mut self, op: &str, parts: &Parts<'_>) {
        self.program.steps.push(Step {
            op: op.into(),
            layer: self.layer,
            site: self.site,
            rows: Span::ALL,
            seqs: Span::ALL,
            inputs: parts.inputs.to_vec().into(),
            outputs: parts.outputs.to_vec().into(),
            weights: names(parts.weights),
            caches: names(parts.caches),
            dims: dims(parts.dims),
            params: params(parts.params),
            reach: parts.reach.unwrap_or(Reach::Row),
            stream: 0,
            waits: List::new(),
            signal: Maybe::RNone,
        });
    }

    fn mark_output(&mut self, operand: Operand, name: String) {
        let buffer = &mut self.program.buffers[operand.buffer as usize];
        buffer.output = true;
        buffer.name = name.into();
    }

    /// Marks a buffer that is filled from outside.
    fn mark_input(&mut self, operand: Operand, name: &str) {
        let buffer = &mut self.program.buffers[operand.buffer as usize];
        buffer.input = true;
        buffer.name = name.into();
    }

    /// y = W x for weight `role`, `n` outputs.
    fn dense(&mut self, role: &'static str, name: &str, x: Operand, n: usize) -> Operand {
        let y = self.rows(name, n);
        self.step(
            "dense",
            &Parts {
                inputs: &[x],
                outputs: &[y],
                weights: &[role],
                dims: &[n, x.cols as usize],
                ..Parts::default()
            },
        );
        y
    }

    fn norm(&mut self, role: &'static str, name: &str, x: Operand) -> Operand {
        let y = self.rows(name, x.cols as usize);
        let eps = self.config.rms_norm_eps;
        self.step(
            "norm",
            &Parts {
                inputs: &[x],
                outputs: &[y],
                weights: &[role],
                dims: &[x.cols as usize],
                params: &[eps],
                ..Parts::default()
            },
        );
        y
    }

    /// A block's partial sum as parts in rank order: (operand, how many).
    fn sum(&mut self, partial: Operand) -> (Operand, usize) {
        let ranks = self.split.ranks;
        if ranks == 1 {
            return (partial, 1);
        }
        let d = self.config.hidden_size;
        let parts = self.rows("parts", ranks * d);
        self.step(
            "comm.sum",
            &Parts {
                inputs: &[partial],
                outputs: &[parts],
                dims: &[d, ranks],
                reach: Some(Reach::Exchange),
                ..Parts::default()
            },
        );
        (parts, ranks)
    }

    fn forward(&mut self) {
        let (n, d) = (self.config.hc.streams, self.config.hidden_size);
        let mut x = self.rows("embed", n * d);
        self.step(
            "embed",
            &Parts {
                outputs: &[x],
                weights: &["embed"],
                dims: &[n, d, self.config.vocab_size],
                ..Parts::default()
            },
        );
        let mut lists = None;
        let layers = self.config.layers.clone();
        for (i, kind) in layers.iter().enumerate() {
            self.layer = i as u32;
            self.site = ATTENTION;
            let (h, post, comb) = self.hyper_in(x);
            let y = match kind.attention {
                Attention::Kda => {
                    lists = None;
                    self.kda(h)
                }
                Attention::Mla { indexer } => self.mla(h, indexer, &mut lists),
            };
            x = self.hyper_out(x, y, post, comb);
            self.site = FEED_FORWARD;
            let (h, post, comb) = self.hyper_in(x);
            let y = match kind.mlp {
                Mlp::Dense => {
                    let width = self.split.share(self.config.dense_width).len();
                    self.swiglu("mlp.gate_up", "mlp.down", h, width)
                }
                Mlp::Sparse => self.moe(h),
            };
            x = self.hyper_out(x, y, post, comb);
            if self.word(WORD_STREAMS) {
                self.mark_output(x, format!("layer.{i}"));
            }
        }
        self.layer = NO_LAYER;
        self.site = ATTENTION;
        let rows = self.rows("rows", d);
        self.step(
            "final",
            &Parts {
                inputs: &[x],
                outputs: &[rows],
                weights: &["norm"],
                dims: &[n, d],
                params: &[self.config.rms_norm_eps],
                ..Parts::default()
            },
        );
        self.mark_output(rows, "rows".into());
        self.logits(rows);
    }

    /// Head and candidates over the wanted rows, as far as the shape asks for them.
    fn logits(&mut self, rows: Operand) {
        if self.program.shape.out_rows == 0 {
            return;
        }
        let d = self.config.hidden_size;
        (self.layer, self.site) = (NO_LAYER, ATTENTION);
        let picked = self.buffer("picked", Base::OutRows, 1, d, DType::F32);
        self.step(
            "rows.pick",
            &Parts { inputs: &[rows], outputs: &[picked], dims: &[d], ..Parts::default() },
        );
        let vocab = self.split.share(self.config.vocab_size);
        let logits = self.buffer("logits", Base::OutRows, 1, vocab.len(), DType::F32);
        self.step(
            "head",
            &Parts {
                inputs: &[picked],
                outputs: &[logits],
                weights: &["head"],
                dims: &[vocab.len(), d],
                ..Parts::default()
            },
        );
        self.mark_output(logits, "logits".into());
        let c = self.program.shape.candidates as usize;
        if c > 0 {
            let values = self.buffer("values", Base::OutRows, 1, c, DType::F32);
            let ids = self.buffer("ids", Base::OutRows, 1, c, DType::I32);
            self.step(
                "sample.candidates",
                &Parts {
                    inputs: &[logits],
                    outputs: &[values, ids],
                    dims: &[vocab.len(), c, vocab.start],
                    ..Parts::default()
                },
            );
            self.mark_output(values, "values".into());
            self.mark_output(ids, "ids".into());
        }
    }

    /// Collapses the streams to a block's normed input; also gives post and comb for the way back.
    fn hyper_in(&mut self, x: Operand) -> (Operand, Operand, Operand) {
        let c = self.config;
        let (n, d) = (c.hc.streams, c.hidden_size);
        let dots = self.rows("dots", c.hc.coefficients() + 1);
        self.step(
            "hc.dots",
            &Parts { inputs: &[x], outputs: &[dots], weights: &["hc.fn"], dims: &[n, d], ..Parts::default() },
        );
        let (h, post, comb) = (self.rows("h", d), self.rows("post", n), self.rows("comb", n * n));
        self.step(
            "hc.finish",
            &Parts {
                inputs: &[dots, x],
                outputs: &[h, post, comb],
                weights: &["hc.base", "hc.scale", "norm"],
                dims: &[n, d, c.hc.sinkhorn_iters],
                params: &[c.rms_norm_eps, c.hc.eps],
                ..Parts::default()
            },
        );
        (h, post, comb)
    }

    fn hyper_out(&mut self, x: Operand, partial: Operand, post: Operand, comb: Operand) -> Operand {
        let (parts, count) = self.sum(partial);
        let (n, d) = (self.config.hc.streams, self.config.hidden_size);
        let out = self.rows("x", n * d);
        self.step(
            "hc.post",
            &Parts {
                inputs: &[x, parts, post, comb],
                outputs: &[out],
                dims: &[n, d, count],
                ..Parts::default()
            },
        );
        out
    }

    fn kda(&mut self, h: Operand) -> Operand {
        let k = self.config.kda;
        let (heads, dim) = (self.split.share(k.heads).len(), k.head_dim);
        let c = heads * dim;
        let all = self.dense("kda.in", "kda.in", h, 3 * c + 2 * dim + heads);
        let part =
            |col: usize, cols: usize| Operand { buffer: all.buffer, col: col as u32, cols: cols as u32 };
        let f = self.dense("kda.f_b", "kda.f", part(3 * c, dim), c);
        let gate = self.dense("kda.g_b", "kda.gate", part(3 * c + dim, dim), c);
        let y = self.rows("kda.rows", c);
        self.step(
            "kda.mix",
            &Parts {
                inputs: &[part(0, 3 * c), f, gate, part(3 * c + 2 * dim, heads)],
                outputs: &[y],
                weights: &["kda.conv", "kda.dt_bias", "kda.a_log", "kda.o_norm"],
                caches: &["kda.state", "kda.conv", "kda.replay"],
                dims: &[heads, dim, k.taps, usize::from(k.lower_bound.is_some())],
                params: &[self.config.rms_norm_eps, k.lower_bound.unwrap_or(0.0)],
                reach: Some(Reach::Sequence),
            },
        );
        self.dense("kda.o", "kda.out", y, self.config.hidden_size)
    }

    fn mla(&mut self, h: Operand, indexer: Indexer, lists: &mut Option<(Operand, Operand)>) -> Operand {
        let (m, ix) = (self.config.mla, self.config.index);
        let heads = self.split.share(m.heads).len();
        let select = self.program.shape.select;
        let own = indexer == Indexer::Own;
        let extra = if own { 2 * ix.head_dim + ix.heads } else { 0 };
        let all = self.dense("mla.in", "mla.in", h, m.q_rank + m.kv_rank + extra);
        let part =
            |col: usize, cols: usize| Operand { buffer: all.buffer, col: col as u32, cols: cols as u32 };
        let a = self.norm("mla.q_norm", "mla.a", part(0, m.q_rank));
        let latent = self.norm("mla.kv_norm", "mla.latent", part(m.q_rank, m.kv_rank));
        self.step(
            "mla.write",
            &Parts {
                inputs: &[latent],
                weights: &["mla.kv_b"],
                caches: &["mla.kv"],
                dims: &[heads, m.key_dim, m.value_dim, m.kv_rank],
                reach: Some(Reach::Sequence),
                ..Parts::default()
            },
        );
        if own {
            let at = m.q_rank + m.kv_rank;
            self.step(
                "idx.write",
                &Parts {
                    inputs: &[part(at, ix.head_dim), part(at + ix.head_dim, ix.head_dim)],
                    weights: &["idx.k_norm", "idx.k_bias", "idx.ape"],
                    caches: &["idx.token", "idx.pool"],
                    dims: &[ix.head_dim, ix.pool],
                    params: &[1e-6],
                    reach: Some(Reach::Sequence),
                    ..Parts::default()
                },
            );
            *lists = select.then(|| self.select(a, part(at + 2 * ix.head_dim, ix.heads)));
        }
        let q = self.dense("mla.q_b", "mla.q", a, heads * m.key_dim);
        let y = self.rows("mla.rows", heads * m.value_dim);
        let scale = [1.0 / (m.key_dim as f32).sqrt()];
        let mut sizes = vec![heads, m.key_dim, m.value_dim, m.kv_rank];
        let mut inputs = vec![q];
        let mut op = "mla.dense";
        if let Some((list, count)) = lists {
            op = "mla.sparse";
            sizes.push(list.cols as usize);
            inputs.extend([*list, *count]);
        }
        self.step(
            op,
            &Parts {
                inputs: &inputs,
                outputs: &[y],
                caches: &["mla.kv"],
                dims: &sizes,
                params: &scale,
                reach: Some(Reach::Sequence),
                ..Parts::default()
            },
        );
        if !own {
            *lists = None; // a shared layer does not pass the choice on
        }
        self.dense("mla.o", "mla.out", y, self.config.hidden_size)
    }

    fn select(&mut self, a: Operand, w: Operand) -> (Operand, Operand) {
        let ix = self.config.index;
        let q = self.dense("idx.q_b", "idx.q", a, ix.heads * ix.head_dim);
        let longest = ix.topk + ix.pool - 1;
        let list = self.buffer("idx.list", Base::Rows, 1, longest, DType::I32);
        let count = self.buffer("idx.count", Base::Rows, 1, 1, DType::I32);
        self.step(
            "idx.select",
            &Parts {
                inputs: &[q, w],
                outputs: &[list, count],
                caches: &["idx.pool"],
                dims: &[ix.heads, ix.head_dim, ix.pool, ix.topk, longest],
                reach: Some(Reach::Sequence),
                ..Parts::default()
            },
        );
        (list, count)
    }

    fn swiglu(&mut self, up: &'static str, down: &'static str, h: Operand, width: usize) -> Operand {
        let both = self.dense(up, up, h, 2 * width);
        let act = self.rows("mlp.act", width);
        self.step(
            "mlp.act",
            &Parts {
                inputs: &[both],
                outputs: &[act],
                dims: &[width],
                params: &[self.config.swiglu_limit],
                ..Parts::default()
            },
        );
        self.dense(down, down, act, self.config.hidden_size)
    }

    fn moe(&mut self, h: Operand) -> Operand {
        let m = self.config.moe;
        let d = self.config.hidden_size;
        let (e, k, width) = (m.experts, m.per_token, self.split.share(m.width).len());
        let logits = self.rows("moe.logits", e);
        self.step(
            "moe.logits",
            &Parts {
                inputs: &[h],
                outputs: &[logits],
                weights: &["moe.router"],
                dims: &[e, d],
                ..Parts::default()
            },
        );
        let ids = self.buffer("moe.ids", Base::Rows, 1, k, DType::I32);
        let weights = self.rows("moe.weights", k);
        self.step(
            "moe.pick",
            &Parts {
                inputs: &[logits],
                outputs: &[ids, weights],
                weights: &["moe.bias"],
                dims: &[e, k, m.groups, m.groups_kept, usize::from(m.normalize)],
                params: &[m.scale],
                ..Parts::default()
            },
        );
        let order = self.buffer("moe.order", Base::Rows, k, 1, DType::I32);
        let starts = self.buffer("moe.starts", Base::One, e + 1, 1, DType::I32);
        let all = Some(Reach::All);
        self.step(
            "moe.group",
            &Parts {
                inputs: &[ids],
                outputs: &[order, starts],
                dims: &[e, k],
                reach: all,
                ..Parts::default()
            },
        );
        let z = self.buffer("moe.z", Base::Rows, k, 2 * width, DType::F32);
        self.step(
            "moe.up",
            &Parts {
                inputs: &[h, order, starts],
                outputs: &[z],
                weights: &["experts.gate_up"],
                dims: &[e, k, width, d],
                reach: all,
                ..Parts::default()
            },
        );
        let act = self.buffer("moe.act", Base::Rows, k, width, DType::F32);
        self.step(
            "moe.act",
            &Parts {
                inputs: &[z],
                outputs: &[act],
                dims: &[width],
                params: &[self.config.swiglu_limit],
                ..Parts::default()
            },
        );
        let y = self.buffer("moe.y", Base::Rows, k, d, DType::F32);
        self.step(
            "moe.down",
            &Parts {
                inputs: &[act, order, starts],
                outputs: &[y],
                weights: &["experts.down"],
                dims: &[e, k, width, d],
                reach: all,
                ..Parts::default()
            },
        );
        let shared_width = self.split.share(m.shared_width()).len();
        let shared = self.swiglu("shared.gate_up", "shared.down", h, shared_width);
        let out = self.rows("moe.out", d);
        self.step(
            "moe.combine",
            &Parts { inputs: &[y, weights, shared], outputs: &[out], dims: &[k, d], ..Parts::default() },
        );
        out
    }

    fn residual(&mut self, x: Operand, partial: Operand) -> Operand {
        let (parts, count) = self.sum(partial);
        let d = self.config.hidden_size;
        let out = self.rows("x", d);
        self.step(
            "residual",
            &Parts { inputs: &[x, parts], outputs: &[out], dims: &[d, count], ..Parts::default() },
        );
        out
    }

    /// The draft head: a row of hidden state and the token that follows it, to a row that predicts the token after.
    fn mtp(&mut self) {
        let d = self.config.hidden_size;
        let hidden = self.rows("hidden", d);
        self.mark_input(hidden, "hidden");
        self.layer = self.config.layers.len() as u32;
        let both = self.rows("mtp.in", 2 * d);
        self.step(
            "mtp.in",
            &Parts {
                inputs: &[hidden],
                outputs: &[both],
                weights: &["embed", "mtp.enorm", "mtp.hnorm"],
                dims: &[d, self.config.vocab_size, usize::from(self.word(WORD_ZERO_FIRST))],
                params: &[self.config.rms_norm_eps],
                ..Parts::default()
            },
        );
        let x = self.dense("mtp.eh", "mtp.x", both, d);
        let h = self.norm("norm", "h", x);
        let y = self.mla(h, Indexer::Own, &mut None);
        let x = self.residual(x, y);
        self.site = FEED_FORWARD;
        let h = self.norm("norm", "h", x);
        let y = self.moe(h);
        let x = self.residual(x, y);
        self.site = AFTER;
        let rows = self.norm("norm", "rows", x);
        self.mark_output(rows, "rows".into());
        self.logits(rows);
    }

    /// Keeps the first `keep` rows of a window: recurrent state of the layers that have one.
    fn commit(&mut self) {
        let k = self.config.kda;
        let layers = self.config.layers.clone();
        for (i, _) in layers.iter().enumerate().filter(|(_, l)| l.attention == Attention::Kda) {
            self.layer = i as u32;
            self.step(
                "kda.commit",
                &Parts {
                    caches: &["kda.state", "kda.conv", "kda.replay"],
                    dims: &[self.split.share(k.heads).len(), k.head_dim, k.taps],
                    reach: Some(Reach::Sequence),
                    ..Parts::default()
                },
            );
        }
    }
}

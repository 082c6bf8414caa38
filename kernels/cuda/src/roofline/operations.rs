//! The operations that are timed, at sizes of a model, and what each has to do at least.

use plugfold_abi::{Addressing, Phase};

use super::Cost;
use super::place::{Family, Input, Output, Stored, Task};

/// Sizes of a model.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// Hidden size.
    pub hidden: usize,
    /// Streams of the hyper-connections.
    pub streams: usize,
    /// Inner width of the dense feed-forward layers.
    pub inner: usize,
    /// Experts of the router.
    pub experts: usize,
    /// Experts that are stored for timing: enough that none is in the cache.
    pub stored: usize,
    /// Experts a row.
    pub slots: usize,
    /// Inner width of an expert.
    pub expert_inner: usize,
    /// Linear attention: heads and their width.
    pub kda: (usize, usize),
    /// Attention: heads, channels of a key, of a value, and of the latent row.
    pub mla: (usize, usize, usize, usize),
    /// Indexer: heads, their width, tokens of a pool, tokens that are picked.
    pub index: (usize, usize, usize, usize),
    /// Tokens.
    pub vocab: usize,
    /// Candidates of a row.
    pub candidates: usize,
    /// Positions before the rows of attention over all of them.
    pub context: usize,
    /// Positions before the rows of the indexer.
    pub long: usize,
    /// Rows of a short window, of a longer one, and of a piece of a prompt.
    pub rows: [usize; 3],
    /// Vision tower: patches of an image, heads and their width, patches of a row, and its width.
    pub vision: (usize, usize, usize, usize, usize),
    /// Outputs and inputs of products.
    pub products: Vec<(usize, usize)>,
}

impl Sizes {
    /// Those of the published model, on one rank.
    pub fn published() -> Self {
        Self {
            hidden: 4096,
            streams: 4,
            inner: 12_288,
            experts: 288,
            stored: 32,
            slots: 8,
            expert_inner: 2048,
            kda: (64, 128),
            mla: (64, 256, 256, 512),
            index: (32, 128, 4, 2048),
            vocab: 154_880,
            candidates: 64,
            context: 2048,
            long: 65_536,
            rows: [4, 8, 512],
            vision: (1024, 16, 64, 4, 4096),
            products: vec![(24_576, 4096), (12_288, 4096), (4096, 16_384), (4096, 4096)],
        }
    }

    /// So small that even an emulated machine runs them all soon.
    pub fn least() -> Self {
        Self {
            hidden: 128,
            streams: 4,
            inner: 64,
            experts: 16,
            stored: 4,
            slots: 2,
            expert_inner: 128,
            kda: (1, 32),
            mla: (2, 32, 32, 128),
            index: (2, 32, 4, 16),
            vocab: 128,
            candidates: 4,
            context: 20,
            long: 120,
            rows: [2, 3, 17],
            vision: (8, 2, 8, 4, 32),
            products: vec![(128, 128)],
        }
    }
}

fn counted(rows: usize) -> String {
    if rows == 1 { "1 row".into() } else { format!("{rows} rows") }
}

/// What every operation waits for at least: a launch, and a fetch of its operands.
const ONE: Cost = Cost {
    bytes: 0.0,
    fmas: 0.0,
    decoded: 0.0,
    launches: 1.0,
    steps: 0.0,
    divisions: 0.0,
    fetches: 1.0,
    far: 0.0,
};
/// The same, where the first operand comes from memory: a weight or a cache that other calls have driven out.
const FAR: Cost = Cost { fetches: 0.0, far: 1.0, ..ONE };
/// Steps of an exponential: `num::exp` of the reference.
const EXP: f64 = 13.0;
/// Steps of a sum of 32 lanes, added in pairs.
const TREE: f64 = 5.0;
/// Steps of a sum of `n` squares: a chain a lane, then the lanes.
fn squares(n: usize) -> f64 {
    n.div_ceil(32) as f64 + TREE
}
/// Steps and divisions of the factor of an RMS norm (mean, ε, root, one over it), and the two products with it.
const FACTOR: (f64, f64) = (3.0, 3.0);
/// Steps of a product's output: a chain of 256 of k, then the chains.
fn chains(k: usize) -> f64 {
    (k.min(256) + k.div_ceil(256)) as f64
}
/// The same in EXL3: a Hadamard product of 128 before and behind (a scale, seven sums, a factor each), a quarter of a chain of
/// 1,024 a lane, then lanes and chains.
fn coded_chains(k: usize) -> f64 {
    (2 * 9 + k.min(1024) / 4 + 2 + k.div_ceil(1024)) as f64
}

fn task(op: &'static str, name: String, rows: usize, cost: Cost) -> Task {
    Task {
        name,
        op,
        phase: Phase::Window,
        rows,
        start: 0,
        keep: rows,
        inputs: Vec::new(),
        outputs: Vec::new(),
        weights: Vec::new(),
        caches: Vec::new(),
        dims: Vec::new(),
        params: Vec::new(),
        costs: vec![cost],
    }
}

/// A task named by its operation and rows.
fn plain(op: &'static str, rows: usize, cost: Cost) -> Task {
    task(op, format!("{op}, {}", counted(rows)), rows, cost)
}

fn f32s(count: usize) -> f64 {
    count as f64 * 4.0
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Bf16,
    Exl3,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Bf16 => "bf16",
            Kind::Exl3 => "exl3 4 bits",
        }
    }
    fn stored(self, n: usize, k: usize, count: usize) -> Stored {
        match self {
            Kind::Bf16 => Stored::Panels { n, k, count },
            Kind::Exl3 => Stored::Trellis { n, k, count },
        }
    }
    /// Of `used` matrices `[n, k]` and `rows` rows in all.
    fn cost(self, n: usize, k: usize, used: usize, rows: usize) -> Cost {
        let (weights, fmas) = ((used * n * k) as f64, (rows * n * k) as f64);
        match self {
            Kind::Bf16 => Cost { bytes: 2.0 * weights, fmas, steps: chains(k), ..FAR },
            Kind::Exl3 => Cost {
                bytes: 0.5 * weights,
                decoded: weights,
                fmas: fmas - weights,
                steps: coded_chains(k),
                ..FAR
            },
        }
    }
}

fn dense(kind: Kind, rows: usize, n: usize, k: usize) -> Task {
    let name = format!("dense {} [{n}, {k}], {}", kind.name(), counted(rows));
    Task {
        inputs: vec![Input::random(rows, k)],
        outputs: vec![Output::floats(rows, n)],
        weights: vec![kind.stored(n, k, 1)],
        dims: vec![n, k],
        ..task("dense", name, rows, kind.cost(n, k, 1, rows))
    }
}

fn head(kind: Kind, s: &Sizes) -> Task {
    let (n, k) = (s.vocab, s.hidden);
    let name = format!("head {} [{n}, {k}], 1 row", kind.name());
    Task { op: "head", name, ..dense(kind, 1, n, k) }
}

/// `moe.up` or `moe.down`: pairs are spread evenly over as many experts as there are pairs, up to all that are stored.
fn experts(up: bool, kind: Kind, rows: usize, s: &Sizes) -> Task {
    let pairs = rows * s.slots;
    let order: Vec<i32> = (0..pairs as i32).collect();
    let starts: Vec<i32> = (0..=s.stored).map(|e| (e * pairs / s.stored) as i32).collect();
    let used = s.stored.min(pairs);
    let (op, x, n, k) = if up {
        ("moe.up", rows, 2 * s.expert_inner, s.hidden)
    } else {
        ("moe.down", pairs, s.hidden, s.expert_inner)
    };
    let name = format!("{op} {}, {}", kind.name(), counted(rows));
    // Which expert, then its weights.
    let cost = Cost { fetches: 1.0, ..kind.cost(n, k, used, pairs) };
    Task {
        inputs: vec![Input::random(x, k), Input::ints(&order, 1), Input::ints(&starts, 1)],
        outputs: vec![Output::floats(pairs, n)],
        weights: vec![kind.stored(n, k, s.stored)],
        dims: vec![s.stored, s.slots, s.expert_inner, s.hidden],
        ..task(op, name, rows, cost)
    }
}

fn kda_families(s: &Sizes, records: usize) -> Vec<Family> {
    let (h, k) = s.kda;
    let c = h * k;
    let addressing = Addressing::State;
    vec![
        Family { rows: 1, row: c * k, buffers: 2, addressing },
        Family { rows: 1, row: 9 * c, buffers: 2, addressing },
        Family { rows: records, row: 6 * c + h, buffers: 1, addressing },
    ]
}

fn kda_mix(rows: usize, s: &Sizes) -> Task {
    let (h, k) = s.kda;
    let c = h * k;
    // Convolution, its SiLU, norms of q and k; a row's decay, what its key sees and what is written; the last row's output; its
    // norm and gate.
    let steps =
        4.0 + EXP + 2.0 + squares(k) + 2.0 + rows as f64 * (k + 4) as f64 + k as f64 + squares(k) + 5.0;
    let cost = Cost {
        bytes: f32s(2 * c * k + rows * 6 * c),
        fmas: (rows * 3 * c * k) as f64,
        steps,
        divisions: 6.0,
        fetches: 1.0,
        ..FAR
    };
    Task {
        phase: if rows > 16 { Phase::Prefill } else { Phase::Window },
        inputs: vec![
            Input::random(rows, 3 * c),
            Input::random(rows, c),
            Input::random(rows, c),
            Input::random(rows, h),
        ],
        outputs: vec![Output::floats(rows, c)],
        weights: vec![Stored::Vector(3 * c * 4), Stored::Vector(c), Stored::Vector(h), Stored::Vector(k)],
        caches: kda_families(s, 16),
        dims: vec![h, k, 4, 1],
        params: vec![1e-5, -5.0],
        ..plain("kda.mix", rows, cost)
    }
}

fn kda_commit(s: &Sizes) -> Task {
    let ((h, k), rows) = (s.kda, s.rows[1]);
    let (c, keep) = (h * k, rows / 2);
    let cost = Cost {
        bytes: f32s(2 * c * k + keep * 6 * c),
        fmas: (keep * 2 * c * k) as f64,
        steps: keep as f64 * (k + 4) as f64,
        fetches: 1.0,
        ..FAR
    };
    Task {
        keep,
        caches: kda_families(s, 16),
        dims: vec![h, k, 4],
        ..task("kda.commit", format!("kda.commit, {keep} of {rows} rows"), rows, cost)
    }
}

fn kv(s: &Sizes, rows: usize) -> Family {
    let (h, d, v, _) = s.mla;
    Family { rows, row: h * (d + v), buffers: 1, addressing: Addressing::Linear }
}

fn mla_write(kind: Kind, s: &Sizes) -> Task {
    let (h, d, v, r) = s.mla;
    let n = h * (d + v);
    let mut cost = kind.cost(n, r, 1, 1);
    cost.bytes += f32s(n);
    Task {
        start: s.context,
        inputs: vec![Input::random(1, r)],
        weights: vec![kind.stored(n, r, 1)],
        caches: vec![kv(s, s.context + 1)],
        dims: vec![h, d, v, r],
        ..task("mla.write", format!("mla.write {}, 1 row", kind.name()), 1, cost)
    }
}

/// Of `keys` keys for each of so many rows, of which all rows together meet `met`. A score, then a chain over all keys: a
/// multiply-add each, and a factor a tile of 16.
fn attention(s: &Sizes, rows: usize, keys: usize, met: usize) -> Cost {
    let (h, d, v, _) = s.mla;
    Cost {
        bytes: f32s(met * h * (d + v)),
        fmas: (rows * keys * h * (d + v)) as f64,
        steps: squares(d) + 1.0 + EXP + (keys + keys.div_ceil(16)) as f64 + 1.0,
        divisions: 1.0,
        fetches: 2.0,
        ..ONE
    }
}

fn mla_dense(rows: usize, s: &Sizes) -> Task {
    let (h, d, v, r) = s.mla;
    let name = format!("mla.dense, {} at {}", counted(rows), s.context);
    Task {
        start: s.context,
        inputs: vec![Input::random(rows, h * d)],
        outputs: vec![Output::floats(rows, h * v)],
        caches: vec![kv(s, s.context + rows)],
        dims: vec![h, d, v, r],
        params: vec![0.0625],
        ..task("mla.dense", name, rows, attention(s, rows, s.context, s.context))
    }
}

/// A row that sees every second position.
fn mla_sparse(s: &Sizes) -> Task {
    let ((h, d, v, r), (.., top)) = (s.mla, s.index);
    let list: Vec<i32> = (0..top as i32).map(|i| 2 * i).collect();
    // Which key, then the key.
    let cost = Cost { fetches: 3.0, ..attention(s, 1, top, top) };
    Task {
        start: 2 * top,
        inputs: vec![Input::random(1, h * d), Input::ints(&list, top), Input::ints(&[top as i32], 1)],
        outputs: vec![Output::floats(1, h * v)],
        caches: vec![kv(s, 2 * top + 1)],
        dims: vec![h, d, v, r, top],
        params: vec![0.0625],
        ..task("mla.sparse", format!("mla.sparse, 1 row of {top} keys"), 1, cost)
    }
}

fn idx_write(s: &Sizes) -> Task {
    let (_, d, pool, _) = s.index;
    // A pool ends with the row: its norm, then the pool's shares and their sum.
    let steps = 2.0 * squares(d) + 5.0 + 2.0 * pool as f64 + EXP + pool as f64;
    let cost = Cost { bytes: f32s((pool + 2) * 2 * d), steps, divisions: 5.0, fetches: 2.0, ..ONE };
    Task {
        start: 4 * pool - 1,
        inputs: vec![Input::random(1, d), Input::random(1, d)],
        weights: vec![Stored::Vector(d), Stored::Vector(d), Stored::Vector(pool * d)],
        caches: vec![
            Family { rows: 4 * pool, row: 2 * d, buffers: 1, addressing: Addressing::Linear },
            Family { rows: 4, row: d, buffers: 1, addressing: Addressing::Linear },
        ],
        dims: vec![d, pool],
        params: vec![1e-6],
        ..plain("idx.write", 1, cost)
    }
}

fn idx_select(s: &Sizes) -> Task {
    let (heads, d, pool, top) = s.index;
    let pools = s.long / pool;
    // Every score is there before the first pool is picked: two launches, each with a fetch. A score is a chain of channels,
    // then one of heads a lane and the lanes.
    let scores = Cost {
        bytes: f32s(pools * d),
        fmas: (pools * d * heads) as f64,
        steps: (d + heads.div_ceil(16)) as f64 + 2.0 + 4.0,
        fetches: 1.0,
        ..FAR
    };
    Task {
        costs: vec![scores, Cost { bytes: f32s(pools + top), ..ONE }],
        start: s.long,
        inputs: vec![Input::random(1, heads * d), Input::random(1, heads)],
        outputs: vec![Output::ints(1, top + pool - 1), Output::ints(1, 1)],
        caches: vec![Family { rows: pools + 1, row: d, buffers: 1, addressing: Addressing::Linear }],
        dims: vec![heads, d, pool, top, top + pool - 1],
        ..task("idx.select", format!("idx.select at {}", s.long), 1, ONE)
    }
}

fn hyper(rows: usize, s: &Sizes) -> [Task; 3] {
    let (n, d) = (s.streams, s.hidden);
    let mixes = (2 + n) * n;
    let dots = Cost {
        bytes: (mixes * n * d * 2) as f64 + f32s(rows * n * d),
        fmas: (rows * (mixes + 1) * n * d) as f64,
        steps: squares(n * d).max(chains(n * d)),
        ..ONE
    };
    // The coefficients: the norm's factor, a softmax over a row of n, then 39 sums of n with a division each (with 20
    // iterations). The numbers: a logistic, n multiply-adds, the sum of squares, the factor.
    let turns = 2.0 * 20.0 - 1.0;
    let coefficients =
        (1.0 + 2.0 + n as f64 + EXP + n as f64 + 1.0 + turns * (n as f64 + 1.0), 3.0 + 1.0 + turns);
    let finish = Cost {
        bytes: f32s(rows * (n + 1) * d),
        fmas: (rows * (n + 2) * d) as f64,
        steps: coefficients.0.max(EXP + 4.0 + n as f64 + squares(d) + FACTOR.0),
        divisions: coefficients.1,
        ..ONE
    };
    let post = Cost {
        bytes: f32s(rows * (2 * n + 1) * d),
        fmas: (rows * n * (n + 1) * d) as f64,
        steps: n as f64 + 1.0,
        ..ONE
    };
    // Sums of squares are not negative.
    let ones = vec![1.0f32.to_bits(); rows * (mixes + 1)];
    [
        Task {
            inputs: vec![Input::random(rows, n * d)],
            outputs: vec![Output::floats(rows, mixes + 1)],
            weights: vec![Stored::Panels { n: mixes, k: n * d, count: 1 }],
            dims: vec![n, d],
            ..plain("hc.dots", rows, dots)
        },
        Task {
            inputs: vec![
                Input { rows, cols: mixes + 1, words: Some(ones), float: true },
                Input::random(rows, n * d),
            ],
            outputs: vec![Output::floats(rows, d), Output::floats(rows, n), Output::floats(rows, n * n)],
            weights: vec![Stored::Vector(mixes), Stored::Vector(3), Stored::Vector(d)],
            dims: vec![n, d, 20],
            params: vec![1e-5, 1e-6],
            ..plain("hc.finish", rows, finish)
        },
        Task {
            inputs: vec![
                Input::random(rows, n * d),
                Input::random(rows, d),
                Input::random(rows, n),
                Input::random(rows, n * n),
            ],
            outputs: vec![Output::floats(rows, n * d)],
            dims: vec![n, d, 1],
            ..plain("hc.post", rows, post)
        },
    ]
}

fn routing(s: &Sizes) -> [Task; 4] {
    let (e, k, d) = (s.experts, s.slots, s.hidden);
    // Different experts, as a row has them.
    let ids: Vec<i32> = (0..k).map(|i| (i * e / k) as i32).collect();
    // A logistic, then so often the largest of all, a comparison a doubling.
    let pick = Cost {
        bytes: f32s(2 * e),
        steps: EXP + 2.0 + k as f64 * f64::from(e.ilog2() + 1),
        divisions: 2.0,
        ..ONE
    };
    let combine = Cost { bytes: f32s((k + 2) * d), fmas: (k * d) as f64, steps: k as f64 + 1.0, ..ONE };
    [
        Task { op: "moe.logits", name: "moe.logits, 1 row".into(), ..dense(Kind::Bf16, 1, e, d) },
        Task {
            inputs: vec![Input::random(1, e)],
            outputs: vec![Output::ints(1, k), Output::floats(1, k)],
            weights: vec![Stored::Vector(e)],
            dims: vec![e, k, 1, 1, 1],
            params: vec![2.5],
            ..plain("moe.pick", 1, pick)
        },
        Task {
            inputs: vec![Input::ints(&ids, k)],
            outputs: vec![Output::ints(k, 1), Output::ints(e + 1, 1)],
            dims: vec![e, k],
            ..plain("moe.group", 1, Cost { bytes: f32s(2 * k + e), ..ONE })
        },
        Task {
            inputs: vec![Input::random(k, d), Input::random(1, k), Input::random(1, d)],
            outputs: vec![Output::floats(1, d)],
            dims: vec![k, d],
            ..plain("moe.combine", 1, combine)
        },
    ]
}

/// The rest of the rows, one each.
fn rows(s: &Sizes) -> Vec<Task> {
    let (n, d) = (s.streams, s.hidden);
    let act = |op, rows: usize, width: usize| Task {
        inputs: vec![Input::random(rows, 2 * width)],
        outputs: vec![Output::floats(rows, width)],
        dims: vec![width],
        params: vec![10.0],
        ..plain(op, 1, Cost { bytes: f32s(3 * rows * width), steps: EXP + 4.0, divisions: 1.0, ..ONE })
    };
    let norm_steps = squares(d) + FACTOR.0;
    vec![
        Task {
            outputs: vec![Output::floats(1, n * d)],
            weights: vec![Stored::Rows { n: s.vocab, k: d }],
            dims: vec![n, d, s.vocab],
            // Which token, then its row.
            ..plain("embed", 1, Cost { bytes: 2.0 * d as f64 + f32s(n * d), fetches: 2.0, ..ONE })
        },
        Task {
            inputs: vec![Input::random(1, d)],
            outputs: vec![Output::floats(1, 2 * d)],
            weights: vec![Stored::Rows { n: s.vocab, k: d }, Stored::Vector(d), Stored::Vector(d)],
            dims: vec![d, s.vocab, 0],
            params: vec![1e-5],
            ..plain(
                "mtp.in",
                1,
                Cost {
                    bytes: 2.0 * d as f64 + f32s(3 * d),
                    steps: norm_steps,
                    divisions: FACTOR.1,
                    fetches: 2.0,
                    ..ONE
                },
            )
        },
        Task {
            inputs: vec![Input::random(1, d)],
            outputs: vec![Output::floats(1, d)],
            weights: vec![Stored::Vector(d)],
            dims: vec![d],
            params: vec![1e-5],
            ..plain("norm", 1, Cost { bytes: f32s(3 * d), steps: norm_steps, divisions: FACTOR.1, ..ONE })
        },
        act("mlp.act", 1, s.inner),
        act("moe.act", s.slots, s.expert_inner),
        Task {
            inputs: vec![Input::random(1, d), Input::random(1, d)],
            outputs: vec![Output::floats(1, d)],
            dims: vec![d, 1],
            ..plain("residual", 1, Cost { bytes: f32s(3 * d), steps: 1.0, ..ONE })
        },
        Task {
            inputs: vec![Input::random(1, d)],
            outputs: vec![Output::floats(1, d)],
            dims: vec![d, 1],
            ..plain("comm.sum", 1, Cost { bytes: f32s(2 * d), ..ONE })
        },
        Task {
            inputs: vec![Input::random(1, n * d)],
            outputs: vec![Output::floats(1, d)],
            dims: vec![n, d],
            ..plain("tap", 1, Cost { bytes: f32s((n + 1) * d), steps: n as f64, ..ONE })
        },
        Task {
            inputs: vec![Input::random(1, n * d)],
            outputs: vec![Output::floats(1, d)],
            weights: vec![Stored::Vector(d)],
            dims: vec![n, d],
            params: vec![1e-5],
            ..plain(
                "final",
                1,
                Cost { bytes: f32s((n + 2) * d), steps: n as f64 + norm_steps, divisions: FACTOR.1, ..ONE },
            )
        },
        Task {
            inputs: vec![Input::random(1, d)],
            outputs: vec![Output::floats(1, d)],
            dims: vec![d],
            ..plain("rows.pick", 1, Cost { bytes: f32s(2 * d), fetches: 2.0, ..ONE })
        },
        sampling(s),
    ]
}

/// What the tower has beside products, norms and activations, for all patches of an image.
fn vision(s: &Sizes) -> [Task; 4] {
    let (patches, heads, d, places, width) = s.vision;
    let (w, merged) = (heads * d, patches / places);
    let rotate = Cost {
        bytes: f32s(patches * (6 * w + d)),
        steps: squares(d) + FACTOR.0 + 3.0,
        divisions: FACTOR.1,
        ..ONE
    };
    let attend = Cost {
        bytes: f32s(patches * 4 * w),
        fmas: (patches * patches * 2 * w) as f64,
        steps: squares(d) + 1.0 + EXP + (patches + patches.div_ceil(16)) as f64 + 1.0,
        divisions: 1.0,
        fetches: 2.0,
        ..ONE
    };
    let of = |op: &str, rows: usize| format!("{op}, {rows} rows");
    [
        Task {
            inputs: vec![Input::random(patches, 3 * w), Input::random(patches, d)],
            outputs: vec![Output::floats(patches, w), Output::floats(patches, 2 * w)],
            weights: vec![Stored::Vector(d), Stored::Vector(d)],
            dims: vec![heads, d],
            params: vec![1e-5],
            ..task("vision.rotate", of("vision.rotate", patches), patches, rotate)
        },
        Task {
            inputs: vec![Input::random(patches, w), Input::random(patches, 2 * w)],
            outputs: vec![Output::floats(patches, w)],
            dims: vec![heads, d],
            params: vec![0.125],
            ..task("vision.attend", of("vision.attend", patches), patches, attend)
        },
        Task {
            inputs: vec![Input::random(patches, w)],
            outputs: vec![Output::floats(merged, w * places)],
            dims: vec![w, places],
            ..task(
                "vision.gather",
                of("vision.gather", merged),
                merged,
                Cost { bytes: f32s(2 * patches * w), ..ONE },
            )
        },
        Task {
            inputs: vec![Input::random(merged, width)],
            outputs: vec![Output::floats(merged, width)],
            weights: vec![Stored::Vector(width), Stored::Vector(width)],
            dims: vec![width],
            params: vec![1e-5],
            // A sum, squares, the norm, and 28 multiply-adds in double precision between a few more steps.
            ..task(
                "vision.gelu",
                of("vision.gelu", merged),
                merged,
                Cost {
                    bytes: f32s(2 * merged * width),
                    fmas: (merged * width * 29) as f64,
                    steps: 2.0 * squares(width) + FACTOR.0 + 3.0 + 28.0 + 7.0,
                    divisions: 1.0 + FACTOR.1,
                    ..ONE
                },
            )
        },
    ]
}

/// What each slice keeps is there before the best of all are found: two launches, each with a fetch.
fn sampling(s: &Sizes) -> Task {
    let (n, c) = (s.vocab, s.candidates);
    Task {
        costs: vec![Cost { bytes: f32s(n), ..ONE }, Cost { bytes: f32s(2 * c), ..ONE }],
        inputs: vec![Input::random(1, n)],
        outputs: vec![Output::floats(1, c), Output::ints(1, c)],
        dims: vec![n, c, 0],
        ..task("sample.candidates", format!("sample.candidates, {c} of {n}"), 1, ONE)
    }
}

/// All of them.
pub(super) fn all(s: &Sizes) -> Vec<Task> {
    use Kind::{Bf16, Exl3};
    let [four, eight, many] = s.rows;
    let mut all = rows(s);
    all.extend(hyper(1, s).into_iter().chain(hyper(eight, s)));
    for (i, (n, k)) in s.products.iter().enumerate() {
        let counts = if i == 0 { vec![1, four, eight, 2 * eight, many] } else { vec![1, eight] };
        for rows in counts {
            all.extend([dense(Bf16, rows, *n, *k), dense(Exl3, rows, *n, *k)]);
        }
    }
    all.extend([head(Bf16, s), head(Exl3, s)]);
    all.extend([1, four, eight, many].map(|r| kda_mix(r, s)));
    all.push(kda_commit(s));
    all.extend([mla_write(Bf16, s), mla_write(Exl3, s)]);
    all.extend([1, eight, many / 2].map(|r| mla_dense(r, s)));
    all.extend([mla_sparse(s), idx_write(s), idx_select(s)]);
    all.extend(routing(s));
    all.extend(vision(s));
    for up in [true, false] {
        for rows in [1, eight, many / 2] {
            all.extend([experts(up, Bf16, rows, s), experts(up, Exl3, rows, s)]);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_call_has_a_name_of_its_own_and_something_to_do() {
        for sizes in [Sizes::published(), Sizes::least()] {
            let all = all(&sizes);
            let names: BTreeSet<&str> = all.iter().map(|t| &t.name[..]).collect();
            assert_eq!(names.len(), all.len());
            for t in &all {
                for cost in &t.costs {
                    let waits = cost.launches >= 1.0 && cost.fetches + cost.far >= 1.0;
                    assert!(cost.bytes > 0.0 && waits, "{}", t.name);
                }
            }
        }
    }

    #[test]
    fn chains_are_those_of_the_reference() {
        // 16,384 squares in 32 sums, then five additions.
        assert_eq!(squares(16_384), 512.0 + 5.0);
        // 64 chains of 256.
        assert_eq!(chains(16_384), 256.0 + 64.0);
        assert_eq!(chains(100), 101.0);
        assert_eq!(coded_chains(4096), 18.0 + 256.0 + 2.0 + 4.0);
        // A row of a head of 128: its key sees 128 channels, and 4 steps lie around that.
        let of = |rows| kda_mix(rows, &Sizes::published()).costs[0].steps;
        assert_eq!(of(8) - of(7), 132.0);
    }
}

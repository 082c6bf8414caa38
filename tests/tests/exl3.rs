//! Checkpoints in EXL3 through the whole engine: against the same weights as plain numbers, on several ranks, and in
//! every company of rows.
//!
//! Any words are a valid trellis, so the coded matrices of these models are random words with scales that give them the
//! size of trained ones.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use half::f16;
use plugfold::exact::{GATES, Setup, Verdict, run};
use plugfold_0060_latent_kv as latent;
use plugfold_abi::points::LayoutLinkObject;
use plugfold_abi::{PassObject, ProviderObject};
use plugfold_engine::checkpoint::Checkpoint;
use plugfold_engine::core::CoreOptions;
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::Options;
use plugfold_engine::service::{Sampling, Service};
use plugfold_kernels::cpu::exl3::{Codebook, Embedding, Layer, Planes, Rate, quantize};
use plugfold_tests::goldens::{tiny_dir, within};
use plugfold_tests::model::{engine, ids, on_ranks, on_ranks_with, options, plain, reply, request};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::json;
use tempfile::TempDir;

/// A tensor to write.
type Tensor = (Dtype, Vec<usize>, Vec<u8>);

/// A checkpoint of the tiny model's shape, coded, and the same one as plain numbers.
struct Pair {
    coded: TempDir,
    plain: TempDir,
}

fn numbers(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed ^ 0x9e37_79b9_7f4a_7c15;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }
}

/// Random words of a layer whose weights are about `rms` large.
fn layer(name: &str, inputs: usize, outputs: usize, codebook: Codebook, rate: Rate, rms: f32) -> Layer {
    let mut next = numbers(name.bytes().fold(0, |h: u64, b| h.wrapping_mul(31) + u64::from(b)));
    let (k, n) = (inputs.next_multiple_of(128), outputs.next_multiple_of(128));
    let deviation = if codebook == Codebook::Mul1 { 1.0 } else { 1.24 };
    let trellis = (0..k / 16 * (n / 16) * rate.words()).map(|_| next() as u32).collect();
    let mut scales = |count: usize, size: f32| -> Vec<f16> {
        (0..count)
            .map(|_| {
                let bits = next();
                let value = size * (0.75 + (bits % 1000) as f32 / 2000.0);
                f16::from_f32(if bits >> 40 & 1 == 1 { -value } else { value })
            })
            .collect()
    };
    let (suh, svh) = (scales(k, rms / deviation), scales(n, 1.0));
    Layer::from_planes(name, Planes { rate, codebook, trellis, suh, svh, bias: None }).unwrap()
}

fn is_coded(name: &str) -> bool {
    let Some(module) = name.strip_suffix(".weight") else { return false };
    let last = module.rsplit('.').next().unwrap_or_default();
    !module.contains("visual")
        && (module == "lm_head"
            || module.contains("self_attn.") && ["q_proj", "k_proj", "v_proj", "o_proj"].contains(&last)
            || ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "wq_b", "eh_proj"].contains(&last)
            || module.contains(".mlp.") && ["gate_proj", "up_proj", "down_proj"].contains(&last))
}

fn write(dir: &Path, tensors: &BTreeMap<String, Tensor>, exl3: bool) {
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(tiny_dir().join("config.json")).unwrap()).unwrap();
    if exl3 {
        config["quantization_config"] = json!({"quant_method": "exl3"});
    }
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let views = tensors
        .iter()
        .map(|(name, (dtype, shape, data))| (name, TensorView::new(*dtype, shape.clone(), data).unwrap()));
    safetensors::serialize_to_file(views, None, &dir.join("model.safetensors")).unwrap();
}

/// The stored tensors of a layer.
fn store(coded: &mut BTreeMap<String, Tensor>, name: &str, layer: &Layer) {
    use plugfold_kernels::cpu::exl3::Dtype as Stored;
    for t in quantize::tensors(name, layer) {
        let dtype = match t.dtype {
            Stored::I16 => Dtype::I16,
            Stored::I32 => Dtype::I32,
            _ => Dtype::F16,
        };
        coded.insert(t.name, (dtype, t.shape, t.data));
    }
}

/// Rows `[out, in]` of a layer's weight, without padding.
fn rows(layer: &Layer, outputs: std::ops::Range<usize>, inputs: usize) -> Vec<u8> {
    let (w, n) = (layer.weight(), layer.n());
    outputs
        .flat_map(|o| (0..inputs).map(move |i| (i, o)))
        .flat_map(|(i, o)| w[i * n + o].to_le_bytes())
        .collect()
}

/// Codes the matrices that `pick` gives a codebook and a rate. With `fused`, the projections to q, k and v of linear
/// attention are one layer, as converters write them.
fn pair(fused: bool, pick: impl Fn(usize, &str) -> Option<(Codebook, f32)>) -> Pair {
    let (coded, plain) = maps(fused, pick);
    let pair = Pair { coded: tempfile::tempdir().unwrap(), plain: tempfile::tempdir().unwrap() };
    write(pair.coded.path(), &coded, true);
    write(pair.plain.path(), &plain, false);
    pair
}

/// The tensors of both.
fn maps(
    fused: bool,
    pick: impl Fn(usize, &str) -> Option<(Codebook, f32)>,
) -> (BTreeMap<String, Tensor>, BTreeMap<String, Tensor>) {
    let source = Checkpoint::open(&tiny_dir()).unwrap();
    let (mut coded, mut plain) = (BTreeMap::new(), BTreeMap::new());
    let names: Vec<&str> = source.names().collect();
    for (i, name) in names.iter().enumerate() {
        let data = source.tensor(name).unwrap();
        let choice = if is_coded(name) { pick(i, name) } else { None };
        let (Some((codebook, bits)), &[outputs, inputs]) = (choice, data.shape) else {
            let tensor = (data.dtype, data.shape.to_vec(), data.bytes.to_vec());
            coded.entry((*name).to_owned()).or_insert(tensor.clone());
            plain.entry((*name).to_owned()).or_insert(tensor);
            continue;
        };
        let rms = {
            let values = data.bytes.as_chunks::<2>().0.iter().map(|b| half::bf16::from_le_bytes(*b).to_f32());
            (values.map(|v| v * v).sum::<f32>() / (outputs * inputs) as f32).sqrt()
        };
        let module = name.strip_suffix(".weight").unwrap();
        let rate = Rate::from_bits(bits).unwrap();
        let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
        let linear = names.contains(&&*format!("{parent}.k_proj.weight"));
        if fused && linear && ["q_proj", "k_proj", "v_proj"].contains(&last) {
            if last == "q_proj" {
                let whole = layer(&format!("{parent}.qkv_proj"), inputs, 3 * outputs, codebook, rate, rms);
                store(&mut coded, &format!("{parent}.qkv_proj"), &whole);
                for (part, last) in ["q_proj", "k_proj", "v_proj"].iter().enumerate() {
                    let rows = rows(&whole, part * outputs..(part + 1) * outputs, inputs);
                    plain
                        .insert(format!("{parent}.{last}.weight"), (Dtype::F32, vec![outputs, inputs], rows));
                }
            }
            continue;
        }
        let made = layer(module, inputs, outputs, codebook, rate, rms);
        store(&mut coded, module, &made);
        plain
            .insert((*name).to_owned(), (Dtype::F32, vec![outputs, inputs], rows(&made, 0..outputs, inputs)));
    }
    (coded, plain)
}

/// Another variant for every matrix: all rates and codebooks in one file.
#[allow(clippy::unnecessary_wraps)] // one of several choosers
fn mixed(i: usize, _: &str) -> Option<(Codebook, f32)> {
    let variants: Vec<(Codebook, f32)> = Codebook::ALL
        .into_iter()
        .flat_map(|c| {
            Rate::all().filter(move |r| r.is_whole() || c == Codebook::Mul1).map(move |r| (c, r.bits()))
        })
        .collect();
    Some(variants[i * 7 % variants.len()])
}

fn logits(dir: &Path, ranks: usize, chunk: usize, ids: &[u32]) -> Vec<f32> {
    on_ranks(&options(dir, 1, chunk), ranks, |rank| rank.trace(ids, false).unwrap().logits)
}

/// A prompt in which no router or indexer score is so near to a tie that a rounding decides it.
fn prompt() -> Vec<u32> {
    ids(6, 65, 480)
}

/// What rounding rotated rows to half may do to the logits.
///
/// A rounding is off by at most 2^-12 of a value; over the values of a row that is 2^-12 / sqrt(3) = 1.4e-4 of its size,
/// and as much of the product's. A row goes through 8 layers of four coded products one after another (projections in and
/// out of attention, up and down) and the head: sqrt(33) times that, 8e-4, if all of it reached the streams unweakened.
/// The largest of 65 x 512 logits is off by 4.3 deviations: 3.5e-3, and the nonlinear parts may add as much again.
const HALF: f64 = 7e-3;

#[test]
fn logits_equal_those_of_the_decoded_weights() {
    for fused in [false, true] {
        let pair = pair(fused, mixed);
        let want = logits(pair.plain.path(), 1, 64, &prompt());
        let got = logits(pair.coded.path(), 1, 64, &prompt());
        within("logits", &got, &want, HALF);
    }
}

/// The shares of a rank end inside blocks of 128 almost everywhere in this model.
#[test]
fn ranks_agree() {
    let pair = pair(true, mixed);
    let want = logits(pair.plain.path(), 1, 64, &prompt());
    for ranks in [2, 3, 4] {
        let got = logits(pair.coded.path(), ranks, 64, &prompt());
        within(&format!("{ranks} ranks"), &got, &want, HALF);
    }
}

/// Experts alone, as other programs assemble checkpoints: everything else stays as it was.
#[test]
fn experts_alone_may_be_coded() {
    let pair = pair(false, |_, name| name.contains(".experts.").then_some((Codebook::Mcg, 4.0)));
    let ids = ids(5, 40, 480);
    let want = logits(pair.plain.path(), 1, 64, &ids);
    within("one rank", &logits(pair.coded.path(), 1, 64, &ids), &want, HALF);
    within("two ranks", &logits(pair.coded.path(), 2, 64, &ids), &want, HALF);
}

#[test]
fn a_row_has_its_bits_in_any_company() {
    let pair = pair(true, mixed);
    let prompt = ids(9, 50, 480);
    let bits = |chunk: usize| -> Vec<u32> {
        logits(pair.coded.path(), 1, chunk, &prompt).iter().map(|v| v.to_bits()).collect()
    };
    let whole = bits(50);
    for chunk in [1, 7, 32] {
        assert!(bits(chunk) == whole, "chunks of {chunk}");
    }
    // Requests that share windows give the replies that they give alone.
    let run = |seeds: &[u64]| -> Vec<Vec<u32>> {
        let engine = engine(&options(pair.coded.path(), 4, 32), 1, plain);
        let sampling = Sampling { temperature: 0.8, top_k: 0, seed: Some(5), ..Sampling::GREEDY };
        let handles: Vec<_> = seeds
            .iter()
            .map(|&s| engine.submit(request(s, 20 + s as usize, 12, sampling)).unwrap())
            .collect();
        handles.iter().map(|h| reply(h).unwrap().0).collect()
    };
    let together = run(&[1, 2, 3, 4]);
    for seed in [1, 2, 3, 4_u64] {
        assert_eq!(run(&[seed])[0], together[seed as usize - 1], "request {seed}");
    }
}

/// The row codec of embedding tables, in two shards: looked up row by row, with the bits of the decoded table.
#[test]
fn a_coded_embedding_gives_the_rows_that_it_decodes_to() {
    let (mut coded, mut plain) =
        maps(false, |_, name| name.contains(".experts.").then_some((Codebook::Mcg, 3.0)));
    let module = "model.language_model.embed_tokens";
    coded.remove(&format!("{module}.weight"));
    let mut next = numbers(1);
    let sign = |bit: u64| f16::from_f32(if bit & 1 == 1 { -1.0 } else { 1.0 }).to_le_bytes();
    let signs = (0..256).flat_map(|_| sign(next())).collect();
    coded.insert(format!("{module}.signs"), (Dtype::F16, vec![1, 256], signs));
    for (shard, rows) in [(0, 300), (1, 212)] {
        // A ring: its scale, then 16 units a bit.
        let ring = |_| {
            let scale = f16::from_f32(0.02 + (next() % 100) as f32 / 1000.0).to_le_bytes();
            scale
                .into_iter()
                .chain((0..2 * 16 * 3).map(|_| next() as u8).collect::<Vec<u8>>())
                .collect::<Vec<u8>>()
        };
        let bytes = (0..rows).flat_map(ring).collect();
        coded.insert(format!("{module}.shard_{shard}.trellis"), (Dtype::I16, vec![rows, 49], bytes));
    }
    let pair = Pair { coded: tempfile::tempdir().unwrap(), plain: tempfile::tempdir().unwrap() };
    write(pair.coded.path(), &coded, true);
    let table = Embedding::read(&Checkpoint::open(pair.coded.path()).unwrap(), module, 128).unwrap();
    let mut row = [0.0; 128];
    let rows = (0..512).flat_map(|r| {
        table.decode_row(r, &mut row);
        row.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>()
    });
    plain.insert(format!("{module}.weight"), (Dtype::F32, vec![512, 128], rows.collect()));
    // The experts coded in both: the same arithmetic.
    let experts = coded.iter().filter(|(name, _)| name.contains(".experts."));
    plain.retain(|name, _| !name.contains(".experts."));
    plain.extend(experts.map(|(name, tensor)| (name.clone(), tensor.clone())));
    write(pair.plain.path(), &plain, true);
    let bits =
        |dir: &Path| -> Vec<u32> { logits(dir, 1, 64, &prompt()).iter().map(|v| v.to_bits()).collect() };
    assert!(bits(pair.coded.path()) == bits(pair.plain.path()));
}

#[test]
fn coded_weights_stay_coded_in_memory() {
    let pair = pair(true, |_, _| Some((Codebook::Mcg, 2.0)));
    let weights = |dir: &Path| on_ranks(&options(dir, 1, 64), 1, |rank| rank.core.memory().0);
    let (coded, plain) = (weights(pair.coded.path()), weights(pair.plain.path()));
    // Plain numbers take 16 times 2 bits; what is not coded is the same in both.
    assert!(coded * 4 < plain, "{coded} bytes of {plain}");
}

/// Weights in EXL3 beside a plain `kv_b`, as checkpoints are published, under a cache of latents.
#[test]
fn a_cache_of_latents_beside_coded_weights_keeps_every_promise() {
    let latents = || {
        let mut hooks = Hooks::default();
        hooks.add_object("0060", LayoutLinkObject::new(latent::layout::Rows { host: None })).unwrap();
        hooks.add_object("0060", PassObject::new(latent::pass::Around)).unwrap();
        for op in latent::provide::ALL {
            hooks.add_object("0060", ProviderObject::new(latent::provide::Latent(op))).unwrap();
        }
        hooks
    };
    let pair = pair(true, mixed);
    let source = Checkpoint::open(pair.coded.path()).unwrap();
    let kv_b: Vec<&str> = source.names().filter(|name| name.contains("kv_b_proj")).collect();
    assert!(!kv_b.is_empty());
    for name in &kv_b {
        assert_eq!(source.tensor(name).unwrap().dtype, Dtype::BF16, "{name}");
    }
    let with = |dir: &Path, ranks: usize| {
        let core = |_| CoreOptions { hooks: Arc::new(latents()), ..CoreOptions::default() };
        on_ranks_with(&options(dir, 1, 64), ranks, core, |r| r.trace(&prompt(), false).unwrap().logits)
    };
    let want = with(pair.plain.path(), 1);
    for ranks in [1, 2] {
        within(&format!("{ranks} ranks"), &with(pair.coded.path(), ranks), &want, HALF);
        let options = Options { context: Some(128), ..Options::new(pair.coded.path()) };
        let setup = Setup::with_hooks(options, ranks, move |_| Ok(latents()));
        for gate in GATES {
            let verdict = run(gate, &setup);
            assert!(!matches!(verdict, Verdict::Broken(_)), "{} on {ranks} ranks: {verdict}", gate.name);
        }
    }
}

//! `plugfold make-synthetic`: a random checkpoint of a real model's width, for measuring speed.

mod source;
#[cfg(test)]
mod tests;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use plugfold_engine::checkpoint::{Checkpoint, Dtype, Expected, inventory};
use plugfold_engine::config::ModelConfig;
use plugfold_kernels::cpu::exl3::quantize::seed_of;
use plugfold_kernels::cpu::exl3::{BLOCK, Codebook, Rate};
use rayon::prelude::*;
use serde_json::{Map, Value, json};

use super::quantize::{Rates, SMALLEST_SIDE, class_of, codebook, input_of};
use super::shards::{self, Entry};

/// Write a checkpoint of random numbers with the sizes of a real model, for measuring speed.
///
/// Any words are a valid trellis, so the coded matrices are random words with scales that keep activations at their size.
/// What such a model says means nothing. The bytes depend on the options alone.
#[derive(Args)]
pub struct MakeSynthetic {
    #[command(flatten)]
    model: Like,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Most bytes of a file, in GB.
    #[arg(long, default_value_t = 5.0, value_name = "GB")]
    file_size: f64,
}

/// A model of random numbers: whose sizes it has, and how it is coded.
#[derive(Args)]
pub struct Like {
    /// The config.json of the model to be like, or its folder; tokenizer files beside it are copied.
    #[arg(long = "like", value_name = "FILE|DIR")]
    path: PathBuf,
    /// Layers: the model's first.
    #[arg(long, value_name = "N")]
    layers: usize,
    /// Bits by class of matrix.
    #[command(flatten)]
    rates: Rates,
    /// Codebook: mul1, mcg or 3inst. Half bits exist with mul1 only.
    #[arg(long, default_value = "mcg", value_name = "NAME", value_parser = codebook)]
    codebook: Codebook,
    /// Give matrices that read the same rows the same scales for these, so that they can be fused.
    #[arg(long)]
    shared_scales: bool,
    /// Leave the draft head out.
    #[arg(long)]
    no_draft_head: bool,
    /// Seed of all numbers.
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
}

/// Files that a model needs beside its weights.
const BESIDE: [&str; 6] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
];

/// What a tensor is filled with.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fill {
    /// Any bits.
    Words,
    /// Halves of either sign, about so large.
    Scales(f32),
    /// Always this.
    Word(u32),
    /// Numbers of this type around 0 with this deviation.
    Spread(f32),
    /// This number.
    Constant(f32),
    /// Numbers between these.
    Between(f32, f32),
}

struct Tensor {
    entry: Entry,
    fill: Fill,
    seed: u64,
}

impl MakeSynthetic {
    /// Writes the checkpoint.
    pub fn run(self) -> anyhow::Result<()> {
        if !(self.file_size > 0.0 && self.file_size < 1e6) {
            bail!("--file-size {}: give a number of GB above 0", self.file_size);
        }
        let (path, json, config) = self.model.read()?;
        let tensors = self.model.tensors(&config)?;
        shards::new_dir(&self.out)?;
        let total: u64 = tensors.iter().map(|t| t.entry.bytes()).sum();
        let bar = ProgressBar::new(total);
        let template = "make-synthetic [{bar:40}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("=> "));
        }
        let (entries, fills): (Vec<Entry>, Vec<(Fill, u64)>) =
            tensors.into_iter().map(|t| (t.entry, (t.fill, t.seed))).unzip();
        let files = shards::cut(&entries, (self.file_size * 1e9) as u64);
        let metadata = Map::from_iter([("format".to_owned(), json!("pt"))]);
        for (i, range) in files.iter().enumerate() {
            let path = self.out.join(shards::file_name(i, files.len()));
            let (entries, fills) = (&entries[range.clone()], &fills[range.clone()]);
            shards::write(&path, entries, &metadata, |t, out| {
                let (fill, seed) = fills[t];
                write_numbers(&entries[t], fill, seed, &bar, out)
            })?;
        }
        bar.finish_and_clear();
        shards::write_json(&self.out.join("config.json"), &json)?;
        shards::write_index(&self.out, &entries, &files, Map::new())?;
        let storage = super::convert::describe(&entries);
        let mut quantization = json["quantization_config"].clone();
        quantization["tensor_storage"] = Value::Object(storage);
        shards::write_json(&self.out.join("quantization_config.json"), &quantization)?;
        let folder = path.parent().unwrap_or(Path::new("."));
        for name in BESIDE {
            let from = folder.join(name);
            if from.exists() {
                std::fs::copy(&from, self.out.join(name))
                    .with_context(|| format!("cannot copy {}", from.display()))?;
            }
        }
        Checkpoint::open(&self.out)?.check(&config)?;
        println!("{} tensors, {total} bytes in {} files", entries.len(), files.len());
        Ok(())
    }
}

impl Like {
    /// What it is like: a file or its folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The configuration of the model: the file that it is like, and the one that it has.
    pub fn read(&self) -> anyhow::Result<(PathBuf, Value, ModelConfig)> {
        let path = if self.path.is_dir() { self.path.join("config.json") } else { self.path.clone() };
        let text = std::fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let mut json: Value =
            serde_json::from_slice(&text).with_context(|| format!("{} is no JSON", path.display()))?;
        self.shape(&mut json).with_context(|| format!("in {}", path.display()))?;
        let config = ModelConfig::from_json(&json.to_string())?;
        Ok((path, json, config))
    }

    /// Its tensors, made as they are read: nothing is written, and nothing but the device holds all of them.
    pub fn source(&self, config: &ModelConfig) -> anyhow::Result<source::Noise> {
        Ok(source::Noise::new(self.tensors(config)?, self.seed))
    }

    /// Turns a configuration into that of the checkpoint: fewer layers, no vision, coded.
    fn shape(&self, json: &mut Value) -> anyhow::Result<()> {
        let Some(top) = json.as_object_mut() else { bail!("the configuration is no object") };
        top.remove("vision_config");
        top.insert(
            "quantization_config".to_owned(),
            json!({
                "quant_method": "exl3",
                "version": concat!("plugfold-", env!("CARGO_PKG_VERSION"), "-synthetic"),
                "bits": self.rates.body(),
                "head_bits": self.rates.head(),
                "calibration": {"rows": 0, "cols": 0},
                "out_scales": "never",
                "codebook": self.codebook.name(),
            }),
        );
        let nested = top.get("text_config").is_some_and(Value::is_object);
        let text = if nested { top.get_mut("text_config").and_then(Value::as_object_mut) } else { Some(top) };
        let Some(text) = text else { bail!("text_config is no object") };
        let Some(have) = text.get("num_hidden_layers").and_then(Value::as_u64).filter(|have| *have > 0)
        else {
            bail!("num_hidden_layers is missing or 0: give the config.json of a model of this architecture");
        };
        if self.layers == 0 || self.layers as u64 > have {
            bail!("--layers {}: the model has {have}; give 1 to {have}", self.layers);
        }
        text.insert("num_hidden_layers".to_owned(), json!(self.layers));
        if self.no_draft_head {
            text.insert("num_nextn_predict_layers".to_owned(), json!(0));
        }
        for name in ["layer_types", "mlp_layer_types", "indexer_types", "index_topk_pattern"] {
            match text.get_mut(name) {
                Some(Value::Array(list)) => list.truncate(self.layers),
                Some(Value::String(letters)) => *letters = letters.chars().take(self.layers).collect(),
                _ => {}
            }
        }
        if let Some(first) = text.get("first_k_dense_replace").and_then(Value::as_u64) {
            text.insert("first_k_dense_replace".to_owned(), json!(first.min(self.layers as u64)));
        }
        // They repeat layer_types.
        if let Some(linear) = text.get_mut("linear_attn_config").and_then(Value::as_object_mut) {
            linear.remove("kda_layers");
            linear.remove("full_attn_layers");
        }
        Ok(())
    }

    fn tensors(&self, config: &ModelConfig) -> anyhow::Result<Vec<Tensor>> {
        let mut tensors = Vec::new();
        for expected in inventory(config) {
            let module = expected.name.strip_suffix(".weight");
            let rate = module.and_then(class_of).and_then(|class| self.rates.of(class));
            match (module, rate, &expected.shape[..]) {
                (Some(module), Some(rate), &[outputs, inputs]) if outputs.min(inputs) >= SMALLEST_SIDE => {
                    if !rate.is_whole() && self.codebook != Codebook::Mul1 {
                        bail!(
                            "{rate} bits exist with --codebook mul1 only, not with {}",
                            self.codebook.name()
                        );
                    }
                    self.coded(module, outputs, inputs, rate, &mut tensors);
                }
                _ => tensors.push(self.plain(&expected)),
            }
        }
        Ok(tensors)
    }

    fn coded(&self, module: &str, outputs: usize, inputs: usize, rate: Rate, tensors: &mut Vec<Tensor>) {
        let (k, n) = (inputs.next_multiple_of(BLOCK), outputs.next_multiple_of(BLOCK));
        // Products of rows of size 1 have size 1.
        let deviation = if self.codebook == Codebook::Mul1 { 1.0 } else { 1.244 };
        let size = 1.0 / (inputs as f32).sqrt() / deviation;
        let input = if self.shared_scales { input_of(module) } else { format!("{module}.suh") };
        let mut add = |suffix: &str, dtype, shape: Vec<usize>, fill, name: &str| {
            let entry = Entry { name: format!("{module}.{suffix}"), dtype, shape };
            tensors.push(Tensor { entry, fill, seed: seed_of(self.seed, name) });
        };
        add("suh", Dtype::F16, vec![k], Fill::Scales(size), &input);
        add("svh", Dtype::F16, vec![n], Fill::Scales(1.0), &format!("{module}.svh"));
        if let Some((suffix, value)) = self.codebook.marker() {
            add(suffix, Dtype::I32, vec![], Fill::Word(value), module);
        }
        add(
            "trellis",
            Dtype::I16,
            vec![k / 16, n / 16, rate.units()],
            Fill::Words,
            &format!("{module}.trellis"),
        );
    }

    fn plain(&self, expected: &Expected) -> Tensor {
        let name = &expected.name;
        let last = name.strip_suffix(".weight").unwrap_or(name).rsplit('.').next().unwrap_or(name);
        let inner: usize = expected.shape[1..].iter().product();
        let fill = match last {
            "A_log" => Fill::Between(0.0, 2.75),
            "dt_bias" => Fill::Between(-4.0, 0.0),
            "hc_attn_scale" | "hc_ffn_scale" => Fill::Constant(0.1),
            "bias" | "e_score_correction_bias" | "hc_attn_base" | "hc_ffn_base" => Fill::Spread(0.01),
            "embed_tokens" => Fill::Spread(1.0),
            _ if expected.shape.len() == 1 => Fill::Constant(1.0),
            _ => Fill::Spread(1.0 / (inner as f32).sqrt()),
        };
        let dtype = expected.dtypes.first().copied().unwrap_or(Dtype::BF16);
        let entry = Entry { name: name.clone(), dtype, shape: expected.shape.clone() };
        Tensor { entry, fill, seed: seed_of(self.seed, name) }
    }
}

/// Elements that are made at once; a multiple of what a random word gives.
const CHUNK: usize = 1 << 20;

/// Writes a tensor's numbers, made by all threads in chunks that depend on the seed and their place only.
fn write_numbers(
    entry: &Entry,
    fill: Fill,
    seed: u64,
    bar: &ProgressBar,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let count: usize = entry.shape.iter().product();
    let starts: Vec<usize> = (0..count).step_by(CHUNK).collect();
    for group in starts.chunks(2 * rayon::current_num_threads()) {
        let made: Vec<Vec<u8>> = group
            .par_iter()
            .map(|&start| numbers(entry.dtype, fill, seed, start, CHUNK.min(count - start)))
            .collect();
        for bytes in made {
            out.write_all(&bytes)?;
            bar.inc(bytes.len() as u64);
        }
    }
    Ok(())
}

/// Elements `start ..` of a tensor.
fn numbers(dtype: Dtype, fill: Fill, seed: u64, start: usize, count: usize) -> Vec<u8> {
    let word = |i: usize| {
        let mut z = seed.wrapping_add((i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    };
    // Between -1 and 1, and from further bits of the same word between 0 and 1.
    let signed = |i: usize| (word(i) >> 40) as f32 / (1 << 23) as f32 - 1.0;
    let value = |i: usize| match fill {
        Fill::Spread(deviation) => signed(i) * deviation * 3_f32.sqrt(),
        Fill::Constant(value) => value,
        Fill::Between(low, high) => low + (high - low) * (signed(i) + 1.0) / 2.0,
        Fill::Scales(size) => {
            let sign = if word(i) & 1 == 1 { -1.0 } else { 1.0 };
            sign * size * (1.0 + 0.2 * signed(i))
        }
        Fill::Words | Fill::Word(_) => 0.0,
    };
    let range = start..start + count;
    match (fill, dtype) {
        // Four 16-bit units a random word; chunks begin at multiples of four.
        (Fill::Words, _) => {
            let mut bytes: Vec<u8> =
                (start / 4..(start + count).div_ceil(4)).flat_map(|i| word(i).to_le_bytes()).collect();
            bytes.truncate(2 * count);
            bytes
        }
        (Fill::Word(value), _) => range.flat_map(|_| value.to_le_bytes()).collect(),
        (_, Dtype::F16) => range.flat_map(|i| f16::from_f32(value(i)).to_le_bytes()).collect(),
        (_, Dtype::F32) => range.flat_map(|i| value(i).to_le_bytes()).collect(),
        _ => range.flat_map(|i| bf16::from_f32(value(i)).to_le_bytes()).collect(),
    }
}

//! `plugfold quantize`: a checkpoint in bf16 in, an EXL3 checkpoint out.

mod calibrate;
mod output;
mod plan;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use plugfold::config::Device;
use plugfold::device;
use plugfold_cuda::TileQuantizer;
use plugfold_engine::checkpoint::{Checkpoint, Dtype, TensorData};
use plugfold_kernels::cpu::exl3::quantize::{self, Hessian, Settings, StoredTensor};
use plugfold_kernels::cpu::exl3::{Codebook, Rate};
use rayon::prelude::*;

use calibrate::{Calibration, Ids, Rows};
use output::{About, Output, Report};
use plan::{Linear, Plan};
pub use plan::{Rates, SMALLEST_SIDE, class_of, input_of};

/// Write a checkpoint with its large matrices in EXL3.
///
/// Layers are finished one by one; a run that was stopped goes on where it was when it is started again with the same
/// options. The bytes depend on the source, the options and the calibration text alone.
#[derive(Args)]
pub struct Quantize {
    /// Folder of the source, in bf16, f16 or f32.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    #[command(flatten)]
    rates: Rates,
    /// Codebook: mul1, mcg or 3inst. Half bits exist with mul1 only.
    #[arg(long, default_value = "mul1", value_name = "NAME", value_parser = codebook)]
    codebook: Codebook,
    /// Seed of the random signs.
    #[arg(long, default_value_t = 0, value_name = "N")]
    seed: u64,
    /// Give output channels signs alone, no scales.
    #[arg(long)]
    no_out_scales: bool,
    #[command(flatten)]
    calibration: Calibration,
    /// Threads.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Where tiles are encoded: cpu, or cuda for the first GPU. The bytes are the same.
    #[arg(long, default_value_t, value_enum, value_name = "DEVICE")]
    device: Device,
}

/// Who encodes the tiles of each rate, where it is not the CPU.
type Encoders = HashMap<Rate, TileQuantizer>;

/// A codebook of the command line.
pub fn codebook(name: &str) -> Result<Codebook, String> {
    Codebook::from_name(name).ok_or_else(|| "give mul1, mcg or 3inst".to_owned())
}

impl Quantize {
    /// Quantizes.
    pub fn run(self) -> anyhow::Result<()> {
        let source = Checkpoint::open(&self.model)?;
        let plan = Plan::new(&source, &self.rates, self.codebook)?;
        let encoders = self.encoders(&plan)?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads.unwrap_or(0)).build()?;
        let text = self.calibration.ids(&self.model)?;
        let mut output = Output::open(&self.out, &self.model, &self.options(&source, text.as_ref()))?;
        let rows = match &text {
            Some(text) => {
                let linears: Vec<&Linear> = plan.files().iter().flat_map(|f| &f.linears).collect();
                Some(pool.install(|| Rows::gather(&output.rows(), &self.model, text, &linears))?)
            }
            None => None,
        };
        let bar = ProgressBar::new(plan.weights());
        if let Ok(style) = ProgressStyle::with_template(
            "quantize [{bar:40}] {human_pos}/{human_len} weights {per_sec} {eta} {msg}",
        ) {
            bar.set_style(style.progress_chars("=> "));
        }
        let files = plan.files().len();
        for (index, file) in plan.files().iter().enumerate() {
            bar.set_message(file.title.clone());
            let path = super::shards::file_name(index, files);
            if let Some(reports) = output.finished(&path)? {
                bar.inc(file.linears.iter().map(Linear::weights).sum());
                output.keep(&path, reports);
                continue;
            }
            let layers = pool.install(|| {
                let metrics = metrics(rows.as_ref(), &file.linears)?;
                file.linears
                    .par_iter()
                    .map(|linear| {
                        let metric = rows.as_ref().and_then(|r| metrics.get(r.file(linear)?)?.as_ref());
                        self.layer(&source, &output, linear, metric, &encoders, &bar)
                    })
                    .collect::<anyhow::Result<Vec<_>>>()
            })?;
            let plain = file.plain.iter().map(|name| {
                let tensor = source.tensor(name).with_context(|| format!("tensor `{name}` is gone"))?;
                Ok((name.clone(), tensor))
            });
            output.write(&path, &layers, plain.collect::<anyhow::Result<Vec<_>>>()?)?;
        }
        bar.finish_and_clear();
        let about = About {
            codebook: self.codebook,
            out_scales: !self.no_out_scales,
            head_bits: self.rates.head(),
            calibration: rows.as_ref().map(Rows::size),
        };
        output.finish(&source, &plan, &about)
    }

    /// An encoder for each rate, unless the CPU encodes.
    fn encoders(&self, plan: &Plan) -> anyhow::Result<Encoders> {
        let mut encoders = Encoders::new();
        if self.device == Device::Cpu {
            return Ok(encoders);
        }
        let gpu = device::gpu(0)?;
        for linear in plan.files().iter().flat_map(|f| &f.linears) {
            if let Entry::Vacant(place) = encoders.entry(linear.rate) {
                let blocks = gpu.facts().multiprocessors as usize;
                place.insert(TileQuantizer::new(gpu.clone(), self.codebook, linear.rate, blocks)?);
            }
        }
        Ok(encoders)
    }

    /// Everything the bytes depend on, to recognize the run that is resumed.
    fn options(&self, source: &Checkpoint, text: Option<&Ids>) -> serde_json::Value {
        let mut options = serde_json::json!({
            "source_bytes": source.bytes(),
            "source_tensors": source.names().count(),
            "bits": self.rates.describe(),
            "codebook": self.codebook.name(),
            "seed": self.seed,
            "out_scales": !self.no_out_scales,
        });
        if let Some(text) = text {
            options["calibration"] = text.digest().into();
        }
        options
    }

    /// Quantizes one matrix, or reads what an earlier run made of it.
    fn layer(
        &self,
        source: &Checkpoint,
        output: &Output,
        linear: &Linear,
        metric: Option<&Hessian>,
        encoders: &Encoders,
        bar: &ProgressBar,
    ) -> anyhow::Result<(Vec<StoredTensor>, Report)> {
        if let Some(part) = output.part(&linear.name)? {
            bar.inc(linear.weights());
            return Ok(part);
        }
        let weight = floats(source, &format!("{}.weight", linear.name))?;
        let bias_name = format!("{}.bias", linear.name);
        let bias = source.tensor(&bias_name).map(|_| floats(source, &bias_name)).transpose()?;
        let settings = Settings {
            codebook: self.codebook,
            rate: linear.rate,
            input_seed: quantize::seed_of(self.seed, &linear.input),
            output_seed: quantize::seed_of(self.seed, &linear.name),
            out_scales: !self.no_out_scales,
        };
        let told = std::sync::atomic::AtomicU64::new(0);
        let progress = |p: quantize::Progress| {
            let now = linear.weights() * p.done as u64 / p.total as u64;
            bar.inc(now - told.swap(now, std::sync::atomic::Ordering::Relaxed));
        };
        let (name, bias) = (&linear.name, bias.as_deref());
        let quantized = match encoders.get(&linear.rate) {
            Some(tiles) => quantize::quantize_by(
                tiles,
                name,
                &weight,
                linear.inputs,
                bias,
                metric,
                &settings,
                &progress,
            )?,
            None => quantize::quantize(name, &weight, linear.inputs, bias, metric, &settings, &progress)?,
        };
        let stored = quantize::tensors(&linear.name, &quantized.layer);
        let storage = quantize::storage(&quantized.layer, &stored);
        let report = Report::new(linear, &storage, quantized.error, quantized.output_error);
        output.store_part(&linear.name, &stored, &report)?;
        Ok((stored, report))
    }
}

/// The metrics of what some matrices read, by the file of the rows.
///
/// One after another, each on all threads: matrices that are quantized at once only look at them.
fn metrics(rows: Option<&Rows>, linears: &[Linear]) -> anyhow::Result<HashMap<String, Option<Hessian>>> {
    let mut metrics = HashMap::new();
    let Some(rows) = rows else { return Ok(metrics) };
    for linear in linears {
        if let Some(file) = rows.file(linear)
            && !metrics.contains_key(file)
        {
            metrics.insert(file.to_owned(), rows.hessian(file, linear.inputs)?);
        }
    }
    Ok(metrics)
}

/// A tensor's values.
fn floats(source: &Checkpoint, name: &str) -> anyhow::Result<Vec<f32>> {
    let TensorData { dtype, bytes, .. } =
        source.tensor(name).with_context(|| format!("tensor `{name}` is gone"))?;
    let halves = || bytes.as_chunks::<2>().0.iter();
    Ok(match dtype {
        Dtype::BF16 => halves().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
        Dtype::F16 => halves().map(|b| f16::from_le_bytes(*b).to_f32()).collect(),
        Dtype::F32 => bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        other => bail!("tensor `{name}` is {other:?}; give a source in bf16, f16 or f32"),
    })
}

/// A rate of the command line; `None` is 16, unquantized.
fn rate(text: &str) -> Result<Option<Rate>, String> {
    let bits: f32 = text.parse().map_err(|_| format!("{text} is no number"))?;
    match Rate::from_bits(bits) {
        _ if bits == 16.0 => Ok(None),
        Some(rate) => Ok(Some(rate)),
        None => Err("give 1 to 8, 1.5, 2.5 or 3.5, or 16 to leave as it is".into()),
    }
}

/// Reads a whole file, telling its name in errors.
fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

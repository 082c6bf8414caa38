//! `plugfold debug exl3` and `plugfold bench exl3`: what a stored layer holds, and how fast such layers are.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold_kernels::cpu::exl3::{Codebook, Dtype, Rate, RawTensor, Tensors, bench, read_layer};
use safetensors::tensor::{Metadata, TensorView};
use serde_json::json;

use super::write_whole;

/// Longest header that is read; the safetensors format sets the same limit.
const MAX_HEADER: u64 = 100_000_000;

/// Decode one EXL3 layer: tensors `inner` [k, n], f16, the decoded trellis, and `w` [k, n], f32, the weight.
#[derive(Args)]
pub struct Decode {
    /// The file that holds the layer.
    #[arg(long, value_name = "FILE.safetensors")]
    file: PathBuf,
    /// Name of the layer, without `.trellis`.
    #[arg(long, value_name = "PREFIX")]
    layer: String,
    /// The file to write.
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
}

impl Decode {
    /// Prints what the layer is and writes it decoded.
    pub fn run(self) -> anyhow::Result<()> {
        let stored = Stored::read(&self.file, &self.layer)
            .with_context(|| format!("cannot read {}", self.file.display()))?;
        let layer =
            read_layer(&stored, &self.layer).with_context(|| format!("in {}", self.file.display()))?;
        let (k, n) = (layer.k(), layer.n());
        println!(
            "{}: k {k}, n {n}, {} bits, codebook {}, bias {}",
            self.layer,
            layer.rate(),
            layer.codebook().name(),
            if layer.bias().is_some() { "yes" } else { "no" }
        );
        let inner: Vec<u8> = layer.inner().iter().flat_map(|v| v.to_le_bytes()).collect();
        let w: Vec<u8> = layer.weight().iter().flat_map(|v| v.to_le_bytes()).collect();
        let views = [
            ("inner", TensorView::new(safetensors::Dtype::F16, vec![k, n], &inner)?),
            ("w", TensorView::new(safetensors::Dtype::F32, vec![k, n], &w)?),
        ];
        write_whole(&self.out, |path| Ok(safetensors::serialize_to_file(views, None, path)?))
    }
}

/// The tensors of one layer, read from a file without reading the rest of it.
struct Stored(HashMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

impl Stored {
    fn read(path: &Path, layer: &str) -> anyhow::Result<Self> {
        let mut file = File::open(path)?;
        let mut length = [0; 8];
        file.read_exact(&mut length).context("too short for a safetensors file")?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER {
            bail!("claims a header of {length} bytes; at most {MAX_HEADER} are allowed");
        }
        let mut header = vec![0; 8 + length as usize];
        file.seek(SeekFrom::Start(0))?;
        file.read_exact(&mut header).context("the header is cut short")?;
        let metadata: Metadata =
            serde_json::from_slice(&header[8..]).context("the header is no safetensors header")?;
        let available = file.metadata()?.len() - header.len() as u64;
        let mut tensors = HashMap::new();
        for (name, info) in metadata.tensors() {
            if name.strip_prefix(layer).is_none_or(|rest| !rest.starts_with('.')) {
                continue;
            }
            let (start, end) = info.data_offsets;
            if start > end || end as u64 > available {
                bail!("tensor `{name}` lies at {start}..{end} of {available} bytes: the file is cut short");
            }
            let mut data = vec![0; end - start];
            file.seek(SeekFrom::Start(8 + length + start as u64))?;
            file.read_exact(&mut data).with_context(|| format!("tensor `{name}` is cut short"))?;
            tensors.insert(name, (dtype(info.dtype), info.shape.clone(), data));
        }
        Ok(Self(tensors))
    }
}

impl Tensors for Stored {
    fn tensor(&self, name: &str) -> Option<RawTensor<'_>> {
        self.0.get(name).map(|(dtype, shape, data)| RawTensor { dtype: *dtype, shape: shape.clone(), data })
    }
}

fn dtype(stored: safetensors::Dtype) -> Dtype {
    match stored {
        safetensors::Dtype::I16 => Dtype::I16,
        safetensors::Dtype::I32 => Dtype::I32,
        safetensors::Dtype::F16 => Dtype::F16,
        safetensors::Dtype::BF16 => Dtype::Bf16,
        safetensors::Dtype::F32 => Dtype::F32,
        _ => Dtype::Other,
    }
}

/// Measure EXL3 products and the encoder on this machine.
#[derive(Args)]
pub struct Measure {
    /// Input channels of the layer.
    #[arg(long, default_value_t = 4096, value_name = "CHANNELS")]
    k: usize,
    /// Output channels of the layer.
    #[arg(long, default_value_t = 4096, value_name = "CHANNELS")]
    n: usize,
    /// Rows of a call.
    #[arg(long, value_delimiter = ',', default_value = "1,8,64", value_name = "ROWS,...")]
    rows: Vec<usize>,
    /// Calls of each kind; the best counts.
    #[arg(long, default_value_t = 10, value_name = "N")]
    repetitions: usize,
    /// Weights to encode for each codebook and rate, in units of 65,536; 0 leaves the encoder out.
    #[arg(long, default_value_t = 1, value_name = "N")]
    encode: usize,
    /// Threads.
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Write all numbers to this file as JSON.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Measure {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<()> {
        if self.k == 0 || self.n == 0 || !self.k.is_multiple_of(128) || !self.n.is_multiple_of(128) {
            bail!("--k {} --n {}: give positive multiples of 128", self.k, self.n);
        }
        if self.repetitions == 0 || self.rows.contains(&0) {
            bail!("measure at least one row at least once");
        }
        let pool = rayon::ThreadPoolBuilder::new().num_threads(self.threads.unwrap_or(0)).build()?;
        let report = pool.install(|| self.measure())?;
        match &self.json {
            Some(path) => {
                write_whole(path, |path| Ok(std::fs::write(path, serde_json::to_vec_pretty(&report)?)?))
            }
            None => Ok(()),
        }
    }

    fn measure(&self) -> anyhow::Result<serde_json::Value> {
        let threads = rayon::current_num_threads();
        let variants: Vec<(Codebook, Rate)> = Codebook::ALL
            .into_iter()
            .flat_map(|c| {
                Rate::all().filter(move |r| r.is_whole() || c == Codebook::Mul1).map(move |r| (c, r))
            })
            .collect();
        let mut products = Vec::new();
        for &(codebook, rate) in &variants {
            for &rows in &self.rows {
                let p = bench::product(codebook, rate, self.k, self.n, rows, self.repetitions);
                println!(
                    "{:5} {} bits, {rows} rows: {:.3} ms, memory bound {:.3} ms, operation bound {:.3} ms, {:.0}% of the slower",
                    codebook.name(),
                    rate,
                    1e3 * p.seconds,
                    1e3 * p.memory_seconds(),
                    1e3 * p.operation_seconds(),
                    100.0 * p.fraction()
                );
                products.push(json!({
                    "codebook": codebook.name(), "bits": p.bits, "k": p.k, "n": p.n, "rows": rows,
                    "seconds": p.seconds, "bytes": p.bytes, "bandwidth": p.bandwidth,
                    "operations_per_weight": p.operations, "operation_rate": p.operation_rate,
                    "memory_seconds": p.memory_seconds(), "operation_seconds": p.operation_seconds(),
                    "fraction": p.fraction(),
                }));
            }
        }
        let mut encodings = Vec::new();
        for &(codebook, rate) in variants.iter().filter(|_| self.encode > 0) {
            let e = bench::encoding(codebook, rate, 256 * self.encode)?;
            let speed = e.weights as f64 / e.seconds;
            println!(
                "{:5} {rate} bits: mean squared error {:.4e}, {speed:.0} weights/s",
                codebook.name(),
                e.error
            );
            encodings.push(json!({
                "codebook": codebook.name(), "bits": e.bits, "weights": e.weights, "seconds": e.seconds,
                "mean_squared_error": e.error, "weights_per_second": speed,
                "weights_per_second_and_thread": speed / threads as f64,
            }));
        }
        Ok(json!({"threads": threads, "products": products, "encodings": encodings}))
    }
}

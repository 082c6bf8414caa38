//! The folder that is written: parts of a run that can be resumed, finished files, and what describes them.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use plugfold_engine::checkpoint::{Checkpoint, TensorData};
use plugfold_kernels::cpu::exl3::Codebook;
use plugfold_kernels::cpu::exl3::Dtype;
use plugfold_kernels::cpu::exl3::quantize::{Storage, StoredTensor};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::plan::{Class, Linear, Plan};
use super::read;
use crate::cli::shards::{INDEX, copy_others, torch_name, write_json};
use crate::cli::write_whole;

/// Folder of an unfinished run, inside the output.
const WORK: &str = ".quantize";

/// What became of a matrix.
#[derive(Clone, Serialize, Deserialize)]
pub struct Report {
    name: String,
    class: String,
    weights: u64,
    bits: f32,
    /// Squared error over squared norm.
    error: f64,
    /// With calibration, that of the outputs on the text's rows.
    #[serde(default)]
    output_error: Option<f64>,
    storage: Value,
}

impl Report {
    /// The report of a quantized matrix.
    pub fn new(linear: &Linear, storage: &Storage, error: f64, output_error: Option<f64>) -> Self {
        let tensors: Map<String, Value> = storage
            .stored_tensors
            .iter()
            .map(|(name, shape, bytes, dtype)| {
                (name.clone(), json!({"shape": shape, "n_bytes": bytes, "dtype": dtype}))
            })
            .collect();
        let bits = storage.bits_per_weight;
        let whole = if bits.fract() == 0.0 { json!(bits as u32) } else { json!(bits) };
        let mut entry = json!({
            "stored_tensors": tensors, "quant_format": storage.quant_format, "bits_per_weight": whole,
        });
        if let Some((name, value)) = storage.multiplier {
            entry[name] = json!(value);
        }
        Self {
            name: linear.name.clone(),
            class: format!("{:?}", linear.class).to_lowercase(),
            weights: linear.weights(),
            bits,
            error,
            output_error,
            storage: entry,
        }
    }
}

/// What a finished file holds.
#[derive(Clone, Default, Serialize, Deserialize)]
pub struct FileReport {
    reports: Vec<Report>,
    /// Entries of `tensor_storage` for modules that stayed as they were.
    plain: BTreeMap<String, Value>,
    /// Bytes by tensor.
    tensors: BTreeMap<String, u64>,
}

/// What describes a run as a whole.
pub struct About {
    pub codebook: Codebook,
    pub out_scales: bool,
    /// Bits of the output layer.
    pub head_bits: f32,
    /// Sequences of the calibration text, and the tokens of one.
    pub calibration: Option<(usize, usize)>,
}

/// The output folder.
pub struct Output {
    dir: PathBuf,
    work: PathBuf,
    source: PathBuf,
    files: BTreeMap<String, FileReport>,
}

impl Output {
    /// Starts a run in `dir`, or goes on with the one that was stopped there.
    pub fn open(dir: &Path, source: &Path, options: &Value) -> anyhow::Result<Self> {
        let work = dir.join(WORK);
        let marker = work.join("options.json");
        if marker.exists() {
            let before: Value = serde_json::from_slice(&read(&marker)?)
                .with_context(|| format!("{} is damaged; remove the folder", marker.display()))?;
            if before != *options {
                bail!(
                    "{} holds a run with other options ({before}); use those, or another --out",
                    dir.display()
                );
            }
        } else {
            if dir.join(INDEX).exists() || dir.join("model.safetensors").exists() {
                bail!("{} holds a checkpoint already; give another --out", dir.display());
            }
            fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
            write_json(&marker, options)?;
        }
        Ok(Self { dir: dir.to_owned(), work, source: source.to_owned(), files: BTreeMap::new() })
    }

    /// Where rows of a calibration text are kept.
    pub fn rows(&self) -> PathBuf {
        self.work.join("rows")
    }

    fn part_path(&self, name: &str) -> PathBuf {
        self.work.join(format!("{name}.safetensors"))
    }

    /// A matrix that an earlier run finished.
    pub fn part(&self, name: &str) -> anyhow::Result<Option<(Vec<StoredTensor>, Report)>> {
        let path = self.part_path(name);
        if !path.exists() {
            return Ok(None);
        }
        let bytes = read(&path)?;
        let damaged = || format!("{} is damaged; remove it", path.display());
        let (_, metadata) = SafeTensors::read_metadata(&bytes).with_context(damaged)?;
        let file = SafeTensors::deserialize(&bytes).with_context(damaged)?;
        let report = metadata.metadata().as_ref().and_then(|m| m.get("report")).with_context(damaged)?;
        let report: Report = serde_json::from_str(report).with_context(damaged)?;
        let mut stored = Vec::new();
        for (name, view) in file.iter() {
            let dtype = match view.dtype() {
                safetensors::Dtype::I16 => Dtype::I16,
                safetensors::Dtype::I32 => Dtype::I32,
                safetensors::Dtype::F16 => Dtype::F16,
                _ => bail!(damaged()),
            };
            let (shape, data) = (view.shape().to_vec(), view.data().to_vec());
            stored.push(StoredTensor { name: name.to_owned(), dtype, shape, data });
        }
        Ok(Some((stored, report)))
    }

    /// Keeps a finished matrix for a run that goes on with this one.
    pub fn store_part(&self, name: &str, stored: &[StoredTensor], report: &Report) -> anyhow::Result<()> {
        let metadata = HashMap::from([("report".to_owned(), serde_json::to_string(report)?)]);
        write_file(&self.part_path(name), views(stored)?, metadata)
    }

    /// What a file of an earlier run holds, if it was finished.
    pub fn finished(&self, file: &str) -> anyhow::Result<Option<FileReport>> {
        let report = self.work.join(format!("{file}.json"));
        if !report.exists() || !self.dir.join(file).exists() {
            return Ok(None);
        }
        let text = read(&report)?;
        Ok(Some(
            serde_json::from_slice(&text)
                .with_context(|| format!("{} is damaged; remove it", report.display()))?,
        ))
    }

    /// Takes a finished file over.
    pub fn keep(&mut self, file: &str, report: FileReport) {
        self.files.insert(file.to_owned(), report);
    }

    /// Writes a file of the checkpoint.
    pub fn write(
        &mut self,
        file: &str,
        layers: &[(Vec<StoredTensor>, Report)],
        plain: Vec<(String, TensorData<'_>)>,
    ) -> anyhow::Result<()> {
        let mut report = FileReport::default();
        let mut all = Vec::new();
        for (stored, _) in layers {
            all.extend(views(stored)?);
        }
        for (name, tensor) in plain {
            let view = TensorView::new(tensor.dtype, tensor.shape.to_vec(), tensor.bytes)
                .with_context(|| format!("tensor `{name}`"))?;
            let module = name.rsplit_once('.').map_or(&*name, |(module, _)| module);
            let entry =
                report.plain.entry(module.to_owned()).or_insert_with(|| json!({"stored_tensors": {}}));
            entry["stored_tensors"][&name] = json!({
                "shape": tensor.shape, "n_bytes": tensor.bytes.len(), "dtype": torch_name(tensor.dtype),
            });
            all.push((name, view));
        }
        report.tensors = all.iter().map(|(name, view)| (name.clone(), view.data().len() as u64)).collect();
        report.reports = layers.iter().map(|(_, report)| report.clone()).collect();
        let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
        write_file(&self.dir.join(file), all, metadata)?;
        write_json(&self.work.join(format!("{file}.json")), &serde_json::to_value(&report)?)?;
        for (_, report) in layers {
            // From here on the file counts; a part that stays behind is removed at the end.
            let _ = fs::remove_file(self.part_path(&report.name));
        }
        self.files.insert(file.to_owned(), report);
        Ok(())
    }

    /// Writes what describes the checkpoint, copies the rest of the source's folder, and prints the errors.
    pub fn finish(self, source: &Checkpoint, plan: &Plan, about: &About) -> anyhow::Result<()> {
        let head_bits = about.head_bits;
        let (rows, cols) = about.calibration.unwrap_or_default();
        let reports: Vec<&Report> = self.files.values().flat_map(|f| &f.reports).collect();
        let body = || reports.iter().filter(|r| r.class != "head");
        let weights: u64 = body().map(|r| r.weights).sum();
        let bits = body().map(|r| r.weights as f64 * f64::from(r.bits)).sum::<f64>() / weights.max(1) as f64;
        let head = head_bits.fract() == 0.0;
        let mut quantization = json!({
            "quant_method": "exl3",
            "version": concat!("plugfold-", env!("CARGO_PKG_VERSION")),
            "bits": (bits * 100.0).round() / 100.0,
            "head_bits": if head { json!(head_bits as u32) } else { json!(head_bits) },
            "calibration": {"rows": rows, "cols": cols},
            "out_scales": if about.out_scales { "always" } else { "never" },
            "codebook": about.codebook.name(),
        });
        let path = source.dir().join("config.json");
        let mut config: Value = serde_json::from_slice(&read(&path)?)
            .with_context(|| format!("{} is no JSON", path.display()))?;
        if let Some(before) = config.get("quantization_config") {
            quantization["original_quantization_config"] = before.clone();
        }
        config["quantization_config"] = quantization.clone();
        let mut storage = Map::new();
        for file in self.files.values() {
            storage.extend(file.plain.iter().map(|(name, entry)| (name.clone(), entry.clone())));
            storage.extend(file.reports.iter().map(|r| (r.name.clone(), r.storage.clone())));
        }
        quantization["tensor_storage"] = Value::Object(storage);
        let map: BTreeMap<&String, &String> = self
            .files
            .iter()
            .flat_map(|(file, report)| report.tensors.keys().map(move |t| (t, file)))
            .collect();
        let total: u64 = self.files.values().flat_map(|f| f.tensors.values()).sum();
        copy_others(&self.source, &self.dir, &["config.json", "quantization_config.json", INDEX])?;
        write_json(&self.dir.join("quantization_config.json"), &quantization)?;
        write_json(&self.dir.join("config.json"), &config)?;
        write_json(&self.dir.join(INDEX), &json!({"metadata": {"total_size": total}, "weight_map": map}))?;
        fs::remove_dir_all(&self.work).with_context(|| format!("cannot remove {}", self.work.display()))?;

        println!(
            "{} weights of {} in EXL3, {bits:.2} bits on average",
            plan.weights(),
            source.dir().display()
        );
        for class in [Class::Expert, Class::Shared, Class::Mlp, Class::Attention, Class::Draft, Class::Head] {
            let name = format!("{class:?}").to_lowercase();
            let of_class: Vec<_> = reports.iter().filter(|r| r.class == name).collect();
            let weights: u64 = of_class.iter().map(|r| r.weights).sum();
            if weights > 0 {
                let mean = |f: &dyn Fn(&Report) -> f64| {
                    of_class.iter().map(|r| r.weights as f64 * f(r)).sum::<f64>() / weights as f64
                };
                let (bits, error) = (mean(&|r| f64::from(r.bits)), mean(&|r| r.error));
                let calibrated: Vec<_> =
                    of_class.iter().filter_map(|r| Some((r.weights as f64, r.output_error?))).collect();
                let of = calibrated.iter().map(|(w, _)| w).sum::<f64>();
                let outputs = match calibrated.iter().map(|(w, e)| w * e).sum::<f64>() / of {
                    mean if of > 0.0 => format!(", of outputs on the text {mean:.6}"),
                    _ => String::new(),
                };
                println!(
                    "  {name:9} {weights:>13} weights, {bits:.2} bits, squared error {error:.6} of the norm{outputs}"
                );
            }
        }
        let without = reports.iter().filter(|r| r.output_error.is_none()).count();
        if about.calibration.is_some() && without > 0 {
            println!(
                "{without} of {} matrices met fewer rows of the text than they have inputs, and were coded without it",
                reports.len()
            );
        }
        Ok(())
    }
}

fn views(stored: &[StoredTensor]) -> anyhow::Result<Vec<(String, TensorView<'_>)>> {
    stored
        .iter()
        .map(|t| {
            let dtype = match t.dtype {
                Dtype::I16 => safetensors::Dtype::I16,
                Dtype::I32 => safetensors::Dtype::I32,
                Dtype::F16 => safetensors::Dtype::F16,
                Dtype::Bf16 => safetensors::Dtype::BF16,
                Dtype::F32 => safetensors::Dtype::F32,
                Dtype::Other => bail!("tensor `{}` has no type to store", t.name),
            };
            Ok((t.name.clone(), TensorView::new(dtype, t.shape.clone(), &t.data)?))
        })
        .collect()
}

fn write_file(
    path: &Path,
    views: Vec<(String, TensorView<'_>)>,
    metadata: HashMap<String, String>,
) -> anyhow::Result<()> {
    write_whole(path, |partial| Ok(safetensors::serialize_to_file(views, Some(metadata), partial)?))
}

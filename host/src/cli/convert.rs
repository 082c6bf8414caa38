//! `plugfold convert`: a checkpoint under other names, its tensors fused, stacked or split.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use plugfold_engine::checkpoint::{Checkpoint, Layout, Naming, Target};
use plugfold_engine::config::ModelConfig;
use plugfold_kernels::cpu::exl3::Codebook;
use rayon::prelude::*;
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::shards::{self, Entry};

/// Write a checkpoint under other published names: experts stacked or apart, projections fused or split.
///
/// No number changes: what is written is compared with the source by hash.
#[derive(Args)]
pub struct Convert {
    /// Folder of the source.
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Folder to write.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// published (every matrix by itself), transformers (experts stacked) or exl3 (q, k and v fused where they can be).
    #[arg(long, value_name = "NAMING", value_parser = naming)]
    to: Naming,
    /// Most bytes of a file, in GB.
    #[arg(long, default_value_t = 5.0, value_name = "GB")]
    file_size: f64,
}

fn naming(name: &str) -> Result<Naming, String> {
    let found = Naming::ALL.into_iter().find(|n| n.name() == name);
    found.ok_or_else(|| "give published, transformers or exl3".to_owned())
}

impl Convert {
    /// Converts.
    pub fn run(self) -> anyhow::Result<()> {
        if !(self.file_size > 0.0 && self.file_size < 1e6) {
            bail!("--file-size {}: give a number of GB above 0", self.file_size);
        }
        let config = ModelConfig::from_dir(&self.model)?;
        let source = Checkpoint::open(&self.model)?;
        let resolved = source.check(&config)?;
        let Layout { targets, notes } = resolved.layout(&config, self.to)?;
        for note in &notes {
            println!("{note}");
        }
        shards::new_dir(&self.out)?;
        let entries: Vec<Entry> = targets
            .iter()
            .map(|t| Entry { name: t.name.clone(), dtype: t.dtype, shape: t.shape.clone() })
            .collect();
        let files = shards::cut(&entries, (self.file_size * 1e9) as u64);
        let total: u64 = entries.iter().map(Entry::bytes).sum();
        let bar = bar("convert", total);
        let (metadata, index) = self.metadata()?;
        let mut hashes = Vec::with_capacity(targets.len());
        for (i, range) in files.iter().enumerate() {
            let path = self.out.join(shards::file_name(i, files.len()));
            let targets = &targets[range.clone()];
            shards::write(&path, &entries[range.clone()], &metadata, |t, out| {
                let mut hash = Sha256::new();
                for piece in &targets[t].pieces {
                    hash.update(piece);
                    out.write_all(piece)?;
                    bar.inc(piece.len() as u64);
                }
                hashes.push(hash.finalize().into());
                Ok(())
            })?;
        }
        bar.finish_and_clear();
        let own = ["quantization_config.json", shards::INDEX];
        shards::copy_others(&self.model, &self.out, &own)?;
        self.rename_storage(&entries)?;
        shards::write_index(&self.out, &entries, &files, index)?;
        let all = verify(&self.out, &config, &targets, &hashes, total)?;
        println!(
            "{} tensors, {total} bytes in {} files, read back and equal to the source; SHA-256 of their SHA-256: {all}",
            targets.len(),
            files.len()
        );
        Ok(())
    }

    /// Metadata of the source's files, and that of its index.
    fn metadata(&self) -> anyhow::Result<(Map<String, Value>, Map<String, Value>)> {
        let mut all = Map::new();
        let mut files: Vec<PathBuf> = std::fs::read_dir(&self.model)?
            .collect::<Result<Vec<_>, _>>()?
            .iter()
            .map(std::fs::DirEntry::path)
            .collect();
        files.sort();
        for path in files.iter().filter(|p| p.extension().is_some_and(|e| e == "safetensors")) {
            for (key, value) in shards::metadata(path)? {
                all.entry(key).or_insert(value);
            }
        }
        all.entry("format").or_insert(json!("pt"));
        let index = self.model.join(shards::INDEX);
        let index: Value = if index.exists() { read_json(&index)? } else { Value::Null };
        Ok((all, index["metadata"].as_object().cloned().unwrap_or_default()))
    }

    /// `quantization_config.json` with the modules as they are called now.
    fn rename_storage(&self, entries: &[Entry]) -> anyhow::Result<()> {
        let path = self.model.join("quantization_config.json");
        if !path.exists() {
            return Ok(());
        }
        let mut value = read_json(&path)?;
        if value.get("tensor_storage").is_some() {
            value["tensor_storage"] = Value::Object(describe(entries));
        }
        shards::write_json(&self.out.join("quantization_config.json"), &value)
    }
}

/// `tensor_storage`: what is stored of each module.
pub fn describe(entries: &[Entry]) -> Map<String, Value> {
    let mut modules: BTreeMap<&str, Vec<&Entry>> = BTreeMap::new();
    for entry in entries {
        let module = entry.name.rsplit_once('.').map_or(&*entry.name, |(module, _)| module);
        modules.entry(module).or_default().push(entry);
    }
    modules.into_iter().map(|(module, entries)| (module.to_owned(), storage(&entries))).collect()
}

fn storage(entries: &[&Entry]) -> Value {
    let tensors: Map<String, Value> = entries
        .iter()
        .map(|e| {
            let dtype = shards::torch_name(e.dtype);
            (e.name.clone(), json!({"shape": e.shape, "n_bytes": e.bytes(), "dtype": dtype}))
        })
        .collect();
    let mut storage = json!({"stored_tensors": tensors});
    let named = |suffix: &str| entries.iter().find(|e| e.name.rsplit('.').next() == Some(suffix));
    if let Some(&[_, _, units]) = named("trellis").map(|e| &e.shape[..]) {
        let bits = units as f64 / 16.0;
        storage["quant_format"] = json!("exl3");
        storage["bits_per_weight"] = if bits.fract() == 0.0 { json!(bits as u32) } else { json!(bits) };
        for (suffix, value) in Codebook::ALL.iter().filter_map(|c| c.marker()) {
            if named(suffix).is_some() {
                storage[format!("{suffix}_multiplier")] = json!(value);
            }
        }
    }
    storage
}

fn read_json(path: &Path) -> anyhow::Result<Value> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| format!("{} is no JSON", path.display()))
}

fn bar(what: &str, total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    let template = format!("{what} [{{bar:40}}] {{bytes}}/{{total_bytes}} {{bytes_per_sec}} {{eta}}");
    if let Ok(style) = ProgressStyle::with_template(&template) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar
}

/// Reads the written files and compares every tensor with what was to be written. Gives one hash of all.
fn verify(
    dir: &Path,
    config: &ModelConfig,
    targets: &[Target<'_>],
    hashes: &[[u8; 32]],
    total: u64,
) -> anyhow::Result<String> {
    let written = Checkpoint::open(dir).context("what was written cannot be read")?;
    written.check(config).context("what was written is no checkpoint of this model")?;
    let bar = bar("verify", total);
    targets.par_iter().zip(hashes).try_for_each(|(target, hash)| {
        let Some(data) = written.tensor(&target.name) else {
            bail!("tensor `{}` is not in what was written", target.name);
        };
        let found: [u8; 32] = Sha256::digest(data.bytes).into();
        if found != *hash || data.dtype != target.dtype || data.shape != target.shape {
            bail!(
                "tensor `{}` was not written as it was read: the disk or its driver is at fault",
                target.name
            );
        }
        bar.inc(data.bytes.len() as u64);
        Ok(())
    })?;
    bar.finish_and_clear();
    let by_name: BTreeMap<&str, &[u8; 32]> = targets.iter().map(|t| &*t.name).zip(hashes).collect();
    let mut all = Sha256::new();
    for (name, hash) in by_name {
        all.update(name.as_bytes());
        all.update(hash);
    }
    let mut text = String::with_capacity(64);
    for byte in all.finalize() {
        write!(text, "{byte:02x}")?;
    }
    Ok(text)
}

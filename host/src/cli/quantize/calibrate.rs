//! Calibration: the rows that a text sends through each matrix, by which its errors are weighed.
//!
//! The source runs over the text once, and every row that a matrix to quantize reads is kept in a file: of several
//! matrices that read the same rows once, of an expert's second matrix those that were routed to it. The files lie in
//! the folder of the unfinished run, so a run that goes on does not compute them again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::{self, File};
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use plugfold::text::Tokenizer;
use plugfold_abi::{
    Below as _, BelowObject, Bits, Call, Claim, Granted, OpError, Phase, Provider, ProviderObject, Query,
    TextBuf,
};
use plugfold_engine::core::{Core, CoreOptions, MtpRows, SeqRows, Want};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::split::Split;
use plugfold_engine::weights::recipes;
use plugfold_kernels::cpu::exl3::quantize::Hessian;
use plugfold_kernels::cpu::operands::Operands;
use plugfold_kernels::cpu::rows::Rows as View;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::plan::Linear;
use super::read;
use crate::cli::shards::write_json;

/// Tokens of a sequence; a longer text is cut into several.
const LENGTH: usize = 2048;
/// Tokens of a chunk.
const CHUNK: usize = 128;
/// Says that all rows are there.
const INDEX: &str = "whole.json";
/// Operations that multiply by a matrix which may be quantized.
const READERS: [&str; 3] = ["dense", "moe.up", "moe.down"];
/// The module that the model's last rows go to.
const HEAD: &str = "lm_head";

/// A text to calibrate with.
#[derive(Args, Clone, Debug)]
pub struct Calibration {
    /// A text by which errors are weighed: outputs on rows like its own get better, weights as such worse. Needs the
    /// memory to run the source, and room in --out for the rows (the width of each matrix, 4 bytes a number and token).
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Tokens of the text that are used. A matrix that meets fewer rows than it has inputs is coded without calibration.
    #[arg(long, default_value_t = 8192, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    calibration_tokens: u32,
}

/// The ids of a calibration text.
pub struct Ids {
    ids: Vec<u32>,
    digest: String,
}

impl Calibration {
    /// Reads and encodes the text, if there is one.
    pub fn ids(&self, model: &Path) -> anyhow::Result<Option<Ids>> {
        let Some(path) = &self.calibration else { return Ok(None) };
        let text = String::from_utf8(read(path)?)
            .with_context(|| format!("--calibration {}: is no UTF-8 text", path.display()))?;
        let mut ids = Tokenizer::load(model)?.encode(&text)?;
        ids.truncate(self.calibration_tokens as usize);
        if ids.len() < 2 {
            bail!("--calibration {}: has {} tokens; give a text of at least 2", path.display(), ids.len());
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
        let digest = Sha256::digest(bytes);
        Ok(Some(Ids { digest: format!("{digest:x}"), ids }))
    }
}

impl Ids {
    /// What names them among the options of a run.
    pub fn digest(&self) -> &str {
        &self.digest
    }
}

/// What is kept, beside the files of rows.
#[derive(Default, Serialize, Deserialize)]
struct Index {
    sequences: usize,
    length: usize,
    /// The file of each module's rows, without its ending.
    files: BTreeMap<String, String>,
}

/// The rows that a text sent through the matrices.
pub struct Rows {
    dir: PathBuf,
    index: Index,
}

impl Rows {
    /// Runs the text, or takes what an earlier run kept of it in `dir`.
    pub fn gather(dir: &Path, model: &Path, text: &Ids, linears: &[&Linear]) -> anyhow::Result<Self> {
        let marker = dir.join(INDEX);
        if marker.exists() {
            let index = serde_json::from_slice(&read(&marker)?)
                .with_context(|| format!("{} is damaged; remove {}", marker.display(), dir.display()))?;
            return Ok(Self { dir: dir.to_owned(), index });
        }
        if dir.exists() {
            fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
        }
        fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let index = run(dir, model, text, linears)?;
        write_json(&marker, &serde_json::to_value(&index)?)?;
        Ok(Self { dir: dir.to_owned(), index })
    }

    /// Sequences and the tokens of the longest.
    pub fn size(&self) -> (usize, usize) {
        (self.index.sequences, self.index.length)
    }

    /// What a matrix reads, by a name that those share which read the same.
    pub fn file(&self, linear: &Linear) -> Option<&str> {
        self.index.files.get(&linear.name).map(String::as_str)
    }

    /// Second moments of the rows of a file; none where they are fewer than the inputs, which they then say too
    /// little about.
    pub fn hessian(&self, file: &str, inputs: usize) -> anyhow::Result<Option<Hessian>> {
        let path = path_of(&self.dir, file);
        if !path.exists() {
            return Ok(None);
        }
        let bytes = read(&path)?;
        if !bytes.len().is_multiple_of(4 * inputs) {
            bail!(
                "{}: {} bytes are no rows of {inputs} numbers; remove {} and start again",
                path.display(),
                bytes.len(),
                self.dir.display()
            );
        }
        let values: Vec<f32> = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let mut hessian = Hessian::new(inputs);
        hessian.add(&values);
        Ok((hessian.rows() >= inputs).then_some(hessian))
    }
}

fn path_of(dir: &Path, file: &str) -> PathBuf {
    dir.join(format!("{file}.f32"))
}

/// Runs the text through the source, with a tap in front of every product.
fn run(dir: &Path, model: &Path, text: &Ids, linears: &[&Linear]) -> anyhow::Result<Index> {
    let length = text.ids.len().min(LENGTH);
    // A token behind the last: the draft head reads the one that follows.
    let options =
        Options { context: Some(length + 1), prefill_rows: CHUNK.min(length), ..Options::new(model) };
    let config = plugfold_engine::config::ModelConfig::from_dir(model)?;
    let wanted: HashSet<&str> = linears.iter().map(|l| l.name.as_str()).collect();
    let mut index = Index { sequences: 0, length, files: BTreeMap::new() };
    let mut readers = HashMap::new();
    for recipe in recipes(&config, Split::new(0, 1, &config)?, config.mtp_layers > 0) {
        let modules: Vec<&str> =
            recipe.parts.iter().filter_map(|p| p.tensor.strip_suffix(".weight")).collect();
        if recipe.role == "head" || !modules.iter().any(|m| wanted.contains(m)) {
            continue;
        }
        // Each expert's second matrix has rows of its own; all others of a recipe read the same.
        let files: Vec<String> = if recipe.role == "experts.down" {
            modules.iter().map(|m| (*m).to_owned()).collect()
        } else {
            vec![modules[0].to_owned()]
        };
        for (i, module) in modules.iter().enumerate() {
            index.files.insert((*module).to_owned(), files[i.min(files.len() - 1)].clone());
        }
        readers.insert((recipe.layer, recipe.role.to_owned()), files);
    }
    index.files.insert(HEAD.to_owned(), HEAD.to_owned());
    let sink = Arc::new(Sink { dir: dir.to_owned(), readers });
    let mut hooks = Hooks::default();
    for op in READERS {
        hooks.add_object("quantize", ProviderObject::new(Tap { op, sink: sink.clone() }))?;
    }
    let core = CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() };
    let mut rank = Rank::load(&options, core, World::single())?;
    let bar = ProgressBar::new(text.ids.len() as u64);
    if let Ok(style) =
        ProgressStyle::with_template("calibrate [{bar:40}] {human_pos}/{human_len} tokens {eta}")
    {
        bar.set_style(style.progress_chars("=> "));
    }
    for ids in text.ids.chunks(length) {
        index.sequences += 1;
        sequence(&mut rank.core, &sink, ids, &bar)?;
    }
    bar.finish_and_clear();
    Ok(index)
}

/// Runs one sequence through the layers, and what comes out of them through the draft head.
fn sequence(core: &mut Core, sink: &Sink, ids: &[u32], bar: &ProgressBar) -> anyhow::Result<()> {
    let hidden = core.config().hidden_size;
    core.begin(0);
    let mut last = Vec::with_capacity(ids.len() * hidden);
    for tokens in ids.chunks(CHUNK) {
        let rows = [SeqRows { slot: 0, tokens, want: Want::Nothing, embeds: &[] }];
        let forward = core.forward(Phase::Prefill, &rows, None, false)?;
        if let Some(failure) = &forward.failure {
            bail!("the calibration text cannot be run: {failure}");
        }
        last.extend_from_slice(core.output(&forward, "rows").context("the model gives out no rows")?);
        core.commit(&forward, &[tokens.len()])?;
        bar.inc(tokens.len() as u64);
    }
    sink.add(HEAD, View::new(&last, hidden), 0..ids.len())?;
    if core.has_mtp() {
        for start in (0..ids.len() - 1).step_by(CHUNK) {
            let end = (start + CHUNK).min(ids.len() - 1);
            let rows = MtpRows {
                slot: 0,
                start,
                next_ids: &ids[start + 1..=end],
                hidden: &last[start * hidden..end * hidden],
                want: Want::Nothing,
                embeds: &[],
            };
            let forward = core.mtp(&[rows], true, None)?;
            if let Some(failure) = &forward.failure {
                bail!("the calibration text cannot be run through the draft head: {failure}");
            }
        }
    }
    Ok(())
}

/// Where rows go.
struct Sink {
    dir: PathBuf,
    /// Files by layer and role of the weight; of `experts.down` one an expert.
    readers: HashMap<(u32, String), Vec<String>>,
}

impl Sink {
    /// Appends some rows of `x` to a file.
    fn add(&self, file: &str, x: View<'_, f32>, rows: impl Iterator<Item = usize>) -> anyhow::Result<()> {
        let path = path_of(&self.dir, file);
        let write = || -> std::io::Result<()> {
            let mut out = BufWriter::new(File::options().create(true).append(true).open(&path)?);
            for row in rows {
                for value in x.row(row) {
                    out.write_all(&value.to_le_bytes())?;
                }
            }
            out.flush()
        };
        write().with_context(|| format!("cannot write {}", path.display()))
    }

    fn take(&self, op: &'static str, call: &Call<'_>) -> Result<(), OpError> {
        let Some(weight) = call.weights[0] else { return Ok(()) };
        let Some(files) = self.readers.get(&(call.layer, weight.role.get_str().to_owned())) else {
            return Ok(());
        };
        let operands = Operands::new(op, call)?;
        let view = &call.inputs[0];
        let x = operands.input::<f32>(0, "rows", view.rows as usize, view.cols as usize)?;
        let told = |e: anyhow::Error| OpError::new(format!("{e:#}"));
        if files.len() == 1 {
            return self.add(&files[0], x, 0..x.rows()).map_err(told);
        }
        let order = operands.input::<i32>(1, "order", x.rows(), 1)?;
        let starts = operands.input::<i32>(2, "starts", files.len() + 1, 1)?;
        for (expert, file) in files.iter().enumerate() {
            let pairs = starts.row(expert)[0] as usize..starts.row(expert + 1)[0] as usize;
            if !pairs.is_empty() {
                self.add(file, x, pairs.map(|p| order.row(p)[0] as usize)).map_err(told)?;
            }
        }
        Ok(())
    }
}

/// Keeps what a product reads, then lets it be computed.
struct Tap {
    op: &'static str,
    sink: Arc<Sink>,
}

impl Provider for Tap {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.op.into())
    }

    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        let mine = query.op.get_str() == self.op;
        Ok(if mine { Claim::Yes(Granted::plain(Bits::of("ref"))) } else { Claim::No })
    }

    fn run(&self, call: &Call<'_>, _: &plugfold_abi::Plan, below: &BelowObject) -> Result<(), OpError> {
        self.sink.take(self.op, call)?;
        below.run(call)
    }
}

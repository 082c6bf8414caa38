//! `plugfold debug`: what the model computes, into safetensors files.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

use super::{ModelArgs, exl3, ids, model, write_whole};

/// Write what the model computes.
#[derive(Subcommand)]
pub enum Debug {
    /// Logits of every position: tensor `logits` [positions, vocabulary], f32.
    Logits(Trace),
    /// The streams after every layer: `layer.N` [positions, streams, hidden], and `final` [positions, hidden], f32.
    Hidden(Trace),
    /// A stored EXL3 layer, decoded: `inner` [k, n], f16, and `w` [k, n], f32.
    Exl3(exl3::Decode),
}

/// A prompt and where its trace goes.
#[derive(Args)]
pub struct Trace {
    #[command(flatten)]
    model: ModelArgs,
    /// Token ids, as 1,2,3.
    #[arg(long, value_name = "IDS")]
    ids: String,
    /// The file to write.
    #[arg(long, value_name = "FILE.safetensors")]
    out: PathBuf,
}

impl Debug {
    /// Runs the prompt and writes the file.
    pub fn run(self) -> anyhow::Result<()> {
        let (args, streams) = match self {
            Self::Logits(args) => (args, false),
            Self::Hidden(args) => (args, true),
            Self::Exl3(args) => return args.run(),
        };
        let prompt = ids(&args.ids)?;
        let setup = args.model.setup(json!({"slots": 1}))?;
        let mut opened = model::open(&setup)?;
        let trace = opened.rank.trace(&prompt, streams)?;
        let rows = prompt.len();
        let hidden = opened.rank.core.config().hidden_size;
        let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
        if streams {
            for (layer, values) in trace.streams.into_iter().enumerate() {
                let width = values.len() / (rows * hidden);
                tensors.push((format!("layer.{layer}"), vec![rows, width, hidden], values));
            }
            tensors.push(("final".into(), vec![rows, hidden], trace.rows));
        } else {
            let vocab = trace.logits.len() / rows;
            tensors.push(("logits".into(), vec![rows, vocab], trace.logits));
        }
        opened.rank.world.goodbye();
        drop(opened.rank);
        opened.others.finish();
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, _, values)| values.iter().flat_map(|v| v.to_le_bytes()).collect())
            .collect();
        let views = tensors
            .iter()
            .zip(&bytes)
            .map(|((name, shape, _), data)| {
                Ok((name.clone(), TensorView::new(Dtype::F32, shape.clone(), data)?))
            })
            .collect::<anyhow::Result<Vec<_>>>()
            .context("the trace does not have the shape it should")?;
        write_whole(&args.out, |path| Ok(safetensors::serialize_to_file(views, None, path)?))
    }
}

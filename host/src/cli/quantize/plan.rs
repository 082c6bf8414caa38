//! Which matrices are quantized, at which rate, and which file they go to.

use std::collections::BTreeMap;

use anyhow::bail;
use clap::Args;
use plugfold_engine::checkpoint::Checkpoint;
use plugfold_kernels::cpu::exl3::{Codebook, Rate};
use serde_json::{Value, json};

use super::rate;

/// Sides below this are not worth the padding to 128.
pub const SMALLEST_SIDE: usize = 32;

/// A rate, or 16 bits for leaving a class as it is.
#[derive(Clone, Copy)]
pub struct Choice(Option<Rate>);

fn choice(text: &str) -> Result<Choice, String> {
    rate(text).map(Choice)
}

/// Bits by class of matrix.
#[derive(Args, Clone)]
pub struct Rates {
    /// Bits a weight of every class that has no option of its own: 1 to 8, 1.5, 2.5, 3.5, or 16 to leave it.
    #[arg(long, default_value = "4", value_name = "BITS", value_parser = choice)]
    bits: Choice,
    /// Bits of the routed experts.
    #[arg(long, value_name = "BITS", value_parser = choice)]
    expert_bits: Option<Choice>,
    /// Bits of the shared experts.
    #[arg(long, value_name = "BITS", value_parser = choice)]
    shared_bits: Option<Choice>,
    /// Bits of the dense MLPs.
    #[arg(long, value_name = "BITS", value_parser = choice)]
    mlp_bits: Option<Choice>,
    /// Bits of the attention projections.
    #[arg(long, value_name = "BITS", value_parser = choice)]
    attention_bits: Option<Choice>,
    /// Bits of the draft head's input projection.
    #[arg(long, value_name = "BITS", value_parser = choice)]
    draft_bits: Option<Choice>,
    /// Bits of the output layer.
    #[arg(long, default_value = "6", value_name = "BITS", value_parser = choice)]
    head_bits: Choice,
}

/// Kinds of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    Expert,
    Shared,
    Mlp,
    Attention,
    Draft,
    Head,
}

impl Rates {
    /// The rate of a class; `None` if it stays as it is.
    pub fn of(&self, class: Class) -> Option<Rate> {
        let own = match class {
            Class::Expert => self.expert_bits,
            Class::Shared => self.shared_bits,
            Class::Mlp => self.mlp_bits,
            Class::Attention => self.attention_bits,
            Class::Draft => self.draft_bits,
            Class::Head => Some(self.head_bits),
        };
        own.unwrap_or(self.bits).0
    }

    /// Bits of the output layer, 16 if it stays as it is.
    pub fn head(&self) -> f32 {
        self.of(Class::Head).map_or(16.0, Rate::bits)
    }

    /// Bits of the classes that have no option of their own.
    pub fn body(&self) -> f32 {
        self.bits.0.map_or(16.0, Rate::bits)
    }

    /// All classes with their bits.
    pub fn describe(&self) -> Value {
        let bits = |class| self.of(class).map_or(16.0, Rate::bits);
        json!({
            "expert": bits(Class::Expert), "shared": bits(Class::Shared), "mlp": bits(Class::Mlp),
            "attention": bits(Class::Attention), "draft": bits(Class::Draft), "head": bits(Class::Head),
        })
    }
}

/// A matrix to quantize.
#[derive(Debug)]
pub struct Linear {
    /// Module name, without `.weight`.
    pub name: String,
    /// What names its input: matrices that read the same activations share signs.
    pub input: String,
    pub class: Class,
    pub rate: Rate,
    pub inputs: usize,
    pub outputs: usize,
}

impl Linear {
    /// Weights, without padding.
    pub fn weights(&self) -> u64 {
        (self.inputs * self.outputs) as u64
    }
}

/// What goes into one file of the output.
#[derive(Debug, Default)]
pub struct OutputFile {
    /// For the progress bar.
    pub title: String,
    pub linears: Vec<Linear>,
    /// Tensors that stay as they are.
    pub plain: Vec<String>,
}

/// Everything to write.
pub struct Plan(Vec<OutputFile>);

impl Plan {
    /// Sorts the tensors of `source`: one file for each decoder layer, one for the rest.
    pub fn new(source: &Checkpoint, rates: &Rates, codebook: Codebook) -> anyhow::Result<Self> {
        let mut files: BTreeMap<usize, OutputFile> = BTreeMap::new();
        for name in source.names() {
            let Some(tensor) = source.tensor(name) else { continue };
            if name.ends_with(".trellis") {
                bail!("tensor `{name}`: the source is quantized already");
            }
            let file = files.entry(layer_of(name).map_or(0, |layer| layer + 1)).or_default();
            let module = name.strip_suffix(".weight");
            let class = module.and_then(class_of);
            if class.is_none() && name.contains(".experts.") && tensor.shape.len() == 3 {
                bail!(
                    "tensor `{name}` stacks all experts; split it first: plugfold convert --model {} --out DIR --to published",
                    source.dir().display()
                );
            }
            match (module, class, class.and_then(|c| rates.of(c)), tensor.shape) {
                (Some(module), Some(class), Some(rate), &[outputs, inputs])
                    if outputs.min(inputs) >= SMALLEST_SIDE =>
                {
                    if !rate.is_whole() && codebook != Codebook::Mul1 {
                        bail!("{rate} bits exist with --codebook mul1 only, not with {}", codebook.name());
                    }
                    let (name, input) = (module.to_owned(), input_of(module));
                    file.linears.push(Linear { name, input, class, rate, inputs, outputs });
                }
                _ => file.plain.push(name.to_owned()),
            }
        }
        for (&key, file) in &mut files {
            file.title = if key == 0 { "top".into() } else { format!("layer {}", key - 1) };
            // Biases of quantized matrices are stored with them.
            let with_bias = |plain: &String| {
                plain
                    .strip_suffix(".bias")
                    .is_some_and(|module| file.linears.iter().any(|l| l.name == module))
            };
            file.plain.retain(|plain| !with_bias(plain));
        }
        let plan = Self(files.into_values().collect());
        if plan.weights() == 0 {
            bail!("{}: there is no matrix to quantize at the bits asked for", source.dir().display());
        }
        Ok(plan)
    }

    /// The files to write.
    pub fn files(&self) -> &[OutputFile] {
        &self.0
    }

    /// Weights to quantize.
    pub fn weights(&self) -> u64 {
        self.0.iter().flat_map(|f| &f.linears).map(Linear::weights).sum()
    }
}

/// The decoder layer that a tensor belongs to.
fn layer_of(name: &str) -> Option<usize> {
    if name.contains("visual") {
        return None;
    }
    name.split_once(".layers.")?.1.split('.').next()?.parse().ok()
}

/// The class of a module that converters code.
pub fn class_of(module: &str) -> Option<Class> {
    if module == "lm_head" || module.ends_with(".lm_head") {
        return Some(Class::Head);
    }
    layer_of(module)?;
    let (_, rest) = module.split_once(".layers.")?;
    let part = rest.split_once('.')?.1;
    let projection = |name: &str| matches!(name, "gate_proj" | "up_proj" | "down_proj" | "w1" | "w2" | "w3");
    if let Some(attention) = part.strip_prefix("self_attn.") {
        return matches!(
            attention,
            "qkv_proj"
                | "q_proj"
                | "k_proj"
                | "v_proj"
                | "o_proj"
                | "q_a_proj"
                | "q_b_proj"
                | "kv_a_proj_with_mqa"
                | "indexer.wq_b"
        )
        .then_some(Class::Attention);
    }
    if let Some(mlp) = part.strip_prefix("mlp.") {
        return if let Some(expert) = mlp.strip_prefix("experts.") {
            expert.split_once('.').is_some_and(|(_, p)| projection(p)).then_some(Class::Expert)
        } else if let Some(shared) = mlp.strip_prefix("shared_experts.") {
            projection(shared).then_some(Class::Shared)
        } else {
            projection(mlp).then_some(Class::Mlp)
        };
    }
    (part == "eh_proj").then_some(Class::Draft)
}

/// A name for what a module reads, the same for modules that read the same.
pub fn input_of(module: &str) -> String {
    let (parent, last) = module.rsplit_once('.').unwrap_or(("", module));
    match last {
        "q_proj" | "k_proj" | "v_proj" | "q_a_proj" | "kv_a_proj_with_mqa" => format!("{parent}.input"),
        "gate_proj" | "up_proj" | "w1" | "w3" => {
            // The experts of a layer and its shared expert read the same rows.
            let mlp = parent.split(".mlp").next().unwrap_or(parent);
            format!("{mlp}.mlp.input")
        }
        _ => format!("{module}.input"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_the_published_names() {
        let layer = "model.language_model.layers.3";
        for (module, class) in [
            ("lm_head", Some(Class::Head)),
            (&*format!("{layer}.mlp.experts.17.down_proj"), Some(Class::Expert)),
            (&format!("{layer}.mlp.shared_experts.up_proj"), Some(Class::Shared)),
            (&format!("{layer}.mlp.gate_proj"), Some(Class::Mlp)),
            (&format!("{layer}.mlp.gate"), None),
            (&format!("{layer}.self_attn.indexer.wq_b"), Some(Class::Attention)),
            (&format!("{layer}.self_attn.indexer.wk"), None),
            (&format!("{layer}.self_attn.kv_b_proj"), None),
            (&format!("{layer}.self_attn.f_a_proj"), None),
            (&format!("{layer}.eh_proj"), Some(Class::Draft)),
            ("model.language_model.embed_tokens", None),
            ("model.visual.blocks.0.mlp.gate_proj", None),
            ("model.visual.layers.0.mlp.gate_proj", None),
        ] {
            assert_eq!(class_of(module), class, "{module}");
        }
    }

    #[test]
    fn modules_that_read_the_same_rows_share_signs() {
        let input = |part: &str| input_of(&format!("m.layers.1.{part}"));
        assert_eq!(input("self_attn.q_proj"), input("self_attn.v_proj"));
        assert_eq!(input("mlp.experts.0.gate_proj"), input("mlp.experts.5.up_proj"));
        assert_eq!(input("mlp.experts.0.gate_proj"), input("mlp.shared_experts.up_proj"));
        assert_ne!(input("mlp.experts.0.down_proj"), input("mlp.experts.1.down_proj"));
        assert_ne!(input("self_attn.o_proj"), input("self_attn.q_proj"));
    }
}

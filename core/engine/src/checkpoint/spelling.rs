//! The names under which a published tensor may be stored.

use safetensors::Dtype;

use super::Checkpoint;
use super::inventory::{Expected, HEAD, MATRIX, Part, TEXT, VISION};
use crate::config::ModelConfig;

/// What a spelling changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Style {
    /// Nothing.
    Published,
    /// The head inside the text model's module.
    InnerHead,
    /// Parameters of the decay in a module of their own.
    ForgetGate,
    /// One projection to q, k and v.
    FusedProjection,
    /// One convolution of q, k and v.
    FusedConvolution,
    /// Hyper-connections as modules.
    HyperModule,
    /// Experts with numbers for names.
    NumberedExpert,
    /// Experts of a layer in one tensor.
    StackedExperts,
}

/// A way in which a published tensor may be stored.
pub(super) struct Spelling {
    /// Stored name.
    pub(super) tensor: String,
    /// Shape under that name.
    pub(super) shape: Vec<usize>,
    /// First element of the published tensor.
    pub(super) start: usize,
    /// Index of the matrix in a stack, and the first row of the published tensor in it.
    pub(super) matrix: usize,
    pub(super) row: usize,
    /// How it differs from the published one.
    pub(super) style: Style,
}

impl Spelling {
    /// The module of the weight of a linear layer, which may be stored in another form than numbers.
    pub(super) fn module(&self) -> Option<&str> {
        if self.shape.len() == 2 { self.tensor.strip_suffix(".weight") } else { None }
    }
}

/// Which names a checkpoint may use.
pub(super) struct Spellings {
    /// Prefix of the text model in this checkpoint; a text-only one may have no `language_model.` in its names.
    text: &'static str,
    /// Prefix of the vision tower.
    vision: &'static str,
    experts: usize,
}

impl Spellings {
    /// The published prefixes.
    pub(super) fn published(config: &ModelConfig) -> Self {
        Self { text: TEXT, vision: VISION, experts: config.moe.experts }
    }

    /// Those that a checkpoint uses.
    pub(super) fn of(checkpoint: &Checkpoint, config: &ModelConfig) -> Self {
        let pick = |published: &'static str, other: &'static str, probes: &[&str]| {
            let has = |prefix: &str| probes.iter().any(|probe| checkpoint.has(&format!("{prefix}{probe}")));
            if !has(published) && has(other) { other } else { published }
        };
        Self {
            text: pick(TEXT, "model.", &["embed_tokens.weight", "embed_tokens.signs"]),
            vision: pick(VISION, "visual.", &["patch_embed.proj.weight"]),
            experts: config.moe.experts,
        }
    }

    /// Every way in which a tensor may be stored, the published one first.
    pub(super) fn of_tensor(&self, expected: &Expected) -> Vec<Spelling> {
        let (prefix, rest) = if let Some(rest) = expected.name.strip_prefix(TEXT) {
            (self.text, rest)
        } else if let Some(rest) = expected.name.strip_prefix(VISION) {
            (self.vision, rest)
        } else {
            ("", expected.name.as_str())
        };
        let plain = |rest: &str| Spelling {
            tensor: format!("{prefix}{rest}"),
            shape: expected.shape.clone(),
            start: 0,
            matrix: 0,
            row: 0,
            style: Style::Published,
        };
        let styled = |style, rest: &str| Spelling { style, ..plain(rest) };
        let mut list = vec![plain(rest)];
        if expected.part == Part::Vision {
            return list;
        }
        if rest == HEAD {
            list.push(styled(Style::InnerHead, &format!("language_model.{HEAD}")));
        }
        if let Some((layer, name)) = rest.split_once(".self_attn.") {
            if matches!(name, "f_a_proj.weight" | "f_b_proj.weight" | "dt_bias" | "A_log") {
                list.push(styled(Style::ForgetGate, &format!("{layer}.self_attn.forget_gate.{name}")));
            }
            // One projection to the channels of q, then k, then v.
            let part = ["q_proj.weight", "k_proj.weight", "v_proj.weight"].iter().position(|n| *n == name);
            if let (Some(part), &[channels, inputs]) = (part, &expected.shape[..]) {
                list.push(Spelling {
                    shape: vec![3 * channels, inputs],
                    start: part * channels * inputs,
                    row: part * channels,
                    ..styled(Style::FusedProjection, &format!("{layer}.self_attn.qkv_proj.weight"))
                });
            }
            // One convolution over the same channels.
            let part =
                ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"].iter().position(|n| *n == name);
            if let (Some(part), &[channels, one, taps]) = (part, &expected.shape[..]) {
                list.push(Spelling {
                    shape: vec![3 * channels, one, taps],
                    start: part * channels * taps,
                    row: part * channels,
                    ..styled(Style::FusedConvolution, &format!("{layer}.self_attn.conv1d.weight"))
                });
            }
        } else if let Some((layer, name)) = rest.split_once(".hc_") {
            if let Some((block, name)) = name.split_once('_') {
                list.push(styled(Style::HyperModule, &format!("{layer}.{block}_hc.{name}")));
            }
        } else if let Some((layer, name)) = rest.split_once(".mlp.experts.") {
            if let Some((expert, matrix)) = name.split_once('.') {
                let other = match matrix {
                    "gate_proj.weight" => "w1",
                    "up_proj.weight" => "w3",
                    _ => "w2",
                };
                list.push(styled(
                    Style::NumberedExpert,
                    &format!("{layer}.mlp.experts.{expert}.{other}.weight"),
                ));
            }
            list.extend(self.stacked(expected, layer, name, &plain));
        }
        list
    }

    /// An expert's matrix inside the stack of all experts.
    fn stacked(
        &self,
        expected: &Expected,
        layer: &str,
        name: &str,
        plain: &dyn Fn(&str) -> Spelling,
    ) -> Option<Spelling> {
        debug_assert!(MATRIX.contains(&Dtype::F8_E4M3) && expected.dtypes == MATRIX);
        let (expert, name) = name.split_once('.')?;
        let matrix: usize = expert.parse().ok()?;
        let [rows, cols] = expected.shape[..] else { return None };
        // The gate rows of an expert stand before its up rows.
        let (stack, height, row) = match name {
            "gate_proj.weight" => ("gate_up_proj", 2 * rows, 0),
            "up_proj.weight" => ("gate_up_proj", 2 * rows, rows),
            "down_proj.weight" => ("down_proj", rows, 0),
            _ => return None,
        };
        Some(Spelling {
            shape: vec![self.experts, height, cols],
            start: (matrix * height + row) * cols,
            matrix,
            row,
            style: Style::StackedExperts,
            ..plain(&format!("{layer}.mlp.experts.{stack}"))
        })
    }
}

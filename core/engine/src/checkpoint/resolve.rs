//! From published names to what a checkpoint really stores.

use std::collections::{BTreeSet, HashMap};

use safetensors::Dtype;

use super::error::{CheckpointError, CheckpointErrors};
use super::inventory::{Expected, HEAD, MATRIX, Part, TEXT, VISION, inventory};
use super::{Checkpoint, TensorData};
use crate::config::{ModelConfig, Quantization};

/// A checkpoint that has every tensor its configuration asks for, by published name.
///
/// Its readers give rows, columns or whole tensors, as `f32` or `bf16`.
pub struct Resolved {
    pub(super) checkpoint: Checkpoint,
    pub(super) sources: HashMap<String, Source>,
    pub(super) allow_nan: bool,
    /// The multi-token-prediction layer is there.
    pub mtp: bool,
    /// The vision tower is there.
    pub vision: bool,
    /// What an operator should hear. Each was logged when it was found.
    pub warnings: Vec<String>,
    /// Stored tensors that nothing reads, in alphabetical order.
    pub unused: Vec<String>,
}

/// Where the values of a published tensor lie.
pub(super) struct Source {
    /// Stored name.
    pub(super) tensor: String,
    /// Stored type.
    pub(super) dtype: Dtype,
    /// Published shape.
    pub(super) shape: Vec<usize>,
    /// First element inside the stored tensor, which may hold several published ones.
    pub(super) start: usize,
    /// Scales of an 8-bit matrix.
    pub(super) scale: Option<Scale>,
}

/// Where the scales of an 8-bit matrix lie: one for each block of rows and columns.
pub(super) struct Scale {
    /// Stored name.
    pub(super) tensor: String,
    /// First scale of this matrix inside the stored tensor.
    pub(super) start: usize,
    /// Row of the scaled matrix at which the published one begins (the up rows of a gate-up matrix).
    pub(super) row: usize,
    /// Scales of one row of blocks.
    pub(super) stride: usize,
    /// Rows and columns of a block.
    pub(super) block: [usize; 2],
}

/// A way in which a published tensor may be stored.
struct Spelling {
    /// Stored name.
    tensor: String,
    /// Shape under that name.
    shape: Vec<usize>,
    /// First element of the published tensor.
    start: usize,
    /// Index of the matrix in a stack, and the first row of the published tensor in it.
    matrix: usize,
    row: usize,
}

impl Checkpoint {
    /// Holds the checkpoint against a configuration: every tensor must be there with the right shape and type.
    /// Nothing is read but headers.
    ///
    /// Names of the published checkpoints and those of the transformers modules are accepted. If the configuration
    /// promises an MTP layer or a vision tower and *no* tensor of it is there, [`Resolved`] says so and warns; if
    /// only some are missing, that is an error.
    ///
    /// # Errors
    /// [`CheckpointErrors`] with everything that is missing or wrong.
    pub fn check(&self, config: &ModelConfig) -> Result<Resolved, CheckpointErrors> {
        let mut errors = Vec::new();
        let mut warnings = Vec::new();
        let quantization = config.quantization.as_ref();
        if let Some(format) = quantization.filter(|format| format.method != "fp8") {
            let errors = vec![CheckpointError::Format { method: format.method.clone() }];
            return Err(CheckpointErrors { dir: self.dir().to_owned(), errors });
        }
        let spellings = Spellings::of(self, config);
        let expected = inventory(config);
        let has = |part: Part| {
            expected
                .iter()
                .any(|e| e.part == part && spellings.of_tensor(e).iter().any(|s| self.has(&s.tensor)))
        };
        let (mtp, vision) = (has(Part::Mtp), has(Part::Vision));
        for (there, promised, what) in [
            (mtp, config.mtp_layers > 0, "an MTP layer (num_nextn_predict_layers)"),
            (vision, config.vision.is_some(), "a vision tower (vision_config)"),
        ] {
            if promised && !there {
                warnings.push(format!(
                    "config.json promises {what}, but no tensor of it is stored: running without"
                ));
            }
        }

        let mut sources = HashMap::with_capacity(expected.len());
        let mut used = BTreeSet::new();
        for tensor in expected {
            if (tensor.part == Part::Mtp && !mtp) || (tensor.part == Part::Vision && !vision) {
                continue;
            }
            match self.find(&tensor, &spellings.of_tensor(&tensor), quantization) {
                Ok(source) => {
                    used.insert(source.tensor.clone());
                    used.extend(source.scale.as_ref().map(|scale| scale.tensor.clone()));
                    sources.insert(tensor.name, source);
                }
                Err(error) => errors.push(error),
            }
        }
        let mut tied_copy = None;
        if config.tied_head
            && let Some(embedding) = sources.get(&format!("{TEXT}embed_tokens.weight"))
        {
            tied_copy = self.tie(embedding, &mut errors);
            let (tensor, shape) = (embedding.tensor.clone(), embedding.shape.clone());
            sources.insert(HEAD.to_owned(), Source { tensor, shape, scale: None, ..*embedding });
        }
        if !errors.is_empty() {
            return Err(CheckpointErrors { dir: self.dir().to_owned(), errors });
        }

        used.extend(tied_copy);
        let unused: Vec<String> =
            self.names().filter(|name| !used.contains(*name)).map(str::to_owned).collect();
        // Re-packed checkpoints may repeat the embedding and the head under the MTP layer.
        let mtp_at = format!("layers.{}.", config.layers.len());
        let copy = |name: &&String| {
            name.contains(&mtp_at)
                && (name.ends_with(".shared_head.head.weight") || name.ends_with(".embed_tokens.weight"))
        };
        let strangers: Vec<&String> = unused.iter().filter(|name| !copy(name)).collect();
        if let Some(example) = strangers.first() {
            warnings.push(format!("{} stored tensors are not read, such as {example}", strangers.len()));
        }
        for warning in &warnings {
            tracing::warn!("{}: {warning}", self.dir().display());
        }
        Ok(Resolved { checkpoint: self.clone(), sources, allow_nan: false, mtp, vision, warnings, unused })
    }

    fn has(&self, stored: &str) -> bool {
        self.files.tensors.contains_key(stored)
    }

    /// The one spelling under which a tensor is stored, with shape and type checked.
    fn find(
        &self,
        expected: &Expected,
        spellings: &[Spelling],
        quantization: Option<&Quantization>,
    ) -> Result<Source, CheckpointError> {
        let mut stored = spellings.iter().filter_map(|s| Some((s, self.tensor(&s.tensor)?)));
        let Some((spelling, data)) = stored.next() else {
            return Err(CheckpointError::Missing { tensor: expected.name.clone() });
        };
        if let Some((other, _)) = stored.next() {
            let tensor = spelling.tensor.clone();
            return Err(CheckpointError::TwoNames { tensor, other: other.tensor.clone() });
        }
        let path = || self.file_of(&spelling.tensor);
        let tensor = || spelling.tensor.clone();
        if data.shape != spelling.shape {
            let (found, expected) = (data.shape.to_vec(), spelling.shape.clone());
            return Err(CheckpointError::Shape { path: path(), tensor: tensor(), found, expected });
        }
        if !expected.dtypes.contains(&data.dtype) {
            let (found, allowed) = (data.dtype, expected.dtypes);
            return Err(CheckpointError::Type { path: path(), tensor: tensor(), found, allowed });
        }
        let scale = match (data.dtype, quantization) {
            (Dtype::F8_E4M3, None) => {
                return Err(CheckpointError::NoBlocks { path: path(), tensor: tensor() });
            }
            (Dtype::F8_E4M3, Some(format)) => Some(self.scale(spelling, data, format.block)?),
            _ => None,
        };
        let shape = expected.shape.clone();
        Ok(Source { tensor: tensor(), dtype: data.dtype, shape, start: spelling.start, scale })
    }

    /// The scales of an 8-bit matrix, or of a stack of them.
    fn scale(
        &self,
        spelling: &Spelling,
        data: TensorData,
        block: [usize; 2],
    ) -> Result<Scale, CheckpointError> {
        let name = format!("{}_scale_inv", spelling.tensor);
        let Some(scales) = self.tensor(&name) else { return Err(CheckpointError::Missing { tensor: name }) };
        let mut expected = data.shape.to_vec();
        let last = expected.len() - 1;
        expected[last - 1] = expected[last - 1].div_ceil(block[0]);
        expected[last] = expected[last].div_ceil(block[1]);
        let path = self.file_of(&name);
        if scales.shape != expected {
            return Err(CheckpointError::Shape {
                path,
                tensor: name,
                found: scales.shape.to_vec(),
                expected,
            });
        }
        if scales.dtype != Dtype::F32 {
            let allowed = super::inventory::EXACT;
            return Err(CheckpointError::Type { path, tensor: name, found: scales.dtype, allowed });
        }
        let stride = expected[last];
        let start = spelling.matrix * expected[last - 1] * stride;
        Ok(Scale { tensor: name, start, row: spelling.row, stride, block })
    }

    /// A stored head beside a tied embedding must be the same table. Gives its name.
    fn tie(&self, embedding: &Source, errors: &mut Vec<CheckpointError>) -> Option<String> {
        let (head, table) = (self.tensor(HEAD)?, self.tensor(&embedding.tensor)?);
        if head.dtype != table.dtype || head.shape != table.shape || head.bytes != table.bytes {
            let embedding = embedding.tensor.clone();
            errors.push(CheckpointError::NotTied { head: HEAD.to_owned(), embedding });
        }
        Some(HEAD.to_owned())
    }
}

/// Which names a checkpoint may use.
struct Spellings {
    /// Prefix of the text model in this checkpoint; a text-only one may have no `language_model.` in its names.
    text: &'static str,
    /// Prefix of the vision tower.
    vision: &'static str,
    experts: usize,
}

impl Spellings {
    fn of(checkpoint: &Checkpoint, config: &ModelConfig) -> Self {
        let pick = |published: &'static str, other: &'static str, probe: &str| {
            let only_other =
                !checkpoint.has(&format!("{published}{probe}")) && checkpoint.has(&format!("{other}{probe}"));
            if only_other { other } else { published }
        };
        Self {
            text: pick(TEXT, "model.", "embed_tokens.weight"),
            vision: pick(VISION, "visual.", "patch_embed.proj.weight"),
            experts: config.moe.experts,
        }
    }

    /// Every way in which a tensor may be stored, the published one first.
    fn of_tensor(&self, expected: &Expected) -> Vec<Spelling> {
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
        };
        let mut list = vec![plain(rest)];
        if expected.part == Part::Vision {
            return list;
        }
        if let Some((layer, name)) = rest.split_once(".self_attn.") {
            if matches!(name, "f_a_proj.weight" | "f_b_proj.weight" | "dt_bias" | "A_log") {
                list.push(plain(&format!("{layer}.self_attn.forget_gate.{name}")));
            }
            // One convolution over the channels of q, then k, then v.
            let part =
                ["q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"].iter().position(|n| *n == name);
            if let (Some(part), &[channels, one, taps]) = (part, &expected.shape[..]) {
                list.push(Spelling {
                    shape: vec![3 * channels, one, taps],
                    start: part * channels * taps,
                    row: part * channels,
                    ..plain(&format!("{layer}.self_attn.conv1d.weight"))
                });
            }
        } else if let Some((layer, name)) = rest.split_once(".hc_") {
            if let Some((block, name)) = name.split_once('_') {
                list.push(plain(&format!("{layer}.{block}_hc.{name}")));
            }
        } else if let Some((layer, name)) = rest.split_once(".mlp.experts.") {
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
            ..plain(&format!("{layer}.mlp.experts.{stack}"))
        })
    }
}

//! From published names to what a checkpoint really stores.

use std::collections::{BTreeSet, HashMap};

use safetensors::Dtype;

use super::error::{CheckpointError, CheckpointErrors};
use super::exl3::Exl3;
use super::inventory::{EXACT, Expected, HEAD, Part, TEXT, inventory};
use super::spelling::{Spelling, Spellings};
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
    /// The EXL3 module that holds it; `tensor` is its trellis then.
    pub(super) exl3: Option<Exl3>,
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
        let exl3 = quantization.is_some_and(|format| format.method == "exl3");
        if let Some(format) = quantization.filter(|format| format.method != "fp8" && !exl3) {
            let errors = vec![CheckpointError::Format { method: format.method.clone() }];
            return Err(CheckpointErrors { dir: self.dir().to_owned(), errors });
        }
        let spellings = Spellings::of(self, config);
        let expected = inventory(config);
        let has = |part: Part| {
            expected
                .iter()
                .any(|e| e.part == part && spellings.of_tensor(e).iter().any(|s| self.has_spelling(s)))
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
        let mut rounded: Vec<String> = Vec::new();
        for tensor in expected {
            if (tensor.part == Part::Mtp && !mtp) || (tensor.part == Part::Vision && !vision) {
                continue;
            }
            match self.find(&tensor, &spellings.of_tensor(&tensor), quantization) {
                Ok(source) => {
                    used.insert(source.tensor.clone());
                    used.extend(source.scale.as_ref().map(|scale| scale.tensor.clone()));
                    used.extend(source.exl3.iter().flat_map(|layer| layer.tensors.clone()));
                    if tensor.dtypes == EXACT && source.dtype != Dtype::F32 {
                        rounded.push(source.tensor.clone());
                    }
                    sources.insert(tensor.name, source);
                }
                Err(error) => errors.push(error),
            }
        }
        if let Some(example) = rounded.first() {
            warnings.push(format!(
                "{} parameters that the published checkpoint has in 32 bits are stored in 16, such as {example}",
                rounded.len()
            ));
        }
        let mut tied_copy = None;
        let head = spellings.of_tensor(&super::inventory::head(config));
        if config.tied_head && exl3 && head.iter().any(|s| self.has_spelling(s)) {
            // Converters write a head of its own beside the embedding and may leave the flag as it was.
            match self.find(&super::inventory::head(config), &head, quantization) {
                Ok(source) => {
                    used.insert(source.tensor.clone());
                    used.extend(source.exl3.iter().flat_map(|layer| layer.tensors.clone()));
                    sources.insert(HEAD.to_owned(), source);
                }
                Err(error) => errors.push(error),
            }
        } else if config.tied_head
            && let Some(embedding) = sources.get(&format!("{TEXT}embed_tokens.weight"))
        {
            tied_copy = self.tie(embedding, &mut errors);
            let (tensor, shape) = (embedding.tensor.clone(), embedding.shape.clone());
            let exl3 = embedding.exl3.clone();
            sources.insert(HEAD.to_owned(), Source { tensor, shape, scale: None, exl3, ..*embedding });
        }
        if !errors.is_empty() {
            return Err(CheckpointErrors { dir: self.dir().to_owned(), errors });
        }

        let mut coded: Vec<_> = sources.values().filter_map(|s| s.exl3.as_ref()).collect();
        coded.sort_by(|a, b| a.module.cmp(&b.module));
        coded.dedup_by(|a, b| a.module == b.module);
        warnings.extend(super::exl3::contradictions(self, coded.into_iter()));
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

    pub(super) fn has(&self, stored: &str) -> bool {
        self.files.tensors.contains_key(stored)
    }

    /// Whether a tensor is stored in this way, plain or as an EXL3 module.
    fn has_spelling(&self, spelling: &Spelling) -> bool {
        self.has(&spelling.tensor) || spelling.module().is_some_and(|module| Exl3::is_stored(self, module))
    }

    /// The one spelling under which a tensor is stored, with shape and type checked.
    fn find(
        &self,
        expected: &Expected,
        spellings: &[Spelling],
        quantization: Option<&Quantization>,
    ) -> Result<Source, CheckpointError> {
        let plain = spellings.iter().filter(|s| self.has(&s.tensor)).map(|s| (s, None));
        let coded = spellings.iter().filter_map(|s| {
            let module = s.module().filter(|module| Exl3::is_stored(self, module))?;
            Some((s, Some(module)))
        });
        let mut stored = plain.chain(coded);
        let name = |(spelling, module): (&Spelling, Option<&str>)| match module {
            Some(module) => format!("{module}.trellis"),
            None => spelling.tensor.clone(),
        };
        let Some((spelling, module)) = stored.next() else {
            return Err(CheckpointError::Missing { tensor: expected.name.clone() });
        };
        if let Some(other) = stored.next() {
            let tensor = name((spelling, module));
            return Err(CheckpointError::TwoNames { tensor, other: name(other) });
        }
        if let Some(module) = module {
            return self.coded(expected, spelling, module);
        }
        let Some(data) = self.tensor(&spelling.tensor) else {
            return Err(CheckpointError::Missing { tensor: expected.name.clone() });
        };
        let path = || self.file_of(&spelling.tensor);
        let tensor = || spelling.tensor.clone();
        if data.shape != spelling.shape {
            let (found, expected) = (data.shape.to_vec(), spelling.shape.clone());
            return Err(CheckpointError::Shape { path: path(), tensor: tensor(), found, expected });
        }
        // Converters to EXL3 keep what they leave alone in whichever plain type the source's loader made of it.
        let exl3 = quantization.is_some_and(|format| format.method == "exl3");
        let plain = exl3 && [Dtype::F16, Dtype::BF16, Dtype::F32].contains(&data.dtype);
        if !plain && !expected.dtypes.contains(&data.dtype) {
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
        Ok(Source { tensor: tensor(), dtype: data.dtype, shape, start: spelling.start, scale, exl3: None })
    }

    /// A tensor that is stored as an EXL3 module.
    fn coded(
        &self,
        expected: &Expected,
        spelling: &Spelling,
        module: &str,
    ) -> Result<Source, CheckpointError> {
        let exl3 = Exl3::find(self, module, &spelling.shape, spelling.row)?;
        let tensor = exl3.tensors.first().cloned().unwrap_or_default();
        Ok(Source {
            tensor,
            dtype: Dtype::I16,
            shape: expected.shape.clone(),
            start: 0,
            scale: None,
            exl3: Some(exl3),
        })
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
            let allowed = EXACT;
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

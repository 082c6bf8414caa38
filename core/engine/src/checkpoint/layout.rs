//! The tensors of a checkpoint under other names: fused, stacked or split, as pieces of the files that hold them.
//!
//! Nothing is copied here: a [`Target`] lists the bytes that make up one tensor of the new checkpoint.

use std::collections::{BTreeSet, HashMap};

use safetensors::Dtype;

use super::error::CheckpointError;
use super::inventory::{Expected, inventory};
use super::resolve::{Resolved, Source};
use super::spelling::{Spelling, Spellings, Style};
use crate::config::ModelConfig;

/// Published ways of naming and stacking tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// As the model was published: every projection, convolution and expert a tensor of its own.
    Published,
    /// As the transformers module has them: experts of a layer stacked, one convolution, modules for the decay and the
    /// hyper-connections.
    Transformers,
    /// As EXL3 converters write them: one projection to q, k and v where its parts allow that, one convolution.
    Exl3,
}

impl Naming {
    /// All of them.
    pub const ALL: [Naming; 3] = [Naming::Published, Naming::Transformers, Naming::Exl3];

    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Naming::Published => "published",
            Naming::Transformers => "transformers",
            Naming::Exl3 => "exl3",
        }
    }

    fn wants(self, style: Style) -> bool {
        match self {
            Naming::Published => false,
            Naming::Transformers => matches!(
                style,
                Style::ForgetGate | Style::FusedConvolution | Style::HyperModule | Style::StackedExperts
            ),
            Naming::Exl3 => matches!(style, Style::FusedProjection | Style::FusedConvolution),
        }
    }

    fn choose(self, spellings: Vec<Spelling>) -> Option<Spelling> {
        let mut spellings = spellings.into_iter();
        let published = spellings.next();
        spellings.find(|s| self.wants(s.style)).or(published)
    }
}

/// One tensor of the new checkpoint.
#[derive(Debug)]
pub struct Target<'a> {
    /// Its name.
    pub name: String,
    /// Its type.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its bytes, in order.
    pub pieces: Vec<&'a [u8]>,
}

/// The tensors of a checkpoint under other names.
#[derive(Debug, Default)]
pub struct Layout<'a> {
    /// In order of layers; those that the model does not read come last.
    pub targets: Vec<Target<'a>>,
    /// What could not be fused, and why.
    pub notes: Vec<String>,
}

/// A part of a target: the first of its elements, and where its bytes are.
struct Part<'a> {
    start: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: &'a [u8],
}

impl Resolved {
    /// All tensors under the names of `naming`.
    ///
    /// # Errors
    /// Tensors that cannot be put together: of different types, or with scales whose blocks do not end where they do;
    /// or an EXL3 layer that cannot be cut where its parts end.
    pub fn layout(&self, config: &ModelConfig, naming: Naming) -> Result<Layout<'_>, CheckpointError> {
        let spellings = Spellings::published(config);
        let mut list =
            List { tensors: self, order: Vec::new(), plain: HashMap::new(), layout: Layout::default() };
        let mut coded: Vec<(Expected, &Source)> = Vec::new();
        // A tied head that is no tensor of its own is not in the inventory.
        let head = super::inventory::head(config);
        let own_head = self.sources.get(&head.name).is_some_and(|s| s.tensor.contains("lm_head"));
        let head = (config.tied_head && own_head).then_some(head);
        for expected in inventory(config).into_iter().chain(head) {
            let Some(source) = self.sources.get(&expected.name) else { continue };
            if source.exl3.is_some() {
                coded.push((expected, source));
            } else if let Some(spelling) = naming.choose(spellings.of_tensor(&expected)) {
                list.plain(&spelling, source)?;
            }
        }
        list.finish()?;
        let mut layout = list.layout;
        super::recode::layout(self, &spellings, naming, &coded, &mut layout)?;
        let known: BTreeSet<String> = layout.targets.iter().map(|t| t.name.clone()).collect();
        for name in &self.unused {
            let Some(data) = self.checkpoint.tensor(name) else { continue };
            if known.contains(name) {
                let tensor = name.clone();
                return Err(CheckpointError::TwoNames { tensor, other: "the converted tensor".to_owned() });
            }
            let shape = data.shape.to_vec();
            layout.targets.push(Target {
                name: name.clone(),
                dtype: data.dtype,
                shape,
                pieces: vec![data.bytes],
            });
        }
        Ok(layout)
    }
}

struct List<'a> {
    tensors: &'a Resolved,
    /// Names of targets in order, and their shapes.
    order: Vec<(String, Vec<usize>)>,
    plain: HashMap<String, Vec<Part<'a>>>,
    layout: Layout<'a>,
}

impl<'a> List<'a> {
    fn plain(&mut self, spelling: &Spelling, source: &'a Source) -> Result<(), CheckpointError> {
        let bytes = self.tensors.stored(source)?;
        let part = Part { start: spelling.start, dtype: source.dtype, shape: source.shape.clone(), bytes };
        self.add(spelling.tensor.clone(), &spelling.shape, part);
        let Some(scale) = &source.scale else { return Ok(()) };
        let missing = || CheckpointError::Missing { tensor: scale.tensor.clone() };
        let data = self.tensors.checkpoint.tensor(&scale.tensor).ok_or_else(missing)?;
        let [high, _] = scale.block;
        let height = source.shape[source.shape.len() - 2];
        let mut shape = spelling.shape.clone();
        let last = shape.len() - 1;
        let stacked = shape[last - 1];
        for row in [scale.row, spelling.row] {
            if !row.is_multiple_of(high) {
                return Err(CheckpointError::Layout {
                    tensor: spelling.tensor.clone(),
                    reason: format!("row {row} begins inside a block of {high} rows with one scale"),
                });
            }
        }
        (shape[last - 1], shape[last]) = (stacked.div_ceil(high), scale.stride);
        let count = height.div_ceil(high) * scale.stride;
        let first = scale.start + scale.row / high * scale.stride;
        let bytes = data.bytes.get(4 * first..4 * (first + count)).ok_or_else(missing)?;
        let start = (spelling.matrix * shape[last - 1] + spelling.row / high) * scale.stride;
        let part = Part { start, dtype: Dtype::F32, shape: vec![height.div_ceil(high), scale.stride], bytes };
        self.add(format!("{}_scale_inv", spelling.tensor), &shape, part);
        Ok(())
    }

    fn add(&mut self, name: String, shape: &[usize], part: Part<'a>) {
        let parts = self.plain.entry(name.clone()).or_default();
        if parts.is_empty() {
            self.order.push((name, shape.to_vec()));
        }
        parts.push(part);
    }

    fn finish(&mut self) -> Result<(), CheckpointError> {
        for (name, shape) in std::mem::take(&mut self.order) {
            let mut parts = self.plain.remove(&name).unwrap_or_default();
            parts.sort_by_key(|part| part.start);
            let wrong = |reason: String| CheckpointError::Layout { tensor: name.clone(), reason };
            let Some(dtype) = parts.first().map(|part| part.dtype) else { continue };
            let mut at = 0;
            for part in &parts {
                if part.dtype != dtype {
                    return Err(wrong(format!("its parts are stored as {dtype} and as {}", part.dtype)));
                }
                if part.start != at {
                    return Err(wrong(format!("element {at} is in none of its parts")));
                }
                at += part.shape.iter().product::<usize>();
            }
            if at != shape.iter().product::<usize>() {
                return Err(wrong(format!("its parts have {at} elements, its shape is {shape:?}")));
            }
            let pieces = parts.iter().map(|part| part.bytes).collect();
            self.layout.targets.push(Target { name, dtype, shape, pieces });
        }
        Ok(())
    }
}

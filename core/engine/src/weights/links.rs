//! The `weight.source` chain: tensors as the links of plugins leave them.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use half::bf16;
use plugfold_abi::points::{WeightLink, WeightLinkObject};
use plugfold_abi::{List, Slice, Text};
use plugfold_kernels::cpu::exl3;

use super::{Recipe, Source, WeightError};
use crate::checkpoint::Exl3Tensor;
use crate::hooks::Hooked;

/// A source with links over it. Replaced tensors are plain f32, however they are stored beneath.
pub struct Linked<'s, S: Source> {
    source: &'s S,
    /// By tensor, in list order.
    links: HashMap<String, Vec<Hooked<WeightLinkObject>>>,
    allow_nan: bool,
    identity: Vec<String>,
}

impl<'s, S: Source> Linked<'s, S> {
    /// Puts links over a source.
    ///
    /// # Errors
    /// A link that fails, or replaces a tensor that no weight of `recipes` is made of.
    pub fn new(
        source: &'s S,
        links: &[Hooked<WeightLinkObject>],
        recipes: &[Recipe],
        allow_nan: bool,
    ) -> Result<Self, WeightError<S::Error>> {
        let mut this = Self { source, links: HashMap::new(), allow_nan, identity: Vec::new() };
        if links.is_empty() {
            return Ok(this);
        }
        let used: BTreeSet<&str> =
            recipes.iter().flat_map(|r| &r.parts).map(|part| part.tensor.as_str()).collect();
        for link in links {
            let failed = |error| WeightError::Hook { what: "names of the tensors it replaces".into(), error };
            let names = link.call(WeightLink::names).map_err(failed)?;
            if names.is_empty() {
                continue;
            }
            for name in &names {
                let why = if !source.has(name) {
                    "the checkpoint has no such tensor"
                } else if !used.contains(name.as_str()) {
                    "no weight of this model is made of it"
                } else {
                    this.links.entry(name.to_string()).or_default().push(link.clone());
                    continue;
                };
                let why = format!("replaces tensor {name}, but {why}: take it off the plugin's list");
                return Err(WeightError::Plugin { owner: link.owner.to_string(), why });
            }
            let key = link.call(WeightLink::key).map_err(failed)?;
            this.identity.push(format!("link {} = {key}", link.owner));
        }
        Ok(this)
    }

    /// Lines that name the links in force and what they put in place.
    pub fn identity(&self) -> &[String] {
        &self.identity
    }

    fn through(
        &self,
        name: &str,
        link: &Hooked<WeightLinkObject>,
        (rows, cols): (&Range<usize>, &Range<usize>),
        before: &[f32],
    ) -> Result<Vec<f32>, WeightError<S::Error>> {
        let mut out = List::with_capacity(before.len());
        let (first, col) = (rows.start as u64, cols.start as u64);
        let (height, width) = (rows.len() as u64, cols.len() as u64);
        link.call(|l| l.rows(Text::from(name), first, height, col, width, Slice::from(before), &mut out))
            .map_err(|error| WeightError::Hook { what: format!("tensor {name}"), error })?;
        let refuse = |why| Err(WeightError::Plugin { owner: link.owner.to_string(), why });
        if out.len() != before.len() {
            let (got, want) = (out.len(), before.len());
            return refuse(format!(
                "tensor {name}, rows {rows:?} and columns {cols:?}: it gives {got} values, must be {want}"
            ));
        }
        if !self.allow_nan
            && let Some(at) = out.iter().position(|v| !v.is_finite())
        {
            let (row, col) = (rows.start + at / cols.len(), cols.start + at % cols.len());
            return refuse(format!(
                "tensor {name}, row {row}, column {col}: it gives {}, no number",
                out[at]
            ));
        }
        Ok(out.into())
    }
}

impl<S: Source> Source for Linked<'_, S> {
    type Error = WeightError<S::Error>;

    fn has(&self, name: &str) -> bool {
        self.source.has(name)
    }

    fn is_bf16(&self, name: &str) -> bool {
        !self.links.contains_key(name) && self.source.is_bf16(name)
    }

    fn read_f32(&self, name: &str, rows: Range<usize>, cols: Range<usize>) -> Result<Vec<f32>, Self::Error> {
        let read = self.source.read_f32(name, rows.clone(), cols.clone()).map_err(WeightError::Source)?;
        let links = self.links.get(name).map_or(&[][..], Vec::as_slice);
        links.iter().try_fold(read, |values, link| self.through(name, link, (&rows, &cols), &values))
    }

    /// Of a replaced tensor [`Source::is_bf16`] says no, so nobody asks for its bf16.
    fn read_bf16(
        &self,
        name: &str,
        rows: Range<usize>,
        cols: Range<usize>,
    ) -> Result<Vec<bf16>, Self::Error> {
        if self.links.contains_key(name) {
            return Ok(self.read_f32(name, rows, cols)?.into_iter().map(bf16::from_f32).collect());
        }
        self.source.read_bf16(name, rows, cols).map_err(WeightError::Source)
    }

    fn exl3(&self, name: &str) -> Result<Option<Exl3Tensor<'_>>, Self::Error> {
        if self.links.contains_key(name) {
            return Ok(None);
        }
        self.source.exl3(name).map_err(WeightError::Source)
    }

    fn exl3_rows(&self, name: &str) -> Result<Option<exl3::Embedding>, Self::Error> {
        if self.links.contains_key(name) {
            return Ok(None);
        }
        self.source.exl3_rows(name).map_err(WeightError::Source)
    }
}

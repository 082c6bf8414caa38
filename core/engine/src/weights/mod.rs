//! The weights of one rank, in the formats that the kernels read.

mod recipe;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use half::bf16;
use plugfold_abi::{DType, Text, View, Weight, formats};
use plugfold_kernels::cpu::math::dense::{pack_bf16, pack_f32, packed_len};

pub use recipe::{Kind, Part, Recipe, recipes};

/// Where tensors come from: a checkpoint on disk, or numbers made for a test.
pub trait Source: Sync {
    /// The failure of a read.
    type Error: std::error::Error + Send + Sync + 'static;
    /// Whether a tensor is stored as bf16 (then [`Source::read_bf16`] is exact).
    fn is_bf16(&self, name: &str) -> bool;
    /// Rows and columns of a tensor as f32, row-major. A vector is one column; further dimensions count as columns.
    ///
    /// # Errors
    /// An unreadable tensor, or one with a value that is not a number.
    fn read_f32(&self, name: &str, rows: Range<usize>, cols: Range<usize>) -> Result<Vec<f32>, Self::Error>;
    /// The same, of a tensor stored as bf16.
    ///
    /// # Errors
    /// As above.
    fn read_bf16(&self, name: &str, rows: Range<usize>, cols: Range<usize>)
    -> Result<Vec<bf16>, Self::Error>;
}

enum Plane {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
}

/// All weights of a rank, found by layer, site and role.
#[derive(Default)]
pub struct WeightTable {
    weights: Vec<Weight>,
    planes: Vec<Plane>,
    index: HashMap<(u32, u32, &'static str), usize>,
}

// Weights point into `planes`, whose buffers never move or change.
impl WeightTable {
    /// The place of a weight.
    pub fn find(&self, layer: u32, site: u32, role: &str) -> Option<usize> {
        let index: &HashMap<(u32, u32, &str), usize> = &self.index;
        index.get(&(layer, site, role)).copied()
    }

    /// A weight by its place.
    pub fn get(&self, index: usize) -> &Weight {
        &self.weights[index]
    }

    /// Bytes of all planes.
    pub fn bytes(&self) -> usize {
        let size = |p: &Plane| match p {
            Plane::F32(v) => v.len() * 4,
            Plane::Bf16(v) => v.len() * 2,
        };
        self.planes.iter().map(size).sum()
    }

    /// How many weights there are.
    pub fn len(&self) -> usize {
        self.weights.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }

    fn push(&mut self, recipe: &Recipe, format: &'static str, plane: Plane) {
        let (ptr, len, dtype) = match &plane {
            Plane::F32(v) => (v.as_ptr().cast::<u8>(), v.len(), DType::F32),
            Plane::Bf16(v) => (v.as_ptr().cast::<u8>(), v.len(), DType::Bf16),
        };
        let rows = recipe.count.max(1);
        let cols = (len / rows) as u32;
        let view = View { ptr: ptr.cast_mut(), rows: rows as u32, cols, stride: cols, dtype };
        let mut planes = [View::EMPTY; 4];
        planes[0] = view;
        self.index.insert((recipe.layer, recipe.site, recipe.role), self.weights.len());
        self.weights.push(Weight {
            role: Text::from(recipe.role),
            format: Text::from(format),
            n: recipe.n as u32,
            k: recipe.k as u32,
            count: recipe.count as u32,
            planes,
        });
        self.planes.push(plane);
    }

    /// A second name for a weight that is already there.
    fn alias(&mut self, from: (u32, u32, &'static str), to: (u32, u32, &'static str)) {
        if let Some(&at) = self.index.get(&from) {
            self.index.insert(to, at);
        }
    }
}

/// Told how far loading is: bytes of weights made so far.
pub type Progress = Arc<dyn Fn(usize) + Send + Sync>;

/// Builds every weight of a rank.
///
/// # Errors
/// The first unreadable tensor.
pub fn load<S: Source>(source: &S, list: &[Recipe], progress: &Progress) -> Result<WeightTable, S::Error> {
    use rayon::prelude::*;
    let made: Vec<(&'static str, Plane)> = list
        .par_iter()
        .map(|recipe| {
            let made = build(source, recipe)?;
            progress(match &made.1 {
                Plane::F32(v) => v.len() * 4,
                Plane::Bf16(v) => v.len() * 2,
            });
            Ok(made)
        })
        .collect::<Result<_, S::Error>>()?;
    let mut table = WeightTable::default();
    for (recipe, (format, plane)) in list.iter().zip(made) {
        table.push(recipe, format, plane);
    }
    for recipe in list.iter().filter(|r| r.role == "mtp.eh") {
        table.alias((plugfold_abi::NO_LAYER, 0, "embed"), (recipe.layer, recipe.site, "embed"));
    }
    Ok(table)
}

fn build<S: Source>(source: &S, recipe: &Recipe) -> Result<(&'static str, Plane), S::Error> {
    let bf16s = recipe.parts.iter().all(|p| source.is_bf16(&p.tensor));
    let each = recipe.parts.len() / recipe.count.max(1);
    match recipe.kind {
        Kind::Plain => Ok((formats::PLAIN_F32, Plane::F32(gather(&recipe.parts, |p| read_f32(source, p))?))),
        Kind::Rows if bf16s => {
            Ok((formats::ROWS_BF16, Plane::Bf16(gather(&recipe.parts, |p| read_bf16(source, p))?)))
        }
        Kind::Rows => Ok((formats::ROWS_F32, Plane::F32(gather(&recipe.parts, |p| read_f32(source, p))?))),
        Kind::Dense if bf16s => {
            let mut all = Vec::with_capacity(recipe.count * packed_len(recipe.n, recipe.k));
            for parts in recipe.parts.chunks(each) {
                let rows = gather(parts, |p| read_bf16(source, p))?;
                all.extend(pack_bf16(&rows, recipe.n, recipe.k));
            }
            Ok((formats::PANEL16_BF16, Plane::Bf16(all)))
        }
        Kind::Dense => {
            let mut all = Vec::with_capacity(recipe.count * packed_len(recipe.n, recipe.k));
            for parts in recipe.parts.chunks(each) {
                let rows = gather(parts, |p| read_f32(source, p))?;
                all.extend(pack_f32(&rows, recipe.n, recipe.k));
            }
            Ok((formats::PANEL16_F32, Plane::F32(all)))
        }
    }
}

fn gather<T, E>(parts: &[Part], read: impl Fn(&Part) -> Result<Vec<T>, E>) -> Result<Vec<T>, E> {
    let mut all = Vec::new();
    for part in parts {
        all.append(&mut read(part)?);
    }
    Ok(all)
}

fn read_f32<S: Source>(source: &S, part: &Part) -> Result<Vec<f32>, S::Error> {
    source.read_f32(&part.tensor, part.rows.clone(), part.cols.clone())
}

fn read_bf16<S: Source>(source: &S, part: &Part) -> Result<Vec<bf16>, S::Error> {
    source.read_bf16(&part.tensor, part.rows.clone(), part.cols.clone())
}

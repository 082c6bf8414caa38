//! The weights of one rank, in the formats that the kernels read.

mod build;
mod recipe;
mod source;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::bf16;
use plugfold_abi::{DType, Text, View, Weight};
use plugfold_kernels::cpu::exl3::Lines;

pub use recipe::{Kind, Part, Recipe, recipes};
pub use source::Source;

/// The memory of one plane.
#[derive(Debug)]
enum Plane {
    F32(Vec<f32>),
    Bf16(Vec<bf16>),
    U32(Vec<u32>),
    U8(Vec<u8>),
    Lines(Lines),
}

impl Plane {
    /// Address, elements and their type.
    fn place(&self) -> (*const u8, usize, DType) {
        match self {
            Plane::F32(v) => (v.as_ptr().cast(), v.len(), DType::F32),
            Plane::Bf16(v) => (v.as_ptr().cast(), v.len(), DType::Bf16),
            Plane::U32(v) => (v.as_ptr().cast(), v.len(), DType::U32),
            Plane::U8(v) => (v.as_ptr(), v.len(), DType::U8),
            Plane::Lines(v) => (v.words().as_ptr().cast(), v.words().len(), DType::U32),
        }
    }

    fn bytes(&self) -> usize {
        let (_, len, dtype) = self.place();
        len * dtype.size()
    }
}

/// A weight that was made from a recipe: its format, and its planes with the rows of each.
struct Made {
    format: &'static str,
    planes: Vec<(Plane, usize)>,
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
        self.planes.iter().map(Plane::bytes).sum()
    }

    /// How many weights there are.
    pub fn len(&self) -> usize {
        self.weights.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }

    fn push(&mut self, recipe: &Recipe, made: Made) {
        let mut planes = [View::EMPTY; 4];
        for (view, (plane, rows)) in planes.iter_mut().zip(made.planes) {
            let (ptr, len, dtype) = plane.place();
            let rows = rows.max(1);
            let cols = (len / rows) as u32;
            *view = View { ptr: ptr.cast_mut(), rows: rows as u32, cols, stride: cols, dtype };
            self.planes.push(plane);
        }
        self.index.insert((recipe.layer, recipe.site, recipe.role), self.weights.len());
        self.weights.push(Weight {
            role: Text::from(recipe.role),
            format: Text::from(made.format),
            n: recipe.n as u32,
            k: recipe.k as u32,
            count: recipe.count as u32,
            planes,
        });
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
    let done = AtomicUsize::new(0);
    let made: Vec<Made> = list
        .par_iter()
        .map(|recipe| {
            let made = build::build(source, recipe)?;
            let bytes = made.planes.iter().map(|(plane, _)| plane.bytes()).sum();
            progress(done.fetch_add(bytes, Ordering::Relaxed) + bytes);
            Ok(made)
        })
        .collect::<Result<_, S::Error>>()?;
    let mut table = WeightTable::default();
    for (recipe, made) in list.iter().zip(made) {
        table.push(recipe, made);
    }
    for recipe in list.iter().filter(|r| r.role == "mtp.eh") {
        table.alias((plugfold_abi::NO_LAYER, 0, "embed"), (recipe.layer, recipe.site, "embed"));
    }
    Ok(table)
}

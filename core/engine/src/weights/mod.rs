//! The weights of one rank, in the formats that the kernels read: built from tensors, by the reference or by builders of
//! plugins, or read as they were built before.

mod build;
mod builders;
mod error;
mod links;
mod load;
mod prepared;
mod recipe;
mod source;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;
use memmap2::MmapMut;
use plugfold_abi::points::Purpose;
use plugfold_abi::{DType, Phase, Text, View, Weight};
use plugfold_kernels::cpu::exl3::Lines;
use plugfold_kernels::device::{Device, DeviceError, Memory};

use builders::Job;
pub use error::WeightError;
pub use links::Linked;
pub use load::{Given, Loaded, Origin, load};
pub use prepared::Shelf;
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
    /// Elements that a builder made.
    Built(Lines, DType, usize),
    /// Elements in the memory of a device.
    Moved(Memory, DType, usize),
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
            Plane::Built(v, dtype, len) => (v.words().as_ptr().cast(), *len, *dtype),
            Plane::Moved(v, dtype, len) => (v.address().cast_const(), *len, *dtype),
        }
    }

    /// All bytes; none of a plane that has moved.
    fn contents(&self) -> &[u8] {
        match self {
            Plane::F32(v) => bytemuck::cast_slice(v),
            Plane::Bf16(v) => bytemuck::cast_slice(v),
            Plane::U32(v) => bytemuck::cast_slice(v),
            Plane::U8(v) => v,
            Plane::Lines(v) => bytemuck::cast_slice(v.words()),
            Plane::Built(v, dtype, len) => &bytemuck::cast_slice(v.words())[..len * dtype.size()],
            Plane::Moved(v, dtype, len) => v.host().map_or(&[], |bytes| &bytes[..len * dtype.size()]),
        }
    }

    /// Moves the elements into the memory of a device.
    fn move_to(&mut self, device: &Arc<dyn Device>) -> Result<(), DeviceError> {
        let (_, len, dtype) = self.place();
        let memory = Memory::holding(device, "weights", self.contents())?;
        *self = Plane::Moved(memory, dtype, len);
        Ok(())
    }

    fn bytes(&self) -> usize {
        let (_, len, dtype) = self.place();
        len * dtype.size()
    }

    /// The plane as its kernel sees it, in so many rows.
    fn view(&self, rows: usize) -> View {
        let (ptr, len, dtype) = self.place();
        let rows = rows.max(1);
        let cols = (len / rows) as u32;
        View { ptr: ptr.cast_mut(), rows: rows as u32, cols, stride: cols, dtype }
    }
}

/// A weight that was made from a recipe: its format, and its planes with the rows of each.
struct Made {
    format: &'static str,
    planes: Vec<(Plane, usize)>,
}

/// A name that stays for the process: formats of plugins are few, and weights hold them for as long as it runs.
fn intern(name: &str) -> &'static str {
    static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = names.get(name) {
        return known;
    }
    let kept: &'static str = Box::leak(name.into());
    names.insert(kept);
    kept
}

type Place = (u32, u32, &'static str, Purpose);

/// All weights of a rank, found by layer, site, role and what they are for.
#[derive(Default)]
pub struct WeightTable {
    weights: Vec<Weight>,
    /// Planes that were built, a list a weight.
    planes: Vec<Vec<Plane>>,
    /// Planes that were read as they had been built.
    arena: Option<MmapMut>,
    index: HashMap<Place, usize>,
}

// Weights point into `planes` or the arena, whose memory never moves or changes.
impl WeightTable {
    /// The place of a weight for programs of a phase: the copy for that phase, if there is one.
    pub fn find(&self, layer: u32, site: u32, role: &str, phase: Phase) -> Option<usize> {
        let own = match phase {
            Phase::Draft => Purpose::Draft,
            Phase::Prefill => Purpose::Prefill,
            Phase::Window => Purpose::Main,
        };
        let index: &HashMap<(u32, u32, &str, Purpose), usize> = &self.index;
        let at = |purpose| index.get(&(layer, site, role, purpose)).copied();
        at(own).or_else(|| at(Purpose::Main))
    }

    /// A weight by its place.
    pub fn get(&self, index: usize) -> &Weight {
        &self.weights[index]
    }

    /// Bytes of all planes.
    pub fn bytes(&self) -> usize {
        let built: usize = self.planes.iter().flatten().map(Plane::bytes).sum();
        built + self.arena.as_ref().map_or(0, |arena| arena.len())
    }

    /// How many weights there are.
    pub fn len(&self) -> usize {
        self.weights.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.weights.is_empty()
    }

    /// Every weight with its layer, site and what it is for, in no particular order.
    pub fn all(&self) -> impl Iterator<Item = (u32, u32, Purpose, &Weight)> {
        self.index.iter().map(|((layer, site, _, purpose), &at)| (*layer, *site, *purpose, &self.weights[at]))
    }

    fn push(&mut self, job: &Job<'_>, format: &'static str, views: &[View]) {
        let recipe = job.recipe;
        let mut planes = [View::EMPTY; 4];
        planes.iter_mut().zip(views).for_each(|(to, view)| *to = *view);
        self.index.insert((recipe.layer, recipe.site, recipe.role, job.purpose), self.weights.len());
        self.weights.push(Weight {
            role: Text::from(recipe.role),
            format: Text::from(format),
            n: recipe.n as u32,
            k: recipe.k as u32,
            count: recipe.count as u32,
            planes,
        });
    }

    /// Moves planes that lie on the host into the memory of a device.
    fn move_to(&mut self, device: &Arc<dyn Device>) -> Result<(), DeviceError> {
        let Some(arena) = self.arena.take() else {
            for (weight, planes) in self.weights.iter_mut().zip(&mut self.planes) {
                for (plane, view) in planes.iter_mut().zip(&mut weight.planes) {
                    plane.move_to(device)?;
                    view.ptr = plane.place().0.cast_mut();
                }
            }
            return Ok(());
        };
        let start = arena.as_ptr() as usize;
        let moved = Memory::holding(device, "weights", &arena)?;
        for view in self.weights.iter_mut().flat_map(|w| &mut w.planes).filter(|v| !v.ptr.is_null()) {
            view.ptr = moved.address().wrapping_add(view.ptr as usize - start);
        }
        self.planes.push(vec![Plane::Moved(moved, DType::U8, arena.len())]);
        Ok(())
    }

    /// Second names: the draft head looks tokens up in the model's own table.
    fn alias(&mut self, recipes: &[Recipe]) {
        for recipe in recipes.iter().filter(|r| r.role == "mtp.eh") {
            if let Some(&at) = self.index.get(&(plugfold_abi::NO_LAYER, 0, "embed", Purpose::Main)) {
                self.index.insert((recipe.layer, recipe.site, "embed", Purpose::Main), at);
            }
        }
    }
}

/// Told how far loading is: bytes of weights made so far.
pub type Progress = Arc<dyn Fn(usize) + Send + Sync>;

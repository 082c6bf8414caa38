//! Builders of plugins: who stores which matrix, and building it.

use plugfold_abi::points::{
    Matrix, MatrixRows, MatrixRowsObject, Purpose, Stored, WeightBuilder, WeightBuilderObject, WeightLayout,
};
use plugfold_abi::{OpError, Slice, SliceMut, Text, TextBuf, View};
use plugfold_kernels::cpu::exl3::Lines;

use super::{Kind, Linked, Made, Plane, Recipe, Source, WeightError, intern};
use crate::hooks::Hooked;

/// Most bytes of a plane: views count rows and columns in 32 bits, and lines too.
const MAX_PLANE: u64 = 1 << 40;

/// A recipe with whoever stores it.
pub struct Job<'r> {
    /// What it is made of.
    pub recipe: &'r Recipe,
    /// What it is stored for.
    pub purpose: Purpose,
    built: Option<Built>,
}

/// The builder of a weight, and what it said that it makes of it.
struct Built {
    builder: Hooked<WeightBuilderObject>,
    name: TextBuf,
    layout: WeightLayout,
    stored: Stored,
    mtp: bool,
}

impl Built {
    fn matrix<'r>(&self, recipe: &'r Recipe, purpose: Purpose) -> Matrix<'r> {
        matrix(recipe, purpose, self.stored, self.mtp)
    }
}

fn matrix(recipe: &Recipe, purpose: Purpose, stored: Stored, mtp: bool) -> Matrix<'_> {
    Matrix {
        role: Text::from(recipe.role),
        layer: recipe.layer,
        site: recipe.site,
        mtp,
        purpose,
        n: recipe.n as u32,
        k: recipe.k as u32,
        count: recipe.count as u32,
        first: recipe.first as u32,
        inputs: recipe.inputs as u32,
        stored,
    }
}

/// What a matrix is called in messages.
fn called(recipe: &Recipe) -> String {
    match recipe.layer {
        plugfold_abi::NO_LAYER => recipe.role.to_owned(),
        layer => format!("{} of layer {layer}", recipe.role),
    }
}

/// All weights of a rank with whoever stores each, copies for single phases included, and lines that identify the builders
/// in force. The multi-token-prediction layer is the one after `layers` others.
///
/// # Errors
/// A builder that fails or answers nonsense, two for one matrix, an unreadable tensor.
#[allow(clippy::type_complexity)]
pub fn jobs<'r, S: Source>(
    source: &Linked<'_, S>,
    recipes: &'r [Recipe],
    builders: &[Hooked<WeightBuilderObject>],
    layers: usize,
) -> Result<(Vec<Job<'r>>, Vec<String>), WeightError<S::Error>> {
    let mut jobs = Vec::with_capacity(recipes.len());
    let mut identity = Vec::new();
    for recipe in recipes {
        let plain = builders.is_empty() || recipe.kind != Kind::Dense;
        let stored = if plain { Stored::Numbers } else { stored(source, recipe)? };
        for purpose in Purpose::ALL {
            let built = if plain {
                None
            } else {
                let mtp = recipe.layer as usize == layers;
                choose::<S>(recipe, &matrix(recipe, purpose, stored, mtp), builders)?
            };
            if let Some(built) = &built {
                let failed = |error| WeightError::Hook { what: called(recipe), error };
                let key = built.builder.call(WeightBuilder::key).map_err(failed)?;
                let (owner, name) = (&built.builder.owner, &built.name);
                let (layer, site, role) = (recipe.layer, recipe.site, recipe.role);
                identity.push(format!("{layer} {site} {role} {purpose:?} = {owner}/{name} {key}"));
            }
            if purpose == Purpose::Main || built.is_some() {
                jobs.push(Job { recipe, purpose, built });
            }
        }
    }
    Ok((jobs, identity))
}

fn stored<S: Source>(source: &Linked<'_, S>, recipe: &Recipe) -> Result<Stored, WeightError<S::Error>> {
    if recipe.parts.iter().all(|p| source.is_bf16(&p.tensor)) {
        return Ok(Stored::Bf16);
    }
    for part in &recipe.parts {
        if source.exl3(&part.tensor)?.is_some() {
            return Ok(Stored::Coded);
        }
    }
    Ok(Stored::Numbers)
}

/// The one builder of a matrix, if any: the outermost, which must be above all others that would store it.
fn choose<S: Source>(
    recipe: &Recipe,
    matrix: &Matrix<'_>,
    builders: &[Hooked<WeightBuilderObject>],
) -> Result<Option<Built>, WeightError<S::Error>> {
    let mut chosen: Option<Built> = None;
    for builder in builders {
        let failed = |error| WeightError::Hook { what: called(recipe), error };
        let Some(layout) = builder.call(|b| b.layout(matrix)).map_err(failed)?.into_option() else {
            continue;
        };
        let name = builder.call(WeightBuilder::name).map_err(failed)?;
        let refuse = |why: String| Err(WeightError::Plugin { owner: builder.owner.to_string(), why });
        let planes = layout.planes.len();
        let bytes = |p: &plugfold_abi::points::PlaneLayout| {
            u64::from(p.rows) * u64::from(p.cols) * p.dtype.size() as u64
        };
        if layout.format.is_empty() || planes == 0 || planes > 4 {
            return refuse(format!(
                "builder {name} gives {} a format {:?} of {planes} planes: give it a name and 1 to 4 planes",
                called(recipe),
                layout.format
            ));
        }
        if let Some(plane) = layout.planes.iter().find(|p| bytes(p) > MAX_PLANE) {
            return refuse(format!(
                "builder {name} wants a plane of {} bytes for {}; at most {MAX_PLANE} are given",
                bytes(plane),
                called(recipe)
            ));
        }
        if let Some(other) = &chosen
            && !builder.over.iter().any(|over| **over == *other.builder.owner)
        {
            return refuse(format!(
                "its builder {name} and builder {} of plugin {} both store {}: name one in the other's `over`, or take one \
                 off the list",
                other.name,
                other.builder.owner,
                called(recipe)
            ));
        }
        chosen =
            Some(Built { builder: builder.clone(), name, layout, stored: matrix.stored, mtp: matrix.mtp });
    }
    Ok(chosen)
}

/// Values of a matrix out of the tensors that it is made of.
struct Reader<'a, S> {
    source: &'a S,
    recipe: &'a Recipe,
}

impl<S: Source> MatrixRows for Reader<'_, S> {
    fn read(
        &self,
        matrix: u32,
        output: u32,
        outputs: u32,
        input: u32,
        inputs: u32,
        out: SliceMut<'_, f32>,
    ) -> Result<(), OpError> {
        let r = self.recipe;
        let (matrix, output, outputs) = (matrix as usize, output as usize, outputs as usize);
        let (input, inputs, out) = (input as usize, inputs as usize, out.into_mut());
        if matrix >= r.count || output + outputs > r.n || input + inputs > r.inputs {
            return Err(OpError::new(format!(
                "outputs {output}..{} and inputs {input}..{} of matrix {matrix} are outside {} matrices [{}, {}]",
                output + outputs,
                input + inputs,
                r.count,
                r.n,
                r.inputs
            )));
        }
        if out.len() != outputs * inputs {
            let (got, want) = (out.len(), outputs * inputs);
            return Err(OpError::new(format!("{got} places for {want} values")));
        }
        let each = r.parts.len() / r.count;
        let (mut first, mut done) = (0, 0);
        for part in &r.parts[matrix * each..(matrix + 1) * each] {
            let height = part.rows.len();
            let (from, to) = (output.max(first), (output + outputs).min(first + height));
            if from < to {
                let rows = part.rows.start + from - first..part.rows.start + to - first;
                let read = self.source.read_f32(&part.tensor, rows, input..input + inputs);
                let values = read.map_err(|e| OpError::new(e.to_string()))?;
                out[done..done + values.len()].copy_from_slice(&values);
                done += values.len();
            }
            first += height;
        }
        Ok(())
    }
}

impl Job<'_> {
    /// Makes the weight: by its builder, or as the reference stores it.
    ///
    /// # Errors
    /// An unreadable tensor, a builder that fails.
    pub(super) fn run<S: Source>(&self, source: &Linked<'_, S>) -> Result<Made, WeightError<S::Error>> {
        let Some(built) = &self.built else { return super::build::build(source, self.recipe) };
        let mut memory: Vec<(Lines, &plugfold_abi::points::PlaneLayout)> = built
            .layout
            .planes
            .iter()
            .map(|plane| {
                let bytes = plane.rows as usize * plane.cols as usize * plane.dtype.size();
                (Lines::zeroed(bytes.div_ceil(plugfold_abi::Segment::LINE)), plane)
            })
            .collect();
        let views: Vec<View> = memory
            .iter_mut()
            .map(|(lines, plane)| View {
                ptr: lines.words_mut().as_mut_ptr().cast(),
                rows: plane.rows,
                cols: plane.cols,
                stride: plane.cols,
                dtype: plane.dtype,
            })
            .collect();
        let rows = Reader { source, recipe: self.recipe };
        let matrix = built.matrix(self.recipe, self.purpose);
        built
            .builder
            .call(|b| b.build(&matrix, &MatrixRowsObject::lend(&rows), Slice::from(&views[..])))
            .map_err(|error| WeightError::Hook { what: called(self.recipe), error })?;
        let planes = memory
            .into_iter()
            .map(|(lines, plane)| {
                let len = plane.rows as usize * plane.cols as usize;
                (Plane::Built(lines, plane.dtype, len), plane.rows as usize)
            })
            .collect();
        Ok(Made { format: intern(&built.layout.format), planes })
    }
}

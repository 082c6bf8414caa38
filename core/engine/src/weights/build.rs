//! From a recipe to the planes of a weight.

use half::{bf16, f16};
use plugfold_abi::{Segment, formats};
use plugfold_kernels::cpu::exl3::{Cut, Error as Exl3Error, Lines, Plan, Slots};
use plugfold_kernels::cpu::math::dense::{pack_bf16, pack_f32, packed_len};
use rayon::prelude::*;

use super::{Kind, Made, Part, Plane, Recipe, Source};
use crate::checkpoint::Exl3Tensor;

/// Matrices that their operation reads as panels only.
const PANELS_ONLY: [&str; 2] = ["hc.fn", "moe.router"];

/// Makes the weight of a recipe in the format that its tensors ask for: coded matrices stay coded.
pub(super) fn build<S: Source>(source: &S, recipe: &Recipe) -> Result<Made, S::Error> {
    match recipe.kind {
        Kind::Plain => {
            let plane = Plane::F32(gather(&recipe.parts, |p| read_f32(source, p))?);
            Ok(one(formats::PLAIN_F32, plane, recipe))
        }
        Kind::Rows => rows(source, recipe),
        Kind::Dense => {
            let coded = recipe.parts.iter().map(|p| source.exl3(&p.tensor)).collect::<Result<Vec<_>, _>>()?;
            if coded.iter().any(Option::is_some) && !PANELS_ONLY.contains(&recipe.role) {
                segments(source, recipe, &coded)
            } else {
                panels(source, recipe)
            }
        }
    }
}

fn one(format: &'static str, plane: Plane, recipe: &Recipe) -> Made {
    Made { format, planes: vec![(plane, recipe.count)] }
}

fn rows<S: Source>(source: &S, recipe: &Recipe) -> Result<Made, S::Error> {
    if let [part] = &recipe.parts[..]
        && part.rows == (0..recipe.n)
        && let Some(table) = source.exl3_rows(&part.tensor)?
    {
        let (rings, signs) = table.into_planes();
        let groups = signs.len() / 256;
        let planes = vec![(Plane::U8(rings), recipe.n), (Plane::F32(signs), groups)];
        return Ok(Made { format: formats::EXL3_ROWS, planes });
    }
    if recipe.parts.iter().all(|p| source.is_bf16(&p.tensor)) {
        let plane = Plane::Bf16(gather(&recipe.parts, |p| read_bf16(source, p))?);
        return Ok(one(formats::ROWS_BF16, plane, recipe));
    }
    Ok(one(formats::ROWS_F32, Plane::F32(gather(&recipe.parts, |p| read_f32(source, p))?), recipe))
}

fn panels<S: Source>(source: &S, recipe: &Recipe) -> Result<Made, S::Error> {
    let each = recipe.parts.len() / recipe.count.max(1);
    let len = recipe.count * packed_len(recipe.n, recipe.k);
    if recipe.parts.iter().all(|p| source.is_bf16(&p.tensor)) {
        let mut all = Vec::with_capacity(len);
        for parts in recipe.parts.chunks(each) {
            let rows = gather(parts, |p| read_bf16(source, p))?;
            all.extend(pack_bf16(&rows, recipe.n, recipe.k));
        }
        return Ok(one(formats::PANEL16_BF16, Plane::Bf16(all), recipe));
    }
    let mut all = Vec::with_capacity(len);
    for parts in recipe.parts.chunks(each) {
        let rows = gather(parts, |p| read_f32(source, p))?;
        all.extend(pack_f32(&rows, recipe.n, recipe.k));
    }
    Ok(one(formats::PANEL16_F32, Plane::F32(all), recipe))
}

/// A part of the weight that becomes a segment.
struct Piece<'a> {
    part: &'a Part,
    coded: Option<&'a Exl3Tensor<'a>>,
    /// Channels of the stored layer, inputs and outputs.
    blocks: (std::ops::Range<usize>, std::ops::Range<usize>),
}

/// Every part keeps its own form. Layout first, then all parts are read at once, straight into their places.
fn segments<S: Source>(
    source: &S,
    recipe: &Recipe,
    coded: &[Option<Exl3Tensor<'_>>],
) -> Result<Made, S::Error> {
    let each = recipe.parts.len() / recipe.count.max(1);
    let mut plan = Plan::default();
    let mut pieces: Vec<Piece<'_>> = Vec::with_capacity(recipe.parts.len());
    for (matrix, (parts, coded)) in recipe.parts.chunks(each).zip(coded.chunks(each)).enumerate() {
        let mut output = 0;
        for (part, coded) in parts.iter().zip(coded) {
            let height = part.rows.len();
            let (mut rows, cols) = (part.rows.clone(), part.cols.clone());
            let blocks = if let Some(layer) = coded {
                rows = rows.start + layer.row..rows.end + layer.row;
                let cut = Cut { matrix, output, input: 0, rows, cols };
                // Parts of one stored layer have the scales of its inputs in common.
                let same = output > 0
                    && pieces.last().is_some_and(|before| {
                        before.coded.is_some_and(|b| b.module == layer.module)
                            && before.part.cols == part.cols
                    });
                plan.trellis(&cut, layer.header(), same)
            } else {
                let cut = Cut { matrix, output, input: 0, rows, cols };
                plan.panels(&cut, source.is_bf16(&part.tensor));
                (0..0, 0..0)
            };
            pieces.push(Piece { part, coded: coded.as_ref(), blocks });
            output += height;
        }
    }
    let mut data = Lines::zeroed(plan.lines());
    let slots = plan.slots(data.words_mut());
    pieces.par_iter().zip(slots).try_for_each(|(piece, slots)| fill(source, piece, slots))?;
    let table = plan.words();
    let (rows, lines) = (table.len() / Segment::WORDS, data.count());
    let planes = vec![(Plane::U32(table), rows), (Plane::Lines(data), lines)];
    Ok(Made { format: formats::EXL3_SEGMENTS, planes })
}

fn fill<S: Source>(source: &S, piece: &Piece<'_>, slots: Slots<'_>) -> Result<(), S::Error> {
    let part = piece.part;
    match (slots, piece.coded) {
        (Slots::Trellis { trellis, suh, svh, bias }, Some(tensor)) => {
            Ok(read_layer(tensor, piece, trellis, suh, svh, bias)?)
        }
        (Slots::Bf16(to), _) => {
            let rows = read_bf16(source, part)?;
            to.copy_from_slice(&pack_bf16(&rows, part.rows.len(), part.cols.len()));
            Ok(())
        }
        (Slots::F32(to), _) => {
            let rows = read_f32(source, part)?;
            to.copy_from_slice(&pack_f32(&rows, part.rows.len(), part.cols.len()));
            Ok(())
        }
        // The plan makes the place of a trellis for coded parts only.
        (Slots::Trellis { .. }, None) => Ok(()),
    }
}

fn read_layer(
    tensor: &Exl3Tensor<'_>,
    piece: &Piece<'_>,
    trellis: &mut [u32],
    suh: Option<&mut [f16]>,
    svh: &mut [f16],
    bias: Option<&mut [f32]>,
) -> Result<(), Exl3Error> {
    let (k, n) = &piece.blocks;
    let (layer, allow_nan) = (&tensor.layer, tensor.allow_nan);
    layer.read_trellis(k.clone(), n.clone(), trellis)?;
    layer.read_svh(n, allow_nan, svh)?;
    if let Some(suh) = suh {
        layer.read_suh(k, allow_nan, suh)?;
    }
    if let Some(bias) = bias {
        layer.read_bias(n, allow_nan, bias)?;
    }
    Ok(())
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

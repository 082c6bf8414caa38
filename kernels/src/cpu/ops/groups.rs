//! Matrices in groups ([`crate::cpu::math::grouped`]) for plugins: storing them, and the operations that multiply by them.

use half::bf16;
use plugfold_abi::points::{Matrix, MatrixRows, MatrixRowsObject, PlaneLayout};
use plugfold_abi::{Call, DType, OpError, Query, SliceMut, View, formats};

use super::attention::write_latents;
use super::operands::{CACHE_FORMAT, Item, Operands, Width};
use crate::cpu::math::dense::PANEL;
use crate::cpu::math::grouped::{Grid, HEADER};
use crate::cpu::math::latent;
use crate::cpu::math::mla::Shape;
use crate::cpu::rows::{Rows, RowsMut};

/// Operations whose one matrix may be in groups. The last two, between heads and latents, are a plugin's: `mla.absorb`
/// and `mla.expand` with dims H, d, v, r, an input and an output.
pub const OPERATIONS: [&str; 5] = ["dense", "head", "mla.write", "mla.absorb", "mla.expand"];

/// Whether a query is one of [`OPERATIONS`] on the CPU with its matrix in one of these formats, and all else as the
/// reference takes it.
pub fn takes(query: &Query<'_>, op: &str, matrices: &[&str]) -> bool {
    let [matrix, bias, rest @ ..] = query.weight_formats;
    let bias = bias.is_empty() || (op == "dense" && bias.get_str() == formats::PLAIN_F32);
    let cache = query.caches[0].format.get_str();
    query.op.get_str() == op
        && OPERATIONS.contains(&op)
        && query.device_class.get_str() == "cpu"
        && matrices.contains(&matrix.get_str())
        && bias
        && rest.iter().all(|f| f.is_empty())
        && if op == "mla.write" { cache == CACHE_FORMAT } else { cache.is_empty() }
}

/// Runs one of [`OPERATIONS`] with its matrix in groups.
///
/// # Errors
/// Operands of another shape or format.
pub fn multiply(op: &'static str, call: &Call<'_>, format: &str, width: Width) -> Result<(), OpError> {
    if op == "mla.write" {
        return write_latents(call, |o, n, k| {
            let w = o.grouped(format, width, 0, "mla.kv_b", (n, k))?;
            Ok(move |x: Rows<'_>, out: RowsMut<'_>| w.matmul(x, None, out))
        });
    }
    let o = Operands::new(op, call)?;
    if op == "mla.absorb" || op == "mla.expand" {
        let shape = Shape { heads: o.size(0, "H")?, key: o.size(1, "d")?, value: o.size(2, "v")? };
        let rank = o.size(3, "r")?;
        let w = o.grouped(format, width, 0, "mla.kv_b", (shape.row_len(), rank))?;
        let latents = shape.heads * rank;
        if op == "mla.absorb" {
            let q = o.input(0, "q", o.rows(), shape.heads * shape.key)?;
            latent::absorb(q, w, shape, o.output(0, "absorbed", o.rows(), latents)?);
        } else {
            let sums = o.input(0, "sums", o.rows(), latents)?;
            latent::expand(sums, w, shape, o.output(0, "rows", o.rows(), shape.heads * shape.value)?);
        }
        return Ok(());
    }
    let (n, k) = (o.size(0, "n")?, o.size(1, "k")?);
    let rows = if op == "head" { o.round().out_rows.len() } else { o.rows() };
    let x = o.input(0, "rows", rows, k)?;
    let w = o.grouped(format, width, 0, "matrix", (n, k))?;
    let bias = if op == "dense" { o.maybe_vector(1, "bias", n)? } else { None };
    w.matmul(x, bias, o.output(0, "rows", rows, n)?);
    Ok(())
}

/// Most values that are read at a time.
const SLAB: usize = 1 << 22;

/// The grid of a matrix in groups that begin at the first input of the whole matrix, in at most `slices` slices: halved
/// until they divide the groups.
pub fn grid_of(matrix: &Matrix<'_>, group: usize, slices: usize) -> Grid {
    let lead = matrix.first as usize % group;
    let mut grid = Grid { n: matrix.n as usize, k: matrix.k as usize, lead, group, slices: slices.max(1) };
    while !grid.groups().is_multiple_of(grid.slices) {
        grid.slices /= 2;
    }
    grid
}

/// The planes of a matrix: codes, scales, offsets (none of 8 bits), header.
pub fn plane_layouts(grid: &Grid, width: Width) -> [PlaneLayout; 4] {
    let all = (grid.panels() * grid.groups()) as u32;
    let (panel, group) = (PANEL as u32, grid.group as u32);
    let plane = |dtype, rows, cols| PlaneLayout { dtype, rows, cols };
    let (codes, offsets) = match width {
        Width::Four => (plane(DType::U32, all, group / 8 * panel), all),
        Width::Eight => (plane(DType::U8, all, group * panel), 0),
    };
    [
        codes,
        plane(DType::Bf16, all, panel),
        plane(DType::Bf16, offsets, panel),
        plane(DType::U32, 1, HEADER as u32),
    ]
}

/// A plane that is being filled.
///
/// # Errors
/// A view of another type or size.
#[allow(clippy::mut_from_ref)] // views are pointers to memory of this call's own
fn writable<'p, T: Item>(views: &'p [View], i: usize, layout: &PlaneLayout) -> Result<&'p mut [T], OpError> {
    let view = views.get(i).copied().unwrap_or(View::EMPTY);
    let same = (view.dtype, view.rows, view.cols, view.stride)
        == (layout.dtype, layout.rows, layout.cols, layout.cols);
    if !same || layout.dtype != T::DTYPE || !(view.ptr as usize).is_multiple_of(align_of::<T>()) {
        return Err(OpError::new(format!("plane {i} is {view:?}, must be {layout:?}")));
    }
    let len = view.rows as usize * view.cols as usize;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: type, size and alignment were compared; whoever has a matrix built gives each plane to this call alone, in
    // zeroed memory that outlives it, and each is asked for once.
    Ok(unsafe { std::slice::from_raw_parts_mut(view.ptr.cast(), len) })
}

/// Reads a matrix a slab at a time, encodes it group by group and fills its planes. `encode` gets the values of one output
/// over a group of the whole matrix (fewer at its end) and writes their codes; it gives scale and offset. Codes of inputs
/// that are not this rank's stay zero, so a share holds just what the whole matrix has at its place.
///
/// # Errors
/// Planes of another size, a stack of several matrices, values that cannot be read.
pub fn store_groups(
    matrix: &Matrix<'_>,
    rows: &MatrixRowsObject,
    planes: &[View],
    (grid, width): (&Grid, Width),
    encode: impl Fn(&[f32], &mut [i8]) -> (bf16, bf16),
) -> Result<(), OpError> {
    if matrix.count != 1 {
        return Err(OpError::new(format!(
            "{} matrices in a stack: groups are stored one by one",
            matrix.count
        )));
    }
    let layouts = plane_layouts(grid, width);
    let (words, bytes): (&mut [u32], &mut [u8]) = match width {
        Width::Four => (writable(planes, 0, &layouts[0])?, &mut []),
        Width::Eight => (&mut [], writable(planes, 0, &layouts[0])?),
    };
    let scales: &mut [bf16] = writable(planes, 1, &layouts[1])?;
    let offsets: &mut [bf16] = writable(planes, 2, &layouts[2])?;
    writable::<u32>(planes, 3, &layouts[3])?.copy_from_slice(&grid.header());

    let first = matrix.first as usize;
    let start = first - grid.lead;
    let end = (start + grid.groups() * grid.group).min(matrix.inputs as usize);
    let wide = end - start;
    let height = (SLAB / wide.max(1)).clamp(1, grid.n);
    let mut values = vec![0.0f32; height * wide];
    let mut codes = vec![0_i8; grid.group];
    let mut output = 0;
    while output < grid.n {
        let count = height.min(grid.n - output);
        let slab = &mut values[..count * wide];
        let (at, outputs) = (output as u32, count as u32);
        rows.read(0, at, outputs, start as u32, wide as u32, SliceMut::from(&mut *slab))?;
        for (row, values) in slab.chunks_exact(wide).enumerate() {
            let (panel, c) = ((output + row) / PANEL, (output + row) % PANEL);
            for (g, values) in values.chunks(grid.group).enumerate() {
                let codes = &mut codes[..values.len()];
                let (scale, offset) = encode(values, codes);
                let at = panel * grid.groups() + g;
                scales[at * PANEL + c] = scale;
                if !offsets.is_empty() {
                    offsets[at * PANEL + c] = offset;
                }
                for (i, code) in codes.iter().enumerate() {
                    let input = start + g * grid.group + i;
                    if input < first || input >= first + grid.k {
                        continue;
                    }
                    match width {
                        Width::Four => {
                            let word = &mut words[(at * grid.group / 8 + i / 8) * PANEL + c];
                            *word |= (*code as u32 & 15) << (4 * (i % 8));
                        }
                        Width::Eight => bytes[(at * grid.group + i) * PANEL + c] = code.cast_unsigned(),
                    }
                }
            }
        }
        output += count;
    }
    Ok(())
}

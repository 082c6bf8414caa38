//! Product of routed rows with their experts' layers.

use rayon::prelude::*;

use super::hadamard::BLOCK;
use super::layer::Layer;
use super::matmul::Options;
use super::products::multiply_blocks;
use super::rotate::Rotated;

/// Which rows go to which expert.
#[derive(Clone, Copy, Debug)]
pub struct Routes<'a> {
    /// Pairs of a row and a slot, grouped by expert; pair `p` reads input row `p / fan` and writes output row `p`.
    pub order: &'a [i32],
    /// `order[starts[e]..starts[e + 1]]` are the pairs of expert `e`.
    pub starts: &'a [i32],
    /// Pairs that share an input row: the slots for gate and up, 1 for down.
    pub fan: usize,
}

/// Multiplies routed rows with their experts' layers.
///
/// `parts[p][e]` is part `p` of expert `e`; the results of the parts stand beside one another in a row of `y`, each
/// `width` wide: gate and up are two parts of one call, down is a call of its own. `x` is `(rows, in)`, `y` is
/// `(pairs, parts · width)`, both row-major; rows of pairs that `routes` lacks stay as they are. Every expert rotates
/// its rows for itself, since experts have their own scales; its trellis is decoded once for up to 64 of them. The
/// bits of a pair are those of [`Layer::matmul`] on its row, whatever else is routed. Work is spread over the current
/// rayon pool.
///
/// # Panics
/// If a route points beyond `x`, `y` or the experts, or a width exceeds a layer's.
pub fn experts(
    parts: &[&[Layer]],
    routes: Routes<'_>,
    x: &[f32],
    inputs: usize,
    y: &mut [f32],
    width: usize,
    options: Options,
) {
    let stride = parts.len() * width;
    if stride == 0 || routes.order.is_empty() {
        return;
    }
    let active: Vec<(usize, usize)> = (0..parts.len())
        .flat_map(|part| (0..routes.starts.len() - 1).map(move |e| (part, e)))
        .filter(|&(_, e)| routes.starts[e] < routes.starts[e + 1])
        .collect();
    let members = |e: usize| &routes.order[routes.starts[e] as usize..routes.starts[e + 1] as usize];
    let rotated: Vec<Rotated> = active
        .par_iter()
        .map(|&(part, e)| {
            let layer = &parts[part][e];
            assert!(inputs <= layer.k() && width <= layer.n(), "expert {e} is {} x {}", layer.k(), layer.n());
            let rows: Vec<&[f32]> =
                members(e).iter().map(|&pair| &x[pair as usize / routes.fan * inputs..][..inputs]).collect();
            Rotated::new(rows.into_iter(), layer.suh(), options.activations, options.path)
        })
        .collect();
    let blocks = width.div_ceil(BLOCK);
    let results: Vec<Vec<f32>> = (0..active.len() * blocks)
        .into_par_iter()
        .map(|task| {
            let (part, e) = active[task / blocks];
            let layer = &parts[part][e];
            let mut columns = vec![0.0; members(e).len() * BLOCK];
            multiply_blocks(
                layer,
                &rotated[task / blocks],
                task % blocks,
                1,
                options.path,
                |row, block, values| {
                    layer.finish_block(block, values);
                    columns[row * BLOCK..][..BLOCK].copy_from_slice(values);
                },
            );
            columns
        })
        .collect();
    for (task, columns) in results.iter().enumerate() {
        let (part, e) = active[task / blocks];
        let first = task % blocks * BLOCK;
        let count = BLOCK.min(width - first);
        for (&pair, columns) in members(e).iter().zip(columns.chunks_exact(BLOCK)) {
            let at = pair as usize * stride + part * width + first;
            y[at..at + count].copy_from_slice(&columns[..count]);
        }
    }
}

//! Mixture of experts: routing, the experts' products, and their weighted sum.

use super::dense::{Elements, PANEL, PackedMatrix, RowMap, ShapeError, matmul_mapped, multiply_here};
use super::num::sigmoid;
use super::sample::ordered;
use crate::cpu::par;
use crate::cpu::rows::{Rows, RowsMut};
use crate::cpu::scratch;
use crate::cpu::simd::kernel;

/// How experts are chosen and weighed.
#[derive(Clone, Copy, Debug)]
pub struct Router<'a> {
    /// Added to the logistic scores for the choice only, `[E]`.
    pub bias: &'a [f32],
    /// k.
    pub experts: usize,
    /// Groups of neighbouring experts.
    pub groups: usize,
    /// Groups that stay in the choice.
    pub kept_groups: usize,
    /// Whether the chosen scores are divided by their sum.
    pub normalized: bool,
    /// Factor of all weights.
    pub scale: f32,
}

kernel! {
    fn score_row[][](logits: &'a [f32], bias: &'a [f32], score: &'a mut [f32], biased: &'a mut [f32]) -> () {
        for (((s, c), l), b) in score.iter_mut().zip(biased.iter_mut()).zip(logits).zip(bias) {
            *s = sigmoid(*l);
            *c = *s + b;
        }
    }
}

/// Falling by value, then rising by index.
fn falling(values: &[f32], a: u32, b: u32) -> std::cmp::Ordering {
    ordered(values[b as usize]).cmp(&ordered(values[a as usize])).then(a.cmp(&b))
}

/// Experts of every row of `logits [R, E]`: `ids [R, k]` by falling biased score (ties to the lower id) and their
/// `weights [R, k]` from the unbiased scores.
///
/// # Panics
/// When the shapes do not fit, or there are fewer experts (in the kept groups) than are to be chosen.
pub fn pick(logits: Rows<'_>, router: Router<'_>, mut ids: RowsMut<'_, i32>, mut weights: RowsMut<'_>) {
    let experts = logits.cols();
    assert_eq!(router.bias.len(), experts, "router: bias");
    assert_eq!((ids.rows(), ids.cols()), (logits.rows(), router.experts), "router: ids");
    assert_eq!((weights.rows(), weights.cols()), (logits.rows(), router.experts), "router: weights");
    assert!(router.groups > 0 && experts.is_multiple_of(router.groups), "router: groups of experts");
    let size = experts / router.groups;
    let kept = router.kept_groups.min(router.groups);
    assert!(router.experts <= kept * size, "router: {} experts of {}", router.experts, kept * size);
    let (mut score, mut biased) = (scratch::zeros::<f32>(experts), scratch::zeros::<f32>(experts));
    let mut all = scratch::zeros::<u32>(experts);
    for r in 0..logits.rows() {
        score_row(logits.row(r), router.bias, &mut score, &mut biased);
        let mut count = experts;
        if kept < router.groups {
            let mut groups = scratch::zeros::<f32>(router.groups);
            groups.iter_mut().zip(biased.chunks_exact(size)).for_each(|(g, values)| *g = two_largest(values));
            let mut best = scratch::zeros::<u32>(router.groups);
            best.iter_mut().zip(0..).for_each(|(b, group)| *b = group);
            best.sort_unstable_by(|a, b| falling(&groups, *a, *b));
            let best = &best[..kept];
            count = 0;
            for e in (0..experts as u32).filter(|e| best.contains(&(*e / size as u32))) {
                all[count] = e;
                count += 1;
            }
        } else {
            all.iter_mut().zip(0..).for_each(|(a, e)| *a = e);
        }
        let mut order = &mut all[..count];
        if router.experts < count {
            order.select_nth_unstable_by(router.experts, |a, b| falling(&biased, *a, *b));
            order = &mut order[..router.experts];
        }
        order.sort_unstable_by(|a, b| falling(&biased, *a, *b));
        let mut total = 0.0;
        for e in &*order {
            total += score[*e as usize];
        }
        let divisor = if router.normalized { total + 1e-20 } else { 1.0 };
        for ((id, weight), e) in ids.row_mut(r).iter_mut().zip(weights.row_mut(r)).zip(&*order) {
            *id = *e as i32;
            *weight = score[*e as usize] / divisor * router.scale;
        }
    }
}

/// Sum of the two largest.
fn two_largest(values: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &v in values {
        if v > first {
            second = first;
            first = v;
        } else if v > second {
            second = v;
        }
    }
    if values.len() > 1 { first + second } else { first }
}

/// Pairs (row * k + slot) by expert, then by pair, into `order [R*k]`; `starts[e] .. starts[e+1]` are expert e's.
///
/// # Panics
/// When the shapes do not fit or an id is not an expert.
pub fn group(ids: Rows<'_, i32>, order: &mut [i32], starts: &mut [i32]) {
    let k = ids.cols();
    assert_eq!(order.len(), ids.rows() * k, "expert lists: pairs");
    starts.fill(0);
    for r in 0..ids.rows() {
        for id in ids.row(r) {
            starts[*id as usize + 1] += 1;
        }
    }
    for e in 1..starts.len() {
        starts[e] += starts[e - 1];
    }
    let mut next = scratch::zeros::<i32>(starts.len());
    next.copy_from_slice(starts);
    for r in 0..ids.rows() {
        for (slot, id) in ids.row(r).iter().enumerate() {
            let at = &mut next[*id as usize];
            order[*at as usize] = (r * k + slot) as i32;
            *at += 1;
        }
    }
}

/// Every expert's matrix of a stack `[E][n, k]` times its rows: output row p (a pair) comes from input row `p / fan`.
/// An expert's weights are read once for all its rows.
///
/// # Errors
/// When `stack` does not hold the experts that `starts` counts.
///
/// # Panics
/// When the rows of input and output do not fit `order`.
pub fn experts(
    x: Rows<'_>,
    stack: Elements<'_>,
    n: usize,
    order: &[i32],
    starts: &[i32],
    fan: usize,
    mut out: RowsMut<'_>,
) -> Result<(), ShapeError> {
    let count = starts.len().saturating_sub(1);
    for e in 0..count {
        let ids = &order[starts[e] as usize..starts[e + 1] as usize];
        if !ids.is_empty() {
            let w = PackedMatrix::of_stack(n, x.cols(), count, e, stack)?;
            matmul_mapped(x, w, None, RowMap::Listed { ids, fan }, out.reborrow());
        }
    }
    Ok(())
}

/// How [`experts_tiled`] cuts its work. No setting changes a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tiles {
    /// Panels of 16 outputs a task.
    pub columns: usize,
    /// Tiles of 16 rows of an expert that pass over a task's weights at a time.
    pub members: usize,
}

/// As [`experts`], with the same bits, in tasks that hold some columns of all experts: the threads meet once a call, not
/// once an expert, and a task's slice of an expert's weights is read for the first rows and in the cache for the others.
///
/// # Errors
/// As [`experts`], or a tile of no columns or no rows.
///
/// # Panics
/// When the rows of input and output do not fit `order`.
pub fn experts_tiled(
    x: Rows<'_>,
    stack: Elements<'_>,
    n: usize,
    (order, starts): (&[i32], &[i32]),
    fan: usize,
    tiles: Tiles,
    out: RowsMut<'_>,
) -> Result<(), ShapeError> {
    let Tiles { columns, members } = tiles;
    if columns == 0 || members == 0 {
        return Err(ShapeError::new(format!(
            "{columns} tiles of columns, {members} of rows: give 1 or more"
        )));
    }
    assert_eq!(out.cols(), n, "tiled experts: width of the output");
    let count = starts.len().saturating_sub(1);
    let mut all = Vec::new();
    for e in 0..count {
        let ids = &order[starts[e] as usize..starts[e + 1] as usize];
        if !ids.is_empty() {
            all.push((PackedMatrix::of_stack(n, x.cols(), count, e, stack)?, ids));
        }
    }
    let work = order.len() * n * x.cols();
    par::each(out.column_pieces(columns * PANEL), work, |i, mut out| {
        for (w, ids) in &all {
            let w = w.panels(i * columns, columns);
            for ids in ids.chunks(members * 16) {
                multiply_here(x, w, RowMap::Listed { ids, fan }, &mut out);
            }
        }
    });
    Ok(())
}

kernel! {
    fn combine_rows[][](y: Rows<'a>, weights: Rows<'a>, shared: Rows<'a>, out: RowsMut<'a>) -> () {
        let mut out = out;
        let slots = weights.cols();
        for r in 0..out.rows() {
            let out = out.row_mut(r);
            out.fill(0.0);
            for (slot, w) in weights.row(r).iter().enumerate() {
                for (o, y) in out.iter_mut().zip(y.row(r * slots + slot)) {
                    *o = w.mul_add(*y, *o);
                }
            }
            for (o, s) in out.iter_mut().zip(shared.row(r)) {
                *o += s;
            }
        }
    }
}

/// Weighted experts' rows `y [R*k, D]` in slot order, then the shared expert's row: `out [R, D]`, in f32.
///
/// # Panics
/// When the shapes do not fit.
pub fn combine(y: Rows<'_>, weights: Rows<'_>, shared: Rows<'_>, out: RowsMut<'_>) {
    let (rows, slots) = (weights.rows(), weights.cols());
    assert_eq!((y.rows(), y.cols()), (rows * slots, out.cols()), "combine: experts' rows");
    assert_eq!((shared.rows(), shared.cols()), (rows, out.cols()), "combine: shared rows");
    assert_eq!(out.rows(), rows, "combine: output rows");
    let work = rows * (slots + 1) * out.cols();
    par::each(out.row_pieces(4), work, |i, out| {
        let (at, count) = (4 * i, out.rows());
        let y = y.range(at * slots, count * slots);
        combine_rows(y, weights.range(at, count), shared.range(at, count), out);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::math::dense::pack_f32;
    use crate::cpu::math::testing::{bits, close, random};
    use proptest::prelude::*;

    fn run(logits: &[f32], router: Router<'_>) -> (Vec<i32>, Vec<f32>) {
        let logits = Rows::new(logits, router.bias.len());
        let mut ids = vec![0; logits.rows() * router.experts];
        let mut weights = vec![0.0; ids.len()];
        let views = (RowsMut::new(&mut ids, router.experts), RowsMut::new(&mut weights, router.experts));
        pick(logits, router, views.0, views.1);
        (ids, weights)
    }

    fn router(bias: &[f32], experts: usize) -> Router<'_> {
        Router { bias, experts, groups: 1, kept_groups: 1, normalized: true, scale: 2.5 }
    }

    #[test]
    fn bias_chooses_and_scores_weigh() {
        let bias = [0.0, 0.9, 0.0, 0.0];
        let (ids, weights) = run(&[2.0, -3.0, 1.0, 0.0], router(&bias, 2));
        assert_eq!(ids, [1, 0]);
        let s = |v: f64| 1.0 / (1.0 + (-v).exp());
        let total = s(-3.0) + s(2.0);
        close(&weights, &[s(-3.0) / total * 2.5, s(2.0) / total * 2.5], 1e-6, "weights");
        let (_, plain) = run(&[2.0, -3.0, 1.0, 0.0], Router { normalized: false, ..router(&bias, 2) });
        close(&plain, &[s(-3.0) * 2.5, s(2.0) * 2.5], 1e-6, "weights that are not normalized");
    }

    #[test]
    fn ties_go_to_the_lower_expert() {
        let bias = [0.0; 6];
        assert_eq!(run(&[1.0, 2.0, 1.0, 2.0, 1.0, 0.0], router(&bias, 4)).0, [1, 3, 0, 2]);
    }

    #[test]
    fn only_kept_groups_are_chosen_from() {
        // Groups (0, 1), (2, 3), (4, 5): the largest expert is alone in a weak group.
        let bias = [0.0; 6];
        let grouped = Router { groups: 3, kept_groups: 2, ..router(&bias, 3) };
        assert_eq!(run(&[9.0, -9.0, 1.0, 0.9, 0.8, 0.7], grouped).0, [2, 3, 4]);
    }

    #[test]
    fn lists_hold_every_pair_once() {
        let ids = [2, 0, 2, 1, 0, 2];
        let (mut order, mut starts) = (vec![-1; 6], vec![-1; 5]);
        group(Rows::new(&ids, 2), &mut order, &mut starts);
        assert_eq!(order, [1, 4, 3, 0, 2, 5]);
        assert_eq!(starts, [0, 2, 3, 6, 6]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn a_row_has_the_same_bits_in_any_company(rows in 1usize..=64, seed in 0u64..1000) {
            let (e, k, n, d) = (7, 3, 18, 35);
            let (x, logits) = (random(seed, rows * d), random(seed + 1, rows * e));
            let stack: Vec<f32> = random(seed + 2, e * n * d).chunks(n * d).flat_map(|w| pack_f32(w, n, d)).collect();
            let (bias, shared) = (random(seed + 3, e), random(seed + 4, rows * n));
            let all = |x: &[f32], logits: &[f32], shared: &[f32]| {
                let rows = x.len() / d;
                let (ids, weights) = run(logits, router(&bias, k));
                let (mut order, mut starts) = (vec![0; rows * k], vec![0; e + 1]);
                group(Rows::new(&ids, k), &mut order, &mut starts);
                let (mut y, mut out) = (vec![f32::NAN; rows * k * n], vec![f32::NAN; rows * n]);
                let view = RowsMut::new(&mut y, n);
                experts(Rows::new(x, d), Elements::F32(&stack), n, &order, &starts, k, view).unwrap();
                combine(Rows::new(&y, n), Rows::new(&weights, k), Rows::new(shared, n), RowsMut::new(&mut out, n));
                (ids, bits(&out))
            };
            let together = all(&x, &logits, &shared);
            for r in 0..rows {
                let one = all(&x[r * d..][..d], &logits[r * e..][..e], &shared[r * n..][..n]);
                prop_assert_eq!(&one.0[..], &together.0[r * k..][..k]);
                prop_assert_eq!(&one.1[..], &together.1[r * n..][..n]);
            }
        }
    }
}

//! The kernels of 0130, and the loops over experts of 0006 and 0580: other loops and, where sums are exact, other orders.

use plugfold_abi::{
    BelowObject, Bits, Call, Claim, Granted, List, OpError, Phase, Plan, Provider, ProviderObject, Query,
    Slice, TextBuf,
};
use plugfold_kernels::cpu::math::act::swiglu;
use plugfold_kernels::cpu::math::dense::matmul;
use plugfold_kernels::cpu::math::moe::{self, Router, Tiles};
use plugfold_kernels::cpu::operands::Operands;
use plugfold_kernels::cpu::rows::{Rows, RowsMut};
use plugfold_kernels::cpu::{down_tiled, up_tiled};
use plugfold_tests::integer::fold;

use super::{Log, Model};

/// Rows up to which a call is one of a decode step.
const FEW: u32 = 16;

/// A kernel over the calls that it covers; of a plain claim there is one.
type Kernel = fn(&Fused, &[Call<'_>]) -> Result<(), OpError>;

/// A claim of a plugin, with its kernel.
pub struct Fused {
    owner: &'static str,
    ops: &'static [&'static str],
    /// Role of the first weight that it is for; all where empty.
    role: &'static str,
    phases: &'static [Phase],
    /// Only calls whose sizes are equal.
    equal: bool,
    /// Slices of a sum over K.
    slices: usize,
    forgets: bool,
    model: Model,
    kernel: Kernel,
    log: Log,
}

impl Provider for Fused {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.ops[0].into())
    }
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(self.ops.join("+").as_str().into())
    }
    fn covers(&self) -> Result<List<TextBuf>, OpError> {
        let all = self.ops.iter().map(|op| TextBuf::from(*op));
        Ok(if self.ops.len() > 1 { all.collect() } else { List::new() })
    }
    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        let role = self.role.is_empty() || query.weight_roles[0].get_str() == self.role;
        let alone = query.weight_roles[1].is_empty();
        let mine = role && alone && self.phases.contains(&query.phase) && query.rows <= FEW;
        Ok(if mine { Claim::Yes(Granted::plain(self.bits())) } else { Claim::No })
    }
    fn takes(&self, queries: Slice<'_, Query<'_>>) -> Result<bool, OpError> {
        let alone = queries.iter().all(|q| q.weight_roles[1].is_empty());
        Ok(alone && (!self.equal || queries.iter().all(|q| q.dims == queries[0].dims)))
    }
    fn run(&self, call: &Call<'_>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        self.log.ran(self.owner, call);
        (self.kernel)(self, std::slice::from_ref(call))
    }
    fn run_group(&self, calls: Slice<'_, Call<'_>>, _: &Plan, _: &BelowObject) -> Result<(), OpError> {
        for call in &*calls {
            self.log.ran(self.owner, call);
        }
        (self.kernel)(self, &calls)
    }
}

impl Fused {
    fn bits(&self) -> Bits {
        self.model.bits(self.ops)
    }
}

/// 0130: the router, the experts, the shared expert's last product and pairs of products in one call each, and a product and
/// the dots of hyper-connections by kernels of their own.
pub fn decode_step(model: Model, log: &Log, forgets: bool) -> Vec<ProviderObject> {
    let slices = if model == Model::Integer { 4 } else { 1 };
    let one = |ops, role, equal, kernel| {
        let (owner, phases, log) = ("0130", &[Phase::Window][..], log.clone());
        ProviderObject::new(Fused { owner, ops, role, phases, equal, slices, forgets, model, kernel, log })
    };
    vec![
        one(&["dense"], "kda.o", false, fixup),
        one(&["moe.logits", "moe.pick", "moe.group"], "", false, route),
        one(&["moe.up", "moe.act", "moe.down"], "", false, chained),
        one(&["dense", "dense"], "", true, pair),
        one(&["dense", "moe.combine"], "shared.down", false, shared_out),
    ]
}

/// 0006 and 0580: the same sums as the reference's, read in other tiles. 0580 also drafts, and reads prompts not at all.
pub fn experts(owner: &'static str, model: Model, log: &Log) -> Vec<ProviderObject> {
    let phases: &[Phase] =
        if owner == "0580" { &[Phase::Window, Phase::Draft] } else { &[Phase::Window, Phase::Prefill] };
    let one = |ops, kernel| {
        let log = log.clone();
        let (role, equal, slices, forgets) = ("", false, 1, false);
        ProviderObject::new(Fused { owner, ops, role, phases, equal, slices, forgets, model, kernel, log })
    };
    vec![one(&["moe.up"], |_, c| up_tiled(&c[0], LOADS)), one(&["moe.down"], |_, c| down_tiled(&c[0], LOADS))]
}

const LOADS: Tiles = Tiles { columns: 2, members: 4 };
const CHAINED: Tiles = Tiles { columns: 8, members: 1 };

fn three<'a, 'c>(calls: &'a [Call<'c>]) -> Result<[&'a Call<'c>; 3], OpError> {
    let [a, b, c] = calls else { return Err(OpError::new(format!("{} calls for three", calls.len()))) };
    Ok([a, b, c])
}

fn two<'a, 'c>(calls: &'a [Call<'c>]) -> Result<[&'a Call<'c>; 2], OpError> {
    let [a, b] = calls else { return Err(OpError::new(format!("{} calls for two", calls.len()))) };
    Ok([a, b])
}

/// One row of a product, its sum over K in slices whose partial sums are added from the last one on.
fn sliced(f: &Fused, x: &[f32], w: plugfold_kernels::cpu::math::dense::PackedMatrix<'_>) -> Vec<f32> {
    let (n, k) = (w.n(), w.k());
    let width = k.div_ceil(f.slices);
    let partial = |slice: usize| {
        let inside = |i: usize| f.slices == 1 || i / width == slice;
        let x: Vec<f32> = x.iter().enumerate().map(|(i, v)| if inside(i) { *v } else { 0.0 }).collect();
        let mut out = vec![0.0; n];
        matmul(Rows::new(&x, k), w, None, RowsMut::new(&mut out, n));
        out
    };
    let first = usize::from(f.forgets);
    let mut sum = partial(f.slices - 1);
    for slice in (first..f.slices - 1).rev() {
        sum.iter_mut().zip(partial(slice)).for_each(|(s, p)| *s += p);
    }
    sum
}

/// Logits, choice and lists of experts, row by row.
fn route(f: &Fused, calls: &[Call<'_>]) -> Result<(), OpError> {
    let [l, p, g] = three(calls)?;
    let (l, p, g) =
        (Operands::new("moe.logits", l)?, Operands::new("moe.pick", p)?, Operands::new("moe.group", g)?);
    let (e, d, k, rows) = (l.size(0, "E")?, l.size(1, "D")?, p.size(1, "k")?, l.rows());
    let (x, w) = (l.input::<f32>(0, "h", rows, d)?, l.panels(0, "moe.router", e, d)?);
    let mut logits = l.output::<f32>(0, "logits", rows, e)?;
    let mut ids = p.output::<i32>(0, "ids", rows, k)?;
    let mut weights = p.output::<f32>(1, "weights", rows, k)?;
    for r in 0..rows {
        let row = sliced(f, x.row(r), w);
        logits.row_mut(r).copy_from_slice(&row);
        if f.model == Model::Integer {
            largest(&row, ids.row_mut(r), weights.row_mut(r));
            continue;
        }
        let router = Router {
            bias: p.vector(0, "moe.bias", e)?,
            experts: k,
            groups: p.size(2, "groups")?,
            kept_groups: p.size(3, "kept groups")?,
            normalized: p.dim(4) != 0,
            scale: p.param(0),
        };
        let (ids, weights) = (RowsMut::new(ids.row_mut(r), k), RowsMut::new(weights.row_mut(r), k));
        moe::pick(Rows::new(&row, e), router, ids, weights);
    }
    let (mut order, mut starts) = (vec![0; rows * k], vec![0; e + 1]);
    moe::group(ids.shared(), &mut order, &mut starts);
    let mut out = g.output::<i32>(0, "order", rows * k, 1)?;
    order.iter().enumerate().for_each(|(i, v)| out.row_mut(i)[0] = *v);
    let mut out = g.output::<i32>(1, "starts", e + 1, 1)?;
    starts.iter().enumerate().for_each(|(i, v)| out.row_mut(i)[0] = *v);
    Ok(())
}

/// So many times the largest that is left, ties to the lower id; weights count down.
fn largest(logits: &[f32], ids: &mut [i32], weights: &mut [f32]) {
    let mut left: Vec<Option<f32>> = logits.iter().copied().map(Some).collect();
    let k = ids.len();
    for (i, (id, weight)) in ids.iter_mut().zip(weights).enumerate() {
        let mut best = None;
        for (e, value) in left.iter().enumerate() {
            if let Some(v) = value
                && best.is_none_or(|(_, most)| *v > most)
            {
                best = Some((e, *v));
            }
        }
        let Some((e, _)) = best else { return };
        left[e] = None;
        (*id, *weight) = (e as i32, (k - i) as f32);
    }
}

/// Both products of the experts, with what lies between them.
fn chained(f: &Fused, calls: &[Call<'_>]) -> Result<(), OpError> {
    let [up, act, down] = three(calls)?;
    up_tiled(up, CHAINED)?;
    let a = Operands::new("moe.act", act)?;
    let (width, pairs) = (a.size(0, "I")?, act.inputs[0].rows as usize);
    let z = a.input::<f32>(0, "Z", pairs, 2 * width)?;
    let mut out = a.output::<f32>(0, "A", pairs, width)?;
    for r in 0..pairs {
        if f.model == Model::Tiny {
            swiglu(z.range(r, 1), a.param(0), RowsMut::new(out.row_mut(r), width));
            continue;
        }
        let (gate, up) = z.row(r).split_at(width);
        for (out, (g, u)) in out.row_mut(r).iter_mut().zip(gate.iter().zip(up)) {
            *out = fold(*u as i64 * (*g as i64 + 1));
        }
    }
    down_tiled(down, CHAINED)
}

/// The rows of a product one by one.
fn product(f: &Fused, o: &Operands<'_>) -> Result<(usize, impl Fn(usize) -> Vec<f32>), OpError> {
    let (n, k) = (o.size(0, "n")?, o.size(1, "k")?);
    let (x, w) = (o.input::<f32>(0, "rows", o.rows(), k)?, o.panels(0, "matrix", n, k)?);
    Ok((n, move |r: usize| sliced(f, x.row(r), w)))
}

fn fixup(f: &Fused, calls: &[Call<'_>]) -> Result<(), OpError> {
    let o = Operands::new("dense", &calls[0])?;
    let (n, row) = product(f, &o)?;
    let mut out = o.output::<f32>(0, "rows", o.rows(), n)?;
    (0..o.rows()).for_each(|r| out.row_mut(r).copy_from_slice(&row(r)));
    Ok(())
}

/// Two products of equal shapes, row by row of both.
fn pair(f: &Fused, calls: &[Call<'_>]) -> Result<(), OpError> {
    let [a, b] = two(calls)?;
    let (a, b) = (Operands::new("dense", a)?, Operands::new("dense", b)?);
    let ((n, first), (_, second)) = (product(f, &a)?, product(f, &b)?);
    let mut one = a.output::<f32>(0, "rows", a.rows(), n)?;
    // The second may read what the first gives, so its rows follow.
    (0..a.rows()).for_each(|r| one.row_mut(r).copy_from_slice(&first(r)));
    let mut other = b.output::<f32>(0, "rows", b.rows(), n)?;
    (0..b.rows()).for_each(|r| other.row_mut(r).copy_from_slice(&second(r)));
    Ok(())
}

/// The shared expert's last product goes straight into the weighted sum.
fn shared_out(f: &Fused, calls: &[Call<'_>]) -> Result<(), OpError> {
    let [d, c] = two(calls)?;
    let (o, c) = (Operands::new("dense", d)?, Operands::new("moe.combine", c)?);
    let (n, row) = product(f, &o)?;
    let (k, rows) = (c.size(0, "k")?, c.rows());
    let y = c.input::<f32>(0, "Y", rows * k, n)?;
    let weights = c.input::<f32>(1, "weights", rows, k)?;
    let mut out = c.output::<f32>(0, "partial", rows, n)?;
    for r in 0..rows {
        let shared = row(r);
        let out = RowsMut::new(out.row_mut(r), n);
        moe::combine(y.range(r * k, k), weights.range(r, 1), Rows::new(&shared, n), out);
    }
    Ok(())
}

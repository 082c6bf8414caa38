//! Who decides the arithmetic of a call and who runs it, with planted plugins on the tiny model.

mod arithmetic;
mod families;
mod fusions;
mod orders;

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

use plugfold_abi::boundary::Offer;
use plugfold_abi::{
    Below, BelowObject, Bits, Call, Claim, DType, Granted, KnobId, KnobValue, List, Maybe, Member, OpError,
    Phase, Plan, Provider, ProviderObject, Query, Shape, Slice, Span, TextBuf, View,
};

use crate::core::{Core, CoreOptions, LoadError, SeqRows, Want};
use crate::hooks::Hooks;
use crate::program::build::kinds;
use crate::split::Split;

/// What a planted provider does with a call.
#[derive(Clone, Copy, Debug)]
enum Does {
    /// Passes it on.
    Pass,
    /// Passes it on, twice.
    Twice,
    /// Passes every row on by itself.
    Rows,
    /// Runs the reference, whatever lies beneath.
    Reference,
    /// The same, and scales the numbers that come out.
    Scale(f32),
}

type Answer = Box<dyn Fn(&Query<'_>) -> Result<Claim, OpError> + Send + Sync>;

/// A provider that counts its calls.
struct Planted {
    op: &'static str,
    name: &'static str,
    covers: &'static [&'static str],
    member: Option<(KnobId, &'static str)>,
    answer: Answer,
    /// What a fusion takes together; all, where nothing is said.
    takes: Option<fn(&[Query<'_>]) -> bool>,
    does: Does,
    ran: Arc<AtomicU32>,
    /// First byte of the plan that came with the last call.
    plan: Arc<AtomicU32>,
}

fn planted(op: &'static str, does: Does, bits: Bits) -> Planted {
    answering(op, does, move |_| Ok(Claim::Yes(Granted::plain(bits.clone()))))
}

fn answering(
    op: &'static str,
    does: Does,
    answer: impl Fn(&Query<'_>) -> Result<Claim, OpError> + Send + Sync + 'static,
) -> Planted {
    let answer = Box::new(answer);
    let (ran, plan) = (Arc::default(), Arc::default());
    Planted { op, name: "main", covers: &[], member: None, answer, takes: None, does, ran, plan }
}

/// A fusion that passes its calls on one by one, or scales what its last one gives.
fn fusion(covers: &'static [&'static str], does: Does, bits: Bits) -> Planted {
    Planted { covers, ..planted(covers[0], does, bits) }
}

impl Provider for Planted {
    fn op(&self) -> Result<TextBuf, OpError> {
        Ok(self.op.into())
    }
    fn name(&self) -> Result<TextBuf, OpError> {
        Ok(self.name.into())
    }
    fn covers(&self) -> Result<List<TextBuf>, OpError> {
        Ok(self.covers.iter().map(|op| TextBuf::from(*op)).collect())
    }
    fn family(&self) -> Result<Maybe<Member>, OpError> {
        Ok(self.member.map(|(knob, value)| Member { knob, value: value.into() }).into())
    }
    fn claim(&self, query: &Query<'_>) -> Result<Claim, OpError> {
        (self.answer)(query)
    }
    fn takes(&self, queries: Slice<'_, Query<'_>>) -> Result<bool, OpError> {
        Ok(self.takes.is_none_or(|takes| takes(&queries)))
    }
    fn run(&self, call: &Call<'_>, plan: &Plan, below: &BelowObject) -> Result<(), OpError> {
        self.ran.fetch_add(1, Ordering::Relaxed);
        self.plan.store(u32::from(plan[0]), Ordering::Relaxed);
        match self.does {
            Does::Pass => below.run(call),
            Does::Twice => below.run(call).and_then(|()| below.run(call)),
            Does::Rows => rows(call).iter().try_for_each(|row| below.run(row)),
            Does::Reference => reference(call, below),
            Does::Scale(by) => reference(call, below).map(|()| scale(call, by)),
        }
    }
    fn run_group(&self, calls: Slice<'_, Call<'_>>, _: &Plan, below: &BelowObject) -> Result<(), OpError> {
        self.ran.fetch_add(1, Ordering::Relaxed);
        if calls.len() != self.covers.len() {
            return Err(OpError::new(format!("{} calls for {:?}", calls.len(), self.covers)));
        }
        calls.iter().try_for_each(|call| below.run(call))?;
        if let (Does::Scale(by), Some(last)) = (self.does, calls.last()) {
            scale(last, by);
        }
        Ok(())
    }
}

fn reference(call: &Call<'_>, below: &BelowObject) -> Result<(), OpError> {
    static ALL: OnceLock<Vec<ProviderObject>> = OnceLock::new();
    let all = ALL.get_or_init(plugfold_kernels::cpu::reference);
    let found = all.iter().find(|p| p.op().is_ok_and(|op| op == *call.op));
    found.ok_or_else(|| OpError::new("no such operation"))?.run(call, &[0; 64], below)
}

fn scale(call: &Call<'_>, by: f32) {
    for view in call.outputs.iter().filter(|v| v.rows > 0 && v.dtype == DType::F32) {
        for row in 0..view.rows as usize {
            #[allow(clippy::cast_ptr_alignment)] // f32 rows of buffers that lie on multiples of 64 bytes
            let first = view.ptr.cast::<f32>();
            // SAFETY: the views of a call's outputs are its own while it runs.
            let values = unsafe {
                std::slice::from_raw_parts_mut(first.add(row * view.stride as usize), view.cols as usize)
            };
            for v in values {
                *v *= by;
            }
        }
    }
}

/// The calls of a call's rows, one by one.
fn rows<'c>(call: &Call<'c>) -> Vec<Call<'c>> {
    let span = call.rows.within(call.round.rows());
    let one = |(i, row): (usize, usize)| {
        let of = |view: View| {
            let times = view.rows as usize / span.len();
            let skip = i * times * view.stride as usize * view.dtype.size();
            // SAFETY: row `i` of the call lies inside the view.
            let ptr = if view.rows == 0 { view.ptr } else { unsafe { view.ptr.add(skip) } };
            View { ptr, rows: times as u32, ..view }
        };
        let rows = Span { start: row as u32, end: row as u32 + 1 };
        Call { rows, inputs: call.inputs.map(of), outputs: call.outputs.map(of), ..*call }
    };
    span.clone().enumerate().map(one).collect()
}

/// Hooks of plugins, in list order: id, the plugins that it is over, its provider.
fn hooks(list: Vec<(&str, &[&str], Planted)>) -> Hooks {
    let mut hooks = Hooks::default();
    for (owner, over, provider) in list {
        let over: Vec<String> = over.iter().map(ToString::to_string).collect();
        hooks.add(owner, &over, Offer::of(ProviderObject::new(provider))).unwrap();
    }
    hooks
}

fn core(hooks: Hooks) -> Result<Core, LoadError> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny");
    let options =
        CoreOptions { slots: 2, context: Some(64), hooks: Arc::new(hooks), ..CoreOptions::default() };
    Core::load(&dir, &options, Split::WHOLE, None)
}

/// Loads plugins that fit.
fn load(list: Vec<(&str, &[&str], Planted)>) -> Core {
    core(hooks(list)).unwrap_or_else(|e| panic!("{e}"))
}

/// Why plugins are refused.
fn refusal(list: Vec<(&str, &[&str], Planted)>) -> String {
    core(hooks(list)).err().expect("must be refused").to_string()
}

/// Everything that a prefill of nine tokens and a window of three give, bit for bit.
#[derive(Debug, PartialEq)]
struct Bitwise {
    logits: Vec<u32>,
    image: Vec<(String, Vec<u32>)>,
}

fn run(core: &mut Core) -> Bitwise {
    core.begin(0);
    go_on(core)
}

/// The same for a sequence that has begun in slot 0.
fn go_on(core: &mut Core) -> Bitwise {
    let tokens: Vec<u32> = (0..12).map(|i| (i * 37 + 11) % 480).collect();
    let mut logits = Vec::new();
    for (phase, tokens) in [(Phase::Prefill, &tokens[..9]), (Phase::Window, &tokens[9..])] {
        let rows = [SeqRows { slot: 0, tokens, want: Want::All, embeds: &[] }];
        let forward = core.forward(phase, &rows, Some(4), false).unwrap();
        assert_eq!(forward.failure, None);
        logits.extend(core.output(&forward, "logits").unwrap().iter().map(|v| v.to_bits()));
        core.commit(&forward, &[tokens.len()]).unwrap();
    }
    Bitwise { logits, image: core.image(0) }
}

fn plain() -> Bitwise {
    run(&mut load(vec![]))
}

/// Who runs an operation and with which arithmetic, over all its calls in a forward of a phase: plugin, bits, fused.
fn who(core: &mut Core, phase: Phase, op: &str) -> Vec<(String, String, bool)> {
    let defaults = core.hooks().knobs.defaults.clone();
    who_with(core, phase, op, &defaults)
}

fn who_with(core: &mut Core, phase: Phase, op: &str, knobs: &[KnobValue]) -> Vec<(String, String, bool)> {
    let shape = Shape {
        kind: kinds::FORWARD.into(),
        phase,
        rows: 8,
        seqs: 1,
        out_rows: 1,
        select: false,
        candidates: 0,
        words: List::new(),
        knobs: core.hooks().knobs.of_shape(knobs).into(),
    };
    let program = core.program(&shape).unwrap();
    let steps = program.describe().into_iter().filter(|s| s.op == op);
    let mut all: Vec<_> = steps.map(|s| (s.owner, s.bits, s.fused)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

/// One entry of [`who`].
fn by(owner: &str, bits: &str, fused: bool) -> Vec<(String, String, bool)> {
    vec![(owner.to_owned(), bits.to_owned(), fused)]
}

fn count(ran: &Arc<AtomicU32>) -> u32 {
    ran.swap(0, Ordering::Relaxed)
}

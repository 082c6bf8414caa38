//! Fusions and order, thin: a decode step in fewer calls (0130), surplus rows that pick the experts of their last real row
//! (0280), experts by another load path (0580), all above a loop over experts (0006). On the exact-integer and the tiny model.

mod kernels;
mod order;
mod surplus;

use std::sync::{Arc, Mutex};

use plugfold_abi::boundary::Offer;
use plugfold_abi::points::{FieldsObject, WordsObject};
use plugfold_abi::{Bits, Call, Phase, ProviderObject};
use plugfold_engine::core::{Core, CoreOptions, SeqRows, Want};
use plugfold_engine::hooks::Hooks;
use plugfold_tests::goldens::tiny_dir;
use plugfold_tests::integer;
use plugfold_tests::model::{cores_on_ranks, ids, prefill};

use surplus::Surplus;

/// On which model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Model {
    /// Sums in any order have the same bits.
    Integer,
    /// Real roots, exponentials and divisions: a fusion has to keep each sum's order.
    Tiny,
}
use Model::{Integer, Tiny};

/// Models and ranks on which everything runs.
const EVERYWHERE: [(Model, usize); 4] = [(Integer, 1), (Integer, 2), (Tiny, 1), (Tiny, 2)];

impl Model {
    /// The promise of a fusion of these operations: the arithmetic of each.
    fn bits(self, ops: &[&str]) -> Bits {
        let name = |op: &&str| match (self, *op) {
            (Integer, "moe.pick" | "moe.act") => integer::OWNER,
            _ => "ref",
        };
        let mut names: Vec<&str> = ops.iter().map(name).collect();
        if names.iter().all(|n| *n == names[0]) {
            names.truncate(1);
        }
        Bits::of(&names.join("+"))
    }

    fn run<T: Send>(
        self,
        ranks: usize,
        add: impl Fn(usize, &mut Hooks) + Sync,
        run: impl Fn(&mut Core) -> T + Sync,
    ) -> Vec<T> {
        let load = |split: plugfold_engine::split::Split, comm| {
            let more = |hooks: &mut Hooks| add(split.rank, hooks);
            if self == Integer {
                return integer::core(2, split, comm, more);
            }
            let mut hooks = Hooks::default();
            more(&mut hooks);
            let hooks = Arc::new(hooks);
            let options = CoreOptions { slots: 2, context: Some(256), hooks, ..CoreOptions::default() };
            Core::load(&tiny_dir(), &options, split, comm).map_err(|e| e.to_string())
        };
        cores_on_ranks(ranks, load, run)
    }
}

/// Layer, operation, plugin.
type Ran = (u32, String, String);

/// Who ran what, in order.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Ran>>>);

impl Log {
    fn ran(&self, owner: &str, call: &Call<'_>) {
        self.0.lock().unwrap().push((call.layer, call.op.get_str().into(), owner.into()));
    }
    fn take(&self) -> Vec<Ran> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

/// What is wrong with a plugin, if anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Planted {
    /// The fused router leaves the last slice of its sums out.
    forgets_a_slice: bool,
    /// 0130 says that it is over 0280, and does not run it.
    swallows: bool,
    /// 0130 says that it is over 0580, whose bits its own kernels have: that is no fault.
    over_loads: bool,
}

/// Adds plugins in this order.
fn add(hooks: &mut Hooks, model: Model, list: &[&str], log: &Log, surplus: &Arc<Surplus>, planted: Planted) {
    for id in list {
        let mut over: Vec<String> = vec![integer::OWNER.into()];
        let mut providers = Vec::new();
        match *id {
            "0006" => providers.extend(kernels::experts("0006", model, log)),
            "0130" => {
                over.push("0006".into());
                over.extend(planted.swallows.then(|| "0280".into()));
                over.extend(planted.over_loads.then(|| "0580".into()));
                providers.extend(kernels::decode_step(model, log, planted.forgets_a_slice));
            }
            "0280" => {
                over.push("0130".into());
                hooks.add_object("0280", FieldsObject::new(surplus.clone())).unwrap();
                hooks.add_object("0280", WordsObject::new(surplus.clone())).unwrap();
                providers.push(ProviderObject::new(surplus::Tie::new(surplus.clone(), log.clone())));
            }
            "0580" => {
                over.push("0006".into());
                providers.extend(kernels::experts("0580", model, log));
            }
            other => panic!("no plugin {other}"),
        }
        for provider in providers {
            hooks.add(id, &over, Offer::of(provider)).unwrap();
        }
    }
}

/// Everything that a prompt, a cut window and a step give on one rank, as bits.
type Bitwise = (Vec<u32>, Vec<(String, Vec<u32>)>);

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|v| v.to_bits()).collect()
}

/// Runs it, and compares who ran each window with what the resolver prints for it.
fn run(core: &mut Core, log: &Log) -> Bitwise {
    let mut all = bits(&prefill(core, 0, &ids(1, 37, 480), 16));
    for (seed, keep) in [(2, 5), (3, 8)] {
        log.take();
        let tokens = ids(seed, 8, 480);
        let rows = [SeqRows { slot: 0, tokens: &tokens, want: Want::All, embeds: &[] }];
        let f = core.forward(Phase::Window, &rows, None, false).unwrap();
        assert_eq!(f.failure, None);
        all.extend(bits(core.output(&f, "logits").unwrap()));
        core.commit(&f, &[keep]).unwrap();
        assert_eq!(log.take(), in_force(core), "what runs is what the resolver prints");
    }
    (all, core.image(0))
}

/// Who runs a window of eight rows as the resolver prints it, without the arithmetic beneath all plugins.
fn in_force(core: &mut Core) -> Vec<Ran> {
    let steps = core.described(Phase::Window).unwrap().into_iter();
    let plugins = steps.filter(|s| s.owner != "ref" && s.owner != integer::OWNER);
    plugins.map(|s| (s.layer, s.op, s.owner)).collect()
}

/// The plugin that runs an operation in the first layer that has it.
fn who(core: &mut Core, op: &str) -> String {
    let all = core.described(Phase::Window).unwrap();
    all.into_iter().find(|s| s.op == op).map_or_else(String::new, |s| s.owner)
}

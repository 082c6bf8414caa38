//! The acceptance list of 0001: on the loaded model, through the gates, on several ranks, and what is refused.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::thread;

use half::bf16;
use plugfold::exact::{GATES, Setup, Verdict, run};
use plugfold_0001_exl3_nonexpert_q4::FORMAT;
use plugfold_0001_exl3_nonexpert_q4::builder::Builder;
use plugfold_0001_exl3_nonexpert_q4::classes::Table;
use plugfold_0001_exl3_nonexpert_q4::encode::Range;
use plugfold_0001_exl3_nonexpert_q4::provide::Product;
use plugfold_0001_exl3_nonexpert_q4_api::CLASSES;
use plugfold_abi::points::{Purpose, WeightBuilderObject};
use plugfold_abi::{ProviderObject, Weight, formats};
use plugfold_engine::config::ModelConfig;
use plugfold_engine::core::{Core, CoreOptions};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::ranks::World;
use plugfold_engine::service::{Request, Sampling, Service};
use plugfold_engine::split::Split;
use plugfold_engine::weights::{Kind, recipes};
use plugfold_kernels::cpu::groups::OPERATIONS;
use plugfold_kernels::cpu::math::grouped::{Codes, Grid, GroupedMatrix};
use plugfold_tests::drafting::Drafting;
use plugfold_tests::goldens::{fixtures, relative, tiny_dir};
use plugfold_tests::model::{engine, ids, on_ranks_with, options, prefill, reply};

/// Puts the plugin's hooks beside others.
fn beside(mut hooks: Hooks, mode: &str) -> Hooks {
    let table = Table::default();
    table.all(mode);
    for range in [Range::Whole, Range::Best] {
        hooks.add_object("0001", WeightBuilderObject::new(Builder { range, table: table.clone() })).unwrap();
    }
    for op in OPERATIONS {
        hooks.add_object("0001", ProviderObject::new(Product(op))).unwrap();
    }
    hooks
}

fn with(mode: &str) -> CoreOptions {
    CoreOptions { hooks: Arc::new(beside(Hooks::default(), mode)), ..CoreOptions::default() }
}

fn core(dir: &Path, mode: &str, split: Split) -> Core {
    Core::load(dir, &CoreOptions { context: Some(64), ..with(mode) }, split, None).unwrap()
}

/// Views of a loaded weight in this plugin's format.
struct Four<'w> {
    codes: &'w [u32],
    scales: &'w [bf16],
    offsets: &'w [bf16],
    header: &'w [u32],
    n: usize,
    k: usize,
}

fn plane<T>(weight: &Weight, i: usize) -> &[T] {
    let view = &weight.planes[i];
    assert_eq!(view.dtype.size(), size_of::<T>());
    // SAFETY: planes of loaded weights hold so many elements without gaps, and nobody writes them.
    unsafe { std::slice::from_raw_parts(view.ptr.cast(), view.rows as usize * view.cols as usize) }
}

fn four(weight: &Weight) -> Four<'_> {
    assert_eq!(weight.format.get_str(), FORMAT);
    Four {
        codes: plane(weight, 0),
        scales: plane(weight, 1),
        offsets: plane(weight, 2),
        header: plane(weight, 3),
        n: weight.n as usize,
        k: weight.k as usize,
    }
}

impl Four<'_> {
    fn matrix(&self) -> GroupedMatrix<'_> {
        let grid = Grid::read(self.n, self.k, self.header).unwrap();
        GroupedMatrix::new(grid, Codes::Nibbles(self.codes), self.scales, self.offsets).unwrap()
    }
}

#[test]
fn every_covered_matrix_is_in_4_bits_and_nothing_else_is() {
    let roles: BTreeSet<&str> = CLASSES.iter().map(|c| c.role).collect();
    let layers = ModelConfig::from_dir(&tiny_dir()).unwrap().layers.len() as u32;
    for mode in ["bf16", "q4", "q4mse"] {
        let core = core(&tiny_dir(), mode, Split::WHOLE);
        let mut seen = BTreeSet::new();
        let mut copies = Vec::new();
        for (layer, _, purpose, weight) in core.weights().all() {
            let (role, format) = (weight.role.get_str(), weight.format.get_str());
            match purpose {
                Purpose::Main if roles.contains(role) => {
                    let want = if mode == "bf16" { formats::PANEL16_BF16 } else { FORMAT };
                    assert_eq!(format, want, "{role} of layer {layer} in mode {mode}");
                    seen.insert((role.to_owned(), layer == layers));
                }
                Purpose::Main => assert_ne!(format, FORMAT, "{role} of layer {layer}"),
                _ => copies.push((purpose, role, format)),
            }
        }
        let copy = [(Purpose::Draft, "head", FORMAT)];
        assert_eq!(copies, if mode == "bf16" { &copy[..] } else { &[] }, "{mode}");
        for class in CLASSES {
            assert!(seen.contains(&(class.role.to_owned(), class.role == "mtp.eh")), "{}", class.name);
            let in_mtp = class.mtp && seen.contains(&(class.role.to_owned(), true));
            assert_eq!(in_mtp, class.mtp, "{} in the multi-token-prediction layer", class.name);
        }
    }
}

/// Every number of every rank's share is that of the whole, and two loads give the same bytes.
#[test]
fn shares_are_slices_of_the_whole_and_loads_are_alike() {
    for dir in [tiny_dir(), fixtures().join("odd")] {
        let config = ModelConfig::from_dir(&dir).unwrap();
        for mode in ["q4", "q4mse"] {
            let whole = core(&dir, mode, Split::WHOLE);
            let again = core(&dir, mode, Split::WHOLE);
            // Where a row of a tensor lies in the whole matrix.
            let list = recipes(&config, Split::WHOLE, whole.has_mtp());
            let find = |core: &Core, layer, site, role: &str| {
                let found = core.weights().all().find(|(l, s, p, w)| {
                    (*l, *s, *p) == (layer, site, Purpose::Main) && w.role.get_str() == role
                });
                found.map(|(.., w)| *w).unwrap()
            };
            let covered = |r: &&plugfold_engine::weights::Recipe| {
                r.kind == Kind::Dense && CLASSES.iter().any(|c| c.role == r.role)
            };
            for r in list.iter().filter(covered) {
                let (a, b) = (find(&whole, r.layer, r.site, r.role), find(&again, r.layer, r.site, r.role));
                assert_eq!(plane::<u32>(&a, 0), plane::<u32>(&b, 0), "{} of layer {}", r.role, r.layer);
                assert_eq!(plane::<bf16>(&a, 1), plane::<bf16>(&b, 1));
                assert_eq!(plane::<bf16>(&a, 2), plane::<bf16>(&b, 2));
            }
            for (rank, ranks) in [(0, 2), (1, 2), (0, 3), (1, 3), (2, 3)] {
                let split = Split::new(rank, ranks, &config).unwrap();
                let share = core(&dir, mode, split);
                let shares = recipes(&config, split, share.has_mtp());
                for (r, w) in shares.iter().zip(&list).filter(|(r, _)| covered(r)) {
                    let (mine, all) =
                        (find(&share, r.layer, r.site, r.role), find(&whole, r.layer, r.site, r.role));
                    let (mine, all) = (four(&mine), four(&all));
                    let (mine, all) = (mine.matrix(), all.matrix());
                    let (mut output, mut base) = (0, 0);
                    for (part, whole) in r.parts.iter().zip(&w.parts) {
                        assert_eq!(part.tensor, whole.tensor);
                        for row in part.rows.clone() {
                            let there = base + row - whole.rows.start;
                            for col in part.cols.clone() {
                                let (got, want) = (mine.value(output, col - r.first), all.value(there, col));
                                assert_eq!(
                                    got, want,
                                    "{}[{row}, {col}], rank {rank} of {ranks}",
                                    part.tensor
                                );
                            }
                            output += 1;
                        }
                        base += whole.rows.len();
                    }
                }
            }
        }
    }
}

fn logits(dir: &Path, ranks: usize, mode: &'static str, chunk: usize) -> Vec<f32> {
    let lead = |rank: &mut Rank| rank.trace(&ids(6, 65, 480), false).unwrap().logits;
    on_ranks_with(&options(dir, 1, chunk), ranks, |_| with(mode), lead)
}

/// The weights are the same on any number of ranks, so logits differ by the order of sums only.
#[test]
fn logits_are_the_same_at_every_split() {
    let plain = logits(&tiny_dir(), 1, "bf16", 64);
    for mode in ["q4", "q4mse"] {
        let one = logits(&tiny_dir(), 1, mode, 64);
        for ranks in [2, 3] {
            let r = relative(&logits(&tiny_dir(), ranks, mode, 64), &one);
            assert!(r < 1e-4, "{mode} on {ranks} ranks: {r}");
        }
        assert!(one != plain, "{mode} is in force");
    }
}

/// Drafted == serial, batched == alone, resumed == fresh, chunks, kept parts of windows, rows: in each mode, with the
/// layer that drafts, on one rank and on two.
#[test]
fn every_gate_holds_in_each_mode() {
    for (mode, ranks) in [("bf16", 1), ("q4", 1), ("q4", 2), ("q4mse", 2)] {
        let options = Options { context: Some(128), ..Options::new(tiny_dir()) };
        let hooks = move |_| Ok(beside(Drafting::default().hooks().map_err(|e| e.to_string())?, mode));
        let setup = Setup::with_hooks(options, ranks, hooks);
        for gate in GATES {
            let verdict = run(gate, &setup);
            let fine = match &verdict {
                Verdict::Holds(count) => *count > 0,
                // Its arithmetic is its own: it promises no equal bits.
                Verdict::Nothing(_) => gate.name == "same-bits" || (gate.name == "ranks" && ranks == 1),
                Verdict::Broken(_) => false,
            };
            assert!(fine, "{} in mode {mode} on {ranks} ranks: {verdict}", gate.name);
        }
    }
}

#[test]
fn every_policy_gives_the_serial_reply_in_each_mode() {
    let sampled = Sampling { temperature: 0.7, top_k: 20, seed: Some(11), ..Sampling::GREEDY };
    for mode in ["bf16", "q4", "q4mse"] {
        let options = options(&tiny_dir(), 4, 64);
        let engine = engine(&options, 1, |_| {
            let hooks = beside(Drafting::default().hooks().unwrap(), mode);
            CoreOptions { hooks: Arc::new(hooks), ..CoreOptions::default() }
        });
        for sampling in [Sampling::GREEDY, sampled] {
            let ask = |draft, policy: &str| Request {
                ids: ids(8, 24, 480),
                sampling,
                max_tokens: 20,
                draft,
                policy: policy.into(),
                ..Request::default()
            };
            let serial = reply(&engine.submit(ask(false, "")).unwrap()).unwrap();
            for policy in ["auto", "2", "c3:0.35", "a"] {
                let drafted = reply(&engine.submit(ask(true, policy)).unwrap()).unwrap();
                assert_eq!(drafted, serial, "{policy} in mode {mode}");
            }
        }
    }
}

#[test]
fn prompts_in_chunks_of_64_and_512_rows_give_the_same_reply() {
    let options = CoreOptions { context: Some(1400), ..with("q4mse") };
    let mut core = Core::load(&tiny_dir(), &options, Split::WHOLE, None).unwrap();
    for n in [45, 1300] {
        let prompt = ids(4, n, 480);
        let want = prefill(&mut core, 0, &prompt, 64);
        let state = core.image(0);
        assert_eq!(prefill(&mut core, 0, &prompt, 512), want, "{n} tokens");
        assert!(core.image(0) == state, "{n} tokens: another state");
    }
}

#[test]
fn ranks_with_different_modes_do_not_start() {
    let options = options(&tiny_dir(), 1, 64);
    let mut worlds = World::local(2).unwrap();
    let (other, theirs) = (worlds.remove(1), options.clone());
    let follower = thread::spawn(move || Rank::load(&theirs, with("q4"), other).err());
    let lead = Rank::load(&options, with("q4mse"), worlds.remove(0)).err().unwrap().to_string();
    let follower = follower.join().unwrap().unwrap().to_string();
    for told in [lead, follower] {
        assert!(told.contains("weights as plugins change them"), "{told}");
    }
}

#[test]
fn states_of_one_mode_are_no_states_of_another() {
    let tags: BTreeSet<u64> =
        ["bf16", "q4", "q4mse"].map(|mode| core(&tiny_dir(), mode, Split::WHOLE).tag(&[]).unwrap().id).into();
    assert_eq!(tags.len(), 3);
}

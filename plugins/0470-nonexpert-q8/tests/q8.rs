//! The acceptance list of 0470: the stored bits, the precision map on loaded models, the gates, what is refused.
#![allow(clippy::unwrap_used)] // helpers of tests panic for them

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use half::bf16;
use plugfold::exact::{GATES, Setup, Verdict, run};
use plugfold_0001_exl3_nonexpert_q4::builder::Builder as Four;
use plugfold_0001_exl3_nonexpert_q4::classes::Table as Classes;
use plugfold_0001_exl3_nonexpert_q4::encode::Range;
use plugfold_0001_exl3_nonexpert_q4::provide::Product as FourProduct;
use plugfold_0001_exl3_nonexpert_q4_api::{WeightClasses as _, class_of};
use plugfold_0470_nonexpert_q8::builder::Builder;
use plugfold_0470_nonexpert_q8::map;
use plugfold_0470_nonexpert_q8::provide::Product;
use plugfold_abi::boundary::Offer;
use plugfold_abi::points::{Purpose, WeightBuilderObject};
use plugfold_abi::{Phase, ProviderObject, Text, formats};
use plugfold_engine::checkpoint::Checkpoint;
use plugfold_engine::core::{Core, CoreOptions};
use plugfold_engine::hooks::Hooks;
use plugfold_engine::rank::{Options, Rank};
use plugfold_engine::split::Split;
use plugfold_kernels::cpu::groups::OPERATIONS;
use plugfold_kernels::cpu::math::grouped::{Codes, Grid, GroupedMatrix};
use plugfold_tests::goldens::{relative, tiny_dir};
use plugfold_tests::model::{ids, on_ranks_with, options};

/// Classes of the tiny model whose inputs are no multiple of 64 stay in bf16.
const TINY: &str = "default=q8,kda_fb=bf16,kda_gb=bf16,dsa_qb=bf16,idx_qb=bf16";

fn demo_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../host/assets/demo-model")
}

/// Hooks of 0001 and 0470 as their settings put them together; and the precision key.
fn hooks(mode: &str, text: &str) -> (Hooks, String) {
    let table = map::table(&map::read(text).unwrap(), mode).unwrap();
    let classes = Classes::default();
    classes.assign(Text::from("0470"), table.clone().into()).unwrap();
    let mut hooks = Hooks::default();
    for range in [Range::Whole, Range::Best] {
        hooks.add_object("0001", WeightBuilderObject::new(Four { range, table: classes.clone() })).unwrap();
    }
    for op in OPERATIONS {
        hooks.add_object("0001", ProviderObject::new(FourProduct(op))).unwrap();
    }
    let over = ["0001".to_owned()];
    let builder = Builder { table: Arc::new(OnceLock::from(table)) };
    hooks.add("0470", &over, Offer::of(WeightBuilderObject::new(builder))).unwrap();
    for op in OPERATIONS {
        hooks.add("0470", &over, Offer::of(ProviderObject::new(Product(op)))).unwrap();
    }
    (hooks, classes.name())
}

fn with(mode: &str, map: &str) -> CoreOptions {
    CoreOptions { hooks: Arc::new(hooks(mode, map).0), ..CoreOptions::default() }
}

fn core(dir: &Path, mode: &str, map: &str) -> Result<Core, String> {
    let options = CoreOptions { context: Some(64), ..with(mode, map) };
    Core::load(dir, &options, Split::WHOLE, None).map_err(|e| e.to_string())
}

/// Formats of every role of a class outside and inside of the layer that drafts.
fn format_of(core: &Core, role: &str, mtp: bool) -> BTreeSet<String> {
    let layers = core.config().layers.len() as u32;
    let all = core.weights().all().filter(|(layer, _, purpose, w)| {
        *purpose == Purpose::Main && w.role.get_str() == role && (*layer == layers) == mtp
    });
    all.map(|(.., w)| w.format.to_string()).collect()
}

fn one(format: &str) -> BTreeSet<String> {
    [format.to_owned()].into()
}

#[test]
fn a_whole_model_in_8_bits() {
    let core = core(&demo_dir(), "q8", "").unwrap();
    for (role, format) in [
        ("kda.in", "q8.g128"),
        ("kda.f_b", "q8.g64"),
        ("kda.o", "q8.g128"),
        ("mla.in", "q8.g128"),
        ("mla.kv_b", "q8.g128"),
        ("head", "q8.g128"),
        ("shared.down", "q8.g128"),
    ] {
        assert_eq!(format_of(&core, role, false), one(format), "{role}");
    }
    assert_eq!(format_of(&core, "mtp.eh", true), one("q8.g128"));
    for role in ["experts.gate_up", "moe.router", "hc.fn"] {
        assert_eq!(format_of(&core, role, false), one(formats::PANEL16_BF16), "{role}");
    }
    let copies: Vec<(Purpose, String)> = core
        .weights()
        .all()
        .filter(|(.., purpose, _)| *purpose != Purpose::Main)
        .map(|(_, _, purpose, w)| (purpose, format!("{} {}", w.role, w.format)))
        .collect();
    assert_eq!(
        copies,
        [(Purpose::Draft, "head q4.g64".to_owned())],
        "a head of 8 bits is copied for drafting"
    );
}

#[test]
fn a_map_stores_each_class_as_it_says() {
    let map = format!("{TINY},kda_out=q4,shared=q4mse,lm_head=bf16,mtp.dsa_out=q4,mtp.mtp_eh=bf16");
    let core = core(&tiny_dir(), "bf16", &map).unwrap();
    for (role, mtp, format) in [
        ("kda.in", false, "q8.g128"),
        ("kda.f_b", false, formats::PANEL16_BF16),
        ("kda.o", false, "q4.g64"),
        ("mla.o", false, "q8.g128"),
        ("mla.o", true, "q4.g64"),
        ("mla.kv_b", true, "q8.g64"),
        ("shared.down", false, "q4.g64"),
        ("shared.down", true, "q4.g64"),
        ("head", false, formats::PANEL16_BF16),
        ("mtp.eh", true, formats::PANEL16_BF16),
    ] {
        assert_eq!(format_of(&core, role, mtp), one(format), "{role}, MTP layer: {mtp}");
    }
    assert!(class_of("mla.kv_b").is_some());
}

#[test]
fn inputs_that_groups_do_not_divide_are_refused_with_the_mend() {
    let told = core(&tiny_dir(), "q8", "").err().unwrap();
    assert!(
        told.contains("0470") && told.contains("kda.f_b") && told.contains("no multiple of 64"),
        "{told}"
    );
    assert!(told.contains("bf16 or q4"), "{told}");
}

fn logits(ranks: usize, map: &'static str, chunk: usize) -> Vec<f32> {
    let lead = |rank: &mut Rank| rank.trace(&ids(6, 65, 480), false).unwrap().logits;
    on_ranks_with(&options(&tiny_dir(), 1, chunk), ranks, |_| with("bf16", map), lead)
}

/// The weights are the same on any number of ranks; prefill in any chunks has the bits of single rows, which are those of
/// decode.
#[test]
fn logits_are_the_same_at_every_split_and_bit_for_bit_in_any_chunks() {
    let plain = logits(1, "", 64);
    let eight = logits(1, TINY, 64);
    assert!(eight != plain);
    for ranks in [2, 3] {
        let r = relative(&logits(ranks, TINY, 64), &eight);
        assert!(r < 1e-4, "{ranks} ranks: {r}");
    }
    for chunk in [1, 7] {
        assert!(logits(1, TINY, chunk) == eight, "chunks of {chunk}");
    }
}

/// Every number of the head is the nearest that its scale has to the checkpoint's.
#[test]
fn a_loaded_matrix_holds_the_numbers_of_the_checkpoint() {
    let core = core(&tiny_dir(), "bf16", TINY).unwrap();
    let all = core.weights().all();
    let weight =
        all.map(|(.., w)| w).find(|w| w.format.get_str() == "q8.g128" && w.role.get_str() == "head").unwrap();
    let (n, k) = (weight.n as usize, weight.k as usize);
    let plane = |i: usize| {
        let len = weight.planes[i].span_bytes();
        // SAFETY: planes of loaded weights hold so many bytes without gaps, and nobody writes them.
        unsafe { std::slice::from_raw_parts(weight.planes[i].ptr.cast_const(), len) }
    };
    let header: Vec<u32> = plane(3).as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let scales: Vec<bf16> = plane(1).as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
    let codes: Vec<i8> = plane(0).iter().map(|b| b.cast_signed()).collect();
    let grid = Grid::read(n, k, &header).unwrap();
    let matrix = GroupedMatrix::new(grid, Codes::Bytes(&codes), &scales, &[]).unwrap();
    let source = Checkpoint::open(&tiny_dir()).unwrap();
    let stored = source.tensor("lm_head.weight").unwrap().bytes;
    for (i, bytes) in stored.as_chunks::<2>().0.iter().enumerate() {
        let (output, input) = (i / k, i % k);
        let scale = scales[(output / 16 * grid.groups() + input / grid.group) * 16 + output % 16].to_f32();
        let error = (bf16::from_le_bytes(*bytes).to_f32() - matrix.value(output, input)).abs();
        assert!(error <= scale * 0.501, "[{output}, {input}] is off by {error}, its scale is {scale}");
    }
}

#[test]
fn prefill_decode_and_drafts_have_one_arithmetic() {
    let mut core = core(&tiny_dir(), "bf16", TINY).unwrap();
    for phase in [Phase::Window, Phase::Prefill] {
        let (bits, _) = core.bits(phase, 1, &[]).unwrap();
        assert!(
            bits.contains(&"dense=dense-q8".to_owned()) && bits.contains(&"head=dense-q8".to_owned()),
            "{bits:?}"
        );
        assert!(bits.contains(&"mla.write=dense-q8".to_owned()), "{bits:?}");
    }
}

#[test]
fn every_gate_holds() {
    for (map, ranks) in [(TINY, 1), (TINY, 2), ("kda_proj=q8,mtp.default=q4,head=q8,kv_b=q4mse", 2)] {
        let options = Options { context: Some(128), ..Options::new(tiny_dir()) };
        let setup = Setup::with_hooks(options, ranks, move |_| Ok(hooks("bf16", map).0));
        for gate in GATES {
            let verdict = run(gate, &setup);
            let fine = match &verdict {
                Verdict::Holds(count) => *count > 0,
                // Its arithmetic is its own: it promises no equal bits.
                Verdict::Nothing(_) => gate.name == "same-bits" || (gate.name == "ranks" && ranks == 1),
                Verdict::Broken(_) => false,
            };
            assert!(fine, "{} with {map} on {ranks} ranks: {verdict}", gate.name);
        }
    }
}

#[test]
fn a_precision_has_one_key_however_it_is_written() {
    let key = |mode, map| hooks(mode, map).1;
    assert_eq!(key("q8", ""), "q8");
    assert_eq!(key("bf16", "default=q8"), "q8");
    assert_eq!(key("q4", "kda=q8,dsa=q8,indexer=q8,mlp=q8,head=q8,mtp_eh=q8"), "q8");
    assert!(key("q8", "kda_out=q4").starts_with("map:"));
    assert_eq!(key("q8", "kda_out=q4"), key("q4", "default=q8,kda_out=q4"));
    assert_ne!(key("q8", "kda_out=q4"), key("q8", "kda_out=q4mse"));
}

/// The number that goes into tags, prepared folders and digests.
#[test]
fn weights_of_one_precision_are_no_weights_of_another() {
    let identity = |mode, map: &str| core(&demo_dir(), mode, map).unwrap().changed_weights().to_owned();
    let all = identity("q8", "");
    assert_eq!(identity("bf16", "default=q8"), all);
    assert_ne!(identity("q8", "kda_out=q4"), all);
    assert_ne!(identity("q4", ""), all);
    let tag = |map: &str| core(&tiny_dir(), "bf16", map).unwrap().tag(&[]).unwrap().id;
    assert_ne!(tag(TINY), tag("lm_head=q8"));
}

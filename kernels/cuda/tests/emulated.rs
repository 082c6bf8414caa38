//! Every kernel, run on the CPU, against the CPU's reference: every bit is equal.

mod cases;

use std::sync::Arc;

use cases::Kernels;
use plugfold_emulated::HostMachine;

fn check(names: &[&str]) {
    let kernels = Kernels::new(Arc::new(HostMachine::default()));
    for case in cases::all().into_iter().filter(|c| names.contains(&c.name)) {
        for (i, setup) in (case.setups)().iter().enumerate() {
            if let Err(text) = kernels.compare(setup).and_then(|_| kernels.compare_alone(setup)) {
                panic!("{}, call {i} ({} {:?}): {text}", case.name, setup.op, setup.dims);
            }
        }
    }
}

/// A test for each set of cases.
macro_rules! equal {
    ($($test:ident: $($case:literal),+;)+) => {
        $(
            #[test]
            fn $test() {
                check(&[$($case),+]);
            }
        )+

        #[test]
        fn every_case_is_tested() {
            let tested = [$($($case),+),+];
            assert!(cases::all().iter().all(|c| tested.contains(&c.name)));
        }
    };
}

equal! {
    norms_equal_the_reference: "norm", "final and tap";
    activations_and_moves_equal_the_reference: "activations", "residual, rows.pick, comm.sum";
    embeddings_equal_the_reference: "embed", "mtp.in";
    hyper_connections_equal_the_reference: "hc.finish", "hc.post", "hc.dots";
    routing_equals_the_reference: "moe.pick", "moe.group", "moe.combine";
    candidates_equal_the_reference: "sample.candidates";
    products_of_few_rows_equal_the_reference: "dense, few rows", "head and moe.logits";
    products_of_many_rows_equal_the_reference: "dense, many rows", "dense, long k and few outputs";
    experts_equal_the_reference: "experts";
    every_rate_and_codebook_equals_the_reference: "dense in exl3, every rate and codebook";
    wide_and_long_trellises_equal_the_reference: "dense in exl3, wide and long";
    trellises_and_many_rows_equal_the_reference: "dense in exl3, many rows";
    segments_equal_the_reference: "dense in segments", "experts in exl3";
    linear_attention_equals_the_reference: "kda.mix", "kda.commit";
    attention_equals_the_reference: "mla.write", "mla.dense", "mla.sparse";
    the_indexer_equals_the_reference: "idx.write", "idx.select";
    the_vision_tower_equals_the_reference: "vision.rotate", "vision.attend", "vision.gather, vision.gelu";
}

/// What the comparison says of a case whose kernels have a fault.
fn with_fault(source: &'static str, right: &'static str, wrong: &'static str, case: &str) -> Vec<String> {
    let kernels = Kernels::new(Arc::new(HostMachine::with_fault(source, right, wrong)));
    let case = cases::all().into_iter().find(|c| c.name == case).expect("a case");
    (case.setups)().iter().filter_map(|s| kernels.compare(s).err()).collect()
}

#[test]
fn a_product_in_another_order_is_found() {
    let found = with_fault("norm", "x[i] * r * weight[i]", "x[i] * (r * weight[i])", "norm");
    assert!(found.iter().any(|f| f.contains("differ, first row")), "{found:?}");
}

#[test]
fn a_missing_barrier_is_found() {
    let barrier = "    __syncthreads();\n    if (warp() == 0) {\n#pragma unroll 16";
    let found = with_fault("norm", barrier, "    if (warp() == 0) {\n#pragma unroll 16", "norm");
    assert!(!found.is_empty());
}

#[test]
fn chains_that_are_multiplied_before_they_are_there_are_found() {
    let wait = "  copy_wait<0>();\n  __syncthreads();\n  float* partial";
    let found =
        with_fault("panels", wait, "  copy_wait<0>();\n  float* partial", "dense, long k and few outputs");
    assert!(!found.is_empty());
}

#[test]
fn pools_that_are_multiplied_before_they_are_there_are_found() {
    let wait = "      copy_wait<0>();\n      __syncthreads();\n      if (base == 0";
    let found = with_fault("idx", wait, "      copy_wait<0>();\n      if (base == 0", "idx.select");
    assert!(found.iter().any(|f| f.contains("differ, first row")), "{found:?}");
}

#[test]
fn groups_that_are_not_listed_are_found() {
    let found =
        with_fault("idx", "held[j] >= bottom && place", "held[j] > bottom + 4096 && place", "idx.select");
    assert!(found.iter().any(|f| f.contains("differ, first row")), "{found:?}");
}

#[test]
fn picks_that_are_not_taken_out_are_found() {
    let found = with_fault("moe", "held[j] = j == at ? 0 : held[j];", "held[j] = held[j];", "moe.pick");
    assert!(found.iter().any(|f| f.contains("differ, first row")), "{found:?}");
}

#[test]
fn some_of_the_best_that_are_left_out_are_found() {
    // Those that equal the bound.
    let found = with_fault("sample", "found < c && first < n", "found < c && first < 0", "sample.candidates");
    assert!(found.iter().any(|f| f.contains("differ, first row")), "{found:?}");
    // Pools that equal the threshold.
    let found = with_fault("idx", "same != 0 && equal < t.ties", "same != 0 && equal > t.ties", "idx.select");
    assert!(found.iter().any(|f| f.contains("differ, first row")), "{found:?}");
}

#[test]
fn a_row_whose_length_is_taken_before_it_is_there_is_found() {
    let found = with_fault(
        "kda",
        "batch.k[1][c] = v[1][0];\n        ready();",
        "batch.k[1][c] = v[1][0];",
        "kda.mix",
    );
    assert!(!found.is_empty());
}

#[test]
fn sums_that_are_not_handed_over_or_stay_behind_are_found() {
    let faults = [
        (
            "  if (!last) {\n    hand_over(handed + index * next, sum);\n    return;",
            "  if (!last) {\n    return;",
        ),
        ("    if (j < count) put_word(from + j * stride, 0);\n", ""),
    ];
    for (right, wrong) in faults {
        let found = with_fault("panels", right, wrong, "dense, long k and few outputs");
        assert!(found.iter().any(|f| f.contains("differ, first row")), "{right}: {found:?}");
    }
}

#[test]
fn chains_that_are_added_in_another_order_are_found() {
    let found = with_fault(
        "exl3",
        "s_chains[i][warp()]",
        "s_chains[chains - 1 - i][warp()]",
        "dense in exl3, wide and long",
    );
    assert!(found.iter().any(|f| f.contains("differ, first row")), "{found:?}");
}

#[test]
fn quarters_that_are_added_in_another_order_or_read_too_early_are_found() {
    let faults = [
        ("exl3", "(part[0].v[j] + part[1].v[j])", "(part[1].v[j] + part[2].v[j])"),
        ("exl3_tile", "store(1 - stage);\n    __syncthreads();", "store(1 - stage);"),
    ];
    for (source, right, wrong) in faults {
        let found = with_fault(source, right, wrong, "dense in exl3, many rows");
        assert!(found.iter().any(|f| f.contains("differ, first row")), "{right}: {found:?}");
    }
}

#[test]
fn keys_that_a_row_must_not_see_are_found() {
    let found = with_fault("attend", "if (from + TILE <= seen) {", "if (from < longest) {", "mla.dense");
    assert!(found.iter().any(|f| f.contains("differ, first row")), "{found:?}");
}

#[test]
fn scores_that_are_added_in_another_order_are_found() {
    let found = with_fault("attend", "turn % 2 * 2 + turn / 2", "turn", "mla.dense");
    assert!(found.iter().any(|f| f.contains("differ, first row")), "{found:?}");
}

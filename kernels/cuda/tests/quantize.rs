//! The encoder of EXL3, run on the CPU, against the CPU's own: every state is the same.

use std::sync::Arc;

use plugfold_cuda::TileQuantizer;
use plugfold_emulated::HostMachine;
use plugfold_kernels::cpu::exl3::quantize::{TileEncoder, Tiles, default_rms};
use plugfold_kernels::cpu::exl3::{Codebook, POSITIONS, Rate};

/// Numbers that are close to Gaussian, of the size that suits the codebook.
fn targets(seed: u64, tiles: usize, rms: f32) -> Vec<[f32; POSITIONS]> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    let mut gauss = || (0..12).map(|_| uniform()).sum::<f32>() * rms;
    (0..tiles).map(|_| std::array::from_fn(|_| gauss())).collect()
}

fn found(machine: HostMachine, codebook: Codebook, bits: f32, targets: &[[f32; POSITIONS]]) -> bool {
    let rate = Rate::from_bits(bits).expect("a rate");
    let want = TileEncoder::new(codebook, rate).expect("an encoder").encode(targets);
    // Fewer blocks than tiles: each takes several.
    let device = TileQuantizer::new(Arc::new(machine), codebook, rate, 2).expect("an encoder");
    assert_eq!(device.kind(), (codebook, rate));
    device.encode(targets).expect("states") == want
}

fn check(codebook: Codebook, bits: f32) {
    let rate = Rate::from_bits(bits).expect("a rate");
    let targets = targets(bits.to_bits().into(), 3, default_rms(codebook, rate));
    assert!(found(HostMachine::default(), codebook, bits, &targets), "{} {bits}", codebook.name());
}

macro_rules! rates {
    ($($test:ident: $codebook:ident, $bits:literal;)*) => {
        $(#[test] fn $test() { check(Codebook::$codebook, $bits); })*
    };
}

rates! {
    at_1_bit: Mcg, 1.0;
    at_1_bit_and_a_half: Mul1, 1.5;
    at_2_bits: ThreeInst, 2.0;
    at_2_bits_and_a_half: Mul1, 2.5;
    at_3_bits: Mul1, 3.0;
    at_3_bits_and_a_half: Mul1, 3.5;
    at_4_bits: Mcg, 4.0;
    at_4_bits_of_the_other_codebook: Mul1, 4.0;
    at_5_bits: ThreeInst, 5.0;
    at_6_bits: Mcg, 6.0;
    at_7_bits: Mul1, 7.0;
    at_8_bits: ThreeInst, 8.0;
}

/// Targets that many states fit alike, and targets that none fits.
fn edges() -> Vec<[f32; POSITIONS]> {
    let alternating = std::array::from_fn(|i| if i % 2 == 0 { 3.0 } else { -3.0 });
    vec![[0.0; POSITIONS], alternating, [1e30; POSITIONS], [-1e4; POSITIONS]]
}

#[test]
fn ties_and_extremes_go_the_same_way() {
    for bits in [4.0, 6.0] {
        assert!(found(HostMachine::default(), Codebook::Mul1, bits, &edges()), "{bits} bits");
    }
}

#[test]
fn another_choice_among_equals_and_a_missing_barrier_are_found() {
    let ties = &edges()[..1];
    let last = HostMachine::with_fault("quantize", "(c == cost && i < index)", "(c == cost && i > index)");
    assert!(!found(last, Codebook::Mul1, 4.0, ties));
    let barrier = "    __syncthreads();\n    turn = 1 - turn;";
    let unmet = HostMachine::with_fault("quantize", barrier, "    turn = 1 - turn;");
    assert!(!found(unmet, Codebook::Mul1, 4.0, &targets(7, 1, 0.92)));
}

#[test]
fn half_bits_without_their_codebook_are_refused() {
    let rate = Rate::from_bits(2.5).expect("a rate");
    let refused = TileQuantizer::new(Arc::new(HostMachine::default()), Codebook::Mcg, rate, 1).err();
    assert!(refused.is_some_and(|e| e.to_string().contains("with mul1 only")));
}

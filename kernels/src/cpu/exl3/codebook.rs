//! The three codebooks: what number a 16-bit state stands for.

use std::sync::OnceLock;

use half::f16;

use super::lanes::Lanes;

/// Multiplier of the `mcg` codebook, and the value of its marker tensor.
pub const MCG_MULTIPLIER: u32 = 0xCBAC_1FED;
/// Multiplier of the `mul1` codebook, and the value of its marker tensor.
pub const MUL1_MULTIPLIER: u32 = 0x83DC_D12D;

/// The hash that turns a state into a code value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codebook {
    /// The codebook of files without a marker tensor.
    ThreeInst,
    /// A multiplicative congruential generator; marker tensor `mcg`.
    Mcg,
    /// The sum of the bytes of one product; marker tensor `mul1`. The only one with half-bit rates.
    Mul1,
}

impl Codebook {
    /// All codebooks.
    pub const ALL: [Self; 3] = [Self::ThreeInst, Self::Mcg, Self::Mul1];

    /// The name used in `quantization_config.json`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::ThreeInst => "3inst",
            Self::Mcg => "mcg",
            Self::Mul1 => "mul1",
        }
    }

    /// The codebook of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|c| c.name() == name)
    }

    /// Name and value of the scalar tensor that marks a layer as using this codebook, if there is one.
    pub const fn marker(self) -> Option<(&'static str, u32)> {
        match self {
            Self::ThreeInst => None,
            Self::Mcg => Some(("mcg", MCG_MULTIPLIER)),
            Self::Mul1 => Some(("mul1", MUL1_MULTIPLIER)),
        }
    }

    /// The code value of a state. Exact: it is a binary16 number.
    pub fn value(self, state: u16) -> f32 {
        let s = u32::from(state);
        let (multiplier, increment) = match self {
            Self::ThreeInst => (89_226_354, 64_248_484),
            Self::Mcg => (MCG_MULTIPLIER, 0),
            Self::Mul1 => {
                let sum: u32 = s.wrapping_mul(MUL1_MULTIPLIER).to_le_bytes().into_iter().map(u32::from).sum();
                // Product and sum are exact in f32, so this is the format's fused multiply-add of halves.
                return f16::from_f32((1024.0 + sum as f32) * MUL1_GAIN + MUL1_OFFSET).to_f32();
            }
        };
        let x = s.wrapping_mul(multiplier).wrapping_add(increment);
        let x = (x & 0x8FFF_8FFF) ^ 0x3B60_3B60;
        let (low, high) = (f16::from_bits(x as u16), f16::from_bits((x >> 16) as u16));
        f16::from_f32(low.to_f32() + high.to_f32()).to_f32()
    }

    /// The code values of all 65,536 states, computed once.
    pub fn table(self) -> &'static [f32] {
        static TABLES: [OnceLock<Vec<f32>>; 3] = [const { OnceLock::new() }; 3];
        TABLES[self as usize].get_or_init(|| (0..=u16::MAX).map(|s| self.value(s)).collect())
    }
}

/// The half 0x1EEE.
const MUL1_GAIN: f32 = f32::from_bits(0x3BDD_C000);
/// The half 0xC931.
const MUL1_OFFSET: f32 = -10.382_812_5;

/// A codebook chosen at compile time, for the vector kernels.
pub(super) trait Code: Copy + Send + Sync + 'static {
    /// Code values of eight states, each below 65,536.
    fn values(states: Lanes<u32>) -> Lanes<f32>;
}

#[derive(Clone, Copy)]
pub(super) struct ThreeInst;
#[derive(Clone, Copy)]
pub(super) struct Mcg;
#[derive(Clone, Copy)]
pub(super) struct Mul1;

impl Code for ThreeInst {
    #[inline(always)]
    fn values(states: Lanes<u32>) -> Lanes<f32> {
        pair_sum(states.map(|s| s.wrapping_mul(89_226_354).wrapping_add(64_248_484)))
    }
}

impl Code for Mcg {
    #[inline(always)]
    fn values(states: Lanes<u32>) -> Lanes<f32> {
        pair_sum(states.map(|s| s.wrapping_mul(MCG_MULTIPLIER)))
    }
}

impl Code for Mul1 {
    #[inline(always)]
    fn values(states: Lanes<u32>) -> Lanes<f32> {
        let x = states.map(|s| s.wrapping_mul(MUL1_MULTIPLIER));
        let pairs = x.map(|x| (x & 0x00FF_00FF) + ((x >> 8) & 0x00FF_00FF));
        // The upper half of (low + high) · 2^16 + low is the sum: no mask needed.
        let sums = pairs.map(|p| p.wrapping_add(p << 16) >> 16);
        let exact = sums.map(|t| (t as i32 as f32) * MUL1_GAIN + (1024.0 * MUL1_GAIN + MUL1_OFFSET));
        round_to_half(exact)
    }
}

/// The sum of the two halves that a hashed word holds, rounded to half.
///
/// A half with exponent field 12 to 15 becomes a float by moving its sign to bit 31, its exponent and mantissa
/// to bits 13 and up, and adding 112 to the exponent. An arithmetic shift by 3 does the moving, and the
/// format's own mask and exclusive-or, moved likewise, do the rest.
#[inline(always)]
fn pair_sum(x: Lanes<u32>) -> Lanes<f32> {
    const MASK: u32 = 0x81FF_E000;
    const FLIP: u32 = 0x3F6C_0000;
    let low = x.map(|x| f32::from_bits(((((x << 16) as i32) >> 3) as u32 & MASK) ^ FLIP));
    let high = x.map(|x| f32::from_bits((((x as i32) >> 3) as u32 & MASK) ^ FLIP));
    round_to_half(low.zip(high, |a, b| a + b))
}

/// Rounds to 11 significant bits, ties to even.
///
/// `v · 8193 = v · 8192 + v` keeps 24 bits, of which the upper 13 places are taken by `v · 8192`: what remains
/// of `v` after the rounding has 11 bits. Correct for all code values (a test goes through all states): none
/// needs a subnormal half, and none has bits so low that `v · 8192` would be rounded itself.
#[inline(always)]
fn round_to_half(v: Lanes<f32>) -> Lanes<f32> {
    v.map(|v| v.mul_add(-8192.0, v * 8193.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector_bits<C: Code>() -> Vec<u32> {
        (0..8192)
            .flat_map(|block| C::values(Lanes(core::array::from_fn(|i| 8 * block + i as u32))).0)
            .map(f32::to_bits)
            .collect()
    }

    #[test]
    fn vector_values_equal_the_definition_for_all_states() {
        for (codebook, bits) in [
            (Codebook::ThreeInst, vector_bits::<ThreeInst>()),
            (Codebook::Mcg, vector_bits::<Mcg>()),
            (Codebook::Mul1, vector_bits::<Mul1>()),
        ] {
            let expected: Vec<u32> = codebook.table().iter().map(|v| v.to_bits()).collect();
            assert!(bits == expected, "{}", codebook.name());
        }
    }
}

//! Bitrates of a trellis and the places of its positions in the bit stream.

use std::fmt;

/// Weights in one 16 x 16 tile: the length of the ring.
pub const POSITIONS: usize = 256;

/// How many bits of the stream a weight costs: 1 to 8 in whole bits, or 1.5, 2.5, 3.5.
///
/// Half-bit rates alternate between the whole bits below and above: even ring positions take the smaller
/// number of new bits, odd positions the larger one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rate {
    /// Twice the rate, so that half bits stay whole numbers.
    halves: u8,
}

impl Rate {
    /// The rate of `bits` a weight, or `None` if the format has no such rate.
    pub fn from_bits(bits: f32) -> Option<Self> {
        let halves = bits * 2.0;
        if halves.fract() == 0.0 && (0.0..=16.0).contains(&halves) {
            Self::from_halves(halves as u8)
        } else {
            None
        }
    }

    /// The rate of a tile stored in `units` 16-bit units (the last dimension of a trellis tensor).
    pub fn from_units(units: usize) -> Option<Self> {
        if units.is_multiple_of(8) { Self::from_halves(u8::try_from(units / 8).ok()?) } else { None }
    }

    pub(super) const fn from_halves(halves: u8) -> Option<Self> {
        match halves {
            3 | 5 | 7 => Some(Self { halves }),
            2..=16 if halves.is_multiple_of(2) => Some(Self { halves }),
            _ => None,
        }
    }

    /// Every legal rate, in ascending order.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=16).filter_map(Self::from_halves)
    }

    /// Twice the rate.
    pub const fn halves(self) -> usize {
        self.halves as usize
    }

    /// The rate in bits a weight.
    pub fn bits(self) -> f32 {
        f32::from(self.halves) / 2.0
    }

    /// Whether the rate is a whole number of bits.
    pub const fn is_whole(self) -> bool {
        self.halves.is_multiple_of(2)
    }

    /// 16-bit units in a stored tile.
    pub const fn units(self) -> usize {
        8 * self.halves as usize
    }

    /// 32-bit words in a stored tile.
    pub const fn words(self) -> usize {
        4 * self.halves as usize
    }

    /// New bits of ring position `position`.
    pub const fn step(self, position: usize) -> u32 {
        self.halves as u32 / 2 + (self.halves as u32 & position as u32 & 1)
    }

    /// Ring bit just behind position `position`: the sum of the steps up to and including it.
    pub const fn end(self, position: usize) -> usize {
        end_bit(self.halves as usize, position)
    }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.bits())
    }
}

/// [`Rate::end`] for use with constants: `halves` is twice the rate.
#[inline(always)]
pub(super) const fn end_bit(halves: usize, position: usize) -> usize {
    halves / 2 * (position + 1) + (halves & 1) * position.div_ceil(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_are_the_sums_of_steps() {
        for rate in Rate::all() {
            let mut sum = 0;
            for position in 0..POSITIONS {
                sum += rate.step(position) as usize;
                assert_eq!(rate.end(position), sum, "{rate} at {position}");
            }
            assert_eq!(sum, 32 * rate.words());
        }
    }

    #[test]
    fn only_the_formats_rates_exist() {
        let units: Vec<usize> = (0..200).filter(|&u| Rate::from_units(u).is_some()).collect();
        assert_eq!(units, [16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]);
        assert_eq!(Rate::from_bits(4.5), None);
        assert_eq!(Rate::from_bits(0.0), None);
        assert_eq!(Rate::from_bits(f32::NAN), None);
        assert_eq!(Rate::from_bits(3.5).map(Rate::units), Some(56));
    }
}

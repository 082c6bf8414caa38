//! Decoding tiles in registers.
//!
//! The eight ring positions of a lane share a few words: a 32-bit window of the stream that ends where the last
//! of them ends holds as many of their states as fit, each one shift and one mask away. So a tile becomes one,
//! two or four windows a lane ([`stage`], scalar work that overlaps with the rest), and these become values
//! eight lanes at a time ([`decode`]).
//!
//! `H` is twice the rate throughout.

use super::codebook::Code;
use super::lanes::{LANES, Lanes};
use super::rate::end_bit;

/// Groups of eight lanes in a tile.
pub(super) const GROUPS: usize = 4;

/// The windows of a tile: entry `GROUPS · q + group` holds window `q` of eight lanes. Rates that need fewer
/// windows leave the rest unused.
pub(super) type Staged = [Lanes<u32>; 4 * GROUPS];

/// The values of a tile: entry `[e][group]` holds ring positions `8 · (8 · group + i) + e`, `i` being the lane.
pub(super) type Values = [[Lanes<f32>; GROUPS]; 8];

/// Windows that hold the eight states of a lane: 32 bits must span from the first state's first bit to the last
/// state's last bit.
#[inline(always)]
const fn windows(halves: usize) -> usize {
    if halves <= 4 {
        1
    } else if halves <= 10 {
        2
    } else {
        4
    }
}

/// Cuts the windows out of the words of a tile.
#[inline(always)]
pub(super) fn stage<const H: usize, const TOGETHER: bool>(words: &[u32], staged: &mut Staged) {
    let count = 4 * H;
    let words = &words[..count];
    if H == 8 {
        // Windows end at half and whole words: worth vector instructions of its own.
        for group in 0..GROUPS {
            let before: Lanes<u32> = Lanes(core::array::from_fn(|i| words[(LANES * group + i + 31) % 32]));
            let own: Lanes<u32> = Lanes(core::array::from_fn(|i| words[LANES * group + i]));
            staged[group] = before.zip(own, |b, o| b << 16 | o >> 16);
            staged[GROUPS + group] = own;
        }
        return;
    }
    let per_window = 8 / windows(H);
    // Eight lanes take whole words, so all groups cut theirs at the same places.
    for group in 0..GROUPS {
        let own = &words[H * group..][..H];
        let before = words[(H * group + count - 1) % count];
        let word = |i: usize| if i == 0 { before } else { own[i - 1] };
        for q in 0..windows(H) {
            let end = |i: usize| end_bit(H, 8 * i + (q + 1) * per_window - 1);
            if TOGETHER {
                // All lanes' words first, then all shifts at once: the compiler would do every lane's by itself.
                let high = Lanes(core::array::from_fn(|i| word(end(i) / 32)));
                let low = Lanes(core::array::from_fn(|i| word((end(i) / 32 + 1).min(H))));
                let shifts: Lanes<u32> = Lanes(core::array::from_fn(|i| end(i) as u32 % 32));
                staged[GROUPS * q + group] = Lanes(core::array::from_fn(|i| {
                    high.0[i] << shifts.0[i] | low.0[i].unbounded_shr(32 - shifts.0[i])
                }));
                continue;
            }
            staged[GROUPS * q + group] = Lanes(core::array::from_fn(|i| {
                let (first, shift) = (end(i) / 32, end(i) % 32);
                if shift == 0 { word(first) } else { word(first) << shift | word(first + 1) >> (32 - shift) }
            }));
        }
    }
}

/// Calls `visit(group, e, values)` for all values of a staged tile, numbered as in [`Values`]. For one group, `e`
/// runs upward.
#[inline(always)]
pub(super) fn decode<C: Code, const H: usize>(
    staged: &Staged,
    mut visit: impl FnMut(usize, usize, Lanes<f32>),
) {
    let per_window = 8 / windows(H);
    for q in 0..windows(H) {
        let (first, last) = (q * per_window, (q + 1) * per_window - 1);
        for e in first..=last {
            let shift = end_bit(H, last) - end_bit(H, e);
            for group in 0..GROUPS {
                let states = staged[GROUPS * q + group].map(|w| w >> shift & 0xFFFF);
                visit(group, e, C::values(states));
            }
        }
    }
}

/// All values of a staged tile.
///
/// The same as collecting what [`decode`] visits, group by group: stores to one group at a time keep the compiler from
/// weaving the groups together.
#[inline(always)]
pub(super) fn decode_all<C: Code, const H: usize>(staged: &Staged, values: &mut Values) {
    let per_window = 8 / windows(H);
    for group in 0..GROUPS {
        for q in 0..windows(H) {
            let window = staged[GROUPS * q + group];
            let (first, last) = (q * per_window, (q + 1) * per_window - 1);
            for e in first..=last {
                let shift = end_bit(H, last) - end_bit(H, e);
                values[e][group] = C::values(window.map(|w| w >> shift & 0xFFFF));
            }
        }
    }
}

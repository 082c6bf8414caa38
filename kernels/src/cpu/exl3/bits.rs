//! The bit stream of a tile: states, words, and the places of weights in the tile.

use super::rate::{POSITIONS, Rate};

/// Row and column (inside the 16 x 16 tile) of a ring position.
pub const fn place(position: usize) -> (usize, usize) {
    let (lane, e) = (position / 8, position % 8);
    (2 * (lane % 4) + (e & 1) + 8 * ((e >> 1) & 1), lane / 4 + 8 * (e >> 2))
}

/// The 16-bit state of every ring position of a tile given by its words.
///
/// # Panics
/// If `words` has another length than [`Rate::words`].
pub fn unpack_states(words: &[u32], rate: Rate) -> [u16; POSITIONS] {
    assert_eq!(words.len(), rate.words(), "words of a tile");
    let ring = 32 * words.len();
    core::array::from_fn(|position| {
        let start = (rate.end(position) + ring - 16) % ring;
        let pair = u64::from(words[start / 32]) << 32 | u64::from(words[(start / 32 + 1) % words.len()]);
        (pair >> (48 - start % 32)) as u16
    })
}

/// The inverse of [`unpack_states`]: writes the new bits of each state into `words`.
///
/// The states must chain around the ring ([`states_chain`]); of others, only the new bits are kept.
///
/// # Panics
/// If `words` has another length than [`Rate::words`].
pub fn pack_states(states: &[u16; POSITIONS], rate: Rate, words: &mut [u32]) {
    assert_eq!(words.len(), rate.words(), "words of a tile");
    words.fill(0);
    for (position, &state) in states.iter().enumerate() {
        let end = rate.end(position);
        for back in 0..rate.step(position) as usize {
            let bit = end - 1 - back;
            words[bit / 32] |= u32::from(state >> back & 1) << (31 - bit % 32);
        }
    }
}

/// Whether each state is its predecessor shifted up by its new bits, around the whole ring.
pub fn states_chain(states: &[u16; POSITIONS], rate: Rate) -> bool {
    (0..POSITIONS).all(|position| {
        let step = rate.step(position);
        let before = states[(position + POSITIONS - 1) % POSITIONS];
        u32::from(states[position]) >> step == u32::from(before) & ((1 << (16 - step)) - 1)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_the_specification() {
        let examples = [
            (0, (0, 0)),
            (1, (1, 0)),
            (2, (8, 0)),
            (3, (9, 0)),
            (4, (0, 8)),
            (7, (9, 8)),
            (8, (2, 0)),
            (32, (0, 1)),
            (255, (15, 15)),
        ];
        for (position, expected) in examples {
            assert_eq!(place(position), expected);
        }
    }

    #[test]
    fn any_words_unpack_to_states_that_chain_and_pack_back() {
        let mut seed = 1_u32;
        for rate in Rate::all() {
            let words: Vec<u32> = (0..rate.words())
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    seed ^ seed >> 13
                })
                .collect();
            let states = unpack_states(&words, rate);
            assert!(states_chain(&states, rate));
            let mut packed = vec![0; rate.words()];
            pack_states(&states, rate, &mut packed);
            assert_eq!(packed, words, "rate {rate}");
        }
    }
}

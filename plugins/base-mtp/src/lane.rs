//! What the layer has seen of one sequence, and what waits for it.

use plugfold_abi::OpError;

/// One sequence. `rows` rows lie in the layer's caches; the model's rows behind them wait.
///
/// Row 0 of the caches is position `origin`: 0, unless the rows before it cannot be had (a resumed state without this
/// part's record). The layer has no notion of position but the order of its rows, so a context that begins late drafts a
/// little worse and is otherwise sound; rows that this sequence did not write are never read.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Lane {
    origin: u32,
    rows: u32,
    /// The model's final rows at positions `origin + rows` and following.
    hidden: Vec<f32>,
    /// The tokens that follow them; of the last row it is not known yet.
    next: Vec<u32>,
}

/// Rows for the layer: the first one's place in its caches, the position of the token that follows it, the tokens that
/// follow, the model's rows.
pub struct Rows {
    pub start: u32,
    pub position: u32,
    pub next: Vec<u32>,
    pub hidden: Vec<f32>,
}

impl Lane {
    /// A sequence of which nothing before `position` will be seen.
    pub fn from(position: u32) -> Self {
        Self { origin: position, ..Self::default() }
    }

    /// Whether every row lies at its position.
    pub fn is_whole(&self) -> bool {
        self.origin == 0
    }

    /// Rows in the layer's caches.
    pub fn rows(&self) -> u32 {
        self.rows
    }

    fn waiting(&self, width: usize) -> usize {
        self.hidden.len() / width.max(1)
    }

    /// Position of the token after the last row.
    pub fn end(&self, width: usize) -> u32 {
        self.origin + self.rows + self.waiting(width) as u32
    }

    /// Rows whose tokens are known and that the layer has not seen.
    pub fn paired(&self) -> usize {
        self.next.len()
    }

    /// Tokens became part of the sequence, with the model's rows. A gap begins the lane anew: what was not seen cannot be
    /// paired.
    pub fn absorb(&mut self, start: u32, tokens: &[u32], hidden: &[f32], width: usize) {
        if self.end(width) != start {
            *self = Self::from(start);
        }
        for (token, row) in tokens.iter().zip(hidden.chunks(width)) {
            if !self.hidden.is_empty() {
                self.next.push(*token);
            }
            self.hidden.extend_from_slice(row);
        }
    }

    /// The first `most` pairs that wait.
    pub fn pairs(&self, most: usize, width: usize) -> Rows {
        let n = self.next.len().min(most);
        let (next, hidden) = (self.next[..n].to_vec(), self.hidden[..n * width].to_vec());
        Rows { start: self.rows, position: self.following(), next, hidden }
    }

    /// All rows that wait, the last one paired with the token drawn last; `None` where there is no row to draft from.
    pub fn caught_up(&self, pending: u32, width: usize) -> Option<Rows> {
        if self.hidden.is_empty() {
            return None;
        }
        let next = self.next.iter().copied().chain([pending]).collect();
        let hidden = self.hidden[..(self.next.len() + 1) * width].to_vec();
        Some(Rows { start: self.rows, position: self.following(), next, hidden })
    }

    /// Position of the token that follows the first row that waits.
    fn following(&self) -> u32 {
        self.origin + self.rows + 1
    }

    /// The layer has seen so many of the rows that wait.
    pub fn seen(&mut self, rows: usize, width: usize) {
        self.rows += rows as u32;
        self.next.drain(..rows.min(self.next.len()));
        // A new list, so that a large chunk's memory is not kept.
        self.hidden = self.hidden.split_off((rows * width).min(self.hidden.len()));
    }

    /// The record of a snapshot.
    pub fn save(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(12 + 4 * (self.next.len() + self.hidden.len()));
        for word in [self.origin, self.rows, self.next.len() as u32] {
            out.extend(word.to_le_bytes());
        }
        self.next.iter().for_each(|id| out.extend(id.to_le_bytes()));
        self.hidden.iter().for_each(|v| out.extend(v.to_le_bytes()));
        out
    }

    /// Reads a record.
    ///
    /// # Errors
    /// Bytes that are none.
    pub fn load(record: &[u8]) -> Result<Self, OpError> {
        let words: Vec<[u8; 4]> = record.chunks_exact(4).filter_map(|b| b.first_chunk().copied()).collect();
        let word = |i: usize| words.get(i).map(|b| u32::from_le_bytes(*b));
        let head = (word(0), word(1), word(2));
        let wrong = || OpError::new(format!("part mtp: a record of {} bytes that is none", record.len()));
        let (Some(origin), Some(rows), Some(known)) = head else { return Err(wrong()) };
        let rest = &words[3..];
        let known = known as usize;
        let sound = record.len().is_multiple_of(4)
            && origin.checked_add(rows).is_some()
            && known <= rest.len()
            && (rest.len() == known || (rest.len() - known).is_multiple_of(known + 1));
        // Rows that wait without a last one that lacks its token: only where none waits at all.
        if !sound || (rest.len() == known && known > 0) {
            return Err(wrong());
        }
        let (ids, values) = rest.split_at(known);
        Ok(Self {
            origin,
            rows,
            hidden: values.iter().map(|b| f32::from_le_bytes(*b)).collect(),
            next: ids.iter().map(|b| u32::from_le_bytes(*b)).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const W: usize = 2;

    fn rows(positions: std::ops::Range<u32>) -> Vec<f32> {
        positions.flat_map(|p| [p as f32, 0.5]).collect()
    }

    #[test]
    fn each_row_is_paired_with_the_token_after_it() {
        let mut lane = Lane::default();
        lane.absorb(0, &[10, 11, 12], &rows(0..3), W);
        assert_eq!((lane.paired(), lane.end(W)), (2, 3));
        let pairs = lane.pairs(9, W);
        assert_eq!((pairs.start, pairs.next, pairs.hidden), (0, vec![11, 12], rows(0..2)));
        lane.seen(2, W);
        lane.absorb(3, &[13], &rows(3..4), W);
        let all = lane.caught_up(14, W).unwrap();
        assert_eq!((all.start, all.next, all.hidden), (2, vec![13, 14], rows(2..4)));
        lane.seen(2, W);
        assert_eq!((lane.paired(), lane.end(W)), (0, 4));
        assert!(lane.caught_up(15, W).is_none(), "no row waits");
        // The token drawn last comes in as the first of the next window, already paired.
        lane.absorb(4, &[14, 15], &rows(4..6), W);
        let all = lane.caught_up(16, W).unwrap();
        assert_eq!((all.start, all.next, all.hidden), (4, vec![15, 16], rows(4..6)));
    }

    #[test]
    fn the_portions_in_which_rows_come_change_nothing() {
        let tokens: Vec<u32> = (10..30).collect();
        let mut whole = Lane::default();
        whole.absorb(0, &tokens, &rows(0..20), W);
        for size in [1, 3, 7] {
            let mut lane = Lane::default();
            for (i, part) in tokens.chunks(size).enumerate() {
                let start = (i * size) as u32;
                lane.absorb(start, part, &rows(start..start + part.len() as u32), W);
            }
            assert_eq!(lane, whole, "portions of {size}");
        }
    }

    #[test]
    fn a_gap_begins_the_context_anew() {
        let mut lane = Lane::default();
        lane.absorb(0, &[1, 2, 3], &rows(0..3), W);
        lane.seen(2, W);
        lane.absorb(64, &[4, 5], &rows(64..66), W);
        let pairs = lane.pairs(9, W);
        assert_eq!((pairs.start, pairs.next, pairs.hidden, lane.end(W)), (0, vec![5], rows(64..65), 66));
    }

    #[test]
    fn rows_of_an_image_are_followed_at_their_positions() {
        let mut lane = Lane::from(10);
        let image = plugfold_abi::FIRST_VIRTUAL_ID + 3;
        lane.absorb(10, &[1, 2, image, image, 5, 6], &rows(0..6), W);
        let pairs = lane.pairs(2, W);
        assert_eq!((pairs.start, pairs.position, pairs.next), (0, 11, vec![2, image]));
        lane.seen(2, W);
        let pairs = lane.pairs(9, W);
        assert_eq!((pairs.start, pairs.position, pairs.next, lane.end(W)), (2, 13, vec![image, 5, 6], 16));
    }

    #[test]
    fn a_record_is_read_back_and_anything_else_refused() {
        let mut lane = Lane::from(7);
        for start in [7, 9] {
            lane.absorb(start, &[1, 2], &rows(start..start + 2), W);
            assert_eq!(Lane::load(&lane.save()).unwrap(), lane);
        }
        lane.seen(2, W);
        assert_eq!(Lane::load(&lane.save()).unwrap(), lane);
        assert_eq!(Lane::load(&Lane::from(3).save()).unwrap(), Lane::from(3));
        let good = lane.save();
        for cut in [0, 4, 11, 13, good.len() - 1, good.len() - 4] {
            assert!(Lane::load(&good[..cut]).is_err(), "{cut} bytes of {}", good.len());
        }
        let huge = [u32::MAX, 1, 0].map(u32::to_le_bytes).concat();
        assert!(Lane::load(&huge).is_err());
    }
}

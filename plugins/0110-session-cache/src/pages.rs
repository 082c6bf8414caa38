//! The bytes: pages in slabs, and what an entry has of its own.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use plugfold_abi::points::{FamilyInfo, Owner, Sequences, SequencesObject};
use plugfold_abi::{Addressing, List, OpError, Slice};

use crate::index::SLAB;
use crate::keys::{Key, PAGE, of_text};

/// One family whose rows are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Its number among the families.
    pub family: u32,
    /// Positions a row covers.
    pub positions: usize,
    /// Bytes of a row over all layers.
    pub bytes: usize,
    /// Whether it belongs to the draft layer.
    pub draft: bool,
}

impl Rows {
    fn page_rows(&self) -> usize {
        PAGE / self.positions
    }
    fn page_bytes(&self) -> usize {
        self.page_rows() * self.bytes
    }
    /// Complete rows of so many positions.
    fn complete(&self, positions: usize) -> usize {
        positions / self.positions
    }
}

/// What a rank's sequences consist of.
#[derive(Clone, Debug)]
pub struct Layout {
    /// Families with rows by position.
    pub rows: Vec<Rows>,
    /// Bytes of a row of every family, by number.
    row_bytes: Vec<usize>,
    /// Bytes of recurrent state.
    pub state_bytes: usize,
    /// Name of all formats and sizes.
    pub formats: Key,
}

impl Layout {
    /// Reads the families. `draft`: whether rows of the draft layer are worth storing.
    ///
    /// # Errors
    /// A family whose rows cannot be copied by position.
    pub fn of(families: &[FamilyInfo], draft: bool) -> Result<Self, OpError> {
        let (mut rows, mut state_bytes, mut formats) = (Vec::new(), 0, String::new());
        for (number, info) in families.iter().enumerate() {
            let f = &info.family;
            // Writing to a string never fails.
            let _ = write!(
                formats,
                "{} {:?} {} {} {} {:?} {:?};",
                f.id, f.owner, f.format, f.row_bytes, f.positions_a_row, f.layers, f.addressing
            );
            if f.in_snapshot {
                state_bytes += info.stacked_row_bytes as usize * f.rows as usize;
            }
            if f.addressing == Addressing::State
                || f.owner == Owner::Drafter
                || (f.owner == Owner::Mtp && !draft)
            {
                // State is copied as a whole; of a drafter's own families, the rows that its part names.
                continue;
            }
            let positions = f.positions_a_row as usize;
            if f.addressing != Addressing::Linear || positions == 0 || !PAGE.is_multiple_of(positions) {
                return Err(OpError::new(format!(
                    "rows of cache family {} lie by {:?} addressing, {positions} positions a row: sessions can be kept of \
                     rows in order, with a divisor of {PAGE} positions each; take the plugin that lays them out, or this \
                     one, off the list",
                    f.id, f.addressing
                )));
            }
            let (family, bytes) = (number as u32, info.stacked_row_bytes as usize);
            rows.push(Rows { family, positions, bytes, draft: f.owner == Owner::Mtp });
        }
        let row_bytes = families.iter().map(|info| info.stacked_row_bytes as usize).collect();
        Ok(Self { rows, row_bytes, state_bytes, formats: of_text(&formats) })
    }

    /// Rows of a drafter's own family, which are an entry's own.
    pub fn own_rows(&self, family: u32) -> Rows {
        let bytes = self.row_bytes.get(family as usize).copied().unwrap_or(0);
        Rows { family, positions: 1, bytes, draft: true }
    }

    /// Bytes of a page over all families.
    pub fn page_bytes(&self) -> u64 {
        self.rows.iter().map(|r| r.page_bytes() as u64).sum()
    }

    /// Rows of each family past `pages` shared pages, for `length` positions of which the draft layer has `draft`.
    pub fn tail(
        &self,
        pages: usize,
        shared_draft: bool,
        length: usize,
        draft: usize,
    ) -> Vec<(Rows, u32, u32)> {
        let of = |r: &Rows| {
            let positions = if r.draft { draft.min(length) } else { length };
            let shared = if r.draft && !shared_draft { 0 } else { pages * r.page_rows() };
            let end = r.complete(positions);
            (end > shared).then(|| (*r, shared as u32, (end - shared) as u32))
        };
        self.rows.iter().filter_map(of).collect()
    }
}

/// Bytes of a tail.
pub fn tail_bytes(tail: &[(Rows, u32, u32)]) -> u64 {
    tail.iter().map(|(r, _, n)| r.bytes as u64 * u64::from(*n)).sum()
}

/// Rows of a tail: family, first row, bytes.
type Tail = (u32, u32, List<u8>);

/// What an entry has of its own.
struct Private {
    state: List<u8>,
    parts: List<u8>,
    tail: Vec<Tail>,
}

/// All bytes of a rank.
pub struct Pages {
    layout: Layout,
    /// Per slab and family, [`SLAB`] pages one after another.
    slabs: BTreeMap<u32, Vec<Vec<u8>>>,
    private: HashMap<u64, Private>,
}

impl Pages {
    /// Nothing.
    pub fn new(layout: Layout) -> Self {
        Self { layout, slabs: BTreeMap::new(), private: HashMap::new() }
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// Frees what an entry had of its own.
    pub fn drop_entry(&mut self, id: u64) {
        self.private.remove(&id);
    }

    /// Frees a slab.
    pub fn drop_slab(&mut self, slab: u32) {
        self.slabs.remove(&slab);
    }

    /// Copies a page of a slot.
    ///
    /// # Errors
    /// Rows that are not there.
    pub fn take_page(
        &mut self,
        sequences: &SequencesObject,
        slot: u32,
        page: usize,
        at: u32,
        draft: bool,
    ) -> Result<(), OpError> {
        let rows = &self.layout.rows;
        let slab = self
            .slabs
            .entry(at / SLAB)
            .or_insert_with(|| rows.iter().map(|r| vec![0; r.page_bytes() * SLAB as usize]).collect());
        let mut bytes = List::new();
        for (r, memory) in rows.iter().zip(slab).filter(|(r, _)| draft || !r.draft) {
            bytes.clear();
            let n = r.page_rows();
            sequences.gather(slot, r.family, (page * n) as u32, n as u32, &mut bytes)?;
            let start = (at % SLAB) as usize * r.page_bytes();
            let place = memory.get_mut(start..start + bytes.len()).filter(|p| p.len() == r.page_bytes());
            let wrong = || OpError::new(format!("a page of family {} has {} bytes", r.family, bytes.len()));
            place.ok_or_else(wrong)?.copy_from_slice(&bytes);
        }
        Ok(())
    }

    /// Copies what an entry has of its own.
    ///
    /// # Errors
    /// Rows that are not there, or a part that cannot be saved.
    pub fn take_private(
        &mut self,
        sequences: &SequencesObject,
        slot: u32,
        id: u64,
        tail: &[(Rows, u32, u32)],
    ) -> Result<(), OpError> {
        let mut private = Private { state: List::new(), parts: List::new(), tail: Vec::new() };
        sequences.state(slot, &mut private.state)?;
        sequences.parts(slot, &mut private.parts)?;
        for (r, first, rows) in tail {
            let mut bytes = List::new();
            sequences.gather(slot, r.family, *first, *rows, &mut bytes)?;
            private.tail.push((r.family, *first, bytes));
        }
        self.private.insert(id, private);
        Ok(())
    }

    /// Writes a run of pages that lie one after another in a slab, `count` from page `page` of the sequence on.
    ///
    /// # Errors
    /// Rows that cannot be written.
    pub fn put_pages(
        &self,
        sequences: &SequencesObject,
        slot: u32,
        page: usize,
        at: u32,
        count: usize,
        draft: bool,
    ) -> Result<(), OpError> {
        let gone = || OpError::new(format!("page {at} of the session store has no memory"));
        let slab = self.slabs.get(&(at / SLAB)).ok_or_else(gone)?;
        for (r, memory) in self.layout.rows.iter().zip(slab).filter(|(r, _)| draft || !r.draft) {
            let start = (at % SLAB) as usize * r.page_bytes();
            let bytes = memory.get(start..start + count * r.page_bytes()).ok_or_else(gone)?;
            sequences.scatter(slot, r.family, (page * r.page_rows()) as u32, Slice::from(bytes))?;
        }
        Ok(())
    }

    /// Writes what an entry has of its own, and makes the slot's sequence be `ids`.
    ///
    /// # Errors
    /// Rows or parts that cannot be written.
    pub fn put_private(
        &self,
        sequences: &SequencesObject,
        slot: u32,
        id: u64,
        ids: &[u32],
    ) -> Result<(), OpError> {
        let gone = || OpError::new(format!("entry {id} of the session store has no snapshot"));
        let private = self.private.get(&id).ok_or_else(gone)?;
        for (family, first, bytes) in &private.tail {
            sequences.scatter(slot, *family, *first, Slice::from(&bytes[..]))?;
        }
        let (state, parts) = (Slice::from(&private.state[..]), Slice::from(&private.parts[..]));
        sequences.resume(slot, Slice::from(ids), state, parts)
    }
}

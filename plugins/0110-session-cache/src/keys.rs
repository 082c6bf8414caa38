//! Names of what is stored: digests over everything that its bytes depend on.

use blake2::digest::consts::U16;
use blake2::{Blake2b, Digest};

/// A name: 128 bits of BLAKE2b.
pub type Key = [u8; 16];

/// Positions of a page.
pub const PAGE: usize = 256;

/// What decides rows besides ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// Formats and sizes of the cache families.
    pub formats: Key,
    /// Arithmetic of the prefill.
    pub tag: u64,
    /// Multiples at which states of this arithmetic may be kept.
    pub grid: u32,
    /// Whether pages hold rows of the draft layer as well.
    pub draft_rows: bool,
}

fn named(name: &str) -> Blake2b<U16> {
    Blake2b::new().chain_update(name)
}

fn with_ids(mut hash: Blake2b<U16>, ids: &[u32]) -> Key {
    for id in ids {
        hash.update(id.to_le_bytes());
    }
    hash.finalize().into()
}

/// A digest of any text.
pub fn of_text(text: &str) -> Key {
    named("text").chain_update(text).finalize().into()
}

/// One digest a full block of [`PAGE`] ids, over all ids up to its end.
pub fn chain(ids: &[u32]) -> Vec<Key> {
    let mut last = Key::default();
    let next = |block: &[u32]| {
        last = with_ids(named("block").chain_update(last), block);
        last
    };
    ids.chunks_exact(PAGE).map(next).collect()
}

impl Kind {
    fn start(&self, name: &str) -> Blake2b<U16> {
        let grid = self.grid.to_le_bytes();
        let hash = named(name).chain_update(self.formats).chain_update(self.tag.to_le_bytes());
        hash.chain_update(grid).chain_update([u8::from(self.draft_rows)])
    }

    /// Ids that the rows of page `p` depend on: a row of the draft layer reads the next token, and arithmetic with a grid
    /// may read up to the next multiple.
    pub fn key_end(&self, p: usize) -> usize {
        let end = PAGE * (p + 1);
        end.next_multiple_of(self.grid.max(1) as usize).max(end + 1)
    }

    /// Keys of the leading full pages of a sequence of which all is known: rows of the draft layer below `draft_rows`.
    pub fn pages(&self, ids: &[u32], chain: &[Key], draft_rows: usize) -> Vec<Key> {
        let whole =
            |p: &usize| self.key_end(*p) <= ids.len() && (!self.draft_rows || PAGE * (p + 1) <= draft_rows);
        let key = |p: usize| {
            with_ids(self.start("page").chain_update(chain[p]), &ids[PAGE * (p + 1)..self.key_end(p)])
        };
        (0..chain.len()).take_while(whole).map(key).collect()
    }

    /// Key of an entry: of `draft`, whether it has what drafts need.
    pub fn entry(&self, ids: &[u32], draft: bool) -> Key {
        let hash = self.start("entry").chain_update([u8::from(draft)]);
        with_ids(hash.chain_update((ids.len() as u64).to_le_bytes()), ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(grid: u32, draft_rows: bool) -> Kind {
        Kind { formats: of_text("f32"), tag: 7, grid, draft_rows }
    }

    #[test]
    fn a_page_depends_on_ids_up_to_the_next_grid_point() {
        let ends = |grid| [0, 1, 2].map(|p| kind(grid, true).key_end(p));
        assert_eq!(ends(1), [257, 513, 769]);
        assert_eq!(ends(64), [257, 513, 769]);
        assert_eq!(ends(1024), [1024, 1024, 1024]);
        assert_eq!(ends(192), [384, 576, 769]);
    }

    #[test]
    fn pages_are_those_of_which_all_is_known() {
        let ids: Vec<u32> = (0..600).collect();
        let chain = chain(&ids);
        assert_eq!(chain.len(), 2);
        let count =
            |n: usize, rows: usize, draft| kind(1, draft).pages(&ids[..n], &chain[..n / PAGE], rows).len();
        assert_eq!(count(600, 599, true), 2);
        assert_eq!(
            count(512, 511, true),
            1,
            "the second page's last draft row reads a token that is not known"
        );
        assert_eq!(count(513, 512, true), 2);
        assert_eq!(count(600, 400, true), 1, "draft rows that are not there yet");
        assert_eq!(count(600, 0, false), 2);
        assert_eq!(count(255, 255, true), 0);
    }

    #[test]
    fn anything_that_rows_depend_on_changes_the_key() {
        let ids: Vec<u32> = (0..300).collect();
        let one = |kind: Kind, ids: &[u32]| kind.pages(ids, &chain(ids), ids.len())[0];
        let base = one(kind(1, true), &ids);
        let mut other = ids.clone();
        other[256] = 9;
        assert_ne!(one(kind(1, true), &other), base, "the token after the page");
        other = ids.clone();
        other[257] = 9;
        assert_eq!(one(kind(1, true), &other), base, "a token that the page does not depend on");
        other[0] = 9;
        assert_ne!(one(kind(1, true), &other), base);
        assert_ne!(one(Kind { tag: 8, ..kind(1, true) }, &ids), base);
        assert_ne!(one(Kind { formats: of_text("bf16"), ..kind(1, true) }, &ids), base);
        assert_ne!(one(kind(1, false), &ids), base);
        assert_ne!(kind(1, true).entry(&ids, true), kind(1, true).entry(&ids, false));
        assert_ne!(kind(1, true).entry(&ids, true), kind(1, true).entry(&ids[..299], true));
    }
}

//! Device collectives: exchanges that are calls of a program. Control messages (plans, prompts) do not use them.

crate::interface! {
    /// All ranks of one engine. Every rank makes the same calls in the same order with the same sizes.
    "comm", 0: Comm, CommObject, CommTable {
        /// This rank.
        fn rank(&self) -> u32;
        /// How many ranks there are.
        fn ranks(&self) -> u32;
        /// Every rank's `mine`, in rank order, into `all` (`ranks * mine.len` bytes). Fails when a rank is gone or sent
        /// another size; names the rank.
        fn all_gather(&self, mine: crate::Slice<'_, u8>, all: crate::SliceMut<'_, u8>) -> ();
    }
}

impl CommObject {
    /// [`Comm::all_gather`] over plain slices.
    ///
    /// # Errors
    /// As there.
    pub fn gather(&self, mine: &[u8], all: &mut [u8]) -> Result<(), crate::OpError> {
        self.all_gather(crate::Slice::from(mine), crate::SliceMut::from(all))
    }
}

//! Device collectives: exchanges that are calls of a program. Control messages (plans, prompts) do not use them.

/// What a transport exchanges besides memory of the host.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exchanges {
    /// Memory of the device that it was opened on, by [`Comm::gather_on_device`].
    pub device: bool,
    /// Such exchanges may be part of a recording of the device (see [`crate::points::Graphs`]).
    pub recorded: bool,
}

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
        /// What it exchanges besides; constant.
        fn exchanges(&self) -> Exchanges = Ok(Exchanges::default());
        /// As [`Comm::all_gather`], from and to addresses of the device that the transport was opened on: `bytes` at `mine`
        /// and `ranks * bytes` at `all`, which do not overlap. It is done in the order of the device's `stream`, and is only
        /// asked for when this returns: what went wrong on the way is told by [`Comm::check`].
        fn gather_on_device(&self, mine: u64, all: u64, bytes: u64, stream: u64) -> ()
            = Err(crate::OpError::new("this transport exchanges memory of the host only"));
        /// Whether all exchanges of device memory that the device is done with went well. Until it says so nothing that
        /// follows from them may be used; after an error the ranks are out of step.
        fn check(&self) -> () = Ok(());
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

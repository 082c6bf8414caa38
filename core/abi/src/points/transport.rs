//! How ranks speak: transports, and small data of plugins that travels with plans and exchanges.

use crate::{CommObject, List, Slice, SliceMut, TextBuf};

crate::interface! {
    /// The control plane, for opening a transport and for agreements. Keep it: a transport's waits look at
    /// [`Control::ended`].
    "control", 0: Control, ControlObject, ControlTable {
        /// This rank.
        fn rank(&self) -> u32;
        /// Ranks.
        fn ranks(&self) -> u32;
        /// Every rank's bytes, in rank order.
        fn gather(&self, what: crate::Text<'_>, mine: Slice<'_, u8>) -> List<List<u8>>;
        /// Seconds that a wait for another rank may take.
        fn patience_s(&self) -> f64;
        /// The reason for which all ranks end, once there is one: a transport's waits must look at it.
        fn ended(&self) -> TextBuf;
        /// Identity of this host, the same for all ranks that run on it.
        fn host(&self) -> TextBuf;
        /// The built-in stream transport between ranks, for a transport that builds on it.
        fn streams(&self) -> CommObject;
    }
}

crate::interface! {
    /// A transport of collectives, chosen by name.
    "transport", 0: Transport, TransportObject, TransportTable {
        /// Name.
        fn name(&self) -> TextBuf;
        /// Opens it on all ranks in step.
        fn open(&self, control: ControlObject) -> CommObject;
    }
}

crate::interface! {
    /// Bytes that a plugin adds to every plan.
    "section", 0: Section, SectionObject, SectionTable {
        /// Name.
        fn name(&self) -> TextBuf;
        /// Rank 0: the bytes for the coming round; empty ones cost nothing.
        fn write(&self, round: u64) -> List<u8>;
        /// All ranks, before anything of the round runs. An error on one rank ends the engine on all: plans must be obeyed
        /// alike.
        fn read(&self, round: u64, bytes: Slice<'_, u8>) -> ();
    }
}

crate::interface! {
    /// Words that a plugin adds to every exchange after a window.
    "rider", 0: Rider, RiderObject, RiderTable {
        /// Name.
        fn name(&self) -> TextBuf;
        /// How many 32-bit words; constant.
        fn words(&self) -> u32;
        /// Writes this rank's words.
        fn write(&self, words: SliceMut<'_, u32>) -> ();
        /// Reads all ranks' words, in rank order.
        fn read(&self, words: Slice<'_, u32>) -> ();
    }
}

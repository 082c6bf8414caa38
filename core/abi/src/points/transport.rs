//! How ranks speak: transports, and small data of plugins that travels with plans and exchanges.

use crate::{CommObject, List, Maybe, Slice, SliceMut, Text, TextBuf};

crate::interface! {
    /// The control plane, for opening a transport and for agreements. Keep it: a transport's waits look at
    /// [`Control::ended`].
    "control", 0: Control, ControlObject, ControlTable {
        /// This rank.
        fn rank(&self) -> u32;
        /// Ranks.
        fn ranks(&self) -> u32;
        /// Every rank's bytes, in rank order.
        fn gather(&self, what: Text<'_>, mine: Slice<'_, u8>) -> List<List<u8>>;
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

/// A device as a transport sees it.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Whose calls its addresses and streams belong to: `cuda`.
    pub family: TextBuf,
    /// What it is, for people.
    pub name: TextBuf,
    /// Tells it from every other device of every host, whatever a process may see of them.
    pub identity: TextBuf,
    /// Its number among those that this process sees.
    pub index: u32,
}

crate::interface! {
    /// The device of a rank, for a transport that exchanges its memory. Addresses and streams are those of its family.
    "device", 0: DeviceAccess, DeviceAccessObject, DeviceAccessTable {
        /// What it is.
        fn facts(&self) -> DeviceFacts;
        /// Makes it the calling thread's, for calls of its family.
        fn enter(&self) -> ();
        /// The stream on which all work of a rank is asked for.
        fn stream(&self) -> u64;
        /// Zeroed memory; `what` it is for is said where there is not enough.
        fn allocate(&self, what: Text<'_>, bytes: u64) -> u64;
        /// Gives memory back.
        fn free(&self, address: u64) -> ();
        /// Copies bytes there, after what was asked for before.
        fn upload(&self, to: u64, bytes: Slice<'_, u8>) -> ();
        /// Copies bytes from there, after what was asked for before, and waits for them.
        fn download(&self, from: u64, bytes: SliceMut<'_, u8>) -> ();
    }
}

crate::interface! {
    /// A transport of collectives, chosen by name.
    "transport", 0: Transport, TransportObject, TransportTable {
        /// Name.
        fn name(&self) -> TextBuf;
        /// Opens it on all ranks in step. `device`: where this rank's model lies, if it is not the host; it may be kept.
        fn open(&self, control: ControlObject, device: Maybe<DeviceAccessObject>) -> CommObject;
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

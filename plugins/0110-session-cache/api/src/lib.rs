//! What plugins may ask of the session store.

plugfold_abi::fixed_layouts!();

use plugfold_abi::List;

/// A stored snapshot.
#[repr(C)]
#[derive(plugfold_abi::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Session {
    /// Its number, the ticket of an offer.
    pub id: u64,
    /// Tokens.
    pub length: u32,
    /// Arithmetic of the prefill that made it.
    pub tag: u64,
    /// Whether it has what drafts of the multi-token-prediction layer need.
    pub draft: bool,
    /// Pages that it shares.
    pub pages: u32,
    /// Bytes that are its own.
    pub private_bytes: u64,
}

/// How full the store is, in bytes.
#[repr(C)]
#[derive(plugfold_abi::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// In use.
    pub used: u64,
    /// That may be in use.
    pub budget: u64,
}

plugfold_abi::interface! {
    /// The session store of this rank. The same on every rank but for bytes.
    "session-store", 0: SessionStore, SessionStoreObject, SessionStoreTable {
        /// All entries, by number.
        fn sessions(&self) -> List<Session>;
        /// Ids of an entry; none where there is no such entry.
        fn ids(&self, id: u64) -> List<u32>;
        /// Leading pages of an entry that the caches of a slot hold already.
        fn live_pages(&self, slot: u32, id: u64) -> u32;
        /// How full it is.
        fn room(&self) -> Room;
    }
}

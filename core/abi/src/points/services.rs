//! What the host offers to every plugin, and services between plugins.

use crate::boundary::Shared;
use crate::{List, Maybe, Slice, Text, TextBuf};

/// How loud a message is.
#[repr(u8)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// For who looks for a fault.
    Debug = 0,
    /// For the log.
    Info = 1,
    /// Somebody should look.
    Warn = 2,
}

crate::interface! {
    /// The host, for one plugin.
    "host", 0: Host, HostObject, HostTable {
        /// This rank.
        fn rank(&self) -> u32;
        /// Ranks.
        fn ranks(&self) -> u32;
        /// Threads that work on the CPU may use on this rank: a plugin with a pool of its own makes it as wide.
        fn threads(&self) -> u32;
        /// A line of the log, under the plugin's id.
        fn log(&self, level: Level, message: Text<'_>) -> ();
        /// Adds to a counter (`plugfold_plugin_NAME_total`, labelled with the plugin's id).
        fn count(&self, name: Text<'_>, delta: f64) -> ();
        /// Sets a gauge (`plugfold_plugin_NAME`, labelled with the plugin's id).
        fn gauge(&self, name: Text<'_>, value: f64) -> ();
        /// A folder of its own that outlives the process; made when asked for.
        fn cache_folder(&self) -> TextBuf;
        /// The checkpoint's folder on this rank, from `prepare` on; empty where no model is served (`plugins check`).
        fn model_folder(&self) -> TextBuf;
        /// Every rank's bytes, in rank order. Only in steps of the start, which all ranks take alike.
        fn agree(&self, what: Text<'_>, mine: Slice<'_, u8>) -> List<List<u8>>;
    }
}

crate::interface! {
    /// Services that plugins listed before offer.
    "services", 0: Services, ServicesObject, ServicesTable {
        /// The object that offers an interface, if a loaded plugin does.
        fn find(&self, interface: Text<'_>) -> Maybe<Shared>;
    }
}

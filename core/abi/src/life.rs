//! The life of a plugin: every step is taken on all ranks alike, and each may refuse.

use crate::boundary::Offer;
use crate::points::{HostObject, Limits, ServicesObject};
use crate::{KnobValue, Knobs, List, Maybe, Text, TextBuf};

/// What a plugin is configured with.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy)]
pub struct Setup<'a> {
    /// Its knobs.
    pub knobs: Knobs<'a>,
    /// The host. Lives as long as the process.
    pub host: &'a HostObject,
    /// Kind of device ("cpu", or a CUDA architecture).
    pub device_class: Text<'a>,
}

impl Setup<'_> {
    /// The host, to be kept.
    pub fn host(&self) -> &'static HostObject {
        // SAFETY: whoever configures a plugin keeps its host for as long as hooks of the plugin may run, which is the life
        // of the process (see `host`).
        unsafe { &*std::ptr::from_ref(self.host) }
    }
}

/// Memory that a plugin will take.
#[repr(C)]
#[derive(abi_stable::StableAbi, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Bytes of host memory.
    pub host: u64,
    /// Bytes of device memory.
    pub device: u64,
}

crate::interface! {
    /// A plugin. The steps, in order: describe, configure, publish, connect, memory, prepare, self_check, digest,
    /// calibrate, ready.
    "plugin", 0: Plugin, PluginObject, PluginTable {
        /// Its manifest, as in its note.
        fn describe(&self) -> TextBuf;
        /// Takes its settings and hands out its hooks.
        fn configure(&self, setup: &Setup<'_>) -> List<Offer>;
        /// Offers services to plugins listed after it.
        fn publish(&self) -> List<Offer> = Ok(List::new());
        /// Looks for services of plugins listed before it.
        fn connect(&self, services: &ServicesObject) -> () = Ok(());
        /// Says what memory it will take under these limits, before any is taken.
        fn memory(&self, limits: &Limits) -> Memory = Ok(Memory::default());
        /// Takes its memory, builds its tables.
        fn prepare(&self, limits: &Limits) -> () = Ok(());
        /// Compares itself with the reference; a text says why it must not be used.
        fn self_check(&self) -> Maybe<TextBuf> = Ok(Maybe::RNone);
        /// Lines (`name = value`) that must be equal on all ranks.
        fn digest(&self) -> List<TextBuf> = Ok(List::new());
        /// Measures, if it has to.
        fn calibrate(&self) -> () = Ok(());
        /// All ranks are ready to serve.
        fn ready(&self) -> () = Ok(());
        /// Whether a request may set one of its knobs to a value that the schema allows; a text says why not.
        fn veto(&self, key: Text<'_>, value: &KnobValue) -> Maybe<TextBuf> = Ok(Maybe::RNone);
        /// Parses a knob of type `custom`: its canonical text, or an error for the user.
        fn parse(&self, key: Text<'_>, text: Text<'_>) -> TextBuf = Ok(text.get_str().into());
    }
}

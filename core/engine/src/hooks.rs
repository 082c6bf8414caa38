//! Every hook of every plugin, in list order, as the engine and the host use them.

use std::sync::Arc;

use plugfold_abi::boundary::{Interface, Mismatch, Offer};
use plugfold_abi::points::{
    DraftCutObject, DraftPolicyObject, DrafterObject, FieldsObject, LayoutLinkObject, LimitsLinkObject,
    ObserverObject, PlannerObject, PromptLinkObject, ReplyLinkObject, RequestLinkObject, RiderObject,
    SectionObject, SpansObject, StatePartObject, StoreObject, StreamLinkObject, TransportObject,
    WeightLinkObject, WordsObject,
};
use plugfold_abi::{OpError, PassObject, ProviderObject};

use crate::knobs::Knobs;

/// A hook with the plugin that brought it.
pub struct Hooked<T> {
    /// The plugin's id.
    pub owner: Arc<str>,
    /// Plugins that it names in `over` or `extends`: it may stand above them.
    pub over: Arc<[String]>,
    /// The hook.
    pub hook: Arc<T>,
}

impl<T> Clone for Hooked<T> {
    fn clone(&self) -> Self {
        Self { owner: self.owner.clone(), over: self.over.clone(), hook: self.hook.clone() }
    }
}

impl<T> Hooked<T> {
    /// Puts the plugin's id before a message.
    pub fn named(&self, error: &OpError) -> HookError {
        HookError { owner: self.owner.to_string(), error: error.clone() }
    }
    /// Calls the hook; an error names its plugin.
    ///
    /// # Errors
    /// What the hook failed with.
    pub fn call<R>(&self, call: impl FnOnce(&T) -> Result<R, OpError>) -> Result<R, HookError> {
        call(&self.hook).map_err(|e| self.named(&e))
    }
}

/// A hook that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("plugin {owner}: {error}")]
pub struct HookError {
    /// The plugin.
    pub owner: String,
    /// What it said.
    pub error: OpError,
}

/// An offer that this engine cannot use.
#[derive(Debug, thiserror::Error)]
pub enum OfferError {
    /// No such interface.
    #[error(
        "offers version {version} of interface `{interface}`, which this host does not have: it was built for another release"
    )]
    Unknown {
        /// Name.
        interface: String,
        /// Version.
        version: u32,
    },
    /// Another version or layout.
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
}

macro_rules! hooks {
    ($($(#[$doc:meta])* $field:ident: $object:ty,)*) => {
        /// All hooks, each kind in list order.
        #[derive(Clone, Default)]
        pub struct Hooks {
            $($(#[$doc])* pub $field: Vec<Hooked<$object>>,)*
            /// Request knobs of all plugins.
            pub knobs: Knobs,
        }

        impl Hooks {
            /// Takes an offered hook.
            ///
            /// # Errors
            /// An interface that is not known here, or is known otherwise.
            pub fn add(&mut self, owner: &str, over: &[String], offer: Offer) -> Result<(), OfferError> {
                let (owner, over): (Arc<str>, Arc<[String]>) = (owner.into(), over.into());
                match offer.interface() {
                    $(<$object>::NAME => {
                        let hook = Arc::new(offer.take::<$object>()?);
                        self.$field.push(Hooked { owner, over, hook });
                        Ok(())
                    })*
                    other => Err(OfferError::Unknown { interface: other.into(), version: offer.version() }),
                }
            }

            /// How many hooks of each kind there are: (interface, plugin) in order.
            pub fn list(&self) -> Vec<(&'static str, &str)> {
                let mut all = Vec::new();
                $(all.extend(self.$field.iter().map(|h| (<$object>::NAME, &*h.owner)));)*
                all
            }
        }
    };
}

hooks! {
    /// Providers of operations.
    providers: ProviderObject,
    /// Rewriters of programs.
    passes: PassObject,
    /// Links of `limits`.
    limits: LimitsLinkObject,
    /// Links of `cache.layout`.
    layouts: LayoutLinkObject,
    /// Shape words.
    words: WordsObject,
    /// Round-table fields.
    fields: FieldsObject,
    /// Planning policies.
    planners: PlannerObject,
    /// Cutters of pieces.
    spans: SpansObject,
    /// Drafters.
    drafters: DrafterObject,
    /// Links of the `draft` policy.
    policies: DraftPolicyObject,
    /// Links of `drafts`.
    cuts: DraftCutObject,
    /// Observers.
    observers: ObserverObject,
    /// Snapshot stores.
    stores: StoreObject,
    /// State parts.
    parts: StatePartObject,
    /// Plan sections.
    sections: SectionObject,
    /// Riders of the exchange.
    riders: RiderObject,
    /// Transports.
    transports: TransportObject,
    /// Links of `weight.source`.
    weights: WeightLinkObject,
    /// Links of `request`.
    requests: RequestLinkObject,
    /// Links of `prompt`.
    prompts: PromptLinkObject,
    /// Links of `stream`.
    streams: StreamLinkObject,
    /// Links of `reply`.
    replies: ReplyLinkObject,
}

impl Hooks {
    /// Takes a hook that is part of this program, under a plugin's id; for tests and built-in hooks.
    ///
    /// # Errors
    /// As [`Hooks::add`].
    pub fn add_object<I: Interface>(&mut self, owner: &str, object: I) -> Result<(), OfferError> {
        self.add(owner, &[], Offer::of(object))
    }
}

//! Every hook of every plugin, in list order, as the engine and the host use them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use plugfold_abi::boundary::{Interface, Mismatch, Offer};
use plugfold_abi::points::{
    CaptureObject, CommandObject, DraftCutObject, DraftPolicy, DraftPolicyObject, DrafterObject,
    ExecutorObject, FieldsObject, LayoutLinkObject, LimitsLinkObject, MapperObject, Observer, ObserverObject,
    PlanWaitObject, PlannerObject, PreparedStoreObject, PromptLinkObject, ReplyLinkObject, RequestLinkObject,
    RiderObject, RoundDriverObject, SectionObject, SpansObject, StatePartObject, StoreObject,
    StreamLinkObject, TransportObject, WeightBuilderObject, WeightLinkObject, WordsObject, interest,
};
use plugfold_abi::{ErrorKind, Maybe, OpError, PassObject, ProviderObject, Text, TextBuf};

use plugfold_kernels::device::DeviceError;

use crate::knobs::Knobs;
use crate::program::REFERENCE;
use crate::service::EngineError;

/// How often a hook was entered and left: what a watch over hooks looks at, so that a call costs two additions.
#[derive(Debug, Default)]
pub struct Calls {
    begun: AtomicU64,
    ended: AtomicU64,
    asleep: AtomicBool,
}

impl Calls {
    /// A call begins; it ends when this is dropped.
    pub fn enter(&self) -> Entered<'_> {
        self.begun.fetch_add(1, Ordering::Relaxed);
        Entered(self)
    }
    /// How many have begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Ordering::Relaxed)
    }
    /// How many have ended, where one runs that is not asleep.
    pub fn running(&self) -> Option<u64> {
        let ended = self.ended.load(Ordering::Relaxed);
        let runs = self.begun.load(Ordering::Relaxed) != ended && !self.asleep.load(Ordering::Relaxed);
        runs.then_some(ended)
    }
    /// Runs a sleep that the present call was promised: however long it takes, the hook does not hang.
    pub fn sleep<T>(&self, sleep: impl FnOnce() -> T) -> T {
        self.asleep.store(true, Ordering::Relaxed);
        let out = sleep();
        self.ended.fetch_add(1, Ordering::Relaxed);
        self.begun.fetch_add(1, Ordering::Relaxed);
        self.asleep.store(false, Ordering::Relaxed);
        out
    }
}

/// A call that runs.
pub struct Entered<'a>(&'a Calls);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::Relaxed);
    }
}

/// Whether a rank may be waiting for others: then a hook that has not returned may not be the one at fault.
#[derive(Debug, Default)]
pub struct Exchanging(AtomicBool);

impl Exchanging {
    /// An exchange begins; it ends when this is dropped.
    pub fn begin(&self) -> Exchange<'_> {
        self.0.store(true, Ordering::Relaxed);
        Exchange(self)
    }
    /// Whether one runs.
    pub fn runs(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// An exchange that runs.
pub struct Exchange<'a>(&'a Exchanging);

impl Drop for Exchange<'_> {
    fn drop(&mut self) {
        self.0.0.store(false, Ordering::Relaxed);
    }
}

/// A hook with the plugin that brought it.
pub struct Hooked<T> {
    /// The plugin's id.
    pub owner: Arc<str>,
    /// Plugins that it names in `over` or `extends`: it may stand above them.
    pub over: Arc<[String]>,
    /// The hook.
    pub hook: Arc<T>,
    /// Its calls.
    pub calls: Arc<Calls>,
}

impl<T> Clone for Hooked<T> {
    fn clone(&self) -> Self {
        let (owner, over) = (self.owner.clone(), self.over.clone());
        Self { owner, over, hook: self.hook.clone(), calls: self.calls.clone() }
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
        let _busy = self.calls.enter();
        call(&self.hook).map_err(|e| self.named(&e))
    }
}

/// A hook that failed, or the device while one was to be called.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{error}", plugin(owner))]
pub struct HookError {
    /// The plugin.
    pub owner: String,
    /// What it said.
    pub error: OpError,
}

fn plugin(owner: &str) -> String {
    if owner == REFERENCE { String::new() } else { format!("plugin {owner}: ") }
}

impl From<DeviceError> for HookError {
    fn from(error: DeviceError) -> Self {
        Self { owner: REFERENCE.into(), error: error.into() }
    }
}

/// The request is wrong where the plugin says so; otherwise the engine counts as failed for it. The plugin is named.
impl From<HookError> for EngineError {
    fn from(error: HookError) -> Self {
        match error.error.kind {
            ErrorKind::Invalid => Self::Invalid(error.to_string()),
            _ => Self::Failed(error.to_string()),
        }
    }
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
                        self.$field.push(Hooked { owner, over, hook, calls: Arc::default() });
                        Ok(())
                    })*
                    other => Err(OfferError::Unknown { interface: other.into(), version: offer.version() }),
                }
            }

            /// The calls of every hook, with its plugin and its kind.
            pub fn calls(&self) -> Vec<(Arc<str>, &'static str, Arc<Calls>)> {
                let mut all = Vec::new();
                $(all.extend(self.$field.iter().map(|h| (h.owner.clone(), <$object>::NAME, h.calls.clone())));)*
                all
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
    /// Maps of paged families.
    mappers: MapperObject,
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
    /// Executors.
    executors: ExecutorObject,
    /// Links of `capture`.
    captures: CaptureObject,
    /// Ways to wait.
    waits: PlanWaitObject,
    /// Round drivers.
    drivers: RoundDriverObject,
    /// Links of `weight.source`.
    weights: WeightLinkObject,
    /// Builders of weights.
    builders: WeightBuilderObject,
    /// Stores of prepared weights.
    prepared: PreparedStoreObject,
    /// Subcommands.
    commands: CommandObject,
    /// Links of `request`.
    requests: RequestLinkObject,
    /// Links of `prompt`.
    prompts: PromptLinkObject,
    /// Links of `stream`.
    streams: StreamLinkObject,
    /// Links of `reply`.
    replies: ReplyLinkObject,
}

/// Finds what is chosen by name among the hooks of one kind, whose names must be their own.
///
/// # Errors
/// Two of one name, or none of the one that is asked for; says what there are.
pub fn chosen<'h, T>(
    all: &'h [Hooked<T>],
    kind: &str,
    name: Option<&str>,
    of: impl Fn(&T) -> Result<TextBuf, OpError>,
) -> Result<Option<&'h Hooked<T>>, ChoiceError> {
    let mut names: Vec<String> = Vec::new();
    let mut found = None;
    for h in all {
        let own = h.call(&of)?.to_string();
        if names.contains(&own) {
            let (kind, owner) = (kind.to_owned(), h.owner.to_string());
            return Err(ChoiceError::Twice { kind, name: own, owner });
        }
        if Some(own.as_str()) == name {
            found = Some(h);
        }
        names.push(own);
    }
    match (name, found) {
        (Some(name), None) => {
            let there = if names.is_empty() { "none".into() } else { names.join(", ") };
            Err(ChoiceError::Missing { kind: kind.into(), name: name.into(), there })
        }
        _ => Ok(found),
    }
}

/// What is chosen by name cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ChoiceError {
    /// Two plugins bring one name.
    #[error("two plugins bring {kind} `{name}` (the second is {owner}): take one off the list")]
    Twice {
        /// What is chosen.
        kind: String,
        /// The name.
        name: String,
        /// Who brings it a second time.
        owner: String,
    },
    /// Nobody brings it.
    #[error("no loaded plugin brings the {kind} `{name}`; there are: {there}")]
    Missing {
        /// What is chosen.
        kind: String,
        /// The name.
        name: String,
        /// Names that there are.
        there: String,
    },
    /// A plugin that cannot say its name.
    #[error(transparent)]
    Hook(#[from] HookError),
}

impl Hooks {
    /// Takes a hook that is part of this program, under a plugin's id; for tests and built-in hooks.
    ///
    /// # Errors
    /// As [`Hooks::add`].
    pub fn add_object<I: Interface>(&mut self, owner: &str, object: I) -> Result<(), OfferError> {
        self.add(owner, &[], Offer::of(object))
    }

    /// Tells observers that the present thread has started, in a role. What they fail with is logged.
    pub fn thread(&self, role: &str) {
        for h in &self.observers {
            let wants = h.call(Observer::interests).is_ok_and(|wants| wants & interest::THREAD != 0);
            if wants && let Err(error) = h.call(|o| o.thread(Text::from(role))) {
                tracing::warn!("{error}");
            }
        }
    }

    /// The draft policy in force for what a request asks for; empty asks for the server's own. Without a policy plugin there
    /// are two: `auto`, which drafts nothing then, and `0`.
    ///
    /// # Errors
    /// What is wrong with it, for the client.
    pub fn policy(&self, asked: &str) -> Result<String, EngineError> {
        let mut forms: Vec<String> = Vec::new();
        for h in &self.policies {
            let known = h.call(|p| p.accepts(Text::from(asked))).map_err(|e| match e.error.kind {
                ErrorKind::Invalid => EngineError::Invalid(e.error.to_string()),
                _ => EngineError::Failed(e.to_string()),
            })?;
            if let Maybe::RSome(in_force) = known {
                return Ok(in_force.into());
            }
            let more = h.call(DraftPolicy::forms).map_err(|e| EngineError::Failed(e.to_string()))?;
            forms.extend(more.iter().map(ToString::to_string));
        }
        if asked.is_empty() {
            return Ok("auto".into());
        }
        if forms.is_empty() && ["auto", "0"].contains(&asked) {
            return Ok(asked.into());
        }
        let (valid, why) = if forms.is_empty() {
            ("auto, 0".to_owned(), " (no plugin with draft policies is loaded)")
        } else {
            (forms.join(", "), "")
        };
        Err(EngineError::Invalid(format!("{asked:?} is not a draft policy; valid are {valid}{why}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::points::{Choice, SequenceFacts};
    use plugfold_abi::{List, Slice};

    struct Three;
    impl DraftPolicy for Three {
        fn forms(&self) -> Result<List<TextBuf>, OpError> {
            Ok(List::from(vec!["3".into(), "xN".into()]))
        }
        fn accepts(&self, policy: Text<'_>) -> Result<Maybe<TextBuf>, OpError> {
            match policy.get_str() {
                "3" | "03" | "" => Ok(Maybe::RSome("3".into())),
                "x9" => Err(OpError::invalid("x9: at most 8")),
                "panic" => panic!("planted"),
                _ => Ok(Maybe::RNone),
            }
        }
        fn decide(&self, _: Slice<'_, SequenceFacts<'_>>, _: &mut List<Choice>) -> Result<(), OpError> {
            Ok(())
        }
    }

    #[test]
    fn policies_are_checked_by_the_links_of_the_chain() {
        let mut hooks = Hooks::default();
        let told = |hooks: &Hooks, policy| hooks.policy(policy).unwrap_err().to_string();
        for (asked, in_force) in [("", "auto"), ("auto", "auto"), ("0", "0")] {
            assert_eq!(hooks.policy(asked), Ok(in_force.to_owned()), "a bare engine");
        }
        assert_eq!(
            told(&hooks, "3"),
            "\"3\" is not a draft policy; valid are auto, 0 (no plugin with draft policies is loaded)"
        );
        hooks.add_object("three", DraftPolicyObject::new(Three)).unwrap();
        for asked in ["3", "03", ""] {
            assert_eq!(hooks.policy(asked), Ok("3".to_owned()));
        }
        assert_eq!(told(&hooks, "x9"), "x9: at most 8");
        assert_eq!(told(&hooks, "auto"), "\"auto\" is not a draft policy; valid are 3, xN");
        let failed = hooks.policy("panic").unwrap_err();
        assert!(
            matches!(&failed, EngineError::Failed(m) if m.contains("plugin three") && m.contains("planted"))
        );
    }
}

//! Loading one library. From here on its code runs.

use std::path::Path;

use plugfold_abi::boundary::{Give, Interface as _, Offer, Opaque, Root};
use plugfold_abi::life::{Plugin as _, PluginObject, Setup};
use plugfold_abi::points::HostObject;
use plugfold_abi::{ErrorKind, Knob, KnobValue, Knobs, Slice, Text};
use plugfold_engine::hooks::Hooks;
use plugfold_manifest::Manifest;

use crate::knobs::own_text;

/// Why a library is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What happened, and the mend where there is one.
    pub why: String,
    /// Whether the library itself is at fault. Otherwise it may start with other settings.
    pub broken: bool,
}

impl Refusal {
    fn broken(why: impl Into<String>) -> Self {
        Self { why: why.into(), broken: true }
    }
}

/// Takes one offer over for the caller of a root function.
unsafe extern "C" fn collect(context: *mut Opaque, offer: Offer) {
    // SAFETY: `open` passes the address of its list, which outlives the call.
    let offers = unsafe { &mut *context.cast::<Vec<Offer>>() };
    offers.push(offer);
}

/// Loads a library and takes its plugin from its root function, which is called `symbol`. The library stays for the rest of the process.
///
/// # Errors
/// A file that the system does not load, no root function, a root that fails, an offer that does not fit.
pub fn open(path: &Path, symbol: &str) -> Result<PluginObject, Refusal> {
    // SAFETY: loading runs the library's constructors. Its note says that it is a plugin of this boundary, and it has
    // been loaded in a process of its own before.
    let library = unsafe { libloading::Library::new(path) }
        .map_err(|e| Refusal::broken(format!("the system does not load it: {}", chain(&e))))?;
    // SAFETY: the root function has this signature in every library of this major version.
    let root = unsafe { library.get::<Root>(symbol) }
        .map(|symbol| *symbol)
        .map_err(|_| Refusal::broken(format!("it exports no {symbol}: use plugfold_abi::export!")))?;
    // Nothing says when the last pointer into a library is gone.
    std::mem::forget(library);
    let mut offers: Vec<Offer> = Vec::new();
    let give: Give = collect;
    // SAFETY: `collect` is given what it expects, and the list lives until the root returns.
    let code = unsafe { root((&raw mut offers).cast(), give) };
    let found = offers.into_iter().find(|offer| offer.interface() == PluginObject::NAME);
    match (code, found) {
        (0, Some(offer)) => offer.take::<PluginObject>().map_err(|e| Refusal::broken(e.to_string())),
        (0, None) => Err(Refusal::broken("its root offers no plugin")),
        (code, _) => Err(Refusal::broken(format!("its root failed (code {code}): its constructor panicked"))),
    }
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(error) = next {
        text = format!("{text}: {error}");
        next = error.source();
    }
    text
}

/// Compares what a plugin says of itself with what its note says.
///
/// # Errors
/// They differ, or it does not say.
pub fn describe(plugin: &PluginObject, note: &str) -> Result<(), Refusal> {
    let said = plugin.describe().map_err(|e| Refusal::broken(format!("it cannot describe itself: {e}")))?;
    if said.as_str() == note {
        return Ok(());
    }
    let pairs = note.lines().zip(said.as_str().lines());
    let differ = pairs.into_iter().find(|(note, said)| note != said);
    let differ =
        differ.map_or_else(String::new, |(note, said)| format!(": the file says `{note}`, it says `{said}`"));
    Err(Refusal::broken(format!("its manifest lies{differ}: export the text that describe gives")))
}

/// Lets a plugin put the knobs that it parses itself into their canonical texts.
///
/// # Errors
/// A text that it does not take, with what it must be; a plugin that panics.
pub fn canonical(plugin: &PluginObject, manifest: &Manifest, knobs: &mut [Knob]) -> Result<(), Refusal> {
    for knob in knobs {
        let Some(schema) = manifest.knob(&knob.key) else { continue };
        let Some(text) = own_text(schema, &knob.value) else { continue };
        let parsed = plugin.parse(knob.key.as_str().into(), text.into()).map_err(|e| {
            let form = schema.allowed(&|_: &str| None);
            Refusal {
                why: format!("its knob {} is {text:?}; it must be {form}: {e}", knob.key),
                broken: e.kind == ErrorKind::Panicked,
            }
        })?;
        knob.value = KnobValue::Text(parsed);
    }
    Ok(())
}

/// Configures a plugin and takes its hooks.
///
/// # Errors
/// It refuses its settings, panics, or registers something else than its manifest says.
pub fn configure(
    plugin: &PluginObject,
    manifest: &Manifest,
    knobs: &[Knob],
    host: &HostObject,
    device: &str,
    hooks: &mut Hooks,
) -> Result<(), Refusal> {
    let setup = Setup { knobs: Knobs { all: Slice::from(knobs) }, host, device_class: Text::from(device) };
    let offers = plugin.configure(&setup).map_err(|e| Refusal {
        why: format!("it cannot be configured: {e}"),
        broken: e.kind == ErrorKind::Panicked,
    })?;
    let mut above = manifest.over.clone();
    above.extend(manifest.extends.iter().cloned());
    let mut interfaces = Vec::with_capacity(offers.len());
    for offer in offers {
        interfaces.push(offer.interface());
        let added = hooks.add(&manifest.id, &above, offer).map_err(|e| e.to_string());
        added.map_err(|e| {
            let whose = if e.starts_with("offers") { "it" } else { "its" };
            Refusal::broken(format!("{whose} {e}"))
        })?;
    }
    let mut operations = Vec::new();
    for provider in hooks.providers.iter().filter(|h| *h.owner == *manifest.id) {
        let op = provider.call(plugfold_abi::Provider::op);
        operations.push(
            op.map_err(|e| Refusal::broken(format!("its provider cannot say its operation: {e}")))?
                .to_string(),
        );
    }
    let off_by = manifest.off_by.as_ref().and_then(|key| knobs.iter().find(|knob| knob.key.as_str() == *key));
    let off = off_by.is_some_and(|knob| is_off(&knob.value));
    super::declared::compare(manifest, &interfaces, &operations, off)
        .map_err(|lie| Refusal::broken(format!("its manifest lies: {lie}")))
}

/// Whether a value is the one that means "not used".
fn is_off(value: &KnobValue) -> bool {
    match value {
        KnobValue::Bool(on) => !on,
        KnobValue::Int(number) => *number == 0,
        KnobValue::Float(bits) => f64::from_bits(*bits) == 0.0,
        KnobValue::Text(text) => matches!(text.as_str(), "" | "0" | "off" | "none"),
        KnobValue::List(items) => items.is_empty(),
    }
}

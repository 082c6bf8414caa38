//! From a list to plugins that serve: chosen, proven, loaded, and taken through their life in step with the other ranks.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use plugfold_abi::boundary::Shared;
use plugfold_abi::life::{Plugin as _, PluginObject};
use plugfold_abi::points::{Command, CommandObject, HostObject, Limits, ServicesObject};
use plugfold_abi::{ErrorKind, Knob, KnobValue, OpError, Provider, Slice, TextBuf};
use plugfold_engine::hooks::{Hooked, Hooks};
use plugfold_engine::ranks::{SettingsDigest, World};
use plugfold_manifest::{KnobType, Loaded, Manifest};

use super::agree::Desk;
use super::order::{Member, order};
use super::probe::Probe;
use super::services::{Figures, HostFor, ServicesOf};
use super::settle::{Settled, knobs};
use super::{Library, Listed, PluginError, Search, load};
use crate::knobs::{KnobOwners, RequestKnob};

/// A plugin of the list with its file. Nothing of it has run.
#[derive(Clone, Debug)]
pub struct Chosen {
    /// Where it is listed.
    pub listed: Listed,
    /// Its file, note and manifest.
    pub library: Library,
}

/// The plugins of a list, sorted.
///
/// # Errors
/// The first plugin that is not there or cannot be used, or what keeps them from being loaded together.
pub fn choose(list: &[Listed], search: &Search, device: &str) -> Result<Vec<Chosen>, PluginError> {
    let libraries = search.find(list)?;
    let members: Vec<Member<'_>> = list
        .iter()
        .zip(&libraries)
        .map(|(listed, library)| Member { listed, manifest: &library.manifest })
        .collect();
    let places = order(&members, device)?;
    let chosen: Vec<Chosen> = places
        .into_iter()
        .map(|place| Chosen { listed: list[place].clone(), library: libraries[place].clone() })
        .collect();
    together(&chosen)?;
    Ok(chosen)
}

/// The manifests of chosen plugins as one.
///
/// # Errors
/// Two that bring one name, or knobs that do not go together.
pub fn together(chosen: &[Chosen]) -> Result<Loaded, PluginError> {
    let manifests: Vec<Manifest> = chosen.iter().map(|c| c.library.manifest.clone()).collect();
    Loaded::new(manifests).map_err(|e| {
        let at = |c: &&Chosen| e.problems.iter().any(|p| p.contains(&c.library.manifest.id));
        let places: Vec<String> =
            chosen.iter().filter(at).map(|c| format!("{} ({})", c.listed.name, c.listed.place)).collect();
        let places =
            if places.is_empty() { "plugins".to_owned() } else { format!("plugins {}", places.join(", ")) };
        PluginError::general(format!("{places}: {}", e.problems.join("; ")))
    })
}

/// Proves that chosen plugins can be loaded.
///
/// # Errors
/// The first that cannot, with its name and reason; no process, no cache.
pub fn prove(chosen: &[Chosen], settled: &Settled, probe: &Probe) -> Result<(), PluginError> {
    let tasks: Vec<(&Library, Vec<Knob>)> =
        chosen.iter().zip(&settled.rows).map(|(c, rows)| (&c.library, knobs(rows))).collect();
    for (chosen, refused) in chosen.iter().zip(probe.all(&tasks)?) {
        if let Some(why) = refused {
            return Err(unusable(chosen, why));
        }
    }
    Ok(())
}

fn unusable(chosen: &Chosen, why: impl std::fmt::Display) -> PluginError {
    let path = chosen.library.path.display();
    PluginError::new(
        &chosen.listed,
        format!("cannot be used; mend it or take it off the list: {why} ({path})"),
    )
}

/// A loaded plugin.
struct Live {
    chosen: Chosen,
    object: PluginObject,
    /// Services of the plugins before it are looked up here while it connects.
    host: &'static HostObject,
}

/// The plugins of this process.
pub struct Plugins {
    live: Vec<Live>,
    hooks: Hooks,
    desk: Arc<Desk>,
    figures: Arc<Figures>,
    notes: Vec<String>,
    /// The checkpoint's folder, once it is known.
    model: Arc<OnceLock<PathBuf>>,
}

impl Plugins {
    /// Loads the chosen plugins in step with the other ranks: describe, configure, publish, connect.
    ///
    /// # Errors
    /// A plugin of this rank or another that refuses, or lists that differ.
    pub fn load(
        chosen: Vec<Chosen>,
        settled: &Settled,
        world: &World,
        device: &str,
        cache: &Path,
    ) -> Result<Self, PluginError> {
        same_everywhere(&chosen, settled, world)?;
        let desk = Arc::new(Desk::of(world));
        let mut plugins = Self {
            live: Vec::with_capacity(chosen.len()),
            hooks: Hooks { knobs: settled.request(), ..Hooks::default() },
            desk,
            figures: Arc::default(),
            notes: Vec::new(),
            model: Arc::default(),
        };
        let opened = plugins.open(chosen, cache);
        plugins.step("load", opened)?;
        let described = plugins.each(|live| {
            load::describe(&live.object, &live.chosen.library.note.manifest).map_err(|refusal| refusal.why)
        });
        plugins.step("describe", described)?;
        let configured = plugins.configure(settled, device);
        plugins.step("configure", configured)?;
        let services = plugins.publish();
        let services = plugins.step("publish", services)?;
        let connected = plugins.connect(&services);
        plugins.step("connect", connected)?;
        Ok(plugins)
    }

    fn open(&mut self, chosen: Vec<Chosen>, cache: &Path) -> Result<(), PluginError> {
        for chosen in chosen {
            let opened = load::open(&chosen.library.path, &chosen.library.note.root_symbol());
            let object = opened.map_err(|refusal| unusable(&chosen, refusal.why))?;
            let host = HostFor {
                plugin: chosen.library.manifest.id.as_str().into(),
                figures: self.figures.clone(),
                cache: cache.to_owned(),
                desk: self.desk.clone(),
                model: self.model.clone(),
            };
            // Plugins are promised that the host lives as long as the process.
            let host: &'static HostObject = Box::leak(Box::new(HostObject::new(host)));
            self.live.push(Live { chosen, object, host });
        }
        Ok(())
    }

    fn configure(&mut self, settled: &Settled, device: &str) -> Result<(), PluginError> {
        let mut values = self.hooks.knobs.defaults.to_vec();
        // Custom knobs as their owners have put them, for those that extend them: owners come first.
        let mut put: BTreeMap<String, KnobValue> = BTreeMap::new();
        for (live, rows) in self.live.iter().zip(&settled.rows) {
            let manifest = &live.chosen.library.manifest;
            let refuse = |refusal: load::Refusal| unusable(&live.chosen, refusal.why);
            let mut knobs = knobs(rows);
            for knob in &mut knobs {
                if let Some(value) = put.get(knob.key.as_str()) {
                    knob.value = value.clone();
                }
            }
            load::canonical(&live.object, manifest, &mut knobs).map_err(refuse)?;
            for knob in &knobs {
                if manifest.knob(&knob.key).is_some_and(|schema| schema.type_ == KnobType::Custom) {
                    put.insert(format!("{}.{}", manifest.id, knob.key), knob.value.clone());
                    if let Some(value) = knob.id.into_option().and_then(|id| values.get_mut(id as usize)) {
                        *value = knob.value.clone();
                    }
                }
            }
            load::configure(&live.object, manifest, &knobs, live.host, device, &mut self.hooks)
                .map_err(refuse)?;
        }
        self.hooks.knobs.defaults = values.into();
        Ok(())
    }

    /// Every service with the place of its plugin.
    fn publish(&self) -> Result<Vec<(usize, Shared)>, PluginError> {
        let mut services: Vec<(usize, Shared)> = Vec::new();
        for (place, live) in self.live.iter().enumerate() {
            let refuse = |why: String| unusable(&live.chosen, why);
            let offers = live.object.publish().map_err(|e| refuse(format!("it cannot publish: {e}")))?;
            for offer in offers {
                let name = offer.interface();
                if !live.chosen.library.manifest.offers.iter().any(|o| o.service == name) {
                    return Err(refuse(format!(
                        "its manifest lies: it publishes the service {name:?}, which its offers do not name"
                    )));
                }
                if let Some((other, _)) = services.iter().find(|(_, s)| s.interface() == name) {
                    let other = &self.live[*other].chosen.listed;
                    return Err(refuse(format!(
                        "it publishes the service {name:?}, which {} ({}) publishes already",
                        other.name, other.place
                    )));
                }
                services.push((place, offer.share()));
            }
        }
        Ok(services)
    }

    fn connect(&self, services: &[(usize, Shared)]) -> Result<(), PluginError> {
        let mut place = 0;
        self.each(|live| {
            let before = services.iter().filter(|(owner, _)| *owner < place).map(|(_, s)| *s).collect();
            place += 1;
            live.object
                .connect(&ServicesObject::new(ServicesOf(before)))
                .map_err(|e| format!("it cannot connect: {e}"))
        })
    }

    /// A plugin's subcommand of this name.
    fn command(&self, name: &str) -> Result<&Hooked<CommandObject>, PluginError> {
        for hooked in &self.hooks.commands {
            let found = hooked.call(Command::name).map_err(|e| PluginError::general(e.to_string()))?;
            if found.as_str() == name {
                return Ok(hooked);
            }
        }
        Err(PluginError::general(format!("no plugin on the list has registered the command {name:?}")))
    }

    /// Gives a subcommand its arguments, before a model is loaded. Says whether it wants one.
    ///
    /// # Errors
    /// No such command, arguments that it does not take, or a refusal of another rank.
    pub fn begin_command(&self, name: &str, arguments: &[TextBuf]) -> Result<bool, PluginError> {
        let begun = self.command(name).and_then(|command| {
            command.call(|c| c.begin(Slice::from(arguments))).map_err(|e| PluginError::general(e.to_string()))
        });
        self.step(name, begun)
    }

    /// Runs a subcommand; gives what is printed.
    ///
    /// # Errors
    /// What it fails with.
    pub fn run_command(&self, name: &str, arguments: &[TextBuf]) -> Result<String, PluginError> {
        let ran = self.command(name)?.call(|c| c.run(Slice::from(arguments)));
        ran.map(Into::into).map_err(|e| PluginError::general(e.to_string()))
    }

    /// Tells plugins the folder of the checkpoint that is served; the first one told stays.
    pub fn of_model(&self, folder: &Path) {
        let _ = self.model.set(folder.to_owned());
    }

    /// Takes memory and proves arithmetic, under the limits in force. Claims that fail their own check are turned off on
    /// all ranks, and named in [`Plugins::notes`].
    ///
    /// # Errors
    /// A plugin of this rank or another that refuses, or wants more memory than is free.
    pub fn prepare(&mut self, limits: &Limits, free: Option<u64>) -> Result<(), PluginError> {
        let memory = self.memory(limits, free);
        self.step("memory", memory)?;
        let prepared =
            self.each(|live| live.object.prepare(limits).map_err(|e| format!("it cannot prepare: {e}")));
        self.step("prepare", prepared)?;
        let checked = self.each(|live| match live.object.self_check() {
            Ok(said) => said.into_option().map_or(Ok(()), |why| Err(format!("its self-check fails: {why}"))),
            Err(e) => Err(format!("its self-check fails: {e}")),
        });
        self.step("self-check", checked)?;
        self.check_claims()
    }

    fn memory(&self, limits: &Limits, free: Option<u64>) -> Result<(), PluginError> {
        let mut sum = 0u64;
        self.each(|live| {
            let wants = live.object.memory(limits).map_err(|e| format!("it cannot tell its memory: {e}"))?;
            sum = sum.saturating_add(wants.host);
            match free {
                Some(free) if sum > free => Err(format!(
                    "it wants {} bytes of memory, which with the plugins before it makes {sum} where {free} are free: \
                     lower its knobs or the limits",
                    wants.host
                )),
                _ => Ok(()),
            }
        })
    }

    /// Asks every provider to compare itself with the reference; what fails on one rank is off on all.
    fn check_claims(&mut self) -> Result<(), PluginError> {
        let failed: Vec<(usize, String)> = self
            .hooks
            .providers
            .iter()
            .enumerate()
            .filter_map(|(i, h)| match h.call(Provider::self_check) {
                Ok(said) => said.into_option().map(|why| (i, why.to_string())),
                Err(e) => Some((i, e.error.to_string())),
            })
            .collect();
        let mine = serde_json::to_vec(&failed).map_err(|e| e.to_string());
        let all = self.desk.step("check of claims", mine).map_err(PluginError::general)?;
        let mut off: Vec<(usize, String)> = Vec::new();
        for (rank, bytes) in all.iter().enumerate() {
            let failed: Vec<(usize, String)> = serde_json::from_slice(bytes)
                .map_err(|e| PluginError::general(format!("rank {rank} runs another build ({e})")))?;
            for (place, why) in failed {
                if !off.iter().any(|(known, _)| *known == place) {
                    off.push((place, if all.len() > 1 { format!("on rank {rank}: {why}") } else { why }));
                }
            }
        }
        off.sort_unstable();
        for (place, why) in off.iter().rev() {
            if *place >= self.hooks.providers.len() {
                return Err(PluginError::general(
                    "the ranks have different claims: start all from one build",
                ));
            }
            let hooked = self.hooks.providers.remove(*place);
            let op = hooked.call(Provider::op).map_or_else(|e| e.to_string(), |op| op.to_string());
            self.notes.push(format!(
                "plugin {}: its claim on {op} is off on all ranks, its check failed {why}",
                hooked.owner
            ));
        }
        self.notes.reverse();
        Ok(())
    }

    /// Lines of the plugins' own that must be equal on all ranks.
    ///
    /// # Errors
    /// A plugin that cannot tell.
    pub fn lines(&self) -> Result<Vec<(String, String)>, PluginError> {
        let mut lines = Vec::new();
        let told = self.each(|live| {
            let id = &live.chosen.library.manifest.id;
            for line in live.object.digest().map_err(|e| format!("it cannot tell its digest: {e}"))? {
                let (name, value) = line.as_str().split_once('=').unwrap_or((line.as_str(), ""));
                lines.push((format!("plugin {id}: {}", name.trim()), value.trim().to_owned()));
            }
            Ok(())
        });
        self.step("digest", told)?;
        Ok(lines)
    }

    /// Last steps, once the model is loaded on all ranks: calibrate, ready. Ranks cannot agree on anything afterwards.
    ///
    /// # Errors
    /// A plugin of this rank or another that refuses.
    pub fn ready(&self) -> Result<(), PluginError> {
        let done = self.each(|live| live.object.calibrate().map_err(|e| format!("it cannot calibrate: {e}")));
        self.step("calibrate", done)?;
        let done = self.each(|live| live.object.ready().map_err(|e| format!("it is not ready: {e}")));
        self.step("ready", done)?;
        self.desk.close();
        Ok(())
    }

    /// Runs one call of each plugin, in order; the first that refuses ends it.
    fn each(&self, mut call: impl FnMut(&Live) -> Result<(), String>) -> Result<(), PluginError> {
        self.live.iter().try_for_each(|live| call(live).map_err(|why| unusable(&live.chosen, why)))
    }

    /// Tells the other ranks how a step went, and hears how it went there.
    fn step<T>(&self, step: &str, done: Result<T, PluginError>) -> Result<T, PluginError> {
        let mine = done.as_ref().map(|_| Vec::new()).map_err(ToString::to_string);
        match self.desk.step(step, mine) {
            Err(why) if done.is_ok() => Err(PluginError::general(why)),
            _ => done,
        }
    }

    /// All hooks, for the engine.
    pub fn hooks(&self) -> &Hooks {
        &self.hooks
    }

    /// What users should see: claims that were turned off.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Figures that plugins count.
    pub fn figures(&self) -> &Arc<Figures> {
        &self.figures
    }

    /// Manifests of the loaded plugins, in order.
    pub fn manifests(&self) -> impl Iterator<Item = &Manifest> {
        self.live.iter().map(|live| &live.chosen.library.manifest)
    }

    fn owner(&self, id: &str) -> Option<&Live> {
        self.live.iter().find(|live| live.chosen.library.manifest.id == id)
    }
}

impl KnobOwners for Plugins {
    fn veto(&self, knob: &RequestKnob, value: &KnobValue) -> Result<Option<String>, OpError> {
        let Some(live) = self.owner(&knob.owner) else { return Ok(None) };
        let said = live.object.veto(knob.schema.key.as_str().into(), value);
        Ok(said.map_err(|e| named(&knob.owner, &e))?.into_option().map(|why| why.to_string()))
    }

    fn parse(&self, knob: &RequestKnob, text: &str) -> Result<Result<String, String>, OpError> {
        let Some(live) = self.owner(&knob.owner) else { return Ok(Ok(text.to_owned())) };
        match live.object.parse(knob.schema.key.as_str().into(), text.into()) {
            Ok(text) => Ok(Ok(text.to_string())),
            Err(e) if e.kind == ErrorKind::Panicked => Err(named(&knob.owner, &e)),
            Err(e) => Ok(Err(e.to_string())),
        }
    }
}

/// An error with the plugin's id before it.
fn named(id: &str, error: &OpError) -> OpError {
    OpError { message: format!("plugin {id}: {error}").into(), ..error.clone() }
}

/// Compares plugins, their order, builds and settings over all ranks before any of them runs.
fn same_everywhere(chosen: &[Chosen], settled: &Settled, world: &World) -> Result<(), PluginError> {
    let mut digest = SettingsDigest::default();
    for (i, Chosen { library, .. }) in chosen.iter().enumerate() {
        let (name, version) = (library.manifest.label(), &library.manifest.version);
        digest.add(format!("plugin {}", i + 1), &format!("{name} {version}, build {}", library.note.build));
    }
    for (name, value) in &settled.lines {
        digest.add(format!("knob {name}"), value);
    }
    digest.compare(world).map_err(|e| PluginError::general(e.to_string()))
}

/// Bytes of memory that could be taken now, where the system tells.
pub fn free_memory() -> Option<u64> {
    let text = std::fs::read_to_string(PathBuf::from("/proc/meminfo")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
}

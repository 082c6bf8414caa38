//! From flags to settings and plugins: what a start was asked for, before anything of it runs.

use std::path::PathBuf;

use plugfold::config::{Device, Settings};
use plugfold::device;
use plugfold::knobs::{Asked, Listed, Resolved, Sources};
use plugfold::plugins::life::{Chosen, choose, prove, together};
use plugfold::plugins::probe::Probe;
use plugfold::plugins::settle::Settled;
use plugfold::plugins::{Search, same_plugin};
use plugfold_abi::TextBuf;
use plugfold_manifest::{Manifest, Need};
use serde::{Deserialize, Serialize};

use super::ModelArgs;
use super::ab::Side;

/// The profile whose plugins safe mode keeps.
const MINIMAL: &str = "minimal";

/// Everything that a start was asked for.
pub struct Setup {
    /// Settings and knobs.
    pub resolved: Resolved,
    /// The plugins, found and sorted.
    pub chosen: Vec<Chosen>,
    sources: Sources,
    folders: Vec<PathBuf>,
    /// A subcommand of a plugin that is to run, if any.
    pub ordered: Option<Ordered>,
}

/// A subcommand of a plugin, with its arguments.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Ordered {
    /// Its name.
    pub name: String,
    /// Its arguments.
    pub words: Vec<String>,
}

impl Ordered {
    /// Its arguments as they cross the boundary.
    pub fn texts(&self) -> Vec<TextBuf> {
        self.words.iter().map(|w| w.as_str().into()).collect()
    }
}

/// Plugins and their settings, as every rank gets them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Company {
    /// The list.
    pub list: Vec<Listed>,
    /// Where they are.
    pub folders: Vec<PathBuf>,
    /// Their settings.
    pub settled: Settled,
    /// A subcommand that one of them is to run.
    #[serde(default)]
    pub ordered: Option<Ordered>,
}

impl Setup {
    /// Reads all sources, finds the plugins that they list, and resolves their knobs.
    ///
    /// # Errors
    /// Sources that are wrong, plugins that are not there or do not go together.
    pub fn read(args: &ModelArgs, flags: serde_json::Map<String, serde_json::Value>) -> anyhow::Result<Self> {
        let (sources, search) = sources(args, flags)?;
        let setup = Self::of(sources, &search)?;
        setup.resolved.report.iter().for_each(|line| tracing::warn!("{line}"));
        Ok(setup)
    }

    /// As [`Setup::read`], without any plugin: what is listed is not looked for, and its knobs are not used.
    ///
    /// # Errors
    /// Sources that are wrong.
    pub fn bare(args: &ModelArgs, flags: serde_json::Map<String, serde_json::Value>) -> anyhow::Result<Self> {
        let (mut sources, search) = sources(args, flags)?;
        let all = sources.plugins.clone();
        sources.leave_out(&all);
        Self::of(sources, &search)
    }

    fn of(sources: Sources, search: &Search) -> anyhow::Result<Self> {
        let chosen = choose(&sources.plugins, search, &class(&sources)?)?;
        together(&chosen)?;
        let resolved = resolve(&sources, &chosen)?;
        Ok(Self { resolved, chosen, sources, folders: search.folders().to_vec(), ordered: None })
    }

    /// The same start without a plugin, without what was said for it, and without the plugins that need it.
    ///
    /// # Errors
    /// What remains does not go together.
    pub fn without(&self, id: &str) -> anyhow::Result<Self> {
        let mut gone = vec![id.to_owned()];
        loop {
            let stays = |c: &&Chosen| !gone.contains(&c.library.manifest.id);
            let offered = |service: &str| {
                let offers = |c: &Chosen| c.library.manifest.offers.iter().any(|o| o.service == service);
                self.chosen.iter().filter(stays).any(offers)
            };
            let needs = |c: &&Chosen| {
                let manifest = &c.library.manifest;
                stays(c)
                    && (manifest.requires.iter().any(|r| gone.iter().any(|g| same_plugin(r, g)))
                        || manifest.wants.iter().any(|w| w.need == Need::Required && !offered(&w.service)))
            };
            let Some(next) = self.chosen.iter().find(needs).map(|c| c.library.manifest.id.clone()) else {
                break;
            };
            gone.push(next);
        }
        let off: Vec<Listed> = self
            .chosen
            .iter()
            .filter(|c| gone.contains(&c.library.manifest.id))
            .map(|c| c.listed.clone())
            .collect();
        let mut sources = self.sources.clone();
        sources.leave_out(&off);
        Self::of(sources, &Search::new(&self.folders))
    }

    /// As [`Setup::read`], without the plugins that are not there or cannot be used; says what is wrong with each.
    ///
    /// # Errors
    /// Sources that are wrong by themselves.
    pub fn read_what_is_there(
        args: &ModelArgs,
        flags: serde_json::Map<String, serde_json::Value>,
    ) -> anyhow::Result<(Resolved, Vec<String>)> {
        let (mut sources, search) = sources(args, flags)?;
        let mut problems = Vec::new();
        let (mut missing, mut found) = (Vec::new(), Vec::new());
        for listed in &sources.plugins {
            match search.find(std::slice::from_ref(listed)) {
                Ok(libraries) => {
                    found.extend(
                        libraries.into_iter().map(|library| Chosen { listed: listed.clone(), library }),
                    );
                }
                Err(error) => {
                    problems.push(error.to_string());
                    missing.push(listed.clone());
                }
            }
        }
        sources.leave_out(&missing);
        // What needs a plugin that is missing cannot be sorted; its settings can be shown.
        let chosen = class(&sources).and_then(|class| Ok(choose(&sources.plugins, &search, &class)?));
        let chosen = chosen.unwrap_or_else(|error| {
            problems.push(format!("{error:#}"));
            found
        });
        let resolved = resolve(&sources, &chosen)?;
        resolved.report.iter().for_each(|line| tracing::warn!("{line}"));
        Ok((resolved, problems))
    }

    /// The program's own settings.
    pub fn settings(&self) -> &Settings {
        &self.resolved.settings
    }

    /// Proves that the plugins can be loaded, in a process of their own, and packs what every rank needs to know.
    ///
    /// # Errors
    /// One that cannot.
    pub fn company(&self) -> anyhow::Result<Company> {
        if self.chosen.is_empty() {
            return Ok(Company::default());
        }
        let ids = self.chosen.iter().map(|c| c.library.manifest.id.as_str());
        let settled = Settled::of(&self.resolved, ids);
        prove(&self.chosen, &settled, &Probe::new()?)?;
        let (list, folders) = (self.resolved.plugins.clone(), self.folders.clone());
        Ok(Company { list, folders, settled, ordered: self.ordered.clone() })
    }
}

/// The class of the device that the sources ask for; what they say is checked when they are resolved.
fn class(sources: &Sources) -> anyhow::Result<String> {
    let cuda = sources.said("device").is_some_and(|kind| kind == Device::Cuda.to_string());
    device::class(if cuda { Device::Cuda } else { Device::Cpu })
}

/// What was said about settings, with the final list of plugins, and where to look for them.
fn sources(
    args: &ModelArgs,
    flags: serde_json::Map<String, serde_json::Value>,
) -> anyhow::Result<(Sources, Search)> {
    let profile = match (&args.profile, &args.model) {
        (Some(profile), _) => Some(profile.as_str()),
        (None, Some(_)) => None,
        (None, None) if std::env::var_os("PLUGFOLD_MODEL").is_some() => None,
        (None, None) => Some("quickstart"),
    };
    let mut sources = Sources::read(&Asked::here(profile, flags, &args.sets))?;
    let mut further: Vec<Listed> =
        args.further.iter().map(|name| Listed { name: name.clone(), place: "--plugin".into() }).collect();
    if let Some(side) = args.side {
        // A comparison is about these plugins whether or not the profile lists them.
        let meant = |one: &Listed, all: &[Listed]| all.iter().any(|l| same_plugin(&l.name, &one.name));
        if side == Side::Without {
            let mut off: Vec<Listed> =
                sources.plugins.iter().filter(|l| meant(l, &further)).cloned().collect();
            off.append(&mut further);
            sources.leave_out(&off);
        } else {
            further.retain(|l| !meant(l, &sources.plugins));
        }
    }
    sources.plugins.extend(further);
    let folders: Vec<PathBuf> = args.plugin_path.iter().chain(&sources.plugin_path).cloned().collect();
    if args.safe_mode {
        let minimal = Sources::read(&Asked { profile: Some(MINIMAL), ..Asked::default() })?.plugins;
        let keep = |listed: &Listed| minimal.iter().any(|m| same_plugin(&m.name, &listed.name));
        let off: Vec<Listed> = sources.plugins.iter().filter(|l| !keep(l)).cloned().collect();
        sources.leave_out(&off);
        let names: Vec<&str> = off.iter().map(|l| l.name.as_str()).collect();
        let names = if names.is_empty() { "any plugins".to_owned() } else { names.join(", ") };
        super::tell(&format_args!("safe mode: without {names}"));
    }
    let search = Search::new(&folders);
    Ok((sources, search))
}

/// Resolves all knobs.
fn resolve(sources: &Sources, chosen: &[Chosen]) -> anyhow::Result<Resolved> {
    let manifests: Vec<Manifest> = chosen.iter().map(|c| c.library.manifest.clone()).collect();
    Ok(Resolved::new(sources, manifests)?)
}

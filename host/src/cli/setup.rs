//! From flags to settings and plugins: what a start was asked for, before anything of it runs.

use std::path::PathBuf;

use plugfold::config::Settings;
use plugfold::knobs::{Asked, Listed, Resolved, Sources};
use plugfold::plugins::life::{Chosen, choose, prove, together};
use plugfold::plugins::probe::Probe;
use plugfold::plugins::settle::Settled;
use plugfold::plugins::{Search, same_plugin};
use plugfold_manifest::Manifest;
use serde::{Deserialize, Serialize};

use super::ModelArgs;
use super::ab::Side;
use super::model::DEVICE;

/// The profile whose plugins safe mode keeps.
const MINIMAL: &str = "minimal";

/// Everything that a start was asked for.
pub struct Setup {
    /// Settings and knobs.
    pub resolved: Resolved,
    /// The plugins, found and sorted.
    pub chosen: Vec<Chosen>,
    folders: Vec<PathBuf>,
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
}

impl Setup {
    /// Reads all sources, finds the plugins that they list, and resolves their knobs.
    ///
    /// # Errors
    /// Sources that are wrong, plugins that are not there or do not go together.
    pub fn read(args: &ModelArgs, flags: serde_json::Map<String, serde_json::Value>) -> anyhow::Result<Self> {
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
        let chosen = choose(&sources.plugins, &search, DEVICE)?;
        together(&chosen)?;
        let manifests: Vec<Manifest> = chosen.iter().map(|c| c.library.manifest.clone()).collect();
        let resolved = Resolved::new(&sources, manifests)?;
        for line in &resolved.report {
            tracing::warn!("{line}");
        }
        Ok(Self { resolved, chosen, folders: search.folders().to_vec() })
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
        Ok(Company { list: self.resolved.plugins.clone(), folders: self.folders.clone(), settled })
    }
}

//! `plugfold exact`: the promises of the engine, tried on a model with the plugins of a profile.

use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use clap::Args;
use plugfold::config::Device;
use plugfold::device;
use plugfold::exact::plants::PLANTS;
use plugfold::exact::{Company, GATES, Gate, Load, Plant, Setup as Trial, Silent, Verdict, run, starts};
use plugfold::plugins::cache_folder;
use plugfold::plugins::life::{Plugins, free_memory};
use plugfold_engine::config::ModelConfig;
use plugfold_engine::rank::{Options, raised};
use plugfold_engine::ranks::World;
use plugfold_engine::split::Split;
use plugfold_manifest::{ByName, Class};
use serde_json::json;

use super::ModelArgs;
use super::model;
use super::setup::Setup;

/// Tokens beyond the dense limit that the cases need.
const BEYOND: usize = 96;

/// Try what the engine promises: drafted == serial, batched == alone, resumed == fresh, and more.
#[derive(Args)]
pub struct Exact {
    #[command(flatten)]
    model: ModelArgs,
    /// Only this gate; may be given more than once.
    #[arg(long, value_name = "NAME")]
    gate: Vec<String>,
    /// Plant a fault, to see that a gate notices; `list` names them all.
    #[arg(long, value_name = "FAULT")]
    plant: Option<String>,
}

fn gates(names: &[String]) -> anyhow::Result<Vec<&'static Gate>> {
    let known = || GATES.iter().map(|g| g.name).collect::<Vec<_>>().join(", ");
    let find = |name: &String| {
        let found = GATES.iter().find(|g| g.name == name);
        found.with_context(|| format!("there is no gate `{name}`; there are {}", known()))
    };
    if names.is_empty() { Ok(GATES.iter().collect()) } else { names.iter().map(find).collect() }
}

/// Loads a rank's plugins as serving does.
pub(super) fn loader(setup: &Setup) -> anyhow::Result<Load> {
    let company = setup.company()?;
    let chosen = setup.chosen.clone();
    let cache = if chosen.is_empty() { std::path::PathBuf::new() } else { cache_folder()? };
    let class = device::class(setup.settings().device)?;
    let load = move |world: &World, options: &Options| -> anyhow::Result<Company> {
        let mut plugins = Plugins::load(chosen.clone(), &company.settled, world, &class, &cache)?;
        plugins.of_model(&options.model);
        plugins.prepare(&raised(options, plugins.hooks())?, free_memory())?;
        let (hooks, lines) = (plugins.hooks().clone(), plugins.lines()?);
        Ok(Company { hooks, lines, keep: Box::new(plugins) })
    };
    Ok(Arc::new(move |world: &World, options: &Options| load(world, options).map_err(|e| format!("{e:#}"))))
}

/// The plugins that promise to change no reply, each with a way to load the others without it.
fn silent(setup: &Setup) -> anyhow::Result<Vec<Silent>> {
    let mut all = Vec::new();
    for chosen in &setup.chosen {
        let manifest = &chosen.library.manifest;
        if manifest.class() < Class::NewArithmetic {
            // What was said for the others may be possible only with it.
            let without = match setup.without(&manifest.id) {
                Ok(without) => without,
                Err(error) => {
                    super::tell(&format_args!(
                        "same-bits: not tried without {}: {error:#}",
                        manifest.label()
                    ));
                    continue;
                }
            };
            let (name, class) = (manifest.label(), manifest.class().to_string());
            let brings = |kind: &str, chosen: &Option<String>| {
                manifest.by_name.iter().any(|b: &ByName| b.kind == kind && Some(&b.name) == chosen.as_ref())
            };
            let transport = brings("transport", &setup.settings().transport);
            let executor = brings("executor", &setup.settings().executor);
            all.push(Silent { name, class, without: loader(&without)?, transport, executor });
        }
    }
    Ok(all)
}

impl Exact {
    /// Runs the gates; fails when one is broken, or when a planted fault goes unnoticed.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        if self.plant.as_deref() == Some("list") {
            for plant in PLANTS {
                println!("{:20} {} (caught by {})", plant.name, plant.what, plant.caught_by.join(", "));
            }
            return Ok(ExitCode::SUCCESS);
        }
        let plant = match &self.plant {
            None => None,
            Some(name) => {
                let found = Plant::named(name);
                Some(found.with_context(|| format!("there is no fault `{name}`: --plant list names them"))?)
            }
        };
        let setup = self.model.setup(json!({}))?;
        let settings = setup.settings();
        model::threads(settings.threads, settings.ranks)?;
        let mut options = model::options(settings)?;
        let config = ModelConfig::from_dir(&options.model)?;
        // Told once, not by every gate.
        Split::new(0, settings.ranks, &config)?;
        let limit = config.index.topk + config.index.pool;
        options.context = Some(config.context.min(limit + BEYOND));
        if plant.is_some_and(|p| p.ranks > settings.ranks) {
            bail!("this fault needs ranks: give --ranks 2");
        }
        let gates = gates(&self.gate)?;
        let on_and_off = gates.iter().any(|g| g.name == "same-bits");
        let silent = if on_and_off { silent(&setup)? } else { Vec::new() };
        // Opened once, whatever is loaded on them.
        let devices = (0..settings.ranks).map(|rank| device::open(settings.device, rank));
        let devices = devices.collect::<Result<Vec<_>, _>>()?;
        if plant.is_some() && settings.device != Device::Cpu {
            bail!("faults are planted in the host's memory: leave out --device {}", settings.device);
        }
        let load = loader(&setup)?;
        let trial = Trial { options, ranks: settings.ranks, devices, load, silent, plant };
        starts(&trial).map_err(anyhow::Error::msg).context("there is nothing to try")?;
        let mut broken = Vec::new();
        for gate in gates {
            let verdict = run(gate, &trial);
            println!("{:10} {:45} {verdict}", gate.name, gate.promise);
            if let Verdict::Broken(_) = verdict {
                broken.push(gate.name);
            }
        }
        match plant {
            None if broken.is_empty() => Ok(ExitCode::SUCCESS),
            None => Ok(ExitCode::FAILURE),
            Some(plant) if plant.caught_by.iter().any(|g| broken.contains(g)) => {
                println!("the planted fault `{}` was noticed", plant.name);
                Ok(ExitCode::SUCCESS)
            }
            Some(plant) => {
                let should = plant.caught_by.join(" or ");
                println!("the planted fault `{}` went unnoticed: {should} should have seen it", plant.name);
                Ok(ExitCode::FAILURE)
            }
        }
    }
}

//! Subcommands that plugins bring.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Parser;
use plugfold::plugins::cache_folder;
use plugfold::plugins::life::Plugins;
use plugfold_engine::ranks::World;
use serde_json::json;

use super::ModelArgs;
use super::model;
use super::setup::{Ordered, Setup};

/// What may follow a subcommand of a plugin.
#[derive(Parser)]
#[command(no_binary_name = true, disable_help_flag = true)]
struct Given {
    #[command(flatten)]
    model: ModelArgs,
    /// The rest of its name, and its own arguments.
    words: Vec<String>,
}

/// Runs a subcommand that is none of the program's own.
pub fn run(words: &[OsString]) -> anyhow::Result<ExitCode> {
    let first = words.first().and_then(|w| w.to_str()).unwrap_or_default().to_owned();
    let given = Given::try_parse_from(&words[1..])?;
    let mut setup = given.model.setup(json!({}))?;
    let second = given.words.first().map(|word| format!("{first} {word}"));
    let find = |name: &str| {
        let mut all = setup.chosen.iter();
        all.find(|c| c.library.manifest.commands.iter().any(|command| command == name))
    };
    let (name, rest) = match (&second, find(&first)) {
        (Some(two), _) if find(two).is_some() => (two.clone(), &given.words[1..]),
        (_, Some(_)) => (first, &given.words[..]),
        _ => {
            let known: Vec<&str> =
                setup.chosen.iter().flat_map(|c| &c.library.manifest.commands).map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            bail!(
                "{first:?} is no command: see plugfold --help; plugins on the list bring {known} (another plugin is put on \
                 it with --plugin ID or --profile NAME)"
            )
        }
    };
    let order = Ordered { name, words: rest.to_vec() };
    setup.ordered = Some(order.clone());
    if with_model(&setup, &order)? {
        let model = model::open(&setup)?;
        let told = model.others.command(&order);
        model.rank.world.goodbye();
        drop(model.rank);
        model.others.finish();
        print!("{}", told?);
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs a command that needs no model, here and now. Says whether it wants one instead.
fn with_model(setup: &Setup, order: &Ordered) -> anyhow::Result<bool> {
    let company = setup.company()?;
    let class = plugfold::device::class(setup.settings().device)?;
    let plugins =
        Plugins::load(setup.chosen.clone(), &company.settled, &World::single(), &class, &cache_folder()?)?;
    let words = order.texts();
    if plugins.begin_command(&order.name, &words)? {
        return Ok(true);
    }
    let told = plugins.run_command(&order.name, &words).with_context(|| order.name.clone())?;
    print!("{told}");
    Ok(false)
}

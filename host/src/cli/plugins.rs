//! `plugfold plugins`: all that can be known of plugins without serving, even where some are broken.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use plugfold::plugins::life::Chosen;
use plugfold::plugins::probe::Probe;
use plugfold::plugins::settle::{self, Settled};
use plugfold::plugins::{Library, Listed, Search, docs, library, new};
use plugfold_abi::Phase;
use serde_json::json;

use super::{ModelArgs, model, write_whole};

/// What can be known of plugins.
#[derive(Subcommand)]
pub enum Plugins {
    /// All plugins of the search path.
    List(Listing),
    /// What one plugin claims, needs, brings and can be set to.
    Inspect(Inspect),
    /// Load plugins in a process of their own and say which cannot be used.
    Check(Check),
    /// Order, passes, and who runs each operation.
    Resolve(Resolve),
    /// Write a new plugin into plugins/.
    New(New),
    /// Write docs/plugins/ and docs/OPS.md from the sources.
    Docs(Docs),
}

impl Plugins {
    /// Runs the subcommand.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::List(args) => args.run()?,
            Self::Inspect(args) => args.run()?,
            Self::Check(args) => return args.run(),
            Self::Resolve(args) => args.run()?,
            Self::New(args) => args.run()?,
            Self::Docs(args) => args.run()?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

/// Where plugins are looked for.
#[derive(Args, Default)]
struct SearchPath {
    /// A further folder with plugins, looked through first. May be given several times.
    #[arg(long = "plugin-path", value_name = "DIR")]
    folders: Vec<PathBuf>,
}

impl SearchPath {
    fn search(&self) -> Search {
        Search::new(&self.folders)
    }

    /// All files with what could be read of them; compiler plugins that cargo puts beside are none of them.
    fn all(&self) -> anyhow::Result<Vec<(library::Found, Result<Library, String>)>> {
        let files = self.search().files()?;
        let read = |found: library::Found| {
            let library = Library::read(&found);
            (library.is_ok() || !library::is_compiler_plugin(&found.path)).then_some((found, library))
        };
        Ok(files.into_iter().filter_map(read).collect())
    }

    /// The one plugin of an id or name.
    fn one(&self, name: &str) -> anyhow::Result<Library> {
        let listed = Listed { name: name.to_owned(), place: "command line".into() };
        let mut found = self.search().find(std::slice::from_ref(&listed))?;
        found.pop().with_context(|| format!("there is no plugin {name}"))
    }
}

/// Arguments of `plugins list`.
#[derive(Args)]
pub struct Listing {
    #[command(flatten)]
    path: SearchPath,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

impl Listing {
    fn run(self) -> anyhow::Result<()> {
        let all = self.path.all()?;
        if self.json {
            let each = all.iter().map(|(found, library)| match library {
                Ok(l) => json!({
                    "name": found.name, "id": l.manifest.id, "title": l.manifest.title, "path": found.path,
                    "version": l.manifest.version, "class": l.manifest.class().to_string(), "build": l.note.build,
                    "sha256": l.hash,
                }),
                Err(why) => json!({"name": found.name, "path": found.path, "broken": why}),
            });
            println!("{}", serde_json::to_string_pretty(&each.collect::<Vec<_>>())?);
            return Ok(());
        }
        if all.is_empty() {
            let folders: Vec<String> =
                self.path.search().folders().iter().map(|f| f.display().to_string()).collect();
            println!("no plugins in {}", folders.join(", "));
        }
        let width = all.iter().map(|(found, _)| found.name.len()).max().unwrap_or(0);
        for (found, library) in &all {
            match library {
                Ok(l) => {
                    let class = l.manifest.class().to_string();
                    println!("{:width$}  {class:14}  {}", found.name, l.manifest.title);
                }
                Err(why) => {
                    println!("{:width$}  {:14}  {}: {why}", found.name, "broken", found.path.display());
                }
            }
        }
        Ok(())
    }
}

/// Arguments of `plugins inspect`.
#[derive(Args)]
pub struct Inspect {
    /// Id or name.
    plugin: String,
    #[command(flatten)]
    path: SearchPath,
}

impl Inspect {
    fn run(self) -> anyhow::Result<()> {
        let library = self.path.one(&self.plugin)?;
        print!("{}", docs::page(&library.manifest));
        println!("\n## File\n");
        println!(
            "- path: {}\n- build: {}\n- sha256: {}",
            library.path.display(),
            library.note.build,
            library.hash
        );
        println!("- built for {}, panics {}", library.note.target, library.note.panic);
        Ok(())
    }
}

/// Arguments of `plugins check`.
#[derive(Args)]
pub struct Check {
    /// Ids or names; all plugins of the search path if none is given.
    plugins: Vec<String>,
    /// Do not believe what was found out before.
    #[arg(long)]
    again: bool,
    /// Seconds that one step of one plugin may take.
    #[arg(long, value_name = "S", default_value_t = 10.0)]
    patience: f32,
    #[command(flatten)]
    path: SearchPath,
}

impl Check {
    fn run(self) -> anyhow::Result<ExitCode> {
        if !(self.patience > 0.0 && self.patience < 3600.0) {
            bail!("--patience {}: give seconds above 0 and below 3600", self.patience);
        }
        let all = if self.plugins.is_empty() {
            self.path.all()?
        } else {
            let one = |name: &String| {
                let library = self.path.one(name)?;
                Ok((library::Found { name: library.name.clone(), path: library.path.clone() }, Ok(library)))
            };
            self.plugins.iter().map(one).collect::<anyhow::Result<Vec<_>>>()?
        };
        let mut lines: BTreeMap<usize, String> = BTreeMap::new();
        let mut tasks = Vec::new();
        let mut places = Vec::new();
        for (place, (_, library)) in all.iter().enumerate() {
            let settled = library.as_ref().map_err(Clone::clone);
            let settled = settled.and_then(|l| Settled::alone(&l.manifest).map_err(|e| e.to_string()));
            match (library, settled) {
                (Ok(library), Ok(settled)) => {
                    tasks.push((
                        library,
                        settled.rows.first().map(|rows| settle::knobs(rows)).unwrap_or_default(),
                    ));
                    places.push(place);
                }
                (_, settled) => {
                    lines.extend(settled.err().map(|why| (place, why)));
                }
            }
        }
        let mut probe = Probe::new()?;
        probe.again = self.again;
        probe.patience = std::time::Duration::from_secs_f32(self.patience);
        for (place, refused) in places.into_iter().zip(probe.all(&tasks)?) {
            lines.extend(refused.map(|why| (place, why)));
        }
        for (place, (found, _)) in all.iter().enumerate() {
            match lines.get(&place) {
                None => println!("{}: can be used", found.name),
                Some(why) => println!("{}: broken: {why} ({})", found.name, found.path.display()),
            }
        }
        Ok(if lines.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Arguments of `plugins resolve`.
#[derive(Args)]
pub struct Resolve {
    #[command(flatten)]
    model: ModelArgs,
    /// Print order, passes and claims only, without a model.
    #[arg(long)]
    no_model: bool,
}

impl Resolve {
    fn run(self) -> anyhow::Result<()> {
        let mut setup = self.model.setup(json!({}))?;
        println!("order:");
        for (i, c) in setup.chosen.iter().enumerate() {
            println!("  {}. {} ({})", i + 1, c.library.name, c.listed.place);
        }
        if setup.chosen.is_empty() {
            println!("  no plugins");
        }
        if self.no_model {
            claims(&setup.chosen);
            return Ok(());
        }
        setup.resolved.settings.ranks = 1;
        let mut opened = model::open(&setup)?;
        let core = &mut opened.rank.core;
        println!("passes:");
        let passes = core.passes();
        for (owner, pass) in &passes {
            println!("  {pass} ({owner})");
        }
        if passes.is_empty() {
            println!("  none");
        }
        let phases = [(Phase::Window, "window"), (Phase::Draft, "draft"), (Phase::Prefill, "prefill")];
        for (phase, name) in phases {
            println!("{name}:");
            for line in table(core, phase)? {
                println!("  {line}");
            }
        }
        opened.rank.world.goodbye();
        drop(opened.rank);
        opened.others.finish();
        Ok(())
    }
}

fn claims(chosen: &[Chosen]) {
    println!("claims:");
    for c in chosen {
        for claim in &c.library.manifest.claims {
            let phases: Vec<String> = claim.phases.iter().map(ToString::to_string).collect();
            println!("  {} {} {} ({})", claim.op, phases.join(" "), claim.bits, c.library.name);
        }
    }
}

/// For every operation and kind of layer: the bits and who runs it.
fn table(core: &mut plugfold_engine::core::Core, phase: Phase) -> anyhow::Result<Vec<String>> {
    let described = core.described(phase)?;
    let mut groups: BTreeMap<(String, String, String, bool), BTreeMap<String, u32>> = BTreeMap::new();
    let mut order = Vec::new();
    for step in described {
        let kind = core.layer_kind(step.layer);
        let key = (step.op, step.bits, step.owner, step.fused);
        if !order.contains(&key) {
            order.push(key.clone());
        }
        *groups.entry(key).or_default().entry(kind).or_default() += 1;
    }
    let lines = order.iter().map(|key| {
        let (op, bits, owner, fused) = key;
        let kinds = groups.get(key).into_iter().flatten();
        let kinds: Vec<String> = kinds.map(|(kind, calls)| format!("{kind} x{calls}")).collect();
        let fused = if *fused { ", fused" } else { "" };
        let mut line = String::new();
        let _ = write!(line, "{op:18} {bits:16} {owner:24} {}{fused}", kinds.join(", "));
        line
    });
    Ok(lines.collect())
}

/// Arguments of `plugins new`.
#[derive(Args)]
pub struct New {
    /// Name in small letters, as my-idea or 9001-my-idea.
    name: String,
}

impl New {
    fn run(self) -> anyhow::Result<()> {
        let here = std::env::current_dir().context("the current folder")?;
        let written = new::write(&new::workspace(&here)?, &self.name)?;
        let name = &written.name;
        println!("wrote {}", written.folder.display());
        println!("next: cargo test -p plugfold-{name} && cargo build -p plugfold-{name}");
        println!("then: cargo run -- plugins check {name}");
        Ok(())
    }
}

/// Arguments of `plugins docs`.
#[derive(Args)]
pub struct Docs {
    /// Folder to write into; without it, docs/ of the sources.
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Docs {
    fn run(self) -> anyhow::Result<()> {
        let root = new::workspace(&std::env::current_dir().context("the current folder")?)?;
        let out = self.out.unwrap_or_else(|| root.join("docs"));
        let pages = docs::pages(&docs::manifests(&root)?);
        let folder = out.join("plugins");
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        for (place, text) in &pages {
            put(&out.join(place), text)?;
        }
        println!("wrote {} pages into {}", pages.len(), out.display());
        Ok(())
    }
}

fn put(path: &Path, text: &str) -> anyhow::Result<()> {
    write_whole(path, |partial| Ok(std::fs::write(partial, text)?))
}

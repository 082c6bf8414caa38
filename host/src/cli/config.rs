//! `plugfold config`: what the settings are, and profiles from shell files.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use plugfold::knobs::{EnvFile, Import, catalogue};

use super::setup::Setup;
use super::{ModelArgs, write_whole};

/// Settings and profiles.
#[derive(Subcommand)]
pub enum Config {
    /// Print every setting and knob with its value, and where that comes from.
    Show(Show),
    /// Write a profile from a shell-style file of KEY=value lines (as prod.env).
    Import(ImportArgs),
}

/// Arguments of `config show`.
#[derive(Args)]
pub struct Show {
    #[command(flatten)]
    model: ModelArgs,
}

/// Arguments of `config import`.
#[derive(Args)]
pub struct ImportArgs {
    /// The shell-style file.
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// Where to write the profile; without it, it is printed.
    #[arg(long, short, value_name = "PATH")]
    output: Option<PathBuf>,
    /// Folder with plugin libraries, besides those of this program; may be given more than once.
    #[arg(long, value_name = "DIR")]
    plugin_path: Vec<PathBuf>,
    /// List all plugins that the file switches on, also those that are not here.
    #[arg(long)]
    all: bool,
}

impl Config {
    /// Does what the command says.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Config::Show(show) => {
                let flags = show.model.flags(serde_json::json!({}))?;
                let (resolved, problems) = Setup::read_what_is_there(&show.model, flags)?;
                print!("{}", resolved.show());
                if problems.is_empty() {
                    return Ok(());
                }
                anyhow::bail!("shown without what is wrong: {}", problems.join("; "))
            }
            Config::Import(import) => import.run(),
        }
    }
}

impl ImportArgs {
    fn run(self) -> anyhow::Result<()> {
        let name = self.file.display().to_string();
        let text = std::fs::read_to_string(&self.file).with_context(|| format!("cannot read {name}"))?;
        let file = EnvFile::parse(&text).with_context(|| name.clone())?;
        let libraries = libraries(&self.plugin_path);
        let here = |id: &str| {
            let library = format!("plugfold_{}", catalogue().label(id).replace('-', "_"));
            self.all || libraries.contains(&library)
        };
        let import = Import::new(&file, &name, &here)?;
        match &self.output {
            Some(path) => write_whole(path, |partial| Ok(std::fs::write(partial, &import.text)?))?,
            None => print!("{}", import.text),
        }
        eprintln!("{} plugins listed", import.plugins.len());
        if !import.missing.is_empty() {
            eprintln!("not listed, because they are not here: {}", import.missing.join(", "));
        }
        Ok(())
    }
}

/// Names of the plugin libraries in these folders and beside this program.
fn libraries(folders: &[PathBuf]) -> BTreeSet<String> {
    let program = std::env::current_exe().unwrap_or_default();
    let beside = program.parent().unwrap_or(Path::new("."));
    let own = [beside.join("plugins"), beside.to_path_buf()];
    let entries = folders.iter().chain(&own).filter_map(|folder| std::fs::read_dir(folder).ok()).flatten();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let library = |name: String| {
        let stem = name.strip_prefix(std::env::consts::DLL_PREFIX)?;
        Some(stem.strip_suffix(std::env::consts::DLL_SUFFIX)?.to_owned())
    };
    names.filter_map(library).collect()
}

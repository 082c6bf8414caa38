//! `plugfold results`: the adoption table, from what `plugfold ab` wrote and the plugins' manifests.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use plugfold::plugins::{new, same_plugin};
use plugfold_manifest::Manifest;

use super::ab::Report;
use super::write_whole;

/// Where the table stands in a file that has more than it.
const BEGIN: &str = "<!-- plugfold results table: begin -->";
/// Where it ends.
const END: &str = "<!-- plugfold results table: end -->";

/// What was measured.
#[derive(Subcommand)]
pub enum Results {
    /// Plugins with their class, their gain here and the profiles that list them.
    Table(Table),
}

impl Results {
    /// Runs the subcommand.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Table(args) => args.run(),
        }
    }
}

/// Arguments of `results table`.
#[derive(Args)]
pub struct Table {
    /// Put the table into this file, between its two marks; a new file gets both. Without it: print.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

impl Table {
    fn run(self) -> anyhow::Result<()> {
        let here = std::env::current_dir().context("the current folder")?;
        let root = new::workspace(&here)?;
        let reports = reports(&root.join("results/ab"))?;
        let text = table(&manifests(&root.join("plugins"))?, &profiles(&root.join("config"))?, &reports);
        let Some(path) = self.out else {
            print!("{text}");
            return Ok(());
        };
        let before = if path.exists() {
            std::fs::read_to_string(&path).with_context(|| path.display().to_string())?
        } else {
            format!("{BEGIN}\n{END}\n")
        };
        let whole = placed(&before, &text).with_context(|| {
            format!("{} has no place for the table: put {BEGIN} and {END} into it", path.display())
        })?;
        write_whole(&path, |partial| Ok(std::fs::write(partial, whole)?))
    }
}

/// A text with the table between its marks.
fn placed(text: &str, table: &str) -> Option<String> {
    let (head, rest) = text.split_once(BEGIN)?;
    let (_, tail) = rest.split_once(END)?;
    Some(format!("{head}{BEGIN}\n{table}{END}{tail}"))
}

fn entries(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        std::fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect()
    };
    let mut paths = read().with_context(|| folder.display().to_string())?;
    paths.sort();
    Ok(paths)
}

fn manifests(folder: &Path) -> anyhow::Result<Vec<Manifest>> {
    let files =
        entries(folder)?.into_iter().map(|path| path.join("plugin.toml")).filter(|path| path.is_file());
    let read = |path: PathBuf| {
        let place = path.display().to_string();
        let text = std::fs::read_to_string(&path).with_context(|| place.clone())?;
        Ok(Manifest::parse(&text, &place)?)
    };
    files.map(read).collect()
}

/// Names of the profiles, with the plugins that each lists.
fn profiles(folder: &Path) -> anyhow::Result<BTreeMap<String, Vec<String>>> {
    let mut all = BTreeMap::new();
    for path in entries(folder)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "toml"))
    {
        let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let table: toml::Table = text.parse().with_context(|| path.display().to_string())?;
        let listed = table.get("plugins").and_then(toml::Value::as_array).into_iter().flatten();
        let listed = listed.filter_map(toml::Value::as_str).map(str::to_owned).collect();
        let name = path.file_stem().map(|name| name.to_string_lossy().into_owned());
        all.insert(name.unwrap_or_default(), listed);
    }
    Ok(all)
}

/// All comparisons, with their files; of a folder that is not there, none.
fn reports(folder: &Path) -> anyhow::Result<Vec<(PathBuf, Report)>> {
    if !folder.is_dir() {
        return Ok(Vec::new());
    }
    let mut all = Vec::new();
    for of_plugin in entries(folder)?.into_iter().filter(|path| path.is_dir()) {
        for path in
            entries(&of_plugin)?.into_iter().filter(|path| path.extension().is_some_and(|end| end == "json"))
        {
            let text = std::fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let report = serde_json::from_str(&text)
                .with_context(|| format!("{} is no result of plugfold ab", path.display()))?;
            all.push((path, report));
        }
    }
    Ok(all)
}

/// The table: id, class, gain here, status.
fn table(
    manifests: &[Manifest],
    profiles: &BTreeMap<String, Vec<String>>,
    reports: &[(PathBuf, Report)],
) -> String {
    let mut text = String::from("| plugin | class | gain here | status |\n| --- | --- | --- | --- |\n");
    for manifest in manifests {
        let about = reports.iter().filter(|(_, report)| report.ids.contains(&manifest.id));
        let gains: Vec<String> = about
            .clone()
            .map(|(path, report)| {
                let with: Vec<&str> =
                    report.ids.iter().filter(|id| **id != manifest.id).map(String::as_str).collect();
                let with = if with.is_empty() { String::new() } else { format!(" with {}", with.join(", ")) };
                let folder = path.parent().and_then(Path::file_name).unwrap_or_default().to_string_lossy();
                let file = path.file_name().unwrap_or_default().to_string_lossy();
                format!("[{}](ab/{folder}/{file}){with}: {}; {}", report.date, report.gain(), report.work)
            })
            .collect();
        let gain = if gains.is_empty() { "not measured".to_owned() } else { gains.join("<br>") };
        let listing: Vec<&str> = profiles
            .iter()
            .filter(|(_, listed)| listed.iter().any(|name| same_plugin(name, &manifest.label())))
            .map(|(name, _)| name.as_str())
            .collect();
        let mut status = match listing[..] {
            [] => "on request".to_owned(),
            _ => format!("in {}", listing.join(", ")),
        };
        let measured: Vec<&Report> = about.map(|(_, report)| report).collect();
        if measured.iter().any(|report| report.broken()) {
            status += "; broken: replies differ";
        } else if !measured.is_empty() && measured.iter().all(|report| report.differing() == 0) {
            status += "; replies equal";
        }
        let _ = writeln!(text, "| {} | {} | {gain} | {status} |", manifest.label(), manifest.class());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::ab::of_made_up;

    #[test]
    fn a_row_has_class_gain_and_status() {
        let text = "id = \"0003\"\nname = \"prefill-rows\"\ntitle = \"Rows\"\nversion = \"0.1.0\"\npoints = [\"plan.spans\"]\n";
        let manifest = Manifest::parse(text, "here").unwrap_or_else(|e| panic!("{e}"));
        let profiles = BTreeMap::from([("prod".to_owned(), vec!["0003-prefill-rows".to_owned()])]);
        let none = table(std::slice::from_ref(&manifest), &profiles, &[]);
        assert!(none.contains("| not measured | in prod |"), "{none}");
        let path = PathBuf::from("results/ab/0003/2026-11-30.json");
        let fine = (path.clone(), of_made_up(&["0003"], &[["a", "a"]], true));
        let row = table(std::slice::from_ref(&manifest), &BTreeMap::new(), &[fine]);
        assert!(row.contains("](ab/0003/2026-11-30.json): prefill x1.00"), "{row}");
        assert!(row.contains("| on request; replies equal |"), "{row}");
        let broken = (path, of_made_up(&["0003"], &[["a", "b"]], true));
        assert!(table(&[manifest], &profiles, &[broken]).contains("broken: replies differ"));
    }

    #[test]
    fn a_file_keeps_what_stands_around_the_table() {
        let before = format!("# Results\n\n{BEGIN}\nold\n{END}\nafter\n");
        assert_eq!(placed(&before, "new\n"), Some(format!("# Results\n\n{BEGIN}\nnew\n{END}\nafter\n")));
        assert_eq!(placed("no marks", "new\n"), None);
    }
}

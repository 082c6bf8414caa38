//! Finding libraries, and reading what they say of themselves without loading them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use object::{Object as _, ObjectSection as _, ObjectSymbol as _};
use plugfold_abi::boundary::{MAJOR, NOTE_SECTION, Note};
use plugfold_manifest::Manifest;
use sha2::{Digest as _, Sha256};

use super::{Listed, PluginError};

/// What the file of a plugin is called: `libplugfold_0003_prefill_rows.so` is `0003-prefill-rows`.
const PREFIX: &str = "libplugfold_";
const SUFFIX: &str = ".so";
/// Largest file that is read; a plugin with symbols has a few tens of MiB.
const MOST_BYTES: u64 = 1 << 30;
/// How alike two names must be for one to be proposed for the other.
const ALIKE: f64 = 0.75;
/// Longest list of names that a message carries.
const SHORT_LIST: usize = 12;

/// A file that is called like a plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Folder name of the plugin, from the file's name.
    pub name: String,
    /// The file.
    pub path: PathBuf,
}

/// A plugin as its file describes it. Nothing of it has run.
#[derive(Clone, Debug)]
pub struct Library {
    /// Folder name, as `0003-prefill-rows`.
    pub name: String,
    /// The file.
    pub path: PathBuf,
    /// SHA-256 of the file.
    pub hash: String,
    /// Its note.
    pub note: Note,
    /// The note's manifest.
    pub manifest: Manifest,
}

/// Folders with plugins, in the order in which they are looked through.
#[derive(Clone, Debug, Default)]
pub struct Search {
    folders: Vec<PathBuf>,
}

impl Search {
    /// The configured folders, then `plugins` beside the program, then the program's own folder.
    pub fn new(configured: &[PathBuf]) -> Self {
        let mut folders: Vec<PathBuf> = configured.to_vec();
        if let Some(beside) = std::env::current_exe().ok().as_deref().and_then(Path::parent) {
            folders.push(beside.join("plugins"));
            folders.push(beside.to_owned());
        }
        Self::only(folders)
    }

    /// These folders and no others.
    pub fn only(folders: Vec<PathBuf>) -> Self {
        let mut search = Self::default();
        let mut seen = Vec::new();
        for folder in folders {
            let whole = folder.canonicalize().unwrap_or_else(|_| folder.clone());
            if !seen.contains(&whole) {
                seen.push(whole);
                search.folders.push(folder);
            }
        }
        search
    }

    /// The folders.
    pub fn folders(&self) -> &[PathBuf] {
        &self.folders
    }

    /// All files that are called like plugins, by folder, then by name. Folders that are not there hold none.
    ///
    /// # Errors
    /// A folder that is there and cannot be read.
    pub fn files(&self) -> Result<Vec<Found>, PluginError> {
        let mut all = Vec::new();
        for folder in &self.folders {
            let entries = match std::fs::read_dir(folder) {
                Ok(entries) => entries,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => {
                    let told = format!("the plugin folder {} cannot be read: {error}", folder.display());
                    return Err(PluginError::general(told));
                }
            };
            let mut here: Vec<Found> = entries
                .filter_map(|entry| {
                    let path = entry.ok()?.path();
                    Some(Found { name: name_of(&path)?, path })
                })
                .collect();
            here.sort_by(|a, b| a.name.cmp(&b.name));
            all.extend(here);
        }
        Ok(all)
    }

    /// Every library of a list, in its order.
    ///
    /// # Errors
    /// The first that is not there, is there twice, is listed twice or cannot be used.
    pub fn find(&self, list: &[Listed]) -> Result<Vec<Library>, PluginError> {
        if list.is_empty() {
            return Ok(Vec::new());
        }
        let files = self.files()?;
        let mut chosen: Vec<(&Listed, &Found)> = Vec::with_capacity(list.len());
        for listed in list {
            let found = self.one(listed, &files)?;
            if let Some((first, _)) = chosen.iter().find(|(_, f)| f.path == found.path) {
                return Err(PluginError::new(
                    listed,
                    format!(
                        "is listed twice, here and as {} ({}), both {}: remove one",
                        first.name,
                        first.place,
                        found.path.display()
                    ),
                ));
            }
            chosen.push((listed, found));
        }
        // Reading and hashing are most of the work of a start with many plugins.
        let read = read_all(&chosen.iter().map(|(_, found)| *found).collect::<Vec<_>>());
        let mut libraries: Vec<Library> = Vec::with_capacity(read.len());
        for ((listed, found), library) in chosen.iter().zip(read) {
            let library = library.map_err(|why| {
                PluginError::new(listed, format!("cannot be used: {}: {why}", found.path.display()))
            })?;
            if let Some(first) = libraries.iter().find(|l| l.manifest.id == library.manifest.id) {
                return Err(PluginError::new(listed, both(&library.manifest.id, &first.path, &library.path)));
            }
            libraries.push(library);
        }
        Ok(libraries)
    }

    fn one<'f>(&self, listed: &Listed, files: &'f [Found]) -> Result<&'f Found, PluginError> {
        let fits: Vec<&Found> = files.iter().filter(|f| is_called(&f.name, &listed.name)).collect();
        match fits.as_slice() {
            [one] => Ok(one),
            [first, second, ..] => {
                Err(PluginError::new(listed, both(&listed.name, &first.path, &second.path)))
            }
            [] => Err(PluginError::new(listed, self.absent(&listed.name, files))),
        }
    }

    /// Says where a plugin was looked for and what is nearest.
    fn absent(&self, name: &str, files: &[Found]) -> String {
        let folders: Vec<String> = self.folders.iter().map(|f| f.display().to_string()).collect();
        let mut told = format!("is not there; looked in {}", folders.join(", "));
        let mut near: Vec<(f64, &str)> =
            files.iter().map(|f| (alike(name, &f.name), f.name.as_str())).filter(|n| n.0 > ALIKE).collect();
        near.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(b.1)));
        near.dedup_by_key(|n| n.1);
        let near: Vec<String> = near.iter().take(3).map(|n| format!("{:?}", n.1)).collect();
        let known: Vec<&str> = files.iter().map(|f| f.name.as_str()).collect();
        let _ = match (near.as_slice(), known.len()) {
            ([], 0) => write!(told, "; no plugin lies there: build some, or set plugin_path to their folder"),
            ([], 1..=SHORT_LIST) => write!(told, "; there are {}", known.join(", ")),
            ([], _) => write!(told, "; `plugfold plugins list` names those that are"),
            (near, _) => write!(told, "; did you mean {}?", near.join(" or ")),
        };
        told
    }
}

/// Reads libraries on all cores. The kernels' pool of threads is not sized yet.
fn read_all(files: &[&Found]) -> Vec<Result<Library, String>> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = files.len().div_ceil(cores).max(1);
    let read = |files: &[&Found]| files.iter().map(|found| Library::read(found)).collect::<Vec<_>>();
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            files.chunks(share).map(|part| (part.len(), scope.spawn(move || read(part)))).collect();
        let failed = |len| vec![Err("it cannot be read: a thread failed".to_owned()); len];
        threads.into_iter().flat_map(|(len, thread)| thread.join().unwrap_or_else(|_| failed(len))).collect()
    })
}

fn both(id: &str, first: &Path, second: &Path) -> String {
    format!("{} and {} are both plugin {id}: remove one", first.display(), second.display())
}

/// How alike a name in a list and a plugin's folder name are; a number in front may be left out.
fn alike(asked: &str, name: &str) -> f64 {
    let asked = asked.replace('_', "-");
    let bare = name.split_once('-').map_or(name, |(id, rest)| if is_number(id) { rest } else { name });
    strsim::jaro_winkler(&asked, name).max(strsim::jaro_winkler(&asked, bare))
}

fn is_number(id: &str) -> bool {
    id.len() == 4 && id.bytes().all(|b| b.is_ascii_digit())
}

/// The id in a name as lists have it: `0003` of `0003-prefill-rows`, `base-mtp` of itself.
pub fn plugin_id(name: &str) -> &str {
    match name.split_once('-') {
        Some((id, _)) if is_number(id) => id,
        _ => name,
    }
}

/// Whether two names, as lists have them, mean one plugin.
pub fn same_plugin(one: &str, other: &str) -> bool {
    plugin_id(one) == plugin_id(other)
}

/// Whether a plugin's folder name is what a list asks for: the same, or its number.
fn is_called(name: &str, asked: &str) -> bool {
    name == asked || (is_number(asked) && name.strip_prefix(asked).is_some_and(|r| r.starts_with('-')))
}

/// The plugin that a file would be by its name.
fn name_of(path: &Path) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    let name = file.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    if name.is_empty() || name.contains('-') {
        // Cargo's own copies carry a hash after a dash.
        return None;
    }
    Some(name.replace('_', "-"))
}

/// File name of a plugin.
pub fn file_name(name: &str) -> String {
    format!("{PREFIX}{}{SUFFIX}", name.replace('-', "_"))
}

impl Library {
    /// Reads a library's note.
    ///
    /// # Errors
    /// Why it cannot be used, in words: no library, no note, a note of another kind, a manifest that does not parse or
    /// belongs to a plugin of another name.
    pub fn read(found: &Found) -> Result<Self, String> {
        let size = std::fs::metadata(&found.path).map_err(|e| format!("it cannot be read: {e}"))?.len();
        if size > MOST_BYTES {
            return Err(format!("it has {size} bytes, a plugin may have {MOST_BYTES}: strip it"));
        }
        let bytes = std::fs::read(&found.path).map_err(|e| format!("it cannot be read: {e}"))?;
        let note = note_of(&bytes)?;
        let manifest = Manifest::parse(&note.manifest, "its manifest").map_err(|e| e.to_string())?;
        let folder = manifest.label();
        if folder != found.name {
            return Err(format!(
                "it holds plugin {folder}, which its file name does not say: call it {}",
                file_name(&folder)
            ));
        }
        let digest = Sha256::digest(&bytes);
        let hash = digest.iter().fold(String::with_capacity(64), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        });
        Ok(Self { name: found.name.clone(), path: found.path.clone(), hash, note, manifest })
    }
}

/// The note in a library's bytes, of this major version and for this machine.
fn note_of(bytes: &[u8]) -> Result<Note, String> {
    if !bytes.starts_with(b"\x7fELF") {
        return Err("it is no shared library: build the plugin and copy its .so here".into());
    }
    let file = object::File::parse(bytes)
        .map_err(|e| format!("its file is damaged ({e}): build it again or copy it whole"))?;
    let section = file.section_by_name(NOTE_SECTION).ok_or_else(|| {
        format!("it has no section {NOTE_SECTION}: it is no plugin, or lacks plugfold_abi::export!")
    })?;
    let data =
        section.data().map_err(|e| format!("its file is damaged ({e}): build it again or copy it whole"))?;
    let note = Note::parse(data).map_err(|e| format!("{e}: build it against this host's plugfold-abi"))?;
    let here = Note::this_target();
    let wrong: BTreeMap<&str, (String, String)> = [
        ("boundary version", (MAJOR.to_string(), note.major.to_string())),
        ("target", (here, note.target.clone())),
        ("panic strategy", ("unwind".to_owned(), note.panic.clone())),
    ]
    .into_iter()
    .filter(|(_, (ours, theirs))| ours != theirs)
    .collect();
    if wrong.is_empty() {
        return Ok(note);
    }
    let lines: Vec<String> =
        wrong.iter().map(|(what, (ours, theirs))| format!("{what} {theirs} (this host: {ours})")).collect();
    Err(format!("it was built for {}: rebuild it for this host", lines.join(", ")))
}

/// Whether a file that is called like a plugin is a compiler plugin of the workspace, which cargo puts beside it.
pub fn is_compiler_plugin(path: &Path) -> bool {
    let Ok(bytes) = std::fs::read(path) else { return false };
    let Ok(file) = object::File::parse(&*bytes) else { return false };
    file.dynamic_symbols().any(|s| s.name().is_ok_and(|n| n.contains("rustc_proc_macro_decls")))
}

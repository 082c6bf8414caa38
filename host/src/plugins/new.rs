//! A new plugin: a crate that builds, loads and passes its test, with one knob to begin from.

use std::path::{Path, PathBuf};

use super::PluginError;

/// Numbers that new plugins get; those below belong to the catalogue.
const OWN_NUMBERS: std::ops::RangeInclusive<u32> = 9000..=9999;

const CARGO: &str = include_str!("template/Cargo.toml.in");
const MANIFEST: &str = include_str!("template/plugin.toml.in");
const SOURCE: &str = include_str!("template/lib.rs.in");
const README: &str = include_str!("template/README.md.in");

/// A plugin that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Folder name, as `9000-my-idea`.
    pub name: String,
    /// Its folder.
    pub folder: PathBuf,
}

/// The workspace that a folder is in: the nearest above it with `plugins/` and a `Cargo.toml`.
///
/// # Errors
/// There is none.
pub fn workspace(from: &Path) -> Result<PathBuf, PluginError> {
    let is_root = |dir: &&Path| dir.join("plugins").is_dir() && dir.join("core/abi/Cargo.toml").is_file();
    from.ancestors().find(is_root).map(Path::to_owned).ok_or_else(|| {
        PluginError::general(format!(
            "{} is not inside Plugfold's sources: go to where its Cargo.toml and plugins/ are",
            from.display()
        ))
    })
}

/// Writes a plugin of a name into `plugins/`; a name without a number gets the first free one.
///
/// # Errors
/// A name that is none, is taken, or a folder that cannot be written.
pub fn write(root: &Path, name: &str) -> Result<Written, PluginError> {
    let wrong = |why: String| PluginError::general(format!("plugins new {name}: {why}"));
    let taken: Vec<String> = std::fs::read_dir(root.join("plugins"))
        .map_err(|e| wrong(format!("{}/plugins cannot be read: {e}", root.display())))?
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .collect();
    let has_number = |folder: &str, id: &str| folder.split('-').next() == Some(id);
    let (id, bare) = match name.split_once('-') {
        Some((id, bare)) if id.len() == 4 && id.bytes().all(|b| b.is_ascii_digit()) => (id.to_owned(), bare),
        _ => {
            let free =
                OWN_NUMBERS.map(|n| format!("{n:04}")).find(|id| !taken.iter().any(|t| has_number(t, id)));
            (free.ok_or_else(|| wrong("all numbers from 9000 to 9999 are taken".into()))?, name)
        }
    };
    let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let shaped =
        bare.starts_with(|c: char| c.is_ascii_lowercase()) && !bare.ends_with('-') && !bare.contains("--");
    if !shaped || !bare.chars().all(good) || bare.len() > 40 {
        return Err(wrong("a name has small letters, digits and single `-`, 40 at most, as my-idea".into()));
    }
    if let Some(other) = taken.iter().find(|t| has_number(t, &id)) {
        return Err(wrong(format!("plugins/{other} has the number {id} already: give another, or none")));
    }
    let name = format!("{id}-{bare}");
    let folder = root.join("plugins").join(&name);
    let fill = |text: &str| {
        text.replace("@ID@", &id)
            .replace("@BARE@", bare)
            .replace("@NAME@", &name)
            .replace("@LIB@", &name.replace('-', "_"))
    };
    let files =
        [("Cargo.toml", CARGO), ("plugin.toml", MANIFEST), ("src/lib.rs", SOURCE), ("README.md", README)];
    let put = |(file, text): (&str, &str)| {
        let path = folder.join(file);
        std::fs::create_dir_all(path.parent().unwrap_or(&folder))?;
        std::fs::write(path, fill(text))
    };
    files.into_iter().try_for_each(put).map_err(|e| wrong(format!("{}: {e}", folder.display())))?;
    Ok(Written { name, folder })
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_manifest::Manifest;

    fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for folder in ["plugins/9000-taken", "core/abi"] {
            std::fs::create_dir_all(root.path().join(folder)).unwrap();
        }
        std::fs::write(root.path().join("core/abi/Cargo.toml"), "").unwrap();
        root
    }

    #[test]
    fn a_new_plugin_gets_a_number_and_a_manifest_that_parses() {
        let root = root();
        let written = write(root.path(), "my-idea").unwrap();
        assert_eq!(written.name, "9001-my-idea");
        let text = std::fs::read_to_string(written.folder.join("plugin.toml")).unwrap();
        let manifest = Manifest::parse(&text, "plugin.toml").unwrap();
        assert_eq!(manifest.label(), "9001-my-idea");
        assert_eq!(manifest.knobs.len(), 1);
        for file in ["Cargo.toml", "src/lib.rs", "README.md"] {
            let text = std::fs::read_to_string(written.folder.join(file)).unwrap();
            assert!(!text.contains('@') && text.contains("9001"), "{file}: {text}");
        }
        assert_eq!(write(root.path(), "9500-other").unwrap().name, "9500-other");
        assert_eq!(workspace(&written.folder).unwrap(), root.path());
    }

    #[test]
    fn names_that_are_none_or_taken_are_refused() {
        let root = root();
        for name in ["", "My-Idea", "a--b", "a-", "../x", "9000-new", "a b", "9001-", "9001-9"] {
            let told = write(root.path(), name).unwrap_err().to_string();
            assert!(told.starts_with(&format!("plugins new {name}: ")), "{told}");
        }
        assert!(workspace(Path::new("/")).is_err());
    }
}

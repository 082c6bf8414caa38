//! The folders of prepared weights: `ROOT/MODEL-REVISION/KEY/rankR` with `data.bin` and `manifest.json`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use plugfold_abi::points::PreparedKey;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// Version of the folders.
pub const FORMAT: u32 = 1;
/// Bytes that are hashed, and read, at a time.
pub const CHUNK: u64 = 64 << 20;
/// The bytes.
pub const DATA: &str = "data.bin";
/// What is said about them.
pub const MANIFEST: &str = "manifest.json";
/// Longest manifest: a hash a chunk, and the index.
const MAX_MANIFEST: u64 = 1 << 28;
/// Keys of a model and rank that are kept.
const KEPT: usize = 2;
/// Hexadecimal digits of a key in a folder's name.
const SHORT: usize = 16;

/// What a folder holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// SHA-256 of the lines.
    pub key: String,
    /// What decides a byte: `name = value`.
    pub lines: Vec<String>,
    /// Name of the checkpoint's folder.
    pub model: String,
    /// Seconds since 1970.
    pub created: u64,
    /// Bytes of the data.
    pub bytes: u64,
    /// Bytes a chunk.
    pub chunk: u64,
    /// SHA-256 of every chunk.
    pub hashes: Vec<String>,
    /// The engine's description of the bytes, in hexadecimal.
    pub index: String,
    /// SHA-256 of the description.
    pub index_hash: String,
}

/// Bytes in hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    let mut text = String::with_capacity(bytes.len() * 2);
    for byte in bytes {
        // Writing into a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text
}

/// The opposite of [`hex`]; nothing for another text.
pub fn unhex(text: &str) -> Option<Vec<u8>> {
    let digit = |c: &u8| char::from(*c).to_digit(16);
    let (pairs, []) = text.as_bytes().as_chunks::<2>() else { return None };
    pairs.iter().map(|[a, b]| Some((digit(a)? * 16 + digit(b)?) as u8)).collect()
}

/// SHA-256 in hexadecimal.
pub fn hash(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

impl Manifest {
    /// Reads and checks a folder's manifest and the size of its data.
    ///
    /// # Errors
    /// What is wrong with them.
    pub fn read(folder: &Path) -> Result<Self, String> {
        let path = folder.join(MANIFEST);
        let told = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
        let length = fs::metadata(&path).map_err(|e| told(&e))?.len();
        if length > MAX_MANIFEST {
            return Err(told(&format_args!("has {length} bytes; at most {MAX_MANIFEST} are read")));
        }
        let text = fs::read(&path).map_err(|e| told(&e))?;
        let manifest: Self = serde_json::from_slice(&text).map_err(|e| told(&e))?;
        manifest.check().map_err(|e| told(&e))?;
        let data = folder.join(DATA);
        let bytes = fs::metadata(&data).map_err(|e| format!("{}: {e}", data.display()))?.len();
        if bytes != manifest.bytes {
            return Err(format!("{} has {bytes} bytes, must have {}", data.display(), manifest.bytes));
        }
        Ok(manifest)
    }

    fn check(&self) -> Result<(), String> {
        if self.format != FORMAT || self.chunk != CHUNK {
            let (format, chunk) = (self.format, self.chunk);
            return Err(format!(
                "is of format {format} in chunks of {chunk}: this build reads {FORMAT} in {CHUNK}"
            ));
        }
        if self.key != hash(self.lines.join("\n").as_bytes()) {
            return Err("its key is not that of its lines".into());
        }
        let chunks = self.bytes.div_ceil(CHUNK);
        if self.hashes.len() as u64 != chunks {
            return Err(format!("has {} hashes for {chunks} chunks", self.hashes.len()));
        }
        match unhex(&self.index) {
            Some(index) if hash(&index) == self.index_hash => Ok(()),
            _ => Err("its index has another hash".into()),
        }
    }

    /// The engine's description of the bytes.
    pub fn index_bytes(&self) -> Vec<u8> {
        // Checked when it was read.
        unhex(&self.index).unwrap_or_default()
    }
}

/// Where things lie.
#[derive(Clone, Debug)]
pub struct Root(pub PathBuf);

/// A key with its place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// SHA-256 of the lines.
    pub key: String,
    /// The lines.
    pub lines: Vec<String>,
    /// Name of the checkpoint's folder.
    pub model: String,
    /// The rank's folder.
    pub folder: PathBuf,
}

/// A name that is one plain part of a path.
fn plain(name: &str) -> String {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let name: String = name.chars().map(safe).collect();
    if name.trim_matches('.').is_empty() { "model".into() } else { name }
}

impl Root {
    /// The place of a key.
    pub fn place(&self, of: &PreparedKey<'_>) -> Place {
        let lines: Vec<String> = of.lines.lines().map(ToOwned::to_owned).collect();
        let key = hash(lines.join("\n").as_bytes());
        let revision = lines.iter().find_map(|l| l.strip_prefix("checkpoint = ")).unwrap_or_default();
        let revision: String = revision.chars().take(8).collect();
        let model = plain(&of.model);
        let folder =
            self.0.join(format!("{model}-{revision}")).join(&key[..SHORT]).join(format!("rank{}", of.rank));
        Place { key, lines, model, folder }
    }

    /// Every rank's folder under the root, with what its manifest says or what is wrong with it.
    ///
    /// # Errors
    /// A folder that cannot be listed.
    pub fn folders(&self) -> io::Result<Vec<(PathBuf, Result<Manifest, String>)>> {
        let mut found = Vec::new();
        for model in inside(&self.0)? {
            for key in inside(&model)? {
                for rank in inside(&key)? {
                    let manifest = Manifest::read(&rank);
                    found.push((rank, manifest));
                }
            }
        }
        found.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(found)
    }

    /// Deletes all but the newest keys of a model and rank.
    ///
    /// # Errors
    /// A folder that cannot be deleted.
    pub fn prune(&self, of: &Place) -> io::Result<()> {
        let rank = of.folder.file_name();
        let same = |(folder, manifest): (PathBuf, Result<Manifest, String>)| {
            let manifest = manifest.ok().filter(|m| m.model == of.model)?;
            (folder.file_name() == rank).then_some((manifest.created, folder))
        };
        let mut all: Vec<(u64, PathBuf)> = self.folders()?.into_iter().filter_map(same).collect();
        // The one just written is never among those that go, whatever the clock says.
        all.retain(|(_, folder)| *folder != of.folder);
        all.sort_unstable();
        let older = all.len().saturating_sub(KEPT - 1);
        for (_, folder) in all.into_iter().take(older) {
            fs::remove_dir_all(&folder)?;
            // The key's folder goes with its last rank.
            if let Some(key) = folder.parent() {
                let _ = fs::remove_dir(key);
            }
        }
        Ok(())
    }
}

/// Folders inside of a folder, but for those that are being written.
fn inside(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(folder) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    let mut all = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() && !entry.file_name().to_string_lossy().starts_with('.') {
            all.push(entry.path());
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use plugfold_abi::Text;

    #[test]
    fn hexadecimal_there_and_back() {
        assert_eq!(unhex(&hex(&[0, 15, 16, 255])), Some(vec![0, 15, 16, 255]));
        assert_eq!(unhex("0"), None);
        assert_eq!(unhex("0g"), None);
        assert_eq!(unhex("é0"), None);
    }

    #[test]
    fn a_place_never_leaves_the_root() {
        let root = Root("/prepared".into());
        for (model, start) in
            [("flash", "flash-"), ("../../etc", ".._.._etc-"), ("..", "model-"), ("", "model-")]
        {
            let lines = "checkpoint = 0123456789abcdef\nrank = 0 of 2";
            let key = PreparedKey { model: Text::from(model), rank: 0, ranks: 2, lines: Text::from(lines) };
            let place = root.place(&key);
            let rest = place.folder.strip_prefix("/prepared").unwrap();
            assert_eq!(rest.components().count(), 3, "{model}");
            assert!(rest.to_string_lossy().starts_with(&format!("{start}01234567/")), "{}", rest.display());
            assert!(place.folder.ends_with("rank0"));
        }
    }
}

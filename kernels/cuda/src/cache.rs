//! Compiled kernels on disk, keyed by source, options, architecture and the compiler's version.
//!
//! A file is its key's digest, the digest of the code, then the code: one that was cut short or changed is made again.
//! Where there is no compiler, code for the same source, options and architecture by any version is taken, and said so.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::compile::{Nvrtc, OPTIONS};
use crate::error::CudaError;
use crate::source::Source;

/// Says where the cache is; without it, `$XDG_CACHE_HOME/plugfold/cuda` or `~/.cache/plugfold/cuda`.
pub const CACHE_VARIABLE: &str = "PLUGFOLD_CUDA_CACHE";

/// Where code came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A file of the cache.
    Disk,
    /// Compiled now; the text says why a file that was there did not do.
    Compiled(Option<String>),
    /// A file of the cache made by a compiler of this version, there being no compiler here.
    OtherCompiler(String),
}

/// A folder of compiled kernels.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

const MAGIC: &[u8; 8] = b"plugcub1";

fn key(source: &Source, arch: &str) -> String {
    let mut hash = Sha256::new();
    for part in [&source.whole()[..], arch].into_iter().chain(OPTIONS) {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hex(&hash.finalize()[..12])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, b| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{b:02x}");
        text
    })
}

impl Cache {
    /// A cache in a folder.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The user's.
    ///
    /// # Errors
    /// When nothing says where it would be.
    pub fn of_user() -> Result<Self, CudaError> {
        let from = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let folder = from(CACHE_VARIABLE)
            .or_else(|| from("XDG_CACHE_HOME").map(|p| p.join("plugfold/cuda")))
            .or_else(|| from("HOME").map(|p| p.join(".cache/plugfold/cuda")));
        folder.map(Self::at).ok_or_else(|| CudaError::Cache {
            path: "(none)".into(),
            why: format!("neither {CACHE_VARIABLE} nor HOME says where it is"),
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn path(&self, source: &Source, arch: &str, compiler: &str) -> PathBuf {
        self.folder.join(format!("{}-{arch}-{}-nvrtc{compiler}.cubin", source.name, key(source, arch)))
    }

    /// Code of a source: from disk, or compiled and put there.
    ///
    /// # Errors
    /// A source that does not compile, or no compiler and no file.
    pub fn code(&self, source: &Source, arch: &str) -> Result<(Vec<u8>, Origin), CudaError> {
        let compiler = match Nvrtc::get() {
            Ok(compiler) => compiler,
            Err(why) => {
                return self.any(source, arch).ok_or_else(|| CudaError::NoCompiler {
                    file: format!("{}.cu", source.name),
                    cache: self.folder.display().to_string(),
                    why,
                });
            }
        };
        let path = self.path(source, arch, &compiler.version());
        let broken = match std::fs::read(&path) {
            Ok(bytes) => match unpack(&bytes) {
                Ok(code) => return Ok((code.to_vec(), Origin::Disk)),
                Err(why) => Some(format!("{}: {why}", path.display())),
            },
            Err(_) => None,
        };
        let compiled = compiler.compile(source, arch)?;
        // A cache that cannot be written costs the next start's time, not this one's.
        let written = self.write(&path, &compiled.cubin);
        let why = broken.or_else(|| written.err().map(|e| e.to_string()));
        Ok((compiled.cubin, Origin::Compiled(why)))
    }

    fn any(&self, source: &Source, arch: &str) -> Option<(Vec<u8>, Origin)> {
        let start = format!("{}-{arch}-{}-nvrtc", source.name, key(source, arch));
        let mut found: Vec<PathBuf> =
            std::fs::read_dir(&self.folder).ok()?.flatten().map(|e| e.path()).collect();
        found.sort();
        found.iter().rev().find_map(|path| {
            let version =
                path.file_name()?.to_str()?.strip_prefix(&start)?.strip_suffix(".cubin")?.to_owned();
            let bytes = std::fs::read(path).ok()?;
            Some((unpack(&bytes).ok()?.to_vec(), Origin::OtherCompiler(version)))
        })
    }

    fn write(&self, path: &Path, code: &[u8]) -> Result<(), CudaError> {
        let said =
            |e: std::io::Error| CudaError::Cache { path: path.display().to_string(), why: e.to_string() };
        std::fs::create_dir_all(&self.folder).map_err(said)?;
        // Under another name first: other processes see the whole file or none.
        let under_way = path.with_extension(format!("tmp{}", std::process::id()));
        std::fs::write(&under_way, pack(code)).map_err(said)?;
        std::fs::rename(&under_way, path).map_err(said)
    }
}

fn pack(code: &[u8]) -> Vec<u8> {
    [&MAGIC[..], &Sha256::digest(code), code].concat()
}

fn unpack(bytes: &[u8]) -> Result<&[u8], String> {
    let rest = bytes.strip_prefix(MAGIC).ok_or("it is no compiled kernel of this version")?;
    let (digest, code) = rest.split_at_checked(32).ok_or("it is cut short")?;
    if Sha256::digest(code)[..] == *digest { Ok(code) } else { Err("its digest is another".into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::find;

    #[test]
    fn keys_depend_on_source_and_architecture() {
        let (norm, act) = (find("norm").unwrap(), find("act").unwrap());
        let all = [key(norm, "sm_90a"), key(norm, "sm_121a"), key(act, "sm_90a")];
        assert!(all[0] != all[1] && all[0] != all[2]);
        assert_eq!(all[0], key(norm, "sm_90a"));
    }

    #[test]
    fn any_change_of_a_file_is_found() {
        let packed = pack(b"code of a kernel");
        assert_eq!(unpack(&packed), Ok(&b"code of a kernel"[..]));
        for at in 0..packed.len() {
            let mut changed = packed.clone();
            changed[at] ^= 1;
            assert!(unpack(&changed).is_err(), "byte {at}");
            assert!(unpack(&packed[..at]).is_err(), "cut at {at}");
        }
    }
}

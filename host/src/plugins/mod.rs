//! Plugins: finding them, proving that they can be loaded, loading them and living with them.
//!
//! From a list of names to a running engine: [`library`] finds the files and reads their notes, [`order`] sorts them,
//! [`probe`] loads each in a child process once, [`life`] loads them here and takes them through their life in step with
//! the other ranks. Any refusal ends the start on every rank with one line that names plugin, profile line and mend.

mod agree;
mod declared;
pub mod docs;
pub mod library;
pub mod life;
mod load;
pub mod new;
pub mod null;
pub mod order;
pub mod probe;
pub mod sentinel;
pub mod services;
pub mod settle;
mod verdicts;

use std::path::PathBuf;

pub use library::{Library, Search, plugin_id, same_plugin};

pub use crate::knobs::Listed;

/// Where caches are kept instead of the user's cache folder.
pub const CACHE_DIR_ENV: &str = "PLUGFOLD_CACHE_DIR";

/// Why the plugins of a list cannot run: one line that names plugin, place and mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PluginError(String);

impl PluginError {
    /// What is wrong with one plugin; `why` continues the sentence that begins with its name.
    pub fn new(listed: &Listed, why: impl std::fmt::Display) -> Self {
        Self(format!("plugin {} ({}) {why}", listed.name, listed.place))
    }

    /// What is wrong with no plugin in particular.
    pub fn general(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

/// The folder for caches: of verdicts, of the sentinel, of plugins.
///
/// # Errors
/// When neither the variable nor a home folder says where.
pub fn cache_folder() -> Result<PathBuf, PluginError> {
    let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let home = || set("HOME").map(|home| home.join(".cache"));
    let folder = set(CACHE_DIR_ENV)
        .or_else(|| set("XDG_CACHE_HOME").or_else(home).map(|cache| cache.join("plugfold")));
    folder.ok_or_else(|| {
        PluginError::general(format!("there is no folder for caches: set {CACHE_DIR_ENV} to one"))
    })
}
